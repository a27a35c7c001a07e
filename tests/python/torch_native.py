"""torch's own pipelining as the peer: a schedule of any number of ranks, flattened onto one device, run by its action
interpreter."""
from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")


def flattened(schedule: Any) -> Any:
    return schedule if schedule.ranks == 1 else schedule.flattened()


class Native:
    """`modules`: one per stage. `loss(output, target)` of one microbatch is divided by their number, as a mean.
    `dw_builders`: one per stage, or None: torch splits backwards itself."""

    def __init__(self, modules: Sequence[Any], schedule: Any, loss: Callable[..., Any], example: Any, path: Any,
                 dw_builders: Optional[Sequence[Any]] = None) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
        _world_of_one()
        flat = flattened(schedule)
        self.microbatches, self.modules = schedule.microbatches, list(modules)
        device, x = example.device, example
        stages = []
        for i, module in enumerate(modules):
            stages.append(PipelineStage(module, i, len(modules), device, input_args=x, output_args=torch.empty_like(x),
                                        dw_builder=None if dw_builders is None else dw_builders[i]))
        self.runtime = _PipelineScheduleRuntime(
            stages, n_microbatches=self.microbatches, scale_grads=False,
            loss_fn=lambda output, target: loss(output, target) / self.microbatches)
        path.write_text(flat.csv())
        self.runtime._load_csv(str(path))

    def step(self, inputs: Sequence[Any], targets: Sequence[Any]) -> Any:
        """Forwards and backwards of one step; the losses, one per microbatch."""
        losses: list[Any] = []
        self.runtime.step(torch.cat(list(inputs)), target=torch.cat(list(targets)), losses=losses)
        return torch.stack([loss.detach() for loss in losses]) * self.microbatches


def _world_of_one() -> None:
    import torch.distributed as dist
    if dist.is_initialized():
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
