/* draw.h - what the pictures share: text that goes to a file piece by piece. */
#ifndef QE_SCHEDULE_DRAW_H
#define QE_SCHEDULE_DRAW_H

#include "base/text.h"
#include "qeffect/draw.h"

/* Text is gathered in `text` and written when it is long: a picture of millions of actions needs no memory of its
 * size. Numbers have a decimal point in every locale. */
typedef struct qe_canvas {
    FILE *file;
    qe_text_builder text;
    int refused; /* 0, or the errno of the first write that failed */
} qe_canvas;

/* Writes what has gathered, if it is long. */
void qe_canvas_step(qe_canvas *canvas);
/* Writes the rest and flushes. On failure: QE_ERROR_IO, QE_ERROR_MEMORY. Releases the text either way. */
qe_status qe_canvas_finish(qe_canvas *canvas, qe_error *error_out);

/* 0 or 1, in turns over the chunks of a rank, or over the two ways that microbatches run. */
int qe_draw_tone(const qe_schedule *schedule, const qe_action *action);
/* Does it have a backward action? Else nothing is kept, and nothing is committed or folded. */
int qe_draw_is_training(const qe_schedule *schedule);
/* The letter of a kind: F, I, W, B. */
char qe_draw_letter(const qe_action *action);

#endif
