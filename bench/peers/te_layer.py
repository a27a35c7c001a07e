#!/usr/bin/env python3
"""Transformer Engine's layer, delayed scaling, by the protocol of protocol.py: run eagerly, as the graphs that
make_graphed_callables makes, and with its host taken away (forward and backward in one graph).

    bench/peers/te_layer.py SHAPE [--deterministic] [--fast] [--figures eager,graphed,one_graph] [--seconds S]
                            [--turns N]

One process per shape: past the recompile limit of torch's compiler, which Transformer Engine's helpers use, its fused
helpers fall back. Weights are quantized once, in both layouts, and cached (is_first_microbatch), gradients accumulate
into main_grad in the products (fuse_wgrad_accumulation). Accumulation of the products is Transformer Engine's default
(fast forward, split gradients); --fast makes all of them fast. Prints a JSON line for each figure. Run it as gpu.py
does, without LD_LIBRARY_PATH: beside a toolkit's libraries its fused attention does not come up.
Exit status: 0, 2 usage, 77 Transformer Engine or a GPU is missing.
"""
import argparse
import json
import os
import statistics
import sys
import warnings


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shape")
    parser.add_argument("--deterministic", action="store_true", help="attention adds up in one order")
    parser.add_argument("--fast", action="store_true", help="gradient products accumulate fast too")
    parser.add_argument("--figures", default="eager,graphed,one_graph")
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--turns", type=int, default=0,
                        help="a figure is taken so often, each time when a line comes on standard input (turns.py)")
    return parser.parse_args()


ARGUMENTS = arguments()
# Read when an attention module is made, and by its library.
os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0" if ARGUMENTS.deterministic else "1"
warnings.filterwarnings("ignore")

try:
    import torch
    import protocol
    import transformer_engine
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as te_recipe
except ImportError as missing:
    print(f"skipped: this comparison needs PyTorch and Transformer Engine ({missing})", file=sys.stderr)
    sys.exit(77)


# Every slot's layer compiles Transformer Engine's helpers anew; past the default limit they run uncompiled, several
# times slower, and the peer would be measured at less than it can do.
for limit in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit", "accumulated_cache_size_limit"):
    if hasattr(torch._dynamo.config, limit):
        setattr(torch._dynamo.config, limit, 4096)


def make_recipe(fast):
    recipe = te_recipe.DelayedScaling(fp8_format=te_recipe.Format.HYBRID, amax_history_len=protocol.HISTORY_LENGTH,
                                      amax_compute_algo="max")
    if fast:
        for product in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            setattr(recipe, product, te_recipe.MMParams(use_split_accumulator=False))
    return recipe


class Slot:
    """A layer with its own weights, gradients, input and output gradient."""

    def __init__(self, shape, recipe, seed):
        torch.manual_seed(seed)
        self.recipe = recipe
        self.layer = te.TransformerLayer(
            shape.hidden, shape.ffn, shape.heads, num_gqa_groups=shape.kv_heads, hidden_dropout=0.0,
            attention_dropout=0.0, fuse_qkv_params=True, normalization="RMSNorm", activation="swiglu", bias=False,
            params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True, attn_input_format="bshd",
            self_attn_mask_type="causal", seq_length=shape.tokens, micro_batch_size=1).cuda()
        self.parameters = list(self.layer.parameters())
        for parameter, gradient in zip(self.parameters, protocol.random_main_gradients(self.parameters, seed)):
            parameter.main_grad = gradient
            parameter.grad_added_to_main_grad = False
        self.x = torch.randn(1, shape.tokens, shape.hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
        self.dy = torch.randn_like(self.x)
        self.rope = te.RotaryPositionEmbedding(protocol.head_dim(shape))(shape.tokens).cuda()
        self.call = self.layer

    def turn(self, first):
        """first: quantizes the weights; else the cached ones are used."""
        with te.autocast(enabled=True, recipe=self.recipe):
            y = self.call(self.x, rotary_pos_emb=self.rope, is_first_microbatch=first)
        y.backward(self.dy)

    def clear(self):
        """What autograd would add up: the main gradients are elsewhere."""
        self.x.grad = None
        for parameter in self.parameters:
            parameter.grad = None

    def whole_turn(self, first=False):
        self.turn(first)
        self.clear()

    def grow_graphed(self):
        sample = self.x.detach().clone().requires_grad_()
        self.call = te.make_graphed_callables(
            self.layer, (sample,), num_warmup_iters=3, sample_kwargs={"rotary_pos_emb": self.rope}, enabled=True,
            recipe=self.recipe, cache_quantized_params=True, clone_param_grads_on_return=False)

    def grow_one_graph(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.whole_turn(first=True)
            self.whole_turn()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.turn(first=False)


def check_accumulates(slot, run):
    """A turn must change the main gradients of matrices by adding: twice is not once."""
    matrix = max(slot.parameters, key=lambda parameter: parameter.numel()).main_grad
    before = matrix.clone()
    run()
    once = (matrix - before).norm().item()
    run()
    twice = (matrix - before).norm().item()
    if not (once > 0 and 1.5 < twice / once < 2.5):
        raise RuntimeError(f"main gradients are not added up: {once} after one turn, {twice} after two")


def measure(shape, figure, recipe, seconds):
    slots = [Slot(shape, recipe, seed) for seed in range(protocol.slots_for(shape))]
    for slot in slots:
        if figure == "graphed":
            slot.grow_graphed()
        if figure == "one_graph":
            slot.grow_one_graph()
        else:
            slot.whole_turn(first=True)
    runs = [slot.graph.replay if figure == "one_graph" else slot.whole_turn for slot in slots]
    check_accumulates(slots[0], runs[0])
    if ARGUMENTS.turns == 0:
        return protocol.sustained(lambda slot: runs[slot](), len(slots), seconds)
    return in_turns(lambda: protocol.sustained(lambda slot: runs[slot](), len(slots), seconds))


def in_turns(take):
    """Says that it is ready, and waits; again after each turn."""
    turns = []
    for turn in range(ARGUMENTS.turns):
        print(json.dumps({"ready": turn}), flush=True)
        sys.stdin.readline()
        turns.append(take())
    return {"ms": statistics.median(fields["ms"] for fields in turns), "turns": turns}


FIGURES = {"eager": "eager, weights cached",
           "graphed": "make_graphed_callables, weights cached, no clones",
           "one_graph": "forward and backward in one graph, weights cached"}


def main():
    shape = protocol.SHAPES.get(ARGUMENTS.shape)
    figures = ARGUMENTS.figures.split(",")
    if shape is None or not set(figures) <= set(FIGURES):
        print(f"shapes: {' '.join(protocol.SHAPES)}; figures: {' '.join(FIGURES)}", file=sys.stderr)
        return 2
    protocol.need_gpu()
    recipe = make_recipe(ARGUMENTS.fast)
    peer = f"transformer_engine {transformer_engine.__version__}"
    attention = "deterministic" if ARGUMENTS.deterministic else "any order"
    accumulation = "fast" if ARGUMENTS.fast else "fast forward, split gradients"
    seconds = ARGUMENTS.seconds or protocol.FIGURE_SECONDS
    for figure in figures:
        protocol.attempt(shape, peer, FIGURES[figure], attention, accumulation,
                         lambda figure=figure: measure(shape, figure, recipe, seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
