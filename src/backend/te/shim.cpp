// shim.cpp - see shim.h. The only file that includes Transformer Engine's headers, and the only one in C++.
#include "backend/te/shim.h"

#include <dlfcn.h>
#include <transformer_engine/activation.h>
#include <transformer_engine/cast.h>
#include <transformer_engine/fused_attn.h>
#include <transformer_engine/gemm.h>
#include <transformer_engine/recipe.h>
#include <transformer_engine/transformer_engine.h>
#include <transformer_engine/transpose.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <initializer_list>
#include <memory>
#include <new>

// transformer_engine::nvte_cublas_handle_init(), which has C++'s name.
static const char HANDLE_INIT[] = "_ZN18transformer_engine23nvte_cublas_handle_initEv";
// Compiled kernels come from NVRTC, whose functions Transformer Engine expects among those that are loaded already.
static const char NVRTC[] = "libnvrtc.so.13";

#define QE_TE_FUNCTIONS(of) \
    of(nvte_create_tensor) of(nvte_destroy_tensor) of(nvte_set_tensor_param_v2) of(nvte_create_matmul_config) \
    of(nvte_destroy_matmul_config) of(nvte_set_matmul_config_attribute) of(nvte_cublas_gemm_v2) \
    of(nvte_create_quantization_config) of(nvte_destroy_quantization_config) of(nvte_compute_amax) \
    of(nvte_compute_scale_from_amax) of(nvte_quantize_v2) of(nvte_swiglu) of(nvte_dswiglu_cast_transpose) \
    of(nvte_tensor_shape) of(nvte_fused_attn_fwd) of(nvte_fused_attn_bwd)

// Loaded when asked for and not linked: the program runs where there is no Transformer Engine.
struct qe_te_library {
    void *engine = nullptr;
    NVTEMatmulConfig accumulation[2] = {nullptr, nullptr}; // by qe_accumulation
    NVTEQuantizationConfig current = nullptr; // its defaults: any scale, and no epsilon
#define QE_TE_FIELD(name) decltype(&::name) name = nullptr;
    QE_TE_FUNCTIONS(QE_TE_FIELD)
#undef QE_TE_FIELD
    decltype(&transformer_engine::nvte_cublas_handle_init) handle_init = nullptr;
};

namespace {

// While it lives, calls that a capture forbids are allowed: Transformer Engine compiles and loads kernels, and makes a
// handle of cuBLASLt, when a thread first needs them. None of that becomes part of the capture.
class relaxed {
public:
    relaxed() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~relaxed() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
    relaxed(const relaxed &) = delete;
    relaxed &operator=(const relaxed &) = delete;

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

template <typename Call>
qe_status guarded(const char *what, qe_error *error_out, const Call &call) noexcept {
    try {
        const relaxed mode;
        call();
        return QE_OK;
    } catch (const std::bad_alloc &) {
        return qe_error_set(error_out, QE_ERROR_MEMORY, nullptr, "Transformer Engine: no memory for %s", what);
    } catch (const std::exception &thrown) {
        return qe_error_set(error_out, QE_ERROR_DEVICE, nullptr, "Transformer Engine, %s: %s", what, thrown.what());
    } catch (...) {
        return qe_error_set(error_out, QE_ERROR_DEVICE, nullptr, "Transformer Engine, %s: something was thrown", what);
    }
}

NVTEDType type_of(uint8_t format) {
    switch (format) {
        case QE_FORMAT_E4M3: return kNVTEFloat8E4M3;
        case QE_FORMAT_E5M2: return kNVTEFloat8E5M2;
        case QE_FORMAT_BF16: return kNVTEBFloat16;
        default: return kNVTEFloat32;
    }
}

// Transformer Engine's tensor, for as long as a call takes: it reads them on the host, at once.
class tensor {
public:
    explicit tensor(const qe_te_library *library)
        : library_(library), handle_(library->nvte_create_tensor(NVTE_DELAYED_TENSOR_SCALING)) {}
    tensor(const qe_te_library *library, const qe_te_tensor &from) : tensor(library) {
        const NVTEDType type = type_of(from.format);
        set(kNVTERowwiseData, from.by_rows, type, from.rows, from.columns);
        set(kNVTEColumnwiseData, from.by_columns, type, from.columns, from.rows);
        word(kNVTEScale, from.scale);
        word(kNVTEAmax, from.amax);
        if (from.by_rows != nullptr) word(kNVTERowwiseScaleInv, from.scale_inv);
        if (from.by_columns != nullptr) word(kNVTEColumnwiseScaleInv, from.scale_inv);
    }
    ~tensor() { library_->nvte_destroy_tensor(handle_); }
    tensor(const tensor &) = delete;
    tensor &operator=(const tensor &) = delete;

    NVTETensor get() const { return handle_; }

    void bytes(void *at, size_t count) {
        if (at != nullptr) put(kNVTERowwiseData, {at, kNVTEByte, {{count}, 1}});
    }
    // Without an address as well: its shape says what is asked for.
    void any(const void *at, NVTEDType type, std::initializer_list<size_t> dimensions) {
        NVTEBasicTensor what = {const_cast<void *>(at), type, {{}, dimensions.size()}};
        std::copy(dimensions.begin(), dimensions.end(), what.shape.data);
        put(kNVTERowwiseData, what);
    }

private:
    void put(NVTETensorParam which, const NVTEBasicTensor &what) {
        library_->nvte_set_tensor_param_v2(handle_, which, &what, sizeof what);
    }
    void set(NVTETensorParam which, void *at, NVTEDType type, size_t rows, size_t columns) {
        if (at != nullptr) put(which, {at, type, {{rows, columns}, 2}});
    }
    void word(NVTETensorParam which, const float *at) {
        if (at != nullptr) put(which, {const_cast<float *>(at), kNVTEFloat32, {{1}, 1}});
    }

    const qe_te_library *library_;
    NVTETensor handle_;
};

// Both ways of attention, as Transformer Engine's long lists of arguments want them.
class attention_call {
public:
    attention_call(const qe_te_library *library, const qe_te_attention &a)
        : library_(library), a_(a), q_(library), k_(library), v_(library), out_(library), lse_(library),
          random_(library), lengths_(library), workspace_(library), none_(library) {
        part(q_, a.qkv, 0), part(k_, a.qkv, 1), part(v_, a.qkv, 2);
        rows(out_, a.out);
        lse_.any(a.lse, kNVTEFloat32, {a.sequences, a.heads, a.sequence, 1});
        random_.any(a.state, kNVTEInt64, {2});
        lengths_.any(static_cast<int64_t *>(a.state) + 2, kNVTEInt32, {a.sequences + size_t{1}});
        workspace_.bytes(a.workspace, a.workspace_bytes);
        kept_.tensors[0] = lse_.get(), kept_.tensors[1] = random_.get();
        kept_.size = 2;
    }

    void forward(cudaStream_t stream) {
        library_->nvte_fused_attn_fwd(
            q_.get(), k_.get(), v_.get(), none_.get(), none_.get(), none_.get(), out_.get(), &kept_, lengths_.get(),
            lengths_.get(), none_.get(), none_.get(), none_.get(), none_.get(), random_.get(), a_.sequence,
            a_.sequence, true, false, true, scale(), 0.0f, NVTE_BS3HD, NVTE_BSHD, NVTE_QKV_Format_NOT_SET,
            NVTE_NO_BIAS, NVTE_CAUSAL_MASK, NVTE_VANILLA_SOFTMAX, -1, 0, false, workspace_.get(), stream);
    }

    void backward(cudaStream_t stream) {
        tensor dout(library_), dq(library_), dk(library_), dv(library_);
        rows(dout, a_.dout);
        part(dq, a_.dqkv, 0), part(dk, a_.dqkv, 1), part(dv, a_.dqkv, 2);
        library_->nvte_fused_attn_bwd(
            q_.get(), k_.get(), v_.get(), out_.get(), dout.get(), none_.get(), none_.get(), &kept_, dq.get(),
            dk.get(), dv.get(), none_.get(), none_.get(), lengths_.get(), lengths_.get(), none_.get(), none_.get(),
            a_.sequence, a_.sequence, scale(), 0.0f, NVTE_BS3HD, NVTE_BSHD, NVTE_BSHD, NVTE_BS3HD,
            NVTE_QKV_Format_NOT_SET, NVTE_QKV_Format_NOT_SET, NVTE_NO_BIAS, NVTE_CAUSAL_MASK, NVTE_VANILLA_SOFTMAX,
            -1, 0, false, a_.deterministic != 0, true, workspace_.get(), stream);
    }

    void run(cudaStream_t stream) { a_.backward ? backward(stream) : forward(stream); }

    // What a call without a workspace left there.
    uint64_t wanted_bytes() const { return library_->nvte_tensor_shape(workspace_.get()).data[0]; }

private:
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(a_.head_dim)); }
    void part(tensor &to, const void *qkv, size_t which) const {
        const size_t bytes = which * a_.heads * a_.head_dim * sizeof(uint16_t);
        rows(to, qkv != nullptr ? static_cast<const char *>(qkv) + bytes : nullptr);
    }
    void rows(tensor &to, const void *at) const {
        to.any(at, kNVTEBFloat16, {a_.sequences, a_.sequence, a_.heads, a_.head_dim});
    }

    const qe_te_library *library_;
    const qe_te_attention &a_;
    tensor q_, k_, v_, out_, lse_, random_, lengths_, workspace_, none_;
    NVTETensorPack kept_;
};

qe_status unsupported(const char *what, qe_error *error_out) {
    const char *found = dlerror();
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED,
                        "add the folders of libtransformer_engine.so's own libraries (CUDA 13's cuBLAS, NVRTC and "
                        "runtime, cuDNN 9, NCCL 2) to LD_LIBRARY_PATH, or use --device cuda",
                        "%s cannot be loaded: %s", what, found != nullptr ? found : "no reason given");
}

qe_status functions_find(qe_te_library *library, qe_error *error_out) {
#define QE_TE_FIND(name) \
    library->name = reinterpret_cast<decltype(&::name)>(dlsym(library->engine, #name)); \
    if (library->name == nullptr) return unsupported(#name, error_out);
    QE_TE_FUNCTIONS(QE_TE_FIND)
#undef QE_TE_FIND
    library->handle_init = reinterpret_cast<decltype(library->handle_init)>(dlsym(library->engine, HANDLE_INIT));
    return library->handle_init != nullptr ? QE_OK : unsupported(HANDLE_INIT, error_out);
}

qe_status library_fill(qe_te_library *library, const char *path, qe_error *error_out) {
    if (dlopen(NVRTC, RTLD_LAZY | RTLD_GLOBAL) == nullptr) return unsupported(NVRTC, error_out);
    library->engine = dlopen(path, RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE);
    if (library->engine == nullptr) return unsupported(path, error_out);
    const qe_status status = functions_find(library, error_out);
    if (status != QE_OK) return status;
    return guarded("settings", error_out, [&] {
        library->current = library->nvte_create_quantization_config();
        for (uint8_t split = 0; split < 2; ++split) {
            library->accumulation[split] = library->nvte_create_matmul_config();
            library->nvte_set_matmul_config_attribute(library->accumulation[split],
                                                      kNVTEMatmulConfigUseSplitAccumulator, &split, sizeof split);
        }
    });
}

} // namespace

static_assert(QE_ACCUMULATE_FAST == 0 && QE_ACCUMULATE_SPLIT == 1, "settings are found by qe_accumulation");

qe_status qe_te_library_open(const char *path, qe_te_library **library_out, qe_error *error_out) {
    qe_te_library *library = new (std::nothrow) qe_te_library;
    if (library == nullptr) return qe_error_set(error_out, QE_ERROR_MEMORY, nullptr, "no memory for a library");
    const qe_status status = library_fill(library, path, error_out);
    if (status != QE_OK) {
        qe_te_library_close(library);
        return status;
    }
    *library_out = library;
    return QE_OK;
}

void qe_te_library_close(qe_te_library *library) {
    if (library == nullptr) return;
    (void)guarded("settings", nullptr, [&] {
        if (library->current != nullptr) library->nvte_destroy_quantization_config(library->current);
        for (NVTEMatmulConfig config : library->accumulation)
            if (config != nullptr) library->nvte_destroy_matmul_config(config);
    });
    if (library->engine != nullptr) (void)dlclose(library->engine);
    delete library;
}

qe_status qe_te_thread_enter(const qe_te_library *library, qe_error *error_out) {
    return guarded("a handle of cuBLASLt", error_out, [&] { library->handle_init(); });
}

qe_status qe_te_quantize(const qe_te_library *library, const qe_te_tensor *from, const qe_te_tensor *to, void *stream,
                         qe_error *error_out) {
    return guarded("quantize", error_out, [&] {
        const tensor input(library, *from), output(library, *to);
        library->nvte_quantize_v2(input.get(), output.get(), nullptr, static_cast<cudaStream_t>(stream));
    });
}

qe_status qe_te_quantize_current(const qe_te_library *library, const qe_te_tensor *from, const qe_te_tensor *to,
                                 void *stream, qe_error *error_out) {
    return guarded("quantize under current scaling", error_out, [&] {
        const cudaStream_t queue = static_cast<cudaStream_t>(stream);
        qe_te_tensor unmeasured = *to; // codes are made without measuring again
        unmeasured.amax = nullptr;
        const tensor input(library, *from), measured(library, *to), output(library, unmeasured);
        library->nvte_compute_amax(input.get(), measured.get(), queue);
        library->nvte_compute_scale_from_amax(measured.get(), library->current, queue);
        library->nvte_quantize_v2(input.get(), output.get(), nullptr, queue);
    });
}

qe_status qe_te_swiglu(const qe_te_library *library, const qe_te_tensor *gate_up, const qe_te_tensor *to, void *stream,
                       qe_error *error_out) {
    return guarded("swiglu", error_out, [&] {
        const tensor input(library, *gate_up), output(library, *to);
        library->nvte_swiglu(input.get(), output.get(), static_cast<cudaStream_t>(stream));
    });
}

qe_status qe_te_swiglu_backward(const qe_te_library *library, const qe_te_tensor *dy, const qe_te_tensor *gate_up,
                                const qe_te_tensor *to, void *stream, qe_error *error_out) {
    return guarded("swiglu backward", error_out, [&] {
        const tensor gradient(library, *dy), input(library, *gate_up), output(library, *to);
        library->nvte_dswiglu_cast_transpose(gradient.get(), input.get(), output.get(),
                                             static_cast<cudaStream_t>(stream));
    });
}

qe_status qe_te_multiply(const qe_te_library *library, const qe_te_product *product, void *stream,
                         qe_error *error_out) {
    return guarded("a product", error_out, [&] {
        const float alpha = 1.0f, beta = product->adds ? 1.0f : 0.0f;
        const tensor a(library, product->a), b(library, product->b), result(library, product->result);
        tensor workspace(library);
        workspace.bytes(product->workspace, product->workspace_bytes);
        // Transformer Engine takes what is added and what results only as one tensor.
        library->nvte_cublas_gemm_v2(product->turn_a, product->turn_b, &alpha, a.get(), b.get(), &beta, result.get(),
                                     result.get(), workspace.get(), library->accumulation[product->accumulation],
                                     static_cast<cudaStream_t>(stream));
    });
}

qe_status qe_te_attention_plan_build(const qe_te_library *library, const qe_te_attention *attention,
                                     uint64_t *workspace_bytes_out, qe_error *error_out) {
    return guarded("a plan of attention", error_out, [&] {
        qe_te_attention unplaced = *attention;
        unplaced.workspace = nullptr;
        attention_call call(library, unplaced);
        call.run(nullptr);
        *workspace_bytes_out = call.wanted_bytes();
    });
}

qe_status qe_te_attention_run(const qe_te_library *library, const qe_te_attention *attention, void *stream,
                              qe_error *error_out) {
    return guarded("attention", error_out, [&] {
        attention_call call(library, *attention);
        call.run(static_cast<cudaStream_t>(stream));
    });
}
