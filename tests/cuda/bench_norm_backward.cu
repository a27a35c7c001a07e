/* bench_norm_backward.cu - variants of norm backward. Those that the gain's gradient comes with in other groups of rows
 * would have other bits, so ROWS is fixed by the size. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/norm_backward.cuh"
#include "backend/cuda/sink.cuh"
#include "bench_time.h"

static qe_args_norm_backward args_of(bench_memory &m, const shape &s, bool is_quantized) {
    const size_t count = static_cast<size_t>(s.rows) * s.hidden;
    qe_args_norm_backward a = {};
    a.dy = m.bf16(count), a.x = m.bf16(count), a.residual = m.bf16(count), a.dx = m.output<uint16_t>(count);
    a.rstd = m.fp32(s.rows), a.gain = m.fp32(s.hidden), a.gain_grad = m.output<float>(s.hidden);
    a.partials = static_cast<float *>(m.in.take(static_cast<size_t>(QE_GAIN_PARTIALS) * s.hidden * 4));
    a.rows = s.rows, a.hidden = s.hidden, a.set = 1;
    if (is_quantized) a.target = delayed(m, s.rows, s.hidden, QE_FORMAT_E5M2);
    return a;
}

static norm_backward_job job_of(const qe_args_norm_backward &a, bool is_quantized) {
    norm_backward_job job = {};
    job.dy = static_cast<const uint16_t *>(a.dy), job.x = static_cast<const uint16_t *>(a.x);
    job.rstd = a.rstd, job.gain = a.gain;
    job.residual = static_cast<const uint16_t *>(a.residual), job.dx = static_cast<uint16_t *>(a.dx);
    job.partials = a.partials;
    job.planes.rows = a.rows, job.planes.columns = a.hidden;
    if (!is_quantized) return job;
    planes_of(places_of(&a.target, a.rows, a.hidden), &job.planes);
    job.scale = scaling_of(&a.target), job.words = words_of(&a.target, tensor_words());
    return job;
}

typedef std::function<qe_status(const norm_backward_job &, cudaStream_t)> job_launcher;

/* is_whole: with the second kernel, which adds up the partials. */
static variant variant_of(const std::string &name, const shape &s, bool is_quantized, bool is_whole, bool is_comparable,
                          const job_launcher &launch_job) {
    return variant{(is_whole ? "" : "dx: ") + name,
                   [=](bench_memory &m) {
                       const qe_args_norm_backward a = args_of(m, s, is_quantized);
                       const norm_backward_job job = job_of(a, is_quantized);
                       return [=](cudaStream_t stream) {
                           LAUNCH_TRY(launch_job(job, stream));
                           return is_whole ? partials_launch(&a, pieces_of(a.rows, CLUSTER_ROWS), true, stream) : QE_OK;
                       };
                   },
                   !is_whole || !is_comparable};
}

/* The gain's gradient is added up in other groups of rows by the kernels for small and for large sizes. */
static bool is_comparable(const shape &s, uint32_t rows) {
    return rows == (static_cast<size_t>(s.rows) * s.hidden <= 3 << 20 ? 4 : 8);
}

template <int FORMAT, int ROWS>
static void add_registers(std::vector<variant> &to, const shape &s) {
    if (cluster_shape_of<ROWS>(s.hidden).blocks == 0) return;
    for (bool is_whole : {true, false})
        to.push_back(variant_of("registers " + std::to_string(ROWS), s, FORMAT != FORMAT_NONE, is_whole,
                                is_comparable(s, ROWS), [](const norm_backward_job &job, cudaStream_t stream) {
                                    const cluster_shape shape = cluster_shape_of<ROWS>(job.planes.columns);
                                    const dim3 grid(shape.blocks, pieces_of(job.planes.rows, CLUSTER_ROWS));
                                    return launch(norm_backward_kernel<FORMAT, ROWS>, grid, shape.warps * WARP,
                                                  shape.blocks, 0, stream, job);
                                }));
}

template <int FORMAT>
static void sweep_format(sweep &to, const char *name, const shape &s) {
    const bool is_quantized = FORMAT != FORMAT_NONE;
    std::vector<variant> all = {{"library",
                                 [=](bench_memory &m) {
                                     const qe_args_norm_backward a = args_of(m, s, is_quantized);
                                     return [a](cudaStream_t stream) { return qe_cuda_norm_backward(&a, stream); };
                                 },
                                 false}};
    add_registers<FORMAT, 4>(all, s);
    add_registers<FORMAT, 8>(all, s);
    to.run(name, s, (is_quantized ? 10.0 : 8.0) * s.rows * s.hidden, all);
}

void sweep_norm_backward(sweep &to, const shape &s) {
    sweep_format<FORMAT_NONE>(to, "norm_backward", s);
    sweep_format<QE_FORMAT_E5M2>(to, "norm_backward_quantize", s);
}
