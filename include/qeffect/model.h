/* model.h - the built-in model: a Llama-style decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU, untied head)
 * as ops with effects, its parameters under their Hugging Face names, and the optimizer's constants.
 *
 * A *weight* is what the optimizer and the caches see (q, k and v are one fused weight); a *parameter* is a named view
 * of rows of a weight, as checkpoints and other frameworks know it. */
#ifndef QEFFECT_MODEL_H
#define QEFFECT_MODEL_H

#include "qeffect/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qe_model_config {
    uint32_t layers, hidden, heads, kv_heads, ffn, vocab;
    uint32_t sequence;   /* tokens of one sequence */
    uint32_t sequences;  /* sequences of one microbatch */
    float rope_theta, norm_epsilon;
    qe_numerics numerics;        /* of the backend that will run it (qe_backend.numerics); zeros: the host's */
    uint8_t accumulation[3];     /* qe_accumulation of forward, input-gradient and weight-gradient products */
    uint8_t attention_any_order; /* 1: attention's sums may be made in any order (faster, not reproducible) */
} qe_model_config;

typedef struct qe_model qe_model;

/* Requires:   head_dim = hidden / heads whole and even, heads a multiple of kv_heads, all sizes positive.
 * On failure: QE_ERROR_ARGUMENT says which. Owns: the caller destroys. Thread: any; a model never changes. */
qe_status qe_model_create(const qe_model_config *config, const qe_recipe *recipe, qe_model **model_out,
                          qe_error *error_out);
void qe_model_destroy(qe_model *model);
const qe_model_config *qe_model_config_of(const qe_model *model);

/* The table by which plan and step know the model; the `model` argument of its functions is a qe_model. */
const qe_model_ops *qe_model_table(void);

/* Parameters (qe_parameter, plan.h), sorted by name. */
uint32_t qe_model_parameter_count(const qe_model *model);
const qe_parameter *qe_model_parameter(const qe_model *model, uint32_t index);
/* Scalars in all parameters. */
uint64_t qe_model_scalar_count(const qe_model *model);

/* Initial values of one parameter: gains 1; matrices normal with deviation 0.02 (projections into the residual stream
 * 0.02 / sqrt(2 layers)), from Philox keyed by (seed, parameter name). values_out: [rows * columns]. */
void qe_model_initialize(const qe_model *model, uint32_t parameter, uint64_t seed, float *values_out);

/* Bytes of logits of one microbatch and where they lie in a stage's X slot (last stage, evaluation). */
uint64_t qe_model_logits_offset_bytes(const qe_model *model, uint32_t stages);

/* Learning rate of step 1..: linear warmup, then cosine to `minimum`. */
typedef struct qe_learning_rate {
    double peak, minimum;
    uint64_t warmup_steps, steps;
} qe_learning_rate;
double qe_learning_rate_at(const qe_learning_rate *rate, uint64_t step);

/* AdamW constants of step 1.. and the clip coefficient: min(1, clip / (norm + 1e-6)); clip <= 0: no clipping. */
typedef struct qe_optimizer {
    qe_learning_rate rate;
    double beta1, beta2, epsilon, weight_decay, clip_norm;
} qe_optimizer;
qe_adamw qe_optimizer_step(const qe_optimizer *optimizer, uint64_t step, double gradient_norm);

#ifdef __cplusplus
}
#endif
#endif
