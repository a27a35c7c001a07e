/* write_trace.c - writes a right trace of any length: training steps of two ranks with layers, microbatches, slots,
 * caches, scales, gradients, messages, memory that is handed out again, a graph that is launched, and syncs. The seed
 * decides in which of the right orders the postponed weight gradients come and which bytes are read.
 *
 *   write_trace LINES [SEED] > FILE */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 2, LAYERS = 12, MICROBATCHES = 8, BYTES = 4096 };

typedef struct writer {
    uint64_t left, seed, step, ticket; /* lines that are still due; microbatches so far */
} writer;

static uint64_t next(uint64_t *seed) {
    uint64_t z = (*seed += 0x9e3779b97f4a7c15u); /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Counts a line. The trace ends behind the last one that is due, in the middle of a step if need be. */
static void line(writer *w) {
    if (w->left > 0) w->left--;
    if (w->left > 0) return;
    if (fflush(stdout) != 0) exit(1);
    exit(0);
}
#define LINE(w, ...)         \
    do {                     \
        printf(__VA_ARGS__); \
        putchar('\n');       \
        line(w);             \
    } while (0)

static void declare(writer *w) {
    LINE(w, "qet 1");
    for (int r = 0; r < RANKS; r++) {
        LINE(w, "stream compute%d compute rank=%d", r, r);
        LINE(w, "stream comm%d comm rank=%d", r, r);
        LINE(w, "event done%d", r);
        LINE(w, "event sent%d", r);
        LINE(w, "buffer boundary%d bytes=%d", r, BYTES);
        LINE(w, "buffer block%d bytes=%d at=%d absent", r, BYTES, (r + 1) << 20);
        LINE(w, "buffer half%d bytes=%d at=%d absent", r, BYTES / 2, ((r + 1) << 20) + BYTES / 4);
        LINE(w, "buffer norm%d bytes=64", r);
        LINE(w, "graph norm%d", r);
        for (int l = 0; l < LAYERS; l++) {
            LINE(w, "weight w%d.%d", r, l);
            LINE(w, "scale x%d.%d due=%d", r, l, MICROBATCHES);
            LINE(w, "cache q%d.%d weight=w%d.%d scale=x%d.%d", r, l, r, l, r, l);
            LINE(w, "grad w%d.%d weight=w%d.%d due=%d", r, l, r, l, MICROBATCHES);
            LINE(w, "slot a%d.%d", r, l);
            LINE(w, "buffer h%d.%d bytes=%d", r, l, BYTES);
        }
    }
}

static void record_graphs(writer *w) {
    for (int r = 0; r < RANKS; r++) {
        LINE(w, "op begin on compute%d : graph.begin norm%d", r, r);
        LINE(w, "op square on compute%d : buffer.write norm%d", r, r);
        LINE(w, "op root on compute%d : buffer.read norm%d", r, r);
        LINE(w, "op end on compute%d : graph.capture norm%d@1", r, r);
    }
}

static void fill(writer *w, int r) {
    for (int l = 0; l < LAYERS; l++)
        LINE(w, "op fill on compute%d : weight.read w%d.%d@%" PRIu64 " cache.fill q%d.%d@%" PRIu64 ",epoch=%" PRIu64
                ",layouts=3", r, r, l, w->step, r, l, w->step, w->step);
}

/* What a rank sends is read on the communication stream, and what the other one gets is written behind that. */
static void send(writer *w, int from, int to, int mb) {
    LINE(w, "record done%d on compute%d", from, from);
    LINE(w, "wait done%d on comm%d", from, from);
    LINE(w, "op send on comm%d mb=%d : buffer.read h%d.%d", from, mb, from, LAYERS - 1);
    LINE(w, "record sent%d on comm%d", from, from);
    LINE(w, "wait sent%d on compute%d", from, from);
    LINE(w, "wait sent%d on comm%d", from, to);
    LINE(w, "wait done%d on comm%d", to, to);
    LINE(w, "op receive on comm%d mb=%d : buffer.write boundary%d", to, mb, to);
    LINE(w, "record sent%d on comm%d", to, to);
    LINE(w, "wait sent%d on compute%d", to, to);
}

static void scratch(writer *w, int r) {
    LINE(w, "op workspace on compute%d : buffer.take block%d", r, r);
    LINE(w, "op split on compute%d : buffer.write block%d", r, r);
    LINE(w, "op reduce on compute%d : buffer.read block%d[0,64)*8/128", r, r);
    LINE(w, "op workspace on compute%d : buffer.drop block%d", r, r);
    LINE(w, "op workspace on compute%d : buffer.alloc half%d buffer.write half%d", r, r, r);
    LINE(w, "op workspace on compute%d : buffer.free half%d", r, r);
}

/* "x0.3@7": what of which layer of which rank, at which version. */
#define AT "%d.%d@%" PRIu64

static void forward(writer *w, int r, int mb) {
    for (int l = 0; l < LAYERS; l++) {
        uint64_t from = next(&w->seed) % (BYTES / 2);
        LINE(w, "op quantize on compute%d mb=%d : scale.use x" AT " scale.record x" AT, r, mb, r, l, w->step, r, l,
             w->step);
        LINE(w, "op gemm on compute%d mb=%d : cache.use q" AT ",epoch=%" PRIu64 ",layouts=1 slot.acquire a" AT, r, mb,
             r, l, w->step, w->step, r, l, w->ticket + 1);
        LINE(w, "op bias on compute%d mb=%d : buffer.write h%d.%d", r, mb, r, l);
        LINE(w, "op residual on compute%d mb=%d : buffer.read h%d.%d[%" PRIu64 ",%" PRIu64 ")", r, mb, r, l, from,
             from + 256);
    }
}

static void backward(writer *w, int r, int mb) {
    int backwards = next(&w->seed) % 2 == 0;
    const char *sets = mb == 0 ? ",set" : "";
    for (int k = 0; k < LAYERS; k++) {
        int l = backwards ? LAYERS - 1 - k : k;
        LINE(w, "op input_grad on compute%d mb=%d : cache.use q" AT ",epoch=%" PRIu64 ",layouts=2", r, mb, r, l,
             w->step, w->step);
        LINE(w, "op weight_grad on compute%d mb=%d : slot.borrow a" AT " grad.deposit w%d.%d%s slot.release a" AT, r,
             mb, r, l, w->ticket + 1, r, l, sets, r, l, w->ticket + 1);
    }
}

static void optimize(writer *w, int r) {
    LINE(w, "op norm on compute%d : graph.launch norm%d@1", r, r);
    for (int l = 0; l < LAYERS; l++) {
        LINE(w, "op adamw on compute%d : grad.take w%d.%d weight.commit w%d.%d@%" PRIu64, r, r, l, r, l, w->step);
        LINE(w, "op fold on compute%d : scale.fold x%d.%d@%" PRIu64, r, r, l, w->step);
    }
    LINE(w, "sync stream compute%d", r);
    LINE(w, "sync device rank=%d", r);
}

static void train_step(writer *w) {
    LINE(w, "step begin");
    for (int r = 0; r < RANKS; r++) {
        fill(w, r);
        LINE(w, "record done%d on compute%d", r, r);
    }
    for (int mb = 0; mb < MICROBATCHES; mb++, w->ticket++) {
        forward(w, 0, mb);
        send(w, 0, 1, mb);
        LINE(w, "op read on compute1 mb=%d : buffer.read boundary1@%d", mb, mb + 1);
        forward(w, 1, mb);
        backward(w, 1, mb);
        scratch(w, 1);
        LINE(w, "record done1 on compute1");
        backward(w, 0, mb);
        scratch(w, 0);
    }
    for (int r = 0; r < RANKS; r++) optimize(w, r);
    LINE(w, "step end");
    w->step++;
}

static uint64_t number(const char *text) {
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (*end == '\0' && end != text && value > 0) return value;
    fprintf(stderr, "found %s, expected a number above 0\n", text);
    exit(2);
}

int main(int argc, char **argv) {
    if (argc < 2 || argc > 3) {
        fprintf(stderr, "usage: write_trace LINES [SEED] > FILE\n");
        return 2;
    }
    writer w = {.left = number(argv[1]), .seed = argc > 2 ? number(argv[2]) : 1};
    declare(&w);
    record_graphs(&w);
    for (;;) train_step(&w);
}
