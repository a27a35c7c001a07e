/* check_gpu_words.c - guards on the device: a write that nobody declared lands on an object's witness word between two
 * launches of a step. It is trapped by the object's rule before the commit, the state is that of the step before, and
 * the next step has the bits of a run without it. tests/unit/step/test_guard.c shows the same on the host. */
#include "cuda/check_gpu.h"

#include "backend/cuda/device.h"
#include "step/guard.h"
#include "step_world.h"

static const struct {
    const char *object;
    qe_rule rule;
} victims[] = {
    {"I.s0.0", QE_RULE_SLOT_STALE},
    {"X.s0.0", QE_RULE_SLOT_STALE},
    {"model.layers.1.self_attn.qkv_proj", QE_RULE_WEIGHT_VERSION},
    {"model.norm", QE_RULE_WEIGHT_VERSION},
    {"model.layers.2.mlp.down_proj.dy", QE_RULE_SCALE_EPOCH},
    {"model.layers.0.mlp.gate_up_proj.cache", QE_RULE_CACHE_STALE},
};
enum { VICTIMS = sizeof victims / sizeof *victims, LAUNCH = 4 /* of a step, before which the write comes */ };

static const uint64_t garbage = UINT64_C(0x0123456789abcdef);
static struct {
    uint32_t countdown; /* launches until the write; 0: none comes */
    uint64_t *word;
} rogue;

static qe_status launch_with_rogue(qe_graph *graph, qe_stream *stream) {
    if (rogue.countdown > 0 && --rogue.countdown == 0)
        assert_int_equal(cudaMemcpyAsync(rogue.word, &garbage, sizeof garbage, cudaMemcpyHostToDevice, stream->stream),
                         cudaSuccess);
    return qe_cuda_backend()->graph->launch(graph, stream);
}

static void opened(qe_device *device, const void *context) { (void)device, (void)context; }

static void team_open(world *w, qe_capture capture) {
    static const qe_model_config model = {.layers = 4, .hidden = 128, .heads = 2, .kv_heads = 1, .ffn = 192,
                                          .vocab = 256, .sequence = 64, .sequences = 1, .rope_theta = 10000.0f,
                                          .norm_epsilon = 1e-5f};
    static qe_backend backend;
    static qe_graph_ops graph;
    graph = *qe_cuda_backend()->graph;
    graph.launch = launch_with_rogue;
    backend = *qe_cuda_backend();
    backend.graph = &graph;
    const world_options options = {.schedule = "1f1b", .capture = capture, .config = &model, .backend = &backend,
                                   .comm = qe_cuda_comm(), .ranks_create = qe_cuda_world_create,
                                   .ranks_destroy = qe_cuda_world_destroy, .opened = opened};
    world_open(w, &options);
}

static uint32_t object_named(const world *w, const char *name) {
    const qe_program *program = qe_team_program(w->team, 0);
    for (uint32_t i = 0; i < program->object_count; i++)
        if (strcmp(program->objects[i].name, name) == 0) return i;
    printf("no object %s\n", name);
    exit(EXIT_FAILURE);
}

static void overwrite(world *w, uint32_t victim, overwritten *words_out) {
    const uint32_t object = object_named(w, victims[victim].object);
    const world_hash before = world_state(w);
    rogue.word = w->team->ranks[0].train.words[object];
    rogue.countdown = LAUNCH;
    const qe_status status = world_try_step(w, 0);
    const qe_violation *found = &w->result.violations.record[0];
    const int told = status == QE_CONTRACT && found->rule == victims[victim].rule && found->object == object;
    const int kept = strcmp(before.text, world_state(w).text) == 0;
    words_out->trapped += told != 0;
    words_out->state_kept += kept != 0;
    if (!told || !kept)
        fprintf(stderr, "%s: %s, %s\n", victims[victim].object, qe_status_name(status),
                status == QE_CONTRACT ? qe_rule_id(found->rule) : w->error.message);
}

overwritten words_overwritten(qe_capture capture) {
    world w, quiet;
    overwritten result = {.capture = (int)capture, .tried = VICTIMS};
    rogue.countdown = 0;
    team_open(&quiet, capture);
    team_open(&w, capture);
    (void)world_step(&quiet, 0);
    (void)world_step(&w, 0);
    for (uint32_t i = 0; i < VICTIMS; i++) {
        overwrite(&w, i, &result);
        (void)world_step(&quiet, 0);
        result.went_on += world_try_step(&w, 0) == QE_OK && strcmp(world_state(&w).text, world_state(&quiet).text) == 0;
    }
    world_close(&w);
    world_close(&quiet);
    return result;
}
