"""Weight gradients apart from input gradients: a linear layer's backward gives the input gradient at once and leaves
the product of the weight gradient, with what it needs, to whoever drains the queue.

The queue travels with the autograd context, so it does not matter which thread runs backward."""
from __future__ import annotations

from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Callable, Optional

from ._need import torch


@dataclass
class Postponed:
    """grad(weight) += dy' x, grad(bias) += column sums of dy. x: [..., in], dy: [..., out]."""

    weight: Optional["torch.Tensor"]
    bias: Optional["torch.Tensor"]
    x: "torch.Tensor"
    dy: "torch.Tensor"


@dataclass
class Queue:
    """What one microbatch of one stage has postponed."""

    entries: list[Postponed] = field(default_factory=list)


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: "torch.Tensor", weight: "torch.Tensor", bias: Optional["torch.Tensor"],
                queue: Queue) -> "torch.Tensor":
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.queue = weight, bias, queue  # the parameters themselves, whatever is unpacked later
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        bias = ctx.bias if ctx.bias is not None and ctx.bias.requires_grad else None
        ctx.queue.entries.append(Postponed(ctx.weight if ctx.weight.requires_grad else None, bias, x, dy))
        dx = dy.matmul(weight) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


def split_linears(module: "torch.nn.Module", queue_of: Callable[[], Optional[Queue]]) -> Callable[[], None]:
    """Lets every plain nn.Linear below `module` postpone its weight gradient into the queue that `queue_of` names when
    its forward runs; None, or autocast: it computes both at once, as it always did. Returns what undoes this.

    A module with another forward, hooks included, is left alone: what it computes in backward is used as it comes.
    """
    changed = [linear for linear in module.modules() if _is_plain(linear)]
    for linear in changed:
        linear.forward = MethodType(_forward(queue_of), linear)

    def undo() -> None:
        for linear in changed:
            linear.__dict__.pop("forward", None)

    return undo


def _is_plain(module: "torch.nn.Module") -> bool:
    return type(module) is torch.nn.Linear and "forward" not in module.__dict__


def _forward(queue_of: Callable[[], Optional[Queue]]) -> Callable[[Any, Any], Any]:
    def forward(self: Any, x: Any) -> Any:
        queue = queue_of()
        trains = torch.is_grad_enabled() and self.weight.requires_grad
        if queue is None or not trains or torch.is_autocast_enabled(x.device.type):
            return torch.nn.functional.linear(x, self.weight, self.bias)
        return _SplitLinear.apply(x, self.weight, self.bias, queue)

    return forward
