/* checkpoint.h - the state of a run in a directory: safetensors files that others read, and a manifest written last.
 *
 * One checkpoint is a directory `step-00000100`:
 *
 *     model.safetensors      parameters under their Hugging Face names, with config.json: transformers loads it
 *     optimizer.safetensors  moments
 *     scales.safetensors     scales, amax histories, epochs (where the recipe keeps any)
 *     manifest.json          everything else, the size and XXH3-128 of every file, and one of itself
 *
 * It is written beside its place, every file and the directory synced, renamed, and the parent synced: what has the
 * name is whole. A directory without a valid manifest is no checkpoint. What is read is judged as if anybody had
 * written it: names, sizes, offsets, counts; nothing outside the directory is opened. docs/checkpoints.md has the
 * format. */
#ifndef QEFFECT_CHECKPOINT_H
#define QEFFECT_CHECKPOINT_H

#include "qeffect/rule.h"
#include "qeffect/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    QE_DIGEST_BYTES = 33,                     /* 32 hexadecimal digits and the terminator: a hash, or a run */
    QE_CHECKPOINT_NAME_BYTES = 32,            /* "step-" and up to 20 digits */
    QE_CHECKPOINT_FILES_MAX = 4096,           /* files of one checkpoint: a part per rank and kind, with room */
    QE_MANIFEST_BYTES_MAX = 64 << 20,         /* some 100 bytes per weight: half a million weights */
    QE_LINEAGE_MAX = 1000                     /* times that a run was continued as another */
};

/* A name and a text; both owned by the list. */
typedef struct qe_fact { char *name, *value; } qe_fact;
typedef struct qe_facts { qe_fact *list; size_t count, capacity; } qe_facts;
/* A name and a number below 2^63. */
typedef struct qe_count { char *name; uint64_t count; } qe_count;
typedef struct qe_counts { qe_count *list; size_t count, capacity; } qe_counts;

/* Copies both texts. On failure: QE_ERROR_MEMORY; the list is unchanged. */
qe_status qe_facts_add(qe_facts *facts, const char *name, const char *value, qe_error *error_out);
/* Frees the list and what it owns; it is empty then. */
void qe_facts_deinit(qe_facts *facts);
/* NULL when there is none of that name. */
const char *qe_facts_find(const qe_facts *facts, const char *name);
/* As qe_facts_add. */
qe_status qe_counts_add(qe_counts *counts, const char *name, uint64_t count, qe_error *error_out);
/* NULL when there is none of that name. */
const qe_count *qe_counts_find(const qe_counts *counts, const char *name);

/* A run from its beginning, or from where it was continued with something changed that decides the bits. */
typedef struct qe_lineage {
    char run[QE_DIGEST_BYTES]; /* names it: random */
    uint64_t from_step;        /* 0: from the beginning */
    char *changes;             /* what was changed there, for people; "" at the beginning */
} qe_lineage;

typedef struct qe_manifest_file {
    char *name;
    uint64_t bytes;
    char digest[QE_DIGEST_BYTES];
} qe_manifest_file;

/* What a checkpoint knows beside its tensors. Zeroed is empty; deinit frees what the lists own. */
typedef struct qe_manifest {
    uint64_t step;                    /* steps done: optimizer, learning rate and data go on with step + 1 */
    uint64_t serial;                  /* saves into this directory so far; filled in by the writer. The newest is that
                                       * of the highest, whatever its step: a run may go back, another may begin */
    char state_hash[QE_DIGEST_BYTES]; /* as qe_team_state_hash */
    qe_lineage *lineage;              /* the last one is this run */
    size_t lineage_count;
    qe_facts settings;   /* every key of the configuration, as it would be written */
    qe_facts device;     /* "backend", "identity" */
    qe_facts algorithms; /* chosen ones by name: kernel level, BLAS core; on a GPU one per GEMM and attention */
    qe_facts libraries;  /* versions of what computes */
    qe_facts schedule;   /* name, ranks, stages, microbatches, accumulation order, plan hash: recorded */
    qe_facts program;    /* which version wrote it */
    struct {
        char *name;                   /* of the data, for people */
        char digest[QE_DIGEST_BYTES]; /* of its tokens */
        uint64_t tokens, train_windows;
        uint64_t position;            /* sequences that training has used; the next one is of this number */
    } data;
    struct { char *algorithm; uint64_t seed, offset; } rng;
    double learning_rate;             /* of the last step; the rest follows from settings and step */
    qe_counts versions;  /* of weights */
    qe_counts epochs;    /* of scales */
    qe_manifest_file *files; /* filled in by the writer and the reader */
    size_t file_count;
} qe_manifest;

/* Frees what the manifest owns and zeroes it. */
void qe_manifest_deinit(qe_manifest *manifest);
/* Appends a run. On failure: QE_ERROR_MEMORY, QE_ERROR_LIMIT; unchanged. */
qe_status qe_manifest_add_lineage(qe_manifest *manifest, const char *run, uint64_t from_step, const char *changes,
                                  qe_error *error_out);
/* Name of this run. */
const char *qe_manifest_run(const qe_manifest *manifest);

/* --- writing --- */

typedef struct qe_checkpoint_part {
    const char *file; /* "model.safetensors" */
    const qe_tensor *tensors;
    size_t count;
} qe_checkpoint_part;

/* Everything of one checkpoint; the caller's memory. serial, state_hash and files of the manifest are filled in: the
 * hash is over all F32 tensors in the order of parts and tensors. */
typedef struct qe_checkpoint_content {
    qe_manifest *manifest;
    qe_store_model model; /* config.json */
    const qe_checkpoint_part *parts;
    size_t part_count;
    /* Called once, where writing begins and on its thread, to bring what the parts and the manifest point to; NULL: it
     * is there. What it fails with, writing fails with. */
    qe_status (*gather)(void *context, qe_error *error_out);
    void *gather_context;
} qe_checkpoint_content;

/* A directory that checkpoints of one run are written to. It is locked until it is closed, and by the kernel until the
 * process is gone: two runs in one directory would delete each other's. */
typedef struct qe_checkpoint_folder qe_checkpoint_folder;

/* Makes the directory where there is none, and removes what dead writers left in it.
 * keep: complete checkpoints that stay, 0 for all.
 * On failure: QE_ERROR_IO (another run writes there: said so), QE_ERROR_MEMORY. Owns: the caller closes. */
qe_status qe_checkpoint_folder_open(const char *path, uint32_t keep, qe_checkpoint_folder **folder_out,
                                    qe_error *error_out);
void qe_checkpoint_folder_close(qe_checkpoint_folder *folder);

/* The checkpoint of this name was found to be damaged: it is not one of the `keep`, and the next save removes it.
 * On failure: QE_ERROR_MEMORY. */
qe_status qe_checkpoint_folder_distrust(qe_checkpoint_folder *folder, const char *name, qe_error *error_out);

/* Writes a checkpoint, then removes damaged ones, and the oldest beyond `keep` (keep 0: none). One of that step that is
 * there is replaced, whole by whole.
 * On failure: QE_ERROR_IO, QE_ERROR_MEMORY, QE_ERROR_ARGUMENT; the directory is as it was, but what could not be
 *             removed is removed by the next save. Thread: one per folder. */
qe_status qe_checkpoint_write(qe_checkpoint_folder *folder, const qe_checkpoint_content *content, qe_error *error_out);

/* A thread that writes while the next steps run. It works in small pieces and rests between them, so that it takes
 * `percent` of one processor at most (100: no rests), until somebody waits for it. */
typedef struct qe_checkpoint_writer qe_checkpoint_writer;

/* Requires: the folder outlives the writer. On failure: QE_ERROR_MEMORY, QE_ERROR_IO. Owns: the caller destroys. */
qe_status qe_checkpoint_writer_create(qe_checkpoint_folder *folder, unsigned percent,
                                      qe_checkpoint_writer **writer_out, qe_error *error_out);
/* Waits for what is being written. */
void qe_checkpoint_writer_destroy(qe_checkpoint_writer *writer);
/* Starts writing. Requires: idle. Owns: content and all it points to stay unchanged until the writer is idle. */
void qe_checkpoint_writer_start(qe_checkpoint_writer *writer, const qe_checkpoint_content *content);
/* 0 while something is being written. Never waits. */
int qe_checkpoint_writer_is_idle(qe_checkpoint_writer *writer);
/* Waits until idle and returns the outcome of the last write, once: QE_OK when there is none to tell. */
qe_status qe_checkpoint_writer_finish(qe_checkpoint_writer *writer, qe_error *error_out);

/* --- reading --- */

typedef struct qe_checkpoint qe_checkpoint;

/* Reads one checkpoint whole and verifies all of it.
 * On failure: QE_CONTRACT with *rule_out: files of another step (checkpoint.mixed) or run (checkpoint.run), an epoch
 *             that is not the manifest's (scale.epoch). QE_ERROR_FORMAT, QE_ERROR_IO, QE_ERROR_LIMIT, QE_ERROR_MEMORY:
 *             damaged, and how; QE_ERROR_UNSUPPORTED: a format of a later version. *rule_out is QE_RULE_NONE then.
 * Owns:       the caller closes. */
qe_status qe_checkpoint_open(const char *path, qe_checkpoint **checkpoint_out, qe_rule *rule_out, qe_error *error_out);
void qe_checkpoint_close(qe_checkpoint *checkpoint);
/* Lives until close. */
const qe_manifest *qe_checkpoint_manifest(const qe_checkpoint *checkpoint);
const char *qe_checkpoint_path(const qe_checkpoint *checkpoint);
/* Tensors of all its files, in the order of the manifest and of their data. */
size_t qe_checkpoint_count(const qe_checkpoint *checkpoint);
const qe_tensor *qe_checkpoint_at(const qe_checkpoint *checkpoint, size_t index);
/* By name; NULL when there is none. */
const qe_tensor *qe_checkpoint_find(const qe_checkpoint *checkpoint, const char *name);
/* The hash of the tensors as they lie there, which should be the manifest's state_hash. */
void qe_checkpoint_hash(const qe_checkpoint *checkpoint, char text_out[QE_DIGEST_BYTES]);

/* Is there a manifest in this directory, of whatever worth? */
int qe_checkpoint_is_one(const char *path);

/* Checkpoints in a directory: those without a manifest that can be read first, then the newest first. Nothing else of
 * them is judged. On failure: QE_ERROR_IO, QE_ERROR_MEMORY. Owns: the caller frees *names_out. */
typedef struct qe_checkpoint_name {
    char name[QE_CHECKPOINT_NAME_BYTES];
    uint64_t step;   /* of the name */
    uint64_t serial; /* UINT64_MAX: no manifest that can be read */
    uint8_t is_foreign; /* it may be good, but not for this program: of a later version of the format */
} qe_checkpoint_name;
qe_status qe_checkpoint_list(const char *path, qe_checkpoint_name **names_out, size_t *count_out, qe_error *error_out);

/* As qe_checkpoint_open, of one of the list of a directory: a link is not followed, and the manifest must be of the
 * step in the name. On failure: as qe_checkpoint_open. Owns: the caller closes. */
qe_status qe_checkpoint_open_listed(const char *path, const qe_checkpoint_name *name, qe_checkpoint **checkpoint_out,
                                    qe_rule *rule_out, qe_error *error_out);

/* Opens the newest complete checkpoint in a directory. `skipped` (may be NULL) is told of every one that is passed
 * over, with the error that names what is wrong with it.
 * On failure: QE_ERROR_IO: there is none; else that of the newest. */
typedef void (*qe_checkpoint_skipped)(void *context, const char *name, qe_rule rule, const qe_error *error);
qe_status qe_checkpoint_open_newest(const char *path, qe_checkpoint_skipped skipped, void *context,
                                    qe_checkpoint **checkpoint_out, qe_rule *rule_out, qe_error *error_out);

#ifdef __cplusplus
}
#endif
#endif
