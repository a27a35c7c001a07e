/* layer.h - one decoder layer on a device, with nothing around it: the middle one of three stages, lowered by the model
 * and bound to memory here. Several sets of slots take turns, so that nothing is warm in a cache. */
#ifndef QE_CLI_LAYER_H
#define QE_CLI_LAYER_H

#include "cli/device.h"
#include "qeffect/model.h"

enum {
    QE_LAYER_OPS_MAX = 64, /* of one set: about 25, and two guards */
    QE_LAYER_SETS_MAX = 16,
    QE_LAYER_GUARD_WORDS = 24 /* as many as an action of one layer has at each end */
};

typedef struct qe_layer_shape {
    const char *name;
    uint32_t hidden, ffn, heads, kv_heads, tokens;
} qe_layer_shape;

typedef struct qe_layer_options {
    qe_device_kind device;
    qe_recipe recipe;
    uint32_t sets;
    int all_fast;  /* every product accumulates fast; else only forward ones */
    int any_order; /* attention may add up in any order */
} qe_layer_options;

/* A set: slots of one microbatch, the ops of F, I and W bound to them, and one graph of all. */
typedef struct qe_layer_set {
    void *slot[QE_SLOT_KINDS];
    qe_op ops[QE_LAYER_OPS_MAX];
    uint32_t op_count, input_begin, weight_begin; /* F is [0, input_begin), I up to weight_begin, W the rest */
    qe_graph *graph;
} qe_layer_set;

typedef struct qe_layer {
    qe_layer_shape shape;
    qe_layer_options options;
    const qe_backend *backend;
    qe_device *device;
    qe_model *model;
    qe_stream *stream;
    qe_weight_place *places; /* [weight_count] */
    qe_scale_state *scales;  /* device */
    float *histories;        /* device */
    void *work, *constants;
    uint64_t *guard_memory; /* device: words, expected, launch, fault, table */
    qe_op head_guard, tail_guard, fill[QE_LAYER_OPS_MAX], fold;
    qe_scale_state *folded[4 * QE_SCALE_ROLES]; /* host's table of states on the device */
    uint32_t fill_count, fold_count;
    qe_layer_set set[QE_LAYER_SETS_MAX];
    void *taken[256]; /* everything that was allocated */
    uint32_t taken_count;
    uint64_t graph_bytes; /* of a set's graph, as the device tells it of many */
    double capture_s; /* recording and instantiating all sets' graphs */
    char identity[160];
} qe_layer;

/* Allocates, fills weights, inputs and gradients with random values, fills the caches, runs a few folded steps so that
 * scales fit, and records a graph per set. Owns: close it either way. */
qe_status qe_layer_open(qe_layer *layer, const qe_layer_shape *shape, const qe_layer_options *options,
                        qe_error *error_out);
void qe_layer_close(qe_layer *layer);

/* Submits one set: op by op, or as its graph. */
qe_status qe_layer_submit(qe_layer *layer, uint32_t set);
qe_status qe_layer_launch(qe_layer *layer, uint32_t set);
qe_status qe_layer_sync(qe_layer *layer, qe_error *error_out);

/* Arithmetic and bytes that an op cannot do without (each input read once, each output written once). */
typedef struct qe_layer_work {
    double flops, bytes;
} qe_layer_work;
qe_layer_work qe_layer_work_of(const qe_layer *layer, const qe_op *op);

#endif
