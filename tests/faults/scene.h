/* scene.h - the commands whose calls fail in turn, what they begin with, and what must be found behind them. */
#ifndef QE_TESTS_SCENE_H
#define QE_TESTS_SCENE_H

#include <stddef.h>

typedef struct scene {
    const char *name;
    const char *arguments[24]; /* of the program; ends with NULL */
    int (*runs)(void);         /* instead of a command */
    const char *resumes[24];   /* a run that goes on from what a failed one left; none: nothing can */
    const char *start;         /* a folder that is copied to run/ before; NULL: there is none */
    const char *files_below;   /* calls on files count below here: "" is the whole scene */
    const char *writes;        /* a file that is whole or not there; NULL: none */
    int kinds;                 /* bits of fault_kind */
    int status;                /* of the undisturbed run */
    int is_json, is_train;     /* train: state_hash is compared, and the keys of the document; else all that is said */
    int expected_keys;         /* only the keys of the document: it holds times */
    int is_cold;               /* before the process has loaded OpenBLAS */
    /* Learnt from the undisturbed run. */
    char hash[40];
    char *expected, *written;
    long blocks_kept; /* what the program holds for the life of its process */
} scene;

scene *scene_all(size_t *count_out);
/* Files that scenes read; then, by undisturbed runs, checkpoints and weights. In the folder of the process. */
void scene_prepare(void);
void scene_warm(void);
/* run/ as it is before. */
void scene_restore(const scene *s);
int scene_run(const scene *s);
void scene_learn(scene *s);

/* All of a file of the scene; NULL where there is none. The caller frees. */
char *scene_file(const char *name);
int scene_same_keys(const char *one, const char *other);
/* What is wrong with what lies in the folder; NULL: nothing. */
const char *scene_files_wrong(const scene *s);
int scene_has_checkpoint(void);
/* Entries of run/ that only a writer at work may have. */
int scene_litter(void);
void scene_remove(const char *path);

#endif
