/* attention.c - causal grouped-query attention, QE_ATTENTION_ROWS queries of one head at a time, so that what lies
 * above the diagonal is skipped by whole tiles. Order: sequences, then key-value heads, then the query heads of the
 * group, then tiles of queries from the last to the first (the last one meets every key, so it sets the sums of dk and
 * dv, and the others add). Products are BLAS's.
 *
 *   S = Q K' / sqrt(d)   P = e^(S - max)   O = P V / sum   lse = max + log(sum)
 *   dP = dO V'   P = e^(S - lse)   dS = P (dP - rowsum(P dP))   dV += P' dO
 *   dQ = dS K / sqrt(d)   dK += dS' Q / sqrt(d) */
#include <math.h>

#include "backend/host/kernels/table.h"
#include "backend/host/kernels/level.h"

/* A head of one sequence within qkv or a tensor like it. */
typedef struct tile {
    size_t first, rows; /* queries */
    size_t keys;        /* first + rows: what the last of them sees */
    size_t pitch;       /* floats from a row of scores to the next: keys, rounded up to lanes */
} tile;

static tile tile_at(size_t first, size_t sequence) {
    const size_t left = sequence - first, rows = left < QE_ATTENTION_ROWS ? left : QE_ATTENTION_ROWS;
    return (tile){first, rows, first + rows, (first + rows + LANES - 1) / LANES * LANES};
}

static size_t last_tile(size_t sequence) { return (sequence - 1) / QE_ATTENTION_ROWS * QE_ATTENTION_ROWS; }

static size_t lanes_up(size_t count) { return (count + LANES - 1) / LANES * LANES; }

/* turned [head_dim, turned_pitch] = the head's rows of keys or values, transposed. Products with a small inner
 * dimension are 1.5 times faster on it, and the tiles and heads of a group share it. */
static void head_turn(const float *head, size_t pitch, size_t sequence, size_t head_dim, size_t turned_pitch,
                      float *turned) {
    for (size_t row = 0; row < sequence; ++row)
        for (size_t i = 0; i < head_dim; ++i) turned[i * turned_pitch + row] = head[row * pitch + i];
}

/* scores [rows, pitch] = queries turned * factor */
static void scores_of(host_sgemm *sgemm, const tile *t, const float *queries, size_t query_pitch, const float *turned,
                      size_t turned_pitch, size_t head_dim, float factor, float *scores) {
    sgemm(HOST_ROW_MAJOR, HOST_NO_TRANSPOSE, HOST_NO_TRANSPOSE, (int)t->rows, (int)t->keys, (int)head_dim, factor,
          queries, (int)query_pitch, turned, (int)turned_pitch, 0.0f, scores, (int)t->pitch);
}

/* The last 16 keys of which a query sees some; those that it does not see become `fill`. */
static void row_cut(float *row, size_t seen, float fill) {
    const size_t last = (seen - 1) / LANES * LANES;
    lanes_keep(row + last, seen - last, fill);
}

/* One row: what lies behind `seen` becomes 0. Returns the sum; *most_out is the largest score. */
static float row_exponentials(float *row, size_t seen, size_t pitch, float *most_out) {
    const size_t padded = lanes_up(seen);
    row_cut(row, seen, float_of(0xFF800000));
    const float most = row_max(row, padded);
    KERNEL_VECTOR
    for (size_t i = 0; i < padded; ++i) row[i] = exp_lane(row[i] - most);
    row_cut(row, seen, 0.0f);
    memset(row + padded, 0, (pitch - padded) * sizeof(float));
    *most_out = most;
    return row_sum(row, padded);
}

/* The parts of the caller's scratch (qe_attention_scratch_floats). */
typedef struct room {
    float *scores, *dp;         /* [QE_ATTENTION_ROWS, pitch] */
    float *k_turned, *v_turned; /* [head_dim, pitch] of the key-value head at work */
    size_t pitch;
} room;

static room room_of(float *scratch, size_t sequence, size_t head_dim) {
    const size_t pitch = lanes_up(sequence);
    float *dp = scratch + QE_ATTENTION_ROWS * pitch, *k_turned = dp + QE_ATTENTION_ROWS * pitch;
    return (room){scratch, dp, k_turned, k_turned + head_dim * pitch, pitch};
}

typedef struct head_view {
    const float *q, *k, *v; /* first row of the head in qkv */
    size_t pitch;           /* floats from row to row of qkv */
    size_t out_pitch;       /* of out and dout */
    float factor;           /* 1 / sqrt(head_dim) */
} head_view;

static head_view view_of(const float *qkv, size_t heads, size_t kv_heads, size_t head_dim, size_t head) {
    const size_t kv = head / (heads / kv_heads);
    return (head_view){
        .q = qkv + head * head_dim,
        .k = qkv + (heads + kv) * head_dim,
        .v = qkv + (heads + kv_heads + kv) * head_dim,
        .pitch = (heads + 2 * kv_heads) * head_dim,
        .out_pitch = heads * head_dim,
        .factor = 1.0f / sqrtf((float)head_dim),
    };
}

static void tile_forward(host_sgemm *sgemm, const tile *t, const head_view *view, size_t head_dim, float *out,
                         float *lse, const room *r) {
    float sums[QE_ATTENTION_ROWS], *scores = r->scores;
    scores_of(sgemm, t, view->q + t->first * view->pitch, view->pitch, r->k_turned, r->pitch, head_dim, view->factor,
              scores);
    for (size_t row = 0; row < t->rows; ++row) {
        float most;
        sums[row] = row_exponentials(scores + row * t->pitch, t->first + row + 1, t->pitch, &most);
        lse[t->first + row] = most + logf(sums[row]);
    }
    float *to = out + t->first * view->out_pitch;
    sgemm(HOST_ROW_MAJOR, HOST_NO_TRANSPOSE, HOST_NO_TRANSPOSE, (int)t->rows, (int)head_dim, (int)t->keys, 1.0f, scores,
          (int)t->pitch, view->v, (int)view->pitch, 0.0f, to, (int)view->out_pitch);
    for (size_t row = 0; row < t->rows; ++row, to += view->out_pitch) {
        const float share = 1.0f / sums[row];
        KERNEL_VECTOR
        for (size_t i = 0; i < head_dim; ++i) to[i] *= share;
    }
}

static void head_forward(const qe_args_attention *args, host_sgemm *sgemm, size_t s, size_t head, const room *r) {
    const size_t sequence = args->sequence, heads = args->heads, head_dim = args->head_dim;
    const size_t columns = (heads + 2 * args->kv_heads) * head_dim;
    const float *qkv = (const float *)args->qkv + s * sequence * columns;
    const head_view view = view_of(qkv, heads, args->kv_heads, head_dim, head);
    float *out = (float *)args->out + s * sequence * view.out_pitch + head * head_dim;
    float *lse = args->lse + (s * heads + head) * sequence;
    if (head % (heads / args->kv_heads) == 0) head_turn(view.k, view.pitch, sequence, head_dim, r->pitch, r->k_turned);
    for (size_t first = 0; first < sequence; first += QE_ATTENTION_ROWS) {
        const tile t = tile_at(first, sequence);
        tile_forward(sgemm, &t, &view, head_dim, out, lse, r);
    }
}

void KERNEL(attention)(const qe_args_attention *args, host_sgemm *sgemm) {
    const room r = room_of(args->scratch, args->sequence, args->head_dim);
    for (size_t s = 0; s < args->sequences; ++s)
        for (size_t head = 0; head < args->heads; ++head) head_forward(args, sgemm, s, head, &r);
}

/* Scores and dP of one row become P and dS; behind `seen` both become 0. */
static void row_backward(float *scores, float *dp, size_t seen, size_t pitch, float lse) {
    const size_t padded = lanes_up(seen);
    KERNEL_VECTOR
    for (size_t i = 0; i < padded; ++i) scores[i] = exp_lane(scores[i] - lse);
    row_cut(scores, seen, 0.0f);
    row_cut(dp, seen, 0.0f);
    memset(scores + padded, 0, (pitch - padded) * sizeof(float));
    memset(dp + padded, 0, (pitch - padded) * sizeof(float));
    const float mean = row_dot(scores, dp, padded);
    KERNEL_VECTOR
    for (size_t i = 0; i < padded; ++i) dp[i] = scores[i] * (dp[i] - mean);
}

typedef struct head_gradient {
    const float *dout; /* first row of the head */
    float *dq, *dk, *dv;
    const float *lse;
} head_gradient;

static void tile_backward(host_sgemm *sgemm, const tile *t, const head_view *view, const head_gradient *gradient,
                          size_t head_dim, float add, const room *r) {
    float *scores = r->scores, *dp = r->dp;
    const float *q = view->q + t->first * view->pitch, *dout = gradient->dout + t->first * view->out_pitch;
    const int rows = (int)t->rows, keys = (int)t->keys, width = (int)head_dim;
    const int pitch = (int)t->pitch, row_pitch = (int)view->pitch, out_pitch = (int)view->out_pitch;
    scores_of(sgemm, t, q, view->pitch, r->k_turned, r->pitch, head_dim, view->factor, scores);
    scores_of(sgemm, t, dout, view->out_pitch, r->v_turned, r->pitch, head_dim, 1.0f, dp);
    for (size_t row = 0; row < t->rows; ++row)
        row_backward(scores + row * t->pitch, dp + row * t->pitch, t->first + row + 1, t->pitch,
                     gradient->lse[t->first + row]);
    sgemm(HOST_ROW_MAJOR, HOST_NO_TRANSPOSE, HOST_NO_TRANSPOSE, rows, width, keys, view->factor, dp, pitch, view->k,
          row_pitch, 0.0f, gradient->dq + t->first * view->pitch, row_pitch);
    sgemm(HOST_ROW_MAJOR, HOST_TRANSPOSE, HOST_NO_TRANSPOSE, keys, width, rows, view->factor, dp, pitch, q, row_pitch,
          add, gradient->dk, row_pitch);
    sgemm(HOST_ROW_MAJOR, HOST_TRANSPOSE, HOST_NO_TRANSPOSE, keys, width, rows, 1.0f, scores, pitch, dout, out_pitch,
          add, gradient->dv, row_pitch);
}

static void head_backward(const qe_args_attention_backward *args, host_sgemm *sgemm, size_t s, size_t head,
                          const room *r) {
    const size_t sequence = args->sequence, heads = args->heads, head_dim = args->head_dim;
    const size_t group = heads / args->kv_heads, kv = head / group;
    const size_t columns = (heads + 2 * args->kv_heads) * head_dim;
    const float *qkv = (const float *)args->qkv + s * sequence * columns;
    const head_view view = view_of(qkv, heads, args->kv_heads, head_dim, head);
    float *dqkv = (float *)args->dqkv + s * sequence * columns;
    const head_gradient gradient = {
        .dout = (const float *)args->dout + s * sequence * view.out_pitch + head * head_dim,
        .dq = dqkv + head * head_dim,
        .dk = dqkv + (heads + kv) * head_dim,
        .dv = dqkv + (heads + args->kv_heads + kv) * head_dim,
        .lse = args->lse + (s * heads + head) * sequence,
    };
    if (head % group == 0) {
        head_turn(view.k, view.pitch, sequence, head_dim, r->pitch, r->k_turned);
        head_turn(view.v, view.pitch, sequence, head_dim, r->pitch, r->v_turned);
    }
    for (size_t first = last_tile(sequence) + QE_ATTENTION_ROWS; first > 0;) {
        first -= QE_ATTENTION_ROWS;
        const tile t = tile_at(first, sequence);
        const int sets = head % group == 0 && t.keys == sequence;
        tile_backward(sgemm, &t, &view, &gradient, head_dim, sets ? 0.0f : 1.0f, r);
    }
}

void KERNEL(attention_backward)(const qe_args_attention_backward *args, host_sgemm *sgemm) {
    const room r = room_of(args->scratch, args->sequence, args->head_dim);
    for (size_t s = 0; s < args->sequences; ++s)
        for (size_t head = 0; head < args->heads; ++head) head_backward(args, sgemm, s, head, &r);
}
