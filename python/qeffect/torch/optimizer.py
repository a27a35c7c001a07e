"""Step atomicity: an optimizer commits only where no gradient is Inf or NaN, decided on the device, without a host
round trip. Parameters, moments and step counts are otherwise as they were."""
from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import UnsupportedError
from ._need import torch

if TYPE_CHECKING:
    from .stage import Stage


class StepGuard:
    """Guards torch's fused Adam and AdamW (through `found_inf`) and Transformer Engine's capturable FusedAdam (through
    its overflow flag).

    `commits`: int64 [1] on the device, the number of steps that became visible; weights are of this version.
    Raises: UnsupportedError for another optimizer, with the reason.
    """

    def __init__(self, optimizer: "torch.optim.Optimizer", device: Optional["torch.device"] = None) -> None:
        vetoed_step(optimizer)
        self.optimizer: Any = optimizer
        self.device = device or next(p.device for group in optimizer.param_groups for p in group["params"])
        self.vetoed = torch.zeros((), dtype=torch.float32, device=self.device)
        self.commits = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._one = torch.ones(1, dtype=torch.float32, device=self.device)

    def veto(self) -> None:
        """The next step does not commit: a guard of the caller's fired on the device."""
        self.vetoed.fill_(1.0)

    def step(self, gradients: Sequence["torch.Tensor"]) -> "torch.Tensor":
        """Steps the optimizer on its parameters' `.grad` unless one of `gradients` is not finite. Returns a copy of the
        veto, float32 []: 1 where nothing changed. No synchronisation with the host."""
        step = vetoed_step(self.optimizer)  # asked anew: load_state_dict and add_param_group change what it is
        found = self.vetoed.reshape(1).clone()
        dense = [gradient for gradient in gradients if gradient is not None]
        if dense:
            torch._amp_foreach_non_finite_check_and_unscale_(dense, found, self._one)
        step(self.optimizer, found)
        self.commits.add_((1 - found).to(torch.int64))
        self.vetoed.zero_()
        return found.reshape(())


def _step_of_torch(optimizer: Any, found: "torch.Tensor") -> None:
    optimizer.grad_scale = None
    optimizer.found_inf = found.reshape(())
    try:
        optimizer.step()
    finally:
        optimizer.found_inf = None


class _Overflow:
    """A gradient scaler as Transformer Engine's optimizer asks one: the scale is 1; what is Inf was found before."""

    def __init__(self, found: "torch.Tensor") -> None:
        self._found = found

    def _check_inf_per_device(self, optimizer: Any) -> dict["torch.device", "torch.Tensor"]:
        return {p.device: self._found for group in optimizer.param_groups for p in group["params"]}

    def _get_scale_async(self) -> "torch.Tensor":
        return torch.ones_like(self._found)


def _step_of_te(optimizer: Any, found: "torch.Tensor") -> None:
    """Its kernels do nothing where the flag is set. Its step count goes by the flag of the step before, one step too
    late for whoever saves it in between; so the flag is given back as 0 and the count is set right at once."""
    optimizer._dummy_overflow_buf.zero_()
    optimizer.step(grad_scaler=_Overflow(found))
    for group in optimizer.param_groups:
        group["step"].sub_(found.reshape(group["step"].shape).to(group["step"].dtype))
    optimizer._dummy_overflow_buf.zero_()


def tell_commits(stages: Sequence["Stage"]) -> None:
    """Every step of an optimizer is told to the stages whose parameters it has: fused ones leave no other trace."""
    known = weakref.WeakSet(stages)

    def stepped(optimizer: Any, arguments: Any, words: Any) -> None:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for stage in known:
            stage.commits += any(id(p) in own for p in stage.parameters)

    hook = register_optimizer_step_post_hook(stepped)
    weakref.finalize(stages[0], hook.remove)


def vetoed_step(optimizer: Any) -> Callable[[Any, "torch.Tensor"], None]:
    """How the optimizer steps unless a word on the device is 1. Raises: UnsupportedError."""
    name = type(optimizer).__name__
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        known = (torch.optim.Adam.step, torch.optim.AdamW.step)
        if inspect.unwrap(type(optimizer).step) not in map(inspect.unwrap, known):
            raise UnsupportedError(f"{name} steps in its own way, which nobody can veto on the device",
                                   remedy="use torch.optim.AdamW(..., fused=True)", status="unsupported")
        if all(group.get("fused") for group in optimizer.param_groups):
            return _step_of_torch
        raise UnsupportedError(f"{name} without fused=True has no found_inf: a vetoed step would change weights",
                               remedy=f"make it as {name}(..., fused=True)", status="unsupported")
    if name == "FusedAdam" and type(optimizer).__module__.startswith("transformer_engine."):
        if not optimizer.capturable:
            raise UnsupportedError("FusedAdam without capturable=True counts steps on the host, vetoed ones, too",
                                   remedy="make it as FusedAdam(..., capturable=True)", status="unsupported")
        if optimizer.use_decoupled_grad:
            raise UnsupportedError("FusedAdam with use_decoupled_grad=True does not read .grad, which is handed over",
                                   remedy="use use_decoupled_grad=False", status="unsupported")
        return _step_of_te
    raise UnsupportedError(f"{name} cannot be vetoed on the device: a step that is not finite would change weights",
                           remedy="use torch.optim.AdamW(..., fused=True), or Transformer Engine's "
                           "FusedAdam(..., capturable=True)", status="unsupported")
