/* draw.c - text that goes to a file piece by piece. */
#include "schedule/draw.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

enum { PIECE_BYTES = 1 << 16 };

static void put(qe_canvas *canvas) {
    size_t length = canvas->text.length;
    char *text = qe_text_builder_take(&canvas->text);
    if (text == NULL) {
        canvas->text.failed = true; /* `take` empties: the failure is kept for the end */
        return;
    }
    if (!canvas->refused && fwrite(text, 1, length, canvas->file) != length) canvas->refused = errno ? errno : EIO;
    free(text);
}

void qe_canvas_step(qe_canvas *canvas) {
    if (canvas->text.length >= PIECE_BYTES) put(canvas);
}

qe_status qe_canvas_finish(qe_canvas *canvas, qe_error *error_out) {
    put(canvas);
    int failed = canvas->text.failed;
    qe_text_builder_deinit(&canvas->text);
    if (failed) return qe_error_set(error_out, QE_ERROR_MEMORY, "free memory and try again", "no memory for a picture");
    if (!canvas->refused && fflush(canvas->file) != 0) canvas->refused = errno;
    if (!canvas->refused) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_IO, "check the space left and the permissions", "cannot write: %s",
                        strerror(canvas->refused));
}

int qe_draw_tone(const qe_schedule *schedule, const qe_action *action) {
    uint32_t chunk = 0;
    if (schedule->reversed > 0) return action->microbatch >= schedule->microbatches - schedule->reversed;
    for (uint32_t s = 0; s < action->stage; s++) {
        chunk += schedule->stage_rank[s] == schedule->stage_rank[action->stage];
    }
    return (int)(chunk % 2);
}

int qe_draw_is_training(const qe_schedule *schedule) {
    for (uint32_t i = schedule->rank_begin[schedule->ranks]; i > 0; i--) {
        if (schedule->actions[i - 1].kind != QE_ACTION_F) return 1;
    }
    return 0;
}

char qe_draw_letter(const qe_action *action) {
    static const char letters[QE_ACTION_KINDS] = {'F', 'I', 'W', 'B'};
    QE_ASSERT(action->kind < QE_ACTION_KINDS);
    return letters[action->kind];
}
