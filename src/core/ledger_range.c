/* ledger_range.c - byte ranges of spaces. A space starts as one range; a read or write that meets part of one splits
 * it, a write joins the ranges it covers. The room for the program's own splits is taken when the ledger is made; other
 * ranges may take more, before anything is changed. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "core/effect.h"
#include "core/ledger_state.h"

enum { SPLITS_PER_EFFECT = 2 }; /* at its begin and at its end */

static qe_access *reads_of(const qe_ledger *ledger, uint32_t id) {
    return &ledger->pool_reads[(size_t)id * ledger->stream_count];
}

static qe_status grow_pool(qe_ledger *ledger, uint32_t capacity) {
    QE_ASSERT(capacity > ledger->pool_capacity);
    uint32_t *pool_free = realloc(ledger->pool_free, (size_t)capacity * sizeof *pool_free);
    if (pool_free == NULL) return QE_ERROR_MEMORY;
    ledger->pool_free = pool_free;
    qe_range *pool = realloc(ledger->pool, (size_t)capacity * sizeof *pool);
    if (pool == NULL) return QE_ERROR_MEMORY;
    ledger->pool = pool;
    size_t reads = (size_t)(ledger->stream_count > 0 ? ledger->stream_count : 1) * capacity;
    qe_access *pool_reads = realloc(ledger->pool_reads, reads * sizeof *pool_reads);
    if (pool_reads == NULL) return QE_ERROR_MEMORY;
    ledger->pool_reads = pool_reads;
    for (uint32_t id = capacity; id > ledger->pool_capacity; id--)
        ledger->pool_free[ledger->pool_free_count++] = id - 1;
    ledger->pool_capacity = capacity;
    return QE_OK;
}

static qe_status reserve_pool(qe_ledger *ledger, uint32_t more) {
    if (ledger->pool_free_count >= more) return QE_OK;
    uint32_t doubled = ledger->pool_capacity * 2;
    uint32_t wanted = ledger->pool_capacity + more;
    return grow_pool(ledger, doubled > wanted ? doubled : wanted);
}

/* Whether rows may split so many more. What else splits is two for each effect; rows are thousands in one line. */
static int may_split_rows(const qe_ledger *ledger, uint32_t more) {
    uint64_t effects = ledger->program->effect_count, kib = 1024;
    uint64_t bytes = QE_ROWS_MIB_MAX * kib * kib + effects * QE_ROWS_EFFECT_KIB_MAX * kib;
    uint64_t range_bytes = sizeof(qe_range) + ledger->stream_count * sizeof(qe_access);
    uint64_t most = bytes / range_bytes + SPLITS_PER_EFFECT * effects + ledger->object_count;
    return ledger->pool_free_count >= more || (uint64_t)ledger->pool_capacity + more <= most;
}

/* A node stands above those of a lower rank. */
static uint32_t rank_of(uint32_t id) {
    uint32_t hash = (id + 1) * 0x9e3779b1u;
    hash = (hash ^ hash >> 15) * 0x85ebca77u;
    return hash ^ hash >> 13;
}

/* The range that holds byte `at`, or QE_NONE when there is none. */
static uint32_t range_at(const qe_ledger *ledger, const qe_range_list *list, uint64_t at) {
    uint32_t id = list->bytes > 0 ? list->root : QE_NONE;
    while (id != QE_NONE) {
        const qe_range *range = &ledger->pool[id];
        if (at >= range->begin && at < range->end) return id;
        id = at < range->begin ? range->left : range->right;
    }
    return QE_NONE;
}

static void tree_insert(qe_ledger *ledger, qe_range_list *list, uint32_t id) {
    qe_range *pool = ledger->pool;
    uint64_t begin = pool[id].begin;
    uint32_t *link = &list->root, rank = rank_of(id);
    while (*link != QE_NONE && rank_of(*link) >= rank)
        link = begin < pool[*link].begin ? &pool[*link].left : &pool[*link].right;
    uint32_t below = *link, *left = &pool[id].left, *right = &pool[id].right;
    *link = id;
    while (below != QE_NONE) {
        uint32_t **side = pool[below].begin < begin ? &left : &right;
        uint32_t *inner = side == &left ? &pool[below].right : &pool[below].left;
        **side = below;
        *side = inner;
        below = *inner;
    }
    *left = *right = QE_NONE;
}

static void tree_remove(qe_ledger *ledger, qe_range_list *list, uint32_t id) {
    qe_range *pool = ledger->pool;
    uint32_t *link = &list->root;
    while (*link != id) {
        QE_ASSERT(*link != QE_NONE);
        link = pool[id].begin < pool[*link].begin ? &pool[*link].left : &pool[*link].right;
    }
    uint32_t left = pool[id].left, right = pool[id].right;
    while (left != QE_NONE && right != QE_NONE) {
        int above = rank_of(left) >= rank_of(right);
        *link = above ? left : right;
        link = above ? &pool[left].right : &pool[right].left;
        if (above) left = *link;
        else right = *link;
    }
    *link = left != QE_NONE ? left : right;
}

/* Where an effect's bytes have their history: in the world, or in a recording. */
static qe_range_list *list_of(const qe_ledger *ledger, const qe_effect *effect, uint32_t recording) {
    uint32_t space = ledger->space[effect->object];
    return recording != 0 ? qe_graph_list(ledger, recording, space) : &ledger->ranges[space];
}

typedef struct span {
    uint64_t begin, end;
} span;

/* Rows that meet or lie on one another are one range, and touched once. */
static int has_gaps(const qe_effect *effect) {
    return qe_effect_has_rows(effect) && effect->pitch > effect->end - effect->begin;
}

static uint32_t rows_of(const qe_effect *effect) { return has_gaps(effect) ? effect->rows : 1; }

/* Bytes of one row, in the effect's space. */
static span row_of(const qe_ledger *ledger, const qe_effect *effect, uint32_t row) {
    uint64_t by = ledger->shift[effect->object] + (row > 0 ? row * effect->pitch : 0);
    return (span){effect->begin + by, (has_gaps(effect) ? effect->end : qe_effect_reach(effect)) + by};
}

static int is_border(const qe_ledger *ledger, const qe_range_list *list, uint64_t at) {
    uint32_t id = range_at(ledger, list, at);
    return id == QE_NONE || ledger->pool[id].begin == at;
}

/* Splits that an effect needs; 0 where both its ends are borders already. What a faulty effect needs is not asked:
 * it will not be applied. */
static uint32_t count_splits(const qe_ledger *ledger, const qe_effect *effect, uint32_t recording) {
    if (effect->begin >= effect->end || qe_effect_is_allocators(effect)) {
        if (effect->kind != QE_EFFECT_BUFFER_TAKE && effect->kind != QE_EFFECT_BUFFER_DROP) return 0;
    }
    if (qe_effect_reach(effect) > ledger->program->objects[effect->object].bytes) return 0;
    const qe_range_list *list = list_of(ledger, effect, recording);
    uint32_t rows = rows_of(effect), splits = 0;
    if (rows > 1 && ledger->pool_free_count >= SPLITS_PER_EFFECT * rows) return SPLITS_PER_EFFECT * rows; /* at most */
    for (uint32_t row = 0; row < rows; row++) {
        span bytes = row_of(ledger, effect, row);
        splits += (is_border(ledger, list, bytes.begin) ? 0u : 1u) + (is_border(ledger, list, bytes.end) ? 0u : 1u);
    }
    return splits;
}

static int is_buffer(const qe_ledger *ledger, const qe_effect *effect) {
    return ledger->program->objects[effect->object].kind == QE_OBJECT_BUFFER;
}

qe_status qe_range_reserve(qe_ledger *ledger, const qe_effect *effects, uint32_t count, uint32_t recording) {
    uint32_t splits = 0;
    int rows = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!is_buffer(ledger, &effects[i])) continue;
        rows = rows || has_gaps(&effects[i]);
        if (recording != 0) QE_TRY(qe_graph_reserve_list(ledger, recording, ledger->space[effects[i].object]));
        splits += count_splits(ledger, &effects[i], recording);
    }
    if (rows && !may_split_rows(ledger, splits)) {
        ledger->excess = QE_EXCESS_ROWS;
        return QE_ERROR_LIMIT;
    }
    return splits > 0 ? reserve_pool(ledger, splits) : QE_OK;
}

static uint32_t take_range(qe_ledger *ledger) {
    QE_ASSERT(ledger->pool_free_count > 0);
    return ledger->pool_free[--ledger->pool_free_count];
}

/* Makes `at` a border. */
static void split(qe_ledger *ledger, qe_range_list *list, uint64_t at) {
    uint32_t id = range_at(ledger, list, at);
    if (id == QE_NONE || ledger->pool[id].begin == at) return;
    uint32_t behind = take_range(ledger);
    ledger->pool[behind] = ledger->pool[id];
    ledger->pool[behind].begin = at;
    ledger->pool[id].end = at;
    ledger->pool[id].next = behind;
    memcpy(reads_of(ledger, behind), reads_of(ledger, id), ledger->stream_count * sizeof(qe_access));
    tree_insert(ledger, list, behind);
}

/* A write made both one history again, except where counts of writes, what was before the step, or who lies there
 * differ. */
static int may_join(const qe_ledger *ledger, const qe_range *left, const qe_range *right) {
    return qe_range_writes(ledger, left) == qe_range_writes(ledger, right) && left->before == right->before &&
           left->owner == right->owner && left->written == right->written;
}

static void join(qe_ledger *ledger, qe_range_list *list, uint32_t first, uint32_t stop) {
    for (uint32_t kept = first, id = ledger->pool[first].next; id != stop; id = ledger->pool[kept].next) {
        qe_range *left = &ledger->pool[kept];
        const qe_range *behind = &ledger->pool[id];
        QE_ASSERT(left->end == behind->begin);
        if (!may_join(ledger, left, behind)) {
            kept = id;
            continue;
        }
        tree_remove(ledger, list, id);
        left->end = behind->end;
        left->next = behind->next;
        ledger->pool_free[ledger->pool_free_count++] = id;
    }
}

/* Borders at both ends; the first range between them, and the one behind the last. Returns 0 for an empty range. */
static int isolate(qe_ledger *ledger, qe_range_list *list, span bytes, uint32_t *first_out, uint32_t *stop_out) {
    if (bytes.begin >= bytes.end) return 0;
    split(ledger, list, bytes.begin);
    split(ledger, list, bytes.end);
    *first_out = range_at(ledger, list, bytes.begin);
    *stop_out = range_at(ledger, list, bytes.end);
    QE_ASSERT(*first_out != QE_NONE);
    return 1;
}

static void count_write(const qe_ledger *ledger, qe_range *range) {
    range->writes = qe_range_writes(ledger, range) + 1;
    range->step = ledger->range_step;
    range->written = 1;
}

static void forget_accesses(qe_ledger *ledger, uint32_t id) {
    ledger->pool[id].write = (qe_access){0};
    memset(reads_of(ledger, id), 0, ledger->stream_count * sizeof(qe_access));
}

/* New memory holds nothing, and nobody has written it in this step. */
static void begin_life(const qe_ledger *ledger, qe_range *range, uint32_t buffer) {
    range->owner = buffer;
    range->written = 0;
    range->writes = 0;
    range->step = ledger->range_step;
}

static void forget_covered(qe_access *access, const qe_clock *clock) {
    if (access->clock > 0 && clock->at[access->stream] >= access->clock) *access = (qe_access){0};
}

/* The allocator waits for every stream that pledged, and so for all that those had waited for. */
static void forget_pledged(qe_ledger *ledger, uint32_t id, uint64_t pledged) {
    qe_access *reads = reads_of(ledger, id);
    for (; pledged != 0; pledged &= pledged - 1) {
        const qe_clock *clock = qe_clock_given(ledger, (uint32_t)__builtin_ctzll(pledged));
        forget_covered(&ledger->pool[id].write, clock);
        for (uint32_t s = 0; s < ledger->stream_count; s++) forget_covered(&reads[s], clock);
    }
}

/* What an effect leaves in one range. `reused`: earlier users were told of, and are forgotten. */
static void apply_to(qe_ledger *ledger, uint32_t id, const qe_effect *effect, qe_access access, int reused) {
    qe_range *range = &ledger->pool[id];
    qe_access *reads = reads_of(ledger, id);
    if (reused) forget_accesses(ledger, id);
    switch ((qe_effect_kind)effect->kind) {
    case QE_EFFECT_BUFFER_READ: reads[access.stream] = access; return;
    case QE_EFFECT_BUFFER_TAKE: begin_life(ledger, range, effect->object); return;
    case QE_EFFECT_BUFFER_DROP:
        range->owner = QE_NONE;
        forget_pledged(ledger, id, ledger->state[effect->object].counter);
        return;
    case QE_EFFECT_BUFFER_ALLOC: begin_life(ledger, range, effect->object); break;
    case QE_EFFECT_BUFFER_FREE: range->owner = QE_NONE; break;
    default: count_write(ledger, range);
    }
    range->write = access;
    memset(reads, 0, ledger->stream_count * sizeof *reads);
}

void qe_range_apply(qe_ledger *ledger, const qe_judgement *judgement, uint32_t effect_index) {
    const qe_effect *effect = &judgement->effects[effect_index];
    if (effect->kind == QE_EFFECT_BUFFER_PLEDGE) return;
    uint32_t stream = judgement->item->stream, rows = rows_of(effect), first, stop;
    qe_access access = {judgement->clock.at[stream], judgement->index, stream};
    qe_range_list *list = list_of(ledger, effect, judgement->recording);
    int reused = (judgement->reused >> effect_index & 1u) != 0;
    for (uint32_t row = 0; row < rows; row++) {
        if (!isolate(ledger, list, row_of(ledger, effect, row), &first, &stop)) continue;
        for (uint32_t id = first; id != stop; id = ledger->pool[id].next)
            apply_to(ledger, id, effect, access, reused);
        if (qe_effect_writes(effect)) join(ledger, list, first, stop);
    }
    if (effect->kind == QE_EFFECT_BUFFER_DROP) ledger->state[effect->object].counter = 0;
}

void qe_range_apply_unordered(qe_ledger *ledger, const qe_judgement *judgement, uint32_t effect_index) {
    const qe_effect *effect = &judgement->effects[effect_index];
    uint32_t rows = rows_of(effect), first, stop;
    if (!qe_effect_writes(effect) || qe_effect_object_kind(effect->kind) != QE_OBJECT_BUFFER) return;
    qe_range_list *list = list_of(ledger, effect, judgement->recording);
    for (uint32_t row = 0; row < rows; row++) {
        if (!isolate(ledger, list, row_of(ledger, effect, row), &first, &stop)) continue;
        for (uint32_t id = first; id != stop; id = ledger->pool[id].next) {
            qe_range *range = &ledger->pool[id];
            if (effect->kind == QE_EFFECT_BUFFER_ALLOC) begin_life(ledger, range, effect->object);
            else if (effect->kind == QE_EFFECT_BUFFER_FREE) range->owner = QE_NONE;
            else count_write(ledger, range);
        }
    }
}

void qe_range_mark(qe_ledger *ledger, const qe_effect *effect) {
    uint32_t first, stop;
    qe_range_list *list = list_of(ledger, effect, 0);
    if (!isolate(ledger, list, row_of(ledger, effect, 0), &first, &stop)) return;
    for (uint32_t id = first; id != stop; id = ledger->pool[id].next) ledger->pool[id].written = 1;
}

/* How many earlier effects of the op itself write byte `at`, and where that changes next, at `until_out` or before. In
 * a trace what is there holds them already; a ledger's effects have no rows. */
static uint32_t own_writes(const qe_judgement *judgement, uint32_t effect_index, uint64_t at, uint64_t *until_out) {
    const qe_ledger *ledger = judgement->ledger;
    uint32_t space = ledger->space[judgement->effects[effect_index].object], count = 0;
    for (uint32_t i = 0; i < effect_index && !ledger->foreign; i++) {
        const qe_effect *effect = &judgement->effects[i];
        if (effect->kind != QE_EFFECT_BUFFER_WRITE || ledger->space[effect->object] != space) continue;
        span bytes = row_of(ledger, effect, 0);
        uint64_t border = at < bytes.begin ? bytes.begin : bytes.end;
        count += at >= bytes.begin && at < bytes.end;
        if (border > at && border < *until_out) *until_out = border;
    }
    return count;
}

static void check_read(qe_judgement *judgement, uint32_t effect_index, const qe_range *range, span row) {
    const qe_effect *effect = &judgement->effects[effect_index];
    uint32_t before = qe_range_writes(judgement->ledger, range);
    uint64_t begin = range->begin > row.begin ? range->begin : row.begin;
    uint64_t end = range->end < row.end ? range->end : row.end;
    for (uint64_t at = begin, until = end; at < end; at = until, until = end) {
        uint32_t own = own_writes(judgement, effect_index, at, &until);
        if (!range->written && own == 0) {
            qe_finding finding = {QE_RULE_BUFFER_UNWRITTEN, at - judgement->ledger->shift[effect->object], 0};
            qe_judgement_report(judgement, effect_index, &finding, NULL);
        } else if (effect->version != 0 && effect->version != before + own) {
            qe_finding finding = {QE_RULE_BUFFER_VERSION, effect->version, before + own};
            qe_judgement_report(judgement, effect_index, &finding, &range->write);
        }
    }
}

/* Memory is handed out where nothing lies. */
static void check_place(qe_judgement *judgement, uint32_t effect_index, const qe_range *range) {
    const qe_ledger *ledger = judgement->ledger;
    const qe_effect *effect = &judgement->effects[effect_index];
    int begins = effect->kind == QE_EFFECT_BUFFER_ALLOC || effect->kind == QE_EFFECT_BUFFER_TAKE;
    if (!begins || range->owner == QE_NONE || range->owner == effect->object || judgement->recording != 0) return;
    const qe_object *objects = ledger->program->objects;
    qe_finding finding = {QE_RULE_BUFFER_LIVE, objects[effect->object].address, objects[range->owner].address};
    qe_judgement_report(judgement, effect_index, &finding, &ledger->writes[range->owner]);
}

static void check_row(qe_judgement *judgement, uint32_t effect_index, span row) {
    const qe_ledger *ledger = judgement->ledger;
    const qe_effect *effect = &judgement->effects[effect_index];
    const qe_range_list *list = list_of(ledger, effect, judgement->recording);
    int reads = effect->kind == QE_EFFECT_BUFFER_READ;
    for (uint32_t id = range_at(ledger, list, row.begin); id != QE_NONE; id = ledger->pool[id].next) {
        const qe_range *range = &ledger->pool[id];
        if (range->begin >= row.end) break;
        check_place(judgement, effect_index, range);
        if (reads && judgement->recording == 0) check_read(judgement, effect_index, range, row);
        qe_touches touches = {range->write, reads_of(ledger, id)};
        if (!qe_effect_is_allocators(effect)) qe_access_judge(judgement, effect_index, &touches);
    }
}

void qe_range_check(qe_judgement *judgement, uint32_t effect_index) {
    const qe_effect *effect = &judgement->effects[effect_index];
    uint32_t rows = rows_of(effect);
    if (effect->begin >= effect->end) return;
    for (uint32_t row = 0; row < rows; row++)
        check_row(judgement, effect_index, row_of(judgement->ledger, effect, row));
}

void qe_range_begin_step(qe_ledger *ledger) { ledger->range_step++; }

void qe_range_reset(qe_ledger *ledger) {
    qe_range_begin_step(ledger);
    for (uint32_t object = 0; object < ledger->object_count; object++) {
        uint32_t id = ledger->ranges[object].bytes > 0 ? ledger->ranges[object].first : QE_NONE;
        for (; id != QE_NONE; id = ledger->pool[id].next) {
            forget_accesses(ledger, id);
            ledger->pool[id].before = ledger->pool[id].written;
        }
    }
}

qe_status qe_range_list_open(qe_ledger *ledger, qe_range_list *list, uint64_t bytes) {
    *list = (qe_range_list){QE_NONE, QE_NONE, bytes};
    if (bytes == 0) return QE_OK;
    QE_TRY(reserve_pool(ledger, 1));
    uint32_t id = take_range(ledger);
    ledger->pool[id] = (qe_range){.end = bytes, .owner = QE_NONE, .written = 1};
    ledger->pool[id].next = ledger->pool[id].left = ledger->pool[id].right = QE_NONE;
    memset(reads_of(ledger, id), 0, ledger->stream_count * sizeof(qe_access));
    list->first = list->root = id;
    return QE_OK;
}

void qe_range_list_close(qe_ledger *ledger, qe_range_list *list) {
    for (uint32_t id = list->bytes > 0 ? list->first : QE_NONE; id != QE_NONE; id = ledger->pool[id].next)
        ledger->pool_free[ledger->pool_free_count++] = id;
    *list = (qe_range_list){0};
}

static qe_status open_list(qe_ledger *ledger, uint32_t object) {
    qe_range_list *list = &ledger->ranges[object];
    if (list->bytes == 0) return QE_OK;
    QE_TRY(qe_range_list_open(ledger, list, list->bytes));
    ledger->pool[list->first].written = 0;
    return QE_OK;
}

/* Effects whose range is not their whole space: only they split. */
static uint32_t count_partial(const qe_ledger *ledger) {
    const qe_program *program = ledger->program;
    uint32_t total = 0;
    for (uint32_t i = 0; i < program->effect_count; i++) {
        const qe_effect *effect = &program->effects[i];
        if (!is_buffer(ledger, effect)) continue;
        uint32_t space = ledger->space[effect->object];
        if (effect->begin == 0 && effect->end == ledger->ranges[space].bytes) continue;
        total++;
    }
    return total;
}

/* What is there at the beginning, and what of it was written. */
static qe_status place(qe_ledger *ledger, uint32_t object) {
    const qe_object *buffer = &ledger->program->objects[object];
    qe_effect whole = {.object = object, .kind = QE_EFFECT_BUFFER_WRITE, .end = buffer->bytes};
    uint32_t first, stop;
    if (buffer->kind != QE_OBJECT_BUFFER || buffer->bytes == 0 || buffer->counter == QE_BUFFER_ABSENT) return QE_OK;
    if (buffer->counter == QE_BUFFER_UNWRITTEN && buffer->address == 0) return QE_OK;
    QE_TRY(qe_range_reserve(ledger, &whole, 1, 0));
    qe_range_list *list = list_of(ledger, &whole, 0);
    if (!isolate(ledger, list, row_of(ledger, &whole, 0), &first, &stop)) return QE_OK;
    for (uint32_t id = first; id != stop; id = ledger->pool[id].next) {
        qe_range *range = &ledger->pool[id];
        int wider = range->owner == QE_NONE || ledger->program->objects[range->owner].bytes < buffer->bytes;
        if (buffer->address > 0 && wider) range->owner = object; /* a view of a block does not own it */
        if (buffer->counter == QE_BUFFER_WRITTEN) range->written = 1;
    }
    return QE_OK;
}

qe_status qe_range_open(qe_ledger *ledger, qe_error *error_out) {
    /* A trace takes what it needs as it goes; a ledger takes the most that its program can split. */
    uint32_t partial = ledger->foreign ? 0 : count_partial(ledger);
    qe_status status = grow_pool(ledger, ledger->object_count + 1 + SPLITS_PER_EFFECT * partial);
    for (uint32_t i = 0; i < ledger->object_count && status == QE_OK; i++) status = open_list(ledger, i);
    for (uint32_t i = 0; i < ledger->object_count && status == QE_OK; i++) status = place(ledger, i);
    if (status == QE_OK) return QE_OK;
    return qe_error_set(error_out, status, NULL, "no memory for the byte ranges of %u objects", ledger->object_count);
}

void qe_range_close(qe_ledger *ledger) {
    free(ledger->ranges);
    free(ledger->pool);
    free(ledger->pool_reads);
    free(ledger->pool_free);
}
