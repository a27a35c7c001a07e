"""What the figures share: shapes, layers, time of sustained work, memory."""
from __future__ import annotations

import gc
import sys
import time
from typing import Any, Callable, Sequence

SHAPES = {"h1024T1k": (1024, 4096, 16, 16, 1024), "h2048T2k": (2048, 8192, 16, 16, 2048),
          "h4096T2k": (4096, 14336, 32, 8, 2048), "h4096T8k": (4096, 14336, 32, 8, 8192),
          "h2048T1k": (2048, 8192, 16, 16, 1024)}  # hidden, ffn, heads, key/value heads, tokens
AT_MOST_MS = {"h1024T1k": 0.45, "h2048T2k": 1.37, "h4096T2k": 3.36, "h4096T8k": 14.7}  # shapes of the figure "layer"
PEERS = ("te_one_graph", "te_graphs", "te_eager")
TURNS = 7
HISTORY = 16
MIB = 1 << 20


class Case:
    """One shape: layers, inputs, gradients, recipe."""

    def __init__(self, shape: str) -> None:
        import torch
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling, Format
        self.hidden, self.ffn, self.heads, self.groups, self.tokens = SHAPES[shape]
        self.recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=HISTORY)
        self.x = self.random().requires_grad_(True)
        self.dy = torch.randn_like(self.x)
        self.kept: list[Any] = []  # what graphs use
        self.rope = te.RotaryPositionEmbedding(self.hidden // self.heads)(self.tokens).cuda()

    def random(self) -> Any:
        """[1, tokens, hidden], bf16."""
        import torch
        return torch.randn(1, self.tokens, self.hidden, device="cuda", dtype=torch.bfloat16)

    def layer(self, postpones: bool = False, **options: Any) -> Any:
        """`postpones`: its modules leave their weight gradients to `backward_dw`."""
        import torch
        import transformer_engine.pytorch as te
        words = {"fuse_wgrad_accumulation": True, **options}
        made = te.TransformerLayer(
            self.hidden, self.ffn, self.heads, num_gqa_groups=self.groups, hidden_dropout=0, attention_dropout=0,
            fuse_qkv_params=True, normalization="RMSNorm", activation="swiglu", bias=False,
            params_dtype=torch.bfloat16, attn_input_format="bshd", self_attn_mask_type="causal",
            seq_length=self.tokens, micro_batch_size=1, **words).cuda()
        for parameter in made.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
            if words["fuse_wgrad_accumulation"]:
                parameter.grad_added_to_main_grad = False
        if postpones:
            from transformer_engine.pytorch.module._common import WeightGradStore
            for module in made.modules():
                if getattr(module, "fuse_wgrad_accumulation", False):
                    module.wgrad_store = WeightGradStore(True)
        return made


class Meter:
    """Times work back to back. `calls`: how many each `work` makes. A burst lasts `seconds`, at least one work."""

    def __init__(self, work: Callable[[], None], calls: int = 1, seconds: float = 1.0) -> None:
        import torch
        self._work, self._calls = work, calls
        self._begin, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        work()
        torch.cuda.synchronize()
        self._count = max(1, round(seconds * 1e3 / self._burst(2)))

    def _burst(self, count: int) -> float:
        self._begin.record()
        for _ in range(count):
            self._work()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / count

    def ms(self) -> float:
        """ms of one call, behind half as much of the same work."""
        self._burst((self._count + 1) // 2)
        return self._burst(self._count) / self._calls


def sustained_ms(work: Callable[[], None], calls: int = 1, seconds: float = 1.0) -> float:
    return Meter(work, calls, seconds).ms()


def memory_mib() -> dict[str, float]:
    """MiB after everything that can go has gone. pools: segments of graphs' own pools; allocated: tensors that live
    outside them; reserved: all that torch's allocator holds, whose segments outside of pools are of 2 or 20 MiB and
    seldom full; device: what the device has given, graphs themselves included."""
    import torch
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    own = [s for s in segments if tuple(s["segment_pool_id"]) != (0, 0)]
    free, total = torch.cuda.mem_get_info()
    bytes_of = {"pools": sum(s["total_size"] for s in own),
                "allocated": torch.cuda.memory_allocated() - sum(s["allocated_size"] for s in own),
                "reserved": torch.cuda.memory_reserved(), "device": total - free}
    return {f"{name}_mib": count / MIB for name, count in bytes_of.items()}


def reset_te() -> None:
    """Transformer Engine's globals as in a new process: what graphs leave there would decide about others'."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    FP8GlobalStateManager.reset()


def te_order(actions: Sequence[Any]) -> list[float]:
    """Transformer Engine's `_order` of a flattened schedule: integers, but for weight gradients."""
    chunk = [a.stage + 1 for a in actions]
    return [c if a.kind == "F" else -c - 0.5 if a.kind == "W" else -c for a, c in zip(actions, chunk)]


def attempt(work: Callable[[], Any]) -> Any:
    """A peer that fails is a result, too: the text of its error."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def tell(what: str) -> None:
    print(f"qeffect.bench: {time.process_time():.1f} s: {what}", file=sys.stderr, flush=True)
