/* kernel_checks.h - every fused kernel against a reference in plain loops. Each case runs twice over different poison:
 * the two runs must leave the same bytes, so nothing is left unwritten and nothing depends on what lay there. */
#ifndef QE_TESTS_CUDA_KERNEL_CHECKS_H
#define QE_TESTS_CUDA_KERNEL_CHECKS_H

#include <functional>

#include "backend/cuda/kernels.h"
#include "target_check.h"

struct checks {
    int run = 0, failed = 0;
    bool few = false; /* only some targets: large shapes take long on the processor */
    void report(const std::string &name, const std::string &wrong) {
        ++run;
        if (wrong.empty()) return;
        ++failed;
        printf("FAILED %s: %s\n", name.c_str(), wrong.c_str());
        fflush(stdout);
    }
};

static const tolerance EXACT = {0.0, 0.0};
static const tolerance NEAR = {2e-3, 1e-6}; /* where the table unit's exponential comes in */

inline std::string name_of(const char *op, const target_case &c, uint32_t rows, uint32_t columns) {
    char text[200];
    snprintf(text, sizeof text, "%s %s %s %ux%u%s%s", op, qe_recipe_name(c.recipe),
             c.format == QE_FORMAT_E4M3 ? "e4m3" : "e5m2", rows, columns, c.with_operand ? "" : " no operand",
             c.with_retained ? "" : " nothing retained");
    return text;
}

/* Both runs of one case. `again` restores what a run changes beside the target; `extra` is compared too. */
inline std::string run_twice(target_memory &memory, const std::function<void()> &again,
                             const std::function<qe_status(const qe_quantize_target &)> &op,
                             const std::vector<buffer *> &extra) {
    std::vector<std::vector<unsigned char>> first;
    for (int pass = 0; pass < 2; ++pass) {
        memory.poison(pass ? 0x5A : 0xA5);
        for (buffer *b : extra) b->poison(pass ? 0x5A : 0xA5);
        if (again) again();
        if (op(memory.target()) != QE_OK) return "the launcher refused";
        const cudaError_t status = cudaDeviceSynchronize();
        if (status != cudaSuccess) return std::string("the device failed: ") + cudaGetErrorString(status);
        std::vector<std::vector<unsigned char>> found = {memory.bytes()};
        for (buffer *b : extra) found.push_back(b->get<unsigned char>());
        for (buffer *b : extra)
            if (!b->is_guarded()) return "written beyond the end";
        if (!memory.is_guarded()) return "written beyond the end of the target";
        if (pass == 1 && found != first) return "two runs over different poison differ";
        first = found;
    }
    return "";
}

/* The targets that every quantizing op is tried with. */
std::vector<target_case> target_cases(const checks &all, bool is_weight);

void check_quantize(checks &all, uint32_t rows, uint32_t columns, kind k);
void check_quantize_weight(checks &all, uint32_t rows, uint32_t columns, kind k);
/* The fill of a weight that a commit has quantized writes nothing but the amax which the key remembers. */
void check_sealed(checks &all, uint32_t rows, uint32_t columns);
/* A weight's step with its codes; has_fired: of a guard, so that nothing may happen. */
void check_commit(checks &all, uint32_t rows, uint32_t columns, bool has_fired);
void check_rope(checks &all, uint32_t rows, uint32_t sequence, uint32_t heads, uint32_t kv_heads, uint32_t head_dim,
                kind k);
void check_swiglu(checks &all, uint32_t rows, uint32_t ffn, kind k);
void check_norm(checks &all, uint32_t rows, uint32_t hidden, kind k);
void check_norm_backward(checks &all, uint32_t rows, uint32_t hidden, kind k);
void check_decode(checks &all, uint32_t rows, uint32_t columns);
void check_codec(checks &all);
/* All of the above on shapes that reach every path of the launchers; the large ones only where asked for. */
void check_everything(checks &all, bool with_large);

#endif
