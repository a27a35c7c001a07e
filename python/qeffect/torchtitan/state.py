"""QEffect's state in a distributed checkpoint: plain tensors by full names of modules, whatever rank they are on."""
from __future__ import annotations

import hashlib
from typing import Any, Optional

from torch.distributed.checkpoint.stateful import Stateful

from ..errors import ArgumentError
from ..torch._need import torch
from .runtime import ContractSchedule

_COMMITS, _RECIPE = "commits", "recipe"
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of names, by those who wrap modules


class ContractState(Stateful):  # type: ignore[misc]
    """Scales, amax histories, visible steps, and which recipe they are of. Between steps. `load_state_dict` raises
    ArgumentError for another recipe; then nothing has changed."""

    def __init__(self, schedule: ContractSchedule) -> None:
        self._schedule = schedule

    def _states(self) -> dict[str, Any]:
        recipe = self._schedule.settings.recipe
        found: dict[str, Any] = {}
        if recipe is None:
            return found
        from .tepart import make_states, named_states
        for stage in self._schedule._stages:
            make_states(stage.submod, recipe)
            for name, state in named_states(stage.submod, recipe):
                for wrapper in _WRAPPERS:
                    name = name.replace(wrapper, "")
                found[f"{name}.scale"], found[f"{name}.amax_history"] = state.scale, state.amax_history
        return found

    def state_dict(self) -> dict[str, "torch.Tensor"]:
        """Copies, for a checkpoint may be written while the next step records."""
        self._schedule.require_closed()
        found = {name: tensor.detach().clone() for name, tensor in self._states().items()}
        found[_COMMITS] = self._schedule.commits.clone()
        found[_RECIPE] = _digest(self._schedule.settings.recipe)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._schedule.require_closed()
        own = self._states()
        if set(own) | {_COMMITS, _RECIPE} != set(state_dict):
            missing = sorted((set(own) | {_COMMITS, _RECIPE}) ^ set(state_dict))
            raise ArgumentError(f"the checkpoint's state differs in {missing[:4]}")
        if not torch.equal(state_dict[_RECIPE].cpu(), _digest(self._schedule.settings.recipe)):
            raise ArgumentError(f"the checkpoint's scales are of another recipe than {self._schedule.settings.recipe}",
                                remedy="resume with its recipe, or leave its scales out "
                                       "(--checkpoint.exclude_from_loading qeffect)")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state_dict[name])
            self._schedule.commits.copy_(state_dict[_COMMITS])


def _digest(recipe: Optional[Any]) -> "torch.Tensor":
    """int64 [2]: tells recipes apart without a pickle."""
    text = "" if recipe is None else f"{type(recipe).__name__} {recipe}"
    found = hashlib.sha256(text.encode()).digest()
    return torch.tensor([int.from_bytes(found[i:i + 8], "little", signed=True) for i in (0, 8)])
