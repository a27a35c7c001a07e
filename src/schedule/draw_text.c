/* draw_text.c - a line per rank for a terminal. Edges of actions are rounded to columns, each on its own, so that
 * neither order nor length drifts along the line; what is shorter than a column may vanish. */
#include "schedule/draw.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

enum {
    COLUMNS_LEAST = 24,
    COLUMNS_MOST = 1 << 16,
    LABEL_COLUMNS = 9, /* "rank 4095" */
    NAME_COLUMNS = 12, /* a letter and a microbatch */
};

typedef struct lines {
    const qe_schedule *schedule;
    const qe_simulation *times;
    char *line;
    uint32_t columns; /* of the plot */
    double scale;     /* columns per unit of time */
} lines;

static uint32_t column(const lines *l, double time) {
    double at = floor(time * l->scale + 0.5);
    return at < 0 ? 0 : at > l->columns ? l->columns : (uint32_t)at;
}

static char letter(const lines *l, const qe_action *action) {
    char capital = qe_draw_letter(action);
    return (char)(qe_draw_tone(l->schedule, action) ? capital - 'A' + 'a' : capital);
}

/* "F12---": a microbatch is written whole or not at all, and never over the last column, so that neighbours part. */
static void draw_action(const lines *l, uint32_t index) {
    const qe_action *action = &l->schedule->actions[index];
    uint32_t begin = column(l, l->times->start[index]), end = column(l, l->times->end[index]);
    char name[NAME_COLUMNS];
    if (begin == end) return;
    memset(l->line + begin, '-', end - begin);
    int length = snprintf(name, sizeof name, "%c%u", letter(l, action), action->microbatch);
    QE_ASSERT(length > 0 && length < NAME_COLUMNS);
    memcpy(l->line + begin, name, (uint32_t)length <= end - begin ? (size_t)length : 1u);
}

static void draw_rank(const lines *l, uint32_t rank) {
    const qe_simulated_rank *r = &l->times->ranks[rank];
    memset(l->line, ' ', l->columns);
    uint32_t begin = column(l, r->begin), end = column(l, r->end);
    memset(l->line + begin, '.', end - begin);
    for (uint32_t i = l->schedule->rank_begin[rank]; i < l->schedule->rank_begin[rank + 1]; i++) draw_action(l, i);
    l->line[l->columns] = '\0';
}

qe_status qe_draw_text(const qe_drawing *drawing, uint32_t columns, FILE *file, qe_error *error_out) {
    lines l = {.schedule = drawing->schedule, .times = drawing->simulation};
    qe_canvas canvas = {.file = file};
    if (columns < COLUMNS_LEAST) columns = COLUMNS_LEAST;
    if (columns > COLUMNS_MOST) columns = COLUMNS_MOST;
    l.columns = columns - LABEL_COLUMNS - 1;
    l.line = malloc(l.columns + 1u);
    if (l.line == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a chart");
    l.scale = l.times->makespan > 0.0 ? l.columns / l.times->makespan : 0.0;
    for (uint32_t rank = 0; rank < l.schedule->ranks; rank++) {
        draw_rank(&l, rank);
        qe_text_builder_append(&canvas.text, "rank %-4u %s\n", rank, l.line);
        qe_canvas_step(&canvas);
    }
    free(l.line);
    return qe_canvas_finish(&canvas, error_out);
}
