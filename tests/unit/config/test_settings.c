/* Settings: defaults, the file, --set, and every way to write them wrongly. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>
#include "qeffect/settings.h"

typedef struct fixture {
    char folder[64], path[96];
} fixture;

static int setup(void **state) {
    fixture *here = calloc(1, sizeof *here);
    snprintf(here->folder, sizeof here->folder, "/tmp/qe-config-XXXXXX");
    if (mkdtemp(here->folder) == NULL) return -1;
    snprintf(here->path, sizeof here->path, "%s/a.yaml", here->folder);
    *state = here;
    return 0;
}

static int teardown(void **state) {
    fixture *here = *state;
    unlink(here->path);
    int code = rmdir(here->folder);
    free(here);
    return code;
}

static void write_bytes(const fixture *here, const void *bytes, size_t size) {
    FILE *file = fopen(here->path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

#define assert_says(text, part) \
    do { if (strstr((text), (part)) == NULL) fail_msg("\"%s\" does not say \"%s\"", (text), (part)); } while (0)

/* Loads text that must be refused; checks that the caller's settings did not change. */
static qe_error refusal_of_bytes(const fixture *here, const void *bytes, size_t size, qe_status expected) {
    qe_settings settings, before;
    qe_error error = {0};
    memset(&settings, 0x5A, sizeof settings);
    memcpy(&before, &settings, sizeof before);
    write_bytes(here, bytes, size);
    qe_status status = qe_settings_load(here->path, &settings, &error);
    if (status != expected) fail_msg("status %d, expected %d, for: %.60s", status, expected, (const char *)bytes);
    assert_memory_equal(&settings, &before, sizeof settings);
    assert_int_equal(error.status, expected);
    assert_string_equal(error.path, here->path);
    assert_true(error.message[0] != '\0');
    assert_true(error.remedy[0] != '\0');
    return error;
}

static qe_error refusal(const fixture *here, const char *text, qe_status expected) {
    return refusal_of_bytes(here, text, strlen(text), expected);
}

static qe_settings loaded(const fixture *here, const char *text) {
    qe_settings settings;
    qe_error error = {0};
    write_bytes(here, text, strlen(text));
    if (qe_settings_load(here->path, &settings, &error) != QE_OK)
        fail_msg("%u:%u %s", error.line, error.column, error.message);
    return settings;
}

static void the_defaults_are_the_quickstart(void **state) {
    (void)state;
    qe_settings settings;
    qe_settings_default(&settings);
    assert_int_equal(settings.model.layers, 4);
    assert_int_equal(settings.model.hidden, 128);
    assert_int_equal(settings.model.kv_heads, 2);
    assert_int_equal(settings.train.steps, 900);
    assert_int_equal(settings.pipeline.ranks, 2);
    assert_int_equal(settings.pipeline.microbatches, 8);
    assert_int_equal(settings.recipe.kind, QE_RECIPE_DELAYED);
    assert_int_equal(settings.recipe.history_length, 4);
    assert_true(settings.pipeline.cache_weights);
    assert_true(settings.train.learning_rate == 3e-3);
    assert_string_equal(settings.data.path, "");
    assert_string_equal(settings.pipeline.schedule, "zbh1");
    assert_string_equal(settings.checkpoint.path, "run/quickstart");
    assert_int_equal(qe_settings_check(&settings, NULL), QE_OK);
}

static void the_example_spells_out_every_default(void **state) {
    (void)state;
    qe_settings settings, defaults;
    qe_error error = {0};
    if (qe_settings_load("examples/quickstart.yaml", &settings, &error) != QE_OK) fail_msg("%s", error.message);
    qe_settings_default(&defaults);
    for (size_t i = 0; i < qe_settings_count(); i++) {
        char text[600], initial[600];
        if (settings.place[i].line == 0) fail_msg("the example lacks %s", qe_settings_describe(i).key);
        qe_settings_value_text(&settings, i, text, sizeof text);
        qe_settings_value_text(&defaults, i, initial, sizeof initial);
        assert_string_equal(text, initial);
    }
}

static void a_file_overrides_what_it_names_and_nothing_else(void **state) {
    qe_settings settings = loaded(
        *state, "# comment\nmodel:\n  layers: 8\n  rope_theta: 5e5\npipeline:\n  schedule: a.csv\n"
                "  cache_weights: false\n  placement: copy\nrecipe: {name: block, margin: -3}\n"
                "contracts:\n  mode: off\ntrain:\n  seed: 9223372036854775807\n  nonfinite: skip\n"
                "data:\n  path: \"my file \\u00e9\"\n  format: text\n  validation: 0\n");
    assert_int_equal(settings.model.layers, 8);
    assert_true(settings.model.rope_theta == 500000);
    assert_string_equal(settings.pipeline.schedule, "a.csv");
    assert_false(settings.pipeline.cache_weights);
    assert_int_equal(settings.pipeline.placement, QE_PLACEMENT_COPY);
    assert_int_equal(settings.recipe.kind, QE_RECIPE_BLOCK);
    assert_int_equal(settings.recipe.margin, -3);
    assert_int_equal(settings.contracts.mode, QE_CONTRACTS_SETTING_OFF);
    assert_true(settings.train.seed == INT64_MAX);
    assert_int_equal(settings.train.nonfinite, QE_NONFINITE_SKIP);
    assert_string_equal(settings.data.path, "my file \xC3\xA9");
    assert_int_equal(settings.data.format, QE_DATA_TEXT);
    assert_true(settings.data.validation == 0);
    assert_int_equal(settings.model.hidden, 128);
    assert_int_equal(settings.place[0].line, 3);
    assert_int_equal(settings.place[0].column, 3);
    assert_string_equal(settings.source, ((fixture *)*state)->path);
}

typedef struct bad { const char *text; uint32_t line, column; const char *says, *remedy; } bad;

static void assert_refused(const fixture *here, const bad *cases, size_t count, qe_status expected) {
    for (size_t i = 0; i < count; i++) {
        qe_error error = refusal(here, cases[i].text, expected);
        assert_says(error.message, cases[i].says);
        if (cases[i].remedy) assert_says(error.remedy, cases[i].remedy);
        if (error.line != cases[i].line || error.column != cases[i].column)
            fail_msg("%s: at %u:%u, expected %u:%u", cases[i].text, error.line, error.column, cases[i].line,
                     cases[i].column);
    }
}

#define COUNT(array) (sizeof(array) / sizeof *(array))

static void whole_numbers_are_read_strictly(void **state) {
    static const char *const spellings[] = {"4x", "010", "nan", "4.0", "4e0", "0x10", "1_000", "+4", "-4", "-0", "0b1",
                                            "4 5", ".inf", "1,000", "four", "true", "0", "4097",
                                            "99999999999999999999999",
                                            "\"4\"", "'4'", "~", "null", "", "\"\""};
    for (size_t i = 0; i < COUNT(spellings); i++) {
        char text[100];
        snprintf(text, sizeof text, "model:\n  hidden: 64\n  layers: %s\n", spellings[i]);
        qe_error error = refusal(*state, text, QE_ERROR_CONFIG);
        assert_int_equal(error.line, 3);
        assert_says(error.message, "model.layers: found ");
        assert_says(error.message, "expected whole number, 1 to 4096");
    }
    assert_says(refusal(*state, "model:\n  layers: 4x\n", QE_ERROR_CONFIG).message, "found \"4x\"");
    assert_says(refusal(*state, "model:\n  layers: \"4\"\n", QE_ERROR_CONFIG).message, "found the text \"4\"");
    assert_says(refusal(*state, "model:\n  layers:\n", QE_ERROR_CONFIG).message, "found nothing");
}

static void numbers_are_read_strictly(void **state) {
    static const char *const spellings[] = {".5", "5.", "nan", ".nan", "inf", "-inf", "1e999", "0,5", "5%", "0x1p-3",
                                            "1",
                                            "-0.1", "1.5", "\"0.5\"", "half", "0.5f", "", "1e", "01.5"};
    for (size_t i = 0; i < COUNT(spellings); i++) {
        char text[100];
        snprintf(text, sizeof text, "data:\n  validation: %s\n", spellings[i]);
        assert_says(refusal(*state, text, QE_ERROR_CONFIG).message, "expected number, 0 to below 1");
    }
    assert_says(refusal(*state, "train:\n  learning_rate: 0\n", QE_ERROR_CONFIG).message, "above 0 to 10");
}

static void numbers_that_leave_their_bounds_as_floats_are_refused(void **state) {
    static const struct { const char *text, *expected; } cases[] = {
        {"model:\n  rope_theta: 1e-300\n", "above 0 to 1e9"},   {"model:\n  norm_epsilon: 1e-46\n", "above 0 to 1"},
        {"train:\n  epsilon: 1e-300\n", "above 0 to 1"},         {"train:\n  learning_rate: 1e-40\n", "above 0 to 10"},
        {"train:\n  beta1: 0.99999999\n", "0 to below 1"},       {"train:\n  beta2: 0.99999999999\n", "0 to below 1"},
    };
    for (size_t i = 0; i < COUNT(cases); i++)
        assert_says(refusal(*state, cases[i].text, QE_ERROR_CONFIG).message, cases[i].expected);
}

static void truth_values_and_words_are_read_strictly(void **state) {
    static const bad cases[] = {
        {"pipeline:\n  cache_weights: yes\n", 2, 18, "found \"yes\", expected true or false", NULL},
        {"pipeline:\n  cache_weights: on\n", 2, 18, "found \"on\"", NULL},
        {"pipeline:\n  cache_weights: True\n", 2, 18, "found \"True\"", NULL},
        {"pipeline:\n  cache_weights: 1\n", 2, 18, "found \"1\"", NULL},
        {"pipeline:\n  cache_weights: \"true\"\n", 2, 18, "found the text \"true\"", NULL},
        {"recipe:\n  name: delayd\n", 2, 9, "expected one of delayed|current|block|bf16|fp32",
         "Did you mean \"delayed\"?"},
        {"recipe:\n  name: fp8\n", 2, 9, "found \"fp8\"", "default is delayed"},
        {"recipe:\n  name:\n", 2, 8, "found nothing", NULL},
        {"recipe:\n  name: delayed|current\n", 2, 9, "found \"delayed|current\"", NULL},
        {"contracts:\n  mode: no\n", 2, 9, "expected one of trap|observe|off", NULL},
    };
    assert_refused(*state, cases, COUNT(cases), QE_ERROR_CONFIG);
}

static void texts_are_texts_and_never_nothing(void **state) {
    static const bad cases[] = {
        {"data:\n  path:\n", 2, 8, "data.path: found nothing, expected text", "Write \"\""},
        {"data:\n  path: ~\n", 2, 9, "found ~", NULL},
        {"data:\n  path: null\n", 2, 9, "found null", NULL},
        {"data:\n  path: \"a\\0b\"\n", 2, 9, "zero byte", NULL},
    };
    assert_refused(*state, cases, COUNT(cases), QE_ERROR_CONFIG);
    char text[700] = "data:\n  path: ";
    memset(text + 14, 'a', 512);
    assert_says(refusal(*state, text, QE_ERROR_CONFIG).message, "found 512 bytes of text, expected at most 511");
    text[14 + 511] = '\0';
    assert_int_equal(strlen(loaded(*state, text).data.path), 511);
    assert_string_equal(loaded(*state, "data:\n  path: 010\n").data.path, "010");
}

static void unknown_keys_name_the_nearest_right_one(void **state) {
    static const bad cases[] = {
        {"modle:\n  layers: 4\n", 1, 1, "unknown key modle", "Did you mean \"model\"?"},
        {"model:\n  layrs: 4\n", 2, 3, "unknown key model.layrs", "Did you mean model.layers?"},
        {"model:\n  kv-heads: 4\n", 2, 3, "unknown key model.kv-heads", "Did you mean model.kv_heads?"},
        {"model:\n  steps: 4\n", 2, 3, "unknown key model.steps", "Did you mean train.steps?"},
        {"train:\n  lr: 4\n", 2, 3, "unknown key train.lr", "The keys of train are steps, seed, mode"},
        {"layers: 4\n", 1, 1, "unknown key layers", "Did you mean model.layers?"},
        {"model.layers: 4\n", 1, 1, "unknown key model.layers", "Write two lines: \"model:\""},
        {"quantum:\n  a: 1\n", 1, 1, "unknown key quantum",
         "The groups are model, data, train, pipeline, recipe, contracts, "},
        {"model:\n  <<: {layers: 4}\n", 2, 3, "unknown key model.<<", NULL},
        {"model:\n  \"\": 4\n", 2, 3, "unknown key model.", NULL},
        {"model:\n  Layers: 4\n", 2, 3, "unknown key model.Layers", "Did you mean model.layers?"},
    };
    assert_refused(*state, cases, COUNT(cases), QE_ERROR_CONFIG);
}

static void the_wrong_shape_is_refused_where_it_stands(void **state) {
    static const bad cases[] = {
        {"model:\n  layers: [4]\n", 2, 11, "model.layers: found a list, expected whole number", "The default is 4"},
        {"model:\n  layers: {a: 4}\n", 2, 11, "found a map, expected whole number", NULL},
        {"model:\n  layers:\n    - 4\n", 3, 5, "found a list", NULL},
        {"recipe:\n  name: [a, b]\n", 2, 9, "found a list, expected one of delayed|", NULL},
        {"data:\n  path: [a]\n", 2, 9, "found a list, expected text", NULL},
        {"model: 4\n", 1, 8, "found \"4\", expected keys and values of the group", "Indent the keys of model"},
        {"model: layers: 4\n", 1, 8, "found \"layers\", expected keys", "Indent the keys of model"},
        {"model:\n", 1, 7, "found nothing, expected keys and values", "or remove the line"},
        {"model: [layers, 4]\n", 1, 8, "found a list", NULL},
        {"- model\n- data\n", 1, 1, "found a list, expected groups", NULL},
        {"train\n", 1, 1, "found \"train\", expected groups", NULL},
        {"[a, b]: 4\n", 1, 1, "found a list, expected the name of a group", NULL},
        {"model:\n  {a: b}: 4\n", 2, 3, "found a map, expected a key", NULL},
    };
    assert_refused(*state, cases, COUNT(cases), QE_ERROR_CONFIG);
}

static void an_empty_configuration_is_refused(void **state) {
    static const char *const texts[] = {"", "\n\n", "# only a comment\n", "---\n", "---\n...\n", "{}\n", "   \n"};
    for (size_t i = 0; i < COUNT(texts); i++)
        assert_says(refusal(*state, texts[i], QE_ERROR_CONFIG).message, "the configuration is empty");
}

static void keys_and_groups_given_twice_are_refused_with_both_lines(void **state) {
    static const bad cases[] = {
        {"model:\n  layers: 4\n  hidden: 8\n  layers: 5\n", 4, 3,
         "model.layers is set a second time; the first is in line 2", NULL},
        {"model:\n  layers: 4\ndata:\n  path: a\nmodel:\n  hidden: 8\n", 5, 1,
         "model is set a second time; the first is in line 1", NULL},
    };
    assert_refused(*state, cases, COUNT(cases), QE_ERROR_CONFIG);
}

static void anchors_aliases_tags_directives_and_documents_are_refused(void **state) {
    static const bad cases[] = {
        {"model:\n  layers: &n 4\n", 2, 11, "found an anchor", NULL},
        {"model: &m\n  layers: 4\n", 1, 8, "found an anchor", NULL},
        {"model:\n  layers: &n 4\n  heads: *n\n", 2, 11, "found an anchor", NULL},
        {"model:\n  heads: *n\n", 2, 10, "found an alias", NULL},
        {"model:\n  layers: !!int 4\n", 2, 11, "found a tag", NULL},
        {"model:\n  layers: ! 4\n", 2, 11, "found a tag", NULL},
        {"!x model:\n  layers: 4\n", 1, 1, "found a tag", NULL},
        {"&a\nmodel:\n  layers: 4\n", 1, 1, "found an anchor", NULL},
        {"model: !!map\n  layers: 4\n", 1, 8, "found a tag", NULL},
        {"model:\n  layers: !!seq [4]\n", 2, 11, "found a tag", NULL},
        {"%YAML 1.1\n---\nmodel:\n  layers: 4\n", 1, 1, "found a directive", NULL},
        {"%TAG ! tag:x,2000:\n---\nmodel:\n  layers: 4\n", 1, 1, "found a directive", NULL},
        {"model:\n  layers: 4\n---\nmodel:\n  layers: 5\n", 3, 1, "found a second document", NULL},
    };
    assert_refused(*state, cases, COUNT(cases), QE_ERROR_FORMAT);
}

static void what_is_not_yaml_is_refused_with_its_place(void **state) {
    static const bad cases[] = {
        {"model:\n\tlayers: 4\n", 2, 1, "not YAML", "examples/quickstart.yaml"},
        {"model:\n  layers: 4\n bad: 3\n", 3, 2, "not YAML", NULL},
        {"model: {layers: 4\n", 2, 1, "not YAML", NULL},
        {"model:\n  layers: \"4\n", 3, 1, "not YAML", NULL},
        {"model:\n  layers: @4\n", 2, 11, "not YAML", NULL},
    };
    assert_refused(*state, cases, COUNT(cases), QE_ERROR_FORMAT);
    qe_error error = refusal(*state, "model:\n  layers: \xFF\n", QE_ERROR_FORMAT);
    assert_int_equal(error.line, 2);
    refusal_of_bytes(*state, "model:\n  lay\0rs: 4\n", 19, QE_ERROR_FORMAT);
    refusal_of_bytes(*state, "\x7F" "ELF\x02\x01\x01\0\0\0", 10, QE_ERROR_FORMAT);
}

static void hostile_files_end_quickly(void **state) {
    size_t size = 1000000;
    char *text = malloc(size);
    assert_non_null(text);
    memset(text, '[', size);
    refusal_of_bytes(*state, text, size, QE_ERROR_CONFIG);
    memset(text, '{', size);
    refusal_of_bytes(*state, text, size, QE_ERROR_CONFIG);
    memset(text, ' ', size);
    assert_says(refusal_of_bytes(*state, text, size, QE_ERROR_CONFIG).message, "empty");
    memset(text, 'a', size);
    refusal_of_bytes(*state, text, size, QE_ERROR_CONFIG);
    memset(text, '\n', size);
    memcpy(text, "model: {a: [", 12);
    memset(text + 12, '[', 900000);
    refusal_of_bytes(*state, text, size, QE_ERROR_CONFIG);
    free(text);
}

static void files_that_are_no_configuration_are_refused(void **state) {
    fixture *here = *state;
    qe_settings settings;
    qe_error error = {0};
    assert_int_equal(qe_settings_load(here->path, &settings, &error), QE_ERROR_IO);
    assert_says(error.message, "No such file");
    assert_string_equal(error.path, here->path);
    assert_int_equal(qe_settings_load(here->folder, &settings, &error), QE_ERROR_IO);
    assert_says(error.message, "directory");
    assert_int_equal(qe_settings_load("/dev/zero", &settings, &error), QE_ERROR_IO);
    assert_says(error.message, "not a regular file");
    assert_int_equal(mkfifo(here->path, 0600), 0);
    assert_int_equal(qe_settings_load(here->path, &settings, &error), QE_ERROR_IO);
    unlink(here->path);
    write_bytes(here, "#", 1);
    assert_int_equal(truncate(here->path, QE_SETTINGS_FILE_BYTES_MAX + 1), 0);
    assert_int_equal(qe_settings_load(here->path, &settings, &error), QE_ERROR_IO);
    assert_says(error.message, "larger than 1 MiB");
}

static void set_changes_one_value(void **state) {
    (void)state;
    qe_settings settings;
    qe_settings_default(&settings);
    assert_int_equal(qe_settings_set(&settings, "train.steps=20", NULL), QE_OK);
    assert_int_equal(qe_settings_set(&settings, "recipe.name=bf16", NULL), QE_OK);
    assert_int_equal(qe_settings_set(&settings, "data.path=a=b c", NULL), QE_OK);
    assert_int_equal(qe_settings_set(&settings, "checkpoint.path=", NULL), QE_OK);
    assert_int_equal(settings.train.steps, 20);
    assert_int_equal(settings.recipe.kind, QE_RECIPE_BF16);
    assert_string_equal(settings.data.path, "a=b c");
    assert_string_equal(settings.checkpoint.path, "");
    assert_int_equal(qe_settings_set(&settings, "train.steps=30", NULL), QE_OK); /* the last one holds */
    assert_int_equal(settings.train.steps, 30);
    assert_int_equal(qe_settings_check(&settings, NULL), QE_OK);
}

static void a_bad_set_is_a_usage_error_and_changes_nothing(void **state) {
    (void)state;
    static const struct { const char *assignment, *says, *remedy; } cases[] = {
        {"train.steps", "expected group.key=value", "--set train.steps=100"},
        {"", "expected group.key=value", NULL},
        {"=4", "expected group.key=value", NULL},
        {"train.steps=", "train.steps: found nothing, expected whole number", NULL},
        {"train.steps=4x", "found \"4x\"", NULL},
        {"train.steps= 4", "found \" 4\"", NULL},
        {"train.stps=4", "--set: unknown key train.stps", "Did you mean train.steps?"},
        {"steps=4", "--set: unknown key steps", "Did you mean train.steps?"},
        {"modle.layers=4", "--set: unknown key modle.layers", "Did you mean model.layers?"},
        {"model=4", "--set: unknown key model", NULL},
        {"recipe.name=delay", "expected one of", "Did you mean \"delayed\"?"},
        {"pipeline.cache_weights=1", "expected true or false", NULL},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        qe_settings settings, before;
        qe_error error = {0};
        qe_settings_default(&settings);
        memcpy(&before, &settings, sizeof before);
        assert_int_equal(qe_settings_set(&settings, cases[i].assignment, &error), QE_ERROR_ARGUMENT);
        assert_memory_equal(&settings, &before, sizeof settings);
        assert_says(error.message, cases[i].says);
        assert_true(error.remedy[0] != '\0');
        if (cases[i].remedy) assert_says(error.remedy, cases[i].remedy);
        assert_int_equal(qe_settings_set(&settings, cases[i].assignment, NULL), QE_ERROR_ARGUMENT);
    }
}

static void values_that_do_not_fit_together_are_refused_where_they_were_written(void **state) {
    static const struct { const char *text; uint32_t line; const char *says; } cases[] = {
        {"model:\n  layers: 4\n  heads: 3\n", 3, "model.hidden = 128 is not a multiple of model.heads = 3"},
        {"model:\n  hidden: 130\n", 2, "model.hidden = 130 is not a multiple of model.heads = 4"},
        {"model:\n  kv_heads: 3\n", 2, "model.heads = 4 is not a multiple of model.kv_heads = 3"},
        {"model:\n  heads: 128\n", 2, "model.hidden / model.heads = 1, expected an even number"},
        {"model:\n  layers: 1\n", 2, "= 2 stages, but model.layers = 1"},
        {"pipeline:\n  ranks: 5\n", 2, "= 5 stages, but model.layers = 4"},
        {"pipeline:\n  ranks: 2\n  chunks: 3\n", 3, "= 6 stages, but model.layers = 4"},
        {"pipeline:\n  schedule: \"\"\n", 2, "pipeline.schedule is empty"},
        {"model:\n  vocab: 255\n", 2, "model.vocab = 255, expected at least 256"},
        {"data:\n  format: tokens\n", 2, "data.path is empty"},
        {"train:\n  learning_rate: 1e-4\n", 2, "train.minimum_learning_rate = 0.0003 is above"},
        {"pipeline:\n  schedule: auto\n  times: 1,1,1\n  stages: v\n", 4, "pipeline.stages = v has several"},
        {"pipeline:\n  stages: linear\n  chunks: 2\n  schedule: auto\n  times: 1,1,1\n", 2, "linear has 1"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        qe_settings settings = loaded(*state, cases[i].text);
        qe_error error = {0};
        assert_int_equal(qe_settings_check(&settings, &error), QE_ERROR_CONFIG);
        assert_says(error.message, cases[i].says);
        assert_int_equal(error.line, cases[i].line);
        assert_string_equal(error.path, settings.source);
        assert_true(error.remedy[0] != '\0');
    }
    qe_settings settings = loaded(*state, "data:\n  path: x.bin\nmodel:\n  vocab: 50\n"); /* maybe tokens */
    assert_int_equal(qe_settings_check(&settings, NULL), QE_OK);
    settings = loaded(*state, "checkpoint:\n  every: 10\n");
    assert_int_equal(qe_settings_check(&settings, NULL), QE_OK);
    settings = loaded(*state, "checkpoint:\n  path: \"\"\n  every: 10\n");
    qe_error error = {0};
    assert_int_equal(qe_settings_check(&settings, &error), QE_ERROR_CONFIG);
    assert_int_equal(error.line, 3);
}

static void a_misfit_from_set_is_a_usage_error(void **state) {
    qe_settings settings = loaded(*state, "model:\n  hidden: 96\n");
    qe_error error = {0};
    assert_int_equal(qe_settings_set(&settings, "model.heads=5", NULL), QE_OK);
    assert_int_equal(qe_settings_check(&settings, &error), QE_ERROR_ARGUMENT);
    assert_says(error.message, "model.hidden = 96 is not a multiple of model.heads = 5");
    assert_string_equal(error.path, "");
}

static void long_and_strange_values_are_shown_short_and_clean(void **state) {
    char text[400] = "model:\n  layers: ";
    for (size_t end = strlen(text), i = 0; i < 100; i++, end += 2) snprintf(text + end, 3, "\xC3\xA9");
    qe_error error = refusal(*state, text, QE_ERROR_CONFIG);
    assert_says(error.message, "\xC3\xA9...\", expected");
    error = refusal(*state, "model:\n  layers: \"a\\e[31m\\n\"\n", QE_ERROR_CONFIG);
    assert_says(error.message, "found the text \"a?[31m?\"");
}

static void every_value_written_as_text_reads_back_the_same(void **state) {
    fixture *here = *state;
    qe_settings settings = loaded(
        here, "model:\n  rope_theta: 0.1\n  norm_epsilon: 1.2345678901234567e-7\ntrain:\n  seed: 18\n"
              "data:\n  path: \"a \\\"b\\\" \\\\ \\n\\u00e9\"\nrecipe:\n  margin: -64\n");
    char whole[8192] = "", value[700];
    for (size_t i = 0; i < qe_settings_count(); i++) {
        const char *key = qe_settings_describe(i).key;
        int group = (int)strcspn(key, ".");
        if (i == 0 || strncmp(key, qe_settings_describe(i - 1).key, (size_t)group + 1) != 0)
            snprintf(whole + strlen(whole), sizeof whole - strlen(whole), "%.*s:\n", group, key);
        int length = qe_settings_value_text(&settings, i, value, sizeof value);
        assert_int_equal(length, strlen(value));
        snprintf(whole + strlen(whole), sizeof whole - strlen(whole), "  %s: %s\n", key + group + 1, value);
    }
    qe_settings again = loaded(here, whole);
    for (size_t i = 0; i < qe_settings_count(); i++) {
        char second[700];
        qe_settings_value_text(&settings, i, value, sizeof value);
        qe_settings_value_text(&again, i, second, sizeof second);
        assert_string_equal(second, value);
    }
    assert_true(again.model.rope_theta == settings.model.rope_theta);
    assert_true(again.model.norm_epsilon == settings.model.norm_epsilon);
    assert_string_equal(again.data.path, "a \"b\" \\ \n\xC3\xA9");
}

static void the_longest_text_fits_where_values_are_written_and_reads_back(void **state) {
    qe_settings settings, again;
    char value[QE_SETTINGS_VALUE_BYTES], file[QE_SETTINGS_VALUE_BYTES + 64];
    size_t path = 0;
    while (strcmp(qe_settings_describe(path).key, "data.path") != 0) path++;
    for (unsigned byte = 1; byte < 256; byte++) {
        qe_settings_default(&settings);
        memset(settings.data.path, (int)byte, sizeof settings.data.path - 1);
        int length = qe_settings_value_text(&settings, path, value, sizeof value);
        assert_in_range(length, sizeof settings.data.path + 1, sizeof value - 1);
        if (byte >= 0x80) continue; /* not UTF-8: written as U+FFFD, which takes more bytes than there were */
        snprintf(file, sizeof file, "data:\n  path: %s\n", value);
        again = loaded(*state, file);
        assert_string_equal(again.data.path, settings.data.path);
    }
}

static char *read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    char *text = calloc(1, 100000);
    assert_true(fread(text, 1, 99999, file) > 0);
    fclose(file);
    return text;
}

static void the_documentation_lists_every_key_as_the_table_has_it(void **state) {
    (void)state;
    char *document = read_file("docs/config.md");
    for (size_t i = 0; i < qe_settings_count(); i++) {
        qe_settings_description about = qe_settings_describe(i);
        char line[600], kind[100];
        size_t length = 0;
        for (const char *c = about.kind; *c != '\0'; c++) {
            if (*c == '|') kind[length++] = '\\'; /* inside a Markdown table */
            kind[length++] = *c;
        }
        kind[length] = '\0';
        snprintf(line, sizeof line, "\n| `%s` | %s | `%s` | %s |\n", about.key, kind, about.initial, about.help);
        assert_says(document, line);
    }
    free(document);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(the_defaults_are_the_quickstart),
        TEST(the_example_spells_out_every_default),
        TEST(a_file_overrides_what_it_names_and_nothing_else),
        TEST(whole_numbers_are_read_strictly),
        TEST(numbers_are_read_strictly),
        TEST(numbers_that_leave_their_bounds_as_floats_are_refused),
        TEST(truth_values_and_words_are_read_strictly),
        TEST(texts_are_texts_and_never_nothing),
        TEST(unknown_keys_name_the_nearest_right_one),
        TEST(the_wrong_shape_is_refused_where_it_stands),
        TEST(an_empty_configuration_is_refused),
        TEST(keys_and_groups_given_twice_are_refused_with_both_lines),
        TEST(anchors_aliases_tags_directives_and_documents_are_refused),
        TEST(what_is_not_yaml_is_refused_with_its_place),
        TEST(hostile_files_end_quickly),
        TEST(files_that_are_no_configuration_are_refused),
        TEST(set_changes_one_value),
        TEST(a_bad_set_is_a_usage_error_and_changes_nothing),
        TEST(values_that_do_not_fit_together_are_refused_where_they_were_written),
        TEST(a_misfit_from_set_is_a_usage_error),
        TEST(long_and_strange_values_are_shown_short_and_clean),
        TEST(every_value_written_as_text_reads_back_the_same),
        TEST(the_longest_text_fits_where_values_are_written_and_reads_back),
        TEST(the_documentation_lists_every_key_as_the_table_has_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
