"""What the tests of qeffect.te share: a small model, data whose amaxes rise and fall, and two ways to train it:
Transformer Engine's own (torch's pipelining, its fold moments, its queues) and under QEffect."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Optional, Sequence

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")
te = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed",
                         exc_type=(ImportError, OSError, RuntimeError))

from transformer_engine.common.recipe import (DelayedScaling, Float8BlockScaling, Float8CurrentScaling,  # noqa: E402
                                              Format)
from transformer_engine.pytorch.graph import set_capture_end  # noqa: E402
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule  # noqa: E402
from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # noqa: E402

from qeffect import Schedule  # noqa: E402
from torch_native import Native, flattened  # noqa: E402

HIDDEN, TOKENS, MICROBATCHES, STEPS = 256, 128, 4, 12
RECIPES = {"delayed": DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4), "current": Float8CurrentScaling(),
           "block": Float8BlockScaling()}
ORDERS = {"1f1b": (2, 1), "interleaved": (1, 2), "zbh1": (2, 1), "zbv": (1, 2)}  # name: ranks, chunks
AMPLITUDES = (1.0, 8.0, 0.25, 3.0)
GROWTH = {2: 2.0, 5: 0.25}  # step: factor of every weight, so that their amaxes rise and fall within the history
INF_STEP = 3


def schedule_of(order: str, microbatches: int = MICROBATCHES) -> Schedule:
    """Of two stages. "reversed": input gradients in the opposite order of the forwards."""
    if order == "reversed":
        ahead, back = range(microbatches), range(microbatches - 1, -1, -1)
        return Schedule.of([[f"{s}F{m}" for s in (0, 1) for m in ahead] + [f"{s}I{m}" for m in back for s in (1, 0)] +
                            [f"{s}W{m}" for m in ahead for s in (1, 0)]])
    ranks, chunks = ORDERS.get(order, (2, 1))
    return Schedule.generate(order, ranks=ranks, chunks=chunks, microbatches=microbatches)


class Block(torch.nn.Module):
    """LayerNormLinear, Linear, LayerNormMLP: everything but attention. `first`: as Transformer Engine wants it told."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        words = {"bias": False, "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True, **options}
        self.a = te.LayerNormLinear(HIDDEN, HIDDEN, **words)
        self.b = te.Linear(HIDDEN, HIDDEN, **words)
        self.c = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **words)

    def forward(self, x: Any, first: Optional[bool] = None) -> Any:
        y = self.b(self.a(x, is_first_microbatch=first), is_first_microbatch=first)
        return x + self.c(y, is_first_microbatch=first)


def modules(seed: int = 0, kind: Any = Block, count: int = 2) -> list[Any]:
    torch.manual_seed(seed)
    made = [kind().cuda() for _ in range(count)]
    for parameter in (p for m in made for p in m.parameters()):
        parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
    return made


def data(steps: int = STEPS, zero: bool = True, microbatches: int = MICROBATCHES) -> list[Any]:
    """Amaxes rise and fall from step to step; one microbatch is all zero."""
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(steps, 2, microbatches, TOKENS, HIDDEN, generator=generator)
    made *= torch.tensor([AMPLITUDES[i % 4] for i in range(steps)]).reshape(-1, 1, 1, 1, 1)
    if zero:
        made[steps // 2, 0, 1] = 0
    made = made.cuda().bfloat16()
    return [(list(step[0]), list(step[1])) for step in made]


def loss_of(output: Any, target: Any) -> Any:
    return torch.nn.functional.mse_loss(output.float(), target.float())


def adamw(made: Sequence[Any]) -> Any:
    return torch.optim.AdamW([p for m in made for p in m.parameters()], lr=1e-3, fused=True)


def scales(made: Sequence[Any]) -> dict[str, Any]:
    """Scale and history of everything that is quantized, by module and direction."""
    found = {}
    for i, stage in enumerate(made):
        for name, m in stage.named_modules():
            for direction in ("scaling_fwd", "scaling_bwd"):
                part = getattr(m, "fp8_meta", {}).get(direction) if isinstance(m, TransformerEngineBaseModule) else None
                if part is not None and hasattr(part, "amax_history"):
                    found[f"{i}.{name}.{direction}.scale"] = part.scale.detach().clone()
                    found[f"{i}.{name}.{direction}.amax_history"] = part.amax_history.detach().clone()
    return found


def state(made: Sequence[Any], optimizer: Any) -> list[Any]:
    """Every parameter, moment, step count, scale and history."""
    found = [p.detach().clone() for m in made for p in m.parameters()]
    found += [v.clone() for m in made for p in m.parameters() for _, v in sorted(optimizer.state[p].items())]
    found += [group["step"].clone() for group in optimizer.param_groups if torch.is_tensor(group.get("step"))]
    return found + [v for _, v in sorted(scales(made).items())]


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def disturb(made: Sequence[Any], step: int) -> None:
    """Between steps: weights grow and shrink."""
    with torch.no_grad():
        for p in (p for m in made for p in m.parameters() if p.dim() > 1 and step in GROWTH):
            p.mul_(GROWTH[step])


def put_inf(made: Sequence[Any], step: int) -> None:
    """At the beginning of one step: the amax of the first input is Inf."""
    if step == INF_STEP and "scaling_fwd" in made[0].a.fp8_meta and hasattr(made[0].a.fp8_meta["scaling_fwd"],
                                                                           "amax_history"):
        made[0].a.fp8_meta["scaling_fwd"].amax_history[0, 0] = float("inf")


class NativeStage(torch.nn.Module):
    """A stage as torch's pipelining drives it: an autocast of its own, and the flag for the weight cache."""

    def __init__(self, block: Any, recipe: Any, cached: bool) -> None:
        super().__init__()
        self.block, self.recipe, self.cached, self.first = block, recipe, cached, True

    def forward(self, x: Any) -> Any:
        first, self.first = self.first if self.cached else None, False
        with te.autocast(enabled=True, recipe=self.recipe):
            return self.block(x, first)

    def dw_builder(self) -> Any:
        linears = [m for m in self.block.modules() if isinstance(m, TransformerEngineBaseModule)]
        return lambda: [m.backward_dw() for m in reversed(linears)]


def _adds_to_main_grad(parameter: Any) -> None:
    """What no product accumulates, such as a norm's gain, goes into main_grad as Megatron has it; stand-ins go."""
    if not getattr(parameter, "grad_added_to_main_grad", False):
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def native(order: str, recipe: str, cached: bool, path: Path, steps: int = STEPS) -> tuple[list[Any], list[Any], Any]:
    """(losses, state, scales after each step) of Transformer Engine driven by torch's pipelining."""
    schedule = schedule_of(order)
    split = "W" in flattened(schedule).csv()
    made = modules(kind=lambda: Block(delay_wgrad_compute=split))
    for parameter in (p for m in made for p in m.parameters()):
        if parameter.dim() > 1:
            parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(_adds_to_main_grad)
    stages = [NativeStage(m, RECIPES[recipe], cached) for m in made]
    optimizer = adamw(made)
    batches = data(steps)
    builders = [s.dw_builder for s in stages] if split else None
    runtime = Native(stages, schedule, loss_of, batches[0][0][0], path, builders)
    losses, seen = [], []
    for step, batch in enumerate(batches):
        for p in (p for m in made for p in m.parameters()):
            p.main_grad.zero_()
        for stage in stages:
            stage.first = True
        put_inf(made, step)
        losses.append(runtime.step(*batch))
        for p in (p for m in made for p in m.parameters()):
            p.grad = p.main_grad.to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()
        disturb(made, step)
        seen.append(scales(made))
    return losses, state(made, optimizer), seen


class Under:
    """The same training under QEffect, step by step."""

    def __init__(self, order: str, recipe: str, capture: Any, *, folds: str = "te", cached: bool = True,
                 placement: str = "direct", made: Any = None, optimizer: Any = None) -> None:
        import qeffect.te as qte
        self.made = modules() if made is None else made
        self.optimizer = adamw(self.made) if optimizer is None else optimizer
        example = torch.randn(2, TOKENS, HIDDEN, device="cuda").bfloat16() * 50  # of no step: it must leave no amax
        self.pipeline = qte.Pipeline(self.made, schedule_of(order), loss_of, recipe=RECIPES[recipe], folds=folds,
                                     cache_weights=cached, placement=placement, example=(example[0], example[1]),
                                     optimizer=self.optimizer, capture=capture, quiet=True)

    def step(self, step: int, batch: Any) -> Any:
        pipeline = self.pipeline
        pipeline.begin()
        put_inf(self.made, step)
        for action in pipeline.actions:
            pipeline.run(action, batch[0][action.microbatch], batch[1][action.microbatch])
        losses = pipeline.finish()
        disturb(self.made, step)
        return losses

    def state(self) -> list[Any]:
        return state(self.made, self.optimizer)

    def tensors(self) -> dict[str, Any]:
        """All that a checkpoint holds, as named tensors."""
        found = {f"fp8.{n}": v for n, v in self.pipeline.fp8_state().items()}
        for i, p in enumerate(p for m in self.made for p in m.parameters()):
            found[f"parameter.{i}"] = p.detach().clone()
            found.update({f"moment.{i}.{n}": v.clone() for n, v in self.optimizer.state[p].items()})
        return found

    def load(self, tensors: dict[str, Any]) -> None:
        self.pipeline.load_fp8_state({n[4:]: v for n, v in tensors.items() if n.startswith("fp8.")})
        moments = self.optimizer.state_dict()
        with torch.no_grad():
            for i, p in enumerate(p for m in self.made for p in m.parameters()):
                p.copy_(tensors[f"parameter.{i}"])
                moments["state"][i] = {n.split(".")[2]: v for n, v in tensors.items() if n.startswith(f"moment.{i}.")}
        self.optimizer.load_state_dict(moments)


def resume(order: str, capture: str, before: str, after: str, begin: int) -> None:
    """In a process of its own: goes on from the tensors in file `before` and leaves its own in `after`."""
    from safetensors.torch import load_file, save_file
    run = Under(order, "delayed", capture == "True", made=modules(seed=11))
    run.load(load_file(before, device="cuda"))
    for step, batch in list(enumerate(data()))[begin:]:
        run.step(step, batch)
    save_file(run.tensors(), after)


def clean_globals() -> None:
    """As in a new process: also what a capture that failed leaves at classes."""
    FP8GlobalStateManager.reset()
    set_capture_end()
    for kind in (te.Linear, te.LayerNormLinear, te.LayerNormMLP):
        if "__call__" in vars(kind):
            del kind.__call__


if __name__ == "__main__":
    resume(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
