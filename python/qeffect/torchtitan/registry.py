"""TorchTitan 0.3.0: a configuration of its trainer with the pipeline under contract. TorchTitan refuses its own CUDA
graphs together with pipelines; here its stages run uncaptured, or replayed into fixed memory on a CPU.

    def my_debugmodel():                                   # in my_module/config_registry.py
        return qeffect.torchtitan.registry.under_contract(llama3_debugmodel(), ranks=2)

    python -m torchtitan.train --module my_module --config my_debugmodel
"""
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Callable

from ..errors import ArgumentError, UnsupportedError
from .flat import contract_for, flat_order, flat_parallelism, pipeline_dims
from .runtime import Settings
from .state import ContractState

try:
    import torchtitan.trainer as _titan
except ImportError as error:
    raise UnsupportedError(f"qeffect.torchtitan.registry needs TorchTitan 0.3.0 and what it needs ({error})",
                           remedy="pip install torchtitan==0.3.0; for 0.2.2 see qeffect.torchtitan.Trainer",
                           status="unsupported") from error


class Trainer(_titan.Trainer):  # type: ignore[misc]
    """torchtitan.trainer.Trainer; its pipeline runs under contract, also on one device."""

    @dataclass(kw_only=True, slots=True)
    class Config(_titan.Trainer.Config):  # type: ignore[misc]
        """TorchTitan's, and: pipeline ranks that are flattened onto one device, and how stages run."""

        ranks: int = 1
        capture: str = "off"
        placement: str = "direct"

    def __init__(self, config: Any) -> None:
        spec = config.model_spec
        if spec.pipelining_fn is None:
            raise UnsupportedError("this model cannot be split into pipeline stages", status="unsupported")
        self._built: Callable[..., Any] = spec.post_optimizer_build_fn or (lambda *_: None)
        config.model_spec = replace(spec, pipelining_fn=self._pipelining(spec.pipelining_fn),
                                    post_optimizer_build_fn=self._guarded)
        super().__init__(config)
        if config.checkpoint.enable:
            self.checkpointer.states["qeffect"] = ContractState(self.pp_schedule)

    def init_distributed(self) -> Any:
        return pipeline_dims(super().init_distributed())

    def _pipelining(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def pipelining(model: Any, *, parallel_dims: Any, parallelism: Any, training: Any, model_config: Any,
                       **rest: Any) -> Any:
            order = None
            if parallel_dims.pp == 1:
                layers = len(model_config.layers)
                order = flat_order(parallelism, training.local_batch_size, self.config.ranks, layers)
                parallelism = flat_parallelism(parallelism, order, layers)
            rest["parallelize_fn"] = _alone
            schedule, parts, first, last = original(model, parallel_dims=parallel_dims, parallelism=parallelism,
                                                    training=training, model_config=model_config, **rest)
            return self._made(schedule, order), parts, first, last

        return pipelining

    def _made(self, schedule: Any, order: Any) -> Any:
        """What runs TorchTitan's stages."""
        capture = {"off": False, "host": "host"}.get(self.config.capture)
        if capture is None:
            raise ArgumentError(f"capture is {self.config.capture!r}; with TorchTitan 0.3.0 off or host")
        return contract_for(schedule, order, Settings(capture=capture, placement=self.config.placement,
                                                      rounds=self.gradient_accumulation_steps))

    def _guarded(self, optimizers: Any, parts: Any, parallel_dims: Any) -> None:
        self._built(optimizers, parts, parallel_dims)
        self.pp_schedule.guard(optimizers)


def _alone(model: Any, *, ac_config: Any, dump_folder: str, **_: Any) -> Any:
    """What is left of TorchTitan's parallelisms when the pipeline is the only one. TorchTitan shards by FSDP even over
    one rank, for its mixed precision: parameters would move at every use."""
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    return model


def under_contract(config: Any, *, ranks: int = 1, capture: str = "off", placement: str = "direct") -> Any:
    """A configuration of TorchTitan's trainer as one of the trainer above. Its own CUDA graphs are off, a loss in
    chunks is taken whole (it computes gradients of the head in its forward); torch.compile must be off."""
    inner = getattr(config.loss, "loss_fn", None)
    given = {f.name: getattr(config, f.name) for f in fields(config) if not f.name.startswith("_")}
    given.update(ranks=ranks, capture=capture, placement=placement,
                 training=replace(config.training, disable_cuda_graphs=True),
                 loss=config.loss if inner is None else inner)
    return Trainer.Config(**given)
