/* draw_timeline.c - Chrome's trace events: one object per line in "traceEvents", times in microseconds. */
#include "schedule/draw.h"
#include "schedule/order.h"

#include <stdlib.h>

#include "base/assert.h"

typedef struct timeline {
    const qe_drawing *drawing;
    const qe_schedule *schedule;
    const qe_simulation *times;
    qe_canvas canvas;
    uint32_t *producer[2]; /* [stages * microbatches] index of the F, and of the I or B; QE_NONE */
    uint64_t flow;         /* of the next arrow */
    int training;
} timeline;

enum { THREAD_ACTIONS, THREAD_STEP };

#define PUT(timeline, ...) qe_text_builder_append(&(timeline)->canvas.text, __VA_ARGS__)

static double us(const timeline *t, double time) { return time * t->drawing->unit_us; }

static void put_name(timeline *t, uint32_t rank, const char *what, int thread, const char *name) {
    PUT(t, ",\n{\"ph\":\"M\",\"pid\":%u,\"tid\":%d,\"name\":\"%s\",\"args\":{\"name\":\"%s\"}}", rank, thread, what,
        name);
}

static void put_names(timeline *t, uint32_t rank) {
    char name[32];
    (void)snprintf(name, sizeof name, "rank %u", rank);
    put_name(t, rank, "process_name", THREAD_ACTIONS, name);
    PUT(t, ",\n{\"ph\":\"M\",\"pid\":%u,\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%u}}", rank, rank);
    put_name(t, rank, "thread_name", THREAD_ACTIONS, "actions");
    if (t->training) put_name(t, rank, "thread_name", THREAD_STEP, "commit and fold");
}

/* The trace viewer's own colours, the same kind always in the same one. */
static const char *colour(const qe_action *action) {
    static const char *const colours[QE_ACTION_KINDS] = {"thread_state_running", "good", "bad", "rail_response"};
    return colours[action->kind];
}

static void put_action(timeline *t, uint32_t rank, uint32_t index) {
    const qe_action *action = &t->schedule->actions[index];
    char name[32];
    (void)qe_action_text(action, name, sizeof name);
    PUT(t, ",\n{\"ph\":\"X\",\"pid\":%u,\"tid\":%d,\"name\":\"%s\",\"cat\":\"%c\",\"ts\":%.3f,\"dur\":%.3f,"
           "\"cname\":\"%s\",\"args\":{\"stage\":%u,\"microbatch\":%u}}",
        rank, THREAD_ACTIONS, name, qe_draw_letter(action), us(t, t->times->start[index]),
        us(t, t->times->end[index] - t->times->start[index]), colour(action), action->stage, action->microbatch);
}

static void put_kept(timeline *t, uint32_t rank, double time, const uint32_t *kept) {
    PUT(t, ",\n{\"ph\":\"C\",\"pid\":%u,\"name\":\"kept microbatches\",\"ts\":%.3f,"
           "\"args\":{\"F to I\":%u,\"I to W\":%u}}",
        rank, us(t, time), kept[QE_KEEP_I], kept[QE_KEEP_W]);
}

/* Counters change where an action begins to keep, and where it ends and gives back. */
static void follow_kept(timeline *t, uint32_t rank, uint32_t index, uint32_t *kept) {
    int kind = t->schedule->actions[index].kind;
    if (kind == QE_ACTION_F) {
        kept[QE_KEEP_I]++;
        put_kept(t, rank, t->times->start[index], kept);
        return;
    }
    if (kind == QE_ACTION_I) kept[QE_KEEP_W]++;
    if (kind != QE_ACTION_W) kept[QE_KEEP_I]--;
    if (kind == QE_ACTION_W) kept[QE_KEEP_W]--;
    put_kept(t, rank, t->times->end[index], kept);
}

static size_t pair_of(const timeline *t, uint32_t stage, uint32_t microbatch) {
    return (size_t)stage * t->schedule->microbatches + microbatch;
}

static void find_producers(timeline *t) {
    size_t pairs = (size_t)t->schedule->stages * t->schedule->microbatches;
    for (size_t i = 0; i < 2 * pairs; i++) t->producer[0][i] = QE_NONE;
    for (uint32_t i = 0; i < t->times->actions_count; i++) {
        const qe_action *action = &t->schedule->actions[i];
        if (action->kind == QE_ACTION_W) continue;
        t->producer[action->kind != QE_ACTION_F][pair_of(t, action->stage, action->microbatch)] = i;
    }
}

/* The action whose result this one takes; QE_NONE where there is none. */
static uint32_t sender_of(const timeline *t, const qe_action *action) {
    int forward = action->kind == QE_ACTION_F;
    if (action->kind == QE_ACTION_W || action->stage + 1u == (forward ? 1u : t->schedule->stages)) return QE_NONE;
    uint32_t from = forward ? action->stage - 1u : action->stage + 1u;
    return t->producer[!forward][pair_of(t, from, action->microbatch)];
}

/* An arrow from rank to rank binds to the slices that lie around its ends. */
static void put_arrow(timeline *t, uint32_t rank, uint32_t index) {
    uint32_t from = sender_of(t, &t->schedule->actions[index]);
    uint32_t sender = from == QE_NONE ? rank : qe_schedule_action_rank(t->schedule, from);
    if (sender == rank) return;
    double begin = us(t, t->times->start[from]), end = us(t, t->times->end[from]);
    PUT(t, ",\n{\"ph\":\"s\",\"pid\":%u,\"tid\":%d,\"id\":%llu,\"name\":\"transfer\",\"cat\":\"transfer\",\"ts\":%.3f}",
        sender, THREAD_ACTIONS, (unsigned long long)t->flow, begin + 0.999 * (end - begin));
    PUT(t, ",\n{\"ph\":\"f\",\"bp\":\"e\",\"pid\":%u,\"tid\":%d,\"id\":%llu,\"name\":\"transfer\",\"cat\":\"transfer\","
           "\"ts\":%.3f}",
        rank, THREAD_ACTIONS, (unsigned long long)t->flow++, us(t, t->times->start[index]));
}

static void put_step_end(timeline *t, uint32_t rank) {
    const qe_simulated_rank *r = &t->times->ranks[rank];
    PUT(t, ",\n{\"ph\":\"X\",\"pid\":%u,\"tid\":%d,\"name\":\"commit\",\"cat\":\"step\",\"ts\":%.3f,\"dur\":%.3f}",
        rank, THREAD_STEP, us(t, r->optimizer_begin), us(t, r->optimizer_end - r->optimizer_begin));
    PUT(t, ",\n{\"ph\":\"i\",\"s\":\"p\",\"pid\":%u,\"tid\":%d,\"name\":\"fold of scales\",\"cat\":\"step\","
           "\"ts\":%.3f}",
        rank, THREAD_STEP, us(t, r->optimizer_end));
}

static void put_rank(timeline *t, uint32_t rank) {
    uint32_t kept[QE_KEEPS] = {0};
    put_names(t, rank);
    for (uint32_t i = t->schedule->rank_begin[rank]; i < t->schedule->rank_begin[rank + 1]; i++) {
        put_action(t, rank, i);
        put_arrow(t, rank, i);
        if (t->training) follow_kept(t, rank, i, kept);
        qe_canvas_step(&t->canvas);
    }
    if (t->training) put_step_end(t, rank);
}

qe_status qe_draw_timeline(const qe_drawing *drawing, FILE *file, qe_error *error_out) {
    timeline t = {.drawing = drawing, .schedule = drawing->schedule, .times = drawing->simulation,
                  .canvas.file = file};
    QE_ASSERT(drawing->unit_us > 0.0);
    size_t pairs = (size_t)t.schedule->stages * t.schedule->microbatches;
    t.producer[0] = malloc(2 * pairs * sizeof *t.producer[0]);
    if (t.producer[0] == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a timeline");
    t.producer[1] = t.producer[0] + pairs;
    t.training = qe_draw_is_training(t.schedule);
    find_producers(&t);
    PUT(&t, "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"title\":");
    qe_text_builder_append_json(&t.canvas.text, drawing->title);
    /* Every later event begins with a comma. */
    PUT(&t, "},\"traceEvents\":[\n{\"ph\":\"M\",\"pid\":0,\"name\":\"process_labels\",\"args\":{\"labels\":");
    qe_text_builder_append_json(&t.canvas.text, drawing->title);
    PUT(&t, "}}");
    for (uint32_t rank = 0; rank < t.schedule->ranks; rank++) put_rank(&t, rank);
    PUT(&t, "\n]}\n");
    free(t.producer[0]);
    return qe_canvas_finish(&t.canvas, error_out);
}
