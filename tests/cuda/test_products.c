/* What names a product and what is in a file of choices: no GPU is needed. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/cuda/attention_choice.h"
#include "backend/cuda/choices.h"
#include "backend/cuda/fused_choice.h"
#include "backend/cuda/further.h"
#include "backend/cuda/input_grad_swiglu.h"
#include "backend/cuda/linear_swiglu.h"
#include "backend/cuda/lt.h"
#include "backend/cuda/product.h"

static const qe_choice_maker here = {"cuBLASLt 13.1.0", "NVIDIA H200", "cuDNN 9.14.0, frontend 1.32.0"};

static qe_qtensor tensor_of(qe_format format, uint32_t rows, uint32_t columns, uint8_t transposed) {
    return (qe_qtensor){.rows = rows, .columns = columns, .format = (uint8_t)format, .transposed = transposed};
}

static qe_op linear(qe_format x, qe_format w, uint32_t rows, uint32_t in, uint32_t out, const void *residual) {
    return (qe_op){.kind = QE_OP_LINEAR,
                   .args.linear = {.x = tensor_of(x, rows, in, 0), .w = tensor_of(w, out, in, 0), .rows = rows,
                                   .in = in, .out = out, .residual = residual,
                                   .accumulation = QE_ACCUMULATE_FAST}};
}

static qe_op weight_grad(qe_format dy, qe_format x, uint8_t transposed) {
    return (qe_op){.kind = QE_OP_LINEAR_WEIGHT_GRAD,
                   .args.linear_weight_grad = {.x = tensor_of(x, 64, 32, transposed),
                                               .dy = tensor_of(dy, 64, 48, transposed), .rows = 64, .in = 32,
                                               .out = 48, .accumulation = QE_ACCUMULATE_SPLIT}};
}

static void key_is(const qe_op *op, const char *wanted) {
    qe_product product, again;
    char key[QE_PRODUCT_KEY_BYTES];
    assert_int_equal(qe_product_of(op, &product, NULL), QE_OK);
    qe_product_key(&product, key);
    assert_string_equal(key, wanted);
    assert_int_equal(qe_product_parse(key, &again, NULL), QE_OK);
    assert_memory_equal(&product, &again, sizeof product);
}

static void a_product_is_named_by_all_that_its_algorithm_depends_on(void **state) {
    (void)state;
    const qe_op forward = linear(QE_FORMAT_E4M3, QE_FORMAT_E4M3, 2048, 4096, 6144, NULL);
    const qe_op added = linear(QE_FORMAT_E4M3, QE_FORMAT_E4M3, 2048, 4096, 6144, &here);
    const qe_op wide = linear(QE_FORMAT_BF16, QE_FORMAT_BF16, 33, 7, 5, NULL);
    const qe_op codes = weight_grad(QE_FORMAT_E5M2, QE_FORMAT_E4M3, 1);
    const qe_op values = weight_grad(QE_FORMAT_BF16, QE_FORMAT_BF16, 0);
    key_is(&forward, "linear m2048 n6144 k4096 tn e4m3 e4m3 fast");
    key_is(&added, "linear m2048 n6144 k4096 tn e4m3 e4m3 fast add");
    key_is(&wide, "linear m33 n5 k7 tn bf16 bf16 split");
    key_is(&codes, "linear_weight_grad m48 n32 k64 tn e5m2 e4m3 split add");
    key_is(&values, "linear_weight_grad m48 n32 k64 nt bf16 bf16 split add");
}

static void an_input_gradient_of_values_reads_the_weight_as_it_lies(void **state) {
    (void)state;
    qe_op op = {.kind = QE_OP_LINEAR_INPUT_GRAD,
                .args.linear_input_grad = {.dy = tensor_of(QE_FORMAT_BF16, 64, 48, 0),
                                           .w = tensor_of(QE_FORMAT_BF16, 48, 32, 0), .rows = 64, .in = 32,
                                           .out = 48}};
    key_is(&op, "linear_input_grad m64 n32 k48 nn bf16 bf16 split");
    op.args.linear_input_grad.dy.format = QE_FORMAT_E5M2;
    op.args.linear_input_grad.w = tensor_of(QE_FORMAT_E4M3, 48, 32, 1);
    key_is(&op, "linear_input_grad m64 n32 k48 tn e5m2 e4m3 fast");
}

static void the_longest_key_fits(void **state) {
    (void)state;
    const qe_product product = {.m = UINT32_MAX, .n = UINT32_MAX, .k = UINT32_MAX, .kind = QE_OP_LINEAR_WEIGHT_GRAD,
                                .first = QE_FORMAT_E5M2, .accumulation = QE_ACCUMULATE_SPLIT, .adds = 1};
    char key[QE_PRODUCT_KEY_BYTES];
    memset(key, 'x', sizeof key);
    qe_product_key(&product, key);
    assert_true(strlen(key) < sizeof key - 1);
    assert_string_equal(key + strlen(key) - 4, " add");
}

static void block_codes_are_decoded_into_bf16_first(void **state) {
    (void)state;
    qe_op op = weight_grad(QE_FORMAT_E4M3, QE_FORMAT_E4M3, 0);
    op.args.linear_weight_grad.x.blocking = op.args.linear_weight_grad.dy.blocking = QE_BLOCKING_COLUMN;
    op.args.linear_weight_grad.scratch_x = (void *)(uintptr_t)64;
    op.args.linear_weight_grad.scratch_dy = (void *)(uintptr_t)128;
    qe_product_data data;
    key_is(&op, "linear_weight_grad m48 n32 k64 nt bf16 bf16 split add");
    qe_product_data_of(&op, &data);
    assert_ptr_equal(data.first, op.args.linear_weight_grad.scratch_dy);
    assert_ptr_equal(data.second, op.args.linear_weight_grad.scratch_x);
    assert_null(data.first_scale);
}

static void what_no_matrix_unit_takes_is_refused_in_words(void **state) {
    (void)state;
    const qe_op cases[] = {linear(QE_FORMAT_E5M2, QE_FORMAT_E5M2, 64, 64, 64, NULL),
                           linear(QE_FORMAT_E4M3, QE_FORMAT_E4M3, 60, 64, 64, NULL),
                           linear(QE_FORMAT_E4M3, QE_FORMAT_BF16, 64, 64, 64, NULL),
                           weight_grad(QE_FORMAT_E5M2, QE_FORMAT_E4M3, 0)};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        qe_product product;
        qe_error error = {0};
        assert_int_equal(qe_product_of(&cases[i], &product, &error), QE_ERROR_UNSUPPORTED);
        assert_true(error.message[0] && error.remedy[0]);
    }
    const qe_op copy = {.kind = QE_OP_COPY};
    qe_product product;
    assert_int_equal(qe_product_of(&copy, &product, NULL), QE_ERROR_ARGUMENT);
}

static void other_words_name_no_product(void **state) {
    (void)state;
    static const char *const keys[] = {
        "",
        "linear",
        "linear m1 n2 k3 tn e4m3 e4m3 fast ",
        "linear m1 n2 k3 tn e4m3 e4m3 fast  add",
        "linear m01 n16 k16 tn e4m3 e4m3 fast",
        "linear m16 n16 k16 tn e4m3 e4m3 quick",
        "copy m16 n16 k16 tn e4m3 e4m3 fast",
        "linear m16 n16 k16 xy e4m3 e4m3 fast",
        "linear m-1 n16 k16 tn e4m3 e4m3 fast",
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; ++i) {
        qe_product product;
        assert_int_equal(qe_product_parse(keys[i], &product, NULL), QE_ERROR_FORMAT);
    }
}

/* The name of the kernel of ours that takes it; "" where there is none. */
static void own_name(const char *key, char name[QE_FURTHER_NAME_BYTES]) {
    qe_algorithm all[QE_FURTHER_CANDIDATES_MAX];
    qe_product product;
    assert_int_equal(qe_product_parse(key, &product, NULL), QE_OK);
    const uint32_t count = qe_further_candidates(&product, all);
    name[0] = '\0';
    for (uint32_t i = 0; i < count && strncmp(name, "ours", 4) != 0; ++i) {
        assert_true(qe_further_owns(&all[i]));
        qe_further_name(&all[i], name);
    }
    if (strncmp(name, "ours", 4) != 0) name[0] = '\0';
}

static void split_products_of_codes_have_a_kernel_of_ours(void **state) {
    (void)state;
    static const struct {
        const char *key, *name;
    } cases[] = {
        {"linear_input_grad m2048 n4096 k6144 tn e5m2 e4m3 split", "ours 128x128x128 2x1 cooperative"},
        {"linear_input_grad m16 n16 k16 tn e4m3 e4m3 split", "ours 128x128x128 2x1 cooperative"},
        {"linear m2048 n4096 k6144 tn e4m3 e4m3 split", "ours 128x128x128 2x1 cooperative"},
        {"linear m2048 n4096 k4096 tn e4m3 e4m3 fast", ""},
        {"linear m2048 n4096 k4096 tn e4m3 e4m3 split add", ""},
        {"linear_input_grad m2048 n4096 k6144 tn e5m2 e4m3 fast", ""},
        {"linear_weight_grad m4096 n4096 k2048 tn e5m2 e4m3 split add", "ours 128x128x128 2x1 cooperative"},
        {"linear_weight_grad m16 n16 k16 tn e4m3 e4m3 split add", "ours 128x128x128 2x1 cooperative"},
        {"linear_weight_grad m4096 n4096 k2048 tn e5m2 e4m3 fast add", ""},
        {"linear m2048 n4096 k4096 tn bf16 bf16 split", ""},
        {"linear m4294967280 n16 k16 tn e4m3 e4m3 split", ""}, /* coordinates have a sign */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        char name[QE_FURTHER_NAME_BYTES];
        own_name(cases[i].key, name);
        assert_string_equal(name, cases[i].name);
    }
}

static void a_way_of_two_parts_survives_its_words(void **state) {
    (void)state;
    qe_op op = linear(QE_FORMAT_E4M3, QE_FORMAT_E4M3, 2048, 4096, 28672, NULL);
    op.args.linear.target.format = QE_FORMAT_E5M2;
    qe_product product;
    qe_fused_shape shape, again;
    qe_cuda_choice choice;
    assert_int_equal(qe_product_of(&op, &product, NULL), QE_OK);
    qe_fused_shape_of(&op, &product, &shape);
    for (int i = QE_FUSED_APART; i <= QE_FUSED_WHOLE; ++i) {
        qe_fused_way way;
        qe_fused_choice_make(&shape, (qe_fused_way)i, &choice);
        assert_string_equal(choice.key, "fused linear m2048 n28672 k4096 tn e4m3 e4m3 fast to e5m2");
        assert_true(qe_fused_choice_is(choice.key));
        assert_int_equal(qe_fused_choice_parse(&choice, &again, &way, NULL), QE_OK);
        assert_memory_equal(&shape, &again, sizeof shape);
        assert_int_equal(way, i);
    }
    choice.words[1]++; /* of a kernel that is another */
    qe_error error = {0};
    assert_int_equal(qe_fused_choice_parse(&choice, &again, &(qe_fused_way){QE_FUSED_APART}, &error),
                     QE_ERROR_UNSUPPORTED);
    assert_true(error.message[0] && error.remedy[0]);
}

static void a_product_with_rope_has_a_way_of_its_own(void **state) {
    (void)state;
    const qe_op plain = linear(QE_FORMAT_E4M3, QE_FORMAT_E4M3, 2048, 4096, 6144, NULL);
    const qe_op op = {.kind = QE_OP_LINEAR_ROPE, .args.linear_rope.head_dim = 128};
    qe_product product;
    qe_fused_shape shape, again;
    qe_fused_way way;
    qe_cuda_choice choice;
    assert_int_equal(qe_product_of(&plain, &product, NULL), QE_OK);
    qe_fused_shape_of(&op, &product, &shape);
    qe_fused_choice_make(&shape, QE_FUSED_WHOLE, &choice);
    assert_string_equal(choice.key, "fused linear m2048 n6144 k4096 tn e4m3 e4m3 fast to rope 128");
    assert_int_equal(qe_fused_choice_parse(&choice, &again, &way, NULL), QE_OK);
    assert_memory_equal(&shape, &again, sizeof shape);
    assert_int_equal(way, QE_FUSED_WHOLE);
}

/* As heads of another width are another race; a file of before names none. */
static void a_product_with_rope_is_named_by_the_width_of_its_heads(void **state) {
    (void)state;
    qe_cuda_choice choice = {.key = "fused linear m2048 n6144 k4096 tn e4m3 e4m3 fast to rope"};
    qe_fused_shape shape;
    qe_fused_way way;
    assert_int_equal(qe_fused_choice_parse(&choice, &shape, &way, NULL), QE_OK);
    assert_int_equal(shape.head_dim, 0);
    qe_fused_choice_make(&(qe_fused_shape){.product = {.m = UINT32_MAX, .n = UINT32_MAX, .k = UINT32_MAX,
                                                       .kind = QE_OP_LINEAR, .first_along = 1, .second_along = 1,
                                                       .accumulation = QE_ACCUMULATE_SPLIT},
                                           .result = QE_FUSED_ROPE, .head_dim = UINT32_MAX},
                         QE_FUSED_APART, &choice); /* the longest */
    assert_int_equal(choice.key[strlen(choice.key) - 1], '5');
}

static void other_words_name_no_op_of_two_parts(void **state) {
    (void)state;
    static const char *const keys[] = {
        "fused ",
        "linear m16 n16 k16 tn e4m3 e4m3 fast to e4m3",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast to bf16",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast to e4m3 ",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast add to e4m3",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast to e4m3 to e4m3",
        "fused linear_weight_grad m16 n16 k16 tn e5m2 e4m3 split to e4m3",
        "fused linear_input_grad m16 n16 k16 tn e5m2 e4m3 split to rope",
        "fused linear_input_grad m16 n16 k16 tn e5m2 e4m3 split to rope 16",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast to e4m3 16",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast to rope 0",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast to rope 12",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast to rope 016",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast to rope  16",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast to rope 16 ",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast to rope 4294967312",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast to rope -4294967280",
        "fused linear m16 n16 k16 tn e4m3 e4m3 fast to ",
        "fused fused linear m16 n16 k16 tn e4m3 e4m3 fast to e4m3",
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; ++i) {
        qe_cuda_choice choice = {.workspace_bytes = 0};
        qe_fused_shape shape;
        qe_fused_way way;
        memcpy(choice.key, keys[i], strlen(keys[i]));
        assert_int_equal(qe_fused_choice_parse(&choice, &shape, &way, NULL), QE_ERROR_FORMAT);
    }
}

static qe_cuda_choice choice_make(uint64_t seed) {
    qe_cuda_choice choice = {.key = "linear m64 n64 k64 tn e4m3 e4m3 fast", .workspace_bytes = 33554432};
    for (uint64_t i = 0; i < 8; ++i) choice.words[i] = (seed + i) * 0x9E3779B97F4A7C15u;
    return choice;
}

static void a_choice_survives_its_line(void **state) {
    (void)state;
    char line[QE_CHOICE_LINE_BYTES];
    const qe_cuda_choice choice = choice_make(1);
    qe_cuda_choice again;
    qe_choice_format(&here, &choice, line);
    assert_int_equal(line[strlen(line) - 1], '\n');
    line[strlen(line) - 1] = '\0';
    assert_int_equal(qe_choice_parse(&here, line, &again, NULL), QE_OK);
    assert_memory_equal(&choice, &again, sizeof choice);
}

/* A driver may give a device a name of 255 characters. */
static void the_longest_names_fit_a_line(void **state) {
    (void)state;
    char line[QE_CHOICE_LINE_BYTES], library[128], device[256];
    qe_cuda_choice choice = choice_make(1), again;
    memset(library, 'l', sizeof library), library[sizeof library - 1] = '\0';
    memset(device, 'd', sizeof device), device[sizeof device - 1] = '\0';
    memset(choice.key, 'k', sizeof choice.key - 1);
    choice.workspace_bytes = UINT64_MAX;
    const qe_choice_maker longest = {library, device, library};
    qe_choice_format(&longest, &choice, line);
    line[strlen(line) - 1] = '\0';
    assert_int_equal(qe_choice_parse(&longest, line, &again, NULL), QE_OK);
    assert_memory_equal(&choice, &again, sizeof choice);
}

static qe_status count_choice(void *context, const qe_cuda_choice *choice, qe_error *error_out) {
    (void)error_out;
    const qe_cuda_choice wanted = choice_make(++*(uint64_t *)context);
    assert_memory_equal(&wanted, choice, sizeof wanted);
    return QE_OK;
}

static void a_folder_is_no_file_of_choices(void **state) {
    (void)state;
    uint64_t count = 0;
    qe_error error = {0};
    assert_int_equal(qe_choices_scan("/tmp", &here, count_choice, &count, &error), QE_ERROR_IO);
    assert_non_null(strstr(error.message, strerror(EISDIR)));
    assert_non_null(strstr(error.remedy, "train.algorithms"));
    assert_string_equal(error.path, "/tmp");
    assert_int_equal(error.line, 0);
}

/* Writes a file and scans it; returns the status, and how many choices came before it ended. */
static qe_status scan(const char *text, uint64_t *count_out, qe_error *error_out) {
    char path[] = "/tmp/qe_choices_XXXXXX";
    const int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    assert_int_equal(write(descriptor, text, strlen(text)), (ssize_t)strlen(text));
    close(descriptor);
    *count_out = 0;
    const qe_status status = qe_choices_scan(path, &here, count_choice, count_out, error_out);
    if (status != QE_OK) assert_string_equal(error_out->path, path);
    unlink(path);
    return status;
}

static void a_file_is_read_line_by_line_and_a_bad_line_is_named(void **state) {
    (void)state;
    char lines[3][QE_CHOICE_LINE_BYTES], text[4 * QE_CHOICE_LINE_BYTES];
    uint64_t count;
    qe_error error = {0};
    for (uint64_t i = 0; i < 3; ++i) {
        const qe_cuda_choice choice = choice_make(i + 1);
        qe_choice_format(&here, &choice, lines[i]);
    }
    (void)snprintf(text, sizeof text, "qeffect choices 1\n%s%s%s", lines[0], lines[1], lines[2]);
    assert_int_equal(scan(text, &count, &error), QE_OK);
    assert_int_equal(count, 3);
    text[strlen(text) - 1] = '\0'; /* cut short */
    assert_int_equal(scan(text, &count, &error), QE_ERROR_CONFIG);
    assert_int_equal(error.line, 4);
    assert_int_equal(count, 2);
    lines[1][strlen(lines[1]) - 3] = 'g';
    (void)snprintf(text, sizeof text, "qeffect choices 1\n%s%s%s", lines[0], lines[1], lines[2]);
    assert_int_equal(scan(text, &count, &error), QE_ERROR_CONFIG);
    assert_int_equal(error.line, 3);
}

static void another_library_or_device_is_refused_and_named(void **state) {
    (void)state;
    char line[QE_CHOICE_LINE_BYTES], text[2 * QE_CHOICE_LINE_BYTES];
    const qe_choice_maker others[] = {{"cuBLASLt 13.2.0", "NVIDIA H200", here.attention},
                                      {"cuBLASLt 13.1.0", "NVIDIA H100 PCIe", here.attention}};
    const qe_cuda_choice choice = choice_make(1);
    for (size_t i = 0; i < 2; ++i) {
        uint64_t count;
        qe_error error = {0};
        qe_choice_format(&others[i], &choice, line);
        (void)snprintf(text, sizeof text, "qeffect choices 1\n%s", line);
        assert_int_equal(scan(text, &count, &error), QE_ERROR_UNSUPPORTED);
        assert_int_equal(error.line, 2);
        assert_non_null(strstr(error.message, i ? "H100" : "13.2.0"));
    }
}

static const qe_fused_shape FUSED = {
    .product = {.m = 2048, .n = 28672, .k = 4096, .kind = QE_OP_LINEAR, .first_along = 1, .second_along = 1},
    .result = QE_FUSED_E4M3};
static const qe_op ATTENTION = {
    .kind = QE_OP_ATTENTION_BACKWARD,
    .args.attention_backward = {
        .sequences = 2, .sequence = 2048, .heads = 32, .kv_heads = 8, .head_dim = 128, .deterministic = 1}};
static const qe_op ATTENTION_FORWARD = {
    .kind = QE_OP_ATTENTION,
    .args.attention = {
        .sequences = 2, .sequence = 2048, .heads = 32, .kv_heads = 8, .head_dim = 128, .deterministic = 1}};

static void choice_survives(const qe_op *op, qe_attention_algorithm algorithm, const char *key) {
    const qe_choice_maker other = {here.library, here.device, "cuDNN 9.19.0, frontend 1.32.0"};
    char line[QE_CHOICE_LINE_BYTES], copy[QE_CHOICE_LINE_BYTES];
    qe_cuda_choice choice, again;
    qe_op parsed;
    qe_attention_algorithm got;
    qe_attention_choice_make(op, algorithm, &choice);
    assert_string_equal(choice.key, key);
    qe_choice_format(&here, &choice, line);
    assert_int_equal(strncmp(line, here.attention, strlen(here.attention)), 0);
    line[strlen(line) - 1] = '\0';
    memcpy(copy, line, sizeof copy);
    assert_int_equal(qe_choice_parse(&here, line, &again, NULL), QE_OK);
    assert_memory_equal(&choice, &again, sizeof choice);
    assert_int_equal(qe_choice_parse(&other, copy, &again, NULL), QE_ERROR_UNSUPPORTED);
    assert_int_equal(qe_attention_choice_parse(&choice, &parsed, &got, NULL), QE_OK);
    assert_memory_equal(&parsed, op, sizeof parsed);
    assert_int_equal(got, algorithm);
}

static void a_choice_of_attention_survives_its_line_and_names_the_library_of_attention(void **state) {
    (void)state;
    for (int i = QE_ATTENTION_CUDNN; i <= QE_ATTENTION_OWN; ++i) {
        choice_survives(&ATTENTION, (qe_attention_algorithm)i, "attention_backward s2 t2048 h32 kv8 d128 fixed");
        choice_survives(&ATTENTION_FORWARD, (qe_attention_algorithm)i, "attention s2 t2048 h32 kv8 d128 fixed");
    }
}

static void a_choice_that_names_no_attention_or_another_algorithm_is_refused(void **state) {
    (void)state;
    static const char *const keys[] = {
        "attention_backward s2 t2048 h32 kv8 d128",         "attention_backward s2 t2048 h32 kv8 d128 fixed ",
        "attention_backward s2 t2048 h32 kv8 d128 other",   "attention_backward s02 t2048 h32 kv8 d128 fixed",
        "attention_backward s2 t2048 h32 kv8 d128 fixedly", "attention_backward s-2 t2048 h32 kv8 d128 fixed",
        "attention s2 t2048 h32 kv8 d128 any",              "attention  s2 t2048 h32 kv8 d128 fixed"};
    const qe_op *const ops[] = {&ATTENTION, &ATTENTION_FORWARD};
    qe_cuda_choice choice;
    qe_op op;
    qe_attention_algorithm algorithm;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; ++i) {
        qe_attention_choice_make(&ATTENTION, QE_ATTENTION_OWN, &choice);
        (void)snprintf(choice.key, sizeof choice.key, "%s", keys[i]);
        assert_int_equal(qe_attention_choice_parse(&choice, &op, &algorithm, NULL), QE_ERROR_FORMAT);
    }
    for (int word = 0; word < 16; ++word) {
        qe_attention_choice_make(ops[word / 8], QE_ATTENTION_OWN, &choice);
        choice.words[word % 8] += 1;
        assert_int_equal(qe_attention_choice_parse(&choice, &op, &algorithm, NULL), QE_ERROR_UNSUPPORTED);
    }
}

static qe_status fused_read(const qe_cuda_choice *choice, qe_error *error_out) {
    qe_fused_shape shape;
    qe_fused_way way;
    qe_op op;
    const qe_status status = qe_fused_choice_parse(choice, &shape, &way, error_out);
    if (status != QE_OK) return status;
    qe_fused_op_of(&shape, &op);
    const int fits = op.kind == QE_OP_LINEAR ? qe_linear_swiglu_fits(&op.args.linear)
                                             : qe_input_grad_swiglu_fits(&op.args.linear_input_grad);
    if (fits || way == QE_FUSED_APART) return QE_OK;
    return qe_error_set(error_out, QE_ERROR_UNSUPPORTED, "choose anew", "no kernel takes it");
}

/* As the device takes choices, without one. */
static qe_status choice_read(void *context, const qe_cuda_choice *choice, qe_error *error_out) {
    qe_product product;
    qe_op op;
    qe_attention_algorithm algorithm;
    ++*(uint64_t *)context;
    if (qe_fused_choice_is(choice->key)) return fused_read(choice, error_out);
    if (!qe_attention_choice_is(choice->key)) return qe_product_parse(choice->key, &product, error_out);
    const qe_status status = qe_attention_choice_parse(choice, &op, &algorithm, error_out);
    const int is_forward = status == QE_OK && op.kind == QE_OP_ATTENTION;
    if (status != QE_OK || (is_forward ? op.args.attention.heads : op.args.attention_backward.heads) > 0) return status;
    return qe_error_set(error_out, QE_ERROR_ARGUMENT, "read the file before anything is prepared", "no heads");
}

static qe_status bytes_scan(const char *bytes, size_t length, uint64_t *count_out, qe_error *error_out) {
    char path[] = "/tmp/qe_choices_XXXXXX";
    const int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    assert_int_equal(write(descriptor, bytes, length), (ssize_t)length);
    close(descriptor);
    *count_out = 0;
    const qe_status status = qe_choices_scan(path, &here, choice_read, count_out, error_out);
    unlink(path);
    return status;
}

/* A person wrote the file: whatever is wrong with it is no wrong use of the program, and there is a way out. */
static void refused_with_a_way_out(qe_status status, const qe_error *error) {
    assert_true(status == QE_ERROR_CONFIG || status == QE_ERROR_FORMAT || status == QE_ERROR_UNSUPPORTED);
    assert_true(error->status == status && error->line > 0 && error->message[0] && error->remedy[0]);
    assert_null(strstr(error->remedy, "before anything is prepared"));
}

static void what_is_wrong_with_a_line_is_the_files_and_has_a_way_out(void **state) {
    (void)state;
    static const char *const keys[] = {"fused linear m16 n16", "fused linear m0 n16 k16 tn e4m3 e4m3 fast to e4m3",
                                       "fused linear_input_grad m16 n16 k16 tn e5m2 e5m2 split to e5m2",
                                       "linear m1 n1", "linear m0 n16 k16 tn e4m3 e4m3 fast",
                                       "linear m15 n16 k16 tn e4m3 e4m3 fast", "linear m16 n16 k16 tn e5m2 e5m2 fast",
                                       "attention_backward s0 t0 h0 kv0 d0 fixed"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; ++i) {
        char line[QE_CHOICE_LINE_BYTES], text[2 * QE_CHOICE_LINE_BYTES];
        qe_cuda_choice choice;
        qe_error error = {0};
        uint64_t count;
        qe_attention_choice_make(&ATTENTION, QE_ATTENTION_OWN, &choice);
        (void)snprintf(choice.key, sizeof choice.key, "%s", keys[i]);
        qe_choice_format(&here, &choice, line);
        const int length = snprintf(text, sizeof text, "qeffect choices 1\n%s", line);
        const qe_status status = bytes_scan(text, (size_t)length, &count, &error);
        refused_with_a_way_out(status, &error);
        assert_int_equal(error.line, 2);
    }
}

static void whatever_bytes_are_read_or_refused_with_a_way_out(void **state) {
    (void)state;
    enum { ROUNDS = 4000, ROOM = 4 * QE_CHOICE_LINE_BYTES };
    char good[ROOM], text[ROOM], line[QE_CHOICE_LINE_BYTES];
    qe_cuda_choice choice = choice_make(1);
    qe_choice_format(&here, &choice, line);
    const int half = snprintf(good, sizeof good, "qeffect choices 1\n%s", line);
    qe_attention_choice_make(&ATTENTION, QE_ATTENTION_OWN, &choice);
    qe_choice_format(&here, &choice, line);
    size_t whole = (size_t)(half + snprintf(good + half, sizeof good - (size_t)half, "%s", line));
    qe_fused_choice_make(&FUSED, QE_FUSED_WHOLE, &choice);
    qe_choice_format(&here, &choice, line);
    whole += (size_t)snprintf(good + whole, sizeof good - whole, "%s", line);
    uint64_t drawn = 1, count, refused = 0;
    for (int round = 0; round < ROUNDS; ++round) {
        size_t length = whole;
        qe_error error = {0};
        memcpy(text, good, whole);
        for (int change = 0; change <= round % 4; ++change) {
            drawn = drawn * 6364136223846793005u + 1442695040888963407u;
            text[(drawn >> 33) % whole] = (char)(drawn >> 24);
            if (drawn >> 60 == 0) length = (drawn >> 33) % whole; /* cut short */
        }
        const qe_status status = bytes_scan(text, length, &count, &error);
        if (status != QE_OK) refused_with_a_way_out(status, &error);
        refused += status != QE_OK;
    }
    assert_true(refused > ROUNDS / 2 && refused < ROUNDS);
}

static void memory_that_is_short_has_a_way_out(void **state) {
    (void)state;
    qe_error error = {0};
    assert_int_equal(qe_cuda_failure(cudaErrorMemoryAllocation, "tuning", &error), QE_ERROR_MEMORY);
    assert_true(error.message[0] && error.remedy[0]);
    assert_int_equal(qe_lt_error(CUBLAS_STATUS_ALLOC_FAILED, "opening", &error), QE_ERROR_MEMORY);
    assert_true(error.message[0] && error.remedy[0]);
}

/* A library refused, and the runtime knows of nothing. */
static void a_failure_without_a_code_is_no_error_of_that_name(void **state) {
    (void)state;
    qe_error error = {0};
    assert_int_equal(qe_cuda_failure(cudaSuccess, "racing", &error), QE_ERROR_DEVICE);
    assert_null(strstr(error.message, cudaGetErrorString(cudaSuccess)));
    assert_non_null(strstr(error.message, "racing: it was refused"));
}

/* In the runtime's words, or where it has none, as the driver's encoder tells only who asked it, in ours. */
static void a_kernel_of_ours_that_is_not_queued_says_why(void **state) {
    (void)state;
    static const struct {
        qe_status status;
        cudaError_t last;
        qe_status wanted;
        const char *words;
        int has_remedy;
    } refusals[] = {{QE_ERROR_LIMIT, cudaSuccess, QE_ERROR_UNSUPPORTED, "more blocks than a launch may have", 1},
                    {QE_ERROR_ARGUMENT, cudaSuccess, QE_ERROR_UNSUPPORTED, "adds nothing that lies elsewhere", 1},
                    {QE_ERROR_DEVICE, cudaSuccess, QE_ERROR_DEVICE, "copy engine", 1},
                    {QE_ERROR_DEVICE, cudaErrorMemoryAllocation, QE_ERROR_MEMORY, "out of memory", 1},
                    {QE_ERROR_DEVICE, cudaErrorIllegalAddress, QE_ERROR_DEVICE, "illegal memory access", 0}};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; ++i) {
        qe_error error = {0};
        assert_int_equal(qe_cuda_own_refused(refusals[i].status, refusals[i].last, "ours 128x128x128", &error),
                         refusals[i].wanted);
        assert_non_null(strstr(error.message, "ours 128x128x128"));
        assert_non_null(strstr(error.message, refusals[i].words));
        assert_int_equal(error.remedy[0] != '\0', refusals[i].has_remedy);
    }
}

/* Not there, and not cuDNN. */
static void a_cudnn_that_does_not_open_is_told_with_where_to_get_it(void **state) {
    (void)state;
    static const char *const names[] = {"/nonexistent/libcudnn.so.9", "libm.so.6"};
    char *const before = getenv("QE_CUDNN"), *const kept = before ? strdup(before) : NULL;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
        qe_cuda_attention *attention = NULL;
        qe_error error = {0};
        assert_int_equal(setenv("QE_CUDNN", names[i], 1), 0);
        assert_int_equal(qe_cuda_attention_create(NULL, &attention, &error), QE_ERROR_UNSUPPORTED);
        assert_null(attention);
        assert_non_null(strstr(error.message, names[i]));
        assert_non_null(strstr(error.remedy, "install cuDNN"));
    }
    if (kept)
        (void)setenv("QE_CUDNN", kept, 1);
    else
        (void)unsetenv("QE_CUDNN");
    free(kept);
}

static void what_is_no_file_of_choices_is_refused(void **state) {
    (void)state;
    uint64_t count;
    qe_error error = {0};
    assert_int_equal(scan("", &count, &error), QE_ERROR_CONFIG);
    assert_int_equal(scan("qeffect choices 2\n", &count, &error), QE_ERROR_CONFIG);
    assert_int_equal(error.line, 1);
    assert_int_equal(scan("qeffect choices 1\n\n", &count, &error), QE_ERROR_CONFIG);
    assert_int_equal(error.line, 2);
    assert_int_equal(qe_choices_scan("no/such/file", &here, count_choice, &count, &error), QE_ERROR_IO);
    assert_int_equal(scan("qeffect choices 1\n", &count, &error), QE_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_product_is_named_by_all_that_its_algorithm_depends_on),
        cmocka_unit_test(an_input_gradient_of_values_reads_the_weight_as_it_lies),
        cmocka_unit_test(the_longest_key_fits),
        cmocka_unit_test(block_codes_are_decoded_into_bf16_first),
        cmocka_unit_test(what_no_matrix_unit_takes_is_refused_in_words),
        cmocka_unit_test(other_words_name_no_product),
        cmocka_unit_test(split_products_of_codes_have_a_kernel_of_ours),
        cmocka_unit_test(a_way_of_two_parts_survives_its_words),
        cmocka_unit_test(a_product_with_rope_has_a_way_of_its_own),
        cmocka_unit_test(a_product_with_rope_is_named_by_the_width_of_its_heads),
        cmocka_unit_test(other_words_name_no_op_of_two_parts),
        cmocka_unit_test(a_choice_survives_its_line),
        cmocka_unit_test(the_longest_names_fit_a_line),
        cmocka_unit_test(a_folder_is_no_file_of_choices),
        cmocka_unit_test(a_file_is_read_line_by_line_and_a_bad_line_is_named),
        cmocka_unit_test(another_library_or_device_is_refused_and_named),
        cmocka_unit_test(a_choice_of_attention_survives_its_line_and_names_the_library_of_attention),
        cmocka_unit_test(a_choice_that_names_no_attention_or_another_algorithm_is_refused),
        cmocka_unit_test(what_is_wrong_with_a_line_is_the_files_and_has_a_way_out),
        cmocka_unit_test(whatever_bytes_are_read_or_refused_with_a_way_out),
        cmocka_unit_test(memory_that_is_short_has_a_way_out),
        cmocka_unit_test(a_failure_without_a_code_is_no_error_of_that_name),
        cmocka_unit_test(a_kernel_of_ours_that_is_not_queued_says_why),
        cmocka_unit_test(a_cudnn_that_does_not_open_is_told_with_where_to_get_it),
        cmocka_unit_test(what_is_no_file_of_choices_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
