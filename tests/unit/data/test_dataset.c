/* Data sets: what is refused and why, and that every window is the tokens it should be, once per epoch. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <math.h>
#include <cmocka.h>
#include "base/hash.h"
#include "data/source.h"
#include "qeffect/data.h"

typedef struct fixture {
    char folder[64], path[96];
} fixture;

static int setup(void **state) {
    fixture *here = calloc(1, sizeof *here);
    snprintf(here->folder, sizeof here->folder, "/tmp/qe-data-XXXXXX");
    if (mkdtemp(here->folder) == NULL) return -1;
    snprintf(here->path, sizeof here->path, "%s/stream", here->folder);
    *state = here;
    return 0;
}

static int teardown(void **state) {
    fixture *here = *state;
    unlink(here->path);
    rmdir(here->path);
    int code = rmdir(here->folder);
    free(here);
    return code;
}

static void write_file(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static qe_dataset_options options_for(const char *path) {
    return (qe_dataset_options){.path = path, .format = QE_DATA_AUTO, .validation = 0, .sequence = 4, .vocab = 256};
}

/* Opens, expects a refusal, and returns the error. */
static qe_error refusal(qe_dataset_options options, qe_status expected) {
    qe_error error = {0};
    qe_dataset *dataset = NULL;
    assert_int_equal(qe_dataset_open(&options, &dataset, &error), expected);
    assert_null(dataset);
    assert_int_equal(error.status, expected);
    assert_true(error.remedy[0] != '\0');
    return error;
}

static qe_dataset *opened(qe_dataset_options options) {
    qe_error error = {0};
    qe_dataset *dataset = NULL;
    if (qe_dataset_open(&options, &dataset, &error) != QE_OK) fail_msg("%s", error.message);
    return dataset;
}

#define assert_says(text, part) \
    do { if (strstr((text), (part)) == NULL) fail_msg("\"%s\" does not say \"%s\"", (text), (part)); } while (0)

static void a_missing_file_is_refused_with_its_path(void **state) {
    fixture *here = *state;
    qe_error error = refusal(options_for(here->path), QE_ERROR_IO);
    assert_string_equal(error.path, here->path);
    assert_says(error.message, "No such file");
}

static void a_directory_is_refused(void **state) {
    fixture *here = *state;
    assert_says(refusal(options_for(here->folder), QE_ERROR_IO).message, "directory");
}

static void a_pipe_and_a_device_are_refused_without_waiting(void **state) {
    fixture *here = *state;
    assert_int_equal(mkfifo(here->path, 0600), 0);
    assert_says(refusal(options_for(here->path), QE_ERROR_IO).message, "not a regular file");
    assert_says(refusal(options_for("/dev/zero"), QE_ERROR_IO).message, "not a regular file");
}

static void an_empty_file_is_refused(void **state) {
    fixture *here = *state;
    write_file(here->path, "", 0);
    assert_says(refusal(options_for(here->path), QE_ERROR_FORMAT).message, "empty");
}

static void an_unreadable_file_is_refused(void **state) {
    fixture *here = *state;
    write_file(here->path, "abcdef", 6);
    assert_int_equal(chmod(here->path, 0), 0);
    int is_root = geteuid() == 0; /* root reads everything: the rule is tried as nobody */
    if (is_root) assert_int_equal(seteuid(65534), 0);
    qe_error error = refusal(options_for(here->path), QE_ERROR_IO);
    if (is_root) assert_int_equal(seteuid(0), 0);
    assert_says(error.message, "Permission denied");
    assert_says(error.remedy, "chmod");
}

static void a_huge_file_is_refused_before_it_is_read(void **state) {
    fixture *here = *state;
    write_file(here->path, "a", 1);
    if (truncate(here->path, (off_t)QE_DATA_BYTES_MAX + 1) != 0) skip();
    assert_says(refusal(options_for(here->path), QE_ERROR_LIMIT).message, "8 GiB");
}

static void bytes_that_are_not_utf8_are_named_by_offset_line_and_column(void **state) {
    fixture *here = *state;
    static const struct { const char *bytes; size_t size, offset; uint32_t line, column; } cases[] = {
        {"abc\xFF" "defghijkl", 13, 3, 1, 4},
        {"one\ntwo\nth\xE9 end of it", 20, 10, 3, 3},   /* Latin-1 */
        {"abcdefghijkl\xC0\x80", 14, 12, 1, 13},         /* overlong NUL */
        {"\xED\xA0\x80" "abcdefgh", 11, 0, 1, 1},        /* surrogate */
        {"abcdefg\xF4\x90\x80\x80", 11, 7, 1, 8},        /* above U+10FFFF */
        {"\xE0\x80\xAF" "abcdefgh", 11, 0, 1, 1},        /* overlong */
        {"\xF0\x80\x80\xAF" "abcdefgh", 12, 0, 1, 1},    /* overlong */
        {"abcdefgh\xE2\x82", 10, 8, 1, 9},               /* cut short */
        {"abcdefgh\x80", 9, 8, 1, 9},                    /* continuation alone */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(here->path, cases[i].bytes, cases[i].size);
        qe_error error = refusal(options_for(here->path), QE_ERROR_FORMAT);
        char offset[40];
        snprintf(offset, sizeof offset, "offset %zu ", cases[i].offset);
        assert_says(error.message, offset);
        assert_int_equal(error.line, cases[i].line);
        assert_int_equal(error.column, cases[i].column);
        assert_string_equal(error.path, here->path);
    }
}

static void every_character_of_unicode_is_accepted(void **state) {
    (void)state;
    qe_source source = {.data = malloc(8 + 4 * 0x110000)};
    assert_non_null(source.data);
    size_t n = 0;
    for (uint32_t c = 0; c < 0x110000; c++) {
        uint8_t *to = source.data + n;
        if (c >= 0xD800 && c < 0xE000) continue;
        if (c < 0x80) n += 1, to[0] = (uint8_t)c;
        else if (c < 0x800) n += 2, to[0] = (uint8_t)(0xC0 | c >> 6), to[1] = (uint8_t)(0x80 | (c & 63));
        else if (c < 0x10000)
            n += 3, to[0] = (uint8_t)(0xE0 | c >> 12), to[1] = (uint8_t)(0x80 | (c >> 6 & 63)),
            to[2] = (uint8_t)(0x80 | (c & 63));
        else
            n += 4, to[0] = (uint8_t)(0xF0 | c >> 18), to[1] = (uint8_t)(0x80 | (c >> 12 & 63)),
            to[2] = (uint8_t)(0x80 | (c >> 6 & 63)), to[3] = (uint8_t)(0x80 | (c & 63));
    }
    source.size_bytes = n;
    assert_int_equal(n, 128 + 1920 * 2 + (65536 - 2048 - 2048) * 3 + 1048576 * 4);
    assert_int_equal(qe_source_check_text(&source, "all", NULL), QE_OK);
    qe_source_deinit(&source);
}

static void a_text_too_short_for_one_window_is_refused(void **state) {
    fixture *here = *state;
    write_file(here->path, "abcd", 4);
    qe_error error = refusal(options_for(here->path), QE_ERROR_CONFIG);
    assert_says(error.message, "4 tokens are for training, one window needs 5");
    write_file(here->path, "abcde", 5);
    qe_dataset *dataset = opened(options_for(here->path));
    assert_int_equal(qe_dataset_describe(dataset).train_windows, 1);
    qe_dataset_close(dataset);
}

static void a_validation_part_too_short_for_one_window_is_refused(void **state) {
    fixture *here = *state;
    write_file(here->path, "abcdefghijklmnopqrst", 20);
    qe_dataset_options options = options_for(here->path);
    options.validation = 0.2; /* 4 tokens */
    qe_error error = refusal(options, QE_ERROR_CONFIG);
    assert_says(error.message, "4 tokens are for validation");
    assert_says(error.remedy, "data.validation: 0");
    options.validation = 0.25;
    qe_dataset *dataset = opened(options);
    assert_int_equal(qe_dataset_describe(dataset).validation_windows, 1);
    qe_dataset_close(dataset);
}

static void impossible_options_are_refused(void **state) {
    fixture *here = *state;
    write_file(here->path, "abcdefghijkl", 12);
    static const double fractions[] = {-0.1, 1, 2, (double)NAN};
    for (size_t i = 0; i < 4; i++) {
        qe_dataset_options options = options_for(here->path);
        options.validation = fractions[i];
        assert_says(refusal(options, QE_ERROR_ARGUMENT).message, "data.validation");
    }
    qe_dataset_options options = options_for(here->path);
    options.sequence = 0;
    assert_says(refusal(options, QE_ERROR_ARGUMENT).message, "model.sequence");
    options = options_for(here->path);
    options.vocab = 255;
    assert_says(refusal(options, QE_ERROR_CONFIG).message, "model.vocab");
    options.vocab = 65537;
    assert_says(refusal(options, QE_ERROR_ARGUMENT).message, "model.vocab");
}

static void windows_are_the_bytes_of_the_text_with_targets_one_further(void **state) {
    fixture *here = *state;
    write_file(here->path, "abcdefghijklmnopqrstuvwxyz", 26);
    qe_dataset_options options = options_for(here->path);
    options.validation = 0.4; /* 10 tokens: q..z; train: a..p, 3 windows */
    qe_dataset *dataset = opened(options);
    qe_dataset_info info = qe_dataset_describe(dataset);
    assert_int_equal(info.tokens, 26);
    assert_int_equal(info.train_tokens, 16);
    assert_int_equal(info.validation_tokens, 10);
    assert_int_equal(info.train_windows, 3);
    assert_int_equal(info.validation_windows, 2);
    assert_int_equal(info.format, QE_DATA_TEXT);
    int32_t tokens[12], targets[12];
    qe_dataset_batch(dataset, QE_DATA_VALIDATION, 99, 0, 3, tokens, targets);
    static const int32_t expected_tokens[12] = {'q', 'r', 's', 't', 'u', 'v', 'w', 'x', 0, 0, 0, 0};
    static const int32_t expected_targets[12] = {'r', 's', 't', 'u', 'v', 'w', 'x', 'y', -1, -1, -1, -1};
    assert_memory_equal(tokens, expected_tokens, sizeof tokens);
    assert_memory_equal(targets, expected_targets, sizeof targets);
    qe_dataset_batch(dataset, QE_DATA_TRAIN, 99, 0, 3, tokens, targets);
    for (int i = 0; i < 12; i++) {
        assert_int_equal(targets[i], tokens[i] + 1);
        assert_in_range(tokens[i], 'a', 'l');
    }
    qe_dataset_close(dataset);
}

enum { MANY = 1001 };

/* Marks the windows that `count` sequence numbers from `first` on visit. Token i of the stream is i mod 65536. */
static void count_visits(const qe_dataset *dataset, uint64_t seed, uint64_t first, uint32_t count, unsigned *visits) {
    int32_t tokens[8], targets[8];
    for (uint32_t i = 0; i < count; i++) {
        qe_dataset_batch(dataset, QE_DATA_TRAIN, seed, first + i, 1, tokens, targets);
        assert_int_equal(tokens[0] % 8, 0);
        for (int k = 0; k < 8; k++) assert_int_equal(tokens[k], tokens[0] + k);
        for (int k = 0; k < 8; k++) assert_int_equal(targets[k], tokens[k] + 1);
        visits[tokens[0] / 8]++;
    }
}

static void write_shard(const char *path, int32_t magic, int32_t version, int32_t count, size_t real_count,
                        uint32_t step) {
    uint8_t *bytes = calloc(1, 1024 + 2 * real_count);
    memcpy(bytes, &magic, 4); /* every machine this runs on is little-endian; the reader does not assume it */
    memcpy(bytes + 4, &version, 4);
    memcpy(bytes + 8, &count, 4);
    for (size_t i = 0; i < real_count; i++) {
        bytes[1024 + 2 * i] = (uint8_t)(i * step);
        bytes[1025 + 2 * i] = (uint8_t)(i * step >> 8);
    }
    write_file(path, bytes, 1024 + 2 * real_count);
    free(bytes);
}

static qe_dataset *many_windows(const char *path) {
    write_shard(path, QE_SHARD_MAGIC, 1, MANY * 8 + 1, MANY * 8 + 1, 1);
    qe_dataset_options options = options_for(path);
    options.sequence = 8;
    options.vocab = 65536;
    qe_dataset *dataset = opened(options);
    assert_int_equal(qe_dataset_describe(dataset).train_windows, MANY);
    return dataset;
}

static void an_epoch_visits_every_window_once_in_another_order_each_time(void **state) {
    fixture *here = *state;
    qe_dataset *dataset = many_windows(here->path);
    int32_t first_order[MANY], tokens[8], targets[8];
    unsigned same_epoch = 0, same_seed = 0;
    for (uint64_t epoch = 0; epoch < 3; epoch++) {
        unsigned visits[MANY] = {0};
        count_visits(dataset, 7, epoch * MANY, MANY, visits);
        for (int i = 0; i < MANY; i++) assert_int_equal(visits[i], 1);
    }
    for (uint32_t i = 0; i < MANY; i++) {
        qe_dataset_batch(dataset, QE_DATA_TRAIN, 7, i, 1, tokens, targets);
        first_order[i] = tokens[0];
        qe_dataset_batch(dataset, QE_DATA_TRAIN, 7, MANY + i, 1, tokens, targets);
        same_epoch += tokens[0] == first_order[i];
        qe_dataset_batch(dataset, QE_DATA_TRAIN, 8, i, 1, tokens, targets);
        same_seed += tokens[0] == first_order[i];
    }
    assert_in_range(same_epoch, 0, MANY / 20);
    assert_in_range(same_seed, 0, MANY / 20);
    qe_dataset_close(dataset);
}

static void a_batch_is_its_sequences_one_by_one(void **state) {
    fixture *here = *state;
    qe_dataset *dataset = many_windows(here->path);
    enum { COUNT = 40 };
    int32_t tokens[COUNT * 8], targets[COUNT * 8], one_tokens[8], one_targets[8];
    qe_dataset_batch(dataset, QE_DATA_TRAIN, 3, MANY - 20, COUNT, tokens, targets); /* over the epoch's end */
    for (uint32_t i = 0; i < COUNT; i++) {
        qe_dataset_batch(dataset, QE_DATA_TRAIN, 3, MANY - 20 + i, 1, one_tokens, one_targets);
        assert_memory_equal(tokens + i * 8, one_tokens, sizeof one_tokens);
        assert_memory_equal(targets + i * 8, one_targets, sizeof one_targets);
    }
    qe_dataset_close(dataset);
}

static void a_token_file_is_recognised_and_its_16_bit_tokens_are_read(void **state) {
    fixture *here = *state;
    write_shard(here->path, QE_SHARD_MAGIC, 1, 9, 9, 5000);
    qe_dataset_options options = options_for(here->path);
    options.vocab = 50257;
    qe_dataset *dataset = opened(options);
    assert_int_equal(qe_dataset_describe(dataset).format, QE_DATA_TOKENS);
    assert_int_equal(qe_dataset_describe(dataset).tokens, 9);
    int32_t tokens[8], targets[8];
    qe_dataset_batch(dataset, QE_DATA_TRAIN, 1, 0, 2, tokens, targets);
    int second_first = tokens[0] != 0;
    for (int i = 0; i < 4; i++) {
        assert_int_equal(tokens[second_first * 4 + i], 5000 * i);
        assert_int_equal(targets[second_first * 4 + i], 5000 * (i + 1));
    }
    qe_dataset_close(dataset);
}

static void damaged_token_files_are_refused(void **state) {
    fixture *here = *state;
    static const struct { int32_t magic, version, count; size_t real; const char *says; } cases[] = {
        {20240521, 1, 9, 9, "expected the magic number 20240520"},
        {20240801, 7, 9, 9, "32-bit tokens"},
        {QE_SHARD_MAGIC, 2, 9, 9, "version 2, expected 1"},
        {QE_SHARD_MAGIC, 1, 0, 9, "says 0 tokens"},
        {QE_SHARD_MAGIC, 1, -5, 9, "says -5 tokens"},
        {QE_SHARD_MAGIC, 1, 10, 9, "has 1042 bytes, its header of 10 tokens means 1044"},
        {QE_SHARD_MAGIC, 1, 8, 9, "has 1042 bytes, its header of 8 tokens means 1040"},
        {QE_SHARD_MAGIC, 1, INT32_MAX, 9, "has 1042 bytes"},
    };
    qe_dataset_options options = options_for(here->path);
    options.format = QE_DATA_TOKENS;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_shard(here->path, cases[i].magic, cases[i].version, cases[i].count, cases[i].real, 1);
        qe_error error = refusal(options, QE_ERROR_FORMAT);
        assert_says(error.message, cases[i].says);
        assert_string_equal(error.path, here->path);
    }
    write_file(here->path, "\x88\xd8\x34\x01", 4);
    assert_says(refusal(options_for(here->path), QE_ERROR_FORMAT).message, "has 4 bytes, its header alone needs 1024");
}

static void the_first_token_outside_the_vocabulary_is_named(void **state) {
    fixture *here = *state;
    write_shard(here->path, QE_SHARD_MAGIC, 1, 40, 40, 100);
    qe_dataset_options options = options_for(here->path);
    options.vocab = 1000;
    qe_error error = refusal(options, QE_ERROR_FORMAT);
    assert_says(error.message, "token 10 of the file is 1000, expected below model.vocab = 1000");
    options.vocab = 3901;
    qe_dataset_close(opened(options));
}

static void the_empty_path_is_the_king_james_bible(void **state) {
    (void)state;
    qe_dataset_options options = {.path = "", .validation = 0.05, .sequence = 128, .vocab = 256};
    qe_dataset *dataset = opened(options);
    qe_dataset_info info = qe_dataset_describe(dataset);
    assert_int_equal(info.tokens, 4137850);
    assert_int_equal(info.validation_tokens, 206892);
    assert_int_equal(info.train_windows, (4137850 - 206892 - 1) / 128);
    int32_t tokens[128], targets[128];
    char text[129] = {0};
    int found = 0;
    for (uint64_t i = 0; i < info.train_windows && !found; i++) { /* one of them is the beginning */
        qe_dataset_batch(dataset, QE_DATA_TRAIN, 1, i, 1, tokens, targets);
        for (int k = 0; k < 128; k++) text[k] = (char)tokens[k];
        found = strncmp(text, "In the beginning God created the heaven and the earth.\nAnd the earth", 68) == 0;
    }
    assert_true(found);
    qe_dataset_close(dataset);
    options.format = QE_DATA_TOKENS;
    assert_says(refusal(options, QE_ERROR_CONFIG).message, "data.path is empty");
}

static void a_missing_bible_program_says_what_to_install(void **state) {
    (void)state;
    qe_source source = {0};
    qe_error error = {0};
    assert_int_equal(qe_source_read_bible("no-such-bible-program", 1000, &source, &error), QE_ERROR_IO);
    assert_says(error.message, "no-such-bible-program");
    assert_says(error.remedy, "apt-get install bible-kjv");
    assert_null(source.data);
}

static void write_program(const char *path, const char *body) {
    write_file(path, body, strlen(body));
    assert_int_equal(chmod(path, 0700), 0);
}

static void a_bible_program_that_prints_another_text_is_refused(void **state) {
    fixture *here = *state;
    write_program(here->path, "#!/bin/sh\necho 'Ge1:1 In the beginning'\necho alone\nprintf 'x y z'\n");
    qe_source source = {0};
    qe_error error = {0};
    assert_int_equal(qe_source_read_bible(here->path, 10000, &source, &error), QE_ERROR_FORMAT);
    assert_null(source.data);
    assert_says(error.message, "05b98751a428dfa4d2afc68c1f859494");
    static const char as_cut[] = "In the beginning\nalone\ny z"; /* what cut -d' ' -f2- makes of it */
    char hash[QE_HASH_TEXT_BYTES];
    qe_hash_text(qe_hash_bytes(as_cut, strlen(as_cut)), hash);
    assert_says(error.message, hash);
}

static void a_bible_program_that_hangs_or_floods_is_stopped(void **state) {
    fixture *here = *state;
    qe_source source = {0};
    qe_error error = {0};
    write_program(here->path, "#!/bin/sh\nexec /bin/sleep 1000\n");
    assert_int_equal(qe_source_read_bible(here->path, 200, &source, &error), QE_ERROR_IO);
    assert_says(error.message, "did not end in time");
    write_program(here->path, "#!/bin/sh\nexec /usr/bin/yes\n");
    assert_int_equal(qe_source_read_bible(here->path, 20000, &source, &error), QE_ERROR_IO);
    assert_says(error.message, "printed far more");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_missing_file_is_refused_with_its_path),
        TEST(a_directory_is_refused),
        TEST(a_pipe_and_a_device_are_refused_without_waiting),
        TEST(an_empty_file_is_refused),
        TEST(an_unreadable_file_is_refused),
        TEST(a_huge_file_is_refused_before_it_is_read),
        TEST(bytes_that_are_not_utf8_are_named_by_offset_line_and_column),
        TEST(every_character_of_unicode_is_accepted),
        TEST(a_text_too_short_for_one_window_is_refused),
        TEST(a_validation_part_too_short_for_one_window_is_refused),
        TEST(impossible_options_are_refused),
        TEST(windows_are_the_bytes_of_the_text_with_targets_one_further),
        TEST(an_epoch_visits_every_window_once_in_another_order_each_time),
        TEST(a_batch_is_its_sequences_one_by_one),
        TEST(a_token_file_is_recognised_and_its_16_bit_tokens_are_read),
        TEST(damaged_token_files_are_refused),
        TEST(the_first_token_outside_the_vocabulary_is_named),
        TEST(the_empty_path_is_the_king_james_bible),
        TEST(a_missing_bible_program_says_what_to_install),
        TEST(a_bible_program_that_prints_another_text_is_refused),
        TEST(a_bible_program_that_hangs_or_floods_is_stopped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
