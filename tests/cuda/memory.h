/* memory.h - buffers on the device with guards around them, and values to fill them with. For the kernel checks, on the
 * GPU and emulated. */
#ifndef QE_TESTS_CUDA_MEMORY_H
#define QE_TESTS_CUDA_MEMORY_H

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "qeffect/fp8.h"

inline void must(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    exit(1);
}
#define MUST(call) must((call), #call)

enum { GUARD_BYTES = 256, GUARD = 0x5C };

/* Memory of the device between two guards. Its bytes are poison until they are written. */
class buffer {
   public:
    explicit buffer(size_t bytes) : bytes_(bytes) {
        MUST(cudaMalloc(&raw_, bytes + 2 * GUARD_BYTES));
        MUST(cudaMemset(raw_, GUARD, bytes + 2 * GUARD_BYTES));
    }
    ~buffer() {
        cudaFree(raw_);
    }
    buffer(const buffer &) = delete;
    buffer &operator=(const buffer &) = delete;
    void *at() const {
        return static_cast<char *>(raw_) + GUARD_BYTES;
    }
    size_t bytes() const {
        return bytes_;
    }
    template <typename T>
    T *as() const {
        return static_cast<T *>(at());
    }
    void poison(int value) {
        MUST(cudaMemset(at(), value, bytes_));
    }
    template <typename T>
    void put(const std::vector<T> &values) {
        if (values.size() * sizeof(T) != bytes_) abort();
        MUST(cudaMemcpy(at(), values.data(), bytes_, cudaMemcpyHostToDevice));
    }
    template <typename T>
    std::vector<T> get() const {
        std::vector<T> values(bytes_ / sizeof(T));
        MUST(cudaMemcpy(values.data(), at(), bytes_, cudaMemcpyDeviceToHost));
        return values;
    }
    bool is_guarded() const {
        std::vector<unsigned char> all(bytes_ + 2 * GUARD_BYTES);
        MUST(cudaMemcpy(all.data(), raw_, all.size(), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < GUARD_BYTES; ++i)
            if (all[i] != GUARD || all[all.size() - 1 - i] != GUARD) return false;
        return true;
    }

   private:
    void *raw_ = nullptr;
    size_t bytes_;
};

/* Numbers with no structure that a kernel could share. */
class numbers {
   public:
    explicit numbers(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {
    }
    uint64_t next() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
    double uniform() {
        return static_cast<double>(next() >> 11) * 0x1p-53;
    }
    /* About normal; `wide`: times a power of two up to 2^+-10. */
    float value(bool wide) {
        const double v = (uniform() + uniform() + uniform() + uniform() - 2.0) * 1.7;
        return static_cast<float>(wide ? ldexp(v, static_cast<int>(next() % 21) - 10) : v);
    }

   private:
    uint64_t state_;
};

/* SPECIAL: WIDE with zeros, subnormals, infinities and NaNs of both signs; ANY: any bits; the others: one value and its
 * negative, so that no amax is a number to divide by, or the largest or smallest that is. */
enum kind { PLAIN, WIDE, SPECIAL, ANY, ZEROS, NANS, INFINITES, SMALLEST, LARGEST };

inline float special(numbers &random) {
    static const uint32_t bits[] = {0x00000000u, 0x80000000u, 0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFFC00000u,
                                    0x7F810000u, 0xFF810000u, 0x00010000u, 0x80010000u, 0x7F7F0000u, 0xFF7F0000u};
    float value;
    memcpy(&value, &bits[random.next() % (sizeof bits / sizeof *bits)], sizeof value);
    return value;
}

/* Kinds from ANY on: bits of a value, a bf16 in the upper half of what is meant. */
inline uint32_t hostile(numbers &random, kind k, bool is_wide) {
    static const uint32_t of_kind[][2] = {{0, 0}, {0x7FC00000u, 0x7F810000u}, {0x7F800000u, 0x7F800000u},
                                          {0x00010000u, 0x00000001u}, {0x7F7F0000u, 0x7F7FFFFFu}};
    const uint64_t drawn = random.next();
    if (k == ANY) return static_cast<uint32_t>(drawn);
    return of_kind[k - ZEROS][is_wide] | static_cast<uint32_t>(drawn & 0x80000000u);
}

/* bf16 values; `of` in [0, 1]: part of them that is special. */
inline std::vector<uint16_t> bf16_values(size_t count, uint64_t seed, kind k, double of = 0.02) {
    numbers random(seed);
    std::vector<uint16_t> values(count);
    for (uint16_t &v : values) {
        if (k >= ANY) {
            v = static_cast<uint16_t>(hostile(random, k, false) >> 16);
            continue;
        }
        const bool is_special = k == SPECIAL && random.uniform() < of;
        const float value = is_special ? special(random) : random.value(k != PLAIN);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        v = is_special ? static_cast<uint16_t>(bits >> 16) : qe_bf16_encode(value);
    }
    return values;
}

inline std::vector<float> fp32_values(size_t count, uint64_t seed, kind k) {
    numbers random(seed);
    std::vector<float> values(count);
    for (float &v : values) {
        if (k >= ANY) {
            const uint32_t bits = hostile(random, k, true);
            memcpy(&v, &bits, sizeof v);
            continue;
        }
        v = k == SPECIAL && random.uniform() < 0.02 ? special(random) : random.value(k != PLAIN);
    }
    return values;
}

inline std::vector<float> decoded(const std::vector<uint16_t> &codes) {
    std::vector<float> values(codes.size());
    for (size_t i = 0; i < codes.size(); ++i) values[i] = qe_bf16_decode(codes[i]);
    return values;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* As the device rounds: a NaN is 0x7FFF. */
inline uint16_t bf16_of(float value) {
    return value != value ? 0x7FFF : qe_bf16_encode(value);
}

#endif
