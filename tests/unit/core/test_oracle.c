/* test_oracle.c - a second judge of order and memory, naive on purpose: it shares no code with the ledger, knows no
 * clocks and no ranges. Items are nodes, what orders them are edges, reachability is computed in full, every byte has a
 * cell, and every pair of ops is compared. It must find the same first breach, by item and rule, in every trace up to a
 * length (all of them) and in random ones beyond it.
 *
 *   core_test_oracle [LENGTH [RANDOM]]   all traces of up to LENGTH items, RANDOM longer ones */
#include "core_program.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>

enum { STREAMS = 6, EVENTS = 2, BUFFERS = 5, BYTES = 8, NODES = 40, ACCESSES = 2, ALPHABET_MAX = 512 };
enum { DEFAULT_LENGTH = 3, DEFAULT_RANDOM = 20000, LENGTH_MAX = 8 };

/* What the oracle thinks an item is. */
typedef enum what { OP, RECORD, WAIT, SYNC_EVENT, SYNC_STREAM, SYNC_DEVICE, DESTROY } what;
typedef enum how { READ, WRITE, ALLOC, FREE, TAKE, DROP, PLEDGE } how;
typedef struct touch {
    how how;
    int buffer, begin, end; /* bytes of the buffer */
} touch;
typedef struct thing {
    what what;
    int stream, event, rank, count;
    touch touch[ACCESSES];
} thing;

/* Streams: roles, ranks, implicit order. Buffers: where they lie (-1: apart), and whether they are there. */
typedef enum role { COMPUTE_ROLE, COMM_ROLE, CALLER_ROLE, HOST_ROLE } role;
typedef struct lane {
    role role;
    int rank, order; /* order: 1 blocking, 2 legacy */
} lane;
static const lane streams[STREAMS] = {
    {COMPUTE_ROLE, 0, 0}, {COMM_ROLE, 0, 0}, {CALLER_ROLE, 0, 2}, {COMPUTE_ROLE, 0, 1}, {HOST_ROLE, 0, 0},
    {COMPUTE_ROLE, 1, 0}};
typedef struct block {
    int at, bytes, absent, written;
} block;
static const block buffers[BUFFERS] = {
    {0, 4, 0, 1}, {0, 4, 1, 0}, {2, 4, 1, 0}, {0, 8, 1, 0}, {-1, 4, 0, 0}};

typedef struct oracle {
    const thing *things;
    int edge[NODES][NODES], reach[NODES][NODES];
    int last[STREAMS], host[2], record[EVENTS]; /* node, or -1 */
    int there[BUFFERS], born[BUFFERS], pledged[BUFFERS];
    int owner[2][BYTES], written[2][BYTES]; /* [1]: the buffer apart */
    int forgiven[NODES][2][BYTES];          /* a drop waited for it */
} oracle;

static int place_of(int buffer) { return buffers[buffer].at < 0; }
static int byte_of(int buffer, int at) { return (buffers[buffer].at < 0 ? 0 : buffers[buffer].at) + at; }

static void begin(oracle *o, const thing *things) {
    memset(o, 0, sizeof *o);
    o->things = things;
    for (int s = 0; s < STREAMS; s++) o->last[s] = -1;
    o->host[0] = o->host[1] = o->record[0] = o->record[1] = -1;
    memset(o->owner, -1, sizeof o->owner);
    memset(o->born, -1, sizeof o->born);
    for (int b = 0; b < BUFFERS; b++) {
        o->there[b] = !buffers[b].absent;
        for (int i = 0; i < buffers[b].bytes && o->there[b]; i++) {
            if (buffers[b].at >= 0) o->owner[0][byte_of(b, i)] = b;
            o->written[place_of(b)][byte_of(b, i)] |= buffers[b].written;
        }
    }
}

static void link_to(oracle *o, int from, int to) {
    if (from < 0 || from == to) return;
    o->edge[from][to] = 1;
    for (int i = 0; i < NODES; i++)
        if (i == from || o->reach[i][from]) o->reach[i][to] = 1;
}

/* Edges into a node of a stream: the stream, its host, and CUDA's default stream. */
static void link_stream(oracle *o, int node, int s) {
    link_to(o, o->last[s], node);
    link_to(o, o->host[streams[s].rank], node);
    for (int t = 0; t < STREAMS; t++) {
        int legacy = streams[s].order == 2 || streams[t].order == 2;
        int related = legacy && streams[s].order > 0 && streams[t].order > 0;
        if (t != s && related && streams[s].rank == streams[t].rank) link_to(o, o->last[t], node);
    }
}

static void advance(oracle *o, int node, int s) {
    o->last[s] = node;
    if (streams[s].role == HOST_ROLE) o->host[streams[s].rank] = node;
}

static int writes(how h) { return h == WRITE || h == ALLOC || h == FREE; }
static int touches(how h) { return h == READ || writes(h); }

static void note(int *rule, int found) {
    if (*rule == QE_RULE_NONE || found < *rule) *rule = found;
}

static int race_rule(int earlier, int later) {
    role a = streams[earlier].role, b = streams[later].role;
    if (a == HOST_ROLE || b == HOST_ROLE) return QE_RULE_SYNC_HOST;
    if (a == CALLER_ROLE && b != CALLER_ROLE) return QE_RULE_SYNC_ENTER;
    if (b == CALLER_ROLE && a != CALLER_ROLE) return QE_RULE_SYNC_EXIT;
    return QE_RULE_SYNC_SIDE;
}

/* Did a touch of an earlier op, not yet forgiven, meet this byte? */
static int met(const oracle *o, int earlier, const touch *then, int place, int byte) {
    if (o->forgiven[earlier][place][byte] || !touches(then->how) || place_of(then->buffer) != place) return 0;
    return byte >= byte_of(then->buffer, then->begin) && byte < byte_of(then->buffer, then->end);
}

/* One byte of one access against the last write and the reads since. Readers come after the write that they read, so a
 * write that was read is told of only where the memory was handed out since. */
static void compare(const oracle *o, int node, const touch *now, int byte, int *rule) {
    int reads = 0;
    for (int earlier = node - 1; earlier >= 0; earlier--) {
        const thing *other = &o->things[earlier];
        int reused = earlier < o->born[now->buffer];
        for (int k = other->what == OP ? other->count - 1 : -1; k >= 0; k--) {
            if (!met(o, earlier, &other->touch[k], place_of(now->buffer), byte)) continue;
            int wrote = writes(other->touch[k].how);
            int asked = wrote ? reads == 0 || reused : writes(now->how);
            if (asked && !o->reach[earlier][node])
                note(rule, reused ? QE_RULE_SYNC_REUSE : race_rule(other->stream, o->things[node].stream));
            if (wrote) return;
            reads += writes(now->how);
        }
    }
}

static int wrote_before(const thing *t, int k, int place, int byte) {
    for (int i = 0; i < k; i++)
        if (t->touch[i].how == WRITE && place_of(t->touch[i].buffer) == place &&
            byte >= byte_of(t->touch[i].buffer, t->touch[i].begin) &&
            byte < byte_of(t->touch[i].buffer, t->touch[i].end))
            return 1;
    return 0;
}

/* Is a buffer there as the effect needs it? Then it becomes what the effect makes it. */
static int live(oracle *o, int node, const touch *t, int *rule) {
    int begins = t->how == ALLOC || t->how == TAKE, ends = t->how == FREE || t->how == DROP;
    if (begins == o->there[t->buffer]) {
        note(rule, begins ? QE_RULE_BUFFER_LIVE : QE_RULE_BUFFER_FREED);
        return 0;
    }
    if (begins) {
        o->there[t->buffer] = 1;
        o->born[t->buffer] = node;
    }
    if (ends) o->there[t->buffer] = 0;
    return 1;
}

static void judge_bytes(oracle *o, int node, int k, int *rule) {
    const thing *t = &o->things[node];
    const touch *now = &t->touch[k];
    int place = place_of(now->buffer);
    for (int i = now->begin; i < now->end; i++) {
        int byte = byte_of(now->buffer, i);
        int owner = o->owner[place][byte];
        if ((now->how == ALLOC || now->how == TAKE) && owner >= 0 && owner != now->buffer)
            note(rule, QE_RULE_BUFFER_LIVE);
        int other = now->how == READ && !o->written[place][byte];
        if (other && !wrote_before(t, k, place, byte)) note(rule, QE_RULE_BUFFER_UNWRITTEN);
        if (touches(now->how)) compare(o, node, now, byte, rule);
    }
}

/* The allocator waited for every stream that pledged: for all that comes before what they were given last. */
static void forgive(oracle *o, int node, int buffer) {
    for (int s = 0; s < STREAMS; s++) {
        if (!(o->pledged[buffer] >> s & 1) || o->last[s] < 0) continue;
        for (int earlier = 0; earlier < node; earlier++)
            for (int i = 0; i < buffers[buffer].bytes; i++)
                if (earlier == o->last[s] || o->reach[earlier][o->last[s]])
                    o->forgiven[earlier][place_of(buffer)][byte_of(buffer, i)] = 1;
    }
    o->pledged[buffer] = 0;
}

static void keep(oracle *o, int node, const touch *t) {
    int place = place_of(t->buffer);
    for (int i = t->begin; i < t->end; i++) {
        int byte = byte_of(t->buffer, i);
        if (t->how == WRITE) o->written[place][byte] = 1;
        if (t->how == ALLOC || t->how == TAKE) {
            o->written[place][byte] = 0;
            o->owner[place][byte] = t->buffer;
        }
        if (t->how == FREE || t->how == DROP) o->owner[place][byte] = -1;
    }
    if (t->how == DROP) forgive(o, node, t->buffer);
}

static int judge_op(oracle *o, int node) {
    const thing *t = &o->things[node];
    int rule = QE_RULE_NONE, bad = 0;
    link_stream(o, node, t->stream);
    for (int k = 0; k < t->count; k++) {
        int follows = k > 0 && bad && t->touch[k].buffer == t->touch[0].buffer;
        if (follows || !live(o, node, &t->touch[k], &rule)) bad |= 1 << k;
    }
    for (int k = 0; k < t->count; k++)
        if (!(bad >> k & 1)) judge_bytes(o, node, k, &rule);
    if (rule != QE_RULE_NONE) return rule;
    for (int k = 0; k < t->count; k++) {
        if (t->touch[k].how == PLEDGE) o->pledged[t->touch[k].buffer] |= 1 << t->stream;
        keep(o, node, &t->touch[k]);
    }
    advance(o, node, t->stream);
    return QE_RULE_NONE;
}

static int judge_thing(oracle *o, int node) {
    const thing *t = &o->things[node];
    int waits = t->what == WAIT || t->what == SYNC_EVENT;
    if (waits && o->record[t->event] < 0) return QE_RULE_SYNC_EVENT;
    switch (t->what) {
    case OP: return judge_op(o, node);
    case RECORD:
        link_stream(o, node, t->stream);
        o->record[t->event] = node;
        o->last[t->stream] = node;
        break;
    case WAIT:
        link_stream(o, node, t->stream);
        link_to(o, o->record[t->event], node);
        advance(o, node, t->stream);
        break;
    case SYNC_EVENT:
    case SYNC_STREAM:
    case SYNC_DEVICE: {
        int rank = t->what == SYNC_STREAM ? streams[t->stream].rank : t->rank;
        link_to(o, o->host[rank], node);
        if (t->what == SYNC_EVENT) link_to(o, o->record[t->event], node);
        for (int s = 0; s < STREAMS; s++) {
            int of_rank = t->what == SYNC_DEVICE && streams[s].rank == rank;
            if (of_rank || (t->what == SYNC_STREAM && s == t->stream)) link_to(o, o->last[s], node);
        }
        o->host[rank] = node;
        break;
    }
    case DESTROY: o->record[t->event] = -1; break;
    }
    return QE_RULE_NONE;
}

/* Index of the first item that breaks a rule, and the rule; the count when none does. */
static int first_breach(oracle *o, const thing *things, int count, int *rule_out) {
    begin(o, things);
    for (int i = 0; i < count; i++)
        if ((*rule_out = judge_thing(o, i)) != QE_RULE_NONE) return i;
    *rule_out = QE_RULE_NONE;
    return count;
}

/* The same things for the ledger. */
static qe_effect effect_of(const touch *t) {
    static const uint8_t kinds[] = {QE_EFFECT_BUFFER_READ, QE_EFFECT_BUFFER_WRITE, QE_EFFECT_BUFFER_ALLOC,
                                    QE_EFFECT_BUFFER_FREE, QE_EFFECT_BUFFER_TAKE, QE_EFFECT_BUFFER_DROP,
                                    QE_EFFECT_BUFFER_PLEDGE};
    return (qe_effect){.kind = kinds[t->how], .object = (uint32_t)t->buffer, .begin = (uint64_t)t->begin,
                       .end = (uint64_t)t->end};
}

static void add_thing(qe_program *program, const thing *t) {
    static const uint8_t kinds[] = {QE_ITEM_OP, QE_ITEM_RECORD, QE_ITEM_WAIT, QE_ITEM_SYNC_EVENT, QE_ITEM_SYNC_STREAM,
                                    QE_ITEM_SYNC_DEVICE, QE_ITEM_DESTROY};
    qe_effect effects[ACCESSES];
    for (int k = 0; k < t->count; k++) effects[k] = effect_of(&t->touch[k]);
    qe_item item = {.kind = kinds[t->what], .stream = (uint32_t)t->stream, .event = (uint32_t)t->event,
                    .rank = (uint16_t)t->rank, .microbatch = QE_NONE};
    must_add(program, item, t->what == OP ? "op" : NULL, effects, (uint32_t)t->count);
}

static void add_things_world(qe_program *program) {
    char name[QE_NAME_BYTES];
    static const qe_stream_role roles[] = {QE_STREAM_COMPUTE, QE_STREAM_COMM, QE_STREAM_CALLER, QE_STREAM_HOST};
    static const uint8_t orders[] = {QE_STREAM_SEPARATE, QE_STREAM_BLOCKING, QE_STREAM_LEGACY};
    qe_program_init(program);
    for (int s = 0; s < STREAMS; s++) {
        snprintf(name, sizeof name, "s%d", s);
        assert_int_equal(qe_program_add_stream(program, name, roles[streams[s].role], NULL, NULL), QE_OK);
        program->streams[s].order = orders[streams[s].order];
        program->streams[s].rank = (uint16_t)streams[s].rank;
    }
    for (int e = 0; e < EVENTS; e++) qe_program_add_event(program);
    for (int b = 0; b < BUFFERS; b++) {
        qe_object buffer = {.kind = QE_OBJECT_BUFFER, .bytes = (uint64_t)buffers[b].bytes};
        snprintf(buffer.name, sizeof buffer.name, "b%d", b);
        if (buffers[b].at >= 0) buffer.address = 4096 + (uint64_t)buffers[b].at;
        buffer.counter = buffers[b].absent ? QE_BUFFER_ABSENT : buffers[b].written ? QE_BUFFER_WRITTEN : 0;
        must_add_object(program, buffer);
    }
}

typedef struct tally {
    uint64_t traces, clean, by_rule[QE_RULE_COUNT];
} tally;

static void print_trace(const qe_program *program) { qe_trace_write(program, stderr, NULL); }

static void hold_against(qe_program *program, const thing *things, int count, tally *into) {
    oracle o;
    qe_violations violations;
    int rule, at = first_breach(&o, things, count, &rule);
    qe_status status = qe_program_judge(program, &violations, NULL);
    int found_rule = status == QE_OK ? QE_RULE_NONE : (int)violations.record[0].rule;
    int found_at = status == QE_OK ? count : (int)violations.record[0].item;
    if (found_rule != rule || found_at != at) {
        print_trace(program);
        fail_msg("the oracle finds %s at item %d, the ledger %s at %d", qe_rule_id((qe_rule)rule), at,
                 qe_rule_id((qe_rule)found_rule), found_at);
    }
    into->traces++;
    into->clean += rule == QE_RULE_NONE;
    into->by_rule[rule]++;
}

static void tell(const char *which, const tally *t) {
    print_message("    %s: %llu traces agree, %llu of them clean", which, (unsigned long long)t->traces,
                  (unsigned long long)t->clean);
    for (int rule = 1; rule < QE_RULE_COUNT; rule++)
        if (t->by_rule[rule] > 0) print_message(", %s %llu", qe_rule_id((qe_rule)rule),
                                                (unsigned long long)t->by_rule[rule]);
    print_message("\n");
}

static int put(thing *alphabet, int count, thing t) {
    assert_true(count < ALPHABET_MAX);
    alphabet[count] = t;
    return count + 1;
}

/* Every item there is over these streams, one event, these buffers whole, or the first two bytes of the first. */
static int make_alphabet(thing *alphabet, const int *of_streams, int stream_count, const int *of_buffers,
                         int buffer_count, int memory) {
    int n = 0;
    for (int i = 0; i < stream_count; i++) {
        int s = of_streams[i];
        n = put(alphabet, n, (thing){.what = RECORD, .stream = s});
        n = put(alphabet, n, (thing){.what = WAIT, .stream = s});
        n = put(alphabet, n, (thing){.what = SYNC_STREAM, .stream = s});
        for (int k = 0; k < buffer_count; k++) {
            int b = of_buffers[k], bytes = buffers[b].bytes;
            for (int h = READ; h <= (memory ? PLEDGE : WRITE); h++)
                n = put(alphabet, n, (thing){.what = OP, .stream = s, .count = 1, .touch = {{(how)h, b, 0, bytes}}});
        }
    }
    n = put(alphabet, n, (thing){.what = SYNC_EVENT});
    n = put(alphabet, n, (thing){.what = SYNC_DEVICE});
    n = put(alphabet, n, (thing){.what = DESTROY});
    return n;
}

static void every_trace(const char *which, const thing *alphabet, int letters, int length) {
    qe_program program;
    tally t = {0};
    thing things[NODES];
    int digit[NODES] = {0}, count = length;
    add_things_world(&program);
    for (int i = 0; i < letters; i++) add_thing(&program, &alphabet[i]);
    qe_item *letter = malloc((size_t)letters * sizeof *letter);
    assert_non_null(letter);
    memcpy(letter, program.items, (size_t)letters * sizeof *letter);
    assert_true(length <= letters);
    program.item_count = (uint32_t)count;
    for (;;) { /* a breach ends a trace for both, so those of the full length hold all shorter ones */
        for (int i = 0; i < count; i++) {
            things[i] = alphabet[digit[i]];
            program.items[i] = letter[digit[i]];
        }
        hold_against(&program, things, count, &t);
        int at = count - 1;
        while (at >= 0 && ++digit[at] == letters) digit[at--] = 0;
        if (at < 0) break;
    }
    tell(which, &t);
    free(letter);
    qe_program_deinit(&program);
}

static int exhaustive_length = DEFAULT_LENGTH;
static long random_count = DEFAULT_RANDOM;

static void all_short_traces_are_judged_as_by_the_oracle(void **state) {
    (void)state;
    static thing alphabet[ALPHABET_MAX];
    static const int plain[] = {0, 1}, ordered[] = {0, 2, 3}, hosts[] = {0, 4, 5};
    static const int one[] = {0}, two[] = {0, 1}, three[] = {0, 2, 3};
    char which[96];
    const struct {
        const char *name;
        const int *streams;
        int stream_count;
        const int *buffers;
        int buffer_count, memory;
    } sets[] = {
        {"two streams", plain, 2, one, 1, 0},
        {"default streams", ordered, 3, one, 1, 0},
        {"a host and two ranks", hosts, 3, one, 1, 0},
        {"memory handed out again", plain, 2, two, 2, 1},
        {"memory split and merged", plain, 1, three, 3, 1},
    };
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; i++) {
        int letters = make_alphabet(alphabet, sets[i].streams, sets[i].stream_count, sets[i].buffers,
                                    sets[i].buffer_count, sets[i].memory);
        int length = exhaustive_length + (letters < 20 ? 1 : 0);
        snprintf(which, sizeof which, "%s, all of %d items over %d letters", sets[i].name, length, letters);
        every_trace(which, alphabet, letters, length);
    }
}

static uint64_t next(uint64_t *seed) {
    uint64_t z = (*seed += 0x9e3779b97f4a7c15u); /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static int below(uint64_t *seed, int bound) { return (int)(next(seed) % (uint64_t)bound); }

static touch random_touch(uint64_t *seed, int memory) {
    touch t = {.how = (how)below(seed, below(seed, 3) == 0 && memory ? PLEDGE + 1 : 2), .buffer = below(seed, BUFFERS)};
    if (t.how == READ && below(seed, 2)) t.how = WRITE;
    t.end = buffers[t.buffer].bytes;
    if (t.how > WRITE) return t;
    t.begin = below(seed, t.end);
    t.end = t.begin + below(seed, t.end - t.begin + 1);
    return t;
}

/* Mostly right: what is asked is asked where it can be, so that traces live for a while. */
static thing random_thing(uint64_t *seed, int memory, unsigned recorded) {
    thing t = {.stream = below(seed, STREAMS), .event = below(seed, EVENTS)};
    int choice = below(seed, 16);
    if (choice < 7) t.what = OP;
    else if (choice < 10) t.what = RECORD;
    else if (choice < 13) t.what = WAIT;
    else if (choice == 13) t.what = SYNC_EVENT;
    else t.what = choice == 14 ? SYNC_DEVICE : SYNC_STREAM;
    if (below(seed, 40) == 0) t.what = DESTROY;
    if ((t.what == WAIT || t.what == SYNC_EVENT) && !(recorded >> t.event & 1)) t.what = RECORD;
    if (t.what == SYNC_EVENT || t.what == SYNC_DEVICE) t.rank = below(seed, 8) == 0;
    if (t.what == OP) t.count = below(seed, ACCESSES + 1);
    for (int k = 0; k < t.count; k++) t.touch[k] = random_touch(seed, memory);
    return t;
}

/* A trace grows item by item; an item that breaks a rule is kept seldom, a race less seldom; it is the last. */
static int random_trace(uint64_t *seed, thing *things) {
    oracle o;
    int length = 5 + below(seed, NODES - 5), count = 0, memory = below(seed, 4) != 0, rule;
    unsigned recorded = 0;
    for (int tries = 0; count < length && tries < 4 * NODES; tries++) {
        things[count] = random_thing(seed, memory, recorded);
        int breaks = first_breach(&o, things, count + 1, &rule) == count;
        int race = rule >= QE_RULE_SYNC_ENTER && rule <= QE_RULE_SYNC_HOST;
        if (breaks && below(seed, race || rule == QE_RULE_SYNC_REUSE ? 4 : 128) != 0) continue;
        if (things[count].what == RECORD) recorded |= 1u << things[count].event;
        count++;
        if (breaks) break;
    }
    return count;
}

static void random_traces_are_judged_as_by_the_oracle(void **state) {
    (void)state;
    tally t = {0};
    for (long trial = 0; trial < random_count; trial++) {
        uint64_t seed = (uint64_t)trial;
        qe_program program;
        thing things[NODES];
        int count = random_trace(&seed, things);
        add_things_world(&program);
        for (int i = 0; i < count; i++) add_thing(&program, &things[i]);
        hold_against(&program, things, count, &t);
        qe_program_deinit(&program);
    }
    tell("random", &t);
}

static long argument(const char *text, long most) {
    char *end;
    errno = 0;
    long number = strtol(text, &end, 10);
    if (errno == 0 && *end == '\0' && end != text && number >= 1 && number <= most) return number;
    fprintf(stderr, "found %s, expected a number from 1 to %ld\n", text, most);
    exit(2);
}

int main(int argc, char **argv) {
    if (argc > 1) exhaustive_length = (int)argument(argv[1], LENGTH_MAX);
    if (argc > 2) random_count = argument(argv[2], LONG_MAX);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_short_traces_are_judged_as_by_the_oracle),
        cmocka_unit_test(random_traces_are_judged_as_by_the_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
