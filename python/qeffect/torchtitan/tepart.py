"""The stages of one rank with Transformer Engine's modules in them."""
from __future__ import annotations

from typing import Any, Callable, Iterator

from .. import te as _te  # says what it needs, where it is missing
from ..torch._need import torch
from .local import LocalPart

import transformer_engine.pytorch as te

_GEMMS = ((te.LayerNormMLP, 2), (te.LayerNormLinear, 1), (te.Linear, 1))


class TEPart(LocalPart, _te.Pipeline):
    """Stages of Transformer Engine's modules."""

    def __init__(self, modules: Any, schedule: Any, loss: Any, *, recipe: Any, **options: Any) -> None:
        for module in modules:
            make_states(module, recipe)
        super().__init__(modules, schedule, loss, recipe=recipe, **options)

    def keep_scales(self) -> Callable[[], None]:
        """An evaluation uses scales; no amax of it stays behind."""
        undo = [stage.keep_hidden() for stage in self._te_stages()]

        def put_back() -> None:
            for one in undo:
                one()

        return put_back


class Linear(te.Linear):  # type: ignore[misc]
    """As Transformer Engine's, whose extra state is a pickle: scales and histories are tensors of a ContractState."""

    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state

    @classmethod
    def like(cls, linear: "torch.nn.Linear") -> "Linear":
        """With the weight of a plain one, whatever device it is on."""
        made = cls(linear.in_features, linear.out_features, bias=False, params_dtype=linear.weight.dtype,
                   device="meta", fuse_wgrad_accumulation=True)
        made.weight = linear.weight
        return made


def make_states(module: Any, recipe: Any) -> None:
    """Makes the scales and histories that a module's first forward would make, so that a checkpoint can be read into
    them before it."""
    if recipe is None:
        return
    with te.autocast(enabled=True, recipe=recipe, _graph=True):  # nobody registers, nothing folds
        for m in module.modules():
            for kind, gemms in _GEMMS:
                if isinstance(m, kind):
                    m.init_fp8_metadata(num_gemms=gemms)
                    break


def named_states(module: Any, recipe: Any) -> Iterator[tuple[str, Any]]:
    """(full name.scaling_fwd|scaling_bwd, state) of delayed scaling, by the names of the module's parameters."""
    if recipe is None or not recipe.delayed():
        return
    for name, m in module.named_modules():
        meta = getattr(m, "fp8_meta", None)
        for direction in ("scaling_fwd", "scaling_bwd"):
            if isinstance(meta, dict) and direction in meta:
                yield f"{name}.{direction}", meta[direction]
