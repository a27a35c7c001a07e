"""Runs TorchTitan 0.3.0's own trainer once on a CPU, under contract or by torch's own runtime, and writes what it left.

    python titan3_run.py contract|native LEFT.pt FOLDER SCHEDULE PIPELINE_DEGREE [off|host] [STEPS]
"""
from __future__ import annotations

import os
import sys
from typing import Any

import torch

from titan_cpu import be_a_rank

be_a_rank()

from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime  # noqa: E402

import torchtitan.models.llama3.config_registry as llama3  # noqa: E402
from qeffect.torchtitan import order_of, registry, to_torch  # noqa: E402
from qeffect.torchtitan.flat import stages_of  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402


class Native(registry.Trainer):
    """torch's own runtime drives the same stages in the same order."""

    @registry.dataclass(kw_only=True, slots=True)
    class Config(registry.Trainer.Config):
        pass

    def _made(self, schedule: Any, order: Any) -> Any:
        whole = order or order_of(schedule)
        made = _PipelineScheduleRuntime(stages_of(schedule), n_microbatches=whole.microbatches,
                                        loss_fn=schedule._loss_fn, scale_grads=False)
        made._prepare_schedule_with_comms(to_torch(whole if order is None else whole.flattened()))
        return made

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        getattr(self.checkpointer, "states", {}).pop("qeffect", None)

    def _guarded(self, optimizers: Any, parts: Any, parallel_dims: Any) -> None:
        self._built(optimizers, parts, parallel_dims)


def settings(folder: str, schedule: str, degree: int, capture: str, steps: int) -> Any:
    config = llama3.llama3_debugmodel()
    for layer in config.model_spec.model.layers:  # its others need a GPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path, config.dump_folder = f"{folder}/tokenizer", f"{folder}/out-{os.getpid()}"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 8, 64, steps
    config.dataloader.dataset_path = f"{folder}/corpus"
    config.parallelism.pipeline_parallel_degree = degree
    config.parallelism.pipeline_parallel_schedule = schedule
    config.activation_checkpoint, config.compile.enable = None, False
    config.debug.seed = 7
    return registry.under_contract(config, ranks=2, capture=capture)


def main(kind: str, left: str, folder: str, schedule: str, degree: str, capture: str = "off", steps: str = "3") -> None:
    init_logger()
    config = settings(folder, schedule, int(degree), capture, int(steps))
    trainer = {"contract": registry.Trainer, "native": Native}[kind](config)
    losses: list[Any] = []
    step = trainer.forward_backward_step
    trainer.forward_backward_step = lambda **words: losses.append(step(**words)) or losses[-1]
    trainer.train()
    named = {n: p for part in trainer.model_parts for n, p in part.named_parameters()}
    moments = {f"{n}.{k}": v for inner in trainer.optimizers.optimizers for n, p in named.items()
               for k, v in inner.state.get(p, {}).items()}
    torch.save({"losses": torch.stack([loss.detach().reshape(()) for loss in losses]), "moments": moments,
                "scales": {}, "parameters": {n: p.detach() for n, p in named.items()},
                "schedule": type(trainer.pp_schedule).__name__}, f"{left}.{os.environ['RANK']}")
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
