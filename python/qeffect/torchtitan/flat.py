"""What TorchTitan's versions have in common: a pipeline of one rank that is a flattened schedule."""
from __future__ import annotations

import copy
from dataclasses import fields
from math import ceil
from typing import Any, Callable

from ..errors import ArgumentError, UnsupportedError
from ..schedule import Schedule
from .orders import order_named, order_of
from .runtime import ContractSchedule, Settings, stages_of

try:
    import torchtitan.distributed.pipeline_parallel as _pipelines
    from torchtitan.distributed import ParallelDims
except ImportError as error:
    raise UnsupportedError("qeffect.torchtitan's trainers need TorchTitan 0.2.2, or TorchTitan 0.3.0 with torch 2.15, "
                           f"and what it needs ({error})", remedy="pip install torchtitan==0.2.2",
                           status="unsupported") from error

_OTHERS = ("dp_replicate", "dp_shard", "cp", "tp", "ep")


class PipelineDims(ParallelDims):  # type: ignore[misc]
    """TorchTitan's, with a pipeline of one rank: that of a flattened schedule."""

    @property
    def pp_enabled(self) -> bool:
        return True

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return name == "pp" or bool(super()._mesh_exist(name, degree))


def pipeline_dims(dims: Any) -> Any:
    """TorchTitan's dimensions with a pipeline. Raises: ArgumentError for what moves parameters behind its back."""
    others = [name for name in _OTHERS if getattr(dims, name) > 1]
    if others:
        raise ArgumentError(f"{', '.join(others)} with the pipeline: resharded parameters move at every use, which "
                            "graph.address forbids", remedy="leave the pipeline as the only parallelism")
    if dims.pp > 1:
        return dims
    return PipelineDims(**{f.name: getattr(dims, f.name) for f in fields(dims) if not f.name.startswith("_")})


def contract_for(schedule: Any, order: Any, settings: Settings) -> ContractSchedule:
    """TorchTitan's schedule under contract; `order`: the whole one that is flattened onto this rank, or None."""
    own = order_of(schedule) if order is None else order.flattened() if order.ranks > 1 else order
    return ContractSchedule(stages_of(schedule), own, schedule._loss_fn, settings, scale_grads=False)


def flat_order(parallelism: Any, batch: int, ranks: int, layers: int) -> Schedule:
    """The whole order that a flattened pipeline runs: a CSV's, or that of torch's schedule on so many ranks. `batch`:
    sequences of one step. Raises: ArgumentError, FormatError."""
    if parallelism.pipeline_parallel_schedule_csv:
        return Schedule.read_csv(str(parallelism.pipeline_parallel_schedule_csv))
    size = parallelism.pipeline_parallel_microbatch_size
    if batch % size:
        raise ArgumentError(f"a batch of {batch} is no multiple of the microbatch size {size}")
    name = parallelism.pipeline_parallel_schedule
    chunks = 1 if name.lower() in ("1f1b", "gpipe") else 2
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        stages = ceil((layers + _weight(parallelism)) / parallelism.pipeline_parallel_layers_per_stage)
        chunks, rest = divmod(stages, ranks)
        if rest or chunks < 1:
            raise ArgumentError(f"{stages} stages on {ranks} ranks", remedy="change pipeline_parallel_layers_per_stage")
    return order_named(name, ranks, chunks, batch // size)


def _weight(parallelism: Any) -> int:
    """Layers that embedding and head count for."""
    return int(parallelism.pipeline_parallel_first_stage_less_layers
               + parallelism.pipeline_parallel_last_stage_less_layers)


def flat_parallelism(parallelism: Any, order: Schedule, layers: int) -> Any:
    """Settings with which TorchTitan makes all stages of the order on this rank."""
    made = copy.deepcopy(parallelism)
    generate: Callable[..., Any] = getattr(_pipelines, "generate_llm_fqn_per_model_part", None) or getattr(
        _pipelines, "_generate_llm_fqn_per_model_part")  # since 0.3.0
    made.module_fqns_per_model_part = parallelism.module_fqns_per_model_part or generate(
        order.stages, layers, parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers)
    made.pipeline_parallel_schedule = "Interleaved1F1B"  # places stages in a row; the order is given apart
    made.pipeline_parallel_schedule_csv = type(parallelism.pipeline_parallel_schedule_csv)()
    made.pipeline_parallel_layers_per_stage = None
    return made
