/* command_generate.c - `qeffect generate`: continues a text with a trained model, one byte at a time.
 *
 * Every token runs the whole window through the evaluation plan; there is no key-value cache, so a window longer than
 * the model's is cut at the front. Weights are used as they are (recipe fp32): no scale is needed. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <jansson.h>
#include "base/assert.h"
#include "base/prng.h"
#include "base/text.h"
#include "cli/observed.h"

typedef struct sampler {
    double temperature;
    uint32_t top_k, vocab;
    qe_prng prng;
    uint64_t drawn;
} sampler;

typedef struct candidate {
    float logit;
    int32_t token;
} candidate;

static int by_logit(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return x->token - y->token; /* equal logits: the smaller token, so that runs repeat */
}

/* Draws from softmax(logits / temperature) over the top_k largest; temperature 0 takes the largest. */
static int32_t sample(sampler *s, const float *logits, candidate *scratch) {
    for (uint32_t i = 0; i < s->vocab; i++) scratch[i] = (candidate){logits[i], (int32_t)i};
    qsort(scratch, s->vocab, sizeof *scratch, by_logit);
    if (s->temperature <= 0) return scratch[0].token;
    double total = 0;
    for (uint32_t i = 0; i < s->top_k; i++) total += exp((scratch[i].logit - scratch[0].logit) / s->temperature);
    double left = qe_prng_uniform(&s->prng, s->drawn++) * total;
    for (uint32_t i = 0; i < s->top_k; i++) {
        left -= exp((scratch[i].logit - scratch[0].logit) / s->temperature);
        if (left < 0) return scratch[i].token;
    }
    return scratch[s->top_k - 1].token;
}

/* One window of one sequence on one rank. */
static void settings_for(const qe_store_model *model, qe_settings *settings) {
    qe_settings_default(settings);
    settings->model.layers = model->layers;
    settings->model.hidden = model->hidden;
    settings->model.heads = model->heads;
    settings->model.kv_heads = model->kv_heads;
    settings->model.ffn = model->ffn;
    settings->model.vocab = model->vocab;
    settings->model.sequence = model->sequence;
    settings->model.rope_theta = model->rope_theta;
    settings->model.norm_epsilon = model->norm_epsilon;
    settings->train.sequences = 1;
    settings->train.mode = QE_TRAIN_BASELINE;
    settings->pipeline.ranks = settings->pipeline.chunks = settings->pipeline.microbatches = 1;
    settings->recipe.kind = QE_RECIPE_FP32;
}

/* Logits behind the last of `length` tokens; positions after it are padding that causal attention never sees. */
static qe_status next_logits(qe_session *session, const int32_t *text, size_t length, float *window_logits,
                             const float **logits_out, qe_step_result *result, qe_error *error) {
    const qe_settings_model *m = &session->settings.model;
    size_t kept = length < m->sequence ? length : m->sequence;
    memset(session->tokens, 0, m->sequence * sizeof *session->tokens);
    memcpy(session->tokens, text + length - kept, kept * sizeof *text);
    for (size_t i = 0; i < m->sequence; i++) session->targets[i] = -1;
    qe_batch batch = {.tokens = session->tokens, .targets = session->targets};
    uint64_t bytes = (uint64_t)m->sequence * m->vocab * sizeof(float);
    QE_TRY(qe_team_evaluate(session->team, &batch, NULL, window_logits,
                            qe_model_logits_offset_bytes(session->model, session->schedule.stages), bytes, result,
                            error));
    *logits_out = window_logits + (kept - 1) * m->vocab;
    return QE_OK;
}

/* last_logits: [vocab] what the last token was drawn from. */
static qe_status continue_text(qe_session *session, sampler *s, int32_t *text, size_t given, size_t total, int echo,
                               float *last_logits, qe_observed *observed, qe_step_result *result, qe_error *error) {
    const qe_settings_model *m = &session->settings.model;
    float *window = malloc((size_t)m->sequence * m->vocab * sizeof *window);
    candidate *scratch = malloc(m->vocab * sizeof *scratch);
    qe_status status =
        window && scratch ? QE_OK : qe_error_set(error, QE_ERROR_MEMORY, NULL, "no memory for the logits of a window");
    for (size_t length = given; status == QE_OK && length < total; length++) {
        const float *logits;
        status = next_logits(session, text, length, window, &logits, result, error);
        if (status != QE_OK) break;
        qe_observed_note(observed, session, "generation", length - given + 1, result);
        text[length] = sample(s, logits, scratch);
        memcpy(last_logits, logits, m->vocab * sizeof *logits);
        if (!echo) continue;
        if (m->vocab == 256)
            putchar(text[length]);
        else
            printf(" %d", text[length]);
        fflush(stdout);
    }
    free(window);
    free(scratch);
    return status;
}

static int parse_temperature(qe_cli *cli, double *temperature_out) {
    const char *text = qe_cli_value(cli, "temperature");
    *temperature_out = 0.8;
    if (text == NULL || (qe_text_to_double(text, temperature_out) && *temperature_out >= 0 && *temperature_out <= 100))
        return QE_EXIT_OK;
    return qe_cli_usage(cli, "--temperature is '%s'; expected a number from 0 to 100", text);
}

static int print_result(qe_cli *cli, const char *prompt, const int32_t *text, size_t given, size_t total,
                        const float *last_logits, uint32_t vocab) {
    if (!cli->json) {
        putchar('\n');
        return QE_EXIT_OK;
    }
    json_t *tokens = json_array();
    char *bytes = calloc(total - given + 1, 1);
    for (size_t i = given; i < total; i++) {
        json_array_append_new(tokens, json_integer(text[i]));
        if (bytes != NULL) bytes[i - given] = (char)text[i];
    }
    json_t *document = json_pack("{s:o, s:o}", "prompt", qe_cli_json_text(prompt), "tokens", tokens);
    json_t *string = vocab == 256 && bytes != NULL ? json_string(bytes) : NULL; /* NULL where the bytes are not UTF-8 */
    if (string != NULL) json_object_set_new(document, "text", string);
    free(bytes);
    json_t *logits = json_array();
    for (uint32_t i = 0; i < vocab; i++) json_array_append_new(logits, json_real((double)last_logits[i]));
    json_object_set_new(document, "last_logits", logits);
    return qe_cli_json(document, QE_EXIT_OK);
}

static int refuse(qe_cli *cli, qe_session *session, const qe_step_result *result) {
    json_t *breach = NULL;
    qe_session_report_breach(session, cli->program, result, &breach);
    if (cli->json) return qe_cli_json(json_pack("{s:o}", "breach", breach), QE_EXIT_CONTRACT);
    json_decref(breach);
    return QE_EXIT_CONTRACT;
}

static int generate(qe_cli *cli, qe_session *session, sampler *s, const char *prompt, size_t count) {
    qe_error error = {0};
    size_t given = strlen(prompt), total = given + count;
    int32_t *text = calloc(total, sizeof *text);
    float *logits = calloc(s->vocab, sizeof *logits);
    if (text == NULL || logits == NULL) {
        free(text);
        free(logits);
        (void)qe_error_set(&error, QE_ERROR_MEMORY, "ask for fewer (--tokens)", "no memory for %zu tokens", count);
        return qe_cli_error(cli, &error);
    }
    for (size_t i = 0; i < given; i++) text[i] = (unsigned char)prompt[i];
    if (!cli->json) fputs(prompt, stdout);
    qe_observed observed = {0};
    qe_step_result result;
    qe_status status = continue_text(session, s, text, given, total, !cli->json, logits, &observed, &result, &error);
    int exit_status = status == QE_OK         ? print_result(cli, prompt, text, given, total, logits, s->vocab)
                      : status == QE_CONTRACT ? refuse(cli, session, &result)
                                              : qe_cli_error(cli, &error);
    qe_observed_print(&observed, session, cli->program);
    free(text);
    free(logits);
    return exit_status;
}

static qe_status open_model(qe_cli *cli, qe_session *session, qe_error *error) {
    const char *directory = cli->arguments[0], *contracts = qe_cli_value(cli, "contracts");
    qe_store_model model;
    qe_settings settings;
    char path[QE_ERROR_PATH_BYTES];
    qe_status status = qe_store_read_model_config(directory, &model, error);
    if (status == QE_ERROR_IO) /* most often nothing was trained yet, or the command runs in another folder */
        snprintf(error->remedy, sizeof error->remedy,
                 "train first, or name the directory that `qeffect train` named at its end (checkpoint.path)");
    QE_TRY(status);
    settings_for(&model, &settings);
    char assignment[QE_SETTINGS_TEXT_BYTES];
    snprintf(assignment, sizeof assignment, "contracts.mode=%s", contracts != NULL ? contracts : "trap");
    QE_TRY(qe_settings_set(&settings, assignment, error));
    qe_session_options options = {.training = 0, .data = 0};
    QE_TRY(qe_session_open(session, &settings, &options, error));
    int length = snprintf(path, sizeof path, "%s/model.safetensors", directory);
    if (length >= (int)sizeof path)
        return qe_error_set(error, QE_ERROR_LIMIT, "use a shorter path", "the path of the model is too long");
    return qe_session_load(session, path, error);
}

static int run_generate(qe_cli *cli) {
    qe_error error = {0};
    qe_session session = {0};
    sampler s = {.prng = {0}};
    uint64_t tokens, top_k, seed;
    const char *prompt = qe_cli_value(cli, "prompt");
    if (prompt == NULL) prompt = "And God said, ";
    if (prompt[0] == 0) return qe_cli_usage(cli, "--prompt is empty; give at least one character to continue from");
    if (qe_cli_number(cli, "tokens", 1, 1000000, 300, &tokens) != 0 ||
        qe_cli_number(cli, "top-k", 1, 65536, 40, &top_k) != 0 ||
        qe_cli_number(cli, "seed", 0, UINT64_MAX, 1, &seed) != 0 ||
        parse_temperature(cli, &s.temperature) != QE_EXIT_OK)
        return QE_EXIT_USAGE;
    qe_status status = open_model(cli, &session, &error);
    int exit_status;
    if (status != QE_OK)
        exit_status = qe_cli_error(cli, &error);
    else {
        s.vocab = session.settings.model.vocab;
        s.top_k = top_k < s.vocab ? (uint32_t)top_k : s.vocab;
        s.prng = qe_prng_make(seed, "generate");
        if (s.vocab < 256)
            exit_status = qe_cli_usage(cli, "a model of %u tokens cannot read the bytes of a prompt", s.vocab);
        else
            exit_status = generate(cli, &session, &s, prompt, tokens);
    }
    qe_session_close(&session);
    return exit_status;
}

static const qe_cli_option options[] = {
    {"prompt", 'p', "TEXT", "text to continue (default \"And God said, \")", 0},
    {"tokens", 'n', "N", "how many tokens to add (default 300)", 0},
    {"temperature", 't', "T", "0: always the likeliest; default 0.8", 0},
    {"top-k", 0, "K", "draw from the K likeliest (default 40)", 0},
    {"seed", 0, "S", "of the draws (default 1); the same seed gives the same text", 0},
    {"contracts", 0, "MODE", "trap (default), observe or off", 0},
    {NULL, 0, NULL, NULL, 0},
};

const qe_command qe_command_generate = {
    .name = "generate",
    .arguments = "MODEL_DIR",
    .summary = "continue a text with a trained model",
    .details =
        "MODEL_DIR is what `qeffect train` leaves in checkpoint.path: model.safetensors and config.json, in the "
        "Hugging\n"
        "Face Llama layout. Tokens are bytes.\n"
        "\n"
        "Examples:\n"
        "  qeffect generate run/quickstart\n"
        "  qeffect generate run/quickstart --prompt \"In the beginning\" --tokens 500 --temperature 0.6\n",
    .options = options,
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run_generate,
};
