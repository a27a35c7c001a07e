/* bench_time.h - launches timed as nodes of a graph, and the memory that they rotate through. */
#ifndef QE_TESTS_CUDA_BENCH_TIME_H
#define QE_TESTS_CUDA_BENCH_TIME_H

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

#include "memory.h"
#include "qeffect/op.h"

struct shape {
    uint32_t rows, hidden, ffn, heads, kv_heads, head_dim;
    uint32_t qkv() const {
        return (heads + 2 * kv_heads) * head_dim;
    }
};

/* One allocation, filled with random bf16 (as fp32 they are random too), given out again for every measurement. */
class arena {
   public:
    arena(size_t bytes, bool is_filled);
    ~arena() {
        cudaFree(at_);
    }
    arena(const arena &) = delete;
    arena &operator=(const arena &) = delete;
    void *take(size_t bytes);
    void reset() {
        used_ = 0;
    }
    size_t used() const {
        return used_;
    }
    size_t bytes() const {
        return bytes_;
    }
    char *at() const {
        return static_cast<char *>(at_);
    }

   private:
    void *at_ = nullptr;
    size_t bytes_, used_ = 0;
};

/* What an op reads, and what it writes. */
struct bench_memory {
    arena in, out;
    bench_memory(size_t in_bytes, size_t out_bytes) : in(in_bytes, true), out(out_bytes, false) {
    }
    uint16_t *bf16(size_t count) {
        return static_cast<uint16_t *>(in.take(count * 2));
    }
    float *fp32(size_t count) {
        return static_cast<float *>(in.take(count * 4));
    }
    template <typename T>
    T *output(size_t count) {
        return static_cast<T *>(out.take(count * sizeof(T)));
    }
};

typedef std::function<qe_status(cudaStream_t)> launcher;
typedef std::function<launcher(bench_memory &)> maker; /* prepares one of the rotating launches */

/* Microseconds of one launch: the median over graphs of at least 24 launches, which rotate. */
double time_launches(const std::vector<launcher> &launches);
/* The same, launched one by one. */
double time_eager(const std::vector<launcher> &launches);
/* Of every byte of the outputs and where it stands. */
uint64_t checksum(const void *at, size_t bytes);

/* Ways to do one op at one shape; the first is what the library does. All must leave the same bytes. */
struct variant {
    std::string name;
    maker make;
    bool is_partial; /* leaves something out: its bytes differ */
};
class sweep {
   public:
    explicit sweep(bench_memory &memory) : memory_(memory) {
    }
    void run(const char *op, const shape &s, double bytes, const std::vector<variant> &variants);
    int summary() const; /* the best per op and shape; how many variants had other bytes */

   private:
    struct outcome {
        std::string op, name;
        shape s;
        double us, first_us, bytes;
    };
    bench_memory &memory_;
    std::vector<outcome> best_;
    int wrong_ = 0;
};

void sweep_quantize(sweep &to, const shape &s);
void sweep_weight(sweep &to, const shape &s);
void sweep_swiglu(sweep &to, const shape &s);
void sweep_swiglu_backward(sweep &to, const shape &s);
void sweep_rope(sweep &to, const shape &s);
void sweep_norm(sweep &to, const shape &s);
void sweep_norm_backward(sweep &to, const shape &s);

/* Codes both ways under delayed scaling. */
qe_quantize_target delayed(bench_memory &memory, uint32_t rows, uint32_t columns, qe_format format);

#endif
