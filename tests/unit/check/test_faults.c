/* What breaks a declaration is found and named: an inner backend whose kernels do more than they should. */
#include "check_world.h"

typedef enum fault { FAULT_NONE, FAULT_FLIP, FAULT_ZERO, FAULT_READ_OTHER, FAULT_READ_OWN } fault;

/* What a kernel of the inner backend does besides its work, in ops of one kind and layer. Set while no team runs. */
static struct {
    fault what;
    qe_op_kind kind;
    int layer;
    size_t behind_bytes;    /* flip, zero: how far behind the result */
    const float *elsewhere; /* read other: the weights of a linear of layer 1 */
} planted;

static int is_planted(const qe_op *op, fault what) {
    return planted.what == what && op->kind == planted.kind && (int)op->layer == planted.layer;
}

static void beside_linear(const qe_op *op) {
    enum { FFN = 48 }; /* down_proj alone has as many inputs: its result is the stage's */
    const qe_args_linear *args = &op->args.linear;
    const int down = args->in == FFN;
    float *y = args->y;
    volatile char *behind = (char *)(y + (size_t)args->rows * args->out) + planted.behind_bytes;
    if (down && is_planted(op, FAULT_FLIP)) *behind = (char)(*behind ^ 1);
    if (down && is_planted(op, FAULT_ZERO)) *behind = 0;
    if (is_planted(op, FAULT_READ_OTHER)) memcpy(&y[5], &planted.elsewhere[2], sizeof(float));
    if (planted.what == FAULT_READ_OTHER && op->layer == 1) planted.elsewhere = args->w.codes;
}

static qe_status faulty_run(qe_device *device, const qe_op *op, qe_error *error_out) {
    const int reads_own = is_planted(op, FAULT_READ_OWN);
    const float own = reads_own ? op->args.linear_weight_grad.grad[3] : 0;
    qe_status status = qe_host_backend()->run(device, op, error_out);
    if (op->kind == QE_OP_LINEAR) beside_linear(op);
    if (reads_own) op->args.linear_weight_grad.grad[3] += own;
    return status;
}

static void open_faulty(world *w, check_devices *devices, qe_backend *inner, world_options options) {
    memset(&planted, 0, sizeof planted);
    *inner = *qe_host_backend();
    inner->run = faulty_run;
    devices->inner = inner;
    options = checked(options, devices);
    world_open(w, &options);
    world_step(w, 0); /* clean so far */
}

static void contains(const char *text, const char *part) {
    if (strstr(text, part) == NULL) fail_msg("'%s' does not say '%s'", text, part);
}

/* The step fails with these words and leaves the state as it was; the next one, without the fault, trains. */
static void is_found(world *w, const char *const *words) {
    world_hash before = world_state(w);
    assert_int_equal(world_try_step(w, 0), QE_ERROR_DEVICE);
    for (; *words != NULL; words++) contains(w->error.message, *words);
    assert_true(strlen(w->error.remedy) > 0);
    print_message("%s\n", w->error.message);
    assert_string_equal(before.text, world_state(w).text);
    planted.what = FAULT_NONE;
    world_step(w, 0);
}

/* down_proj of the last layer of stage 0 writes the slot that is sent; a line for its witness ends the slot. */
static void plant_behind_output(fault what, size_t behind_bytes) {
    planted.what = what;
    planted.kind = QE_OP_LINEAR;
    planted.layer = 2;
    planted.behind_bytes = behind_bytes;
}

static void a_write_one_byte_behind_a_slot_is_found_and_named(void **state) {
    (void)state;
    static const struct {
        size_t behind_bytes;
        const char *name;
    } places[] = {{0, "byte 0 of out_f.s0.0 (witness)"}, {8, "behind the end of out_f.s0.0 (witness)"},
                  {QE_ALIGN_BYTES, "byte 0 of out_f.s0.1"}};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        world w;
        check_devices devices = {0};
        qe_backend inner;
        open_faulty(&w, &devices, &inner, (world_options){.schedule = "1f1b", .ranks = 2});
        plant_behind_output(FAULT_FLIP, places[i].behind_bytes);
        const char *const words[] = {"linear (layer 2) wrote what it did not declare", places[i].name, NULL};
        is_found(&w, words);
        world_close(&w);
    }
}

static void a_write_behind_the_last_slot_of_a_pool_is_found_in_its_guard(void **state) {
    (void)state;
    world w;
    check_devices devices = {0};
    qe_backend inner;
    open_faulty(&w, &devices, &inner, (world_options){.schedule = "gpipe", .ranks = 2, .microbatches = 1});
    plant_behind_output(FAULT_FLIP, QE_ALIGN_BYTES + 3);
    const char *const words[] = {"linear (layer 2) wrote what it did not declare", "behind the end of out_f.s0.0",
                                 NULL};
    is_found(&w, words);
    world_close(&w);
}

/* The guard holds zeros: only where poison lies instead does such a write show. */
static void a_write_of_what_was_there_already_is_found_on_poison(void **state) {
    (void)state;
    world w;
    check_devices devices = {0};
    qe_backend inner;
    open_faulty(&w, &devices, &inner, (world_options){.schedule = "gpipe", .ranks = 2, .microbatches = 1});
    plant_behind_output(FAULT_ZERO, QE_ALIGN_BYTES + 3);
    const char *const words[] = {"linear (layer 2) wrote what it did not declare", "behind the end of out_f.s0.0",
                                 NULL};
    is_found(&w, words);
    world_close(&w);
}

static void an_undeclared_read_is_found_with_what_it_reads_and_what_it_changes(void **state) {
    (void)state;
    world w;
    check_devices devices = {0};
    qe_backend inner;
    open_faulty(&w, &devices, &inner, (world_options){.schedule = "zbh1", .ranks = 2});
    planted.what = FAULT_READ_OTHER;
    planted.kind = QE_OP_LINEAR;
    planted.layer = 2;
    const char *const words[] = {"linear (layer 2) read what it did not declare",
                                 "byte 8 of model.layers.0.mlp.down_proj.cache (operand)", "it changes byte",
                                 " of I.s0.", NULL};
    is_found(&w, words);
    world_close(&w);
}

/* The first deposit of a step sets: it must not see what the gradient held. */
static void a_first_deposit_that_adds_to_what_was_there_is_found(void **state) {
    (void)state;
    world w;
    check_devices devices = {0};
    qe_backend inner;
    open_faulty(&w, &devices, &inner, (world_options){.schedule = "zbh1", .ranks = 2});
    planted.what = FAULT_READ_OWN;
    planted.kind = QE_OP_LINEAR_WEIGHT_GRAD;
    planted.layer = 1;
    const char *const words[] = {"linear_weight_grad (layer 1) read what it did not declare", "model.layers.0.",
                                 ".grad; it changes byte", NULL};
    is_found(&w, words);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_write_one_byte_behind_a_slot_is_found_and_named),
        cmocka_unit_test(a_write_behind_the_last_slot_of_a_pool_is_found_in_its_guard),
        cmocka_unit_test(a_write_of_what_was_there_already_is_found_on_poison),
        cmocka_unit_test(an_undeclared_read_is_found_with_what_it_reads_and_what_it_changes),
        cmocka_unit_test(a_first_deposit_that_adds_to_what_was_there_is_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
