/* source.cuh - where the values come from that an op quantizes. A source computes fp32 values from what lies in memory;
 * a sink (sink.cuh) rounds and stores them. A value is computed the same way whether it is asked for alone or eight at
 * a time, so every path through a sink gives the same bits.
 *
 * Values come by `units`: unit u of a row gives OUTPUTS values, in column(output, u). Eight neighbouring units give
 * eight neighbouring columns per output where wide() holds; `unit` is a multiple of 8 there.
 *
 *  begin(row, unit)           what is the same for up to 16 rows from `row` on of eight units
 *  load(row, unit)            what is read once from memory, for eight units: issued early
 *  values(constant, raw, ...) the values of eight units
 *  value(row, unit, v)        the values of one unit, any shape
 *
 * large: how a large tensor is cut up (staged_kernel in tile.cuh), chosen by measuring. */
#ifndef QE_CUDA_SOURCE_CUH
#define QE_CUDA_SOURCE_CUH

#include "backend/cuda/codec.cuh"

/* A block takes ROWS rows of UNITS units: ACROSS threads side by side, DEEP groups of four rows a thread, of which
 * EARLY rows are under way before the first is used. BLOCKS: how many a multiprocessor should hold. CLUSTER: 0; 1 where
 * blocks had better not begin all at once: clusters, be they of one block, begin 2.4 ns apart, blocks 0.6 ns. */
template <int ACROSS_, int DEEP_, int EARLY_, int BLOCKS_, int CLUSTER_ = 0>
struct large_shape {
    static constexpr uint32_t ROWS = 64, ACROSS = ACROSS_, UNITS = ACROSS * 8, PIECES = ROWS / 16;
    static constexpr uint32_t BAND = 4; /* tiles below each other that are begun before their neighbours */
    static constexpr int DEEP = DEEP_, EARLY = EARLY_, BLOCKS = BLOCKS_, CLUSTER = CLUSTER_;
    static constexpr uint32_t THREADS = ROWS / 4 / DEEP * ACROSS;
};

struct no_constant {};

/* Activations as they are. */
struct plain_source {
    enum { OUTPUTS = 1 };
    typedef large_shape<32, 2, 8, 4> large;
    struct raw {
        uint4 x;
    };
    typedef no_constant constant;
    const uint16_t *x; /* [rows, units] bf16 */
    uint32_t units;

    METHOD constant begin(uint32_t, uint32_t) const {
        return constant();
    }
    METHOD raw load(uint32_t row, uint32_t unit) const {
        return raw{load_once(x + static_cast<size_t>(row) * units + unit)};
    }
    METHOD void values(const constant &, const raw &r, uint32_t, uint32_t, float (*v)[8]) const {
        unpack8(r.x, v[0]);
    }
    METHOD void value(uint32_t row, uint32_t unit, float *v) const {
        v[0] = bf16_value(x[static_cast<size_t>(row) * units + unit]);
    }
    METHOD uint32_t column(int, uint32_t unit) const {
        return unit;
    }
    METHOD uint32_t unit_of(uint32_t column, int *output_out) const {
        *output_out = 0;
        return column;
    }
    bool wide() const {
        return units % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    }
};

/* Master weights. */
struct weight_source {
    enum { OUTPUTS = 1 };
    typedef large_shape<16, 1, 4, 4> large;
    struct raw {
        uint4 low, high;
    };
    typedef no_constant constant;
    const float *w; /* [rows, units] */
    uint32_t units;

    METHOD constant begin(uint32_t, uint32_t) const {
        return constant();
    }
    METHOD raw load(uint32_t row, uint32_t unit) const {
        const float *at = w + static_cast<size_t>(row) * units + unit;
        return raw{load_once(at), load_once(at + 4)};
    }
    METHOD void values(const constant &, const raw &r, uint32_t, uint32_t, float (*v)[8]) const {
        v[0][0] = float_of(r.low.x), v[0][1] = float_of(r.low.y);
        v[0][2] = float_of(r.low.z), v[0][3] = float_of(r.low.w);
        v[0][4] = float_of(r.high.x), v[0][5] = float_of(r.high.y);
        v[0][6] = float_of(r.high.z), v[0][7] = float_of(r.high.w);
    }
    METHOD void value(uint32_t row, uint32_t unit, float *v) const {
        v[0] = w[static_cast<size_t>(row) * units + unit];
    }
    METHOD uint32_t column(int, uint32_t unit) const {
        return unit;
    }
    METHOD uint32_t unit_of(uint32_t column, int *output_out) const {
        *output_out = 0;
        return column;
    }
    bool wide() const {
        return units % 8 == 0 && reinterpret_cast<uintptr_t>(w) % 16 == 0;
    }
};

DEVICE float normed(float x, float rstd, float gain) {
    return mul(mul(x, rstd), gain);
}

/* RMSNorm whose statistics are known. */
struct norm_source {
    enum { OUTPUTS = 1 };
    typedef large_shape<32, 2, 8, 3> large;
    struct raw {
        uint4 x;
        float rstd;
    };
    struct constant {
        float gain[8];
    };
    const uint16_t *x; /* [rows, units] bf16 */
    const float *rstd; /* [rows] */
    const float *gain; /* [units] */
    uint32_t units;

    METHOD constant begin(uint32_t, uint32_t unit) const {
        constant c;
#pragma unroll
        for (int i = 0; i < 8; ++i) c.gain[i] = gain[unit + i];
        return c;
    }
    METHOD raw load(uint32_t row, uint32_t unit) const {
        return raw{load_once(x + static_cast<size_t>(row) * units + unit), rstd[row]};
    }
    METHOD void values(const constant &c, const raw &r, uint32_t, uint32_t, float (*v)[8]) const {
        float at[8];
        unpack8(r.x, at);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[0][i] = normed(at[i], r.rstd, c.gain[i]);
    }
    METHOD void value(uint32_t row, uint32_t unit, float *v) const {
        v[0] = normed(bf16_value(x[static_cast<size_t>(row) * units + unit]), rstd[row], gain[unit]);
    }
    METHOD uint32_t column(int, uint32_t unit) const {
        return unit;
    }
    METHOD uint32_t unit_of(uint32_t column, int *output_out) const {
        *output_out = 0;
        return column;
    }
    bool wide() const {
        return units % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    }
};

/* (a, b) of a pair becomes (a cos - b sin, b cos + a sin). */
DEVICE void turned(float a, float b, float cosine, float sine, float *lower_out, float *upper_out) {
    *lower_out = sub(mul(a, cosine), mul(b, sine));
    *upper_out = add(mul(b, cosine), mul(a, sine));
}

/* Of eight neighbouring pairs. */
struct rope_turn {
    float cosine[8], sine[8];
};

DEVICE rope_turn rope_turn_of(const float *cosine, const float *sine) {
    const float4 c0 = load_table(cosine), c1 = load_table(cosine + 4);
    const float4 s0 = load_table(sine), s1 = load_table(sine + 4);
    return rope_turn{{c0.x, c0.y, c0.z, c0.w, c1.x, c1.y, c1.z, c1.w},
                     {s0.x, s0.y, s0.z, s0.w, s1.x, s1.y, s1.z, s1.w}};
}

/* Asked for where it stands. */
DEVICE rope_turn rope_turn_here(const float *cosine, const float *sine) {
    const float4 c0 = load_here(cosine), c1 = load_here(cosine + 4), s0 = load_here(sine), s1 = load_here(sine + 4);
    return rope_turn{{c0.x, c0.y, c0.z, c0.w, c1.x, c1.y, c1.z, c1.w},
                     {s0.x, s0.y, s0.z, s0.w, s1.x, s1.y, s1.z, s1.w}};
}

DEVICE void rope_apply(const rope_turn &turn, float *lower, float *upper) {
#pragma unroll
    for (int i = 0; i < 8; ++i) turned(lower[i], upper[i], turn.cosine[i], turn.sine[i], &lower[i], &upper[i]);
}

/* The other way round. */
DEVICE rope_turn rope_back(rope_turn turn) {
#pragma unroll
    for (int i = 0; i < 8; ++i) turn.sine[i] = -turn.sine[i];
    return turn;
}

/* Heads of which the first `turned_heads` are rotated. A unit is a pair: the halves of a head. */
struct rope_source {
    enum { OUTPUTS = 2 };
    typedef large_shape<32, 1, 2, 2> large;
    struct raw {
        uint4 lower, upper;
    };
    struct constant {
        uint32_t row, position; /* the first row, and where it stands in its sequence */
        uint32_t within; /* place in the half of a head */
        bool is_turned;
    };
    const uint16_t *qkv; /* [rows, columns] bf16 */
    const float *cosine; /* [sequence, half] */
    const float *sine;
    uint32_t columns, units, half, sequence, turned_heads;
    uint32_t back; /* 1: the other way round */

    METHOD constant begin(uint32_t row, uint32_t unit) const {
        return constant{row, row % sequence, unit % half, unit / half < turned_heads};
    }
    METHOD raw load(uint32_t row, uint32_t unit) const {
        const uint16_t *at = qkv + static_cast<size_t>(row) * columns + column(0, unit);
        return raw{load_once(at), load_once(at + half)};
    }
    METHOD void values(const constant &start, const raw &r, uint32_t row, uint32_t, float (*v)[8]) const {
        float lower[8], upper[8];
        unpack8(r.lower, lower);
        unpack8(r.upper, upper);
        uint32_t position = start.position + (row - start.row);
        if (position >= sequence) position -= sequence;
        const size_t at = static_cast<size_t>(position) * half + start.within;
        const rope_turn turn = rope_turn_of(cosine + at, sine + at);
        /* Chosen afterwards: a branch here would keep the loads of the table from being issued early. */
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            turned(lower[i], upper[i], turn.cosine[i], back ? -turn.sine[i] : turn.sine[i], &v[0][i], &v[1][i]);
            v[0][i] = start.is_turned ? v[0][i] : lower[i];
            v[1][i] = start.is_turned ? v[1][i] : upper[i];
        }
    }
    METHOD void value(uint32_t row, uint32_t unit, float *v) const {
        const uint16_t *at = qkv + static_cast<size_t>(row) * columns + column(0, unit);
        const float lower = bf16_value(at[0]), upper = bf16_value(at[half]);
        v[0] = lower, v[1] = upper;
        if (unit / half >= turned_heads) return;
        const size_t angle = static_cast<size_t>(row % sequence) * half + unit % half;
        turned(lower, upper, cosine[angle], back ? -sine[angle] : sine[angle], &v[0], &v[1]);
    }
    METHOD uint32_t column(int output, uint32_t unit) const {
        return unit / half * (2 * half) + unit % half + (output ? half : 0);
    }
    METHOD uint32_t unit_of(uint32_t column, int *output_out) const {
        const uint32_t within = column % (2 * half);
        *output_out = within >= half;
        return column / (2 * half) * half + within % half;
    }
    bool wide() const {
        return half % 8 == 0 && columns % 8 == 0 && sequence >= 16 && reinterpret_cast<uintptr_t>(qkv) % 16 == 0 &&
               reinterpret_cast<uintptr_t>(cosine) % 16 == 0 && reinterpret_cast<uintptr_t>(sine) % 16 == 0;
    }
};

/* IS_CUT: gates may be large. */
template <bool IS_CUT = true>
DEVICE float swiglu(float gate, float up) {
    return mul(mul(gate, sigmoid<IS_CUT>(gate)), up);
}

struct swiglu_source {
    enum { OUTPUTS = 1 };
    typedef large_shape<16, 2, 8, 6, 1> large;
    struct raw {
        uint4 gate, up;
    };
    typedef no_constant constant;
    const uint16_t *gate_up; /* [rows, 2 * units] bf16 */
    uint32_t units;

    METHOD constant begin(uint32_t, uint32_t) const {
        return constant();
    }
    METHOD raw load(uint32_t row, uint32_t unit) const {
        const uint16_t *at = gate_up + static_cast<size_t>(row) * 2 * units + unit;
        return raw{load_once(at), load_once(at + units)};
    }
    METHOD void values(const constant &, const raw &r, uint32_t, uint32_t, float (*v)[8]) const {
        float gate[8], up[8];
        unpack8(r.gate, gate);
        unpack8(r.up, up);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[0][i] = swiglu(gate[i], up[i]);
    }
    METHOD void value(uint32_t row, uint32_t unit, float *v) const {
        const uint16_t *at = gate_up + static_cast<size_t>(row) * 2 * units + unit;
        v[0] = swiglu(bf16_value(at[0]), bf16_value(at[units]));
    }
    METHOD uint32_t column(int, uint32_t unit) const {
        return unit;
    }
    METHOD uint32_t unit_of(uint32_t column, int *output_out) const {
        *output_out = 0;
        return column;
    }
    bool wide() const {
        return units % 8 == 0 && reinterpret_cast<uintptr_t>(gate_up) % 16 == 0;
    }
};

/* dgate = (dy*up) * (s * (1 + g*(1-s))), dup = dy * (g*s), s = sigmoid(g). */
DEVICE void swiglu_backward(float gate, float up, float dy, float *dgate_out, float *dup_out) {
    const float s = sigmoid(gate);
    *dgate_out = mul(mul(dy, up), mul(s, add(1.0f, mul(gate, sub(1.0f, s)))));
    *dup_out = mul(dy, mul(gate, s));
}

struct swiglu_backward_source {
    enum { OUTPUTS = 2 };
    typedef large_shape<32, 1, 2, 2> large;
    struct raw {
        uint4 gate, up, dy;
    };
    typedef no_constant constant;
    const uint16_t *gate_up; /* [rows, 2 * units] bf16 */
    const uint16_t *dy; /* [rows, units] bf16 */
    uint32_t units;

    METHOD constant begin(uint32_t, uint32_t) const {
        return constant();
    }
    METHOD raw load(uint32_t row, uint32_t unit) const {
        const uint16_t *at = gate_up + static_cast<size_t>(row) * 2 * units + unit;
        return raw{load_once(at), load_once(at + units), load_once(dy + static_cast<size_t>(row) * units + unit)};
    }
    METHOD void values(const constant &, const raw &r, uint32_t, uint32_t, float (*v)[8]) const {
        float gate[8], up[8], d[8];
        unpack8(r.gate, gate);
        unpack8(r.up, up);
        unpack8(r.dy, d);
#pragma unroll
        for (int i = 0; i < 8; ++i) swiglu_backward(gate[i], up[i], d[i], &v[0][i], &v[1][i]);
    }
    METHOD void value(uint32_t row, uint32_t unit, float *v) const {
        const uint16_t *at = gate_up + static_cast<size_t>(row) * 2 * units + unit;
        swiglu_backward(bf16_value(at[0]), bf16_value(at[units]),
                        bf16_value(dy[static_cast<size_t>(row) * units + unit]), &v[0], &v[1]);
    }
    METHOD uint32_t column(int output, uint32_t unit) const {
        return unit + (output ? units : 0);
    }
    METHOD uint32_t unit_of(uint32_t column, int *output_out) const {
        *output_out = column >= units;
        return column >= units ? column - units : column;
    }
    bool wide() const {
        return units % 8 == 0 && reinterpret_cast<uintptr_t>(gate_up) % 16 == 0 &&
               reinterpret_cast<uintptr_t>(dy) % 16 == 0;
    }
};

#endif
