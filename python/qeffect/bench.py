"""python -m qeffect.bench SHAPE: one Transformer Engine layer, forward and backward, on one GPU: its own graphs, its
kernels in one graph, and captured under QEffect, in one process and one run. Times in ms, sustained for a second.

Needs a GPU and Transformer Engine 2.20. Run each shape in a process of its own."""
from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Callable, Optional

SHAPES = {"h1024T1k": (1024, 4096, 16, 16, 1024), "h2048T2k": (2048, 8192, 16, 16, 2048),
          "h4096T2k": (4096, 14336, 32, 8, 2048), "h4096T8k": (4096, 14336, 32, 8, 8192)}
MICROBATCHES = 32
HISTORY = 16


class Case:
    """One shape: modules, input, gradient, recipe."""

    def __init__(self, shape: str) -> None:
        import torch
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling, Format
        self.hidden, self.ffn, self.heads, self.groups, self.tokens = SHAPES[shape]
        self.recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=HISTORY)
        self.x = torch.randn(1, self.tokens, self.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.dy = torch.randn_like(self.x)
        self.rope = te.RotaryPositionEmbedding(self.hidden // self.heads)(self.tokens).cuda()

    def layer(self) -> Any:
        import torch
        import transformer_engine.pytorch as te
        made = te.TransformerLayer(
            self.hidden, self.ffn, self.heads, num_gqa_groups=self.groups, hidden_dropout=0, attention_dropout=0,
            fuse_qkv_params=True, normalization="RMSNorm", activation="swiglu", bias=False,
            params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True, attn_input_format="bshd",
            self_attn_mask_type="causal", seq_length=self.tokens, micro_batch_size=1).cuda()
        for parameter in made.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
            parameter.grad_added_to_main_grad = False
        return made


def sustained_ms(work: Callable[[], None], calls: int = 1, seconds: float = 1.0) -> float:
    """ms of one of the `calls` that `work` makes, back to back."""
    import torch
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def burst(count: int) -> float:
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / count

    once = burst(2)
    return burst(max(3, int(seconds * 1e3 / once))) / calls


def te_graphs(case: Case) -> float:
    """Transformer Engine's own graphs, cached weights, no clones."""
    import transformer_engine.pytorch as te
    layer = case.layer()
    graphed = te.make_graphed_callables(
        layer, (case.x.detach().clone().requires_grad_(True),), num_warmup_iters=3,
        sample_kwargs={"rotary_pos_emb": case.rope}, enabled=True, recipe=case.recipe, cache_quantized_params=True,
        clone_param_grads_on_return=False)

    def once(first: bool = False) -> None:
        with te.autocast(enabled=True, recipe=case.recipe):
            y = graphed(case.x, rotary_pos_emb=case.rope, is_first_microbatch=first)
        y.backward(case.dy)
        case.x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None

    once(True)
    found = sustained_ms(once)
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    FP8GlobalStateManager.reset()
    return found


def te_one_graph(case: Case) -> float:
    """Forward and backward as one graph: the kernels without a host."""
    import torch
    import transformer_engine.pytorch as te
    layer, side = case.layer(), torch.cuda.Stream()

    def once(first: bool) -> None:
        with te.autocast(enabled=True, recipe=case.recipe):
            y = layer(case.x, rotary_pos_emb=case.rope, is_first_microbatch=first)
        y.backward(case.dy)
        case.x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for first in (True, True, False):
            once(first)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with te.autocast(enabled=True, recipe=case.recipe):
            y = layer(case.x, rotary_pos_emb=case.rope, is_first_microbatch=False)
        y.backward(case.dy)
    return sustained_ms(graph.replay)


def te_eager(case: Case) -> float:
    """Transformer Engine without graphs, cached weights."""
    import transformer_engine.pytorch as te
    layer = case.layer()

    def once() -> None:
        with te.autocast(enabled=True, recipe=case.recipe):
            y = layer(case.x, rotary_pos_emb=case.rope, is_first_microbatch=False)
        y.backward(case.dy)
        case.x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None

    with te.autocast(enabled=True, recipe=case.recipe):
        layer(case.x, rotary_pos_emb=case.rope, is_first_microbatch=True)
    return sustained_ms(once)


class Under:
    """The layer as the only stage of a pipeline of MICROBATCHES, captured under contract."""

    def __init__(self, case: Case) -> None:
        from torch.utils._pytree import tree_flatten

        from . import te as qte
        from .schedule import Action
        from .torch.contract import Contract
        from .torch.stage import capture_stream, device_of
        from .torch.streams import streams_of
        layer = case.layer()
        self.case = case
        actions = [Action(0, kind, m) for m in range(MICROBATCHES) for kind in "FB"]
        names = [n for n, _ in layer.named_parameters()]
        self.contract = Contract(["layer"], [names], actions, streams_of(device_of(layer)))
        self.stage = qte.TEStage(layer, "layer", 0, 1, recipe=case.recipe, postpones=False, capture="graph")
        self.stage.main_grads()
        leaves, self.stage.spec = tree_flatten(((case.x,), {"rotary_pos_emb": case.rope}))
        self.leaves = leaves
        self.stage.prepare(leaves, [["F1", "B1", "F", "B"]], capture_stream(case.x.device))
        self.states = self.stage.states()
        self.fold = lambda: qte.fold(self.states, case.recipe)
        self.host_us = 0.0

    def step(self) -> None:
        contract, stage, slot = self.contract, self.stage, self.stage.slots[0]
        contract.begin()
        for microbatch in range(MICROBATCHES):
            contract.submit(0, "F", microbatch)
            self._seal()
            stage.forward(slot, self.leaves, microbatch, slot.generation + 1, life=contract.life(0, microbatch),
                          hand_out=False)
            contract.submit(0, "B", microbatch)
            self._seal()
            stage.backward(slot, [self.case.dy])
        contract.take()
        self.fold()
        contract.commit()
        contract.end()

    def _seal(self) -> None:
        if self.stage.moved() is not None:
            raise RuntimeError("a parameter moved while it was timed")

    def check_us(self, rounds: int = 200) -> float:
        """Host time of the checks of one replay: the ledger and the seal, without the replay."""
        contract, spent = self.contract, 0.0
        for _ in range(rounds):
            contract.begin()
            began = time.perf_counter()
            for microbatch in range(MICROBATCHES):
                for kind in "FB":
                    contract.submit(0, kind, microbatch)
                    self._seal()
            spent += time.perf_counter() - began
            contract.abort()
        return spent / rounds / (2 * MICROBATCHES) * 1e6


def run(shape: str) -> dict[str, Any]:
    case = Case(shape)
    found: dict[str, Any] = {"shape": shape}
    found["qeffect_ms"] = _attempt(lambda: _under(case, found))
    print(f"qeffect.bench: {found}", file=sys.stderr, flush=True)
    for name, work in (("te_graphs_ms", te_graphs), ("te_one_graph_ms", te_one_graph), ("te_eager_ms", te_eager)):
        found[name] = _attempt(lambda: round(work(case), 4))
        print(f"qeffect.bench: {name} {found[name]}", file=sys.stderr, flush=True)
    eager, ours = found["te_eager_ms"], found["qeffect_ms"]
    if isinstance(eager, float) and isinstance(ours, float):
        found["eager_over_qeffect"] = round(eager / ours, 3)
    return found


def _under(case: Case, found: dict[str, Any]) -> float:
    under = Under(case)
    ms = round(sustained_ms(under.step, 2 * MICROBATCHES // 2), 4)
    found["check_us_per_replay"] = round(under.check_us(), 3)
    found["capture_seconds"] = round(under.stage.capture_seconds, 3)
    return ms


def _attempt(work: Callable[[], float]) -> Any:
    try:
        return work()
    except Exception as error:  # a peer that fails is a result, too
        return f"{type(error).__name__}: {error}"[:300]


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m qeffect.bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    options = parser.parse_args(arguments)
    try:
        import torch
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        print(f"qeffect.bench: needs torch and Transformer Engine 2.20: {error}", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("qeffect.bench: needs a GPU", file=sys.stderr)
        return 1
    print(json.dumps(run(options.shape)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
