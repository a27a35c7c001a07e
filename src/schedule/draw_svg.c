/* draw_svg.c - a Gantt chart. From top to bottom: title and figures, legend, then per rank a lane with its actions and
 * below it a thin line per slot, then the axis. Behind the actions a rank commits and folds. */
#include "schedule/draw.h"

#include <math.h>
#include <stdlib.h>

#include "base/assert.h"

/* Pixels. */
enum {
    LEFT = 76,
    RIGHT = 28,
    TOP = 100,       /* title, figures and legend are above */
    BOTTOM = 44,     /* axis */
    LANE = 26,       /* an action is this high */
    SLOT = 4,        /* a line of a slot, with a pixel between two */
    BETWEEN = 14,    /* ranks */
    WIDTH_LEAST = 860,
    WIDTH_MOST = 12000,
    ACTION_WIDTH = 22,  /* what the usual action should have: two digits */
    DIGIT_WIDTH = 6,
    COMMIT_WIDTH = 10,  /* at least */
    SLOT_LINES_MOST = 64, /* more slots than this share the last line */
};

/* A shorter span is drawn as none: its scale, and the ticks of its axis, would be beyond what a double holds. */
static const double SPAN_LEAST = 1e-280;

typedef struct chart {
    const qe_drawing *drawing;
    const qe_schedule *schedule;
    const qe_simulation *times;
    qe_canvas canvas;
    double scale;      /* pixels per unit of time */
    double width;      /* of the plot */
    uint32_t *slot;    /* [stages * microbatches] the slot that holds a pair */
    double *since;     /* [stages * microbatches] where its line goes on */
    uint8_t taken[SLOT_LINES_MOST];
    int training;
} chart;

static double at(const chart *c, double time) { return LEFT + time * c->scale; }

#define PUT(chart, ...) qe_text_builder_append(&(chart)->canvas.text, __VA_ARGS__)

/* ---- head ---- */

static void put_escaped(chart *c, const char *text) {
    for (; *text != '\0'; text++) {
        if (*text == '<') PUT(c, "&lt;");
        else if (*text == '&') PUT(c, "&amp;");
        else if ((unsigned char)*text >= ' ') PUT(c, "%c", *text);
    }
}

static void put_style(chart *c) {
    PUT(c, "<style>text{font-family:'DejaVu Sans',Verdana,Helvetica,Arial,sans-serif;font-size:11px;fill:#222}"
           ".title{font-size:15px;font-weight:bold}.note{fill:#555}.m{font-size:10px;text-anchor:middle}"
           ".tick{text-anchor:middle;fill:#555}.rank{text-anchor:end}"
           ".F{fill:#5b8fd0}.I{fill:#5fb06b}.W{fill:#f0a04b}.B{fill:#3fa7a3}.C{fill:#9a7bb5}"
           ".odd{fill-opacity:.58}.idle{fill:#e6e6e6}.outside{fill:url(#hatch)}.grid{stroke:#ddd;stroke-width:1}"
           ".keep{fill:#9dbfe6}.late{fill:#f6c48b}.fold{fill:#c8324b}.meet{stroke:#9a7bb5;stroke-dasharray:4 3}"
           ".a{stroke:#fff;stroke-width:.7}</style>\n"
           "<defs><pattern id=\"hatch\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
           "patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#fafafa\"/>"
           "<path d=\"M0 0V6\" stroke=\"#d8d8d8\" stroke-width=\"2\"/></pattern></defs>\n");
}

static uint32_t most_pending(const qe_simulation *times) {
    uint32_t most = 0;
    for (uint32_t rank = 0; rank < times->ranks_count; rank++) {
        if (times->ranks[rank].peak[QE_KEEP_W] > most) most = times->ranks[rank].peak[QE_KEEP_W];
    }
    return most;
}

static double share(double part, double whole) { return whole > 0.0 ? 100.0 * part / whole : 0.0; }

static void put_title(chart *c) {
    const qe_simulation *t = c->times;
    const char *unit = c->drawing->unit, *space = unit[0] == '\0' ? "" : " ";
    PUT(c, "<text class=\"title\" x=\"%d\" y=\"24\">", LEFT);
    put_escaped(c, c->drawing->title);
    PUT(c, "</text>\n<text class=\"note\" x=\"%d\" y=\"44\">makespan %.6g%s%s; makespan bubble %.4g (%.1f%%), "
           "stage bubble %.4g (%.1f%%); peak kept %.4g, most pending W %u</text>\n",
        LEFT, t->makespan, space, unit, t->makespan_bubble, share(t->makespan_bubble, t->makespan), t->stage_bubble,
        share(t->stage_bubble, t->span), t->peak_kept, most_pending(t));
}

static int has_kind(const chart *c, int kind) {
    for (uint32_t i = 0; i < c->times->actions_count; i++) {
        if (c->schedule->actions[i].kind == kind) return 1;
    }
    return 0;
}

static int has_pale(const chart *c) {
    for (uint32_t i = 0; i < c->times->actions_count; i++) {
        if (qe_draw_tone(c->schedule, &c->schedule->actions[i])) return 1;
    }
    return 0;
}

static double put_key(chart *c, double x, const char *class, int height, const char *what) {
    PUT(c, "<rect class=\"%s\" x=\"%.1f\" y=\"%d\" width=\"14\" height=\"%d\"/><text x=\"%.1f\" y=\"72\">%s</text>\n",
        class, x, 68 - height / 2, height, x + 19, what);
    size_t letters = 0;
    while (what[letters] != '\0') letters++;
    return x + 35 + 6.1 * (double)letters;
}

static void put_legend(chart *c) {
    static const char *const kinds[QE_ACTION_KINDS] = {"F forward", "I input gradient", "W weight gradient",
                                                       "B full backward"};
    static const char *const classes[QE_ACTION_KINDS] = {"F", "I", "W", "B"};
    double x = LEFT;
    for (int kind = 0; kind < QE_ACTION_KINDS; kind++) {
        if (has_kind(c, kind)) x = put_key(c, x, classes[kind], 12, kinds[kind]);
    }
    const char *pale = c->schedule->reversed > 0 ? "pale: way back" : "pale: every 2nd chunk";
    if (has_pale(c)) x = put_key(c, x, "F odd", 12, pale);
    x = put_key(c, x, "idle", 12, "wait");
    if (!c->training) return;
    x = put_key(c, x, "keep", SLOT, "slot: F to I");
    if (has_kind(c, QE_ACTION_W)) x = put_key(c, x, "late", SLOT, "slot: I to W");
    x = put_key(c, x, "C", 12, "commit");
    PUT(c, "<path class=\"fold\" d=\"M%.1f 68l5 -5l5 5l-5 5z\"/><text x=\"%.1f\" y=\"72\">fold of scales</text>\n", x,
        x + 15);
}

/* ---- one rank ---- */

static void put_lane(chart *c, uint32_t rank, double y) {
    const qe_simulated_rank *r = &c->times->ranks[rank];
    PUT(c, "<text class=\"rank\" x=\"%d\" y=\"%.1f\">rank %u</text>\n", LEFT - 10, y + LANE / 2.0 + 4, rank);
    PUT(c, "<rect class=\"outside\" x=\"%d\" y=\"%.1f\" width=\"%.2f\" height=\"%d\"/>", LEFT, y,
        c->times->makespan * c->scale, LANE);
    PUT(c, "<rect class=\"idle\" x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%d\"/>\n", at(c, r->begin), y,
        (r->end - r->begin) * c->scale, LANE);
}

static double digits_width(uint32_t value) {
    double width = DIGIT_WIDTH;
    for (; value >= 10; value /= 10) width += DIGIT_WIDTH;
    return width;
}

/* Halves of an overlapped pair share the height of the lane. */
static int half_of(const chart *c, uint32_t index) {
    const qe_simulation *t = c->times;
    const qe_action *actions = c->schedule->actions;
    if (actions[index].paired && index + 1 < t->actions_count && t->start[index] == t->start[index + 1]) return 1;
    if (index > 0 && actions[index - 1].paired && t->start[index - 1] == t->start[index]) return 2;
    return 0;
}

static void put_action(chart *c, uint32_t index, double y) {
    const qe_action *action = &c->schedule->actions[index];
    double begin = at(c, c->times->start[index]), end = at(c, c->times->end[index]);
    int half = half_of(c, index);
    double top = half == 2 ? y + LANE / 2.0 : y, height = half == 0 ? LANE : LANE / 2.0;
    char name[32];
    (void)qe_action_text(action, name, sizeof name);
    PUT(c, "<g><title>%s: %.6g to %.6g</title><rect class=\"%c a%s\" x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" "
           "height=\"%.1f\"/>",
        name, c->times->start[index], c->times->end[index], qe_draw_letter(action),
        qe_draw_tone(c->schedule, action) ? " odd" : "", begin, top, end - begin, height);
    if (end - begin >= digits_width(action->microbatch) + 2) {
        PUT(c, "<text class=\"m\" x=\"%.2f\" y=\"%.1f\">%u</text>", (begin + end) / 2, top + height / 2 + 3.5,
            action->microbatch);
    }
    PUT(c, "</g>\n");
}

/* ---- slots ---- */

static size_t pair_of(const chart *c, const qe_action *action) {
    return (size_t)action->stage * c->schedule->microbatches + action->microbatch;
}

/* As a plan hands them out: the first that is free, in the order of the row. */
static uint32_t take_slot(chart *c) {
    uint32_t slot = 0;
    while (slot + 1 < SLOT_LINES_MOST && c->taken[slot]) slot++;
    c->taken[slot] = 1;
    return slot;
}

/* A line from where the last one of this pair ended. Its end is left open, so that the next tenant is told apart. */
static void put_slot(chart *c, const qe_action *action, double end, double y) {
    size_t pair = pair_of(c, action);
    int late = action->kind == QE_ACTION_W, open = action->kind != QE_ACTION_I;
    double width = (end - c->since[pair]) * c->scale - (open ? 1.0 : 0.0);
    PUT(c, "<rect class=\"%s\" x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%d\"><title>slot %u: stage %u, microbatch "
           "%u</title></rect>\n",
        late ? "late" : "keep", at(c, c->since[pair]), y + LANE + 3 + c->slot[pair] * SLOT, width > 0.0 ? width : 0.0,
        SLOT - 1, c->slot[pair], action->stage, action->microbatch);
    c->since[pair] = end;
}

static void follow_slot(chart *c, uint32_t index, double y) {
    const qe_action *action = &c->schedule->actions[index];
    size_t pair = pair_of(c, action);
    double end = c->times->end[index];
    if (action->kind == QE_ACTION_F) {
        c->slot[pair] = take_slot(c);
        c->since[pair] = c->times->start[index];
    } else {
        put_slot(c, action, end, y);
        if (action->kind != QE_ACTION_I) c->taken[c->slot[pair]] = 0;
    }
}

static double slot_lines(const chart *c, uint32_t rank) {
    uint32_t peak = c->training ? c->times->ranks[rank].peak[QE_KEEP_X] : 0;
    return peak > SLOT_LINES_MOST ? SLOT_LINES_MOST : peak;
}

/* ---- end of the step ---- */

static void put_commit(chart *c, uint32_t rank, double y) {
    const qe_simulated_rank *r = &c->times->ranks[rank];
    double begin = at(c, r->optimizer_begin), width = (r->optimizer_end - r->optimizer_begin) * c->scale;
    if (width < COMMIT_WIDTH) width = COMMIT_WIDTH;
    PUT(c, "<rect class=\"C a\" x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%d\"/>", begin, y, width, LANE);
    PUT(c, "<path class=\"fold\" d=\"M%.2f %.1fl5 -5l5 5l-5 5z\"/>\n", begin + width + 1, y + LANE / 2.0);
}

static void put_rank(chart *c, uint32_t rank, double y) {
    put_lane(c, rank, y);
    for (size_t i = 0; i < SLOT_LINES_MOST; i++) c->taken[i] = 0;
    for (uint32_t i = c->schedule->rank_begin[rank]; i < c->schedule->rank_begin[rank + 1]; i++) {
        put_action(c, i, y);
        if (c->training) follow_slot(c, i, y);
        qe_canvas_step(&c->canvas);
    }
    if (c->training) put_commit(c, rank, y);
}

/* ---- axis ---- */

/* 1, 2 or 5 times a power of ten, about `pixels` apart. */
static double tick_step(const chart *c, double pixels) {
    double wanted = pixels / c->scale, power = pow(10.0, floor(log10(wanted)));
    if (wanted <= power) return power;
    if (wanted <= 2 * power) return 2 * power;
    return wanted <= 5 * power ? 5 * power : 10 * power;
}

static void put_grid(chart *c, double bottom) {
    double step = tick_step(c, 60);
    for (uint32_t i = 0; step * i <= c->times->makespan * 1.0001; i++) {
        double x = at(c, step * i);
        PUT(c, "<path class=\"grid\" d=\"M%.2f %dV%.1f\"/><text class=\"tick\" x=\"%.2f\" y=\"%.1f\">%.6g</text>\n", x,
            TOP - 8, bottom, x, bottom + 16, step * i);
    }
    PUT(c, "<text class=\"note\" x=\"%d\" y=\"%.1f\">time%s%s</text>\n", LEFT, bottom + 34,
        c->drawing->unit[0] ? " in " : "", c->drawing->unit);
}

static void put_meeting(chart *c, double bottom) {
    double x = at(c, c->times->makespan);
    if (!c->training || !c->times->synchronised) return;
    PUT(c, "<path class=\"meet\" d=\"M%.2f %dV%.1f\"/><text class=\"note\" x=\"%.2f\" y=\"%d\" "
           "text-anchor=\"end\">all ranks meet</text>\n",
        x, TOP - 16, bottom, x - 4, TOP - 10);
}

/* ---- the whole ---- */

static double height_of(const chart *c, uint32_t ranks) {
    double y = TOP;
    for (uint32_t rank = 0; rank < ranks; rank++) y += LANE + 3 + slot_lines(c, rank) * SLOT + BETWEEN;
    return y;
}

static double most_optimizer_end(const chart *c) {
    double end = c->times->makespan;
    for (uint32_t rank = 0; c->training && rank < c->times->ranks_count; rank++) {
        if (c->times->ranks[rank].optimizer_end > end) end = c->times->ranks[rank].optimizer_end;
    }
    return end;
}

/* The busiest rank's actions are as wide as two digits need. */
static void choose_scale(chart *c) {
    uint32_t most = 1;
    for (uint32_t rank = 0; rank < c->schedule->ranks; rank++) {
        uint32_t actions = c->schedule->rank_begin[rank + 1] - c->schedule->rank_begin[rank];
        if (actions > most) most = actions;
    }
    double end = most_optimizer_end(c), width = (double)most * ACTION_WIDTH;
    if (c->times->work > 0.0) width *= end / c->times->work;
    if (width < WIDTH_LEAST) width = WIDTH_LEAST;
    if (width > WIDTH_MOST) width = WIDTH_MOST;
    c->scale = end > SPAN_LEAST ? width / end : 1.0;
    c->width = width + (c->training ? 2.5 * COMMIT_WIDTH : 0);
}

static void put_chart(chart *c) {
    double bottom = height_of(c, c->schedule->ranks), width = LEFT + c->width + RIGHT;
    PUT(c, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\">\n",
        width, bottom + BOTTOM, width, bottom + BOTTOM);
    put_style(c);
    PUT(c, "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n");
    put_title(c);
    put_legend(c);
    put_grid(c, bottom);
    for (uint32_t rank = 0; rank < c->schedule->ranks; rank++) put_rank(c, rank, height_of(c, rank));
    put_meeting(c, bottom);
    PUT(c, "</svg>\n");
}

static qe_status take_memory(chart *c, qe_error *error_out) {
    size_t pairs = (size_t)c->schedule->stages * c->schedule->microbatches;
    c->slot = calloc(pairs, sizeof *c->slot);
    c->since = calloc(pairs, sizeof *c->since);
    if (c->slot != NULL && c->since != NULL) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for a picture");
}

qe_status qe_draw_svg(const qe_drawing *drawing, FILE *file, qe_error *error_out) {
    chart c = {.drawing = drawing, .schedule = drawing->schedule, .times = drawing->simulation, .canvas.file = file};
    if (c.times->actions_count > QE_DRAW_SVG_ACTIONS_MAX) {
        return qe_error_set(error_out, QE_ERROR_LIMIT, "write a timeline, or use fewer microbatches",
                            "%u actions are too many for an SVG; at most %d", c.times->actions_count,
                            QE_DRAW_SVG_ACTIONS_MAX);
    }
    QE_ASSERT(c.times->actions_count == c.schedule->rank_begin[c.schedule->ranks]);
    qe_status status = take_memory(&c, error_out);
    if (status == QE_OK) {
        c.training = qe_draw_is_training(c.schedule);
        choose_scale(&c);
        put_chart(&c);
        status = qe_canvas_finish(&c.canvas, error_out);
    }
    free(c.slot);
    free(c.since);
    return status;
}
