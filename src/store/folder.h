/* folder.h - inside of the store room: a directory by its descriptor, so that what a path means cannot change between
 * two calls. Names are single components; links are never followed. */
#ifndef QE_STORE_FOLDER_H
#define QE_STORE_FOLDER_H

#include "qeffect/checkpoint.h"
#include "store/pace.h"

struct qe_checkpoint_folder {
    char *path;     /* owned; as given */
    int descriptor; /* locked */
    uint32_t keep;
    uint64_t serial; /* of the last save */
    char (*distrusted)[QE_CHECKPOINT_NAME_BYTES]; /* damaged ones that somebody found */
    size_t distrusted_count;
};

/* "path/name" for messages; cut where it is too long. */
void qe_folder_text(const char *path, const char *name, char text_out[QE_ERROR_PATH_BYTES]);

/* A name below the directory that nobody has: ".qeffect-`kind`-`pid`-`n`", made as a directory.
 * Returns an errno. */
int qe_folder_make_beside(int parent, const char *kind, char name_out[QE_CHECKPOINT_NAME_BYTES * 2]);
/* Removes a directory and all in it, down to 16 levels; links are removed and not followed. Returns an errno. */
int qe_folder_remove(int parent, const char *name);
/* Gives a checkpoint its name: where that is taken, the two are exchanged and `from` is what was there.
 * Returns an errno. */
int qe_folder_publish(int parent, const char *from, const char *name);
/* Removes what dead writers left: partial and discarded directories (the lock says that their writers are dead), and
 * partial files of processes that are gone. */
void qe_folder_sweep(const qe_checkpoint_folder *folder);
/* The one of this name is a new one now. */
void qe_folder_trust(qe_checkpoint_folder *folder, const char *name);
/* As qe_checkpoint_write, in pieces with rests between them. pace may be NULL. */
qe_status qe_checkpoint_write_paced(qe_checkpoint_folder *folder, const qe_checkpoint_content *content, qe_pace *pace,
                                    qe_error *error_out);
/* Removes what cannot be gone on from, and the oldest checkpoints beyond `keep` complete ones. Returns an errno. */
int qe_folder_prune(const qe_checkpoint_folder *folder);

/* Names of entries, sorted. Owns: free each and the list. */
qe_status qe_folder_names(int descriptor, const char *path, char ***names_out, size_t *count_out, qe_error *error_out);
void qe_folder_names_free(char **names, size_t count);

/* As qe_checkpoint_list, of an open directory. */
qe_status qe_folder_checkpoints(int descriptor, const char *path, qe_checkpoint_name **names_out, size_t *count_out,
                                qe_error *error_out);

/* A regular file below the directory, read whole; at most `bytes_max`. Owns: the caller frees. */
qe_status qe_folder_read(int descriptor, const char *path, const char *name, size_t bytes_max, char **text_out,
                         size_t *bytes_out, qe_error *error_out);
/* Opens a regular file below the directory. */
qe_status qe_folder_open_file(int descriptor, const char *path, const char *name, int *file_out, uint64_t *bytes_out,
                              qe_error *error_out);
/* Is there a manifest that can be read, and has every file the size it names? Contents are not read. */
int qe_folder_looks_complete(int parent, const char *path, const char *name);

#endif
