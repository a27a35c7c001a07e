/* check_embed.cpp - the gradients of a table's rows against one loop over tokens, bit for bit: more tokens of a block
 * than are sorted together, rows that no token names, a last block of fewer rows, tokens of no row at all. */
#include "check_embed.h"

namespace {

struct embed_case {
    uint32_t tokens, vocab, hidden, shift; /* shift: elements that dy and grad begin behind a multiple of 16 bytes */
    uint32_t hot; /* of a hundred tokens, so many are of one block: the same where it has a single row */
};

/* Rows of a block lie a power of two apart that is at most this, wherever it has more than one. */
constexpr uint32_t APART = 2048;

/* One of a hundred is no row's. */
bool is_row(const embed_case &c, int32_t token) {
    return static_cast<uint32_t>(token) < c.vocab;
}
int32_t stray_token(const embed_case &c, uint32_t any) {
    const uint32_t strays[] = {0xFFFFFFFFu, 0x80000000u, 0x7FFFFFFFu, c.vocab, (c.vocab / APART + 1) * APART};
    return static_cast<int32_t>(strays[any % 5]);
}

std::vector<int32_t> tokens_of(const embed_case &c) {
    std::vector<int32_t> tokens(c.tokens);
    uint32_t state = c.tokens * 31 + c.vocab;
    for (int32_t &token : tokens) {
        state = state * 1664525u + 1013904223u;
        const uint32_t any = (state >> 8) % c.vocab;
        const uint32_t kind = (state >> 24) % 100, first = c.vocab / 2 % APART;
        const uint32_t hot = first + any % ((c.vocab - 1 - first) / APART + 1) * APART;
        token = kind == 99 ? stray_token(c, any) : static_cast<int32_t>(kind < c.hot ? hot : any);
    }
    return tokens;
}

void add_all(std::vector<float> &grad, const embed_case &c, const std::vector<int32_t> &tokens,
             const std::vector<uint16_t> &dy, bool set) {
    if (set) std::fill(grad.begin(), grad.end(), 0.0f);
    for (uint32_t t = 0; t < c.tokens; ++t)
        for (uint32_t i = 0; i < c.hidden && is_row(c, tokens[t]); ++i)
            grad[static_cast<size_t>(tokens[t]) * c.hidden + i] +=
                qe_bf16_decode(dy[static_cast<size_t>(t) * c.hidden + i]);
}

std::string embed_wrong(const embed_case &c, bool set) {
    const size_t table = static_cast<size_t>(c.vocab) * c.hidden, rows = static_cast<size_t>(c.tokens) * c.hidden;
    const std::vector<int32_t> tokens = tokens_of(c);
    const std::vector<uint16_t> dy = bf16_values(rows, c.hidden, PLAIN);
    std::vector<float> grad(table);
    for (size_t i = 0; i < table; ++i) grad[i] = static_cast<float>(i % 97) - 48.5f;
    buffer at_tokens(c.tokens * sizeof(int32_t)), at_dy((rows + c.shift) * 2), at_grad((table + c.shift) * 4);
    at_tokens.put(tokens);
    memcpy(at_dy.as<uint16_t>() + c.shift, dy.data(), rows * 2);
    memcpy(at_grad.as<float>() + c.shift, grad.data(), table * 4);
    qe_args_embed_backward args = {};
    args.tokens = at_tokens.as<int32_t>(), args.dy = at_dy.as<uint16_t>() + c.shift;
    args.grad = at_grad.as<float>() + c.shift;
    args.tokens_count = c.tokens, args.hidden = c.hidden, args.vocab = c.vocab, args.set = set;
    if (qe_cuda_embed_backward(&args, nullptr) != QE_OK) return "the launcher refused";
    add_all(grad, c, tokens, dy, set);
    if (!at_grad.is_guarded()) return "written beyond the end";
    return memcmp(at_grad.as<float>() + c.shift, grad.data(), table * 4) == 0 ? "" : "another gradient";
}

} // namespace

void check_embed(checks &all) {
    static const embed_case cases[] = {
        {1, 1, 1, 0, 0},        {9, 5, 7, 0, 0},        {1, 100, 8, 0, 0},      {300, 16, 136, 0, 50},
        {2500, 3, 8, 0, 90},    {3000, 33, 16, 0, 60},  {1025, 300, 24, 0, 10}, {200, 1500, 8, 0, 30},
        {1100, 1100, 8, 0, 99}, {130, 20, 1032, 0, 20}, {70, 9, 16, 1, 20},
        {0, 5, 24, 0, 0},       {1100, 40000, 8, 0, 95}, {300, 40000, 1, 0, 95},
    };
    for (const embed_case &c : cases)
        for (const bool set : {false, true})
            all.report("embed_backward " + std::to_string(c.tokens) + " of " + std::to_string(c.vocab) + "x" +
                           std::to_string(c.hidden) + (set ? " set" : " add"),
                       embed_wrong(c, set));
}
