/* check_held.cpp - the norms' kernels that hold rows in shared memory, which launchers take for large shapes only,
 * against those that hold them in registers: the same bytes. */
#include "check_held.h"

#include "backend/cuda/norm_backward_held.cuh"
#include "backend/cuda/norm_held.cuh"
#include "backend/cuda/sink.cuh"

namespace {

struct shape {
    uint32_t rows, hidden;
    size_t count() const {
        return static_cast<size_t>(rows) * hidden;
    }
};

dim3 grid_of(const shape &s, uint32_t tall, uint32_t wide = 1) {
    return dim3(s.hidden / (HELD_COLUMNS * wide), s.rows / tall);
}

/* Planes, scale and words of a target, as launchers give them to kernels. */
template <typename Job>
void target_give(const qe_quantize_target &target, const shape &s, Job *job) {
    job->planes.rows = s.rows, job->planes.columns = s.hidden;
    if (!planes_of(places_of(&target, s.rows, s.hidden), &job->planes)) abort();
    job->scale = scaling_of(&target), job->words = words_of(&target, tensor_words());
}

/* The same numbers; on a processor the bits of what is no number depend on the order of operands. */
bool are_same(const buffer &a, const buffer &b) {
    const std::vector<float> one = a.get<float>(), other = b.get<float>();
    for (size_t i = 0; i < one.size(); ++i)
        if (bits_of_float(one[i]) != bits_of_float(other[i]) && !(one[i] != one[i] && other[i] != other[i]))
            return false;
    return true;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

template <int FORMAT, int TALL>
qe_status norm_run(const qe_args_norm &args, const shape &s) {
    norm_job job = {};
    job.x = static_cast<const uint16_t *>(args.x), job.gain = args.gain;
    job.rstd = args.rstd, job.epsilon = args.epsilon;
    target_give(args.target, s, &job);
    const dim3 grid = grid_of(s, TALL);
    return launch(norm_held_kernel<FORMAT, TALL>, grid, HELD_THREADS<TALL>, grid.x, 0, nullptr, job);
}

template <int FORMAT, int TALL>
void norm_check(checks &all, const target_case &c, const shape &s, kind k) {
    buffer x(s.count() * 2), gain(s.hidden * 4), rstd(s.rows * 4), rstd_found(s.rows * 4);
    x.put(bf16_values(s.count(), s.rows + s.hidden, k)), gain.put(fp32_values(s.hidden, s.hidden, PLAIN));
    target_memory wanted(c, s.rows, s.hidden), found(c, s.rows, s.hidden);
    wanted.poison(0xA5), found.poison(0x5A), rstd_found.poison(0x5A);
    qe_args_norm args = {};
    args.x = x.at(), args.gain = gain.as<float>(), args.rstd = rstd.as<float>(), args.epsilon = 1e-5f;
    args.rows = s.rows, args.hidden = s.hidden, args.target = wanted.target();
    std::string wrong = qe_cuda_norm(&args, nullptr) == QE_OK ? "" : "the launcher refused";
    args.rstd = rstd_found.as<float>(), args.target = found.target();
    if (wrong.empty() && norm_run<FORMAT, TALL>(args, s) != QE_OK) wrong = "the kernel was refused";
    if (wrong.empty() && !(found.is_guarded() && rstd_found.is_guarded())) wrong = "written beyond the end";
    if (wrong.empty() && !are_same(rstd, rstd_found)) wrong = "other statistics";
    if (wrong.empty() && wanted.bytes() != found.bytes()) wrong = "other codes";
    all.report(name_of(TALL == 64 ? "norm held by 64" : "norm held by 32", c, s.rows, s.hidden), wrong);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* What a backward writes beside its target. */
struct outputs {
    buffer dx, partials;
    outputs(const shape &s, int poison)
        : dx(s.count() * 2), partials(static_cast<size_t>(QE_GAIN_PARTIALS) * s.hidden * 4) {
        dx.poison(poison), partials.poison(0x33);
    }
    bool is_guarded() const {
        return dx.is_guarded() && partials.is_guarded();
    }
    bool equals(const outputs &other) const {
        return dx.get<uint8_t>() == other.dx.get<uint8_t>() && are_same(partials, other.partials);
    }
};

struct backward_inputs {
    buffer dy, x, residual, gain, rstd;
    backward_inputs(const shape &s, kind k)
        : dy(s.count() * 2), x(s.count() * 2), residual(s.count() * 2), gain(s.hidden * 4), rstd(s.rows * 4) {
        dy.put(bf16_values(s.count(), 11, k)), x.put(bf16_values(s.count(), 12, k));
        residual.put(bf16_values(s.count(), 13, k));
        gain.put(fp32_values(s.hidden, 14, PLAIN)), rstd.put(fp32_values(s.rows, 15, PLAIN));
    }
};

template <int FORMAT>
norm_backward_job backward_job(const backward_inputs &in, const outputs &out, const target_memory &target,
                               const shape &s) {
    norm_backward_job job = {};
    job.dy = in.dy.as<uint16_t>(), job.x = in.x.as<uint16_t>(), job.residual = in.residual.as<uint16_t>();
    job.gain = in.gain.as<float>(), job.rstd = in.rstd.as<float>();
    job.dx = out.dx.as<uint16_t>(), job.partials = out.partials.as<float>();
    job.planes.rows = s.rows, job.planes.columns = s.hidden;
    if (FORMAT != FORMAT_NONE) target_give(target.target(), s, &job);
    return job;
}

enum { NO_RESIDUAL = 1, NO_GRADIENT = 2 };

/* Of eight rows a thread in both, as for large shapes: the gain's sums have an order. */
template <int FORMAT, int WIDE>
bool backward_run(const norm_backward_job &registers, const norm_backward_job &held, const shape &s) {
    const cluster_shape by = cluster_shape_of<8>(s.hidden);
    const dim3 grid = grid_of(s, BACKWARD_TALL, WIDE), as_wide(by.blocks, grid.y);
    const uint32_t threads = BACKWARD_HELD_THREADS * WIDE;
    return launch(norm_backward_kernel<FORMAT, 8>, as_wide, by.warps * WARP, by.blocks, 0, nullptr, registers) == 0 &&
           launch(norm_backward_held_kernel<FORMAT, WIDE>, grid, threads, grid.x, 0, nullptr, held) == 0;
}

template <int FORMAT, int WIDE = 1>
void backward_check(checks &all, const target_case &c, const shape &s, kind k, int without = 0) {
    const backward_inputs in(s, k);
    target_memory wanted(c, s.rows, s.hidden), found(c, s.rows, s.hidden);
    const outputs first(s, 0xA5), second(s, 0x5A);
    wanted.poison(0xA5), found.poison(0x5A);
    norm_backward_job job = backward_job<FORMAT>(in, first, wanted, s),
                      held = backward_job<FORMAT>(in, second, found, s);
    for (norm_backward_job *j : {&job, &held}) {
        if (without & NO_RESIDUAL) j->residual = nullptr;
        if (without & NO_GRADIENT) j->partials = nullptr;
    }
    std::string wrong = backward_run<FORMAT, WIDE>(job, held, s) ? "" : "a kernel was refused";
    if (wrong.empty() && !(found.is_guarded() && second.is_guarded())) wrong = "written beyond the end";
    if (wrong.empty() && !first.equals(second)) wrong = "another gradient";
    if (wrong.empty() && FORMAT != FORMAT_NONE && wanted.bytes() != found.bytes()) wrong = "other codes";
    all.report(name_of(WIDE == 1 ? "norm_backward held" : "norm_backward held wide", c, s.rows, s.hidden), wrong);
}

/* Where all products of a row are -0 so is their sum, and dx is -0 - (x*rstd)*-0 = 0: what rows are filled up with must
 * not show. */
template <int WIDE>
void backward_zero_check(checks &all, const shape &s) {
    backward_inputs in(s, PLAIN);
    in.dy.put(std::vector<uint16_t>(s.count(), 0x8000)), in.x.put(std::vector<uint16_t>(s.count(), 0x3F80));
    in.gain.put(std::vector<float>(s.hidden, 1.0f)), in.rstd.put(std::vector<float>(s.rows, 1.0f));
    const target_case none = {QE_RECIPE_BF16, QE_FORMAT_BF16, false, false, false, false, 1.0f, 0.0f};
    target_memory nothing(none, s.rows, s.hidden);
    const outputs first(s, 0xA5), second(s, 0x5A);
    norm_backward_job job = backward_job<FORMAT_NONE>(in, first, nothing, s),
                      held = backward_job<FORMAT_NONE>(in, second, nothing, s);
    job.residual = held.residual = nullptr;
    std::string wrong = backward_run<FORMAT_NONE, WIDE>(job, held, s) ? "" : "a kernel was refused";
    for (const outputs *out : {&first, &second})
        if (wrong.empty() && out->dx.get<uint16_t>() != std::vector<uint16_t>(s.count(), 0)) wrong = "a zero's sign";
    all.report("norm_backward of zeros " + std::to_string(s.rows) + "x" + std::to_string(s.hidden), wrong);
}

}  // namespace

void check_held(checks &all) {
    const target_case e4m3 = {QE_RECIPE_DELAYED, QE_FORMAT_E4M3, false, true, true, true, 3.7f, 0.0f};
    const target_case e5m2 = {QE_RECIPE_DELAYED, QE_FORMAT_E5M2, false, true, true, true, 371.0f, 0.0f};
    const target_case by_rows = {QE_RECIPE_DELAYED, QE_FORMAT_E4M3, false, true, false, true, 3.7f, 1e30f};
    const target_case turned = {QE_RECIPE_DELAYED, QE_FORMAT_E5M2, false, false, true, false, 3.7f, 0.0f};
    for (const shape &s : {shape{64, 768}, shape{128, 256}}) {
        norm_check<QE_FORMAT_E4M3, 64>(all, e4m3, s, SPECIAL);
        norm_check<QE_FORMAT_E5M2, 64>(all, turned, s, WIDE);
        norm_check<QE_FORMAT_E4M3, 32>(all, by_rows, s, PLAIN);
        norm_check<QE_FORMAT_E5M2, 32>(all, e5m2, s, SPECIAL);
        backward_check<QE_FORMAT_E5M2>(all, e5m2, s, SPECIAL);
        backward_check<QE_FORMAT_E4M3>(all, by_rows, s, WIDE, NO_RESIDUAL);
        backward_check<QE_FORMAT_E5M2>(all, turned, s, PLAIN, NO_GRADIENT);
        backward_check<FORMAT_NONE>(all, e4m3, s, WIDE);
    }
    norm_check<QE_FORMAT_E4M3, 64>(all, e4m3, {64, 4096}, SPECIAL);
    backward_check<QE_FORMAT_E5M2>(all, e5m2, {32, 4096}, SPECIAL);
    for (uint32_t hidden : {256, 768, 2048, 4096}) backward_zero_check<1>(all, {32, hidden});
    backward_zero_check<4>(all, {32, 1024}), backward_zero_check<4>(all, {32, 2048});
    backward_check<QE_FORMAT_E5M2, 4>(all, e5m2, {64, 2048}, SPECIAL);
    backward_check<QE_FORMAT_E4M3, 4>(all, by_rows, {32, 1024}, WIDE, NO_RESIDUAL);
    backward_check<QE_FORMAT_E5M2, 4>(all, turned, {32, 4096}, PLAIN, NO_GRADIENT);
    backward_check<FORMAT_NONE, 4>(all, e4m3, {64, 1024}, WIDE);
}
