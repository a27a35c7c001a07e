/* csv.c - PyTorch's compute-only CSV: one row per rank, one action per cell, empty cells are bubbles. Read as a
 * stream, so that a file of any size and any content costs no more memory than the actions in it. */
#include "schedule/order.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

enum {
    CELL_BYTES = 64,  /* no action is longer; the rest of a longer cell is not kept */
    FOUND_BYTES = 4 * CELL_BYTES + 8, /* a cell as text for people, every byte escaped at worst */
};

/* What is read so far. `row` and `cell` are 1-based places; `rank` is the row being read. */
typedef struct reader {
    const char *path;
    qe_error *error_out;
    uint32_t row, cell, blank_row; /* blank_row: the first row without an action, 0 for none */
    char text[CELL_BYTES];         /* the cell from its first byte that is not a space */
    size_t length, trimmed_length; /* bytes of the cell, kept or not, with and without its trailing spaces */
    qe_action *actions;
    uint32_t action_count, action_capacity;
    uint32_t ranks, stages, microbatches;
    uint32_t rank_begin[QE_SCHEDULE_RANKS_MAX + 1];
} reader;

static int is_space(int c) { return c == ' ' || c == '\t' || c == '\r'; }

/* The cell as it stands in the file, with bytes that a terminal or JSON would stumble over escaped. */
static void show_cell(const reader *from, char found[static FOUND_BYTES]) {
    size_t kept = from->trimmed_length < CELL_BYTES ? from->trimmed_length : CELL_BYTES;
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

/* Digits at *at, saturating; returns how many there are. */
static size_t take_number(const char **at, uint32_t *number_out) {
    uint64_t number = 0;
    size_t digits = strspn(*at, "0123456789");
    for (size_t i = 0; i < digits; i++) {
        number = number * 10 + (uint64_t)((*at)[i] - '0');
        if (number > UINT32_MAX) number = UINT32_MAX;
    }
    *at += digits;
    *number_out = (uint32_t)number;
    return digits;
}

static qe_status take_kind(const reader *from, const char **at, uint8_t *kind_out) {
    static const char *const communication[] = {"SEND_F",  "RECV_F",  "SEND_B",     "RECV_B",
                                                "UNSHARD", "RESHARD", "REDUCE_GRAD"};
    static const char letters[] = "FIWB";
    size_t length = strspn(*at, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_");
    const char *letter = length == 1 ? strchr(letters, **at) : NULL;
    for (size_t i = 0; i < sizeof communication / sizeof communication[0]; i++) {
        if (strlen(communication[i]) == length && strncmp(*at, communication[i], length) == 0) {
            return refuse_cell(from, "F, I, W or B: only compute-only CSV is read, without communication "
                                     "actions; PyTorch writes it with _dump_csv(FILE, format=\"compute_only\")");
        }
    }
    if (letter == NULL) return refuse_cell(from, "F, I, W or B after the stage number");
    *at += length;
    *kind_out = (uint8_t)(letter - letters);
    return QE_OK;
}

static qe_status parse_cell(const reader *from, qe_action *action_out) {
    QE_STATIC_ASSERT(QE_ACTION_F == 0 && QE_ACTION_I == 1 && QE_ACTION_W == 2 && QE_ACTION_B == 3, "letters' order");
    const char *at = from->text;
    uint32_t stage, microbatch;
    uint8_t kind = 0;
    if (from->trimmed_length >= CELL_BYTES) return refuse_cell(from, "an action such as 2F0");
    if (*at == '(') return refuse_cell(from, "one action: pairs in OVERLAP_F_B are not supported yet");
    if (take_number(&at, &stage) == 0) return refuse_cell(from, "a stage number first, from 0 on");
    if (stage >= QE_STAGES_MAX) return refuse_cell(from, "a stage number below 4096");
    QE_TRY(take_kind(from, &at, &kind));
    if (take_number(&at, &microbatch) == 0) return refuse_cell(from, "a microbatch number, from 0 on, at the end");
    if (microbatch >= QE_MICROBATCHES_MAX) return refuse_cell(from, "a microbatch number below 65536");
    if (*at != '\0') return refuse_cell(from, "nothing after the microbatch number");
    *action_out = (qe_action){.microbatch = microbatch,
                              .stage = (uint16_t)stage,
                              .kind = kind,
                              .row = from->row,
                              .column = from->cell};
    return QE_OK;
}
QE_STATIC_ASSERT(QE_STAGES_MAX == 4096 && QE_MICROBATCHES_MAX == 65536, "parse_cell's texts name these limits");

static qe_status append(reader *to, const qe_action *action) {
    if (to->action_count == QE_SCHEDULE_ACTIONS_MAX) {
        return refuse_row(to, QE_ERROR_LIMIT, to->row, "split the step into smaller ones",
                          "brings more actions than a schedule may have (2^25)");
    }
    if (to->action_count == to->action_capacity) {
        uint32_t capacity = to->action_capacity == 0 ? 256 : 2 * to->action_capacity;
        qe_action *actions = realloc(to->actions, capacity * sizeof *actions);
        if (actions == NULL) {
            return refuse_row(to, QE_ERROR_MEMORY, to->row, NULL, "does not fit into memory");
        }
        to->actions = actions;
        to->action_capacity = capacity;
    }
    to->actions[to->action_count++] = *action;
    if (action->stage >= to->stages) to->stages = action->stage + 1U;
    if (action->microbatch >= to->microbatches) to->microbatches = action->microbatch + 1;
    return QE_OK;
}
QE_STATIC_ASSERT(QE_SCHEDULE_ACTIONS_MAX == 1 << 25, "append's text names this limit");

static qe_status end_cell(reader *from) {
    if (from->trimmed_length == 0) return QE_OK;
    if (from->blank_row != 0) {
        return refuse_row(from, QE_ERROR_FORMAT, from->blank_row, "give every rank a row with at least one action",
                          "has no action, but rows follow; each row is one rank");
    }
    if (from->ranks == QE_SCHEDULE_RANKS_MAX) {
        return refuse_row(from, QE_ERROR_LIMIT, from->row, NULL, "is one rank too many; at most 4096 are taken");
    }
    if (from->trimmed_length < CELL_BYTES) from->text[from->trimmed_length] = '\0';
    qe_action action;
    QE_TRY(parse_cell(from, &action));
    return append(from, &action);
}
QE_STATIC_ASSERT(QE_SCHEDULE_RANKS_MAX == 4096, "end_cell's text names this limit");

static void begin_cell(reader *from, uint32_t cell) {
    from->cell = cell;
    from->length = from->trimmed_length = 0;
}

static void end_row(reader *from) {
    if (from->action_count > from->rank_begin[from->ranks]) from->rank_begin[++from->ranks] = from->action_count;
    else if (from->blank_row == 0) from->blank_row = from->row;
    if (from->row < UINT32_MAX) from->row++;
    begin_cell(from, 1);
}

static qe_status take_byte(reader *from, int c) {
    if (c == ',' || c == '\n') {
        QE_TRY(end_cell(from));
        if (c == '\n') end_row(from);
        else begin_cell(from, from->cell < UINT32_MAX ? from->cell + 1 : UINT32_MAX);
        return QE_OK;
    }
    if (is_space(c) && from->length == 0) return QE_OK;
    /* An embedded NUL would end the text early and hide what follows it. */
    if (from->length < CELL_BYTES) from->text[from->length] = (char)(c == 0 ? '\x01' : c);
    from->length++;
    if (!is_space(c)) from->trimmed_length = from->length;
    return QE_OK;
}

static qe_status read_rows(reader *from, FILE *file) {
    for (int c; (c = getc_unlocked(file)) != EOF;) QE_TRY(take_byte(from, c));
    if (ferror(file)) {
        (void)qe_error_set(from->error_out, QE_ERROR_IO, NULL, "cannot read the schedule: %s", strerror(errno));
        (void)qe_error_place(from->error_out, from->path, from->row, 0);
        return QE_ERROR_IO;
    }
    QE_TRY(end_cell(from)); /* a last row without a line end */
    end_row(from);
    if (from->action_count == 0) {
        return refuse_row(from, QE_ERROR_FORMAT, 1, "write one row per rank, such as 0F0,0F1,0B0,0B1",
                          "and all others hold no action");
    }
    return QE_OK;
}

static void place_stages(qe_schedule *schedule) {
    for (uint32_t stage = 0; stage < schedule->stages; stage++) schedule->stage_rank[stage] = QE_NONE;
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) {
        for (uint32_t i = schedule->rank_begin[rank]; i < schedule->rank_begin[rank + 1]; i++) {
            uint32_t *place = &schedule->stage_rank[schedule->actions[i].stage];
            if (*place == QE_NONE) *place = rank;
        }
    }
}

qe_status qe_schedule_read_csv(FILE *file, const char *path, qe_schedule *schedule_out, qe_error *error_out) {
    reader from = {.path = path, .error_out = error_out, .row = 1, .cell = 1};
    qe_status status = read_rows(&from, file);
    if (status != QE_OK) goto free_actions;
    qe_schedule schedule = {.ranks = from.ranks, .stages = from.stages, .microbatches = from.microbatches};
    status = qe_schedule_allocate(&schedule, from.action_count, &schedule, error_out);
    if (status != QE_OK) goto free_actions;
    memcpy(schedule.actions, from.actions, from.action_count * sizeof *from.actions);
    memcpy(schedule.rank_begin, from.rank_begin, (from.ranks + 1) * sizeof *from.rank_begin);
    place_stages(&schedule);
    *schedule_out = schedule;
free_actions:
    free(from.actions);
    return status;
}

static void write_row(const qe_schedule *schedule, uint32_t rank, FILE *file) {
    for (uint32_t i = schedule->rank_begin[rank]; i < schedule->rank_begin[rank + 1]; i++) {
        char text[CELL_BYTES];
        (void)qe_action_text(&schedule->actions[i], text, sizeof text);
        if (i > schedule->rank_begin[rank]) (void)fputc(',', file);
        (void)fputs(text, file);
    }
    (void)fputc('\n', file);
}

qe_status qe_schedule_write_csv(const qe_schedule *schedule, FILE *file, qe_error *error_out) {
    errno = 0;
    for (uint32_t rank = 0; rank < schedule->ranks; rank++) write_row(schedule, rank, file);
    if (fflush(file) != 0 || ferror(file)) {
        return qe_error_set(error_out, QE_ERROR_IO, "check the space left on the disk", "cannot write the schedule: %s",
                            errno == 0 ? "write error" : strerror(errno));
    }
    return QE_OK;
}
