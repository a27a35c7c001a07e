"""TorchTitan's settings, and a section of ours: `--job.custom_config_module qeffect.torchtitan.config`.

TorchTitan reads these classes as they are, so annotations must not be text.
"""
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class QEffect:
    """What runs under contract, and how."""

    ranks: int = 1
    """With pipeline_parallel_degree = 1: pipeline ranks whose schedule is flattened onto this GPU; a CSV says it by its
    rows"""

    recipe: Literal["none", "delayed", "current", "block"] = "none"
    """How Transformer Engine's modules quantize; they come from model.converters = ["qeffect"]"""

    amax_history_len: int = 16
    """Delayed scaling: steps that a scale looks back"""

    margin: int = 0
    """Delayed scaling: binary digits of room above the largest amax"""

    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Delayed scaling: which amax of the history counts"""

    folds: Literal["step", "te"] = "step"
    """When scales fold: once per step, or behind each forward and backward as in Transformer Engine's own loop"""

    cache_weights: bool = True
    """Quantize a weight once per step, not once per microbatch"""

    capture: Literal["auto", "graph", "host", "off"] = "auto"
    """auto: CUDA graphs on a GPU, eager elsewhere; host: replay into fixed memory on a CPU"""

    placement: Literal["direct", "copy"] = "direct"
    """Where gradients accumulate: where they live, or in scratch that is moved there and back"""

    skip_linears: list[str] = field(default_factory=lambda: ["output"])
    """Names (whole or parts between dots) of linears that stay PyTorch's"""


@dataclass
class JobConfig:
    """Merged into TorchTitan's."""

    qeffect: QEffect = field(default_factory=QEffect)
