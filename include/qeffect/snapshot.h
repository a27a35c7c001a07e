/* snapshot.h - the state of a team as it was at one commit, in memory of the host. Taken between steps, it can be
 * written to files while the next steps run; put into another team, of any stages, ranks and mode, it makes that team
 * go on with the same bits. Nothing ephemeral is in it: graphs, slots, caches and streams are made again. */
#ifndef QEFFECT_SNAPSHOT_H
#define QEFFECT_SNAPSHOT_H

#include "qeffect/step.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A counter that outlives a step: the version of a weight or the epoch of a scale. Both only ever rise. */
typedef struct qe_snapshot_count {
    const char *name; /* "model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj.dy" */
    uint32_t weight;  /* the model's weight index */
    int role;         /* epoch: QE_SCALE_X ...; version: -1 */
    uint64_t count;
} qe_snapshot_count;

/* Names and order depend on the model and the recipe alone, not on stages or ranks. The snapshot owns everything. */
typedef struct qe_snapshot {
    qe_state_tensor *tensors;  /* [tensor_count] in the order of the hash; values point into `values` */
    qe_snapshot_count *counts; /* [count_count] weights in their order, then scales in theirs */
    uint32_t tensor_count, count_count;
    float *values;
    uint64_t value_count;
    char (*names)[QE_NAME_BYTES + 16]; /* of tensors, then of counts */
    struct qe_twin *twins; /* a rank each, or NULL: taking copies to the host at once */
    qe_team *team;         /* of the twins */
    int is_kept;           /* taken, and with the twins alone */
} qe_snapshot;

/* Memory for the state of teams of this model and recipe, every page of it in use from now on, so that taking a
 * snapshot waits for nothing. Values are those of a beginning: 0, scales 1.
 * Requires:   the team trains. On failure: QE_ERROR_MEMORY. Owns: the caller destroys. */
qe_status qe_snapshot_create(qe_team *team, qe_snapshot **snapshot_out, qe_error *error_out);
void qe_snapshot_destroy(qe_snapshot *snapshot);
/* Where the values of a tensor lie, to fill them. */
float *qe_snapshot_values(const qe_snapshot *snapshot, uint32_t tensor);

/* From now on taking copies within the devices, which is fast; qe_snapshot_fetch brings the values. Where devices have
 * no such copies, or no memory for them (as much as masters and moments take), nothing changes.
 * Owns: the twins live until the snapshot is destroyed, before the team. */
void qe_snapshot_twin(qe_team *team, qe_snapshot *snapshot);
/* Brings what was taken to the host; does nothing where it is there. Thread: any, while the team goes on.
 * On failure: QE_ERROR_DEVICE; the snapshot is of no step. */
qe_status qe_snapshot_fetch(qe_snapshot *snapshot, qe_error *error_out);

/* Copies the team's state. Thread: the caller's, between steps. Capture: forbidden.
 * On failure: QE_ERROR_DEVICE; what the snapshot holds is of no step. */
qe_status qe_team_snapshot_take(qe_team *team, qe_snapshot *snapshot, qe_error *error_out);
/* Makes the snapshot the team's state: weights get the recorded versions (or the next ones, where theirs are as high
 * already), scales their epochs; all caches are empty, and guards are armed anew. Pending amaxes are dropped.
 * Requires:   the snapshot was made for this model and recipe. Thread: the caller's, between steps.
 * On failure: QE_ERROR_ARGUMENT: it is of another model or recipe, nothing has changed. QE_ERROR_DEVICE: the team is
 *             torn and refuses to go on. */
qe_status qe_team_snapshot_put(qe_team *team, const qe_snapshot *snapshot, qe_error *error_out);

#ifdef __cplusplus
}
#endif
#endif
