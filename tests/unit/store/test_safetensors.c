/* The store: what is written reads back, hostile files are refused, and a failed write leaves nothing. */
#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>
#include <jansson.h>
#include "qeffect/safetensors.h"

typedef struct fixture {
    char folder[64], path[96];
} fixture;

static int setup(void **state) {
    fixture *here = calloc(1, sizeof *here);
    snprintf(here->folder, sizeof here->folder, "/tmp/qe-store-XXXXXX");
    if (mkdtemp(here->folder) == NULL) return -1;
    snprintf(here->path, sizeof here->path, "%s/a.safetensors", here->folder);
    *state = here;
    return 0;
}

/* Removes a folder and what is in it; returns how many entries there were, whole subfolders included. */
static int clear(const char *folder) {
    int count = 0;
    DIR *open_folder = opendir(folder);
    if (open_folder == NULL) return 0;
    for (struct dirent *one = readdir(open_folder); one != NULL; one = readdir(open_folder)) {
        char path[512];
        if (strcmp(one->d_name, ".") == 0 || strcmp(one->d_name, "..") == 0) continue;
        snprintf(path, sizeof path, "%s/%s", folder, one->d_name);
        count++;
        if (unlink(path) != 0) count += clear(path);
    }
    closedir(open_folder);
    rmdir(folder);
    return count;
}

static int teardown(void **state) {
    fixture *here = *state;
    clear(here->folder);
    free(here);
    return 0;
}

#define assert_says(text, part) \
    do { if (strstr((text), (part)) == NULL) fail_msg("\"%s\" does not say \"%s\"", (text), (part)); } while (0)
#define COUNT(array) (sizeof(array) / sizeof *(array))

static void write_file(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static size_t read_file(const char *path, char *bytes, size_t capacity) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    size_t size = fread(bytes, 1, capacity, file);
    fclose(file);
    return size;
}

/* A safetensors file of this header and this many zero bytes behind it. */
static void write_raw(const char *path, const char *header, size_t data_bytes) {
    size_t length = strlen(header);
    char *bytes = calloc(1, 8 + length + data_bytes);
    for (int i = 0; i < 8; i++) bytes[i] = (char)(length >> 8 * i);
    memcpy(bytes + 8, header, length);
    write_file(path, bytes, 8 + length + data_bytes);
    free(bytes);
}

static qe_error refusal(const fixture *here, qe_status expected) {
    qe_safetensors *file = NULL;
    qe_error error = {0};
    qe_status status = qe_safetensors_open(here->path, &file, &error);
    if (status != expected) fail_msg("status %d (%s), expected %d", status, error.message, expected);
    assert_null(file);
    assert_string_equal(error.path, here->path);
    assert_true(error.remedy[0] != '\0');
    return error;
}

static const float floats[6] = {1.5f, -2, 3e-40f, 0, 1e30f, -0.0f};
static const uint8_t bytes3[3] = {1, 2, 255};
static const uint16_t halves[2] = {0x3F80, 0xC000};

static size_t make_tensors(qe_tensor tensors[5]) {
    tensors[0] = qe_tensor_make("model.a.weight", QE_DTYPE_F32, 2, (const uint64_t[]){2, 3}, floats);
    tensors[1] = qe_tensor_make("codes", QE_DTYPE_U8, 1, (const uint64_t[]){3}, bytes3);
    tensors[2] = qe_tensor_make("g\xC3\xA9 \"x\"", QE_DTYPE_BF16, 1, (const uint64_t[]){2}, halves);
    tensors[3] = qe_tensor_make("empty", QE_DTYPE_F16, 3, (const uint64_t[]){4, 0, 2}, NULL);
    tensors[4] = qe_tensor_make("scalar", QE_DTYPE_F32, 0, NULL, floats);
    return 5;
}

static void write_good(const char *path) {
    qe_tensor tensors[5];
    qe_error error = {0};
    const qe_metadata metadata[] = {{"format", "pt"}, {"seed", "1 \"one\""}};
    size_t count = make_tensors(tensors);
    if (qe_safetensors_write(path, tensors, count, metadata, 2, &error) != QE_OK) fail_msg("%s", error.message);
}

static void what_is_written_reads_back(void **state) {
    fixture *here = *state;
    qe_tensor tensors[5];
    size_t count = make_tensors(tensors);
    write_good(here->path);
    qe_safetensors *file = NULL;
    qe_error error = {0};
    if (qe_safetensors_open(here->path, &file, &error) != QE_OK) fail_msg("%s", error.message);
    assert_int_equal(qe_safetensors_count(file), count);
    for (size_t i = 0; i < count; i++) {
        const qe_tensor *found = qe_safetensors_find(file, tensors[i].name);
        assert_non_null(found);
        assert_string_equal(found->name, tensors[i].name);
        assert_int_equal(found->dtype, tensors[i].dtype);
        assert_int_equal(found->rank, tensors[i].rank);
        assert_memory_equal(found->shape, tensors[i].shape, sizeof found->shape);
        assert_int_equal(found->bytes, tensors[i].bytes);
        assert_int_equal((uintptr_t)found->data % 8, 0);
        if (found->bytes > 0) assert_memory_equal(found->data, tensors[i].data, found->bytes);
    }
    assert_null(qe_safetensors_find(file, "other"));
    assert_string_equal(qe_safetensors_metadata(file, "format"), "pt");
    assert_string_equal(qe_safetensors_metadata(file, "seed"), "1 \"one\"");
    assert_null(qe_safetensors_metadata(file, "other"));
    assert_string_equal(qe_safetensors_at(file, 0)->name, "model.a.weight");
    qe_safetensors_close(file);
    unlink(here->path);
    assert_int_equal(clear(here->folder), 0); /* nothing beside it */
}

static void the_layout_is_the_formats(void **state) {
    fixture *here = *state;
    char bytes[512];
    qe_tensor tensor = qe_tensor_make("a", QE_DTYPE_F32, 2, (const uint64_t[]){1, 2}, floats);
    assert_int_equal(qe_safetensors_write(here->path, &tensor, 1, NULL, 0, NULL), QE_OK);
    size_t size = read_file(here->path, bytes, sizeof bytes);
    static const char header[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]}}";
    assert_int_equal((unsigned char)bytes[0], 56);
    assert_int_equal(size, 8 + 56 + 8);
    assert_memory_equal(bytes + 1, "\0\0\0\0\0\0\0", 7);
    assert_memory_equal(bytes + 8, header, sizeof header - 1);
    for (size_t i = 8 + sizeof header - 1; i < 64; i++) assert_int_equal(bytes[i], ' ');
    assert_memory_equal(bytes + 64, floats, 8);
}

static void a_file_without_tensors_is_a_file(void **state) {
    fixture *here = *state;
    assert_int_equal(qe_safetensors_write(here->path, NULL, 0, NULL, 0, NULL), QE_OK);
    qe_safetensors *file = NULL;
    assert_int_equal(qe_safetensors_open(here->path, &file, NULL), QE_OK);
    assert_int_equal(qe_safetensors_count(file), 0);
    qe_safetensors_close(file);
}

static void tensors_that_contradict_themselves_are_not_written(void **state) {
    fixture *here = *state;
    qe_tensor good = qe_tensor_make("a", QE_DTYPE_F32, 1, (const uint64_t[]){2}, floats), bad = good;
    qe_tensor both[2] = {good, good};
    qe_error error = {0};
    assert_int_equal(qe_safetensors_write(here->path, both, 2, NULL, 0, &error), QE_ERROR_ARGUMENT);
    assert_says(error.message, "the name \"a\" is taken");
    bad.bytes = 7;
    assert_int_equal(qe_safetensors_write(here->path, &bad, 1, NULL, 0, &error), QE_ERROR_ARGUMENT);
    assert_says(error.message, "has 7 bytes, its shape means 8");
    bad = good, bad.name = "\xFF";
    assert_int_equal(qe_safetensors_write(here->path, &bad, 1, NULL, 0, &error), QE_ERROR_ARGUMENT);
    bad = good, bad.name = "__metadata__";
    assert_int_equal(qe_safetensors_write(here->path, &bad, 1, NULL, 0, &error), QE_ERROR_ARGUMENT);
    bad = good, bad.data = NULL;
    assert_int_equal(qe_safetensors_write(here->path, &bad, 1, NULL, 0, &error), QE_ERROR_ARGUMENT);
    bad = good, bad.rank = 9;
    assert_int_equal(qe_safetensors_write(here->path, &bad, 1, NULL, 0, &error), QE_ERROR_ARGUMENT);
    bad = good, bad.dtype = QE_DTYPES;
    assert_int_equal(qe_safetensors_write(here->path, &bad, 1, NULL, 0, &error), QE_ERROR_ARGUMENT);
    bad = good, bad.rank = 2, bad.shape[0] = UINT64_MAX / 2, bad.shape[1] = 4;
    assert_int_equal(qe_safetensors_write(here->path, &bad, 1, NULL, 0, &error), QE_ERROR_ARGUMENT);
    const qe_metadata metadata = {"key", "\xFF"};
    assert_int_equal(qe_safetensors_write(here->path, &good, 1, &metadata, 1, &error), QE_ERROR_ARGUMENT);
    assert_int_equal(clear(here->folder), 0);
}

static void hostile_headers_are_refused(void **state) {
    fixture *here = *state;
    static const struct { const char *header; size_t data_bytes; const char *says; } cases[] = {
        {"", 0, "header is said to have 0 bytes"},
        {"[]", 0, "does not begin with {"},
        {" {}", 0, "does not begin with {"},
        {"{\"a\":1", 0, "not JSON"},
        {"{}x", 0, "not JSON"},
        {"{\"a\\u0000\":1}", 0, "not JSON"},
        {"{\"\xFF\":1}", 0, "not JSON"},
        {"{}", 1, "1 bytes at the end belong to no tensor"},
        {"{\"a\":4}", 0, "not described by an object"},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "unknown dtype \"\""},
        {"{\"a\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "unknown dtype \"F33\""},
        {"{\"a\":{\"dtype\":4,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "unknown dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "shape is not a list"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "dimension 0 is not a size"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4, "dimension 0 is not a size"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,4]}}", 4, "not JSON"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}", 0, "too large"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "not a pair of whole numbers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 8, "not a pair of whole numbers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,\"4\"]}}", 4, "not a pair of whole numbers"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "outside the data"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, "outside the data"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4, "outside the data of 4 bytes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4,
         "has 4 bytes of data, its shape means 8"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}", 6, "\"a\" and \"b\" overlap"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "overlap"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}", 6, "2 bytes before tensor \"a\""},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "duplicate"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "duplicate"},
        {"{\"__metadata__\":[]}", 0, "__metadata__ is not an object"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "\"a\" is not text"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        write_raw(here->path, cases[i].header, cases[i].data_bytes);
        assert_says(refusal(here, QE_ERROR_FORMAT).message, cases[i].says);
    }
    write_raw(here->path, "{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1);
    assert_says(refusal(here, QE_ERROR_LIMIT).message, "9 dimensions");
}

static void header_lengths_that_lie_are_refused(void **state) {
    fixture *here = *state;
    write_file(here->path, "", 0);
    assert_says(refusal(here, QE_ERROR_FORMAT).message, "has 0 bytes, expected at least 8");
    write_file(here->path, "\x02\0\0\0\0\0\0\0{", 9);
    assert_says(refusal(here, QE_ERROR_FORMAT).message, "said to have 2 bytes, the file has 9");
    write_file(here->path, "\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}", 10);
    assert_says(refusal(here, QE_ERROR_FORMAT).message, "said to have 18446744073709551615 bytes");
    write_file(here->path, "\0\0\0\x02\0\0\0\0{}", 10);
    assert_int_equal(truncate(here->path, 64 << 20), 0);
    assert_says(refusal(here, QE_ERROR_LIMIT).message, "the header has 33554432 bytes");
}

static void every_cut_and_every_flipped_byte_is_refused_or_read_safely(void **state) {
    fixture *here = *state;
    char good[1024], bad[1024];
    write_good(here->path);
    size_t size = read_file(here->path, good, sizeof good);
    for (size_t cut = 0; cut < size; cut++) {
        write_file(here->path, good, cut);
        refusal(here, QE_ERROR_FORMAT);
    }
    unsigned refused = 0, read = 0;
    for (size_t at = 0; at < size; at++) {
        for (int bit = 0; bit < 8; bit += 3) {
            memcpy(bad, good, size);
            bad[at] = (char)(bad[at] ^ 1 << bit);
            write_file(here->path, bad, size);
            qe_safetensors *file = NULL;
            qe_status status = qe_safetensors_open(here->path, &file, NULL);
            uint64_t total = 0;
            for (size_t i = 0; status == QE_OK && i < qe_safetensors_count(file); i++)
                total += qe_safetensors_at(file, i)->bytes;
            if (status == QE_OK) assert_int_equal(total, 24 + 3 + 4 + 4), read++; /* a name or a datum changed */
            else refused++;
            qe_safetensors_close(file);
        }
    }
    assert_true(refused > 100 && read > 100);
}

static void deep_and_wide_json_ends_quickly(void **state) {
    fixture *here = *state;
    size_t size = 1 << 20;
    char *text = malloc(size + 1);
    memset(text, '[', size);
    text[size] = '\0';
    memcpy(text, "{\"a\":", 5);
    write_raw(here->path, text, 0);
    assert_says(refusal(here, QE_ERROR_FORMAT).message, "not JSON");
    free(text);
}

static void missing_and_odd_files_are_refused(void **state) {
    fixture *here = *state;
    qe_safetensors *file = NULL;
    qe_error error = {0};
    assert_says(refusal(here, QE_ERROR_IO).message, "No such file");
    assert_int_equal(qe_safetensors_open(here->folder, &file, &error), QE_ERROR_IO);
    assert_says(error.message, "a directory");
    assert_int_equal(qe_safetensors_open("/dev/zero", &file, &error), QE_ERROR_IO);
    assert_int_equal(mkfifo(here->path, 0600), 0);
    assert_int_equal(qe_safetensors_open(here->path, &file, &error), QE_ERROR_IO);
}

static void a_write_replaces_a_file_or_leaves_it(void **state) {
    fixture *here = *state;
    char bytes[16], link[128];
    assert_int_equal(qe_store_write_text_atomic(here->path, "first", 5, NULL), QE_OK);
    assert_int_equal(chmod(here->path, 0640), 0);
    assert_int_equal(qe_store_write_text_atomic(here->path, "second", 6, NULL), QE_OK);
    assert_int_equal(read_file(here->path, bytes, sizeof bytes), 6);
    assert_memory_equal(bytes, "second", 6);
    struct stat kind;
    assert_int_equal(stat(here->path, &kind), 0);
    assert_int_equal(kind.st_mode & 0777, 0640);
    snprintf(link, sizeof link, "%s/link", here->folder); /* a link is written through, not replaced */
    assert_int_equal(symlink("a.safetensors", link), 0);
    assert_int_equal(qe_store_write_text_atomic(link, "third", 5, NULL), QE_OK);
    assert_int_equal(lstat(link, &kind), 0);
    assert_true(S_ISLNK(kind.st_mode));
    assert_int_equal(read_file(here->path, bytes, sizeof bytes), 5);
    assert_int_equal(clear(here->folder), 2);
}

static void directories_devices_and_missing_folders_are_not_written(void **state) {
    fixture *here = *state;
    char path[160];
    qe_error error = {0};
    assert_int_equal(qe_store_write_text_atomic(here->folder, "x", 1, &error), QE_ERROR_IO);
    assert_says(error.message, "a directory");
    assert_int_equal(qe_store_write_text_atomic("/dev/null", "x", 1, &error), QE_ERROR_IO);
    assert_says(error.message, "a device");
    struct stat kind;
    assert_int_equal(stat("/dev/null", &kind), 0);
    assert_true(S_ISCHR(kind.st_mode));
    snprintf(path, sizeof path, "%s/no/file", here->folder);
    assert_int_equal(qe_store_write_text_atomic(path, "x", 1, &error), QE_ERROR_IO);
    assert_says(error.message, "No such file");
    assert_int_equal(qe_store_write_text_atomic("", "x", 1, &error), QE_ERROR_IO);
    assert_int_equal(clear(here->folder), 0);
}

/* Tries to write 4 MiB where only 1 MiB fits: an error, the old file as it was, nothing beside it. */
static void assert_full_is_clean(const char *folder, const char *says) {
    char path[160], bytes[16];
    size_t size = 4 << 20;
    char *large = calloc(1, size);
    uint64_t shape = size;
    qe_error error = {0};
    qe_tensor tensor = qe_tensor_make("a", QE_DTYPE_U8, 1, &shape, large);
    snprintf(path, sizeof path, "%s/file", folder);
    write_file(path, "old", 3);
    assert_int_equal(qe_store_write_text_atomic(path, large, size, &error), QE_ERROR_IO);
    assert_says(error.message, says);
    assert_says(error.remedy, "the unfinished file was removed");
    assert_string_equal(error.path, path);
    assert_int_equal(qe_safetensors_write(path, &tensor, 1, NULL, 0, &error), QE_ERROR_IO);
    assert_says(error.message, says);
    assert_int_equal(read_file(path, bytes, sizeof bytes), 3);
    assert_memory_equal(bytes, "old", 3);
    free(large);
    unlink(path);
}

static void a_file_size_limit_is_a_clean_error(void **state) {
    fixture *here = *state;
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = (struct rlimit){1 << 20, before.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    assert_full_is_clean(here->folder, "File too large");
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_DFL);
    assert_int_equal(clear(here->folder), 0);
}

static void a_full_disk_is_a_clean_error(void **state) {
    fixture *here = *state;
    if (mount("none", here->folder, "tmpfs", 0, "size=1m") != 0) {
        print_message("skipped: no small file system can be mounted here (%s)\n", strerror(errno));
        skip();
    }
    assert_full_is_clean(here->folder, "No space left");
    int left = clear(here->folder);
    assert_int_equal(umount(here->folder), 0);
    assert_int_equal(left, 0);
}

static void directories_are_made_with_their_parents(void **state) {
    fixture *here = *state;
    char path[160];
    qe_error error = {0};
    snprintf(path, sizeof path, "%s/a//b/c/", here->folder);
    assert_int_equal(qe_store_make_directory(path, &error), QE_OK);
    assert_int_equal(qe_store_make_directory(path, &error), QE_OK);
    struct stat kind;
    assert_int_equal(stat(path, &kind), 0);
    assert_true(S_ISDIR(kind.st_mode));
    assert_int_equal(qe_store_make_directory("/", &error), QE_OK);
    assert_int_equal(qe_store_make_directory("", &error), QE_ERROR_IO);
    snprintf(path, sizeof path, "%s/a/file", here->folder);
    write_file(path, "x", 1);
    snprintf(path, sizeof path, "%s/a/file/under", here->folder);
    assert_int_equal(qe_store_make_directory(path, &error), QE_ERROR_IO);
    assert_says(error.message, "a file of that name is in the way");
    snprintf(path, sizeof path, "%s/a/file", here->folder);
    assert_string_equal(error.path, path);
    assert_int_equal(qe_store_make_directory("/proc/no/such", &error), QE_ERROR_IO);
    assert_string_equal(error.path, "/proc/no");
}

static const qe_store_model quickstart = {4, 128, 4, 2, 384, 256, 128, 10000, 1e-5};

static void a_model_is_written_as_transformers_reads_it_and_reads_back(void **state) {
    fixture *here = *state;
    char directory[128], path[160];
    qe_error error = {0};
    qe_tensor tensors[5];
    size_t count = make_tensors(tensors);
    const qe_metadata metadata = {"format", "pt"};
    snprintf(directory, sizeof directory, "%s/run/model", here->folder);
    if (qe_store_write_model(directory, &quickstart, tensors, count, &metadata, 1, &error) != QE_OK)
        fail_msg("%s", error.message);
    qe_store_model back = {0};
    if (qe_store_read_model_config(directory, &back, &error) != QE_OK) fail_msg("%s", error.message);
    assert_memory_equal(&back, &quickstart, sizeof back);
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    qe_safetensors *file = NULL;
    assert_int_equal(qe_safetensors_open(path, &file, NULL), QE_OK);
    assert_int_equal(qe_safetensors_count(file), count);
    qe_safetensors_close(file);
    snprintf(path, sizeof path, "%s/config.json", directory);
    json_t *config = json_load_file(path, 0, NULL);
    assert_non_null(config);
    const json_t *architectures = json_object_get(config, "architectures");
    assert_string_equal(json_string_value(json_array_get(architectures, 0)), "LlamaForCausalLM");
    assert_int_equal(json_integer_value(json_object_get(config, "num_key_value_heads")), 2);
    assert_int_equal(json_integer_value(json_object_get(config, "intermediate_size")), 384);
    assert_true(json_is_false(json_object_get(config, "tie_word_embeddings")));
    assert_true(json_is_false(json_object_get(config, "attention_bias")));
    assert_string_equal(json_string_value(json_object_get(config, "torch_dtype")), "float32");
    assert_true(json_real_value(json_object_get(config, "rms_norm_eps")) == 1e-5);
    json_decref(config);
}

static void a_configuration_of_another_model_is_refused_by_its_key(void **state) {
    fixture *here = *state;
    static const char good[] = "\"model_type\":\"llama\",\"num_hidden_layers\":2,\"hidden_size\":8,"
                               "\"intermediate_size\":16,"
                               "\"num_attention_heads\":4,\"vocab_size\":9,\"max_position_embeddings\":5";
    static const struct { const char *more; qe_status status; const char *says; } cases[] = {
        {"", QE_OK, ""},
        {",\"rope_parameters\":{\"rope_theta\":5e5},\"head_dim\":2,\"num_key_value_heads\":null", QE_OK, ""},
        {",\"tie_word_embeddings\":true", QE_ERROR_UNSUPPORTED, "tie_word_embeddings"},
        {",\"attention_bias\":true", QE_ERROR_UNSUPPORTED, "attention_bias"},
        {",\"hidden_act\":\"gelu\"", QE_ERROR_UNSUPPORTED, "hidden_act"},
        {",\"rope_scaling\":{\"type\":\"linear\"}", QE_ERROR_UNSUPPORTED, "rope_scaling"},
        {",\"head_dim\":4", QE_ERROR_UNSUPPORTED, "head_dim is 4"},
        {",\"num_key_value_heads\":3", QE_ERROR_FORMAT, "do not divide"},
        {",\"num_key_value_heads\":0", QE_ERROR_FORMAT, "num_key_value_heads"},
        {",\"rope_theta\":-1", QE_ERROR_FORMAT, "rope_theta"},
        {",\"rms_norm_eps\":\"x\"", QE_ERROR_FORMAT, "rms_norm_eps"},
        {",\"vocab_size\":9", QE_ERROR_FORMAT, "duplicate"},
        {",", QE_ERROR_FORMAT, "not JSON"},
    };
    char path[128], text[600];
    snprintf(path, sizeof path, "%s/config.json", here->folder);
    for (size_t i = 0; i < COUNT(cases); i++) {
        qe_store_model model = {0}, untouched = {0};
        qe_error error = {0};
        int length = snprintf(text, sizeof text, "{%s%s}", good, cases[i].more);
        write_file(path, text, (size_t)length);
        qe_status status = qe_store_read_model_config(here->folder, &model, &error);
        if (status != cases[i].status) fail_msg("%s: status %d, %s", cases[i].more, status, error.message);
        if (status == QE_OK) assert_int_equal(model.kv_heads, 4);
        if (status == QE_OK) assert_true(model.rope_theta == (i == 1 ? 5e5 : 10000));
        if (status == QE_OK) continue;
        assert_says(error.message, cases[i].says);
        assert_string_equal(error.path, path);
        assert_memory_equal(&model, &untouched, sizeof model);
    }
    qe_store_model model;
    qe_error error = {0};
    write_file(path, "{\"model_type\":\"gpt2\"}", 21);
    assert_int_equal(qe_store_read_model_config(here->folder, &model, &error), QE_ERROR_UNSUPPORTED);
    assert_says(error.message, "\"gpt2\", expected \"llama\"");
    write_file(path, "{\"model_type\":\"llama\"}", 22);
    assert_int_equal(qe_store_read_model_config(here->folder, &model, &error), QE_ERROR_FORMAT);
    assert_says(error.message, "num_hidden_layers is missing");
    write_file(path, "[]", 2);
    assert_int_equal(qe_store_read_model_config(here->folder, &model, &error), QE_ERROR_UNSUPPORTED);
    unlink(path);
    assert_int_equal(qe_store_read_model_config(here->folder, &model, &error), QE_ERROR_IO);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(what_is_written_reads_back),
        TEST(the_layout_is_the_formats),
        TEST(a_file_without_tensors_is_a_file),
        TEST(tensors_that_contradict_themselves_are_not_written),
        TEST(hostile_headers_are_refused),
        TEST(header_lengths_that_lie_are_refused),
        TEST(every_cut_and_every_flipped_byte_is_refused_or_read_safely),
        TEST(deep_and_wide_json_ends_quickly),
        TEST(missing_and_odd_files_are_refused),
        TEST(a_write_replaces_a_file_or_leaves_it),
        TEST(directories_devices_and_missing_folders_are_not_written),
        TEST(a_file_size_limit_is_a_clean_error),
        TEST(a_full_disk_is_a_clean_error),
        TEST(directories_are_made_with_their_parents),
        TEST(a_model_is_written_as_transformers_reads_it_and_reads_back),
        TEST(a_configuration_of_another_model_is_refused_by_its_key),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
