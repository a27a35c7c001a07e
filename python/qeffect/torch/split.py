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
    """What one microbatch of one stage has postponed. `open`: its own backward runs. A module may differentiate in its
    forward (forces are the gradient of an energy), and nothing of that is a contribution to the step."""

    entries: list[Postponed] = field(default_factory=list)
    open: bool = False


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: "torch.Tensor", weight: "torch.Tensor", bias: Optional["torch.Tensor"],
                queue: Queue) -> "torch.Tensor":
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.queue = weight, bias, queue  # the parameters themselves, whatever is unpacked later
        ctx.nested = torch._C._current_graph_task_id() != -1   # a forward that runs again within a backward
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy,) = gradients
        x, weight = ctx.saved_tensors
        if not ctx.queue.open or (ctx.nested and not _accumulates(ctx.weight)):
            return _all_at_once(ctx.needs_input_grad, x, weight, dy)
        bias = ctx.bias if ctx.bias is not None and ctx.bias.requires_grad else None
        ctx.queue.entries.append(Postponed(ctx.weight if ctx.weight.requires_grad else None, bias, x, dy))
        dx = dy.matmul(weight) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


def _accumulates(weight: Any) -> bool:
    """The backward that runs is one that accumulates parameters' gradients, not one that asks for some of them."""
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node))
    except RuntimeError:  # it asks for this one
        return False


def _all_at_once(needed: Any, x: Any, weight: Any, dy: Any) -> Any:
    """What autograd would give, differentiable where that is asked for."""
    rows = dy.reshape(-1, dy.shape[-1])
    return (dy.matmul(weight) if needed[0] else None,
            rows.t().mm(x.reshape(-1, x.shape[-1])) if needed[1] else None, rows.sum(0) if needed[2] else None, None)


def split_linears(module: "torch.nn.Module", queue_of: Callable[[], Optional[Queue]],
                  trains: Callable[[Any], bool]) -> Callable[[], None]:
    """Lets every plain nn.Linear below `module` postpone its weight gradient into the queue that `queue_of` names when
    its forward runs; None, or autocast: it computes both at once, as it always did. So it does with a weight that is no
    parameter `trains` knows, such as one that functional_call or weight_norm put there. Returns what undoes this.

    A module with another forward, hooks included, is left alone: what it computes in backward is used as it comes.
    """
    changed = [linear for linear in module.modules() if _is_plain(linear)]
    for linear in changed:
        linear.forward = MethodType(_forward(queue_of, trains), linear)

    def undo() -> None:
        for linear in changed:
            linear.__dict__.pop("forward", None)

    return undo


def _is_plain(module: "torch.nn.Module") -> bool:
    return type(module) is torch.nn.Linear and "forward" not in module.__dict__


def _forward(queue_of: Callable[[], Optional[Queue]], trains: Callable[[Any], bool]) -> Callable[[Any, Any], Any]:
    def forward(self: Any, x: Any) -> Any:
        queue, weight, bias = queue_of(), self.weight, self.bias
        if (queue is None or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type)
                or not trains(weight) or not (bias is None or not bias.requires_grad or trains(bias))):
            return torch.nn.functional.linear(x, weight, bias)
        return _SplitLinear.apply(x, weight, bias, queue)

    return forward
