/* replay.c - every kept input once more, without libFuzzer: part of all tests.
 *
 *   fuzz_replay CORPUS [READER]     CORPUS/READER/INPUT; with READER, that folder alone */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz/fuzz.h"

static int replay_file(const fuzz_reader *reader, const char *path) {
    static uint8_t bytes[1 << 20];
    FILE *file = fopen(path, "rb");
    if (file == NULL) return 0;
    size_t count = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    fuzz_one(reader, bytes, count);
    return 1;
}

static int replay_folder(const fuzz_reader *reader, const char *corpus) {
    char path[1024];
    int count = 0;
    snprintf(path, sizeof path, "%s/%s", corpus, reader->name);
    DIR *folder = opendir(path);
    if (folder == NULL) return 0;
    for (struct dirent *one = readdir(folder); one != NULL; one = readdir(folder)) {
        if (one->d_name[0] == '.') continue;
        int length = snprintf(path, sizeof path, "%s/%s/%s", corpus, reader->name, one->d_name);
        if (length > 0 && (size_t)length < sizeof path) count += replay_file(reader, path);
    }
    closedir(folder);
    return count;
}

int main(int count, char **words) {
    int failed = count < 2;
    for (const fuzz_reader *reader = fuzz_readers; count > 1 && reader->name != NULL; reader++) {
        if (count > 2 && strcmp(words[2], reader->name) != 0) continue;
        int inputs = replay_folder(reader, words[1]);
        printf("%-12s %5d inputs\n", reader->name, inputs);
        failed |= inputs == 0; /* a corpus that is not there tests nothing */
    }
    return failed;
}
