"""Linears of a model as Transformer Engine's."""
from __future__ import annotations

from typing import Any, Sequence

from ..errors import UnsupportedError
from ..torch._need import torch

_TILE = 16  # Transformer Engine's FP8 products want every dimension to be a multiple of it


def swap_linears(model: "torch.nn.Module", skip: Sequence[str] = ("output",)) -> list[str]:
    """Puts Transformer Engine's Linear in place of every plain nn.Linear without bias whose dimensions are multiples of
    16 and whose name (or a part of it between dots) is not in `skip`. On whatever device they are, meta included;
    values go along. Their gradients accumulate in `main_grad`, and W may be apart from I. Returns the names.

    Raises: UnsupportedError where Transformer Engine is missing.
    """
    from .tepart import Linear  # needs Transformer Engine
    found = [(name, m) for name, m in model.named_modules() if _fits(name, m, skip)]
    for name, linear in found:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Linear.like(linear))
    return [name for name, _ in found]


def _fits(name: str, module: Any, skip: Sequence[str]) -> bool:
    if type(module) is not torch.nn.Linear or module.bias is not None:
        return False
    if name in skip or any(part in skip for part in name.split(".")):
        return False
    return module.in_features % _TILE == 0 and module.out_features % _TILE == 0


def recipe_of(settings: Any) -> Any:
    """Transformer Engine's recipe that the section [qeffect] of a TorchTitan configuration names; None: none."""
    if settings.recipe == "none":
        return None
    try:
        from transformer_engine.common import recipe
    except ImportError as error:
        raise UnsupportedError(f"qeffect.recipe = {settings.recipe} needs Transformer Engine 2.20 ({error})",
                               remedy="install transformer-engine[pytorch], or set it to none",
                               status="unsupported") from error
    if settings.recipe == "current":
        return recipe.Float8CurrentScaling()
    if settings.recipe == "block":
        return recipe.Float8BlockScaling()
    return recipe.DelayedScaling(margin=settings.margin, amax_history_len=settings.amax_history_len,
                                 amax_compute_algo=settings.amax_compute_algo, reduce_amax=False)
