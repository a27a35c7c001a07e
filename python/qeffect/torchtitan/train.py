"""TorchTitan's trainer with its pipeline under contract. Nothing in TorchTitan is edited: a trainer class for
`torchtitan.train.main`, a model converter, a section of the configuration, a state in its checkpoints."""
from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import Any, Callable, Sequence

from ..errors import ArgumentError, UnsupportedError
from ..torch._need import torch
from .convert import recipe_of, swap_linears
from .flat import contract_for, flat_order, flat_parallelism, pipeline_dims
from .runtime import Settings
from .state import ContractState

try:
    import torchtitan.train as _titan
    from torchtitan.protocols.model_converter import register_model_converter
except ImportError as error:
    raise UnsupportedError(f"qeffect.torchtitan's trainer needs TorchTitan 0.2.2 and what it needs ({error})",
                           remedy="pip install torchtitan==0.2.2", status="unsupported") from error

_CONFIG_FLAG = "--job.custom_config_module"
_CONFIG = "qeffect.torchtitan.config"
_CAPTURE = {"auto": None, "graph": "graph", "host": "host", "off": False}


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
        _refuse_others(self.job_config)
        return pipeline_dims(super().init_distributed())

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
            order, inner = None, job_config
            if parallel_dims.pp == 1:
                layers = model.model_args.n_layers
                order = flat_order(job_config.parallelism, job_config.training.local_batch_size,
                                   job_config.qeffect.ranks, layers)
                inner = copy.deepcopy(job_config)
                inner.parallelism = flat_parallelism(job_config.parallelism, order, layers)
            schedule, parts, first, last = original(model, parallel_dims, inner, *rest)
            return self._made(schedule, order), parts, first, last

        return pipelining

    def _made(self, schedule: Any, order: Any) -> Any:
        """What runs TorchTitan's stages."""
        return contract_for(schedule, order, self._settings())

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


def _refuse_others(job_config: Any) -> None:
    """Raises: ArgumentError for what captures and explicit actions exclude."""
    if job_config.compile.enable and "model" in job_config.compile.components:
        raise ArgumentError("torch.compile and explicit F, I and W exclude each other", remedy="--compile.no-enable")
    recompute = job_config.activation_checkpoint
    captured = job_config.qeffect.capture in ("graph", "auto")
    if recompute.mode != "none" and captured and recompute.preserve_rng_state:
        raise ArgumentError("a captured recompute cannot put the generator back",
                            remedy='set activation_checkpoint.mode = "none", or preserve_rng_state = false')


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
