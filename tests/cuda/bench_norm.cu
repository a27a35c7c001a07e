/* bench_norm.cu - variants of norm. */
#include "backend/cuda/kernels.h"
#include "backend/cuda/norm.cuh"
#include "backend/cuda/sink.cuh"
#include "bench_time.h"

static qe_args_norm args_of(bench_memory &m, const shape &s, bool is_quantized) {
    const size_t count = static_cast<size_t>(s.rows) * s.hidden;
    qe_args_norm a = {};
    a.x = m.bf16(count), a.gain = m.fp32(s.hidden), a.rstd = m.output<float>(s.rows), a.epsilon = 1e-5f;
    a.rows = s.rows, a.hidden = s.hidden;
    if (is_quantized)
        a.target = delayed(m, s.rows, s.hidden, QE_FORMAT_E4M3);
    else
        a.y = m.output<uint16_t>(count);
    return a;
}

static norm_job job_of(const qe_args_norm &a) {
    norm_job job = {};
    job.x = static_cast<const uint16_t *>(a.x), job.gain = a.gain, job.rstd = a.rstd, job.epsilon = a.epsilon;
    job.planes.rows = a.rows, job.planes.columns = a.hidden;
    job.value[0] = static_cast<uint16_t *>(a.y);
    if (a.y) return job;
    planes_of(places_of(&a.target, a.rows, a.hidden), &job.planes);
    job.scale = scaling_of(&a.target), job.words = words_of(&a.target, tensor_words());
    return job;
}

static variant variant_of(const std::string &name, const shape &s, bool is_quantized,
                          const std::function<qe_status(const norm_job &, cudaStream_t)> &launch_job) {
    return variant{name,
                   [=](bench_memory &m) {
                       const norm_job job = job_of(args_of(m, s, is_quantized));
                       return [=](cudaStream_t stream) { return launch_job(job, stream); };
                   },
                   false};
}

template <int FORMAT, int ROWS>
static void add_registers(std::vector<variant> &to, const shape &s) {
    if (cluster_shape_of<ROWS>(s.hidden).blocks == 0) return;
    to.push_back(variant_of(
        "registers " + std::to_string(ROWS), s, FORMAT != QE_FORMAT_BF16, [](const norm_job &job, cudaStream_t stream) {
            const cluster_shape shape = cluster_shape_of<ROWS>(job.planes.columns);
            const dim3 grid(shape.blocks, pieces_of(job.planes.rows, CLUSTER_ROWS));
            return launch(norm_kernel<FORMAT, ROWS>, grid, shape.warps * WARP, shape.blocks, 0, stream, job);
        }));
}

template <int FORMAT>
static void sweep_format(sweep &to, const char *name, const shape &s) {
    const bool is_quantized = FORMAT != QE_FORMAT_BF16;
    std::vector<variant> all = {{"library",
                                 [=](bench_memory &m) {
                                     const qe_args_norm a = args_of(m, s, is_quantized);
                                     return [a](cudaStream_t stream) { return qe_cuda_norm(&a, stream); };
                                 },
                                 false}};
    add_registers<FORMAT, 4>(all, s);
    add_registers<FORMAT, 8>(all, s);
    add_registers<FORMAT, 16>(all, s);
    to.run(name, s, 4.0 * s.rows * s.hidden + 4.0 * s.rows, all);
}

void sweep_norm(sweep &to, const shape &s) {
    sweep_format<QE_FORMAT_BF16>(to, "norm", s);
    sweep_format<QE_FORMAT_E4M3>(to, "norm_quantize", s);
}
