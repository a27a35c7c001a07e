/* attention.cpp - causal grouped-query attention through cuDNN, behind a C face, and the choice between its kernels
 * and ours. cuDNN plans whole graphs; its header library of C++ (cudnn-frontend) builds the graphs of both ways, and
 * that is why this file is C++. Nothing of C++ leaves it: no exception, no template. libcudnn is opened at run time, so
 * that a machine without it can build and run everything else.
 *
 * q, k and v are views of the packed qkv [T, (heads + 2 kv_heads) head_dim] by strides, dq, dk and dv of dqkv; nothing
 * is copied. Statistics are the natural log-sum-exp of the scaled scores, as on the host. */
#include <cudnn_frontend.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "backend/cuda/attention_choice.h"
#include "backend/cuda/attention_own.h"
#include "backend/cuda/choices.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/product_kernels.h"

/* The one variable of this library: cudnn-frontend asks for it by name. Set once, under a lock, never taken back. */
namespace cudnn_frontend {
void *cudnn_dlhandle = nullptr;
}

namespace {

namespace fe = cudnn_frontend;
using graph_tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

constexpr size_t VERSION_LEAST = 91000; /* 9.10; tried with 9.14 and 9.19 */
constexpr const char *LIBRARY = "libcudnn.so.9";
constexpr int64_t WORKSPACE_FIRST_BYTES = 1 << 20; /* never none: plans are loaded with its address for every operand */

enum uid : int64_t { UID_Q = 1, UID_K, UID_V, UID_OUT, UID_LSE, UID_DOUT, UID_DQ, UID_DK, UID_DV };

struct shape {
    bool backward, deterministic;
    int64_t sequences, sequence, heads, kv_heads, head_dim;

    int64_t row() const { return (heads + 2 * kv_heads) * head_dim; } /* elements from a token to the next */
    bool operator==(const shape &other) const {
        return backward == other.backward && deterministic == other.deterministic && sequences == other.sequences &&
               sequence == other.sequence && heads == other.heads && kv_heads == other.kv_heads &&
               head_dim == other.head_dim;
    }
};

struct plan {
    shape of;
    qe_attention_algorithm algorithm = QE_ATTENTION_CUDNN;
    fe::graph::Graph graph; /* cuDNN's */
    int64_t workspace_bytes = 0;
    bool built = false;
    bool loaded = false; /* its kernels are on the device, so that it may be captured */
};

struct workspace {
    void *at;
    int64_t bytes;
};

/* Addresses by uid; what a shape does not have is not asked for. */
using addresses = std::unordered_map<int64_t, void *>;

} // namespace

struct qe_cuda_attention {
    cudnnHandle_t handle = nullptr;
    cudaStream_t stream = nullptr;     /* the caller's, for loading and timing plans */
    std::vector<workspace> workspaces; /* the last is the largest; the others live on, because graphs may name them */
    std::vector<std::unique_ptr<plan>> plans;
    std::vector<qe_cuda_choice> choices; /* in the order of their plans */
    qe_attention_own own = {};           /* of zeros: this device has not what our kernels need */
    std::string identity;
};

namespace {

/* Runs `work`, which returns a status; no exception passes. */
template <typename callable>
qe_status guarded(qe_error *error_out, callable &&work) noexcept {
    try {
        return work();
    } catch (const std::bad_alloc &) {
        return qe_error_set(error_out, QE_ERROR_MEMORY, nullptr, "no memory for attention");
    } catch (const std::exception &thrown) {
        return qe_error_set(error_out, QE_ERROR_DEVICE, nullptr, "cuDNN: %s", thrown.what());
    } catch (...) {
        return qe_error_set(error_out, QE_ERROR_DEVICE, nullptr, "cuDNN failed without a word");
    }
}

/* --- the library ------------------------------------------------------------------------------------------------- */

constexpr const char *REMEDY_INSTALL = "install cuDNN 9.10 or newer for CUDA 13 (the wheel nvidia-cudnn-cu13 has it) "
                                       "and, where the loader does not find it, name its libcudnn.so.9 in QE_CUDNN";

const char *library_name() {
    const char *named = std::getenv("QE_CUDNN");
    return named && *named ? named : LIBRARY;
}

size_t version_of(void *library) {
    const auto version = reinterpret_cast<size_t (*)()>(dlsym(library, "cudnnGetVersion"));
    return version ? version() : 0;
}

qe_status library_open(qe_error *error_out) {
    static std::mutex lock;
    const std::lock_guard<std::mutex> held(lock);
    if (fe::cudnn_dlhandle) return QE_OK;
    const char *name = library_name();
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *why = dlerror();
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, REMEDY_INSTALL, "attention needs cuDNN: %s",
                            why ? why : name);
    }
    const size_t version = version_of(library);
    if (version < VERSION_LEAST || version >= 100000) {
        dlclose(library);
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, REMEDY_INSTALL,
                            "attention needs cuDNN 9.10 or a newer 9; %s is version %zu", name, version);
    }
    fe::cudnn_dlhandle = library;
    return QE_OK;
}

std::string identity_of() {
    const size_t version = version_of(fe::cudnn_dlhandle);
    char text[96];
    (void)std::snprintf(text, sizeof text, "cuDNN %zu.%zu.%zu, frontend %d.%d.%d", version / 10000, version / 100 % 100,
                        version % 100, CUDNN_FRONTEND_MAJOR_VERSION, CUDNN_FRONTEND_MINOR_VERSION,
                        CUDNN_FRONTEND_PATCH_VERSION);
    return text;
}

/* --- plans ------------------------------------------------------------------------------------------------------- */

graph_tensor tensor(fe::graph::Graph &graph, const char *name, int64_t id, int64_t heads, const shape &of,
                    int64_t row) {
    return graph.tensor(fe::graph::Tensor_attributes()
                            .set_name(name)
                            .set_uid(id)
                            .set_dim({of.sequences, heads, of.sequence, of.head_dim})
                            .set_stride({of.sequence * row, of.head_dim, row, 1}));
}

void output(const graph_tensor &made, int64_t id, int64_t heads, const shape &of, int64_t row) {
    made->set_output(true)
        .set_uid(id)
        .set_dim({of.sequences, heads, of.sequence, of.head_dim})
        .set_stride({of.sequence * row, of.head_dim, row, 1});
}

std::vector<int64_t> lse_dim(const shape &of) { return {of.sequences, of.heads, of.sequence, 1}; }
std::vector<int64_t> lse_stride(const shape &of) { return {of.heads * of.sequence, of.sequence, 1, 1}; }

float scale_of(const shape &of) { return 1.0f / std::sqrt(static_cast<float>(of.head_dim)); }

void forward_describe(plan &p) {
    const shape &of = p.of;
    const int64_t row = of.row(), out_row = of.heads * of.head_dim;
    const auto q = tensor(p.graph, "q", UID_Q, of.heads, of, row);
    const auto k = tensor(p.graph, "k", UID_K, of.kv_heads, of, row);
    const auto v = tensor(p.graph, "v", UID_V, of.kv_heads, of, row);
    auto options = fe::graph::SDPA_attributes()
                       .set_name("attention")
                       .set_generate_stats(true)
                       .set_attn_scale(scale_of(of))
                       .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                       .set_diagonal_band_right_bound(0);
    const auto made = p.graph.sdpa(q, k, v, options);
    output(made[0], UID_OUT, of.heads, of, out_row);
    made[1]->set_output(true)
        .set_uid(UID_LSE)
        .set_data_type(fe::DataType_t::FLOAT)
        .set_dim(lse_dim(of))
        .set_stride(lse_stride(of));
}

void backward_describe(plan &p) {
    const shape &of = p.of;
    const int64_t row = of.row(), out_row = of.heads * of.head_dim;
    const auto q = tensor(p.graph, "q", UID_Q, of.heads, of, row);
    const auto k = tensor(p.graph, "k", UID_K, of.kv_heads, of, row);
    const auto v = tensor(p.graph, "v", UID_V, of.kv_heads, of, row);
    const auto out = tensor(p.graph, "out", UID_OUT, of.heads, of, out_row);
    const auto dout = tensor(p.graph, "dout", UID_DOUT, of.heads, of, out_row);
    const auto lse = p.graph.tensor(fe::graph::Tensor_attributes()
                                        .set_name("lse")
                                        .set_uid(UID_LSE)
                                        .set_data_type(fe::DataType_t::FLOAT)
                                        .set_dim(lse_dim(of))
                                        .set_stride(lse_stride(of)));
    auto options = fe::graph::SDPA_backward_attributes()
                       .set_name("attention_backward")
                       .set_attn_scale(scale_of(of))
                       .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
                       .set_diagonal_band_right_bound(0)
                       .set_deterministic_algorithm(of.deterministic);
    const auto made = p.graph.sdpa_backward(q, k, v, out, dout, lse, options);
    output(made[0], UID_DQ, of.heads, of, row);
    output(made[1], UID_DK, of.kv_heads, of, row);
    output(made[2], UID_DV, of.kv_heads, of, row);
}

qe_status refused(const shape &of, fe::error_t why, qe_error *error_out) {
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                        "heads of 64 or 128 elements are supported; a newer cuDNN may take others",
                        "cuDNN has no %s%s attention for %lld sequences of %lld, %lld/%lld heads of %lld: %s",
                        of.backward && of.deterministic ? "deterministic " : "", of.backward ? "backward" : "forward",
                        static_cast<long long>(of.sequences), static_cast<long long>(of.sequence),
                        static_cast<long long>(of.heads), static_cast<long long>(of.kv_heads),
                        static_cast<long long>(of.head_dim), why.get_message().c_str());
}

qe_status plan_build(cudnnHandle_t handle, plan &p, qe_error *error_out) {
    p.graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (p.of.backward)
        backward_describe(p);
    else
        forward_describe(p);
    fe::error_t status = p.graph.validate();
    if (status.is_good()) status = p.graph.build_operation_graph(handle);
    if (status.is_good()) status = p.graph.create_execution_plans({fe::HeurMode_t::A});
    if (status.is_good()) status = p.graph.check_support();
    if (status.is_good()) status = p.graph.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE);
    if (status.is_good()) status = p.graph.get_workspace_size(p.workspace_bytes);
    return status.is_good() ? QE_OK : refused(p.of, status, error_out);
}

qe_status workspace_grow(qe_cuda_attention &attention, int64_t bytes, qe_error *error_out) {
    void *at = nullptr;
    if (!attention.workspaces.empty() && bytes <= attention.workspaces.back().bytes) return QE_OK;
    attention.workspaces.reserve(attention.workspaces.size() + 1);
    const cudaError_t status = cudaMalloc(&at, static_cast<size_t>(bytes));
    if (status == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return qe_error_set(error_out, QE_ERROR_MEMORY,
                            "lower train.sequences or model.sequence, or have attention that is not deterministic, "
                            "which needs less: train.deterministic=false",
                            "attention needs %lld MiB of workspace, which are not free",
                            static_cast<long long>((bytes >> 20) + 1));
    }
    if (status != cudaSuccess) return qe_cuda_failure(status, "workspace of attention", error_out);
    attention.workspaces.push_back({at, bytes});
    return QE_OK;
}

/* Releases all but the first `count`. Requires: no graph and no running kernel names the others. */
void workspaces_keep(qe_cuda_attention &attention, size_t count) {
    for (; attention.workspaces.size() > count; attention.workspaces.pop_back())
        (void)cudaFree(attention.workspaces.back().at);
}

/* --- ops --------------------------------------------------------------------------------------------------------- */

shape forward_shape(const qe_args_attention &args) {
    return {false, true, args.sequences, args.sequence, args.heads, args.kv_heads, args.head_dim};
}

shape backward_shape(const qe_args_attention_backward &args) {
    return {true, args.deterministic != 0, args.sequences, args.sequence, args.heads, args.kv_heads, args.head_dim};
}

qe_status shape_of(const qe_op &op, shape &of, qe_error *error_out) {
    if (op.kind == QE_OP_ATTENTION)
        of = forward_shape(op.args.attention);
    else if (op.kind == QE_OP_ATTENTION_BACKWARD)
        of = backward_shape(op.args.attention_backward);
    else
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, nullptr, "%s is not attention", qe_op_name(op.kind));
    if (of.sequences < 1 || of.sequence < 1 || of.kv_heads < 1 || of.heads < 1 || of.heads % of.kv_heads != 0)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, nullptr,
                            "attention over %lld sequences of %lld with %lld/%lld heads",
                            static_cast<long long>(of.sequences), static_cast<long long>(of.sequence),
                            static_cast<long long>(of.heads), static_cast<long long>(of.kv_heads));
    if (of.head_dim < 8 || of.head_dim % 8 != 0 || of.head_dim > 256)
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "choose heads of 64 or 128 elements",
                            "cuDNN takes heads of 8 to 256 elements, a multiple of 8; not %lld",
                            static_cast<long long>(of.head_dim));
    return QE_OK;
}

/* The part of a packed row that begins `heads` heads behind its start, as an address that cuDNN may write. */
void *behind(const void *packed, const shape &of, int64_t heads) {
    constexpr int64_t bf16_bytes = 2;
    return static_cast<char *>(const_cast<void *>(packed)) + heads * of.head_dim * bf16_bytes;
}

addresses forward_addresses(const qe_args_attention &args, const shape &of) {
    return {{UID_Q, behind(args.qkv, of, 0)},
            {UID_K, behind(args.qkv, of, of.heads)},
            {UID_V, behind(args.qkv, of, of.heads + of.kv_heads)},
            {UID_OUT, args.out},
            {UID_LSE, args.lse}};
}

addresses backward_addresses(const qe_args_attention_backward &args, const shape &of) {
    return {{UID_Q, behind(args.qkv, of, 0)},
            {UID_K, behind(args.qkv, of, of.heads)},
            {UID_V, behind(args.qkv, of, of.heads + of.kv_heads)},
            {UID_OUT, const_cast<void *>(args.out)},
            {UID_LSE, const_cast<float *>(args.lse)},
            {UID_DOUT, const_cast<void *>(args.dout)},
            {UID_DQ, behind(args.dqkv, of, 0)},
            {UID_DK, behind(args.dqkv, of, of.heads)},
            {UID_DV, behind(args.dqkv, of, of.heads + of.kv_heads)}};
}

qe_op op_of(const shape &of, void *qkv, void *out, float *lse, void *dout, void *dqkv) {
    qe_op op = {};
    const auto sequences = static_cast<uint32_t>(of.sequences), sequence = static_cast<uint32_t>(of.sequence);
    const auto heads = static_cast<uint32_t>(of.heads), kv_heads = static_cast<uint32_t>(of.kv_heads);
    const auto head_dim = static_cast<uint32_t>(of.head_dim);
    op.kind = of.backward ? QE_OP_ATTENTION_BACKWARD : QE_OP_ATTENTION;
    if (of.backward)
        op.args.attention_backward = {qkv,      out,      lse,      dout,     dqkv,     nullptr,
                                      nullptr,  nullptr,  sequences, sequence, heads,    kv_heads,
                                      head_dim, of.deterministic, {}, {}};
    else
        op.args.attention = {qkv, out, lse, nullptr, sequences, sequence, heads, kv_heads, head_dim, 1, {}, {}};
    return op;
}

qe_op op_of(const shape &of) { return op_of(of, nullptr, nullptr, nullptr, nullptr, nullptr); }

/* --- running ----------------------------------------------------------------------------------------------------- */

qe_status execute(qe_cuda_attention &attention, const plan &p, const qe_op &op, cudaStream_t stream,
                  qe_error *error_out) {
    addresses at = p.of.backward ? backward_addresses(op.args.attention_backward, p.of)
                                 : forward_addresses(op.args.attention, p.of);
    if (fe::detail::set_stream(attention.handle, stream) != CUDNN_STATUS_SUCCESS)
        return qe_error_set(error_out, QE_ERROR_DEVICE, nullptr, "cuDNN does not take the stream");
    fe::error_t status = p.graph.execute(attention.handle, at, attention.workspaces.back().at);
    if (status.is_good()) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_DEVICE, nullptr, "cuDNN: %s", status.get_message().c_str());
}

/* The second part of the op, behind a library's attention; ours may do it in its last kernel. */
qe_status follow(const qe_op &op, cudaStream_t stream, qe_error *error_out) {
    qe_op parts[QE_OP_PARTS_MAX];
    if (qe_op_parts(&op, parts) == 1) return QE_OK;
    const qe_op_args &second = parts[1].args;
    const qe_status status = op.kind == QE_OP_ATTENTION ? qe_cuda_quantize(&second.quantize, stream)
                                                        : qe_cuda_rope_backward_quantize(&second.rope, stream);
    if (status != QE_ERROR_DEVICE) return status;
    return qe_cuda_failure(cudaGetLastError(), qe_op_name(parts[1].kind), error_out);
}

qe_status plan_run(qe_cuda_attention &attention, const plan &p, const qe_op &op, cudaStream_t stream,
                   qe_error *error_out) {
    if (p.algorithm == QE_ATTENTION_CUDNN) {
        const qe_status status = execute(attention, p, op, stream, error_out);
        return status == QE_OK ? follow(op, stream, error_out) : status;
    }
    const qe_status status =
        p.of.backward
            ? qe_attention_own_run(&attention.own, &op.args.attention_backward, attention.workspaces.back().at, stream)
            : qe_attention_forward_run(&attention.own, &op.args.attention, stream);
    if (status != QE_ERROR_DEVICE) return status;
    return qe_cuda_own_refused(status, cudaGetLastError(), "attention of ours", error_out);
}

/* As plan_load in gemm.c: the kernels are used once in a graph that never runs. */
qe_status plan_load(qe_cuda_attention &attention, plan &p, qe_error *error_out) {
    void *const anything = attention.workspaces.back().at;
    const qe_op op = op_of(p.of, anything, anything, static_cast<float *>(anything), anything, anything);
    cudaGraph_t graph = nullptr;
    cudaError_t device = cudaStreamBeginCapture(attention.stream, cudaStreamCaptureModeRelaxed);
    if (device != cudaSuccess) return qe_cuda_failure(device, "loading attention's kernels", error_out);
    const qe_status status = plan_run(attention, p, op, attention.stream, error_out);
    device = cudaStreamEndCapture(attention.stream, &graph);
    if (graph) (void)cudaGraphDestroy(graph);
    if (status != QE_OK) return status;
    if (device != cudaSuccess) return qe_cuda_failure(device, "loading attention's kernels", error_out);
    p.loaded = true;
    return QE_OK;
}

/* Builds what is not built; grows the workspace; loads kernels. */
qe_status plan_ready(qe_cuda_attention &attention, plan &p, qe_error *error_out) {
    if (!p.built) {
        const qe_op op = op_of(p.of);
        if (p.algorithm == QE_ATTENTION_OWN)
            p.workspace_bytes =
                p.of.backward ? static_cast<int64_t>(qe_attention_own_bytes(&op.args.attention_backward)) : 0;
        else if (const qe_status status = plan_build(attention.handle, p, error_out); status != QE_OK)
            return status;
        p.built = true;
    }
    if (p.loaded) return QE_OK;
    const qe_status status = workspace_grow(attention, p.workspace_bytes, error_out);
    return status == QE_OK ? plan_load(attention, p, error_out) : status;
}

plan *plan_find(const qe_cuda_attention &attention, const shape &of) {
    for (const auto &p : attention.plans)
        if (p->of == of) return p.get();
    return nullptr;
}

/* --- choosing ---------------------------------------------------------------------------------------------------- */

constexpr int RACE_ROUNDS = 7, RACE_LAUNCHES = 4;

/* Operands of a race. */
struct track {
    void *arena = nullptr;
    cudaEvent_t begin = nullptr, end = nullptr;
    qe_op forward = {}, backward = {};
    ~track() {
        if (begin) (void)cudaEventDestroy(begin);
        if (end) (void)cudaEventDestroy(end);
        (void)cudaFree(arena);
    }
};

qe_status track_lay(track &t, const shape &of, cudaStream_t stream, qe_error *error_out) {
    const auto tokens = static_cast<uint64_t>(of.sequences * of.sequence), heads = static_cast<uint64_t>(of.heads);
    const uint64_t row = static_cast<uint64_t>(of.row()), out_row = heads * static_cast<uint64_t>(of.head_dim);
    const uint64_t bytes = tokens * (4 * row + 4 * out_row + sizeof(float) * heads) + 4 * 256;
    const cudaError_t device = cudaMalloc(&t.arena, bytes);
    if (device != cudaSuccess) return qe_cuda_taken(device, bytes, "tuning attention", error_out);
    char *at = static_cast<char *>(t.arena);
    const auto take = [&at](uint64_t wanted) {
        char *const here = at;
        at += (wanted + 255) / 256 * 256;
        return static_cast<void *>(here);
    };
    void *const qkv = take(2 * tokens * row), *const dqkv = take(2 * tokens * row);
    void *const out = take(2 * tokens * out_row), *const dout = take(2 * tokens * out_row);
    float *const lse = static_cast<float *>(take(sizeof(float) * tokens * heads));
    shape before = of;
    before.backward = false;
    before.deterministic = true;
    t.forward = op_of(before, qkv, out, lse, nullptr, nullptr);
    t.backward = op_of(of, qkv, out, lse, dout, dqkv);
    if (cudaEventCreate(&t.begin) != cudaSuccess || cudaEventCreate(&t.end) != cudaSuccess ||
        qe_cuda_random(QE_FORMAT_BF16, qkv, tokens * row, 1, stream) != QE_OK ||
        qe_cuda_random(QE_FORMAT_BF16, dout, tokens * out_row, 2, stream) != QE_OK)
        return qe_cuda_failure(cudaGetLastError(), "tuning attention", error_out);
    return QE_OK;
}

/* Milliseconds of a few launches. */
qe_status lap(qe_cuda_attention &attention, const plan &p, const track &t, float &milliseconds, qe_error *error_out) {
    (void)cudaEventRecord(t.begin, attention.stream);
    for (int i = 0; i < RACE_LAUNCHES; ++i) {
        const qe_status status =
            plan_run(attention, p, p.of.backward ? t.backward : t.forward, attention.stream, error_out);
        if (status != QE_OK) return status;
    }
    (void)cudaEventRecord(t.end, attention.stream);
    cudaError_t device = cudaEventSynchronize(t.end);
    if (device == cudaSuccess) device = cudaEventElapsedTime(&milliseconds, t.begin, t.end);
    return device == cudaSuccess ? QE_OK : qe_cuda_failure(device, "tuning attention", error_out);
}

/* Both are ready. Medians of rounds in turn; a first one warms up. */
qe_status race(qe_cuda_attention &attention, const plan *const (&of)[2], int &best_out, qe_error *error_out) {
    track t;
    float laps[2][RACE_ROUNDS];
    qe_status status = track_lay(t, of[0]->of, attention.stream, error_out);
    plan before; /* what a backward starts from */
    before.of = forward_shape(t.forward.args.attention);
    if (status == QE_OK) status = plan_ready(attention, before, error_out);
    if (status == QE_OK) status = plan_run(attention, before, t.forward, attention.stream, error_out);
    for (int round = -1; round < RACE_ROUNDS; ++round)
        for (int i = 0; i < 2 && status == QE_OK; ++i)
            status = lap(attention, *of[i], t, laps[i][round < 0 ? 0 : round], error_out);
    if (status != QE_OK) return status;
    for (auto &one : laps) std::sort(one, one + RACE_ROUNDS);
    best_out = laps[1][RACE_ROUNDS / 2] < laps[0][RACE_ROUNDS / 2] ? 1 : 0;
    return QE_OK;
}

bool takes(const qe_cuda_attention &attention, const shape &of) {
    const qe_op op = op_of(of);
    return attention.own.encode && (of.backward ? qe_attention_own_takes(&op.args.attention_backward)
                                                : qe_attention_forward_takes(&op.args.attention));
}

std::unique_ptr<plan> plan_make(const shape &of, qe_attention_algorithm algorithm) {
    auto made = std::make_unique<plan>();
    made->of = of;
    made->algorithm = algorithm;
    return made;
}

/* The fastest; where cuDNN has none, ours. What only the loser works in goes: cuDNN's takes ten times as much. */
qe_status plan_tune(qe_cuda_attention &attention, const shape &of, std::unique_ptr<plan> &made, qe_error *error_out) {
    std::unique_ptr<plan> both[] = {plan_make(of, QE_ATTENTION_CUDNN), plan_make(of, QE_ATTENTION_OWN)};
    int best = 1;
    const size_t before = attention.workspaces.size();
    qe_status status = plan_ready(attention, *both[1], error_out);
    if (status == QE_OK && plan_ready(attention, *both[0], nullptr) == QE_OK)
        status = race(attention, {both[0].get(), both[1].get()}, best, error_out);
    workspaces_keep(attention, before);
    if (status == QE_OK) status = workspace_grow(attention, both[best]->workspace_bytes, error_out);
    if (status == QE_OK) made = std::move(both[best]);
    return status;
}

/* Strong: a plan and its choice are there, or neither. */
void plan_keep(qe_cuda_attention &attention, std::unique_ptr<plan> made) {
    const qe_op op = op_of(made->of);
    qe_cuda_choice choice;
    qe_attention_choice_make(&op, made->algorithm, &choice);
    choice.workspace_bytes = static_cast<uint64_t>(made->workspace_bytes);
    attention.plans.reserve(attention.plans.size() + 1);
    attention.choices.push_back(choice);
    attention.plans.push_back(std::move(made));
}

qe_status prepare(qe_cuda_attention &attention, const shape &of, int tune, qe_error *error_out) {
    plan *const found = plan_find(attention, of);
    if (found) return plan_ready(attention, *found, error_out);
    const bool ours = takes(attention, of);
    auto made = plan_make(of, ours && of.deterministic ? QE_ATTENTION_OWN : QE_ATTENTION_CUDNN);
    const qe_status status =
        ours && tune ? plan_tune(attention, of, made, error_out) : plan_ready(attention, *made, error_out);
    if (status == QE_OK) plan_keep(attention, std::move(made));
    return status;
}

/* Not while `stream` is captured: then what is missing is the caller's mistake. */
qe_status prepare_late(qe_cuda_attention &attention, const shape &of, cudaStream_t stream, qe_error *error_out) {
    cudaStreamCaptureStatus capturing;
    if (cudaStreamIsCapturing(stream, &capturing) != cudaSuccess) return QE_ERROR_DEVICE;
    if (capturing != cudaStreamCaptureStatusNone)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "prepare it before the recording begins",
                            "attention without an algorithm while the stream is recorded");
    return prepare(attention, of, 0, error_out);
}

qe_status run(qe_cuda_attention &attention, const qe_op &op, cudaStream_t stream, qe_error *error_out) {
    shape of;
    qe_status status = shape_of(op, of, error_out);
    if (status != QE_OK) return status;
    const plan *p = plan_find(attention, of);
    if (!p || !p->loaded) {
        status = prepare_late(attention, of, stream, error_out);
        if (status != QE_OK) return status;
        p = plan_find(attention, of);
    }
    return plan_run(attention, *p, op, stream, error_out);
}

qe_status choose(qe_cuda_attention &attention, const qe_cuda_choice &choice, qe_error *error_out) {
    qe_attention_algorithm algorithm;
    qe_op op = {};
    shape of;
    qe_status status = qe_attention_choice_parse(&choice, &op, &algorithm, error_out);
    if (status == QE_OK) status = shape_of(op, of, error_out);
    if (status != QE_OK) return status;
    const plan *const chosen = plan_find(attention, of);
    if (chosen && chosen->algorithm == algorithm) return QE_OK;
    if (chosen)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "read the file before anything is prepared",
                            "%s has another algorithm already", choice.key);
    if (algorithm == QE_ATTENTION_OWN && !takes(attention, of))
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                            "choose anew with this build on this machine: leave the file of choices out",
                            "%s cannot be ours on this device", choice.key);
    auto made = plan_make(of, algorithm);
    made->workspace_bytes = static_cast<int64_t>(choice.workspace_bytes); /* until it is built */
    plan_keep(attention, std::move(made));
    return QE_OK;
}

qe_status open(qe_cuda_attention &attention, qe_error *error_out) {
    qe_status status = library_open(error_out);
    if (status != QE_OK) return status;
    const cudnnStatus_t opened = fe::detail::create_handle(&attention.handle);
    if (opened != CUDNN_STATUS_SUCCESS) {
        attention.handle = nullptr;
        return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, REMEDY_INSTALL, "cuDNN does not open: %s",
                            fe::detail::get_error_string(opened));
    }
    attention.identity = identity_of();
    if (qe_attention_own_open(&attention.own) == QE_OK)
        attention.identity += ", ours " + std::to_string(QE_ATTENTION_OWN_REVISION) + "." +
                              std::to_string(QE_ATTENTION_FORWARD_REVISION);
    else
        attention.own = {};
    return workspace_grow(attention, WORKSPACE_FIRST_BYTES, error_out);
}

} // namespace

qe_status qe_cuda_attention_create(cudaStream_t aside, qe_cuda_attention **attention_out, qe_error *error_out) {
    return guarded(error_out, [&] {
        auto *attention = new qe_cuda_attention();
        attention->stream = aside;
        const qe_status status = guarded(error_out, [&] { return open(*attention, error_out); });
        if (status == QE_OK)
            *attention_out = attention;
        else
            qe_cuda_attention_destroy(attention);
        return status;
    });
}

void qe_cuda_attention_destroy(qe_cuda_attention *attention) {
    if (!attention) return;
    (void)guarded(nullptr, [&] {
        attention->plans.clear();
        if (attention->handle) (void)fe::detail::destroy_handle(attention->handle);
        workspaces_keep(*attention, 0);
        return QE_OK;
    });
    delete attention;
}

uint64_t qe_cuda_attention_bytes(const qe_cuda_attention *attention) {
    uint64_t bytes = 0;
    for (size_t i = 0; attention && i < attention->workspaces.size(); ++i)
        bytes += static_cast<uint64_t>(attention->workspaces[i].bytes);
    return bytes;
}

qe_status qe_cuda_attention_prepare(qe_cuda_attention *attention, const qe_op *op, int tune, qe_error *error_out) {
    return guarded(error_out, [&] {
        shape of;
        const qe_status status = shape_of(*op, of, error_out);
        return status == QE_OK ? prepare(*attention, of, tune, error_out) : status;
    });
}

qe_status qe_cuda_attention_run(qe_cuda_attention *attention, const qe_op *op, cudaStream_t stream,
                                qe_error *error_out) {
    return guarded(error_out, [&] { return run(*attention, *op, stream, error_out); });
}

const char *qe_cuda_attention_identity(const qe_cuda_attention *attention) { return attention->identity.c_str(); }

uint32_t qe_cuda_attention_choices(const qe_cuda_attention *attention, const qe_cuda_choice **choices_out) {
    *choices_out = attention->choices.data();
    return static_cast<uint32_t>(attention->choices.size());
}

qe_status qe_cuda_attention_choose(qe_cuda_attention *attention, const qe_cuda_choice *choice, qe_error *error_out) {
    return guarded(error_out, [&] { return choose(*attention, *choice, error_out); });
}

void qe_cuda_attention_keep(qe_cuda_attention *attention, uint32_t count) {
    attention->plans.resize(count);
    attention->choices.resize(count);
}
