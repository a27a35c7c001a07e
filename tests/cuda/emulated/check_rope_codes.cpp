/* check_rope_codes.cpp - forms of rope's backward that only large tensors take, on small ones: the codes both ways, the
 * amax and the words of the kernel that tiles any source, bit for bit. */
#include "check_rope_codes.h"

#include "backend/cuda/rope_codes.cuh"
#include "backend/cuda/sink.cuh"

namespace {

struct sizes {
    uint32_t rows, sequence, heads, turned_heads;
    uint32_t columns() const { return heads * 2 * ROPE_HALF; }
};

struct operands {
    buffer qkv, cosine, sine;
    operands(const sizes &s, kind k)
        : qkv(static_cast<size_t>(s.rows) * s.columns() * 2), cosine(static_cast<size_t>(s.sequence) * ROPE_HALF * 4),
          sine(static_cast<size_t>(s.sequence) * ROPE_HALF * 4) {
        qkv.put(bf16_values(static_cast<size_t>(s.rows) * s.columns(), s.rows, k));
        cosine.put(fp32_values(static_cast<size_t>(s.sequence) * ROPE_HALF, 3, PLAIN));
        sine.put(fp32_values(static_cast<size_t>(s.sequence) * ROPE_HALF, 5, PLAIN));
    }
};

tile_job<rope_source> job_of(const operands &o, const sizes &s, const qe_quantize_target &target) {
    tile_job<rope_source> job = {};
    job.source.qkv = o.qkv.as<uint16_t>();
    job.source.cosine = o.cosine.as<float>(), job.source.sine = o.sine.as<float>();
    job.source.columns = s.columns(), job.source.half = ROPE_HALF, job.source.units = s.columns() / 2;
    job.source.sequence = s.sequence, job.source.turned_heads = s.turned_heads, job.source.back = 1;
    planes_of(places_of(&target, s.rows, s.columns()), &job.planes);
    job.scale = scaling_of(&target), job.words = words_of(&target, tensor_words());
    return job;
}

template <int FORMAT, int HEADS, bool IS_AT_ONCE>
std::string form_wrong(const target_case &c, const sizes &s, kind k) {
    const operands o(s, k);
    target_memory wanted(c, s.rows, s.columns()), found(c, s.rows, s.columns());
    wanted.poison(0xA5), found.poison(0xA5);
    if (tile_quantize(job_of(o, s, wanted.target()), FORMAT, nullptr) != QE_OK) return "tiles were refused";
    if (rope_codes_launch<FORMAT, HEADS, IS_AT_ONCE>(job_of(o, s, found.target()), nullptr) != QE_OK)
        return "the launcher refused";
    if (!found.is_guarded()) return "written beyond the end of the target";
    return wanted.bytes() == found.bytes() ? "" : "other bits than those of tiles";
}

template <int FORMAT>
void forms_check(checks &all, const sizes &s, bool with_rows, bool with_columns, kind k) {
    const target_case c = {QE_RECIPE_DELAYED, static_cast<qe_format>(FORMAT), false, with_rows, with_columns, true,
                           3.7f, 0.0f};
    const std::string name = name_of("rope codes", c, s.rows, s.columns());
    all.report(name + ", a head", form_wrong<FORMAT, 1, false>(c, s, k));
    all.report(name + ", a head, at once", form_wrong<FORMAT, 1, true>(c, s, k));
    all.report(name + ", heads, at once", form_wrong<FORMAT, ROPE_HEADS_MOST, true>(c, s, k));
}

} // namespace

void check_rope_codes(checks &all) {
    const sizes cut = {272, 48, 7, 5}, few = {16, 16, 2, 1}, none = {64, 64, 3, 0};
    for (const sizes &s : {cut, few, none}) {
        forms_check<QE_FORMAT_E4M3>(all, s, true, true, SPECIAL);
        forms_check<QE_FORMAT_E5M2>(all, s, true, true, WIDE);
    }
    forms_check<QE_FORMAT_E5M2>(all, cut, true, false, PLAIN);
    forms_check<QE_FORMAT_E5M2>(all, cut, false, true, PLAIN);
}
