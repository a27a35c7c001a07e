/* linear.h - the matrix products of a linear layer, on dequantized operands. */
#ifndef QE_HOST_LINEAR_H
#define QE_HOST_LINEAR_H

#include "backend/host/kernels.h"

void qe_host_linear(const qe_args_linear *args, host_sgemm *sgemm);
void qe_host_linear_input_grad(const qe_args_linear_input_grad *args, host_sgemm *sgemm);
void qe_host_linear_weight_grad(const qe_args_linear_weight_grad *args, const host_kernels *kernels, host_sgemm *sgemm);

#endif
