"""Runs TorchTitan's own training program once, under contract or natively, and writes what it left behind.

    python titan_run.py contract|native LEFT.pt [TorchTitan's arguments]

`native`: torch's own pipeline runtime with the same stages, modules and order, weight gradients by `dw_builder`.
LEFT.pt: losses, parameters, moments, scales and histories by full name, and some figures.
"""
from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

from titan_cpu import GPU, be_a_rank

KIND, LEFT = sys.argv[1:3]
sys.argv[1:3] = ["--job.custom_config_module=qeffect.torchtitan.config"]  # TorchTitan reads arguments when imported
be_a_rank()

from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime  # noqa: E402

import torchtitan.train as titan  # noqa: E402
from qeffect.torchtitan import ContractSchedule, order_of, to_torch  # noqa: E402
from qeffect.torchtitan.runtime import _neighbours  # noqa: E402
from qeffect.torchtitan.flat import stages_of  # noqa: E402
from qeffect.torchtitan.train import Trainer  # noqa: E402
from torchtitan.models.llama3 import llama3_args  # noqa: E402
from torchtitan.models.llama3.model.args import TransformerModelArgs  # noqa: E402

llama3_args["wide"] = TransformerModelArgs(dim=1024, n_layers=8, n_heads=16, vocab_size=2048, rope_theta=500000)


class Watched(Trainer):
    """Keeps losses and times of steps."""

    def __init__(self, job_config: Any) -> None:
        self.losses: list[Any] = []
        self.seconds: list[float] = []
        super().__init__(job_config)

    def forward_backward_step(self, **words: Any) -> Any:
        loss = super().forward_backward_step(**words)
        self.losses.append(loss.detach().cpu())
        return loss

    def train_step(self, data_iterator: Any) -> None:
        began = time.perf_counter()
        super().train_step(data_iterator)
        if GPU:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - began)

    def train(self) -> None:
        super().train()
        torch.save(left_behind(self), f"{LEFT}.{os.environ['RANK']}")


class Native(Watched):
    """torch's own runtime drives the same stages in the same order. With Transformer Engine every gradient accumulates
    in `main_grad`: its own by its products, postponed by `dw_builder`; all others by autograd's hooks."""

    def __init__(self, job_config: Any) -> None:
        self.first: Any = None  # whether Transformer Engine's modules fill their weight caches; None: they have none
        self.begun: set[int] = set()
        super().__init__(job_config)
        del self.checkpointer.states["qeffect"]

    def _made(self, schedule: Any, order: Any) -> Any:
        stages, whole = stages_of(schedule), order or order_of(schedule)
        made = _PipelineScheduleRuntime(stages, n_microbatches=whole.microbatches, loss_fn=schedule._loss_fn,
                                        scale_grads=False)
        made._prepare_schedule_with_comms(to_torch(whole if order is None else whole.flattened()))
        for stage in stages:
            self._natively(stage)
        return made

    def _natively(self, stage: Any) -> None:
        stage._get_init_p2p_neighbors_ops = lambda: _neighbours(stage)
        recipe = self._settings().recipe
        if recipe is None:
            return
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch.module._common import WeightGradStore
        modules = [m for m in stage.submod.modules() if isinstance(m, te.Linear)]
        for m in modules:
            m.wgrad_store = WeightGradStore(True)
            m.forward = lambda *given, own=m.forward: own(*given, is_first_microbatch=self.first)
        stage.dw_builder = lambda: lambda: [m.backward_dw() for m in reversed(modules)]
        plain = stage.submod.forward

        def forward(*arguments: Any) -> Any:
            if not torch.is_grad_enabled():  # torch's inference of shapes: its amaxes would stay in the running row
                return plain(*arguments)
            if self.job_config.qeffect.cache_weights:
                self.first = stage.stage_index not in self.begun
                self.begun.add(stage.stage_index)
            with te.autocast(enabled=True, recipe=recipe):
                return plain(*arguments)

        stage.submod.forward = forward

    def _guarded(self, original: Any) -> Any:
        if self.job_config.qeffect.recipe == "none":  # torch's split backward adds up in `.grad`
            return original

        def build(parts: Any, *rest: Any) -> Any:
            for parameter in (p for part in parts for p in part.parameters()):
                parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
                parameter.register_post_accumulate_grad_hook(_into_main_grad)
            return original(parts, *rest)

        return build

    def forward_backward_step(self, **words: Any) -> Any:
        if self._settings().recipe is None:
            return super().forward_backward_step(**words)
        parameters = [p for part in self.model_parts for p in part.parameters()]
        self.begun.clear()
        torch._foreach_zero_([p.main_grad for p in parameters])
        loss = super().forward_backward_step(**words)
        for parameter in parameters:
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        return loss


def _into_main_grad(parameter: Any) -> None:
    if parameter.grad is not None:  # None: the module puts it there itself; autograd calls this all the same
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def left_behind(trainer: Any) -> dict[str, Any]:
    named = {n: p for part in trainer.model_parts for n, p in part.named_parameters()}
    moments = {f"{n}.{k}": v.detach().cpu() for inner in trainer.optimizers.optimizers for n, p in named.items()
               for k, v in inner.state.get(p, {}).items()}
    found = {"losses": torch.stack([loss.reshape(()) for loss in trainer.losses]) if trainer.losses else None,
             "parameters": {n: p.detach().cpu() for n, p in named.items()}, "moments": moments,
             "scales": scales(trainer), "seconds": trainer.seconds, "schedule": type(trainer.pp_schedule).__name__}
    if isinstance(trainer.pp_schedule, ContractSchedule) and trainer.pp_schedule.part is not None:
        part = trainer.pp_schedule.part
        found.update(commits=int(trainer.pp_schedule.commits), capture_seconds=part.capture_seconds,
                     slots=[len(stage.slots) for stage in part.stages], kinds=[stage.capture for stage in part.stages],
                     actions=[str(action) for action in part.actions])
    if GPU:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    return found


def scales(trainer: Any) -> dict[str, Any]:
    recipe = trainer._settings().recipe
    if recipe is None:
        return {}
    from qeffect.torchtitan.tepart import named_states
    return {f"{name}.{part}": getattr(state, part).detach().cpu() for model in trainer.model_parts
            for name, state in named_states(model, recipe) for part in ("scale", "amax_history")}


if __name__ == "__main__":
    titan.main({"contract": Watched, "native": Native}[KIND])
