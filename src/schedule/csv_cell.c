/* csv_cell.c - the grammar of one cell: <stage><kind><microbatch>, or two of them as (2F0;3B1)OVERLAP_F_B. PyTorch's
 * parser finds an action at the beginning of a cell and forgets the rest; here the whole cell must mean something. */
#include "schedule/csv.h"

#include <string.h>

#include "base/assert.h"

static const char *const WORDS[QE_CSV_KINDS] = {"F",      "I",      "W",       "B",       "SEND_F",     "RECV_F",
                                                "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"};

const char *qe_csv_kind_word(uint32_t kind) {
    QE_ASSERT(kind < QE_CSV_KINDS);
    return WORDS[kind];
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

static uint32_t take_kind(const char **at) {
    size_t length = strspn(*at, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_");
    for (uint32_t kind = 0; kind < QE_CSV_KINDS; kind++) {
        if (strlen(WORDS[kind]) != length || strncmp(*at, WORDS[kind], length) != 0) continue;
        *at += length;
        return kind;
    }
    return QE_CSV_KINDS;
}

static const char *parse_action(const char *at, qe_action *action_out) {
    uint32_t stage, microbatch = 0;
    if (take_number(&at, &stage) == 0) return "a stage number first, from 0 on";
    if (stage >= QE_STAGES_MAX) return "a stage number below 4096";
    uint32_t kind = take_kind(&at);
    if (kind == QE_CSV_KINDS) {
        return "F, I, W or B after the stage number, or SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD";
    }
    size_t digits = take_number(&at, &microbatch);
    if (digits == 0 && kind < QE_CSV_UNSHARD) return "a microbatch number, from 0 on, at the end";
    if (microbatch >= QE_MICROBATCHES_MAX) return "a microbatch number below 65536";
    if (*at != '\0') return "nothing after the microbatch number";
    if (kind >= QE_CSV_UNSHARD) microbatch = 0; /* PyTorch takes one and makes nothing of it */
    *action_out = (qe_action){.microbatch = microbatch, .stage = (uint16_t)stage, .kind = (uint8_t)kind};
    return NULL;
}
QE_STATIC_ASSERT(QE_STAGES_MAX == 4096 && QE_MICROBATCHES_MAX == 65536, "parse_action's texts name these limits");

static char *trim(char *text) {
    static const char spaces[] = " \t\r";
    text += strspn(text, spaces);
    size_t length = strlen(text);
    while (length > 0 && strchr(spaces, text[length - 1]) != NULL) length--;
    text[length] = '\0';
    return text;
}

static int is_backward(const qe_action *action) { return action->kind == QE_ACTION_I || action->kind == QE_ACTION_B; }

/* The halves of an OVERLAP_F_B, in either order, as PyTorch takes them. */
static const char *judge_pair(const qe_action half[static 2]) {
    static const char expected[] = "an F and a B (or I) in the pair, as in (2F1;3B0)OVERLAP_F_B";
    const qe_action *forward = half[0].kind == QE_ACTION_F ? &half[0] : &half[1];
    const qe_action *backward = forward == &half[0] ? &half[1] : &half[0];
    if (forward->kind != QE_ACTION_F || !is_backward(backward)) return expected;
    if (forward->stage != backward->stage || forward->microbatch != backward->microbatch) return NULL;
    return "two actions that can overlap; the backward needs this very forward";
}

/* Behind the "(". PyTorch leaves out halves that are empty, so a pair may be a single action. */
static const char *parse_pair(char *text, qe_csv_cell *cell_out) {
    char *end = strchr(text, ')');
    if (end == NULL || strcmp(end + 1, "OVERLAP_F_B") != 0) return "OVERLAP_F_B behind the pair's \")\"";
    *end = '\0';
    for (char *half = text; half != NULL;) {
        char *next = strchr(half, ';');
        if (next != NULL) *next++ = '\0';
        half = trim(half);
        if (*half != '\0') {
            if (cell_out->count == 2) return "two actions in the pair, not more";
            const char *expected = parse_action(half, &cell_out->action[cell_out->count++]);
            if (expected != NULL) return expected;
        }
        half = next;
    }
    if (cell_out->count == 0) return "two actions in the pair, as in (2F1;3B0)OVERLAP_F_B";
    if (cell_out->count == 1) {
        return cell_out->action[0].kind < QE_ACTION_KINDS ? NULL : "actions that compute in the pair";
    }
    cell_out->action[0].paired = 1;
    return judge_pair(cell_out->action);
}

/* Spreadsheets put quotes around what they like. */
static char *unquote(char *text) {
    size_t length = strlen(text);
    if (length < 2 || text[0] != '"' || text[length - 1] != '"') return text;
    text[length - 1] = '\0';
    return trim(text + 1);
}

const char *qe_csv_cell_parse(char *text, qe_csv_cell *cell_out) {
    *cell_out = (qe_csv_cell){.count = 0};
    text = unquote(text);
    if (*text == '(') return parse_pair(text + 1, cell_out);
    cell_out->count = 1;
    return parse_action(text, &cell_out->action[0]);
}
