/* verify_cover.c - covering arrays, greedily. What must be covered is a list of rows with most factors open. */
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "cli/verify.h"

typedef uint8_t cover_row[QE_COVER_FACTORS_MAX];

typedef struct work {
    const qe_cover *cover;
    cover_row *missing;
    uint32_t missing_count, missing_capacity;
} work;

static int has(const uint8_t *part, uint32_t factor) {
    return part[factor] != QE_COVER_ANY;
}

/* What a missing combination is worth to a row that is being filled: nothing when they contradict each other, most
 * when the row now has all of it. */
static uint32_t worth(const qe_cover *cover, const uint8_t *row, const uint8_t *part) {
    uint32_t open = 0;
    for (uint32_t f = 0; f < cover->factors; f++) {
        if (!has(part, f)) continue;
        if (!has(row, f)) open++;
        else if (row[f] != part[f]) return 0;
    }
    static const uint32_t worth_by_open[QE_COVER_STRENGTH_MAX + 1] = {1000, 30, 1, 0};
    return worth_by_open[open];
}

static uint64_t gain(const work *w, const uint8_t *row, uint32_t factor) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < w->missing_count; i++)
        if (has(w->missing[i], factor)) sum += worth(w->cover, row, w->missing[i]);
    return sum;
}

/* The level of an open factor that covers most; the first of equals, so that the rows are always the same. */
static void fill(const work *w, uint8_t *row, uint32_t factor) {
    uint8_t best = QE_COVER_ANY;
    uint64_t best_gain = 0;
    for (uint8_t level = 0; level < w->cover->levels[factor]; level++) {
        row[factor] = level;
        if (!w->cover->allowed(row)) continue;
        uint64_t gained = gain(w, row, factor);
        if (best != QE_COVER_ANY && gained <= best_gain) continue;
        best = level;
        best_gain = gained;
    }
    QE_ASSERT(best != QE_COVER_ANY); /* what is allowed can be completed */
    row[factor] = best;
}

static void strike(work *w, const uint8_t *row) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < w->missing_count; i++) {
        int covered = 1;
        for (uint32_t f = 0; f < w->cover->factors; f++)
            covered &= !has(w->missing[i], f) || w->missing[i][f] == row[f];
        if (!covered) memcpy(w->missing[kept++], w->missing[i], sizeof(cover_row));
    }
    w->missing_count = kept;
}

static qe_status note(work *w, const uint8_t *part, qe_error *error_out) {
    if (!w->cover->allowed(part)) return QE_OK;
    if (w->missing_count == w->missing_capacity) {
        uint32_t capacity = w->missing_capacity == 0 ? 1024 : 2 * w->missing_capacity;
        cover_row *grown = realloc(w->missing, capacity * sizeof *grown);
        if (grown == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the parity matrix");
        w->missing = grown;
        w->missing_capacity = capacity;
    }
    memcpy(w->missing[w->missing_count++], part, sizeof(cover_row));
    return QE_OK;
}

/* All levels of factors from `factor` on, `left` of them. */
static qe_status combine(work *w, cover_row part, uint32_t factor, uint32_t left, qe_error *error_out) {
    if (left == 0) return note(w, part, error_out);
    for (uint32_t f = factor; f + left <= w->cover->factors; f++) {
        for (uint8_t level = 0; level < w->cover->levels[f]; level++) {
            part[f] = level;
            QE_TRY(combine(w, part, f + 1, left - 1, error_out));
        }
        part[f] = QE_COVER_ANY;
    }
    return QE_OK;
}

static qe_status extend(work *w, cover_row *rows, uint32_t capacity, uint32_t *count, qe_error *error_out) {
    for (uint32_t i = 0; i < *count; i++) strike(w, rows[i]);
    while (w->missing_count > 0) {
        if (*count == capacity)
            return qe_error_set(error_out, QE_ERROR_LIMIT, NULL, "the parity matrix has more than %u rows", capacity);
        uint8_t *row = rows[(*count)++];
        memcpy(row, w->missing[0], sizeof(cover_row));
        for (uint32_t f = 0; f < w->cover->factors; f++)
            if (!has(row, f)) fill(w, row, f);
        strike(w, row);
    }
    return QE_OK;
}

qe_status qe_cover_extend(const qe_cover *cover, uint32_t strength, uint8_t (*rows)[QE_COVER_FACTORS_MAX],
                          uint32_t capacity, uint32_t *count_out, qe_error *error_out) {
    QE_ASSERT(strength >= 1 && strength <= QE_COVER_STRENGTH_MAX && cover->factors <= QE_COVER_FACTORS_MAX);
    work w = {.cover = cover};
    cover_row open;
    memset(open, QE_COVER_ANY, sizeof open);
    qe_status status = combine(&w, open, 0, strength, error_out);
    if (status == QE_OK) status = extend(&w, rows, capacity, count_out, error_out);
    free(w.missing);
    return status;
}
