/* no_cuda.c - what choices.c names and the reading of its text never calls: a device that is not there. */
#include "backend/cuda/choices.h"
#include "backend/cuda/fused.h"
#include "fuzz/fuzz.h"

cudaError_t cudaGetDevice(int *device_out) {
    *device_out = 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties_out, int device) {
    fuzz_check(device < 0, "asks for a device");
    properties_out->name[0] = 0;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "none" : "some"; }
const char *qe_cuda_gemm_identity(const qe_cuda_gemm *gemm) { return gemm == NULL ? "none" : "some"; }
void qe_cuda_gemm_keep(qe_cuda_gemm *gemm, uint32_t count) { fuzz_check(gemm == NULL && count == 0, "keeps choices"); }

uint32_t qe_cuda_gemm_choices(const qe_cuda_gemm *gemm, const qe_cuda_choice **choices_out) {
    *choices_out = NULL;
    return gemm == NULL ? 0 : 1;
}

qe_status qe_cuda_gemm_choose(qe_cuda_gemm *gemm, const qe_cuda_choice *choice, qe_error *error_out) {
    fuzz_check(gemm == NULL && choice == NULL, "chooses");
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, NULL, "no device");
}

qe_cuda_fused *qe_cuda_gemm_fused(const qe_cuda_gemm *gemm) {
    fuzz_check(gemm == NULL, "asks for fused products");
    return NULL;
}

void qe_cuda_fused_keep(qe_cuda_fused *fused, uint32_t count) {
    fuzz_check(fused == NULL && count == 0, "keeps choices of fused products");
}

uint32_t qe_cuda_fused_choices(const qe_cuda_fused *fused, const qe_cuda_choice **choices_out) {
    *choices_out = NULL;
    return fused == NULL ? 0 : 1;
}

qe_status qe_cuda_fused_choose(qe_cuda_fused *fused, const qe_cuda_choice *choice, qe_error *error_out) {
    fuzz_check(fused == NULL && choice == NULL, "chooses for fused products");
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, NULL, "no device");
}

const char *qe_cuda_attention_identity(const qe_cuda_attention *attention) {
    return attention == NULL ? "none" : "some";
}

void qe_cuda_attention_keep(qe_cuda_attention *attention, uint32_t count) {
    fuzz_check(attention == NULL && count == 0, "keeps choices of attention");
}

uint32_t qe_cuda_attention_choices(const qe_cuda_attention *attention, const qe_cuda_choice **choices_out) {
    *choices_out = NULL;
    return attention == NULL ? 0 : 1;
}

qe_status qe_cuda_attention_choose(qe_cuda_attention *attention, const qe_cuda_choice *choice, qe_error *error_out) {
    fuzz_check(attention == NULL && choice == NULL, "chooses for attention");
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, NULL, "no device");
}
