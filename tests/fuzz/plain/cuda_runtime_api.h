/* cuda_runtime_api.h - as much of CUDA as the text of a file of choices names, so that it is read where there is no
 * CUDA. Nothing here is called. */
#ifndef QE_TESTS_FUZZ_CUDA_RUNTIME_API_H
#define QE_TESTS_FUZZ_CUDA_RUNTIME_API_H

typedef enum cudaError { cudaSuccess } cudaError_t;
typedef struct CUstream_st *cudaStream_t;
struct cudaDeviceProp { char name[256]; };

cudaError_t cudaGetDevice(int *device_out);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties_out, int device);
cudaError_t cudaGetLastError(void);
const char *cudaGetErrorString(cudaError_t error);

#endif
