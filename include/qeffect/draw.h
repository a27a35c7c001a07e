/* draw.h - pictures of a schedule with times, simulated (simulate.h) or measured: SVG, text, Chrome timeline. */
#ifndef QEFFECT_DRAW_H
#define QEFFECT_DRAW_H

#include <stdio.h>
#include "qeffect/simulate.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    /* Actions of an SVG: a browser still scrolls a file of 30 MB; larger ones are for a timeline. */
    QE_DRAW_SVG_ACTIONS_MAX = 1 << 17,
};

typedef struct qe_drawing {
    const qe_schedule *schedule;
    const qe_simulation *simulation; /* of this schedule */
    const char *title;
    const char *unit;  /* name of the unit of time, for axes: "ms"; may be "" */
    double unit_us;    /* its length in microseconds, for timelines; > 0 */
} qe_drawing;

/* A Gantt chart: a row per rank with its actions, below it a line per slot with what it holds and for how long; behind
 * the actions where all ranks meet, commits and folds. One file without references to others. The file is flushed.
 * On failure: QE_ERROR_LIMIT: more than QE_DRAW_SVG_ACTIONS_MAX actions; QE_ERROR_IO, QE_ERROR_MEMORY. Thread: any. */
qe_status qe_draw_svg(const qe_drawing *drawing, FILE *file, qe_error *error_out);

/* A line per rank, `columns` wide at most. An action is its letter (small for the second chunk of a rank, and so on in
 * turns), then its microbatch where there is room; a dot is a wait. On failure: as above, without the limit. */
qe_status qe_draw_text(const qe_drawing *drawing, uint32_t columns, FILE *file, qe_error *error_out);

/* Chrome's trace events as JSON, for Perfetto and chrome://tracing: a process per rank with a thread for its actions,
 * counters of what it keeps, marks where scales fold, arrows along transfers. On failure: as for text. */
qe_status qe_draw_timeline(const qe_drawing *drawing, FILE *file, qe_error *error_out);

#ifdef __cplusplus
}
#endif
#endif
