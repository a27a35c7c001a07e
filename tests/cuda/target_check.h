/* target_check.h - the memory of a quantize target, and what must lie in it: computed value by value from the formulas
 * of docs/numerics.md, with the codec of src/base/fp8.c. */
#ifndef QE_TESTS_CUDA_TARGET_CHECK_H
#define QE_TESTS_CUDA_TARGET_CHECK_H

#include <memory>
#include <string>

#include "memory.h"
#include "qeffect/limits.h"
#include "qeffect/op.h"

/* One run of a kernel with one target. */
struct target_case {
    qe_recipe_kind recipe;
    qe_format format;
    bool is_weight, with_operand, with_retained, is_recorded;
    float scale, amax_before;
};

/* What the kernel's values may differ by from the reference. Codes: of one step each, in this part of the elements. */
struct tolerance {
    double off_by_one; /* part of the codes; 0: none may differ */
    double amax_relative; /* 0: equal bits */
};

class target_memory {
   public:
    target_memory(const target_case &c, uint32_t rows, uint32_t columns) : case_(c), rows_(rows), columns_(columns) {
        const size_t count = static_cast<size_t>(rows) * columns;
        const bool is_block = c.recipe == QE_RECIPE_BLOCK;
        const bool is_wide = c.recipe == QE_RECIPE_BF16 || c.recipe == QE_RECIPE_FP32;
        operand_format_ = is_wide ? (c.recipe == QE_RECIPE_BF16 ? QE_FORMAT_BF16 : QE_FORMAT_FP32)
                                  : (is_block ? QE_FORMAT_BF16 : c.format);
        retained_format_ = is_block ? c.format : operand_format_;
        if (c.with_operand) operand_.reset(new buffer(count * qe_format_bytes(operand_format_)));
        if (c.with_retained) retained_.reset(new buffer(count * qe_format_bytes(retained_format_)));
        blocks_ = c.is_weight ? static_cast<size_t>(pieces(rows)) * pieces(columns)
                              : static_cast<size_t>(pieces(rows)) * columns;
        inverse_.reset(new buffer(sizeof(float) * (is_block ? blocks_ : 1)));
        scale_.reset(new buffer(sizeof(float)));
        amax_.reset(new buffer(sizeof(float)));
    }

    /* Everything is `value` but what the kernel reads. */
    void poison(int value) {
        for (buffer *b : all()) b->poison(value);
        scale_->put(std::vector<float>{case_.scale});
        amax_->put(std::vector<float>{case_.amax_before});
    }

    qe_quantize_target target() const {
        qe_quantize_target t = {};
        const bool is_scaled = case_.recipe == QE_RECIPE_DELAYED || case_.recipe == QE_RECIPE_CURRENT;
        t.recipe = static_cast<uint8_t>(case_.recipe), t.format = static_cast<uint8_t>(case_.format);
        if (case_.recipe == QE_RECIPE_DELAYED) t.scale = scale_->as<float>();
        if (case_.recipe == QE_RECIPE_DELAYED && case_.is_recorded) t.amax = amax_->as<float>();
        t.operand = tensor(operand_.get(), operand_format_, false);
        t.retained = tensor(retained_.get(), retained_format_, is_scaled);
        if (operand_ && is_scaled) t.operand.scale_inv = inverse_->as<float>();
        if (retained_ && (is_scaled || case_.recipe == QE_RECIPE_BLOCK)) t.retained.scale_inv = inverse_->as<float>();
        if (case_.recipe == QE_RECIPE_BLOCK)
            t.retained.blocking = case_.is_weight ? QE_BLOCKING_TILE : QE_BLOCKING_COLUMN;
        return t;
    }

    /* All bytes that the kernel may write, to compare two runs. */
    std::vector<unsigned char> bytes() const {
        std::vector<unsigned char> joined;
        for (buffer *b : all()) {
            const std::vector<unsigned char> part = b->get<unsigned char>();
            joined.insert(joined.end(), part.begin(), part.end());
        }
        return joined;
    }

    /* Nothing was written since poison(value), except that the amax may be this. */
    bool is_untouched(int value, float amax) const {
        for (buffer *b : all())
            for (unsigned char byte : b->get<unsigned char>())
                if (b != amax_.get() && byte != value) return false;
        return bits_of_float(amax_->get<float>()[0]) == bits_of_float(amax);
    }

    bool is_guarded() const {
        for (buffer *b : all())
            if (!b->is_guarded()) return false;
        return scale_->is_guarded();
    }

    /* Empty, or what is wrong. values: [rows, columns], what is quantized. */
    std::string wrong(const std::vector<float> &values, const tolerance &allowed) const {
        if (case_.recipe == QE_RECIPE_BLOCK) return wrong_blocks(values, allowed);
        if (case_.recipe == QE_RECIPE_BF16 || case_.recipe == QE_RECIPE_FP32) return wrong_values(values, allowed);
        return wrong_scaled(values, allowed);
    }

    const buffer *operand() const {
        return operand_.get();
    }
    const buffer *retained() const {
        return retained_.get();
    }

   private:
    static uint32_t pieces(uint32_t count) {
        return (count + QE_BLOCK - 1) / QE_BLOCK;
    }

    std::vector<buffer *> all() const {
        std::vector<buffer *> list = {amax_.get()};
        /* Under block recipes without retained codes nothing is written there. */
        if (case_.recipe != QE_RECIPE_BF16 && case_.recipe != QE_RECIPE_FP32 &&
            (case_.recipe != QE_RECIPE_BLOCK || case_.with_retained))
            list.push_back(inverse_.get());
        if (operand_) list.push_back(operand_.get());
        if (retained_) list.push_back(retained_.get());
        return list;
    }

    qe_qtensor tensor(const buffer *b, qe_format format, bool transposed) const {
        qe_qtensor t = {};
        t.codes = b ? b->at() : nullptr;
        t.rows = rows_, t.columns = columns_;
        t.format = static_cast<uint8_t>(format), t.transposed = transposed;
        return t;
    }

    static float amax_of(const float *values, size_t count, size_t stride, float amax = 0.0f) {
        for (size_t i = 0; i < count; ++i) {
            const float size = fabsf(values[i * stride]);
            if (size > amax) amax = size; /* false for NaN */
        }
        return amax;
    }

    static bool is_near(float found, float expected, double relative) {
        if (bits_of_float(found) == bits_of_float(expected)) return true;
        return fabs(static_cast<double>(found) - expected) <= relative * fabs(static_cast<double>(expected));
    }

    /* Codes of one plane, `expected(i, j)` by row and column. */
    template <typename Expected>
    std::string wrong_codes(const buffer &plane, qe_format format, bool transposed, const tolerance &allowed,
                            Expected expected) const {
        const std::vector<uint8_t> codes = plane.get<uint8_t>();
        size_t off = 0;
        for (uint32_t i = 0; i < rows_; ++i)
            for (uint32_t j = 0; j < columns_; ++j) {
                const size_t at =
                    transposed ? static_cast<size_t>(j) * rows_ + i : static_cast<size_t>(i) * columns_ + j;
                const uint8_t want = qe_fp8_encode(format, expected(i, j));
                if (codes[at] == want) continue;
                const bool is_step = (codes[at] ^ want) < 0x80 && abs((codes[at] & 0x7F) - (want & 0x7F)) == 1;
                const bool is_zero = (codes[at] & 0x7F) + (want & 0x7F) <= 1; /* a step through zero */
                if (allowed.off_by_one > 0 && (is_step || is_zero) && ++off <= limit(allowed)) continue;
                return place(transposed ? "transposed code" : "code", i, j, codes[at], want) +
                       " off by one: " + std::to_string(off);
            }
        return "";
    }

    size_t limit(const tolerance &allowed) const {
        return static_cast<size_t>(allowed.off_by_one * rows_ * columns_) + 4;
    }

    static std::string place(const char *what, uint32_t i, uint32_t j, double found, double expected) {
        char text[160];
        snprintf(text, sizeof text, "%s [%u, %u] is %.9g (0x%X), expected %.9g (0x%X)", what, i, j, found,
                 static_cast<unsigned>(found), expected, static_cast<unsigned>(expected));
        return text;
    }

    std::string wrong_scaled(const std::vector<float> &values, const tolerance &allowed) const {
        const float amax = amax_of(values.data(), values.size(), 1);
        const bool is_delayed = case_.recipe == QE_RECIPE_DELAYED;
        const float found = amax_->get<float>()[0];
        float after = case_.amax_before;
        if (is_delayed && case_.is_recorded && amax > after) after = amax;
        if (!is_near(found, after, allowed.amax_relative)) return place("amax", 0, 0, found, after);
        float scale = is_delayed ? case_.scale : qe_scale_from_amax(amax, qe_format_max(case_.format), 0);
        const float inverse = inverse_->get<float>()[0], wanted = qe_scale_inverse(scale);
        if (!is_near(inverse, wanted, is_delayed ? 0.0 : allowed.amax_relative))
            return place("scale_inv", 0, 0, inverse, wanted);
        const auto expected = [&](uint32_t i, uint32_t j) {
            return values[static_cast<size_t>(i) * columns_ + j] * scale;
        };
        std::string wrong;
        if (operand_) wrong = wrong_codes(*operand_, case_.format, false, allowed, expected);
        if (wrong.empty() && retained_) wrong = wrong_codes(*retained_, case_.format, true, allowed, expected);
        return wrong;
    }

    std::string wrong_values(const std::vector<float> &values, const tolerance &allowed) const {
        for (const buffer *b : {operand_.get(), retained_.get()}) {
            if (b == nullptr) continue;
            size_t off = 0;
            for (size_t at = 0; at < values.size(); ++at) {
                const uint32_t i = static_cast<uint32_t>(at / columns_), j = static_cast<uint32_t>(at % columns_);
                double found, want;
                if (operand_format_ == QE_FORMAT_BF16) {
                    uint16_t code;
                    memcpy(&code, &cached(b)[at * 2], sizeof code);
                    if (code == bf16_of(values[at])) continue;
                    if (allowed.off_by_one > 0 && abs(code - bf16_of(values[at])) == 1 && ++off <= 10 * limit(allowed))
                        continue;
                    found = code, want = bf16_of(values[at]);
                } else {
                    float value;
                    memcpy(&value, &cached(b)[at * 4], sizeof value);
                    if ((value != value && values[at] != values[at]) ||
                        is_near(value, values[at], allowed.amax_relative))
                        continue;
                    /* where terms cancel, little is left of a value */
                    if (allowed.off_by_one > 0 && is_near(value, values[at], 1e-2) && ++off <= 10 * limit(allowed))
                        continue;
                    found = value, want = values[at];
                }
                cache_of_ = nullptr;
                return place("value", i, j, found, want);
            }
            cache_of_ = nullptr;
        }
        return "";
    }

    const std::vector<unsigned char> &cached(const buffer *b) const {
        if (cache_of_ != b) cache_ = b->get<unsigned char>(), cache_of_ = b;
        return cache_;
    }

    float block_scale(float amax) const {
        return qe_scale_from_amax(amax, qe_format_max(case_.format), 1);
    }

    /* Scales of the 1x128, 128x1 or 128x128 block that holds (i, j), for all blocks. */
    std::vector<float> scales(const std::vector<float> &values, uint32_t tall, uint32_t wide) const {
        const uint32_t down = (rows_ + tall - 1) / tall, across = (columns_ + wide - 1) / wide;
        std::vector<float> amax(static_cast<size_t>(down) * across, 0.0f);
        for (uint32_t i = 0; i < rows_; ++i)
            for (uint32_t j = 0; j < columns_; ++j) {
                float &most = amax[static_cast<size_t>(i / tall) * across + j / wide];
                most = amax_of(&values[static_cast<size_t>(i) * columns_ + j], 1, 1, most);
            }
        for (float &a : amax) a = block_scale(a);
        return amax;
    }

    std::string wrong_blocks(const std::vector<float> &values, const tolerance &allowed) const {
        const uint32_t tall = case_.is_weight ? QE_BLOCK : 1, across = pieces(columns_);
        if (operand_) {
            const std::vector<float> scale = scales(values, tall, QE_BLOCK);
            const std::vector<uint16_t> found = operand_->get<uint16_t>();
            size_t off = 0;
            for (size_t at = 0; at < values.size(); ++at) {
                const uint32_t i = static_cast<uint32_t>(at / columns_), j = static_cast<uint32_t>(at % columns_);
                const float s = scale[static_cast<size_t>(i / tall) * across + j / QE_BLOCK];
                const float value = qe_fp8_decode(case_.format, qe_fp8_encode(case_.format, values[at] * s));
                const uint16_t want = bf16_of(value * qe_scale_inverse(s));
                if (found[at] == want) continue;
                if (allowed.off_by_one > 0 && ++off <= limit(allowed)) continue;
                return place("decoded", i, j, found[at], want);
            }
        }
        if (retained_ == nullptr) return "";
        const uint32_t deep = QE_BLOCK, wide = case_.is_weight ? QE_BLOCK : 1;
        const uint32_t beside = (columns_ + wide - 1) / wide;
        const std::vector<float> scale = scales(values, deep, wide), inverse = inverse_->get<float>();
        for (size_t b = 0; b < scale.size(); ++b)
            if (allowed.off_by_one <= 0 && bits_of_float(inverse[b]) != bits_of_float(qe_scale_inverse(scale[b])))
                return place("scale_inv", static_cast<uint32_t>(b), 0, inverse[b], qe_scale_inverse(scale[b]));
        return wrong_codes(*retained_, case_.format, false, allowed, [&](uint32_t i, uint32_t j) {
            return values[static_cast<size_t>(i) * columns_ + j] *
                   scale[static_cast<size_t>(i / deep) * beside + j / wide];
        });
    }

    target_case case_;
    uint32_t rows_, columns_;
    qe_format operand_format_, retained_format_;
    size_t blocks_ = 0;
    std::unique_ptr<buffer> operand_, retained_, inverse_, scale_, amax_;
    mutable const buffer *cache_of_ = nullptr;
    mutable std::vector<unsigned char> cache_;
};

#endif
