/* fault.h - one call of a kind fails, once: what is counted, what is armed, what was met. Of one process; the cases of
 * faults.c are processes of their own. */
#ifndef QE_TESTS_FAULT_H
#define QE_TESTS_FAULT_H

#include <stddef.h>

#include "qeffect/backend.h"
#include "qeffect/comm.h"

typedef enum fault_kind {
    FAULT_MEMORY, /* malloc and its like, of this program and of every library behind it; mmap */
    FAULT_SYSTEM, /* threads, mutexes, condition variables, loading a library */
    FAULT_FILES,  /* every call on a file below a folder, those of FILE streams too */
    FAULT_DEVICE, /* every entry of the backend's tables that can fail */
    FAULT_COMM,   /* every entry of the transport's table that can fail */
    FAULT_KINDS
} fault_kind;

/* From now on calls of this kind are counted, and the n-th fails; 0: none does. folder: of files. */
void fault_start(fault_kind kind, long nth, const char *folder);
/* Nothing fails any more; returns how many calls were counted. */
long fault_stop(void);
/* Name of the call that failed; NULL: none has. */
const char *fault_met(void);

/* Where the name of the call is written the moment it fails, for a process that does not come to its end. */
enum { FAULT_NAME_BYTES = 64 };
void fault_tell(char *name_out);

/* For the shims: is this the call that fails? */
int fault_is_due(fault_kind kind, const char *call);
/* A library's own start is not counted: what it does with a refusal is not ours. */
void fault_pause(void);
void fault_resume(void);

/* Blocks of memory that were taken since fault_start and are held, and, where asked, by whom; always 0 where a
 * sanitizer's allocator is at work, which looks for leaks itself. */
long fault_blocks_held(int prints);

/* The files shim has a count of its own (tests/crash/fault_files.c). */
void fault_files_start(long nth, const char *folder);
long fault_files_stop(void);
const char *fault_files_met(void);
/* A stream whose reads and writes are counted. */
void fault_stdout_open(const char *path);
void fault_stdout_close(void);

/* The device's own shim (tests/step_faults.h), too. */
void fault_device_start(long nth);
long fault_device_stop(void);
const char *fault_device_met(void);

#endif
