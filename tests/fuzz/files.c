/* files.c - tensors, manifests, data and what was chosen: files that programs write, and anybody may damage. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/choices.h"
#include "base/hash.h"
#include "fuzz/readers.h"
#include "qeffect/data.h"
#include "qeffect/te_state.h"
#include "store/manifest.h"

void fuzz_safetensors(const uint8_t *bytes, size_t count) {
    qe_safetensors *file = NULL;
    qe_error error = {0};
    qe_te_scale scale;
    int found;
    qe_status status = qe_safetensors_open(fuzz_file(bytes, count), &file, &error);
    fuzz_check_refusal(status, &error);
    if (status != QE_OK) return;
    uint64_t sum = 0;
    for (size_t i = 0; i < qe_safetensors_count(file); i++) {
        const qe_tensor *tensor = qe_safetensors_at(file, i);
        for (uint64_t k = 0; k < tensor->bytes; k++) sum += ((const uint8_t *)tensor->data)[k];
        fuzz_check(qe_safetensors_find(file, tensor->name) == tensor, "a tensor is not found by its name");
    }
    (void)qe_safetensors_metadata(file, "format");
    (void)qe_te_is_pickled(file, "a");
    status = qe_te_scale_find(file, "a", (qe_te_role)(sum % 3), &scale, &found, &error);
    fuzz_check_refusal(status, &error);
    if (status == QE_OK && found) { /* the last row is inside */
        volatile float last = scale.history[(scale.length - 1) * scale.stride];
        (void)last;
    }
    qe_safetensors_close(file);
}

/* A manifest without its own right hash is refused before it is read: an input that ends as one gets it here. */
static char *sealed(const uint8_t *bytes, size_t count, size_t *count_out) {
    char digest[QE_HASH_TEXT_BYTES], *text = malloc(count + 128);
    fuzz_check(text != NULL, "no memory");
    memcpy(text, bytes, count);
    while (count > 0 && (text[count - 1] == '\n' || text[count - 1] == '}')) count--;
    qe_hash_text(qe_hash_bytes(text, count), digest);
    int length = snprintf(text + count, 128, "%s%s\"\n}\n", QE_MANIFEST_SEAL, digest);
    *count_out = count + (size_t)length;
    return text;
}

void fuzz_manifest(const uint8_t *bytes, size_t count) {
    qe_manifest manifest;
    qe_error error = {0};
    size_t length = count;
    int as_it_is = count > 0 && bytes[0] == '#';
    char *text = as_it_is ? strndup((const char *)bytes + 1, count - 1) : sealed(bytes, count, &length);
    fuzz_check(text != NULL, "no memory");
    if (as_it_is) length = strlen(text);
    qe_status status = qe_manifest_read_text(text, length, "manifest.json", &manifest, &error);
    fuzz_check_refusal(status, &error);
    if (status == QE_OK) { /* it is written again, and reads as the same */
        qe_manifest again;
        char *other = NULL;
        status = qe_manifest_write_text(&manifest, "manifest.json", &other, &length, &error);
        fuzz_check(status == QE_OK, error.message);
        status = qe_manifest_read_text(other, length, "manifest.json", &again, &error);
        fuzz_check(status == QE_OK, error.message);
        fuzz_check(again.step == manifest.step && again.file_count == manifest.file_count, "another when read again");
        qe_manifest_deinit(&again);
        free(other);
    }
    qe_manifest_deinit(&manifest);
    free(text);
}

/* The first byte: as text, as tokens, or as the file says; the second: a vocabulary. */
void fuzz_data(const uint8_t *bytes, size_t count) {
    static const qe_data_format formats[] = {QE_DATA_AUTO, QE_DATA_TEXT, QE_DATA_TOKENS};
    qe_dataset *dataset = NULL;
    qe_error error = {0};
    char digest[QE_DATA_DIGEST_BYTES];
    if (count < 2) return;
    qe_dataset_options options = {.path = fuzz_file(bytes + 2, count - 2),
                                  .format = formats[bytes[0] % 3],
                                  .validation = bytes[1] % 4 * 0.2,
                                  .sequence = 1u + bytes[1] % 7,
                                  .vocab = 256u << bytes[1] % 9};
    qe_status status = qe_dataset_open(&options, &dataset, &error);
    fuzz_check_refusal(status, &error);
    if (status != QE_OK) return;
    int32_t tokens[64], targets[64];
    qe_dataset_batch(dataset, QE_DATA_TRAIN, 7, bytes[0], 2, tokens, targets);
    for (uint32_t i = 0; i < 2 * options.sequence; i++)
        fuzz_check(tokens[i] >= 0 && (uint32_t)tokens[i] < options.vocab, "a token beyond the vocabulary");
    if (qe_dataset_describe(dataset).validation_windows > 0)
        qe_dataset_batch(dataset, QE_DATA_VALIDATION, 7, bytes[0], 2, tokens, targets);
    qe_dataset_digest(dataset, digest);
    qe_dataset_close(dataset);
}

void fuzz_model(const uint8_t *bytes, size_t count) {
    qe_store_model model;
    qe_error error = {0};
    (void)fuzz_file(bytes, count);
    fuzz_check_refusal(qe_store_read_model_config(fuzz_folder(), &model, &error), &error);
}

static qe_status choice_count(void *context, const qe_cuda_choice *choice, qe_error *error_out) {
    (void)error_out;
    *(uint64_t *)context += choice->workspace_bytes ^ choice->words[0];
    return QE_OK;
}

void fuzz_choices(const uint8_t *bytes, size_t count) {
    const qe_choice_maker maker = {"cuBLASLt 13.1.0", "NVIDIA H200", "cuDNN 9.19.0"};
    uint64_t sum = 0;
    qe_error error = {0};
    fuzz_check_refusal(qe_choices_scan(fuzz_file(bytes, count), &maker, choice_count, &sum, &error), &error);
}
