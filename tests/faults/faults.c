/* faults.c - every call that can fail, fails: memory, threads, files, the backend, the transport; one call a run.
 *
 *   check_faults [--every N [--part K]] [--only WORD]... [--kind WORD] [--at N [--keep 1] [--inside 1]]
 *
 * A scene is one command of the program, run inside of this process's children. First it runs undisturbed, then with
 * its first call of a kind failing, its second, ... until a run meets no fault. After each:
 *   * it ended by itself, in time, with 0 or 1 (or as undisturbed), never by a signal;
 *   * with 1 it said the cause and a way out; with JSON, a document or nothing;
 *   * with the status of the undisturbed run it said what that one said;
 *   * no block of memory is held that was not held before (a sanitized build asks its leak checker);
 *   * checkpoints are whole and hold the bits of their step, files are whole or not there, nothing lies beside them,
 *     and what can be resumed ends with the bits of the run that never failed. */
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "faults/fault.h"
#include "faults/scene.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#define LEAKED() (__lsan_do_recoverable_leak_check() != 0)
#else
#define LEAKED() 0
#endif

enum { SECONDS_MAX = 20, FAILURES_TOLD = 40 }; /* a run takes some hundredths of a second */

static const char *const kind_names[FAULT_KINDS] = {"memory", "system", "files", "device", "comm"};

/* What a child says of its run, in memory that is shared. */
typedef struct outcome {
    long counted, blocks; /* that are held behind the run */
    int finished, status, leaked;
    char met[FAULT_NAME_BYTES]; /* empty: no call failed */
} outcome;

typedef struct bench {
    char folder[64];
    outcome *shared;
    long every;
    long part; /* 1 to every: that share of the calls, so that N runs side by side do all; 0: a share that wanders */
    const char *only[16], *kind;
    int only_count;
    long at; /* this case alone; 0: all */
    int keeps;  /* the folder, to look at */
    int inside; /* that case runs in this process, for a debugger */
    long cases, met, failures, resumed;
} bench;

/* ---- one run ---- */

static void child(const bench *b, const scene *s, fault_kind kind, long nth) {
    alarm(SECONDS_MAX);
    int errors = open("stderr", O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (errors < 0 || dup2(errors, STDERR_FILENO) < 0) _exit(99);
    close(errors);
    fault_stdout_open("stdout");
    char below[128];
    snprintf(below, sizeof below, "%s%s", b->folder, s->files_below);
    fault_tell(b->shared->met);
    fault_start(kind, nth, below);
    int status = scene_run(s);
    fault_stdout_close();
    b->shared->counted = fault_stop();
    b->shared->status = status;
    const char *met = fault_met();
    snprintf(b->shared->met, sizeof b->shared->met, "%s", met == NULL ? "" : met);
    b->shared->blocks = fault_blocks_held(0);
    if (nth > 0 && b->shared->blocks > s->blocks_kept) fault_blocks_held(1);
    b->shared->leaked = LEAKED();
    b->shared->finished = 1;
    _exit(0);
}

/* Runs the scene in a child; the wait status. */
static int run(const bench *b, const scene *s, fault_kind kind, long nth) {
    int status = -1;
    memset(b->shared, 0, sizeof *b->shared);
    fflush(NULL);
    pid_t process = b->inside && nth > 0 ? 0 : fork();
    if (process == 0) child(b, s, kind, nth);
    if (process < 0 || waitpid(process, &status, 0) != process) return -1;
    return status;
}

/* ---- what must hold ---- */

static int complain(bench *b, const scene *s, fault_kind kind, long nth, const char *what) {
    if (++b->failures > FAILURES_TOLD) return 0;
    printf("FAILED %s: %s %ld (%s): %s\n", s->name, kind_names[kind], nth, b->shared->met, what);
    char *said = scene_file("stderr");
    if (said != NULL && said[0] != 0) printf("    said: %.1500s%s", said, said[strlen(said) - 1] == '\n' ? "" : "\n");
    free(said);
    return 0;
}

/* A document of "error", or nothing: never half of one. */
static int is_document_or_nothing(const char *text) {
    if (text[0] == 0) return 1;
    json_t *document = json_loads(text, 0, NULL);
    int is_one = document != NULL;
    json_decref(document);
    return is_one;
}

/* A list tells of each entry what is wrong with it. */
static int says_why(const char *said, const char *out) {
    if (strstr(out, "\"message\"") != NULL && strstr(out, "\"remedy\"") != NULL) return 1;
    return strstr(said, "qeffect: ") != NULL &&
           (strstr(said, "what to do: ") != NULL || strstr(said, "standard output: ") != NULL);
}

/* What a run said that ended as the undisturbed one did. */
static const char *judge_good(const scene *s, const char *out) {
    if (s->is_train && strstr(out, s->hash) == NULL) return "ended well, with another state_hash";
    if (s->is_train || s->expected_keys)
        return scene_same_keys(out, s->expected) ? NULL : "ended well, and the document lacks something";
    return strcmp(out, s->expected) != 0 ? "ended well, and said something else" : NULL;
}

static const char *judge_said(const scene *s, const outcome *o, fault_kind kind) {
    char *out = scene_file("stdout"), *said = scene_file("stderr");
    const char *wrong = NULL;
    if (out == NULL || said == NULL) wrong = "left no output";
    else if (o->status == s->status && s->status > 0 && strstr(said, "standard output: ") != NULL) wrong = NULL;
    else if (o->status == s->status) wrong = judge_good(s, out);
    else if (o->status != 1) wrong = "another exit status";
    else if (!says_why(said, out)) wrong = "no cause, or no way out";
    else if (s->is_json && kind != FAULT_FILES && !is_document_or_nothing(out)) wrong = "half a JSON document";
    free(out);
    free(said);
    return wrong;
}

static int resumes(bench *b, const scene *s) {
    scene again = *s;
    memcpy(again.arguments, s->resumes, sizeof s->resumes);
    if (!WIFEXITED(run(b, &again, FAULT_KINDS, 0)) || b->shared->status != 0) return 0;
    char *out = scene_file("stdout");
    int same = out != NULL && strstr(out, s->hash) != NULL;
    free(out);
    b->resumed++;
    return same && scene_litter() == 0;
}

static int judge(bench *b, const scene *s, fault_kind kind, long nth, int wait_status) {
    outcome o = *b->shared;
    if (WIFSIGNALED(wait_status))
        return complain(b, s, kind, nth, WTERMSIG(wait_status) == SIGALRM ? "hangs" : "died by a signal");
    if (!o.finished) return complain(b, s, kind, nth, "left by itself");
    if (o.blocks > s->blocks_kept) return complain(b, s, kind, nth, "memory is held");
    if (o.leaked) return complain(b, s, kind, nth, "memory leaks");
    const char *wrong = judge_said(s, &o, kind);
    if (wrong == NULL) wrong = scene_files_wrong(s);
    if (wrong != NULL) return complain(b, s, kind, nth, wrong);
    if (s->resumes[0] != NULL && o.met[0] != 0 && scene_has_checkpoint() && (nth + b->cases) % 3 == 0 && !resumes(b, s))
        return complain(b, s, kind, nth, "does not go on to the same bits");
    return 1;
}

/* ---- all cases of a scene ---- */

static void learn(const bench *b, scene *s) {
    scene_restore(s);
    s->blocks_kept = 1L << 30;
    int wait_status = run(b, s, FAULT_KINDS, 0);
    if (!WIFEXITED(wait_status) || !b->shared->finished || b->shared->status != s->status) {
        char *said = scene_file("stderr");
        printf("%s: the undisturbed run ends with %d: %s\n", s->name, b->shared->status, said == NULL ? "" : said);
        exit(1);
    }
    s->blocks_kept = b->shared->blocks;
    scene_learn(s);
}

static long case_run(bench *b, scene *s, fault_kind kind, long nth) {
    scene_restore(s);
    int wait_status = run(b, s, kind, nth);
    long counted = b->shared->counted;
    b->cases++;
    b->met += b->shared->met[0] != 0;
    judge(b, s, kind, nth, wait_status);
    return counted;
}

/* The first call of a scene to fail; later ones follow at steps of `every`. */
static long case_first(const bench *b, long begin_cases, long calls) {
    if (b->part > 0) return b->part;
    return 1 + (b->every > 1 && calls > 0 ? begin_cases * 7919 % (calls < b->every ? calls : b->every) : 0);
}

/* A run that failed early counted less than a whole one: how many there are is asked of undisturbed runs. */
static long count_calls(const bench *b, const scene *s, fault_kind kind) {
    scene_restore(s);
    run(b, s, kind, 0);
    return b->shared->counted;
}

static void scene_sweep(bench *b, scene *s, fault_kind kind) {
    long begin_cases = b->cases, begin_met = b->met, calls = count_calls(b, s, kind), missed = 0;
    if (b->at > 0) {
        case_run(b, s, kind, b->at);
        return;
    }
    /* Threads may make a run's calls a few more or less than another's: the end is where runs meet nothing. */
    int is_whole = b->every == 1 || b->part > 0;
    for (long nth = case_first(b, begin_cases, calls); missed < 2 && calls > 0 && (is_whole || nth <= calls);
         nth += b->every) {
        long met = b->met;
        case_run(b, s, kind, nth);
        missed = b->met == met ? missed + 1 : 0;
    }
    if (calls > 0)
        printf("%-34s %-7s %6ld calls %6ld cases %6ld met\n", s->name, kind_names[kind], calls, b->cases - begin_cases,
               b->met - begin_met);
    fflush(stdout);
}

static int is_wanted(const bench *b, const scene *s) {
    for (int i = 0; i < b->only_count; i++)
        if (strstr(s->name, b->only[i]) != NULL) return 1;
    return b->only_count == 0;
}

static void sweep_all(bench *b) {
    size_t count;
    scene *scenes = scene_all(&count);
    int is_warm = 0;
    for (size_t i = 0; i < count; i++) {
        if (!scenes[i].is_cold && !is_warm) scene_warm();
        is_warm = !scenes[i].is_cold;
        if (!is_wanted(b, &scenes[i])) continue;
        learn(b, &scenes[i]);
        for (int kind = 0; kind < FAULT_KINDS; kind++) {
            if (b->kind != NULL && strcmp(b->kind, kind_names[kind]) != 0) continue;
            if (scenes[i].kinds & 1 << kind) scene_sweep(b, &scenes[i], (fault_kind)kind);
        }
        free(scenes[i].expected);
        free(scenes[i].written);
    }
}

static void read_options(bench *b, int count, char **words) {
    for (int i = 1; i + 1 < count; i += 2) {
        if (strcmp(words[i], "--every") == 0) b->every = strtol(words[i + 1], NULL, 10);
        if (strcmp(words[i], "--part") == 0) b->part = strtol(words[i + 1], NULL, 10);
        if (strcmp(words[i], "--only") == 0 && b->only_count < 16) b->only[b->only_count++] = words[i + 1];
        if (strcmp(words[i], "--kind") == 0) b->kind = words[i + 1];
        if (strcmp(words[i], "--keep") == 0) b->keeps = 1;
        if (strcmp(words[i], "--inside") == 0) b->inside = 1;
        if (strcmp(words[i], "--at") == 0) b->at = strtol(words[i + 1], NULL, 10);
    }
    if (b->every < 1) b->every = 1;
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int count, char **words) {
    bench b = {.every = 1};
    double begin = now_s();
    read_options(&b, count, words);
    const char *parent = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(b.folder, sizeof b.folder, "%s/qeffect-faults-XXXXXX", parent);
    b.shared = mmap(NULL, sizeof *b.shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b.shared == MAP_FAILED || mkdtemp(b.folder) == NULL || chdir(b.folder) != 0) return 1;
    scene_prepare();
    sweep_all(&b);
    if (chdir("/") != 0) return 1;
    if (b.keeps) printf("in %s\n", b.folder);
    else scene_remove(b.folder);
    printf("faults: %ld cases, %ld met, %ld resumed afterwards, %ld failed, %.0f s\n", b.cases, b.met, b.resumed,
           b.failures, now_s() - begin);
    return b.failures > 0;
}
