/* snapshot_files.h - a snapshot as tensors of a checkpoint's files, and back. */
#ifndef QE_CLI_SNAPSHOT_FILES_H
#define QE_CLI_SNAPSHOT_FILES_H

#include "qeffect/checkpoint.h"
#include "qeffect/snapshot.h"

/* Tensors in the order of the hash, cut into files by kind; epochs of scales behind the histories. */
typedef struct qe_snapshot_parts {
    qe_tensor *tensors; /* of all parts; data lies in the snapshot and in `epochs` */
    int64_t *epochs;
    char **epoch_names;
    size_t epoch_count;
    qe_checkpoint_part parts[3];
} qe_snapshot_parts;

/* Adds a counter to the manifest for each of the snapshot's. The snapshot outlives the parts.
 * On failure: QE_ERROR_MEMORY; deinit all the same. */
qe_status qe_snapshot_parts_init(qe_snapshot_parts *parts, const qe_snapshot *snapshot, qe_manifest *manifest,
                                 qe_error *error_out);
void qe_snapshot_parts_deinit(qe_snapshot_parts *parts);
/* Takes over the snapshot's counters as they are now. */
void qe_snapshot_parts_update(qe_snapshot_parts *parts, const qe_snapshot *snapshot, qe_manifest *manifest);

/* Fills a snapshot from a checkpoint, by name. `adapts`: scales that are missing begin anew, and histories of another
 * length keep their newest entries; *adapted_out says whether that was so.
 * On failure: QE_CONTRACT: *rule_out is checkpoint.missing or checkpoint.shape. */
qe_status qe_snapshot_restore(qe_snapshot *snapshot, const qe_checkpoint *checkpoint, int adapts, int *adapted_out,
                              qe_rule *rule_out, qe_error *error_out);
/* The last word: what the devices hold is what was saved. On failure: QE_CONTRACT: checkpoint.state. */
qe_status qe_snapshot_verify(qe_team *team, const qe_checkpoint *checkpoint, qe_rule *rule_out, qe_error *error_out);

#endif
