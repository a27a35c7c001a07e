/* import.c - weights and Transformer Engine's scaling state into a snapshot. */
#include "cli/import.h"

#include <stdio.h>
#include <string.h>
#include "base/assert.h"
#include "qeffect/te_state.h"

typedef struct importing {
    qe_snapshot *snapshot;
    const qe_safetensors *file;
    qe_import_report *report;
    qe_rule *rule_out;
    qe_error *error_out;
} importing;

static qe_status breach(const importing *im, qe_rule rule, const char *name, const char *what) {
    *im->rule_out = rule;
    return qe_error_set(im->error_out, QE_CONTRACT,
                        "give weights under their Hugging Face names, and a CONFIG.yaml with their model's sizes",
                        "%s: %s %.96s %s", qe_rule_id(rule), qe_rule_sentence(rule), name, what);
}

static int fits(const qe_tensor *tensor, const qe_state_tensor *wanted) {
    int is_float = tensor->dtype == QE_DTYPE_F32 || tensor->dtype == QE_DTYPE_BF16 || tensor->dtype == QE_DTYPE_F16;
    uint64_t rows = wanted->rows == 0 ? wanted->columns : wanted->rows;
    return is_float && tensor->rank == (wanted->rows == 0 ? 1u : 2u) && tensor->shape[0] == rows &&
           (wanted->rows == 0 || tensor->shape[1] == wanted->columns);
}

/* Every half is a float: the exponent is moved, and a subnormal one is scaled up first. */
static float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 0x3FFu, bits;
    float value;
    if (exponent == 0) {
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | fraction << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float value_at(const qe_tensor *tensor, uint64_t index) {
    uint16_t half;
    float value;
    if (tensor->dtype == QE_DTYPE_F32) return memcpy(&value, (const float *)tensor->data + index, sizeof value), value;
    memcpy(&half, (const uint16_t *)tensor->data + index, sizeof half);
    if (tensor->dtype == QE_DTYPE_F16) return from_half(half);
    uint32_t bits = (uint32_t)half << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static qe_status import_parameter(const importing *im, uint32_t index) {
    const qe_state_tensor *wanted = &im->snapshot->tensors[index];
    const qe_tensor *tensor = qe_safetensors_find(im->file, wanted->name);
    float *values = qe_snapshot_values(im->snapshot, index);
    if (tensor == NULL) return breach(im, QE_RULE_CHECKPOINT_MISSING, wanted->name, "is not in the file.");
    if (!fits(tensor, wanted)) return breach(im, QE_RULE_CHECKPOINT_SHAPE, wanted->name, "is of another one.");
    uint64_t count = (wanted->rows == 0 ? 1 : wanted->rows) * wanted->columns;
    for (uint64_t i = 0; i < count; i++) values[i] = value_at(tensor, i);
    return QE_OK;
}

/* "model.layers.0.mlp.down_proj.dy.scale" -> "model.layers.0.mlp.down_proj" */
static void module_of(const char *name, char module_out[QE_NAME_BYTES + 16]) {
    size_t length = strlen(name);
    for (int points = 0; length > 0 && points < 2; length--) points += name[length - 1] == '.';
    snprintf(module_out, QE_NAME_BYTES + 16, "%.*s", (int)length, name);
}

/* Index 0 is the current row, and 0 between folds; the newest is the last. */
static void take_newest(const qe_te_scale *from, float *to, uint64_t length) {
    uint64_t kept = (from->length < length ? from->length : length) - 1;
    for (uint64_t age = 0; age < kept; age++)
        to[length - 1 - age] = from->history[(from->length - 1 - age) * from->stride];
}

/* A scale and, behind it, its history. */
static qe_status import_scale(const importing *im, uint32_t index) {
    static const qe_te_role roles[QE_SCALE_ROLES] = {
        [QE_SCALE_X] = QE_TE_INPUT, [QE_SCALE_W] = QE_TE_WEIGHT, [QE_SCALE_DY] = QE_TE_GRAD_OUTPUT};
    const qe_state_tensor *scale = &im->snapshot->tensors[index], *history = scale + 1;
    char module[QE_NAME_BYTES + 16];
    qe_te_scale found;
    int is_there = 0;
    QE_ASSERT(history->kind == QE_STATE_HISTORY);
    module_of(scale->name, module);
    im->report->scales++;
    QE_TRY(qe_te_scale_find(im->file, module, roles[scale->role], &found, &is_there, im->error_out));
    if (!is_there) return im->report->pickled += scale->role == 0 && qe_te_is_pickled(im->file, module), QE_OK;
    if (!(found.scale > 0)) return breach(im, QE_RULE_CHECKPOINT_SHAPE, scale->name, "is not above 0.");
    im->report->scales_found++;
    im->report->pending += found.pending != 0;
    *qe_snapshot_values(im->snapshot, index) = found.scale;
    take_newest(&found, qe_snapshot_values(im->snapshot, index + 1), history->columns);
    return QE_OK;
}

qe_status qe_snapshot_import(qe_snapshot *snapshot, const qe_safetensors *file, qe_import_report *report_out,
                             qe_rule *rule_out, qe_error *error_out) {
    importing im = {snapshot, file, report_out, rule_out, error_out};
    *report_out = (qe_import_report){0};
    *rule_out = QE_RULE_NONE;
    for (uint32_t i = 0; i < snapshot->tensor_count; i++) {
        qe_state_kind kind = snapshot->tensors[i].kind;
        if (kind == QE_STATE_PARAMETER) QE_TRY(import_parameter(&im, i));
        if (kind == QE_STATE_SCALE) QE_TRY(import_scale(&im, i));
    }
    return QE_OK;
}
