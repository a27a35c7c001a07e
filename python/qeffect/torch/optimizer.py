"""Step atomicity: an optimizer commits only where no gradient is Inf or NaN, decided on the device, without a host
round trip. Parameters, moments and step counts are otherwise as they were."""
from __future__ import annotations

from typing import Any, Optional, Sequence

from ..errors import UnsupportedError
from ._need import torch


class StepGuard:
    """Guards torch's fused Adam and AdamW (through `found_inf`) and Transformer Engine's capturable FusedAdam.

    `commits`: int64 [1] on the device, the number of steps that became visible; weights are of this version.
    Raises: UnsupportedError for another optimizer, with the reason.
    """

    def __init__(self, optimizer: "torch.optim.Optimizer", device: Optional["torch.device"] = None) -> None:
        _require_veto(optimizer)
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
        found = self.vetoed.reshape(1).clone()
        dense = [gradient for gradient in gradients if gradient is not None]
        if dense:
            torch._amp_foreach_non_finite_check_and_unscale_(dense, found, self._one)
        self.optimizer.grad_scale = None
        self.optimizer.found_inf = found.reshape(())
        try:
            self.optimizer.step()
        finally:
            self.optimizer.found_inf = None
        self.commits.add_((1 - found).to(torch.int64))
        self.vetoed.zero_()
        return found.reshape(())


def _require_veto(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        if all(group.get("fused") for group in optimizer.param_groups):
            return
        raise UnsupportedError(f"{name} without fused=True has no found_inf: a vetoed step would change weights",
                               remedy=f"make it as {name}(..., fused=True)", status="unsupported")
    raise UnsupportedError(f"{name} cannot be vetoed on the device: a step that is not finite would change weights",
                           remedy="use torch.optim.AdamW(..., fused=True)", status="unsupported")
