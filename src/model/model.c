/* model.c - the model's weights and parameters: sizes, names, initial values. Shapes never depend on stages. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/assert.h"
#include "base/prng.h"
#include "model/model.h"

enum { WEIGHTS_PER_DECODER = QE_GAINS + QE_LINEARS, PARAMETERS_PER_DECODER = 9, WEIGHTS_OUTSIDE = 3 };

static const float initial_deviation = 0.02f; /* as GPT-2 and Llama reference code */

uint32_t qe_weight_embed(void) {
    return 0;
}
uint32_t qe_weight_gain(const qe_model *model, uint32_t decoder, int gain) {
    QE_ASSERT(decoder < model->config.layers);
    return 1 + decoder * WEIGHTS_PER_DECODER + (uint32_t)gain;
}
uint32_t qe_weight_linear(const qe_model *model, uint32_t decoder, int linear) {
    return qe_weight_gain(model, decoder, 0) + QE_GAINS + (uint32_t)linear;
}
uint32_t qe_weight_final_gain(const qe_model *model) {
    return 1 + model->config.layers * WEIGHTS_PER_DECODER;
}
uint32_t qe_weight_head(const qe_model *model) {
    return qe_weight_final_gain(model) + 1;
}

static qe_status config_check(const qe_model_config *c, qe_error *error_out) {
    const uint32_t sizes[] = {c->layers, c->hidden, c->heads, c->kv_heads, c->ffn, c->vocab, c->sequence, c->sequences};
    const char *names[] = {"layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence", "sequences"};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] == 0 || sizes[i] > QE_MODEL_SIZE_MAX)
            return qe_error_set(error_out, QE_ERROR_ARGUMENT, NULL, "model size %s is %u; expected 1 to %u", names[i],
                                sizes[i], (unsigned)QE_MODEL_SIZE_MAX);
    if (c->hidden % c->heads != 0 || (c->hidden / c->heads) % 2 != 0)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "choose hidden = heads * an even number",
                            "hidden %u over %u heads gives no whole, even head size", c->hidden, c->heads);
    if (c->heads % c->kv_heads != 0)
        return qe_error_set(error_out, QE_ERROR_ARGUMENT, "choose heads as a multiple of kv_heads",
                            "%u heads cannot share %u key-value heads evenly", c->heads, c->kv_heads);
    return QE_OK;
}

/* Products of 8-bit codes want every dimension they sum over, and every row, in whole sixteens. */
static qe_status products_check(const qe_model_config *c, const qe_recipe *recipe, qe_error *error_out) {
    enum { PRODUCT_STEP = 16 };
    int fp8 = recipe->kind == QE_RECIPE_DELAYED || recipe->kind == QE_RECIPE_CURRENT;
    if (c->numerics.operands != QE_OPERANDS_CODES || !fp8) return QE_OK;
    uint64_t kv = (uint64_t)c->kv_heads * (c->hidden / c->heads);
    const uint64_t sizes[] = {(uint64_t)c->sequence * c->sequences, c->hidden, c->ffn, c->hidden + 2 * kv};
    const char *names[] = {"tokens of a microbatch", "hidden", "ffn", "width of q, k and v"};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] % PRODUCT_STEP != 0)
            return qe_error_set(error_out, QE_ERROR_ARGUMENT, "choose a multiple of 16, or the bf16 recipe",
                                "%s is %llu; the device multiplies FP8 matrices in whole sixteens", names[i],
                                (unsigned long long)sizes[i]);
    return QE_OK;
}

static qe_weight_info weight_info(const char *name, uint32_t rows, uint32_t columns, uint32_t layer) {
    qe_weight_info info = {.rows = rows, .columns = columns, .stage_layer = layer, .decay = rows > 1};
    snprintf(info.name, sizeof info.name, "%s", name);
    info.deposited_by = QE_ACTION_I;
    return info;
}

static void decoder_weights(qe_model *model, uint32_t decoder) {
    static const char *const gains[QE_GAINS] = {"input_layernorm", "post_attention_layernorm"};
    static const char *const linears[QE_LINEARS] = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj",
                                                    "mlp.down_proj"};
    char name[QE_NAME_BYTES];
    for (int gain = 0; gain < QE_GAINS; gain++) {
        snprintf(name, sizeof name, "model.layers.%u.%s", decoder, gains[gain]);
        model->weights[qe_weight_gain(model, decoder, gain)] = weight_info(name, 1, model->config.hidden, decoder + 1);
    }
    for (int linear = 0; linear < QE_LINEARS; linear++) {
        snprintf(name, sizeof name, "model.layers.%u.%s", decoder, linears[linear]);
        qe_weight_info info = weight_info(name, qe_linear_out(model, linear), qe_linear_in(model, linear), decoder + 1);
        info.quantized = info.scaled = 1;
        info.deposited_by = QE_ACTION_W;
        model->weights[qe_weight_linear(model, decoder, linear)] = info;
    }
}

static void all_weights(qe_model *model) {
    const qe_model_config *c = &model->config;
    model->weights[qe_weight_embed()] = weight_info("model.embed_tokens", c->vocab, c->hidden, 0);
    for (uint32_t decoder = 0; decoder < c->layers; decoder++) decoder_weights(model, decoder);
    model->weights[qe_weight_final_gain(model)] = weight_info("model.norm", 1, c->hidden, c->layers + 1);
    qe_weight_info head = weight_info("lm_head", c->vocab, c->hidden, c->layers + 1);
    head.deposited_by = QE_ACTION_W;
    head.quantized = qe_model_takes_codes(model) != 0; /* a product of bf16 takes no fp32 master */
    model->weights[qe_weight_head(model)] = head;
}

/* Adds the rows [begin, begin + rows) of a weight under a name; `part` replaces the last component when given. */
static void add_parameter(qe_model *model, uint32_t weight, const char *part, uint32_t begin, uint32_t rows) {
    const qe_weight_info *info = &model->weights[weight];
    qe_parameter *parameter = &model->parameters[model->parameter_count++];
    memset(parameter, 0, sizeof *parameter);
    const char *dot = strrchr(info->name, '.');
    int prefix = part == NULL || dot == NULL ? (int)strlen(info->name) : (int)(dot - info->name);
    int length = part == NULL
                     ? snprintf(parameter->name, sizeof parameter->name, "%s.weight", info->name)
                     : snprintf(parameter->name, sizeof parameter->name, "%.*s.%s.weight", prefix, info->name, part);
    QE_ASSERT(length < (int)sizeof parameter->name);
    parameter->weight = weight;
    parameter->row_begin = begin;
    parameter->rows = rows;
    parameter->columns = info->columns;
    parameter->vector = info->rows == 1;
}

static void decoder_parameters(qe_model *model, uint32_t decoder) {
    const qe_model_config *c = &model->config;
    uint32_t q = c->heads * model->head_dim, kv = c->kv_heads * model->head_dim;
    for (int gain = 0; gain < QE_GAINS; gain++) add_parameter(model, qe_weight_gain(model, decoder, gain), NULL, 0, 1);
    uint32_t qkv = qe_weight_linear(model, decoder, QE_LINEAR_QKV);
    add_parameter(model, qkv, "q_proj", 0, q);
    add_parameter(model, qkv, "k_proj", q, kv);
    add_parameter(model, qkv, "v_proj", q + kv, kv);
    add_parameter(model, qe_weight_linear(model, decoder, QE_LINEAR_O), NULL, 0, c->hidden);
    uint32_t gate_up = qe_weight_linear(model, decoder, QE_LINEAR_GATE_UP);
    add_parameter(model, gate_up, "gate_proj", 0, c->ffn);
    add_parameter(model, gate_up, "up_proj", c->ffn, c->ffn);
    add_parameter(model, qe_weight_linear(model, decoder, QE_LINEAR_DOWN), NULL, 0, c->hidden);
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const qe_parameter *)a)->name, ((const qe_parameter *)b)->name);
}

static void all_parameters(qe_model *model) {
    add_parameter(model, qe_weight_embed(), NULL, 0, model->config.vocab);
    for (uint32_t decoder = 0; decoder < model->config.layers; decoder++) decoder_parameters(model, decoder);
    add_parameter(model, qe_weight_final_gain(model), NULL, 0, 1);
    add_parameter(model, qe_weight_head(model), NULL, 0, model->config.vocab);
    qsort(model->parameters, model->parameter_count, sizeof *model->parameters, by_name);
}

qe_status qe_model_create(const qe_model_config *config, const qe_recipe *recipe, qe_model **model_out,
                          qe_error *error_out) {
    QE_TRY(config_check(config, error_out));
    QE_TRY(products_check(config, recipe, error_out));
    qe_model *model = calloc(1, sizeof *model);
    if (model == NULL) return qe_error_set(error_out, QE_ERROR_MEMORY, NULL, "no memory for the model");
    model->config = *config;
    model->recipe = *recipe;
    model->head_dim = config->hidden / config->heads;
    model->qkv_columns = (config->heads + 2 * config->kv_heads) * model->head_dim;
    model->tokens = config->sequences * config->sequence;
    model->weight_count = config->layers * WEIGHTS_PER_DECODER + WEIGHTS_OUTSIDE;
    model->weights = calloc(model->weight_count, sizeof *model->weights);
    model->parameters =
        calloc((size_t)config->layers * PARAMETERS_PER_DECODER + WEIGHTS_OUTSIDE, sizeof *model->parameters);
    if (model->weights == NULL || model->parameters == NULL) {
        qe_model_destroy(model);
        return qe_error_set(error_out, QE_ERROR_MEMORY, "use fewer layers", "no memory for the weights of %u layers",
                            config->layers);
    }
    all_weights(model);
    all_parameters(model);
    *model_out = model;
    return QE_OK;
}

void qe_model_destroy(qe_model *model) {
    if (model == NULL) return;
    free(model->weights);
    free(model->parameters);
    free(model);
}

const qe_model_config *qe_model_config_of(const qe_model *model) {
    return &model->config;
}
uint32_t qe_model_parameter_count(const qe_model *model) {
    return model->parameter_count;
}
const qe_parameter *qe_model_parameter(const qe_model *model, uint32_t index) {
    QE_ASSERT(index < model->parameter_count);
    return &model->parameters[index];
}

uint64_t qe_model_scalar_count(const qe_model *model) {
    uint64_t count = 0;
    for (uint32_t i = 0; i < model->weight_count; i++)
        count += (uint64_t)model->weights[i].rows * model->weights[i].columns;
    return count;
}

static int writes_residual(const char *name) {
    return strstr(name, "o_proj") != NULL || strstr(name, "down_proj") != NULL;
}

void qe_model_initialize(const qe_model *model, uint32_t index, uint64_t seed, float *values_out) {
    const qe_parameter *parameter = qe_model_parameter(model, index);
    uint64_t count = (uint64_t)parameter->rows * parameter->columns;
    if (parameter->vector) {
        for (uint64_t i = 0; i < count; i++) values_out[i] = 1.0f;
        return;
    }
    /* Sums into the residual stream grow with depth; the usual cure is to start their writers smaller. */
    float deviation = writes_residual(parameter->name) ? initial_deviation / sqrtf(2.0f * (float)model->config.layers)
                                                       : initial_deviation;
    qe_prng prng = qe_prng_make(seed, parameter->name);
    qe_prng_normal_fill(&prng, 0, deviation, count, values_out);
}

static uint32_t table_weight_count(const void *opaque) {
    return ((const qe_model *)opaque)->weight_count;
}
static const qe_weight_info *table_weight(const void *opaque, uint32_t index) {
    const qe_model *model = opaque;
    QE_ASSERT(index < model->weight_count);
    return &model->weights[index];
}
static uint32_t table_weight_stage(const void *opaque, uint32_t index, uint32_t stages) {
    const qe_model *model = opaque;
    uint32_t layer = table_weight(model, index)->stage_layer;
    if (layer == 0) return 0;
    if (layer == model->config.layers + 1) return stages - 1;
    for (uint32_t stage = 0; stage < stages; stage++) {
        uint32_t first, last;
        qe_stage_decoders(model, stage, stages, &first, &last);
        if (layer - 1 < last) return stage;
    }
    QE_ASSERT(0 && "every decoder is on a stage");
    return 0;
}
static uint32_t table_stages_max(const void *opaque) {
    return ((const qe_model *)opaque)->config.layers;
}
static uint64_t table_work_bytes(const void *opaque) {
    return qe_work_layout_of(opaque).bytes;
}
static uint64_t table_workspace_bytes(const void *opaque) {
    return ((const qe_model *)opaque)->config.numerics.workspace_bytes;
}
static uint64_t table_constant_bytes(const void *opaque) {
    const qe_model *model = opaque;
    return 2ull * model->config.sequence * (model->head_dim / 2) * sizeof(float);
}

/* cosines, then sines, [sequence, head_dim / 2]; angles in double, as Hugging Face's half-split RoPE. */
static void table_constant_fill(const void *opaque, void *host_out) {
    const qe_model *model = opaque;
    uint32_t half = model->head_dim / 2;
    float *cosine = host_out, *sine = cosine + (size_t)model->config.sequence * half;
    for (uint32_t t = 0; t < model->config.sequence; t++)
        for (uint32_t i = 0; i < half; i++) {
            double angle = t * pow(model->config.rope_theta, -2.0 * i / model->head_dim);
            cosine[(size_t)t * half + i] = (float)cos(angle);
            sine[(size_t)t * half + i] = (float)sin(angle);
        }
}

static uint64_t table_cache_code_bytes(const void *opaque, uint32_t index) {
    const qe_model *model = opaque;
    const qe_weight_info *info = table_weight(model, index);
    if (!info->scaled || model->recipe.kind == QE_RECIPE_FP32) return 0; /* the operand is the code */
    if (qe_model_takes_codes(model) && !qe_model_takes_fp8(model)) return 0; /* serves both directions */
    return (uint64_t)info->rows * info->columns * qe_format_bytes(qe_model_format(model, 0));
}

static uint64_t table_cache_operand_bytes(const void *opaque, uint32_t index) {
    const qe_model *model = opaque;
    const qe_weight_info *info = table_weight(model, index);
    qe_format format = info->scaled ? qe_model_operand_format(model, 0) : QE_FORMAT_BF16;
    return info->quantized ? (uint64_t)info->rows * info->columns * qe_format_bytes(format) : 0;
}

static uint64_t table_cache_scale_count(const void *opaque, uint32_t index) {
    const qe_model *model = opaque;
    const qe_weight_info *info = table_weight(model, index);
    if (!info->scaled) return 0;
    switch (model->recipe.kind) {
        case QE_RECIPE_BLOCK:
            if (qe_model_takes_codes(model)) return 0; /* only decoded values are kept */
            return (uint64_t)((info->rows + QE_BLOCK - 1) / QE_BLOCK) * ((info->columns + QE_BLOCK - 1) / QE_BLOCK);
        case QE_RECIPE_DELAYED:
        case QE_RECIPE_CURRENT: return 1;
        default: return 0;
    }
}
static uint32_t table_parameter_count(const void *opaque) {
    return qe_model_parameter_count(opaque);
}
static const qe_parameter *table_parameter(const void *opaque, uint32_t index) {
    return qe_model_parameter(opaque, index);
}
static uint32_t table_tokens(const void *opaque) {
    return ((const qe_model *)opaque)->tokens;
}
static const qe_recipe *table_recipe(const void *opaque) {
    return &((const qe_model *)opaque)->recipe;
}

const qe_model_ops *qe_model_table(void) {
    static const qe_model_ops table = {
        .size = sizeof(qe_model_ops),
        .weight_count = table_weight_count,
        .weight = table_weight,
        .weight_stage = table_weight_stage,
        .stages_max = table_stages_max,
        .slot_bytes = qe_model_slot_bytes,
        .work_bytes = table_work_bytes,
        .workspace_bytes = table_workspace_bytes,
        .constant_bytes = table_constant_bytes,
        .constant_fill = table_constant_fill,
        .cache_code_bytes = table_cache_code_bytes,
        .cache_operand_bytes = table_cache_operand_bytes,
        .cache_scale_count = table_cache_scale_count,
        .parameter_count = table_parameter_count,
        .parameter = table_parameter,
        .tokens = table_tokens,
        .recipe = table_recipe,
        .lower = qe_model_lower,
    };
    return &table;
}
