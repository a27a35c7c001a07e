"""Pipeline orders of torch.distributed.pipelining as schedules of ours, and back."""
from __future__ import annotations

import csv
from types import SimpleNamespace
from typing import Any, Iterable, Mapping, Optional, Sequence

from ..errors import ArgumentError, UnsupportedError
from ..schedule import Action, Schedule
from ..torch._need import torch

try:
    from torch.distributed.pipelining.schedules import (PipelineScheduleMulti, PipelineScheduleSingle, _Action,
                                                        get_schedule_class)
except ImportError as error:
    raise UnsupportedError(f"qeffect.torchtitan was made for torch.distributed.pipelining of torch 2.11; this is "
                           f"{torch.__version__} ({error})", status="unsupported") from error

# Schedules of one stage per rank keep their order in code, not in a list; ours are the same orders.
_SINGLE = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}


def from_torch(order: Mapping[int, Sequence[Optional[Any]]]) -> Schedule:
    """{rank: actions} of torch's, bubbles included, as a schedule. Communication and FSDP's actions follow from the
    order and are left out. Raises: ArgumentError, FormatError."""
    return Schedule.of([[str(a) for a in order[rank] if a is not None and a.is_compute_op] for rank in sorted(order)])


def order_of(schedule: Any) -> Schedule:
    """The order that a pipeline schedule of torch's would run, of all its ranks. Raises: ArgumentError."""
    if isinstance(schedule, PipelineScheduleMulti):
        order = schedule.pipeline_order or getattr(schedule, "pipeline_order_with_comms", None)
        if not order:
            raise ArgumentError("the schedule has no order yet; load a CSV into it first")
        return from_torch(order)
    if not isinstance(schedule, PipelineScheduleSingle):
        raise ArgumentError(f"{type(schedule).__name__} is no schedule of torch.distributed.pipelining")
    return _single(type(schedule), schedule._num_stages, schedule._n_microbatches)


def order_named(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    """The order of one of torch's schedules (Interleaved1F1B, ZBVZeroBubble, ...) on `ranks` ranks, without them.

    Raises: ArgumentError for an unknown name, or what torch says of numbers that do not fit.
    """
    try:
        kind = get_schedule_class(name)
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    if issubclass(kind, PipelineScheduleSingle):
        return _single(kind, ranks, microbatches)
    # What a schedule asks of stages to make its order; none of them ever runs.
    stages = [SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0, stage_index=i,
                              submod=torch.nn.Module()) for i in range(chunks)]
    made: Any = kind
    return from_torch(made(stages, n_microbatches=microbatches, loss_fn=lambda output, target: output).pipeline_order)


def _single(kind: type, ranks: int, microbatches: int) -> Schedule:
    if kind.__name__ not in _SINGLE:
        raise ArgumentError(f"{kind.__name__} has no order that is known here; expected one of {sorted(_SINGLE)}")
    return Schedule.generate(_SINGLE[kind.__name__], ranks=ranks, microbatches=microbatches)


def to_torch(schedule: Schedule) -> dict[int, list[Any]]:
    """{rank: actions} for `_prepare_schedule_with_comms`."""
    rows = csv.reader(schedule.csv().splitlines())
    return {rank: [_Action.from_str(cell) for cell in row if cell.strip()] for rank, row in enumerate(rows)}


def local_part(schedule: Schedule, stages: Sequence[int], rounds: int = 1) -> Schedule:
    """What one rank does, as a schedule of its own: its stages are 0, 1, ... in the order of `stages`, and with
    `rounds` its row comes that often, each time for further microbatches, as in gradient accumulation."""
    place = {stage: i for i, stage in enumerate(stages)}
    ranks = {schedule.stage_rank[stage] for stage in stages}
    if len(ranks) != 1:
        raise ArgumentError(f"stages {list(stages)} are of ranks {sorted(ranks)}; expected those of one rank")
    row = schedule.row(ranks.pop())
    if {action.stage for action in row} != set(stages):
        raise ArgumentError(f"this rank has the stages {sorted(stages)}; the order gives it "
                            f"{sorted({action.stage for action in row})}")
    return Schedule.of([list(_rounds(row, place, schedule.microbatches, rounds))])


def _rounds(row: Iterable[Action], place: Mapping[int, int], microbatches: int, rounds: int) -> Iterable[Action]:
    for turn in range(rounds):
        for action in row:
            yield Action(place[action.stage], action.kind, action.microbatch + turn * microbatches)
