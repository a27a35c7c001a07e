"""TorchTitan's trainer with its pipeline under contract. Nothing in TorchTitan is edited: a trainer class for
`torchtitan.train.main`, a model converter, a section of the configuration, a state in its checkpoints."""
from __future__ import annotations

import copy
import sys
from dataclasses import fields, replace
from math import ceil
from typing import Any, Callable, Sequence

from ..errors import ArgumentError, UnsupportedError
from ..schedule import Schedule
from ..torch._need import torch
from .convert import recipe_of, swap_linears
from .orders import order_named, order_of
from .runtime import ContractSchedule, Settings
from .state import ContractState

try:
    import torchtitan.train as _titan
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
    from torchtitan.protocols.model_converter import register_model_converter
except ImportError as error:
    raise UnsupportedError(f"qeffect.torchtitan's trainer needs TorchTitan 0.2.2 and what it needs ({error})",
                           remedy="pip install torchtitan==0.2.2", status="unsupported") from error

_CONFIG_FLAG = "--job.custom_config_module"
_CONFIG = "qeffect.torchtitan.config"
_CAPTURE = {"auto": None, "graph": "graph", "host": "host", "off": False}


class PipelineDims(ParallelDims):  # type: ignore[misc]
    """TorchTitan's, with a pipeline of one rank: that of a flattened schedule."""

    @property
    def pp_enabled(self) -> bool:
        return True

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return name == "pp" or bool(super()._mesh_exist(name, degree))


class Trainer(_titan.Trainer):  # type: ignore[misc]
    """torchtitan.train.Trainer; its pipeline runs under contract, also on one GPU."""

    def __init__(self, job_config: Any) -> None:
        if not hasattr(job_config, "qeffect"):
            raise ArgumentError("the configuration has no section qeffect",
                                remedy=f"add {_CONFIG_FLAG}={_CONFIG} to the command line")
        self._spec: Any = None
        super().__init__(job_config)
        self.checkpointer.states["qeffect"] = ContractState(self.pp_schedule)

    def init_distributed(self) -> Any:
        dims = super().init_distributed()
        _refuse_others(dims, self.job_config)
        given = {f.name: getattr(dims, f.name) for f in fields(dims) if not f.name.startswith("_")}
        return dims if dims.pp > 1 else PipelineDims(**given)

    @property
    def train_spec(self) -> Any:
        return self._spec

    @train_spec.setter
    def train_spec(self, spec: Any) -> None:
        """Where TorchTitan takes its parts from; the pipeline and the optimizers are given back under contract."""
        if spec.pipelining_fn is None:
            raise UnsupportedError("this model cannot be split into pipeline stages", status="unsupported")
        self._spec = replace(spec, pipelining_fn=self._pipelining(spec.pipelining_fn),
                             build_optimizers_fn=self._guarded(spec.build_optimizers_fn))

    def _pipelining(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def pipelining(model: Any, parallel_dims: Any, job_config: Any, *rest: Any) -> Any:
            flat = parallel_dims.pp == 1
            order = _order_of(job_config, model) if flat else None
            inner = _flat_config(job_config, model, order) if order is not None else job_config
            schedule, parts, first, last = original(model, parallel_dims, inner, *rest)
            stages = list(getattr(schedule, "_stages", [])) or [schedule._stage]
            whole = order or order_of(schedule)
            local = whole.flattened() if flat and whole.ranks > 1 else whole
            made = ContractSchedule(stages, local, schedule._loss_fn, self._settings(), scale_grads=False)
            return made, parts, first, last

        return pipelining

    def _settings(self) -> Settings:
        own = self.job_config.qeffect
        return Settings(recipe=recipe_of(own), folds=own.folds, cache_weights=own.cache_weights,
                        capture=_CAPTURE[own.capture], placement=own.placement,
                        rounds=self.gradient_accumulation_steps)

    def _guarded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def build(*arguments: Any, **keywords: Any) -> Any:
            optimizers = original(*arguments, **keywords)
            self.pp_schedule.guard(optimizers)
            return optimizers

        return build


def _refuse_others(dims: Any, job_config: Any) -> None:
    """Raises: ArgumentError for what moves parameters or gradients behind a contract's back."""
    others = [name for name in ("dp_replicate", "dp_shard", "cp", "tp", "ep") if getattr(dims, name) > 1]
    if others:
        raise ArgumentError(f"{', '.join(others)} with the pipeline: resharded parameters move at every use, which "
                            "graph.address forbids", remedy="leave the pipeline as the only parallelism")
    if job_config.compile.enable and "model" in job_config.compile.components:
        raise ArgumentError("torch.compile and explicit F, I and W exclude each other", remedy="--compile.no-enable")
    recompute = job_config.activation_checkpoint
    captured = job_config.qeffect.capture in ("graph", "auto")
    if recompute.mode != "none" and captured and recompute.preserve_rng_state:
        raise ArgumentError("a captured recompute cannot put the generator back",
                            remedy='set activation_checkpoint.mode = "none", or preserve_rng_state = false')


def _order_of(job_config: Any, model: Any) -> Schedule:
    """The whole order that a flattened pipeline runs, of as many ranks as [qeffect] says or a CSV has."""
    parallelism = job_config.parallelism
    if parallelism.pipeline_parallel_schedule_csv:
        return Schedule.read_csv(str(parallelism.pipeline_parallel_schedule_csv))
    ranks = job_config.qeffect.ranks
    count, rest = divmod(job_config.training.local_batch_size, parallelism.pipeline_parallel_microbatch_size)
    if rest:
        raise ArgumentError(f"a batch of {job_config.training.local_batch_size} is no multiple of the microbatch size "
                            f"{parallelism.pipeline_parallel_microbatch_size}")
    name = parallelism.pipeline_parallel_schedule
    chunks = 1 if name.lower() in ("1f1b", "gpipe") else 2
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        layers = (model.model_args.n_layers + parallelism.pipeline_parallel_first_stage_less_layers
                  + parallelism.pipeline_parallel_last_stage_less_layers)
        stages = ceil(layers / parallelism.pipeline_parallel_layers_per_stage)
        chunks, rest = divmod(stages, ranks)
        if rest or chunks < 1:
            raise ArgumentError(f"{stages} stages on {ranks} ranks", remedy="change pipeline_parallel_layers_per_stage")
    return order_named(name, ranks, chunks, count)


def _flat_config(job_config: Any, model: Any, order: Schedule) -> Any:
    """A configuration with which TorchTitan makes all stages of the order on this rank."""
    made = copy.deepcopy(job_config)
    parallelism = made.parallelism
    names = parallelism.module_fqns_per_model_part or generate_llm_fqn_per_model_part(
        order.stages, model.model_args.n_layers, parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers)
    parallelism.module_fqns_per_model_part = names
    parallelism.pipeline_parallel_schedule = "Interleaved1F1B"  # places stages in a row; the order is given apart
    parallelism.pipeline_parallel_schedule_csv = ""
    parallelism.pipeline_parallel_layers_per_stage = None
    return made


class TEConverter:
    """model.converters = ["qeffect"]: linears as Transformer Engine's."""

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        self._skip: Sequence[str] = job_config.qeffect.skip_linears
        if job_config.activation_checkpoint.mode != "none" and job_config.qeffect.recipe == "delayed":
            raise UnsupportedError("delayed scaling and TorchTitan's recompute: its second forward would record again",
                                   remedy='set activation_checkpoint.mode = "none"', status="unsupported")

    def convert(self, model: "torch.nn.Module") -> None:
        names = swap_linears(model, self._skip)
        if not names:
            raise ArgumentError("no linear of this model can be Transformer Engine's")
        print(f"qeffect: {len(names)} linears are Transformer Engine's", file=sys.stderr)

    def post_optimizer_hook(self, model: Any) -> None:
        """Weights' versions and their quantized copies go by the step, not by a hook: a vetoed step would call it."""


register_model_converter(TEConverter, "qeffect")


def main() -> None:
    """TorchTitan's own main with the trainer above. Arguments are TorchTitan's, and those of the section [qeffect]."""
    _titan.main(Trainer)
