/* command_inspect.c - `qeffect inspect`: what a checkpoint holds, verified; which tensor of two differs first. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <jansson.h>
#include "base/assert.h"
#include "cli/checkpoints.h"

/* --- one checkpoint ------------------------------------------------------------------------------------------- */

static json_t *facts_json(const qe_facts *facts) {
    json_t *object = json_object();
    for (size_t i = 0; i < facts->count; i++)
        json_object_set_new(object, facts->list[i].name, qe_cli_json_text(facts->list[i].value));
    return object;
}

static json_t *lineage_json(const qe_manifest *manifest) {
    json_t *list = json_array();
    for (size_t i = 0; i < manifest->lineage_count; i++)
        json_array_append_new(list, json_pack("{s:s, s:I, s:o}", "run", manifest->lineage[i].run, "from_step",
                                              (json_int_t)manifest->lineage[i].from_step, "changes",
                                              qe_cli_json_text(manifest->lineage[i].changes)));
    return list;
}

static json_t *files_json(const qe_manifest *manifest) {
    json_t *list = json_array();
    for (size_t i = 0; i < manifest->file_count; i++)
        json_array_append_new(list, json_pack("{s:s, s:I, s:s}", "name", manifest->files[i].name, "bytes",
                                              (json_int_t)manifest->files[i].bytes, "xxh3_128",
                                              manifest->files[i].digest));
    return list;
}

static json_t *tensors_json(const qe_checkpoint *checkpoint) {
    json_t *list = json_array();
    for (size_t i = 0; i < qe_checkpoint_count(checkpoint); i++) {
        const qe_tensor *tensor = qe_checkpoint_at(checkpoint, i);
        json_t *shape = json_array();
        for (uint32_t d = 0; d < tensor->rank; d++)
            json_array_append_new(shape, json_integer((json_int_t)tensor->shape[d]));
        json_array_append_new(list, json_pack("{s:o, s:s, s:o}", "name", qe_cli_json_text(tensor->name), "dtype",
                                              qe_dtype_name(tensor->dtype), "shape", shape));
    }
    return list;
}

static uint64_t highest(const qe_counts *counts) {
    uint64_t most = 0;
    for (size_t i = 0; i < counts->count; i++)
        if (counts->list[i].count > most) most = counts->list[i].count;
    return most;
}

static json_t *checkpoint_json(const qe_checkpoint *checkpoint) {
    const qe_manifest *m = qe_checkpoint_manifest(checkpoint);
    json_t *document = json_pack(
        "{s:o, s:I, s:s, s:b, s:s, s:I, s:o, s:o, s:o}", "checkpoint", qe_cli_json_text(qe_checkpoint_path(checkpoint)),
        "step", (json_int_t)m->step, "state_hash", m->state_hash, "verified", 1, "run", qe_manifest_run(m), "serial",
        (json_int_t)m->serial, "lineage", lineage_json(m), "files", files_json(m), "tensors",
        tensors_json(checkpoint));
    json_object_set_new(document, "settings", facts_json(&m->settings));
    json_object_set_new(document, "device", facts_json(&m->device));
    json_object_set_new(document, "algorithms", facts_json(&m->algorithms));
    json_object_set_new(document, "libraries", facts_json(&m->libraries));
    json_object_set_new(document, "schedule", facts_json(&m->schedule));
    json_object_set_new(document, "data", json_pack("{s:o, s:s, s:I}", "name", qe_cli_json_text(m->data.name),
                                                    "xxh3_128", m->data.digest, "position",
                                                    (json_int_t)m->data.position));
    json_object_set_new(document, "weight_version", json_integer((json_int_t)highest(&m->versions)));
    json_object_set_new(document, "scale_epoch", json_integer((json_int_t)highest(&m->epochs)));
    return document;
}

static const char *fact(const qe_facts *facts, const char *name) {
    const char *value = qe_facts_find(facts, name);
    return value != NULL ? value : "?";
}

static void print_lineage(const qe_manifest *m) {
    for (size_t i = 0; i < m->lineage_count; i++) {
        printf("%-11s %s", i == 0 ? "run" : "", m->lineage[i].run);
        if (m->lineage[i].from_step > 0 || i > 0)
            qe_cli_print(" from step %llu: %s", (unsigned long long)m->lineage[i].from_step,
                         m->lineage[i].changes[0] ? m->lineage[i].changes : "nothing changed");
        putchar('\n');
    }
}

static void print_files(const qe_checkpoint *checkpoint) {
    const qe_manifest *m = qe_checkpoint_manifest(checkpoint);
    for (size_t i = 0; i < m->file_count; i++)
        printf("%-11s %-22s %12llu bytes  xxh3 %s  as written\n", i == 0 ? "files" : "", m->files[i].name,
               (unsigned long long)m->files[i].bytes, m->files[i].digest);
    printf("tensors     %zu\n", qe_checkpoint_count(checkpoint));
}

static void print_tensors(const qe_checkpoint *checkpoint) {
    for (size_t i = 0; i < qe_checkpoint_count(checkpoint); i++) {
        const qe_tensor *tensor = qe_checkpoint_at(checkpoint, i);
        printf("  %-8s [", qe_dtype_name(tensor->dtype));
        for (uint32_t d = 0; d < tensor->rank; d++)
            printf("%s%llu", d == 0 ? "" : ", ", (unsigned long long)tensor->shape[d]);
        qe_cli_print("] %s\n", tensor->name);
    }
}

static void print_checkpoint(const qe_checkpoint *checkpoint, int with_tensors) {
    const qe_manifest *m = qe_checkpoint_manifest(checkpoint);
    printf("checkpoint  %s, complete\nstep        %llu\nstate_hash  %s, as the tensors have it\n",
           qe_checkpoint_path(checkpoint), (unsigned long long)m->step, m->state_hash);
    print_lineage(m);
    qe_cli_print("model       %s layers, hidden %s, heads %s/%s, ffn %s, vocab %s\n",
                 fact(&m->settings, "model.layers"), fact(&m->settings, "model.hidden"),
                 fact(&m->settings, "model.heads"),
                 fact(&m->settings, "model.kv_heads"), fact(&m->settings, "model.ffn"),
                 fact(&m->settings, "model.vocab"));
    qe_cli_print("recipe      %s\ndevice      %s\n", fact(&m->settings, "recipe.name"), fact(&m->device, "identity"));
    qe_cli_print("schedule    %s: %s ranks, %s stages, %s microbatches; gradients add up %s; plan %s\n",
                 fact(&m->schedule, "name"), fact(&m->schedule, "ranks"), fact(&m->schedule, "stages"),
                 fact(&m->schedule, "microbatches"), fact(&m->schedule, "accumulation_order"),
                 fact(&m->schedule, "plan_hash"));
    qe_cli_print("data        %s: %llu of %llu windows an epoch are used up\n", m->data.name,
                 (unsigned long long)m->data.position, (unsigned long long)m->data.train_windows);
    printf("counters    %zu weights to version %llu, %zu scales to epoch %llu\n", m->versions.count,
           (unsigned long long)highest(&m->versions), m->epochs.count, (unsigned long long)highest(&m->epochs));
    print_files(checkpoint);
    if (with_tensors) print_tensors(checkpoint);
}

/* A breach of a rule, for people and as JSON. */
static int refuse(const qe_cli *cli, qe_rule rule, const qe_error *error) {
    if (rule == QE_RULE_NONE) return qe_cli_error(cli, error);
    qe_cli_print_error(error);
    if (!cli->json) return QE_EXIT_CONTRACT;
    return qe_cli_json(json_pack("{s:{s:[{s:s, s:o}]}}", "breach", "violations", "rule", qe_rule_id(rule), "message",
                                 qe_cli_json_text(error->message)),
                       QE_EXIT_CONTRACT);
}

/* The tensors are those that the hash was taken of, in their order. */
static qe_status check_state(const qe_checkpoint *checkpoint, qe_rule *rule_out, qe_error *error_out) {
    char found[QE_DIGEST_BYTES];
    const char *saved = qe_checkpoint_manifest(checkpoint)->state_hash;
    qe_checkpoint_hash(checkpoint, found);
    if (strcmp(found, saved) == 0) return QE_OK;
    *rule_out = QE_RULE_CHECKPOINT_STATE;
    qe_error_set(error_out, QE_CONTRACT, "use another checkpoint", "%s: %s Saved was %s, the files hold %s.",
                 qe_rule_id(*rule_out), qe_rule_sentence(*rule_out), saved, found);
    qe_error_place(error_out, qe_checkpoint_path(checkpoint), 0, 0);
    return QE_CONTRACT;
}

/* `name`: one of the directory's list, judged as a resume from the directory would; NULL: the checkpoint is `path`. */
static qe_status open_whole(const char *path, const qe_checkpoint_name *name, qe_checkpoint **checkpoint_out,
                            qe_rule *rule_out, qe_error *error_out) {
    qe_checkpoint *checkpoint = NULL;
    if (name == NULL) QE_TRY(qe_checkpoint_open(path, &checkpoint, rule_out, error_out));
    else QE_TRY(qe_checkpoint_open_listed(path, name, &checkpoint, rule_out, error_out));
    qe_status status = check_state(checkpoint, rule_out, error_out);
    if (status == QE_OK) *checkpoint_out = checkpoint;
    else qe_checkpoint_close(checkpoint);
    return status;
}

static int inspect_one(qe_cli *cli, const char *path) {
    qe_checkpoint *checkpoint = NULL;
    qe_rule rule = QE_RULE_NONE;
    qe_error error = {0};
    if (open_whole(path, NULL, &checkpoint, &rule, &error) != QE_OK) return refuse(cli, rule, &error);
    int status = QE_EXIT_OK;
    if (cli->json) status = qe_cli_json(checkpoint_json(checkpoint), QE_EXIT_OK);
    else print_checkpoint(checkpoint, qe_cli_has(cli, "tensors"));
    qe_checkpoint_close(checkpoint);
    return status;
}

/* --- a directory of them -------------------------------------------------------------------------------------- */

/* Prints one line, or appends one entry; returns its exit status. */
static int list_one(const qe_cli *cli, const char *folder, const qe_checkpoint_name *listed, json_t *list) {
    const char *name = listed->name;
    qe_checkpoint *checkpoint = NULL;
    qe_rule rule = QE_RULE_NONE;
    qe_error error = {0};
    qe_status status = open_whole(folder, listed, &checkpoint, &rule, &error);
    if (status == QE_OK) {
        const qe_manifest *m = qe_checkpoint_manifest(checkpoint);
        if (!cli->json) printf("%s  complete  state_hash %s  run %.8s\n", name, m->state_hash, qe_manifest_run(m));
        json_array_append_new(list, json_pack("{s:s, s:b, s:I, s:s, s:s}", "name", name, "verified", 1, "step",
                                              (json_int_t)m->step, "state_hash", m->state_hash, "run",
                                              qe_manifest_run(m)));
        qe_checkpoint_close(checkpoint);
        return QE_EXIT_OK;
    }
    if (!cli->json) qe_cli_print("%s  damaged   %s: %s\n", name, error.path, error.message);
    json_t *entry = json_pack("{s:s, s:b, s:s*}", "name", name, "verified", 0, "rule",
                              rule != QE_RULE_NONE ? qe_rule_id(rule) : NULL);
    json_object_update_new(entry, qe_cli_error_json(&error));
    json_array_append_new(list, entry);
    return status == QE_CONTRACT ? QE_EXIT_CONTRACT : QE_EXIT_ERROR;
}

static int inspect_folder(qe_cli *cli, const char *path) {
    qe_checkpoint_name *names = NULL;
    size_t count = 0;
    qe_error error = {0};
    qe_status status = qe_checkpoint_list(path, &names, &count, &error);
    if (status == QE_OK && count == 0) {
        status = qe_error_set(&error, QE_ERROR_IO,
                              "name a checkpoint (step-...), or the checkpoint.path of a run with checkpoint.every set",
                              "there is no checkpoint in this directory");
        qe_error_place(&error, path, 0, 0);
    }
    if (status != QE_OK) {
        free(names);
        return qe_cli_error(cli, &error);
    }
    json_t *list = json_array();
    int worst = QE_EXIT_OK;
    for (size_t i = 0; i < count; i++) {
        int one = list_one(cli, path, &names[i], list);
        if (one > worst) worst = one;
    }
    free(names);
    if (cli->json) return qe_cli_json(json_pack("{s:o}", "checkpoints", list), worst);
    json_decref(list);
    return worst;
}

/* --- two of them ---------------------------------------------------------------------------------------------- */

/* How two tensors of one name part. */
typedef struct difference {
    uint64_t elements, differing, index; /* index of the largest */
    double largest, a, b;
    int is_shape, is_number;
} difference;

static double number_at(const qe_tensor *tensor, uint64_t index) {
    const char *at = (const char *)tensor->data + index * qe_dtype_bytes(tensor->dtype);
    float single;
    double full;
    int64_t whole;
    if (tensor->dtype == QE_DTYPE_F32) return memcpy(&single, at, sizeof single), (double)single;
    if (tensor->dtype == QE_DTYPE_F64) return memcpy(&full, at, sizeof full), full;
    return memcpy(&whole, at, sizeof whole), (double)whole;
}

static int is_same_shape(const qe_tensor *a, const qe_tensor *b) {
    return a->dtype == b->dtype && a->rank == b->rank && memcmp(a->shape, b->shape, a->rank * sizeof *a->shape) == 0;
}

static void note_element(difference *found, const qe_tensor *a, const qe_tensor *b, uint64_t index) {
    found->differing++;
    if (!found->is_number) {
        if (found->differing == 1) found->index = index;
        return;
    }
    double one = number_at(a, index), two = number_at(b, index), apart = fabs(one - two);
    if (isnan(apart)) apart = INFINITY;
    if (found->differing > 1 && apart <= found->largest) return;
    found->largest = apart;
    found->index = index;
    found->a = one;
    found->b = two;
}

/* Bytes decide; numbers say how far. */
static int differs(const qe_tensor *a, const qe_tensor *b, difference *found) {
    *found = (difference){.is_shape = !is_same_shape(a, b)};
    if (found->is_shape) return 1;
    size_t one = qe_dtype_bytes(a->dtype);
    found->elements = a->bytes / one;
    found->is_number = a->dtype == QE_DTYPE_F32 || a->dtype == QE_DTYPE_F64 || a->dtype == QE_DTYPE_I64;
    if (a->bytes == 0 || memcmp(a->data, b->data, a->bytes) == 0) return 0;
    for (uint64_t i = 0; i < found->elements; i++)
        if (memcmp((const char *)a->data + i * one, (const char *)b->data + i * one, one) != 0)
            note_element(found, a, b, i);
    return 1;
}

typedef struct comparison {
    const char *first; /* name of the first that differs, or that one of them lacks */
    int missing;       /* 1: the first is in A alone, 2: in B alone */
    difference at_first;
    uint64_t tensors, differing, missing_count;
} comparison;

static void compare(const qe_checkpoint *a, const qe_checkpoint *b, comparison *c) {
    *c = (comparison){.tensors = qe_checkpoint_count(a)};
    for (size_t i = 0; i < qe_checkpoint_count(a); i++) {
        const qe_tensor *one = qe_checkpoint_at(a, i), *two = qe_checkpoint_find(b, one->name);
        difference found = {0};
        if (two != NULL && !differs(one, two, &found)) continue;
        if (two == NULL) c->missing_count++;
        else c->differing++;
        if (c->first != NULL) continue;
        c->first = one->name;
        c->missing = two == NULL;
        c->at_first = found;
    }
    for (size_t i = 0; i < qe_checkpoint_count(b); i++) {
        const char *name = qe_checkpoint_at(b, i)->name;
        if (qe_checkpoint_find(a, name) != NULL) continue;
        c->missing_count++;
        if (c->first == NULL) c->first = name, c->missing = 2;
    }
}

static void print_first(const comparison *c, const qe_cli *cli) {
    const difference *d = &c->at_first;
    qe_cli_print("first       %s: ", c->first);
    if (c->missing) printf("only in %s\n", cli->arguments[c->missing - 1]);
    else if (d->is_shape) printf("of another dtype or shape\n");
    else if (d->is_number)
        printf("%llu of %llu elements differ, most at [%llu] by %.9g: %.9g and %.9g\n",
               (unsigned long long)d->differing, (unsigned long long)d->elements, (unsigned long long)d->index,
               d->largest, d->a, d->b);
    else printf("%llu of %llu elements differ, the first at [%llu]\n", (unsigned long long)d->differing,
                (unsigned long long)d->elements, (unsigned long long)d->index);
}

static json_t *first_json(const comparison *c) {
    const difference *d = &c->at_first;
    json_t *first = json_pack("{s:o}", "name", qe_cli_json_text(c->first));
    if (c->missing) json_object_set_new(first, "only_in", json_string(c->missing == 1 ? "a" : "b"));
    else if (d->is_shape) json_object_set_new(first, "shape", json_true());
    else {
        json_object_set_new(first, "elements", json_integer((json_int_t)d->elements));
        json_object_set_new(first, "differing", json_integer((json_int_t)d->differing));
        json_object_set_new(first, "index", json_integer((json_int_t)d->index));
        if (d->is_number && isfinite(d->largest)) json_object_set_new(first, "largest", json_real(d->largest));
    }
    return first;
}

static int print_comparison(const qe_cli *cli, const qe_checkpoint *a, const qe_checkpoint *b, const comparison *c,
                            const qe_facts *changes) {
    const qe_manifest *one = qe_checkpoint_manifest(a), *two = qe_checkpoint_manifest(b);
    int status = c->first == NULL ? QE_EXIT_OK : QE_EXIT_DIFFERS;
    if (cli->json) {
        json_t *document = json_pack("{s:b, s:I, s:I, s:I, s:[I, I], s:o}", "equal", c->first == NULL, "tensors",
                                     (json_int_t)c->tensors, "differing", (json_int_t)c->differing, "missing",
                                     (json_int_t)c->missing_count, "steps", (json_int_t)one->step,
                                     (json_int_t)two->step, "changes", facts_json(changes));
        if (c->first != NULL) json_object_set_new(document, "first", first_json(c));
        return qe_cli_json(document, status);
    }
    printf("A           step %llu of run %.8s, state_hash %s\n", (unsigned long long)one->step, qe_manifest_run(one),
           one->state_hash);
    printf("B           step %llu of run %.8s, state_hash %s\n", (unsigned long long)two->step, qe_manifest_run(two),
           two->state_hash);
    for (size_t i = 0; i < changes->count; i++)
        qe_cli_print("%-11s %s: %s\n", i == 0 ? "changes" : "", changes->list[i].name, changes->list[i].value);
    if (c->first == NULL) printf("equal       all %llu tensors, bit for bit\n", (unsigned long long)c->tensors);
    else {
        print_first(c, cli);
        printf("in all      %llu of %llu tensors differ, %llu are in one alone\n", (unsigned long long)c->differing,
               (unsigned long long)c->tensors, (unsigned long long)c->missing_count);
    }
    return status;
}

/* A checkpoint, or the newest of a directory. */
static qe_status open_any(const char *path, qe_checkpoint **checkpoint_out, qe_rule *rule_out, qe_error *error_out) {
    if (qe_checkpoint_is_one(path)) return qe_checkpoint_open(path, checkpoint_out, rule_out, error_out);
    return qe_checkpoint_open_newest(path, NULL, NULL, checkpoint_out, rule_out, error_out);
}

static int diff(qe_cli *cli) {
    qe_checkpoint *a = NULL, *b = NULL;
    qe_rule rule = QE_RULE_NONE;
    qe_facts changes = {0};
    qe_error error = {0};
    comparison c;
    int exit_status;
    qe_status status = open_any(cli->arguments[0], &a, &rule, &error);
    if (status == QE_OK) status = open_any(cli->arguments[1], &b, &rule, &error);
    if (status == QE_OK)
        status = qe_manifest_differences(qe_checkpoint_manifest(a), qe_checkpoint_manifest(b), &changes, &error);
    if (status == QE_OK) {
        compare(a, b, &c);
        exit_status = print_comparison(cli, a, b, &c, &changes);
    } else exit_status = refuse(cli, rule, &error);
    qe_facts_deinit(&changes);
    qe_checkpoint_close(a);
    qe_checkpoint_close(b);
    return exit_status;
}

static int run_inspect(qe_cli *cli) {
    int wants_two = qe_cli_has(cli, "diff");
    if (wants_two != (cli->argument_count == 2))
        return qe_cli_usage(cli, wants_two ? "--diff takes two checkpoints" : "two checkpoints are for --diff");
    if (wants_two) return diff(cli);
    const char *path = cli->arguments[0];
    qe_checkpoint_name *names = NULL;
    size_t count = 0;
    /* a directory of checkpoints is listed; anything else must be one, and says so if it is not */
    int is_folder = !qe_checkpoint_is_one(path) && qe_checkpoint_list(path, &names, &count, NULL) == QE_OK;
    free(names);
    return is_folder && count > 0 ? inspect_folder(cli, path) : inspect_one(cli, path);
}

static const qe_cli_option options[] = {
    {"diff", 0, NULL, "compare two: name the first tensor that differs, and by how much", 0},
    {"tensors", 0, NULL, "list every tensor with its dtype and shape", 0},
    {NULL, 0, NULL, NULL, 0},
};

const qe_command qe_command_inspect = {
    .name = "inspect",
    .arguments = "CHECKPOINT [CHECKPOINT]",
    .summary = "what a checkpoint holds, verified; how two differ",
    .details =
        "CHECKPOINT is a directory step-... that `qeffect train` wrote, or a checkpoint.path with several. Everything\n"
        "is read and held against the manifest: sizes, hashes, run and step of every file, epochs of scales, and the\n"
        "state_hash. A damaged one is exit 1, one that breaks a rule of docs/rules.md exit 3.\n"
        "\n"
        "With --diff A B, tensors are compared by name and byte, in the order of the state_hash: exit 0 when all are\n"
        "equal, 4 when not.\n"
        "\n"
        "Examples:\n"
        "  qeffect inspect run/quickstart\n"
        "  qeffect inspect run/quickstart/step-00000100 --tensors\n"
        "  qeffect inspect --diff run/quickstart/step-00000100 run/other/step-00000100\n",
    .options = options,
    .arguments_min = 1,
    .arguments_max = 2,
    .run = run_inspect,
};
