/* kernel_checks.cpp - see kernel_checks.h. */
#include "kernel_checks.h"

#include <algorithm>

std::vector<target_case> target_cases(const checks &all, bool is_weight) {
    std::vector<target_case> cases;
    cases.push_back({QE_RECIPE_DELAYED, QE_FORMAT_E4M3, is_weight, true, true, true, 3.7f, 0.0f});
    cases.push_back({QE_RECIPE_CURRENT, QE_FORMAT_E5M2, is_weight, true, true, false, 1.0f, 0.0f});
    cases.push_back({QE_RECIPE_BF16, QE_FORMAT_E4M3, is_weight, true, true, false, 1.0f, 0.0f});
    if (all.few) return cases;
    cases.push_back({QE_RECIPE_DELAYED, QE_FORMAT_E5M2, is_weight, true, true, true, 3.7f, 0.0f});
    cases.push_back({QE_RECIPE_CURRENT, QE_FORMAT_E4M3, is_weight, true, true, false, 1.0f, 0.0f});
    cases.push_back({QE_RECIPE_DELAYED, QE_FORMAT_E4M3, is_weight, true, true, true, 0.02f, 1e30f});
    cases.push_back({QE_RECIPE_DELAYED, QE_FORMAT_E4M3, is_weight, true, true, false, 1e38f, 0.0f});
    cases.push_back({QE_RECIPE_DELAYED, QE_FORMAT_E5M2, is_weight, false, true, true, 1.0f, 0.0f});
    cases.push_back({QE_RECIPE_DELAYED, QE_FORMAT_E5M2, is_weight, true, false, true, 1.0f, 0.0f});
    cases.push_back({QE_RECIPE_CURRENT, QE_FORMAT_E4M3, is_weight, false, true, false, 1.0f, 0.0f});
    cases.push_back({QE_RECIPE_BLOCK, QE_FORMAT_E4M3, is_weight, true, true, false, 1.0f, 0.0f});
    cases.push_back({QE_RECIPE_BLOCK, QE_FORMAT_E4M3, is_weight, true, false, false, 1.0f, 0.0f});
    cases.push_back({QE_RECIPE_FP32, QE_FORMAT_E4M3, is_weight, true, true, false, 1.0f, 0.0f});
    return cases;
}

/* --- elementwise: exact ------------------------------------------------------------------------------------------ */

void check_quantize(checks &all, uint32_t rows, uint32_t columns, kind k) {
    const size_t count = static_cast<size_t>(rows) * columns;
    const std::vector<uint16_t> x = bf16_values(count, rows * 7 + columns, k);
    const std::vector<float> values = decoded(x);
    buffer input(count * 2);
    input.put(x);
    for (const target_case &c : target_cases(all, false)) {
        target_memory memory(c, rows, columns);
        std::string wrong = run_twice(memory, nullptr,
                                      [&](const qe_quantize_target &target) {
                                          qe_args_quantize args = {};
                                          args.x = input.at(), args.rows = rows, args.columns = columns,
                                          args.target = target;
                                          return qe_cuda_quantize(&args, nullptr);
                                      },
                                      {});
        if (wrong.empty()) wrong = memory.wrong(values, EXACT);
        all.report(name_of("quantize", c, rows, columns), wrong);
    }
}

void check_quantize_weight(checks &all, uint32_t rows, uint32_t columns, kind k) {
    const size_t count = static_cast<size_t>(rows) * columns;
    const std::vector<float> values = fp32_values(count, rows * 5 + columns, k);
    buffer input(count * 4), witness(8), epoch(8), key(QE_KEY_WORDS * 8);
    input.put(values), witness.put(std::vector<uint64_t>{41}), epoch.put(std::vector<uint64_t>{43});
    for (const target_case &c : target_cases(all, true)) {
        const bool has_epoch = c.recipe == QE_RECIPE_DELAYED;
        target_memory memory(c, rows, columns);
        std::string wrong = run_twice(memory, [&] { key.put(std::vector<uint64_t>{40, 42, QE_KEY_SEALED | 1, 0}); },
                                      [&](const qe_quantize_target &target) {
                                          qe_args_quantize_weight args = {};
                                          args.w = input.as<float>(), args.rows = rows, args.columns = columns,
                                          args.target = target;
                                          args.weight_witness = witness.as<uint64_t>();
                                          args.scale_epoch = has_epoch ? epoch.as<uint64_t>() : nullptr;
                                          args.key = key.as<uint64_t>();
                                          return qe_cuda_quantize_weight(&args, nullptr);
                                      },
                                      {&key});
        if (wrong.empty()) wrong = memory.wrong(values, EXACT);
        const std::vector<uint64_t> found = key.get<uint64_t>();
        const bool is_named = found[QE_KEY_VERSION] == 41 && found[QE_KEY_EPOCH] == (has_epoch ? 43u : 0u);
        if (wrong.empty() && (!is_named || found[QE_KEY_SEAL] != 0)) wrong = "the key is wrong";
        all.report(name_of("quantize_weight", c, rows, columns), wrong);
    }
}

/* --- a weight's step, and the fill behind it --------------------------------------------------------------------- */

void check_sealed(checks &all, uint32_t rows, uint32_t columns) {
    const float remembered = 0.125f;
    const target_case c = {QE_RECIPE_DELAYED, QE_FORMAT_E4M3, true, true, true, true, 3.7f, 0.0f};
    const std::vector<uint64_t> sealed = {41, 43, QE_KEY_SEALED | bits_of_float(remembered), 0};
    buffer input(static_cast<size_t>(rows) * columns * 4), witness(8), epoch(8), key(QE_KEY_WORDS * 8);
    target_memory memory(c, rows, columns);
    input.poison(0), witness.put(std::vector<uint64_t>{41}), epoch.put(std::vector<uint64_t>{43}), key.put(sealed);
    memory.poison(0xA5);
    qe_args_quantize_weight args = {};
    args.w = input.as<float>(), args.rows = rows, args.columns = columns, args.target = memory.target();
    args.weight_witness = witness.as<uint64_t>(), args.scale_epoch = epoch.as<uint64_t>(),
    args.key = key.as<uint64_t>();
    std::string wrong = qe_cuda_quantize_weight(&args, nullptr) == QE_OK ? "" : "the launcher refused";
    MUST(cudaDeviceSynchronize());
    if (wrong.empty() && key.get<uint64_t>() != sealed) wrong = "the key was written";
    if (wrong.empty() && !memory.is_untouched(0xA5, remembered)) wrong = "more than the amax was written";
    all.report(name_of("quantize_weight, sealed", c, rows, columns), wrong);
}

namespace {

const qe_adamw commit_step = {3e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.271f, 0.142625f, 0.37f};

struct commit_arrays {
    std::vector<float> grad, weight, moment1, moment2;
};

commit_arrays commit_arrays_of(size_t count) {
    commit_arrays a = {fp32_values(count, 21, PLAIN), fp32_values(count, 22, PLAIN), fp32_values(count, 23, PLAIN),
                       fp32_values(count, 24, PLAIN)};
    for (size_t i = 0; i < count; ++i) a.moment1[i] *= 0.01f, a.moment2[i] *= a.moment2[i] * 0.01f;
    return a;
}

/* Volatile: no operation is fused with another. */
void commit_reference(const qe_adamw &step, commit_arrays *a) {
    const float root2 = sqrtf(step.bias_correction2), step_size = step.learning_rate / step.bias_correction1;
    volatile const float shrink = step.learning_rate * step.weight_decay;
    for (size_t i = 0; i < a->weight.size(); ++i) {
        volatile const float g = a->grad[i] * step.gradient_scale, apart = g - a->moment1[i];
        volatile const float toward = (1.0f - step.beta1) * apart, kept2 = a->moment2[i] * step.beta2;
        volatile const float part = (1.0f - step.beta2) * g, square = part * g;
        volatile const float kept = a->weight[i] * (1.0f - shrink);
        a->moment1[i] = a->moment1[i] + toward, a->moment2[i] = kept2 + square;
        volatile const float below = sqrtf(a->moment2[i]) / root2, quotient = a->moment1[i] / (below + step.epsilon);
        volatile const float change = step_size * quotient;
        a->weight[i] = kept - change;
    }
}

/* The device's memory of one commit. */
struct commit_world {
    buffer grad, weight, moment1, moment2, step, version, epoch, key, fault;

    explicit commit_world(size_t count)
        : grad(count * 4), weight(count * 4), moment1(count * 4), moment2(count * 4), step(sizeof(qe_adamw)),
          version(8), epoch(8), key(QE_KEY_WORDS * 8), fault(sizeof(qe_guard_fault)) {
        step.put(std::vector<qe_adamw>{commit_step});
    }
    /* Folds go first; those of a step that is vetoed leave the epoch as it was, and what an earlier commit sealed. */
    std::vector<uint64_t> key_before() const {
        return {6, 30, QE_KEY_SEALED | bits_of_float(0.5f), 0};
    }
    void put(const commit_arrays &a, bool has_fired) {
        qe_guard_fault f = {};
        f.fired = has_fired;
        grad.put(a.grad), weight.put(a.weight), moment1.put(a.moment1), moment2.put(a.moment2);
        version.put(std::vector<uint64_t>{6}), epoch.put(std::vector<uint64_t>{has_fired ? 30u : 31u});
        key.put(key_before()), fault.put(std::vector<qe_guard_fault>{f});
    }
    qe_args_adamw args(uint32_t rows, uint32_t columns, const qe_quantize_target &target) const {
        qe_args_adamw a = {};
        a.weight = weight.as<float>(), a.grad = grad.as<float>(), a.moment1 = moment1.as<float>(),
        a.moment2 = moment2.as<float>(), a.count = static_cast<uint64_t>(rows) * columns;
        a.step = step.as<qe_adamw>(), a.decay = 1, a.witness = version.as<uint64_t>();
        a.fault = fault.as<qe_guard_fault>(), a.rows = rows, a.columns = columns, a.target = target;
        a.scale_epoch = epoch.as<uint64_t>(), a.key = key.as<uint64_t>();
        return a;
    }
    std::string wrong(const commit_arrays &a, uint64_t of_version, const std::vector<uint64_t> &of_key) const {
        if (grad.get<float>() != a.grad) return "the gradient was written";
        if (weight.get<float>() != a.weight) return "the weight is wrong";
        if (moment1.get<float>() != a.moment1 || moment2.get<float>() != a.moment2) return "a moment is wrong";
        if (version.get<uint64_t>()[0] != of_version) return "the version is wrong";
        return key.get<uint64_t>() == of_key ? "" : "the key is wrong";
    }
};

} // namespace

void check_commit(checks &all, uint32_t rows, uint32_t columns, bool has_fired) {
    const size_t count = static_cast<size_t>(rows) * columns;
    const target_case c = {QE_RECIPE_DELAYED, QE_FORMAT_E4M3, true, true, true, false, 3.7f, 0.0f};
    commit_arrays arrays = commit_arrays_of(count);
    commit_world world(count);
    target_memory memory(c, rows, columns);
    world.put(arrays, has_fired), memory.poison(0xA5);
    const qe_args_adamw args = world.args(rows, columns, memory.target());
    std::string wrong = qe_cuda_adamw(&args, nullptr) == QE_OK ? "" : "the launcher refused";
    MUST(cudaDeviceSynchronize());
    if (!memory.is_guarded()) wrong = "written beyond the end of the target";
    if (has_fired) {
        if (wrong.empty()) wrong = world.wrong(arrays, 6, world.key_before());
        if (wrong.empty() && !memory.is_untouched(0xA5, 0.0f)) wrong = "codes were written";
    } else {
        commit_reference(commit_step, &arrays);
        float amax = 0.0f;
        for (float w : arrays.weight) amax = std::max(amax, fabsf(w));
        if (wrong.empty()) wrong = world.wrong(arrays, 7, {7, 31, QE_KEY_SEALED | bits_of_float(amax), 0});
        if (wrong.empty()) wrong = memory.wrong(arrays.weight, EXACT);
    }
    all.report(name_of(has_fired ? "commit, vetoed" : "commit", c, rows, columns), wrong);
}

struct rope_shape {
    uint32_t rows, sequence, heads, kv_heads, head_dim;
    uint32_t columns() const {
        return (heads + 2 * kv_heads) * head_dim;
    }
};

static std::vector<float> rope_reference(const rope_shape &s, const std::vector<float> &qkv,
                                         const std::vector<float> &c, const std::vector<float> &sine, bool back) {
    std::vector<float> out = qkv;
    const uint32_t half = s.head_dim / 2;
    for (uint32_t row = 0; row < s.rows; ++row)
        for (uint32_t head = 0; head < s.heads + s.kv_heads; ++head)
            for (uint32_t i = 0; i < half; ++i) {
                const size_t at = static_cast<size_t>(row) * s.columns() + head * s.head_dim + i;
                const size_t angle = static_cast<size_t>(row % s.sequence) * half + i;
                const float a = qkv[at], b = qkv[at + half], turn = back ? -sine[angle] : sine[angle];
                volatile float ac = a * c[angle], bs = b * turn, bc = b * c[angle], as = a * turn;
                out[at] = ac - bs, out[at + half] = bc + as;
            }
    return out;
}

void check_rope(checks &all, uint32_t rows, uint32_t sequence, uint32_t heads, uint32_t kv_heads, uint32_t head_dim,
                kind k) {
    const rope_shape s = {rows, sequence, heads, kv_heads, head_dim};
    const size_t count = static_cast<size_t>(rows) * s.columns(), angles = static_cast<size_t>(sequence) * head_dim / 2;
    const std::vector<uint16_t> x = bf16_values(count, rows + head_dim, k);
    std::vector<float> cosine(angles), sine(angles);
    for (size_t i = 0; i < angles; ++i)
        cosine[i] = cosf(static_cast<float>(i) * 0.37f), sine[i] = sinf(static_cast<float>(i) * 0.37f);
    buffer qkv(count * 2), cosines(angles * 4), sines(angles * 4);
    cosines.put(cosine), sines.put(sine);
    qe_args_rope args = {};
    args.qkv = qkv.at(), args.cosine = cosines.as<float>(), args.sine = sines.as<float>();
    args.rows = rows, args.sequence = sequence, args.heads = heads, args.kv_heads = kv_heads, args.head_dim = head_dim;

    qkv.put(x);
    std::string wrong = qe_cuda_rope(&args, nullptr) == QE_OK ? "" : "the launcher refused";
    MUST(cudaDeviceSynchronize());
    const std::vector<float> forward = rope_reference(s, decoded(x), cosine, sine, false);
    const std::vector<uint16_t> found = qkv.get<uint16_t>();
    for (size_t i = 0; i < count && wrong.empty(); ++i) {
        const bool is_turned = i % s.columns() < (heads + kv_heads) * head_dim;
        if (found[i] != (is_turned ? bf16_of(forward[i]) : x[i])) wrong = "value " + std::to_string(i) + " is wrong";
    }
    if (!qkv.is_guarded()) wrong = "written beyond the end";
    all.report("rope " + std::to_string(rows) + "x" + std::to_string(s.columns()), wrong);

    const std::vector<float> values = rope_reference(s, decoded(x), cosine, sine, true);
    for (const target_case &c : target_cases(all, false)) {
        target_memory memory(c, rows, s.columns());
        wrong = run_twice(
            memory, [&] { qkv.put(x); },
            [&](const qe_quantize_target &target) {
                args.target = target;
                return qe_cuda_rope_backward_quantize(&args, nullptr);
            },
            {});
        if (wrong.empty()) wrong = memory.wrong(values, EXACT);
        all.report(name_of("rope_backward_quantize", c, rows, s.columns()), wrong);
    }
}

/* --- swiglu: near ------------------------------------------------------------------------------------------------ */

static double sigmoid_reference(double g) {
    return 1.0 / (1.0 + exp(-fmin(fmax(g, -87.0), 87.0)));
}

static void swiglu_references(uint32_t rows, uint32_t ffn, const std::vector<float> &gate_up,
                              const std::vector<float> &dy, std::vector<float> *forward, std::vector<float> *backward) {
    for (uint32_t row = 0; row < rows; ++row)
        for (uint32_t i = 0; i < ffn; ++i) {
            const size_t at = static_cast<size_t>(row) * 2 * ffn + i, y = static_cast<size_t>(row) * ffn + i;
            const double g = gate_up[at], u = gate_up[at + ffn], d = dy[y], s = sigmoid_reference(g);
            (*forward)[y] = static_cast<float>(g * s * u);
            (*backward)[at] = static_cast<float>(d * u * (s * (1.0 + g * (1.0 - s))));
            (*backward)[at + ffn] = static_cast<float>(d * (g * s));
        }
}

void check_swiglu(checks &all, uint32_t rows, uint32_t ffn, kind k) {
    const size_t count = static_cast<size_t>(rows) * ffn;
    const std::vector<uint16_t> x = bf16_values(2 * count, rows + ffn, k), d = bf16_values(count, rows + ffn + 1, k);
    std::vector<float> forward(count), backward(2 * count);
    swiglu_references(rows, ffn, decoded(x), decoded(d), &forward, &backward);
    buffer gate_up(count * 4), dy(count * 2);
    gate_up.put(x), dy.put(d);
    for (const target_case &c : target_cases(all, false)) {
        target_memory memory(c, rows, ffn), twice(c, rows, 2 * ffn);
        std::string wrong = run_twice(memory, nullptr,
                                      [&](const qe_quantize_target &target) {
                                          qe_args_swiglu args = {};
                                          args.gate_up = gate_up.at(), args.rows = rows, args.ffn = ffn,
                                          args.target = target;
                                          return qe_cuda_swiglu_quantize(&args, nullptr);
                                      },
                                      {});
        if (wrong.empty()) wrong = memory.wrong(forward, NEAR);
        all.report(name_of("swiglu_quantize", c, rows, ffn), wrong);
        wrong = run_twice(twice, nullptr,
                          [&](const qe_quantize_target &target) {
                              qe_args_swiglu_backward args = {};
                              args.gate_up = gate_up.at(), args.dy = dy.at(), args.rows = rows, args.ffn = ffn,
                              args.target = target;
                              return qe_cuda_swiglu_backward_quantize(&args, nullptr);
                          },
                          {});
        if (wrong.empty()) wrong = twice.wrong(backward, NEAR);
        all.report(name_of("swiglu_backward_quantize", c, rows, 2 * ffn), wrong);
    }
}

/* --- norms: statistics near, what follows from them exact --------------------------------------------------------- */

static std::string wrong_number(const char *what, size_t i, double found, double expected, double allowed) {
    if ((found != found && expected != expected) || found == expected || fabs(found - expected) <= allowed) return "";
    char text[160];
    snprintf(text, sizeof text, "%s %zu is %.9g, expected %.9g +- %.3g", what, i, found, expected, allowed);
    return text;
}

static std::string wrong_rstd(const std::vector<float> &x, const std::vector<float> &found, uint32_t rows,
                              uint32_t hidden, double epsilon) {
    for (uint32_t row = 0; row < rows; ++row) {
        double sum = 0;
        for (uint32_t i = 0; i < hidden; ++i)
            sum += static_cast<double>(x[static_cast<size_t>(row) * hidden + i]) *
                   x[static_cast<size_t>(row) * hidden + i];
        const double rstd = 1.0 / sqrt(sum / hidden + epsilon);
        if (sum > 1e37) continue; /* beyond what fp32 adds up */
        const std::string wrong = wrong_number("rstd", row, found[row], rstd, 1e-6 * rstd);
        if (!wrong.empty()) return wrong;
    }
    return "";
}

static std::vector<float> normed_reference(const std::vector<float> &x, const std::vector<float> &rstd,
                                           const std::vector<float> &gain, uint32_t hidden) {
    std::vector<float> y(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
        volatile float n = x[i] * rstd[i / hidden];
        y[i] = n * gain[i % hidden];
    }
    return y;
}

void check_norm(checks &all, uint32_t rows, uint32_t hidden, kind k) {
    const size_t count = static_cast<size_t>(rows) * hidden;
    const std::vector<uint16_t> x = bf16_values(count, rows + 3 * hidden, k, 0.3 / hidden);
    const std::vector<float> g = fp32_values(hidden, hidden, PLAIN);
    buffer input(count * 2), gain(hidden * 4), rstd(rows * 4), y(count * 2);
    input.put(x), gain.put(g);
    qe_args_norm args = {};
    args.x = input.at(), args.gain = gain.as<float>(), args.rstd = rstd.as<float>();
    args.epsilon = 1e-5f, args.rows = rows, args.hidden = hidden;
    std::vector<float> first;
    for (const target_case &c : target_cases(all, false)) {
        target_memory memory(c, rows, hidden);
        std::string wrong = run_twice(memory, nullptr,
                                      [&](const qe_quantize_target &target) {
                                          args.target = target;
                                          return qe_cuda_norm(&args, nullptr);
                                      },
                                      {&rstd});
        const std::vector<float> found = rstd.get<float>();
        if (wrong.empty()) wrong = wrong_rstd(decoded(x), found, rows, hidden, 1e-5);
        if (wrong.empty()) wrong = memory.wrong(normed_reference(decoded(x), found, g, hidden), EXACT);
        if (first.empty()) first = found;
        if (wrong.empty() && memcmp(first.data(), found.data(), rows * 4) != 0) wrong = "rstd depends on the recipe";
        all.report(name_of("norm_quantize", c, rows, hidden), wrong);
    }
    const target_case unused = {QE_RECIPE_FP32, QE_FORMAT_E4M3, false, false, false, false, 1.0f, 0.0f};
    target_memory memory(unused, rows, hidden);
    args.y = y.at();
    std::string wrong = run_twice(
        memory, nullptr, [&](const qe_quantize_target &) { return qe_cuda_norm(&args, nullptr); }, {&rstd, &y});
    const std::vector<float> expected = normed_reference(decoded(x), rstd.get<float>(), g, hidden);
    const std::vector<uint16_t> found = y.get<uint16_t>();
    for (size_t i = 0; i < count && wrong.empty(); ++i)
        if (found[i] != bf16_of(expected[i])) wrong = "value " + std::to_string(i) + " is wrong";
    all.report("norm " + std::to_string(rows) + "x" + std::to_string(hidden), wrong);
}

struct backward_world {
    uint32_t rows, hidden;
    std::vector<uint16_t> dy, x, residual;
    std::vector<float> gain, rstd;
};

/* In double; allowed: what rounding of the terms may do, and half a step of bf16. */
static std::string wrong_dx(const backward_world &w, const std::vector<uint16_t> &found, bool has_residual) {
    for (uint32_t row = 0; row < w.rows; ++row) {
        const size_t begin = static_cast<size_t>(row) * w.hidden;
        double sum = 0, size = 0;
        for (uint32_t i = 0; i < w.hidden; ++i) {
            const double term =
                static_cast<double>(qe_bf16_decode(w.dy[begin + i])) * w.gain[i] * qe_bf16_decode(w.x[begin + i]);
            sum += term, size += fabs(term);
        }
        const double rstd = w.rstd[row], mean = sum * rstd / w.hidden, mean_off = size * rstd / w.hidden * 2e-6;
        for (uint32_t i = 0; i < w.hidden; ++i) {
            const double n = qe_bf16_decode(w.x[begin + i]) * rstd, d = qe_bf16_decode(w.dy[begin + i]);
            const double base = has_residual ? qe_bf16_decode(w.residual[begin + i]) : 0.0;
            const double own = rstd * (d * w.gain[i] - n * mean);
            const double terms = fabs(base) + rstd * (fabs(d * w.gain[i]) + fabs(n * mean));
            const double allowed = fabs(base + own) / 256 + terms * 1e-6 + rstd * fabs(n) * mean_off;
            const std::string wrong =
                wrong_number("dx", begin + i, qe_bf16_decode(found[begin + i]), base + own, allowed);
            if (!wrong.empty() && isfinite(base + own)) return wrong;
        }
    }
    return "";
}

static std::string wrong_gain(const backward_world &w, const std::vector<float> &found,
                              const std::vector<float> &before) {
    for (uint32_t i = 0; i < w.hidden; ++i) {
        double sum = before.empty() ? 0.0 : before[i], size = fabs(sum);
        for (uint32_t row = 0; row < w.rows; ++row) {
            const size_t at = static_cast<size_t>(row) * w.hidden + i;
            const double term = static_cast<double>(qe_bf16_decode(w.dy[at])) * qe_bf16_decode(w.x[at]) * w.rstd[row];
            sum += term, size += fabs(term);
        }
        const std::string wrong = wrong_number("gain gradient", i, found[i], sum, size * 2e-6);
        if (!wrong.empty()) return wrong;
    }
    return "";
}

static backward_world backward_world_of(uint32_t rows, uint32_t hidden, kind k) {
    const size_t count = static_cast<size_t>(rows) * hidden;
    backward_world w = {rows,
                        hidden,
                        bf16_values(count, 11, k),
                        bf16_values(count, 12, k),
                        bf16_values(count, 13, k),
                        fp32_values(hidden, 14, PLAIN),
                        std::vector<float>(rows)};
    for (uint32_t row = 0; row < rows; ++row) w.rstd[row] = 0.25f + 0.001f * static_cast<float>(row % 97);
    return w;
}

void check_norm_backward(checks &all, uint32_t rows, uint32_t hidden, kind k) {
    const size_t count = static_cast<size_t>(rows) * hidden;
    const backward_world w = backward_world_of(rows, hidden, k);
    buffer dy(count * 2), x(count * 2), residual(count * 2), dx(count * 2), gain(hidden * 4), rstd(rows * 4);
    buffer grad(hidden * 4), partials(static_cast<size_t>(QE_GAIN_PARTIALS) * hidden * 4);
    dy.put(w.dy), x.put(w.x), residual.put(w.residual), gain.put(w.gain), rstd.put(w.rstd);
    const std::vector<float> before = fp32_values(hidden, 15, PLAIN);
    std::vector<target_case> cases = target_cases(all, false);
    cases.push_back({QE_RECIPE_FP32, QE_FORMAT_E4M3, false, false, false, false, 1.0f, 0.0f}); /* not quantized */
    int number = 0;
    for (const target_case &c : cases) {
        const bool has_residual = number % 3 != 0, in_place = number % 3 == 2, set = number % 2 == 0;
        const bool has_grad = number % 4 != 3;
        ++number;
        target_memory memory(c, rows, hidden);
        qe_args_norm_backward args = {};
        args.dy = dy.at(), args.x = x.at(), args.rstd = rstd.as<float>(), args.gain = gain.as<float>();
        args.residual = has_residual ? (in_place ? dx.at() : residual.at()) : nullptr;
        args.dx = dx.at(), args.gain_grad = has_grad ? grad.as<float>() : nullptr, args.partials = partials.as<float>();
        args.rows = rows, args.hidden = hidden, args.set = set;
        const auto again = [&] {
            grad.put(before), partials.poison(0xFF);
            if (in_place) dx.put(w.residual);
        };
        std::string wrong = run_twice(memory, again,
                                      [&](const qe_quantize_target &target) {
                                          args.target = target;
                                          return qe_cuda_norm_backward(&args, nullptr);
                                      },
                                      {&dx, &grad});
        const std::vector<uint16_t> found = dx.get<uint16_t>();
        if (wrong.empty()) wrong = wrong_dx(w, found, has_residual);
        if (wrong.empty()) wrong = memory.wrong(decoded(found), EXACT); /* what is quantized is dx as it was stored */
        if (wrong.empty() && has_grad) wrong = wrong_gain(w, grad.get<float>(), set ? std::vector<float>() : before);
        if (wrong.empty() && !has_grad && grad.get<float>() != before) wrong = "a gradient that was not asked for";
        if (!partials.is_guarded()) wrong = "partial sums beyond their end";
        all.report(name_of("norm_backward", c, rows, hidden), wrong);
    }
}

/* --- codes back to values, and the codec itself ------------------------------------------------------------------- */

void check_decode(checks &all, uint32_t rows, uint32_t columns) {
    const size_t count = static_cast<size_t>(rows) * columns;
    const uint32_t across = (columns + QE_BLOCK - 1) / QE_BLOCK, down = (rows + QE_BLOCK - 1) / QE_BLOCK;
    numbers random(rows + columns);
    std::vector<uint8_t> c(count);
    for (uint8_t &code : c) code = static_cast<uint8_t>(random.next());
    std::vector<float> inverse(static_cast<size_t>(rows) * across + static_cast<size_t>(down) * columns);
    for (float &f : inverse) f = ldexpf(1.0f, static_cast<int>(random.next() % 41) - 20);
    buffer codes(count), scales(inverse.size() * 4), out(count * 2);
    codes.put(c), scales.put(inverse);
    for (qe_format format : {QE_FORMAT_E4M3, QE_FORMAT_E5M2})
        for (int blocking = QE_BLOCKING_TENSOR; blocking <= QE_BLOCKING_TILE; ++blocking) {
            qe_qtensor tensor = {};
            tensor.codes = codes.at(), tensor.scale_inv = scales.as<float>(), tensor.rows = rows,
            tensor.columns = columns;
            tensor.format = static_cast<uint8_t>(format), tensor.blocking = static_cast<uint8_t>(blocking);
            out.poison(0xA5);
            std::string wrong = qe_cuda_decode(&tensor, out.at(), nullptr) == QE_OK ? "" : "the launcher refused";
            MUST(cudaDeviceSynchronize());
            const std::vector<uint16_t> found = out.get<uint16_t>();
            for (size_t at = 0; at < count && wrong.empty(); ++at) {
                const size_t i = at / columns, j = at % columns;
                const size_t block[] = {0, i * across + j / QE_BLOCK, i / QE_BLOCK * columns + j,
                                        i / QE_BLOCK * across + j / QE_BLOCK};
                const uint16_t want = bf16_of(qe_fp8_decode(format, c[at]) * inverse[block[blocking]]);
                if (found[at] != want) wrong = "value " + std::to_string(at) + " is wrong";
            }
            if (!out.is_guarded()) wrong = "written beyond the end";
            all.report("decode " + std::to_string(rows) + "x" + std::to_string(columns), wrong);
        }
}

/* Every bf16 pattern, and fp32 patterns around every midpoint of the formats, through quantize_weight (whose input is
 * fp32) with scale 1: NaNs of both signs and all payloads, infinities, subnormals. */
void check_codec(checks &all) {
    std::vector<float> values;
    for (uint32_t high = 0; high < 0x10000; ++high)
        for (uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
            const uint32_t bits = high << 16 | low;
            float value;
            memcpy(&value, &bits, sizeof value);
            values.push_back(value);
        }
    const uint32_t columns = 1024, rows = static_cast<uint32_t>(values.size() / columns);
    buffer input(values.size() * 4);
    input.put(values);
    for (qe_format format : {QE_FORMAT_E4M3, QE_FORMAT_E5M2}) {
        const target_case c = {QE_RECIPE_DELAYED, format, true, true, true, true, 1.0f, 0.0f};
        target_memory memory(c, rows, columns);
        std::string wrong = run_twice(memory, nullptr,
                                      [&](const qe_quantize_target &target) {
                                          qe_args_quantize_weight args = {};
                                          args.w = input.as<float>(), args.rows = rows, args.columns = columns,
                                          args.target = target;
                                          return qe_cuda_quantize_weight(&args, nullptr);
                                      },
                                      {});
        if (wrong.empty()) wrong = memory.wrong(values, EXACT);
        all.report(name_of("codec", c, rows, columns), wrong);
    }
}

static void check_small(checks &all) {
    check_quantize(all, 16, 16, SPECIAL);
    check_quantize(all, 144, 208, SPECIAL);
    check_quantize(all, 37, 51, SPECIAL);
    check_quantize(all, 400, 16, SPECIAL); /* grids that are folded, with a block too many */
    check_quantize_weight(all, 80, 144, SPECIAL);
    check_quantize_weight(all, 19, 130, WIDE);
    check_sealed(all, 80, 144); /* each by another kernel */
    check_sealed(all, 19, 130);
    check_sealed(all, 2048, 1552);
    check_commit(all, 48, 208, false); /* tiles, the last ones cut */
    check_commit(all, 48, 208, true);
    check_commit(all, 19, 130, false);
    check_commit(all, 19, 130, true);
    check_rope(all, 48, 24, 3, 1, 32, SPECIAL);
    check_rope(all, 48, 16, 2, 1, 128, SPECIAL);
    check_rope(all, 208, 52, 2, 1, 128, SPECIAL); /* blocks of rows below each other, the last one cut */
    check_rope(all, 21, 7, 2, 1, 12, SPECIAL);
    check_swiglu(all, 48, 80, WIDE);
    check_swiglu(all, 13, 21, PLAIN);
    check_norm(all, 48, 144, SPECIAL);
    check_norm(all, 16, 1024, WIDE);
    check_norm(all, 21, 99, WIDE);
    check_norm_backward(all, 48, 144, WIDE);
    check_norm_backward(all, 16, 1024, WIDE);
    check_norm_backward(all, 21, 99, WIDE);
    check_decode(all, 150, 136);
    check_decode(all, 7, 9);
}

/* One row, one column, what no tile fits or just fits; values of which none is a number, or all are the same. */
static void check_hostile(checks &all) {
    static const uint32_t shapes[][2] = {{1, 1}, {1, 17}, {33, 1}, {16, 32}};
    for (const auto &shape : shapes) {
        check_quantize(all, shape[0], shape[1], ANY);
        check_quantize_weight(all, shape[0], shape[1], ANY);
    }
    for (kind k : {ZEROS, NANS, INFINITES, SMALLEST, LARGEST}) {
        check_quantize(all, 16, 16, k);
        check_quantize_weight(all, 16, 16, k);
        check_norm(all, 1, 24, k);
        check_swiglu(all, 3, 8, k);
        check_rope(all, 5, 3, 1, 1, 2, k);
    }
    for (bool has_fired : {false, true}) {
        check_commit(all, 1, 1, has_fired);
        check_commit(all, 16, 16, has_fired);
        check_commit(all, 1, 16, has_fired);
        check_commit(all, 272, 144, has_fired);
    }
    check_sealed(all, 1, 1);
    check_sealed(all, 16, 16);
    check_norm_backward(all, 1, 8, PLAIN);
    check_norm_backward(all, 33, 1, PLAIN);
    check_decode(all, 1, 1);
    check_decode(all, 129, 8);
}

void check_everything(checks &all, bool with_large) {
    check_small(all);
    check_hostile(all);
    if (!with_large) return;
    check_codec(all);
    all.few = true;
    check_quantize(all, 1040, 3104, SPECIAL);
    check_quantize_weight(all, 2048, 1552, SPECIAL);
    check_rope(all, 1040, 208, 24, 6, 128, SPECIAL); /* heads of a block, then one */
    check_rope(all, 3248, 208, 28, 2, 128, SPECIAL);
    check_swiglu(all, 528, 6160, WIDE);
    check_norm(all, 1024, 1024, PLAIN);
    check_norm(all, 784, 4112, SPECIAL);
    check_norm(all, 1024, 3328, SPECIAL); /* held in shared memory */
    check_norm(all, 528, 8192, WIDE);
    check_norm(all, 272, 12288, PLAIN);
    check_norm_backward(all, 1024, 1024, PLAIN);
    check_norm_backward(all, 784, 4112, WIDE);
    check_norm_backward(all, 1024, 3328, SPECIAL); /* held in shared memory */
    check_norm_backward(all, 2048, 2048, SPECIAL); /* there in wide blocks */
    check_norm_backward(all, 528, 8192, PLAIN);
    check_norm_backward(all, 16400, 208, PLAIN);
}
