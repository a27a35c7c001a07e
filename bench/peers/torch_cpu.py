#!/usr/bin/env python3
"""The same model in eager PyTorch on the CPU: do the losses agree, and which of the two is faster?

    bench/peers/torch_cpu.py                  fp32 losses of both programs, step by step (exit 1 where they differ)
    bench/peers/torch_cpu.py --time           tokens/s of both, five interleaved rounds, the median of the ratios

qeffect writes the initial weights and the batches it is going to use; PyTorch trains on exactly these. Nothing is
shared but numbers: the model below is written from the Hugging Face Llama definition with torch's own modules.
Exit status: 0 agreement (or timed), 1 disagreement or an operating error, 2 usage, 77 torch is not installed here.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

try:
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file
    from torch import nn
except ImportError as missing:
    print(f"skipped: this comparison needs PyTorch and safetensors ({missing}); "
          "install them with: pip install torch safetensors", file=sys.stderr)
    sys.exit(77)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FIRST_STEP_TOLERANCE = 1e-5  # same weights, same batch: only the order of additions differs
LAST_STEP_TOLERANCE = 1e-3   # AdamW divides by small moments, so rounding grows with the steps
WARM_UP_STEPS = 3            # not timed: allocator, thread pool and caches settle


# --- The model: names of parameters are those of transformers' LlamaForCausalLM -----------------------------------

class Attention(nn.Module):
    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape

        def split(y, heads):
            return y.view(batch, length, heads, self.head_dim).transpose(1, 2)

        q = rotate(split(self.q_proj(x), self.heads), cos, sin)
        k = rotate(split(self.k_proj(x), self.kv_heads), cos, sin)
        v = split(self.v_proj(x), self.kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, hidden, intermediate):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape.hidden, shape.heads, shape.kv_heads)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = Mlp(shape.hidden, shape.intermediate)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.model.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.model.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        cos, sin = rope_tables(shape.hidden // shape.heads, shape.length, shape.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens, targets):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, self.cos, self.sin)
        logits = self.lm_head(self.model.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def rope_tables(head_dim, length, theta):
    """cos and sin [length, head_dim], both halves alike (the half-split form)."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), inverse)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


# --- Training, as docs/numerics.md states it ----------------------------------------------------------------------

def learning_rate(step, steps, settings):
    """step counts from 1."""
    peak, least, warmup = settings.learning_rate, settings.learning_rate_min, settings.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    return least + (peak - least) * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def make_optimizer(model, settings):
    """Weight decay on matrices (embedding and head included), none on gains."""
    groups = [{"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": settings.weight_decay},
              {"params": [p for p in model.parameters() if p.dim() != 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2),
                             eps=settings.adam_eps, fused=True)


def train_step(model, optimizer, tokens, targets, step, steps, settings):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, steps, settings)
    optimizer.zero_grad(set_to_none=True)
    loss = model(tokens, targets)
    loss.backward()
    if settings.clip_norm > 0:
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
    optimizer.step()
    return loss.item()


# --- What the two programs share: the configuration file and qeffect's own output ---------------------------------

# our word -> (configuration key, value where the file is silent)
SETTINGS = {
    "layers": ("model.layers", 4), "hidden": ("model.hidden", 128), "heads": ("model.heads", 4),
    "kv_heads": ("model.kv_heads", 2), "intermediate": ("model.ffn", 384), "vocab": ("model.vocab", 256),
    "length": ("model.sequence", 128), "norm_eps": ("model.norm_epsilon", 1e-5),
    "rope_theta": ("model.rope_theta", 10000.0), "learning_rate": ("train.learning_rate", 3e-3),
    "learning_rate_min": ("train.minimum_learning_rate", 3e-4), "warmup_steps": ("train.warmup", 50),
    "beta1": ("train.beta1", 0.9), "beta2": ("train.beta2", 0.95), "adam_eps": ("train.epsilon", 1e-8),
    "weight_decay": ("train.weight_decay", 0.1), "clip_norm": ("train.gradient_clip", 1.0),
    "microbatches": ("pipeline.microbatches", 8), "sequences": ("train.sequences", 2),
}


def read_settings(path, overrides):
    """The two-level subset of YAML that configurations use: `group:` lines and indented `key: value` lines."""
    found, group = {}, ""
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.split("#", 1)[0].rstrip()
            key, _, value = line.strip().partition(":")
            if not key:
                continue
            if line[0] not in " \t":
                group = key
            if value.strip():
                found[key if group == key else f"{group}.{key}"] = value.strip().strip("\"'")
    found.update(overrides)
    values = {name: type(default)(found.get(key, default)) for name, (key, default) in SETTINGS.items()}
    return argparse.Namespace(**values)


def run_qeffect(options, overrides, *flags):
    """Runs qeffect and returns its JSON document. No weights are kept: a trained model may lie where they would go."""
    command = [options.program, "train", options.config, "--json", "--set", "checkpoint.path=", *flags]
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed with exit status {done.returncode}:\n{done.stderr.strip()}")
    return json.loads(done.stdout)


# --- The two comparisons ------------------------------------------------------------------------------------------

def compare(options):
    """Both programs, fp32, the same weights and batches: a row per step."""
    overrides = {"train.steps": options.steps, "train.warmup": max(1, options.steps // 4),
                 "recipe.name": "fp32"}
    settings = read_settings(options.config, overrides)
    with tempfile.TemporaryDirectory() as folder:
        weights, batches = os.path.join(folder, "initial.safetensors"), os.path.join(folder, "batches.safetensors")
        report = run_qeffect(options, overrides, "--dump-initial", weights, "--dump-batches", batches,
                             "--dump-steps", str(options.steps))
        model = Llama(settings)
        model.load_state_dict(load_file(weights), strict=True)
        data = load_file(batches)
    theirs = [entry["loss"] for entry in report["loss_curve"]][:options.steps]
    if len(theirs) < options.steps:
        sys.exit(f"qeffect reported {len(theirs)} losses where {options.steps} steps were asked for")
    optimizer = make_optimizer(model, settings)
    worst = 0.0
    print(f"{'step':>5} {'qeffect fp32':>14} {'torch fp32':>14} {'difference':>11}")
    for step in range(1, options.steps + 1):
        ours = train_step(model, optimizer, data["tokens"][step - 1].long(), data["targets"][step - 1].long(),
                          step, options.steps, settings)
        difference = abs(ours - theirs[step - 1])
        bound = FIRST_STEP_TOLERANCE if step == 1 else LAST_STEP_TOLERANCE
        worst = max(worst, difference / bound)
        verdict = "" if difference <= bound else f"  more than {bound:g}"  # a NaN fails this comparison, too
        if verdict:
            worst = math.inf
        print(f"{step:5d} {theirs[step - 1]:14.7f} {ours:14.7f} {difference:11.2e}{verdict}")
    agreed = worst <= 1.0
    print(f"{'agrees' if agreed else 'DISAGREES'}: bounds are {FIRST_STEP_TOLERANCE:g} at step 1 and "
          f"{LAST_STEP_TOLERANCE:g} up to step {options.steps}")
    return 0 if agreed else 1


def time_torch(settings, steps):
    """Tokens per second of whole training steps on one full batch."""
    torch.manual_seed(1)
    model = Llama(settings)
    optimizer = make_optimizer(model, settings)
    rows = settings.microbatches * settings.sequences
    tokens = torch.randint(settings.vocab, (rows, settings.length))
    targets = torch.randint(settings.vocab, (rows, settings.length))
    total = WARM_UP_STEPS + steps
    for step in range(1, total + 1):
        if step == WARM_UP_STEPS + 1:
            begin = time.perf_counter()
        train_step(model, optimizer, tokens, targets, step, total, settings)
    return steps * tokens.numel() / (time.perf_counter() - begin)


def warn_when_busy(threads):
    """PyTorch's threads wait for each other by spinning: one other busy process can make it ten times slower."""
    load = os.getloadavg()[0]
    if load + threads > (os.cpu_count() or 1) + 0.5:
        print(f"warning: other work runs here (load {load:.1f}); these figures will flatter qeffect", file=sys.stderr)


def time_both(options):
    """Rounds of torch and every recipe in turn, so that a slow minute of the machine meets all of them."""
    settings = read_settings(options.config, {})
    recipes = options.recipes.split(",")
    warn_when_busy(options.threads)
    ratios = {recipe: [] for recipe in recipes}
    print(f"{'round':>5} {'torch fp32':>11} " + " ".join(f"{recipe:>16}" for recipe in recipes) + "  (tokens/s)")
    for index in range(options.rounds):
        torch_rate = time_torch(settings, options.steps)
        cells = []
        for recipe in recipes:
            report = run_qeffect(options, {"train.steps": options.steps, "train.warmup": 1,
                                           "recipe.name": recipe})
            ratios[recipe].append(report["tokens_per_s"] / torch_rate)
            cells.append(f"{report['tokens_per_s']:8.0f} ({ratios[recipe][-1]:.2f}x)")
        print(f"{index + 1:5d} {torch_rate:11.0f} " + " ".join(f"{cell:>16}" for cell in cells), flush=True)
    for recipe in recipes:
        print(f"qeffect {recipe}: {statistics.median(ratios[recipe]):.2f} times torch fp32 eager "
              f"with {options.threads} threads (median of {options.rounds} rounds)")
    return 0


def main():
    parser = argparse.ArgumentParser(description="qeffect against eager PyTorch on this CPU",
                                     epilog="exit status: 0 agreement, 1 disagreement or error, 77 no torch here")
    parser.add_argument("--config", default=os.path.join(ROOT, "examples", "quickstart.yaml"))
    parser.add_argument("--program", default=os.path.join(ROOT, "build", "qeffect"))
    parser.add_argument("--steps", type=int, default=20, help="steps to compare, or to time in each round")
    parser.add_argument("--time", action="store_true", help="compare tokens/s instead of losses")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of --time")
    parser.add_argument("--recipes", default="delayed,bf16,fp32", help="recipes to time, with commas between")
    parser.add_argument("--threads", type=int, default=2, help="threads PyTorch may use")
    options = parser.parse_args()
    for path in (options.program, options.config):
        if not os.path.exists(path):
            sys.exit(f"{path} does not exist; build first with: make")
    torch.set_num_threads(options.threads)
    return time_both(options) if options.time else compare(options)


if __name__ == "__main__":
    sys.exit(main())
