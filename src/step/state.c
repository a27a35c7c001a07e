/* state.c - what outlives a step, tensor by tensor in one order: looked at, hashed, copied out, put back. All of it
 * goes through the backend's memory: nothing here follows a pointer into a device. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/hash.h"
#include "qeffect/snapshot.h"
#include "step/team.h"
#include "step/twin.h"

static const char *const roles[QE_SCALE_ROLES] = {".x", ".w", ".dy"};

/* Receives one tensor of the order, named, without values. */
typedef qe_status (*each_tensor)(void *context, const qe_state_tensor *tensor, qe_error *error_out);

static void make_name(char name[QE_NAME_BYTES + 16], const char *stem, const char *middle, const char *suffix) {
    int length = snprintf(name, QE_NAME_BYTES + 16, "%s%s%s", stem, middle, suffix);
    QE_ASSERT(length > 0 && length < QE_NAME_BYTES + 16);
}

static const qe_scale_state *scale_place(const qe_team *team, uint32_t weight, int role) {
    return qe_team_owner(team, weight)->places[weight].scale[role];
}

static qe_status each_parameter(const qe_team *team, qe_state_kind kind, each_tensor each, void *context,
                                qe_error *error_out) {
    static const char *const suffix[] = {"", ".moment1", ".moment2"};
    const qe_plan *plan = team->plan;
    if (kind != QE_STATE_PARAMETER && plan->options.forward_only) return QE_OK; /* without training: no moments */
    for (uint32_t i = 0; i < plan->model_ops->parameter_count(plan->model); i++) {
        const qe_parameter *parameter = plan->model_ops->parameter(plan->model, i);
        char name[QE_NAME_BYTES + 16];
        make_name(name, parameter->name, "", suffix[kind]);
        qe_state_tensor tensor = {.kind = kind, .name = name, .weight = parameter->weight, .role = -1, .parameter = i};
        tensor.rows = parameter->vector ? 0 : parameter->rows;
        tensor.columns = parameter->columns;
        QE_TRY(each(context, &tensor, error_out));
    }
    return QE_OK;
}

static qe_status each_scale(const qe_team *team, each_tensor each, void *context, qe_error *error_out) {
    const qe_plan *plan = team->plan;
    uint64_t length = plan->model_ops->recipe(plan->model)->history_length;
    for (uint32_t weight = 0; weight < plan->weight_count; weight++)
        for (int role = 0; role < QE_SCALE_ROLES; role++) {
            if (scale_place(team, weight, role) == NULL) continue;
            char name[QE_NAME_BYTES + 16];
            const char *stem = plan->model_ops->weight(plan->model, weight)->name;
            qe_state_tensor tensor = {.kind = QE_STATE_SCALE, .name = name, .columns = 1, .weight = weight};
            tensor.role = role;
            tensor.parameter = QE_NONE;
            make_name(name, stem, roles[role], ".scale");
            QE_TRY(each(context, &tensor, error_out));
            tensor.kind = QE_STATE_HISTORY;
            tensor.columns = length;
            make_name(name, stem, roles[role], ".history");
            QE_TRY(each(context, &tensor, error_out));
        }
    return QE_OK;
}

/* The order of the hash. */
static qe_status each_of_state(const qe_team *team, each_tensor each, void *context, qe_error *error_out) {
    for (int kind = QE_STATE_PARAMETER; kind <= QE_STATE_MOMENT2; kind++)
        QE_TRY(each_parameter(team, (qe_state_kind)kind, each, context, error_out));
    return each_scale(team, each, context, error_out);
}

static uint64_t count_of(const qe_state_tensor *tensor) {
    return (tensor->rows == 0 ? 1 : tensor->rows) * tensor->columns;
}

/* Where a parameter's values or moments lie on their rank. */
static float *place_of(const qe_rank *rank, const qe_plan *plan, const qe_state_tensor *tensor) {
    const qe_parameter *parameter = plan->model_ops->parameter(plan->model, tensor->parameter);
    float *base = tensor->kind == QE_STATE_PARAMETER ? rank->places[tensor->weight].master
                  : tensor->kind == QE_STATE_MOMENT1 ? rank->moment1[tensor->weight]
                                                     : rank->moment2[tensor->weight];
    return base + (size_t)parameter->row_begin * parameter->columns;
}

/* As it is now, or as it was kept. */
typedef struct source {
    const qe_team *team;
    const struct qe_twin *twins; /* NULL: now */
} source;

static qe_status source_read(const source *s, const qe_rank *rank, void *to, const void *from, size_t bytes,
                             qe_error *error_out) {
    if (s->twins != NULL) return qe_twin_read(&s->twins[rank->index], to, from, bytes, error_out);
    return s->team->options.backend->memory->read(rank->device, to, from, bytes, error_out);
}

static qe_status read_scale(const source *s, uint32_t weight, int role, qe_scale_state *state_out,
                            qe_error *error_out) {
    return source_read(s, qe_team_owner(s->team, weight), state_out, scale_place(s->team, weight, role),
                       sizeof *state_out, error_out);
}

static qe_status write_scale(const qe_team *team, uint32_t weight, int role, const qe_scale_state *state,
                             qe_error *error_out) {
    qe_rank *rank = qe_team_owner(team, weight);
    return team->options.backend->memory->write(rank->device, rank->places[weight].scale[role], state, sizeof *state,
                                                error_out);
}

static qe_status read_tensor(const source *s, const qe_state_tensor *tensor, float *values_out, qe_error *error_out) {
    const qe_rank *rank = qe_team_owner(s->team, tensor->weight);
    size_t bytes = (size_t)count_of(tensor) * sizeof *values_out;
    if (tensor->kind <= QE_STATE_MOMENT2)
        return source_read(s, rank, values_out, place_of(rank, s->team->plan, tensor), bytes, error_out);
    qe_scale_state state;
    QE_TRY(read_scale(s, tensor->weight, tensor->role, &state, error_out));
    if (tensor->kind == QE_STATE_HISTORY)
        return source_read(s, rank, values_out, state.history, bytes, error_out);
    *values_out = state.scale;
    return QE_OK;
}

static qe_status write_tensor(const qe_team *team, const qe_state_tensor *tensor, qe_error *error_out) {
    const qe_memory_ops *memory = team->options.backend->memory;
    const qe_rank *rank = qe_team_owner(team, tensor->weight);
    size_t bytes = (size_t)count_of(tensor) * sizeof *tensor->values;
    if (tensor->kind <= QE_STATE_MOMENT2)
        return memory->write(rank->device, place_of(rank, team->plan, tensor), tensor->values, bytes, error_out);
    qe_scale_state state;
    const source now = {.team = team};
    QE_TRY(read_scale(&now, tensor->weight, tensor->role, &state, error_out));
    if (tensor->kind == QE_STATE_HISTORY)
        return memory->write(rank->device, state.history, tensor->values, bytes, error_out);
    state.scale = *tensor->values;
    state.amax = 0.0f;
    return write_scale(team, tensor->weight, tensor->role, &state, error_out);
}

/* --- looking ------------------------------------------------------------------------------------------------- */

typedef struct visitor {
    qe_team *team;
    void (*visit)(void *context, const qe_state_tensor *tensor);
    void *context;
    float *values; /* [most] */
    uint64_t most; /* values of the largest tensor */
} visitor;

static qe_status measure(void *context, const qe_state_tensor *tensor, qe_error *error_out) {
    visitor *v = context;
    (void)error_out;
    if (count_of(tensor) > v->most) v->most = count_of(tensor);
    return QE_OK;
}

static qe_status show(void *context, const qe_state_tensor *tensor, qe_error *error_out) {
    visitor *v = context;
    const source now = {.team = v->team};
    QE_TRY(read_tensor(&now, tensor, v->values, error_out));
    qe_state_tensor shown = *tensor;
    shown.values = v->values;
    v->visit(v->context, &shown);
    return QE_OK;
}

qe_status qe_team_state_visit(qe_team *team, void (*visit)(void *context, const qe_state_tensor *tensor),
                              void *context, qe_error *error_out) {
    visitor v = {.team = team, .visit = visit, .context = context};
    QE_TRY(qe_team_whole(team, error_out));
    QE_TRY(each_of_state(team, measure, &v, error_out));
    v.values = malloc((size_t)v.most * sizeof *v.values);
    if (v.values == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory to look at the state");
    qe_status status = each_of_state(team, show, &v, error_out);
    free(v.values);
    return status;
}

static void hash_tensor(void *context, const qe_state_tensor *tensor) {
    uint64_t shape[2] = {tensor->rows, tensor->columns};
    if (tensor->rows == 0) qe_hash_tensor(context, tensor->name, 1, &shape[1], tensor->values);
    else qe_hash_tensor(context, tensor->name, 2, shape, tensor->values);
}

qe_status qe_team_state_hash(qe_team *team, char text_out[QE_STATE_HASH_BYTES], qe_error *error_out) {
    qe_hash hash;
    qe_hash_init(&hash);
    QE_TRY(qe_team_state_visit(team, hash_tensor, &hash, error_out));
    qe_hash_text(qe_hash_digest(&hash), text_out);
    return QE_OK;
}

/* --- copying ------------------------------------------------------------------------------------------------- */

/* Counted first, then laid out. */
typedef struct layout {
    qe_snapshot *snapshot; /* NULL: only counted */
    uint32_t tensors;
    uint64_t values;
} layout;

static qe_status place_tensor(void *context, const qe_state_tensor *tensor, qe_error *error_out) {
    layout *at = context;
    qe_snapshot *snapshot = at->snapshot;
    (void)error_out;
    if (snapshot != NULL) {
        char *name = snapshot->names[at->tensors];
        snprintf(name, sizeof snapshot->names[0], "%s", tensor->name);
        snapshot->tensors[at->tensors] = *tensor;
        snapshot->tensors[at->tensors].name = name;
        snapshot->tensors[at->tensors].values = snapshot->values + at->values;
        if (tensor->kind == QE_STATE_SCALE) snapshot->values[at->values] = 1.0f;
    }
    at->tensors++;
    at->values += count_of(tensor);
    return QE_OK;
}

static void add_count(qe_snapshot *snapshot, const char *stem, uint32_t weight, int role) {
    char *name = snapshot->names[snapshot->tensor_count + snapshot->count_count];
    make_name(name, stem, role < 0 ? "" : roles[role], "");
    snapshot->counts[snapshot->count_count++] = (qe_snapshot_count){.name = name, .weight = weight, .role = role};
}

static void place_counts(const qe_team *team, qe_snapshot *snapshot) {
    const qe_plan *plan = team->plan;
    for (uint32_t weight = 0; weight < plan->weight_count; weight++)
        add_count(snapshot, plan->model_ops->weight(plan->model, weight)->name, weight, -1);
    for (uint32_t i = 0; i < snapshot->tensor_count; i++) {
        const qe_state_tensor *tensor = &snapshot->tensors[i];
        if (tensor->kind != QE_STATE_SCALE) continue;
        add_count(snapshot, plan->model_ops->weight(plan->model, tensor->weight)->name, tensor->weight, tensor->role);
    }
}

qe_status qe_snapshot_create(qe_team *team, qe_snapshot **snapshot_out, qe_error *error_out) {
    QE_ASSERT(!team->plan->options.forward_only);
    layout counted = {0};
    QE_TRY(each_of_state(team, place_tensor, &counted, error_out));
    qe_snapshot *snapshot = calloc(1, sizeof *snapshot);
    if (snapshot == NULL) goto no_memory;
    size_t counts = (size_t)team->plan->weight_count * (1 + QE_SCALE_ROLES);
    snapshot->value_count = counted.values;
    snapshot->tensors = calloc(counted.tensors, sizeof *snapshot->tensors);
    snapshot->counts = calloc(counts, sizeof *snapshot->counts);
    snapshot->names = calloc(counted.tensors + counts, sizeof *snapshot->names);
    snapshot->values = malloc((size_t)counted.values * sizeof *snapshot->values);
    if (!snapshot->tensors || !snapshot->counts || !snapshot->names || !snapshot->values) goto no_memory;
    memset(snapshot->values, 0, (size_t)counted.values * sizeof *snapshot->values); /* pages are there from now on */
    layout placed = {.snapshot = snapshot};
    qe_status status = each_of_state(team, place_tensor, &placed, error_out);
    QE_ASSERT(status == QE_OK);
    QE_ASSERT(placed.values == counted.values);
    snapshot->tensor_count = placed.tensors;
    place_counts(team, snapshot);
    *snapshot_out = snapshot;
    return QE_OK;
no_memory:
    qe_snapshot_destroy(snapshot);
    return qe_error_set(error_out, QE_ERROR_MEMORY, "keep no checkpoints (checkpoint.every=0) or free memory",
                        "no memory for a copy of the state, %llu MiB", (unsigned long long)(counted.values >> 18));
}

void qe_snapshot_destroy(qe_snapshot *snapshot) {
    if (snapshot == NULL) return;
    if (snapshot->twins != NULL) qe_twins_destroy(snapshot->twins, snapshot->team->rank_count);
    free(snapshot->tensors);
    free(snapshot->counts);
    free(snapshot->names);
    free(snapshot->values);
    free(snapshot);
}

float *qe_snapshot_values(const qe_snapshot *snapshot, uint32_t tensor) {
    QE_ASSERT(tensor < snapshot->tensor_count);
    return snapshot->values + (snapshot->tensors[tensor].values - snapshot->values);
}

/* The ledger of training knows versions; without a training plan there is nothing to take. */
static void read_versions(const qe_team *team, qe_snapshot *snapshot) {
    for (uint32_t i = 0; i < snapshot->count_count; i++) {
        qe_snapshot_count *count = &snapshot->counts[i];
        const qe_binding *binding = &qe_team_owner(team, count->weight)->train;
        if (count->role < 0)
            count->count = qe_ledger_counter(binding->ledger, binding->places[count->weight].weight_object);
    }
}

static qe_status read_epochs(const source *s, qe_snapshot *snapshot, qe_error *error_out) {
    for (uint32_t i = 0; i < snapshot->count_count; i++) {
        qe_snapshot_count *count = &snapshot->counts[i];
        qe_scale_state state;
        if (count->role < 0) continue;
        QE_TRY(read_scale(s, count->weight, count->role, &state, error_out));
        count->count = state.epoch;
    }
    return QE_OK;
}

/* The tensors of one rank; NULL: of all. */
static qe_status read_values(const source *s, const qe_rank *rank, qe_snapshot *snapshot, qe_error *error_out) {
    for (uint32_t i = 0; i < snapshot->tensor_count; i++) {
        const qe_state_tensor *tensor = &snapshot->tensors[i];
        if (rank != NULL && qe_team_owner(s->team, tensor->weight) != rank) continue;
        QE_TRY(read_tensor(s, tensor, qe_snapshot_values(snapshot, i), error_out));
    }
    return QE_OK;
}

void qe_rank_copy(qe_rank *rank) {
    const source now = {.team = rank->team};
    rank->copied = read_values(&now, rank, rank->team->copying, &rank->error);
}

/* Ranks side by side: their processors have nothing else to do. */
static qe_status copy_all(qe_team *team, qe_snapshot *snapshot, qe_error *error_out) {
    team->copying = snapshot;
    qe_team_command_all(team, QE_COMMAND_COPY);
    team->copying = NULL;
    for (uint32_t i = 0; i < team->rank_count; i++) {
        const qe_rank *rank = &team->ranks[i];
        if (rank->copied == QE_OK) continue;
        if (error_out != NULL) *error_out = rank->error;
        return rank->copied;
    }
    return QE_OK;
}

qe_status qe_team_snapshot_take(qe_team *team, qe_snapshot *snapshot, qe_error *error_out) {
    const source now = {.team = team};
    QE_TRY(qe_team_whole(team, error_out));
    read_versions(team, snapshot);
    if (snapshot->twins == NULL) {
        QE_TRY(copy_all(team, snapshot, error_out));
        return read_epochs(&now, snapshot, error_out);
    }
    QE_ASSERT(snapshot->team == team);
    for (uint32_t i = 0; i < team->rank_count; i++) QE_TRY(qe_twin_keep(&snapshot->twins[i], error_out));
    snapshot->is_kept = 1;
    return QE_OK;
}

qe_status qe_snapshot_fetch(qe_snapshot *snapshot, qe_error *error_out) {
    const source kept = {.team = snapshot->team, .twins = snapshot->twins};
    if (!snapshot->is_kept) return QE_OK;
    QE_TRY(read_values(&kept, NULL, snapshot, error_out));
    QE_TRY(read_epochs(&kept, snapshot, error_out));
    snapshot->is_kept = 0;
    return QE_OK;
}

void qe_snapshot_twin(qe_team *team, qe_snapshot *snapshot) {
    QE_ASSERT(snapshot->twins == NULL);
    snapshot->twins = qe_twins_create(team);
    snapshot->team = team;
}

/* --- putting back -------------------------------------------------------------------------------------------- */

typedef struct comparison {
    const qe_snapshot *snapshot;
    uint32_t index;
    int differs;
} comparison;

static qe_status compare(void *context, const qe_state_tensor *tensor, qe_error *error_out) {
    comparison *c = context;
    (void)error_out;
    const qe_state_tensor *other = c->index < c->snapshot->tensor_count ? &c->snapshot->tensors[c->index++] : NULL;
    c->differs |= other == NULL || strcmp(other->name, tensor->name) != 0 || other->rows != tensor->rows ||
                  other->columns != tensor->columns;
    return QE_OK;
}

static qe_status check_fits(const qe_team *team, const qe_snapshot *snapshot, qe_error *error_out) {
    comparison c = {.snapshot = snapshot};
    QE_TRY(each_of_state(team, compare, &c, error_out));
    if (!c.differs && c.index == snapshot->tensor_count) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, "make it with qe_snapshot_create for this team",
                        "the snapshot is of another model or recipe");
}

static void touch(const qe_binding *binding, const qe_snapshot_count *count) {
    if (binding->plan == NULL) return;
    const qe_weight_place *place = &binding->places[count->weight];
    uint32_t object = count->role < 0 ? place->weight_object : place->scale_object[count->role];
    if (object != QE_NONE) qe_ledger_touch(binding->ledger, object, count->count);
}

static qe_status write_count(const qe_team *team, const qe_snapshot_count *count, qe_error *error_out) {
    qe_rank *rank = qe_team_owner(team, count->weight);
    touch(&rank->train, count);
    touch(&rank->evaluate, count);
    if (count->role < 0) return QE_OK;
    qe_scale_state state;
    const source now = {.team = team};
    QE_TRY(read_scale(&now, count->weight, count->role, &state, error_out));
    state.epoch = count->count;
    return write_scale(team, count->weight, count->role, &state, error_out);
}

qe_status qe_team_snapshot_put(qe_team *team, const qe_snapshot *snapshot, qe_error *error_out) {
    qe_status status = QE_OK;
    QE_TRY(qe_team_whole(team, error_out));
    QE_TRY(check_fits(team, snapshot, error_out));
    for (uint32_t i = 0; i < team->rank_count; i++) {
        team->ranks[i].has_caches = 0;
        team->ranks[i].caches_unsealed = 1;
        team->ranks[i].words_stale = 1;
    }
    for (uint32_t i = 0; status == QE_OK && i < snapshot->tensor_count; i++)
        status = write_tensor(team, &snapshot->tensors[i], error_out);
    for (uint32_t i = 0; status == QE_OK && i < snapshot->count_count; i++)
        status = write_count(team, &snapshot->counts[i], error_out);
    team->torn |= status != QE_OK;
    return status;
}
