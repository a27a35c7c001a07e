/* csv.c - reads PyTorch's CSV: one row per rank, one action per cell, empty cells are bubbles; compute-only, or with
 * communication. Read as a stream, so that a file of any size and any content costs no more memory than it says. */
#include "schedule/csv.h"
#include "schedule/order.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

enum {
    FOUND_BYTES = 4 * QE_CSV_CELL_BYTES + 8, /* a cell as text for people, every byte escaped at worst */
    /* Every F and B of a schedule as large as may be moves its result, there and here; UNSHARD and REDUCE are few. */
    MOVES_MAX = 2 * QE_SCHEDULE_ACTIONS_MAX,
};

/* A file of the most actions and moves has half of it; without an end to it, /dev/zero would be read for ever. */
static const uint64_t FILE_BYTES_MAX = UINT64_C(1) << 32;

/* An array that grows. */
typedef struct list {
    char *items;
    size_t item_bytes;
    uint32_t count, capacity, most;
} list;

/* What is read so far. `row` and `cell` are 1-based places; `rank` is the row being read. */
typedef struct reader {
    const char *path;
    qe_error *error_out;
    uint32_t row, cell, blank_row; /* blank_row: the first row without an action, 0 for none */
    char text[QE_CSV_CELL_BYTES];  /* the cell from its first byte that is not a space */
    size_t length, trimmed_length; /* bytes of the cell, kept or not, with and without its trailing spaces */
    uint64_t bytes;                /* of the file */
    list actions, moves; /* of qe_action, of qe_csv_move */
    uint32_t row_moves;  /* moves before the row */
    uint32_t ranks, stages, microbatches;
    uint32_t rank_begin[QE_SCHEDULE_RANKS_MAX + 1];
} reader;

static int is_space(int c) { return c == ' ' || c == '\t' || c == '\r'; }

/* The cell as it stands in the file, with bytes that a terminal or JSON would stumble over escaped. */
static void show_cell(const reader *from, char found[static FOUND_BYTES]) {
    size_t kept = from->trimmed_length < QE_CSV_CELL_BYTES ? from->trimmed_length : QE_CSV_CELL_BYTES;
    size_t at = 0;
    for (size_t i = 0; i < kept; i++) {
        unsigned char c = (unsigned char)from->text[i];
        const char *form = c >= 0x20 && c < 0x7F ? "%c" : "\\x%02X";
        at += (size_t)snprintf(found + at, FOUND_BYTES - at, form, c);
    }
    (void)snprintf(found + at, FOUND_BYTES - at, "%s", kept < from->trimmed_length ? "..." : "");
}

static qe_status refuse_cell(const reader *from, const char *expected) {
    char found[FOUND_BYTES];
    show_cell(from, found);
    (void)qe_error_set(from->error_out, QE_ERROR_FORMAT,
                       "a cell is <stage><F, I, W or B><microbatch>, as in 2F0, or empty for a bubble",
                       "row %u, cell %u: found \"%s\", expected %s", from->row, from->cell, found, expected);
    (void)qe_error_place(from->error_out, from->path, from->row, from->cell);
    return QE_ERROR_FORMAT;
}

static qe_status refuse_row(const reader *from, qe_status status, uint32_t row, const char *remedy, const char *what) {
    (void)qe_error_set(from->error_out, status, remedy, "row %u %s", row, what);
    (void)qe_error_place(from->error_out, from->path, row, 0);
    return status;
}

static qe_status append(const reader *from, list *to, const void *item) {
    if (to->count == to->most) {
        return refuse_row(from, QE_ERROR_LIMIT, from->row, "split the step into smaller ones",
                          "brings more actions than a schedule may have (2^25)");
    }
    if (to->count == to->capacity) {
        uint32_t capacity = to->capacity == 0 ? 256 : 2 * to->capacity;
        char *items = realloc(to->items, capacity * to->item_bytes);
        if (items == NULL) return refuse_row(from, QE_ERROR_MEMORY, from->row, NULL, "does not fit into memory");
        to->items = items;
        to->capacity = capacity;
    }
    memcpy(to->items + to->count++ * to->item_bytes, item, to->item_bytes);
    return QE_OK;
}
QE_STATIC_ASSERT(QE_SCHEDULE_ACTIONS_MAX == 1 << 25, "append's text names this limit");

static qe_status append_action(reader *to, const qe_action *action) {
    qe_csv_move move = {.action = *action, .rank = to->ranks, .before = to->actions.count};
    if (action->kind >= QE_ACTION_KINDS) return append(to, &to->moves, &move);
    if (action->stage >= to->stages) to->stages = action->stage + 1U;
    if (action->microbatch >= to->microbatches) to->microbatches = action->microbatch + 1;
    return append(to, &to->actions, action);
}

static qe_status append_cell(reader *to) {
    qe_csv_cell cell;
    char text[QE_CSV_CELL_BYTES];
    if (to->trimmed_length >= QE_CSV_CELL_BYTES) return refuse_cell(to, "an action such as 2F0");
    /* An embedded NUL would end the text early and hide what follows it. */
    if (memchr(to->text, '\0', to->trimmed_length) != NULL) return refuse_cell(to, "text without zero bytes");
    memcpy(text, to->text, sizeof text);
    text[to->trimmed_length] = '\0';
    const char *expected = qe_csv_cell_parse(text, &cell);
    if (expected != NULL) return refuse_cell(to, expected);
    for (uint32_t i = 0; i < cell.count; i++) {
        cell.action[i].row = to->row;
        cell.action[i].column = to->cell;
        QE_TRY(append_action(to, &cell.action[i]));
    }
    return QE_OK;
}

static qe_status end_cell(reader *from) {
    if (from->trimmed_length == 0) return QE_OK;
    if (from->blank_row != 0) {
        return refuse_row(from, QE_ERROR_FORMAT, from->blank_row, "give every rank a row with at least one action",
                          "has no action, but rows follow; each row is one rank");
    }
    if (from->ranks == QE_SCHEDULE_RANKS_MAX) {
        return refuse_row(from, QE_ERROR_LIMIT, from->row, NULL, "is one rank too many; at most 4096 are taken");
    }
    return append_cell(from);
}
QE_STATIC_ASSERT(QE_SCHEDULE_RANKS_MAX == 4096, "end_cell's text names this limit");

static void begin_cell(reader *from, uint32_t cell) {
    from->cell = cell;
    from->length = from->trimmed_length = 0;
}

static qe_status end_row(reader *from) {
    if (from->moves.count > from->row_moves && from->actions.count == from->rank_begin[from->ranks]) {
        return refuse_row(from, QE_ERROR_FORMAT, from->row, "give every rank a row with its F, I, W or B",
                          "moves data and computes nothing");
    }
    from->row_moves = from->moves.count;
    if (from->actions.count > from->rank_begin[from->ranks]) from->rank_begin[++from->ranks] = from->actions.count;
    else if (from->blank_row == 0) from->blank_row = from->row;
    if (from->row < UINT32_MAX) from->row++;
    begin_cell(from, 1);
    return QE_OK;
}

static qe_status take_byte(reader *from, int c) {
    if (c == ',' || c == '\n') {
        QE_TRY(end_cell(from));
        if (c == '\n') return end_row(from);
        begin_cell(from, from->cell < UINT32_MAX ? from->cell + 1 : UINT32_MAX);
        return QE_OK;
    }
    if (is_space(c) && from->length == 0) return QE_OK;
    if (from->length < QE_CSV_CELL_BYTES) from->text[from->length] = (char)c;
    from->length++;
    if (is_space(c)) return QE_OK;
    from->trimmed_length = from->length;
    return from->length > QE_CSV_CELL_BYTES ? end_cell(from) : QE_OK; /* it is refused; its end may never come */
}

static qe_status read_rows(reader *from, FILE *file) {
    for (int c; (c = getc_unlocked(file)) != EOF;) {
        if (from->bytes++ == FILE_BYTES_MAX) {
            return refuse_row(from, QE_ERROR_LIMIT, from->row, "leave bubbles out", "lies behind the first 4 GiB");
        }
        QE_TRY(take_byte(from, c));
    }
    if (ferror(file)) {
        (void)qe_error_set(from->error_out, QE_ERROR_IO, NULL, "cannot read the schedule: %s", strerror(errno));
        (void)qe_error_place(from->error_out, from->path, from->row, 0);
        return QE_ERROR_IO;
    }
    QE_TRY(end_cell(from)); /* a last row without a line end */
    QE_TRY(end_row(from));
    if (from->actions.count == 0) {
        return refuse_row(from, QE_ERROR_FORMAT, 1, "write one row per rank, such as 0F0,0F1,0B0,0B1",
                          "and all others hold no action");
    }
    return QE_OK;
}

/* Every stage on a rank s for the first half of the microbatches and on the rank of the last stage but s for the
 * second: dualpipe. No other schedule has a stage on two ranks, so nothing else can look like it. */
static int runs_both_ways(const qe_schedule *schedule) {
    if (schedule->ranks != schedule->stages || schedule->ranks % 2 != 0 || schedule->microbatches % 2 != 0) return 0;
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        for (uint32_t i = schedule->rank_begin[rank]; i < schedule->rank_begin[rank + 1]; i++) {
            const qe_action *action = &schedule->actions[i];
            int reversed = action->microbatch >= schedule->microbatches / 2;
            if (action->stage != (reversed ? schedule->ranks - 1 - rank : rank)) return 0;
        }
    }
    return 1;
}

static void place_stages(qe_schedule *schedule) {
    for (uint32_t stage = 0; stage < schedule->stages; stage++) schedule->stage_rank[stage] = QE_NONE;
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        for (uint32_t i = schedule->rank_begin[rank]; i < schedule->rank_begin[rank + 1]; i++) {
            uint32_t *place = &schedule->stage_rank[schedule->actions[i].stage];
            if (*place == QE_NONE) *place = rank;
        }
    }
    if (!runs_both_ways(schedule)) return;
    schedule->reversed = schedule->microbatches / 2;
    for (uint32_t stage = 0; stage < schedule->stages; stage++) schedule->stage_rank[stage] = stage;
}

static qe_status make_schedule(const reader *from, qe_schedule *schedule_out) {
    qe_schedule schedule = {.ranks = from->ranks, .stages = from->stages, .microbatches = from->microbatches};
    QE_TRY(qe_schedule_allocate(&schedule, from->actions.count, &schedule, from->error_out));
    memcpy(schedule.actions, from->actions.items, from->actions.count * sizeof *schedule.actions);
    memcpy(schedule.rank_begin, from->rank_begin, (from->ranks + 1) * sizeof *from->rank_begin);
    place_stages(&schedule);
    *schedule_out = schedule;
    return QE_OK;
}

qe_status qe_schedule_read_csv(FILE *file, const char *path, qe_schedule *schedule_out, qe_error *error_out) {
    reader from = {.path = path,
                   .error_out = error_out,
                   .row = 1,
                   .cell = 1,
                   .actions = {.item_bytes = sizeof(qe_action), .most = QE_SCHEDULE_ACTIONS_MAX},
                   .moves = {.item_bytes = sizeof(qe_csv_move), .most = MOVES_MAX}};
    qe_schedule schedule = {0};
    qe_status status = read_rows(&from, file);
    if (status == QE_OK) status = make_schedule(&from, &schedule);
    free(from.actions.items);
    if (status == QE_OK) {
        const qe_csv_move *moves = (const void *)from.moves.items;
        status = qe_csv_moves_check(&schedule, moves, from.moves.count, path, error_out);
    }
    free(from.moves.items);
    if (status == QE_OK) *schedule_out = schedule;
    else qe_schedule_deinit(&schedule);
    return status;
}
