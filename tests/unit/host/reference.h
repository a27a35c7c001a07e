/* reference.h - the unquantized ops in double, as plainly as their formulas, sharing nothing with the kernels; and
 * central differences through them. */
#ifndef QE_TEST_HOST_REFERENCE_H
#define QE_TEST_HOST_REFERENCE_H

#include "devices.h"

/* [rows, columns] doubles, zeroed; the caller frees. */
static inline double *doubles_of(size_t count) {
    double *values = calloc(count ? count : 1, sizeof *values);
    assert_non_null(values);
    return values;
}

static inline double *doubles_from(const float *values, size_t count) {
    double *copy = doubles_of(count);
    for (size_t i = 0; i < count; ++i) copy[i] = (double)values[i];
    return copy;
}

/* The largest |a - b| relative to the largest |b|. */
static inline double distance(const float *a, const double *b, size_t count) {
    double worst = 0.0, largest = 1e-30;
    for (size_t i = 0; i < count; ++i) {
        const double apart = fabs((double)a[i] - b[i]);
        if (!(apart <= worst)) worst = apart; /* NaN counts as far */
        if (fabs(b[i]) > largest) largest = fabs(b[i]);
    }
    return worst / largest;
}

static inline void assert_close(const char *what, const float *a, const double *b, size_t count, double tolerance) {
    const double apart = distance(a, b, count);
    if (!(apart <= tolerance)) fail_msg("%s: %g apart, at most %g", what, apart, tolerance);
}

static inline void reference_norm(const double *x, const double *gain, size_t rows, size_t hidden, double epsilon,
                                  double *y) {
    for (size_t r = 0; r < rows; ++r) {
        double squares = 0.0;
        for (size_t i = 0; i < hidden; ++i) squares += x[r * hidden + i] * x[r * hidden + i];
        const double root = sqrt(squares / (double)hidden + epsilon);
        for (size_t i = 0; i < hidden; ++i) y[r * hidden + i] = x[r * hidden + i] / root * gain[i];
    }
}

/* y [rows, out] = x w' */
static inline void reference_linear(const double *x, const double *w, size_t rows, size_t in, size_t out, double *y) {
    for (size_t r = 0; r < rows; ++r)
        for (size_t o = 0; o < out; ++o) {
            double sum = 0.0;
            for (size_t i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
            y[r * out + o] = sum;
        }
}

static inline void reference_swiglu(const double *gate_up, size_t rows, size_t ffn, double *y) {
    for (size_t r = 0; r < rows; ++r)
        for (size_t i = 0; i < ffn; ++i) {
            const double gate = gate_up[r * 2 * ffn + i], up = gate_up[r * 2 * ffn + ffn + i];
            y[r * ffn + i] = gate / (1.0 + exp(-gate)) * up;
        }
}

/* In place, as Hugging Face's rotate_half: (x * cos) + (rotate_half(x) * sin) over q and k heads. */
static inline void reference_rope(double *qkv, const float *cosine, const float *sine, size_t rows, size_t sequence,
                                  size_t heads, size_t kv_heads, size_t head_dim) {
    const size_t columns = (heads + 2 * kv_heads) * head_dim, half = head_dim / 2;
    for (size_t r = 0; r < rows; ++r)
        for (size_t head = 0; head < heads + kv_heads; ++head)
            for (size_t i = 0; i < half; ++i) {
                double *at = qkv + r * columns + head * head_dim;
                const double c = (double)cosine[r % sequence * half + i], s = (double)sine[r % sequence * half + i];
                const double lower = at[i], upper = at[half + i];
                at[i] = lower * c - upper * s;
                at[half + i] = upper * c + lower * s;
            }
}

/* One query of one head at a time. lse may be NULL. */
static inline void reference_attention(const double *qkv, size_t sequences, size_t sequence, size_t heads,
                                       size_t kv_heads, size_t head_dim, double *out, double *lse) {
    const size_t columns = (heads + 2 * kv_heads) * head_dim;
    double *weights = doubles_of(sequence);
    for (size_t s = 0; s < sequences; ++s)
        for (size_t head = 0; head < heads; ++head)
            for (size_t row = 0; row < sequence; ++row) {
                const size_t kv = head * kv_heads / heads;
                const double *q = qkv + (s * sequence + row) * columns + head * head_dim;
                double sum = 0.0;
                for (size_t j = 0; j <= row; ++j) {
                    const double *k = qkv + (s * sequence + j) * columns + (heads + kv) * head_dim;
                    double score = 0.0;
                    for (size_t i = 0; i < head_dim; ++i) score += q[i] * k[i];
                    sum += weights[j] = exp(score / sqrt((double)head_dim));
                }
                for (size_t i = 0; i < head_dim; ++i) {
                    double value = 0.0;
                    for (size_t j = 0; j <= row; ++j)
                        value += weights[j] / sum *
                                 qkv[(s * sequence + j) * columns + (heads + kv_heads + kv) * head_dim + i];
                    out[(s * sequence + row) * heads * head_dim + head * head_dim + i] = value;
                }
                if (lse) lse[(s * heads + head) * sequence + row] = log(sum);
            }
    free(weights);
}

static inline double reference_cross_entropy(const double *logits, const int32_t *targets, size_t rows, size_t vocab) {
    double loss = 0.0;
    for (size_t r = 0; r < rows; ++r) {
        double sum = 0.0;
        if (targets[r] < 0) continue;
        for (size_t i = 0; i < vocab; ++i) sum += exp(logits[r * vocab + i]);
        loss += log(sum) - logits[r * vocab + (size_t)targets[r]];
    }
    return loss;
}

/* A scalar function of `count` numbers; `context` is the test's. */
typedef double (*reference_scalar)(const double *x, const void *context);

/* gradient[i] = (f(x + step e_i) - f(x - step e_i)) / (2 step). In double with step 1e-5 the error is about 1e-10. */
static inline void central_differences(reference_scalar f, const void *context, double *x, size_t count,
                                       double *gradient) {
    const double step = 1e-5;
    for (size_t i = 0; i < count; ++i) {
        const double at = x[i];
        x[i] = at + step;
        const double above = f(x, context);
        x[i] = at - step;
        const double below = f(x, context);
        x[i] = at;
        gradient[i] = (above - below) / (2.0 * step);
    }
}

static inline double dot(const double *a, const double *b, size_t count) {
    double sum = 0.0;
    for (size_t i = 0; i < count; ++i) sum += a[i] * b[i];
    return sum;
}

#endif
