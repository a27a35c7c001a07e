/* test_trace_read.c - what a trace may say, and what happens to text that is not one: an error with line and column
 * that says what was found and what was expected, and a program that stays empty. */
#include "core_program.h"

#include <stdlib.h>

static const char right[] =
    "\n# a comment before the version\n"
    "qet 1 # and one behind it\n"
    "stream compute compute\r\n"
    "stream \"a caller\" caller\n"
    "event done\n"
    "scale layers.0.wq due=2 counter=5\n"
    "weight layers.0.wq counter=7\n"
    "cache layers.0.wq weight=layers.0.wq scale=layers.0.wq layouts=3 version=7 epoch=5 recipe=bf16\n"
    "grad layers.0.wq weight=layers.0.wq\n"
    "slot X counter=3\n"
    "buffer \"\\x41 \\\"b\\\"\" bytes=1000 written\n"
    "order layers.0.wq 1 0/2\n"
    "slot placed bytes=64 at=4096\n"
    "buffer placed bytes=64 at=8192\n"
    "graph F0 counter=2\n"
    "step begin\n"
    "op \"norm quantize\" on compute stage=1 mb=3 : slot.acquire X@4 slot.borrow X@4,write,stage=1,mb=3 "
    "cache.use layers.0.wq@7,epoch=5,layouts=2,recipe=bf16 buffer.read \"A \\\"b\\\"\"[10,20)@2\n"
    "record done on compute\n"
    "wait done on \"a caller\"\n"
    "op launch on compute : graph.launch F0@2,address=140737/140800 graph.launch F0@2,constant=1/1 graph.begin F0 "
    "graph.capture F0@3 graph.launch F0@3,mode=0/18446744073709551615 graph.launch F0@3\n"
    "sync event done\n"
    "sync stream compute\n"
    "\tsync   device   \n"
    "step end";

static qe_status read_text(const char *text, size_t length, qe_program *program, qe_error *error) {
    FILE *file = fmemopen((void *)(uintptr_t)text, length, "r");
    assert_non_null(file);
    qe_program_init(program);
    qe_status status = qe_trace_read(file, "some.qet", program, error);
    fclose(file);
    return status;
}

static void every_statement_is_read(void **state) {
    (void)state;
    qe_program program;
    qe_error error;
    qe_status status = read_text(right, sizeof right - 1, &program, &error);
    if (status != QE_OK) print_error("%u:%u %s\n", error.line, error.column, error.message);
    assert_int_equal(status, QE_OK);
    assert_int_equal(program.object_count, 9);
    assert_int_equal(program.stream_count, 2);
    assert_int_equal(program.event_count, 1);
    assert_int_equal(program.item_count, 9);
    assert_int_equal(program.deposit_count, 2);
    assert_string_equal(program.streams[1].name, "a caller");
    assert_int_equal(program.streams[1].role, QE_STREAM_CALLER);
    assert_string_equal(program.objects[5].name, "A \"b\"");
    assert_int_equal(program.objects[5].bytes, 1000);
    assert_int_equal(program.objects[5].counter, 1);
    assert_int_equal(program.objects[2].key_version, 7);
    assert_int_equal(program.objects[2].recipe, 3);
    assert_int_equal(program.deposits[1].use, 2);
    const qe_item *op = &program.items[1];
    assert_string_equal(program.labels[op->label].text, "norm quantize");
    assert_int_equal(op->stage, 1);
    assert_int_equal(op->microbatch, 3);
    assert_int_equal(op->line, 18);
    assert_int_equal(op->effect_count, 4);
    const qe_effect *effects = &program.effects[op->first_effect];
    assert_int_equal(effects[0].version, 1);
    assert_int_equal(effects[0].stage, 1);
    assert_int_equal(effects[0].microbatch, 3);
    assert_int_equal(effects[1].write, 1);
    assert_int_equal(effects[2].version, 0);
    assert_int_equal(effects[2].layouts, 2);
    for (int i = 2; i < 4; i++) { /* fields that a kind does not use are 0 */
        assert_int_equal(effects[i].stage, 0);
        assert_int_equal(effects[i].microbatch, 0);
        assert_int_equal(effects[i].use, 0);
    }
    assert_int_equal(effects[3].begin, 10);
    assert_int_equal(effects[3].end, 20);
    assert_int_equal(effects[3].version, 2);
    assert_int_equal(program.objects[6].address, 4096);
    assert_int_equal(program.objects[6].bytes, 64);
    assert_int_equal(program.objects[7].address, 8192);
    const qe_effect *launch = &program.effects[program.items[4].first_effect];
    assert_int_equal(program.items[4].effect_count, 6);
    assert_int_equal(launch[0].version, 0);
    assert_int_equal(launch[0].use, QE_FROZEN_ADDRESS);
    assert_int_equal(launch[0].begin, 140737);
    assert_int_equal(launch[0].end, 140800);
    assert_int_equal(launch[1].use, QE_FROZEN_CONSTANT);
    assert_int_equal(launch[3].version, 1);
    assert_int_equal(launch[4].use, QE_FROZEN_MODE);
    assert_int_equal(launch[4].end, UINT64_MAX);
    assert_int_equal(launch[5].use, QE_FROZEN_NOTHING);
    qe_program_deinit(&program);
}

#define HEAD                                                                    \
    "qet 1\nstream s compute\nevent e\nslot X\nweight w\nscale c\ncache q weight=w\n" \
    "grad g weight=w\nbuffer b bytes=8\n"
enum { HEAD_LINES = 9 };

typedef struct bad_text {
    const char *text;
    uint32_t line, column;
    const char *found, *expected; /* pieces of the message */
} bad_text;

static const bad_text bad_texts[] = {
    {"", 1, 1, "end of the line", "qet 1"},
    {"# nothing\n", 2, 1, "end of the line", "qet 1"},
    {"stream s compute\n", 1, 1, "`stream`", "qet 1"},
    {"qet\n", 1, 1, "`qet`", "qet 1"},
    {"qet 2\n", 1, 5, "`2`", "another version"},
    {"qet 11\n", 1, 5, "`11`", "another version"},
    {"qet 1 x\n", 1, 7, "`x`", "the end of the line"},
    {"qet 1\nfrobnicate\n", 2, 1, "`frobnicate`", "op, record"},
    {"qet 1\nstream s gpu\n", 2, 10, "`gpu`", "compute, comm, caller or host"},
    {"qet 1\nstream s\n", 2, 9, "end of the line", "compute"},
    {"qet 1\nslot X now\n", 2, 8, "`now`", "counter=N"},
    {"qet 1\nstream s compute now\n", 2, 18, "`now`", "the end of the line"},
    {"qet 1\nslot X\nslot X\n", 3, 6, "`X`", "no other slot has"},
    {"qet 1\nslot X counter=-1\n", 2, 16, "`-1`", "a number up to"},
    {"qet 1\nslot X counter=010\n", 2, 16, "`010`", "a number up to"},
    {"qet 1\nslot X counter=18446744073709551616\n", 2, 16, "`18446744073709551616`", "a number up to"},
    {"qet 1\nscale S due=4294967296\n", 2, 13, "`4294967296`", "a number up to 4294967295"},
    {"qet 1\nbuffer b\n", 2, 9, "end of the line", "bytes=N"},
    {"qet 1\nbuffer b bytes=4x\n", 2, 17, "`x`", "a blank or the end of the line"},
    {"qet 1\nbuffer b bytes=4 counter=1\n", 2, 18, "`counter=1`", "bytes=N, at=N, written"},
    {"qet 1\ncache q\n", 2, 8, "end of the line", "weight=NAME"},
    {"qet 1\ncache q weight=w\n", 2, 16, "`w`", "a declared weight"},
    {"qet 1\nscale w\ncache q weight=w\n", 3, 16, "`w`", "a declared weight"},
    {"qet 1\nslot \"\"\n", 2, 7, "`\"`", "not empty"},
    {"qet 1\nslot \"abc\n", 2, 10, "end of the line", "closing \""},
    {"qet 1\nslot \"a\\q\"\n", 2, 9, "`q\"`", "\\x and two hex digits"},
    {"qet 1\nslot \"a\\x00\"\n", 2, 10, "`00\"`", "not 00"},
    {HEAD "op k on t\n", HEAD_LINES + 1, 9, "`t`", "a declared stream"},
    {HEAD "op k in s\n", HEAD_LINES + 1, 6, "`in`", "`on` and a stream"},
    {HEAD "op k on s mb=4294967295\n", HEAD_LINES + 1, 14, "`4294967295`", "up to 4294967294"},
    {HEAD "op k on s stage=65536\n", HEAD_LINES + 1, 17, "`65536`", "up to 65535"},
    {HEAD "op k on s slot.borrow X@1\n", HEAD_LINES + 1, 11, "`slot.borrow`", "`:` and the effects"},
    {HEAD "op k on s : slot.take X@1\n", HEAD_LINES + 1, 13, "`slot.take`", "an effect"},
    {HEAD "op k on s : slot.borrow Y@1\n", HEAD_LINES + 1, 25, "`Y@1`", "a declared slot"},
    {HEAD "op k on s : slot.borrow w@1\n", HEAD_LINES + 1, 25, "`w@1`", "a declared slot"},
    {HEAD "op k on s : slot.borrow X\n", HEAD_LINES + 1, 26, "end of the line", "`@` and the version"},
    {HEAD "op k on s : slot.borrow X@\n", HEAD_LINES + 1, 27, "end of the line", "a version"},
    {HEAD "op k on s : slot.borrow X@09\n", HEAD_LINES + 1, 27, "`09`", "a version"},
    {HEAD "op k on s : slot.borrow X@1,set\n", HEAD_LINES + 1, 29, "`set`", "an attribute"},
    {HEAD "op k on s : slot.borrow X@1,mb=\n", HEAD_LINES + 1, 32, "end of the line", "a microbatch"},
    {HEAD "op k on s : slot.borrow X@1;write\n", HEAD_LINES + 1, 28, "`;write`", "a blank"},
    {HEAD "op k on s : grad.deposit g,use=65536\n", HEAD_LINES + 1, 32, "`65536`", "a use below 65536"},
    {HEAD "op k on s : cache.use q@0,layouts=256\n", HEAD_LINES + 1, 35, "`256`", "below 256"},
    {HEAD "op k on s : cache.use q@0,recipe=int8\n", HEAD_LINES + 1, 34, "`int8`", "a recipe: delayed"},
    {HEAD "op k on s : buffer.read b[0\n", HEAD_LINES + 1, 28, "end of the line", "`,` in a range"},
    {HEAD "op k on s : buffer.read b[0,8\n", HEAD_LINES + 1, 30, "end of the line", "`)` after a range"},
    {HEAD "graph G\nop k on s : graph.launch G\n", HEAD_LINES + 2, 27, "end of the line", "`@` and the version"},
    {HEAD "graph G\nop k on s : graph.launch G@1,size=1/2\n", HEAD_LINES + 2, 34, "`=1/2`", "mode=, address= or"},
    {HEAD "graph G\nop k on s : graph.launch G@1,mode=1\n", HEAD_LINES + 2, 36, "end of the line", "`/` and what"},
    {HEAD "graph G\nop k on s : graph.launch G@1,mode=1/x\n", HEAD_LINES + 2, 37, "`x`", "what is there now"},
    {HEAD "graph G\nop k on s : graph.launch G@1,mode=1/1,mode=2/2\n", HEAD_LINES + 2, 39, "`mode=2/2`", "once"},
    {HEAD "graph G\nop k on s : graph.launch G@1,mode=1/1,address=2/2\n", HEAD_LINES + 2, 46, "`=2/2`", "one of mode="},
    {"qet 1\ngraph G due=1\n", 2, 9, "`due=1`", "counter=N"},
    {HEAD "wait f on s\n", HEAD_LINES + 1, 6, "`f`", "a declared event"},
    {HEAD "sync all\n", HEAD_LINES + 1, 6, "`all`", "event, stream or device"},
    {HEAD "step over\n", HEAD_LINES + 1, 6, "`over`", "begin or end"},
    {HEAD "order g x\n", HEAD_LINES + 1, 9, "`x`", "a contribution"},
    {HEAD "order g\n", HEAD_LINES + 1, 8, "end of the line", "a contribution"},
    {HEAD "order w 1\n", HEAD_LINES + 1, 7, "`w`", "a declared grad"},
    {HEAD "rng R\nop k on s : rng.draw R@0,often\n", HEAD_LINES + 2, 26, "`often`", "count=, mb= or again"},
    {HEAD "rng R\nop k on s : rng.draw R@0,set\n", HEAD_LINES + 2, 26, "`set`", "count=, mb= or again"},
    {HEAD "op k on s : cache.use q@0,use=1\n", HEAD_LINES + 1, 27, "`use=1`", "an attribute of this"},
    {HEAD "op k on s : cache.use q@0,mb=1\n", HEAD_LINES + 1, 27, "`mb=1`", "an attribute of this"},
    {HEAD "op k on s : cache.use q@0,stage=1\n", HEAD_LINES + 1, 27, "`stage=1`", "an attribute of this"},
    {HEAD "op k on s : slot.borrow X@0,layouts=1\n", HEAD_LINES + 1, 29, "`layouts=1`", "an attribute of this"},
    {HEAD "op k on s : slot.borrow X@0,use=1\n", HEAD_LINES + 1, 29, "`use=1`", "an attribute of this"},
    {HEAD "op k on s : slot.borrow X@0,epoch=1\n", HEAD_LINES + 1, 29, "`epoch=1`", "an attribute of this"},
    {HEAD "op k on s : slot.borrow X@0,recipe=bf16\n", HEAD_LINES + 1, 29, "`recipe=bf16`", "an attribute of this"},
    {HEAD "op k on s : slot.release X@0,write\n", HEAD_LINES + 1, 30, "`write`", "an attribute of this"},
    {HEAD "op k on s : grad.take g,set\n", HEAD_LINES + 1, 25, "`set`", "an attribute of this"},
    {HEAD "op k on s : grad.take g,mb=0\n", HEAD_LINES + 1, 25, "`mb=0`", "an attribute of this"},
    {HEAD "op k on s : grad.deposit g,stage=0\n", HEAD_LINES + 1, 28, "`stage=0`", "an attribute of this"},
    {HEAD "op k on s : grad.deposit g,layouts=0\n", HEAD_LINES + 1, 28, "`layouts=0`", "an attribute of this"},
    {HEAD "op k on s : weight.read w@0,write\n", HEAD_LINES + 1, 29, "`write`", "an attribute of this"},
    {HEAD "op k on s : scale.use c@0,epoch=1\n", HEAD_LINES + 1, 27, "`epoch=1`", "an attribute of this"},
    {HEAD "op k on s : buffer.read b@0,write\n", HEAD_LINES + 1, 29, "`write`", "an attribute of this"},
    {HEAD "op k on s : grad.deposit g[0,1)\n", HEAD_LINES + 1, 27, "`[0,1)`", "a blank, or"},
    {HEAD "op k on s : buffer.pledge b[0,1)\n", HEAD_LINES + 1, 28, "`[0,1)`", "a blank, or"},
    {HEAD "op k on s : grad.take g@\n", HEAD_LINES + 1, 25, "end of the line", "a version"},
    {HEAD "op k on s : weight.read w\n", HEAD_LINES + 1, 26, "end of the line", "`@` and the version"},
    {HEAD "op k on s : cache.fill q\n", HEAD_LINES + 1, 25, "end of the line", "`@` and the version"},
    {HEAD "op k on s : scale.fold c\n", HEAD_LINES + 1, 25, "end of the line", "`@` and the version"},
    {HEAD "rng R\nop k on s : rng.draw R\n", HEAD_LINES + 2, 23, "end of the line", "`@` and the version"},
    {HEAD "op k on s : buffer.read b[0,1)*1\n", HEAD_LINES + 1, 33, "end of the line", "`/` and the bytes"},
    {HEAD "op k on s : buffer.read b[0,1)*4097/1\n", HEAD_LINES + 1, 32, "`4097/1`", "at most 4096"},
    {HEAD "op k on s : buffer.read b[0,1)*0/1\n", HEAD_LINES + 1, 32, "`0/1`", "at least one row"},
    {"qet 1\nscale S bytes=1\n", 2, 9, "`bytes=1`", "counter=N, due=N"},
    {"qet 1\nscale S at=1\n", 2, 9, "`at=1`", "counter=N, due=N"},
    {"qet 1\nslot X due=1\n", 2, 8, "`due=1`", "counter=N, bytes=N, at=N"},
    {"qet 1\nslot X written\n", 2, 8, "`written`", "counter=N, bytes=N, at=N"},
    {"qet 1\nslot X absent\n", 2, 8, "`absent`", "counter=N, bytes=N, at=N"},
    {"qet 1\nweight w due=1\n", 2, 10, "`due=1`", "counter=N or"},
    {"qet 1\nweight w\nscale S weight=w\n", 3, 9, "`weight=w`", "counter=N, due=N"},
    {"qet 1\nweight w\ncache q weight=w counter=1\n", 3, 18, "`counter=1`", "weight=NAME, scale"},
    {"qet 1\nscale S\ngrad g scale=S\n", 3, 8, "`scale=S`", "weight=NAME, counter"},
    {"qet 1\ngrad g layouts=1\n", 2, 8, "`layouts=1`", "weight=NAME, counter"},
    {"qet 1\ngrad g version=1\n", 2, 8, "`version=1`", "weight=NAME, counter"},
    {"qet 1\ngrad g recipe=bf16\n", 2, 8, "`recipe=bf16`", "weight=NAME, counter"},
    {"qet 1\nrng R bytes=1\n", 2, 7, "`bytes=1`", "counter=N or"},
    {"qet 1\nweight w\ncache q weight=w layouts=256\n", 3, 26, "`256`", "a number up to 255"},
    {"qet 1\nstream s compute rank=64\n", 2, 23, "`64`", "a number up to 63"},
    {HEAD "op k on s rank=0\n", HEAD_LINES + 1, 11, "`rank=0`", "stage=N, mb=N"},
    {HEAD "sync stream s rank=0\n", HEAD_LINES + 1, 15, "`rank=0`", "stage=N, mb=N"},
    {HEAD "sync event e rank=64\n", HEAD_LINES + 1, 19, "`64`", "a number up to 63"},
    {HEAD "order g 0/65536\n", HEAD_LINES + 1, 11, "`65536`", "a use below 65536"},
    {HEAD "order g 4294967296\n", HEAD_LINES + 1, 9, "`4294967296`", "a contribution"},
    {HEAD "op k on s : 5\n", HEAD_LINES + 1, 13, "`5`", "an effect such as slot.borrow"},
    {HEAD "op k on s : weight.read w@0,5\n", HEAD_LINES + 1, 29, "`5`", "an attribute"},
    /* Words are parted by blanks. */
    {"qet 1\nstream\"s\" compute\n", 2, 7, "`\"s\"`", "a blank"},
    {"qet 1\nstream \"s\"compute\n", 2, 11, "`compute`", "a blank"},
    {"qet 1\nstream s compute/blocking\n", 2, 17, "`/blocking`", "a blank"},
    {"qet 1\nstream s compute rank=1blocking\n", 2, 24, "`blocking`", "a blank"},
    {"qet 1\nbuffer b bytes=64written\n", 2, 18, "`written`", "a blank"},
    {HEAD "op \"k\"on s\n", HEAD_LINES + 1, 7, "`on`", "a blank"},
    {HEAD "op k on\"s\"\n", HEAD_LINES + 1, 8, "`\"s\"`", "a blank"},
    {HEAD "op k on s:\n", HEAD_LINES + 1, 10, "`:`", "a blank"},
    {HEAD "op k on s mb=0stage=1\n", HEAD_LINES + 1, 15, "`stage=1`", "a blank"},
    {HEAD "op k on s :weight.read w@0\n", HEAD_LINES + 1, 12, "`weight.read`", "a blank"},
    {HEAD "record e on s:\n", HEAD_LINES + 1, 14, "`:`", "a blank"},
    {HEAD "sync stream\"s\"\n", HEAD_LINES + 1, 12, "`\"s\"`", "a blank"},
    {HEAD "sync stream s[\n", HEAD_LINES + 1, 14, "`[`", "a blank"},
    {HEAD "sync event e:\n", HEAD_LINES + 1, 13, "`:`", "a blank"},
    {HEAD "sync device=\n", HEAD_LINES + 1, 12, "`=`", "a blank"},
    {HEAD "destroy e,e\n", HEAD_LINES + 1, 10, "`,e`", "a blank"},
    {HEAD "order g 0,1\n", HEAD_LINES + 1, 10, "`,1`", "a blank"},
    {HEAD "order \"g\"0\n", HEAD_LINES + 1, 10, "`0`", "a blank"},
    {HEAD "event \"f\"\"h\"\n", HEAD_LINES + 1, 10, "`\"h\"`", "a blank"},
    /* Of two values nobody knows which was meant. */
    {"qet 1\nslot X counter=1 counter=2\n", 2, 18, "`counter=2`", "once"},
    {"qet 1\nbuffer b bytes=4 at=8 bytes=8\n", 2, 23, "`bytes=8`", "once"},
    {"qet 1\nbuffer b bytes=4 written absent\n", 2, 26, "`absent`", "bytes=N, at=N, written"},
    {"qet 1\nbuffer b bytes=4 absent written\n", 2, 25, "`written`", "bytes=N, at=N, written"},
    {"qet 1\nstream s compute legacy blocking\n", 2, 25, "`blocking`", "rank=N"},
    {"qet 1\nstream s compute rank=1 rank=1\n", 2, 25, "`rank=1`", "once"},
    {"qet 1\nstream s host legacy\n", 2, 15, "`legacy`", "rank=N"},
    {"qet 1\nstream s host blocking\n", 2, 15, "`blocking`", "rank=N"},
    {HEAD "op k on s mb=0 mb=0\n", HEAD_LINES + 1, 16, "`mb=0`", "once"},
    {HEAD "sync device rank=0 rank=1\n", HEAD_LINES + 1, 20, "`rank=1`", "once"},
    {HEAD "op k on s : grad.deposit g,set,set\n", HEAD_LINES + 1, 32, "`set`", "once"},
    {HEAD "op k on s : slot.borrow X@1,mb=0,stage=1,mb=1\n", HEAD_LINES + 1, 42, "`mb=1`", "once"},
    {HEAD "buffer far bytes=2 at=18446744073709551615\n", HEAD_LINES + 1, 8, "far reaches", "last address"},
};

static void bad_text_is_an_error_with_its_place(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof bad_texts / sizeof bad_texts[0]; i++) {
        const bad_text *bad = &bad_texts[i];
        qe_program program;
        qe_error error = {0};
        qe_status status = bad->text[0] ? read_text(bad->text, strlen(bad->text), &program, &error)
                                        : read_text("\n", 1, &program, &error);
        int right_place = error.column == bad->column && (error.line == bad->line || bad->text[0] == '\0');
        int right_words = strstr(error.message, bad->found) != NULL && strstr(error.message, bad->expected) != NULL;
        if (status != QE_ERROR_FORMAT || !right_place || !right_words)
            fail_msg("%s\n  gives %u:%u: %s", bad->text, error.line, error.column, error.message);
        assert_string_equal(error.path, "some.qet");
        assert_int_equal(program.object_count, 0);
        assert_null(program.objects);
        /* Who gives no room for an error gets the status all the same. */
        if (bad->text[0]) assert_int_equal(read_text(bad->text, strlen(bad->text), &program, NULL), QE_ERROR_FORMAT);
    }
}

static void zero_bytes_and_long_lines_are_refused(void **state) {
    (void)state;
    qe_program program;
    qe_error error = {0};
    static const char zero[] = "qet 1\nslot \0X\n";
    assert_int_equal(read_text(zero, sizeof zero - 1, &program, &error), QE_ERROR_FORMAT);
    assert_int_equal(error.line, 2);
    assert_int_equal(error.column, 6);
    enum { LONG = 1 << 20 };
    char *text = malloc(LONG);
    assert_non_null(text);
    memset(text, 'x', LONG);
    memcpy(text, "qet 1\nslot ", 11);
    assert_int_equal(read_text(text, LONG, &program, &error), QE_ERROR_FORMAT);
    assert_int_equal(error.line, 2);
    assert_non_null(strstr(error.message, "longer than 65535 bytes"));
    /* The longest line, and one byte more; the longest name that is none, and a word without end. */
    memcpy(text, "qet 1\n#", 7);
    for (int more = 0; more < 2; more++) {
        text[6 + 65535 + more] = '\n';
        assert_int_equal(read_text(text, 6 + 65535 + (size_t)more + 1, &program, &error),
                         more ? QE_ERROR_FORMAT : QE_OK);
        text[6 + 65535 + more] = 'x';
        if (!more) qe_program_deinit(&program);
    }
    assert_int_equal(error.column, 65536);
    memcpy(text, "qet 1\nx", 7);
    text[6 + 65535] = '\n';
    assert_int_equal(read_text(text, 6 + 65535 + 1, &program, &error), QE_ERROR_FORMAT);
    assert_int_equal(error.column, 1);
    assert_non_null(strstr(error.message, "expected op, record"));
    free(text);
}

static void seventeen_effects_are_refused(void **state) {
    (void)state;
    char text[4096] = HEAD "op k on s :";
    for (int i = 0; i < QE_EFFECTS_MAX + 1; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), " weight.read w@0");
    qe_program program;
    qe_error error;
    assert_int_equal(read_text(text, strlen(text), &program, &error), QE_ERROR_FORMAT);
    assert_non_null(strstr(error.message, "at most 16 effects"));
    text[strlen(text) - strlen(" weight.read w@0")] = '\0';
    assert_int_equal(read_text(text, strlen(text), &program, &error), QE_OK);
    qe_program_deinit(&program);
}

static void seventeen_streams_are_refused_at_their_name(void **state) {
    (void)state;
    char text[4096] = "qet 1\n";
    for (int i = 0; i < QE_PROGRAM_STREAMS_MAX + 1; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "stream s%d comm\n", i);
    qe_program program;
    qe_error error;
    assert_int_equal(read_text(text, strlen(text), &program, &error), QE_ERROR_LIMIT);
    assert_int_equal(error.line, QE_PROGRAM_STREAMS_MAX + 2);
    assert_int_equal(error.column, 8);
}

/* Damaged traces are read or refused, and what is read can be judged; the sanitizers watch. */
static void damaged_traces_never_harm(void **state) {
    (void)state;
    static const char alphabet[] = " \n\t@,=[):#\"\\x0123456789abewz.-";
    uint32_t accepted = 0;
    for (uint32_t trial = 0; trial < 20000; trial++) {
        char text[sizeof right];
        uint32_t random = trial * 2654435761u + 12345u;
        memcpy(text, right, sizeof right);
        for (uint32_t i = 0; i <= trial % 4; i++) {
            random = random * 1664525u + 1013904223u;
            uint32_t at = (random >> 8) % (sizeof right - 1);
            random = random * 1664525u + 1013904223u;
            text[at] = random >> 30 ? alphabet[(random >> 8) % (sizeof alphabet - 1)] : (char)(random >> 8);
        }
        qe_program program;
        qe_error error = {0};
        qe_violations violations;
        qe_status status = read_text(text, sizeof right - 1, &program, &error);
        assert_true(status == QE_OK || status == QE_ERROR_FORMAT || status == QE_ERROR_LIMIT);
        if (status != QE_OK) {
            assert_true(error.line > 0 && error.column > 0);
            continue;
        }
        accepted++;
        status = qe_program_judge(&program, &violations, &error);
        assert_true(status == QE_OK || status == QE_CONTRACT);
        qe_program_deinit(&program);
    }
    print_message("    %u of 20000 damaged traces could be read\n", accepted);
    assert_true(accepted > 100);
}

/* Every form that the writer knows, as it writes it: nothing that need not be said, and nothing left out. */
static const char written[] =
    "qet 1\n"
    "stream compute compute\n"
    "stream \"a b\\\"\\\\\\x07\\x7f\\xff\" comm blocking rank=1\n"
    "stream caller caller legacy\n"
    "stream host host rank=2\n"
    "event e0\n"
    "event e1\n"
    "scale S\n"
    "scale \"S 2\" counter=5 due=2\n"
    "slot X\n"
    "slot Y bytes=64 at=4096 counter=3\n"
    "slot Z bytes=64\n"
    "slot A at=4096\n"
    "weight w\n"
    "weight v counter=7\n"
    "cache q weight=w\n"
    "cache r weight=v scale=\"S 2\" layouts=3 version=7 epoch=5 recipe=fp32\n"
    "cache t weight=v layouts=255 version=1 epoch=2 recipe=200\n"
    "grad g\n"
    "grad h weight=v counter=4 due=9\n"
    "buffer b bytes=0\n"
    "buffer c bytes=4096 at=8192 written\n"
    "buffer d bytes=16 at=16384 absent\n"
    "graph G\n"
    "graph H counter=2\n"
    "rng R\n"
    "rng Q counter=18446744073709551615\n"
    "order g 1 0/2\n"
    "order h 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15/65535\n"
    "order h 16\n"
    "order g 3\n"
    "step begin\n"
    "op plain on compute\n"
    "op \"norm # 1\" on \"a b\\\"\\\\\\x07\\x7f\\xff\" stage=1 mb=0 : scale.use S@0 scale.record \"S 2\"@5 "
    "scale.fold \"S 2\"@6 weight.read w@3 weight.commit v@7\n"
    "op slots on caller stage=2 mb=7 : slot.acquire X@1 slot.borrow X@1,write slot.borrow X@1,stage=0 "
    "slot.release X@1,mb=none slot.release Y@4,stage=65535,mb=8 slot.borrow Y@0,write,stage=3,mb=0\n"
    "op none on caller : slot.acquire X@1,mb=4 grad.deposit g,mb=0 rng.draw R@0,mb=1\n"
    "op caches on compute mb=1 : cache.fill q@0,epoch=0,layouts=1,recipe=delayed "
    "cache.use r@8,epoch=6,layouts=255,recipe=current cache.use q@2,epoch=9,layouts=0,recipe=255\n"
    "op grads on compute mb=1 : grad.deposit g,set grad.deposit h grad.deposit h,set,use=2,mb=3 grad.take h\n"
    "op bytes on compute : buffer.read b[0,0) buffer.write c[1,9)@4 buffer.read c[0,8)*3/16@2 buffer.write c[4,6)*2/0 "
    "buffer.alloc d buffer.free d buffer.take d buffer.drop d buffer.pledge d\n"
    "op graphs on compute : graph.begin G graph.capture G@1 graph.launch H@2 graph.launch H@2,mode=0/1 "
    "graph.launch H@2,address=4096/8192 graph.launch H@1,constant=1/18446744073709551615\n"
    "op draws on compute mb=2 : rng.draw R@0 rng.draw R@1,count=0 rng.draw R@1,count=64,again,mb=none rng.draw Q@3\n"
    "record e0 on compute\n"
    "wait e1 on caller stage=1 mb=2\n"
    "sync event e1\n"
    "sync event e0 rank=1 stage=3\n"
    "sync stream caller\n"
    "sync stream \"a b\\\"\\\\\\x07\\x7f\\xff\" mb=1\n"
    "sync device\n"
    "sync device rank=63 stage=1 mb=4\n"
    "destroy e1\n"
    "step end\n";

static void what_is_written_is_what_was_read_word_for_word(void **state) {
    (void)state;
    qe_program program;
    qe_error error = {0};
    char *text = NULL;
    size_t length = 0;
    if (read_text(written, sizeof written - 1, &program, &error) != QE_OK)
        fail_msg("%u:%u %s", error.line, error.column, error.message);
    FILE *out = open_memstream(&text, &length);
    assert_int_equal(qe_trace_write(&program, out, &error), QE_OK);
    fclose(out);
    assert_string_equal(text, written);
    free(text);
    qe_program_deinit(&program);
}

static void equal_names_are_told_apart_when_written(void **state) {
    (void)state;
    qe_program program, again;
    qe_program_init(&program);
    for (int i = 0; i < 3; i++) must_add_object(&program, (qe_object){.name = "twin", .kind = QE_OBJECT_SLOT});
    assert_int_equal(qe_program_add_stream(&program, "twin", QE_STREAM_COMM, NULL, NULL), QE_OK);
    assert_int_equal(qe_program_add_stream(&program, "twin", QE_STREAM_COMM, NULL, NULL), QE_OK);
    char *text = NULL;
    size_t length = 0;
    FILE *out = open_memstream(&text, &length);
    assert_int_equal(qe_trace_write(&program, out, NULL), QE_OK);
    fclose(out);
    assert_int_equal(read_text(text, length, &again, NULL), QE_OK);
    assert_string_equal(again.objects[0].name, "twin");
    assert_string_equal(again.objects[2].name, "twin#2");
    assert_string_equal(again.streams[1].name, "twin#1");
    free(text);
    qe_program_deinit(&program);
    qe_program_deinit(&again);
}

static void a_full_disk_is_an_error(void **state) {
    (void)state;
    FILE *full = fopen("/dev/full", "w");
    if (full == NULL) skip();
    qe_program program;
    qe_error error;
    make_right_program(&program);
    assert_int_equal(qe_trace_write(&program, full, &error), QE_ERROR_IO);
    assert_non_null(strstr(error.message, "cannot write the trace"));
    fclose(full);
    qe_program_deinit(&program);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_statement_is_read),
        cmocka_unit_test(bad_text_is_an_error_with_its_place),
        cmocka_unit_test(zero_bytes_and_long_lines_are_refused),
        cmocka_unit_test(seventeen_effects_are_refused),
        cmocka_unit_test(seventeen_streams_are_refused_at_their_name),
        cmocka_unit_test(damaged_traces_never_harm),
        cmocka_unit_test(what_is_written_is_what_was_read_word_for_word),
        cmocka_unit_test(equal_names_are_told_apart_when_written),
        cmocka_unit_test(a_full_disk_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
