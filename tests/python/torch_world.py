"""What the tests of qeffect.torch share: a small model, data, and training in torch's own way to compare with."""
from __future__ import annotations

import copy
from typing import Any, Sequence

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")

torch.set_num_threads(1)  # the tensors are small; threads would only wait for each other
MICROBATCHES = 8
STEPS = 4
HIDDEN = 16

DEVICES = [pytest.param("cpu", marks=pytest.mark.torch), pytest.param("cuda", marks=pytest.mark.gpu)]


class Block(torch.nn.Module):
    """Norm, two linears, a residual: layers that postpone weight gradients and one that does not."""

    def __init__(self, hidden: int = HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden)
        self.up = torch.nn.Linear(hidden, 2 * hidden)
        self.down = torch.nn.Linear(2 * hidden, hidden)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class BothAtOnce(torch.autograd.Function):
    """A custom function whose backward computes both gradients at once, whatever is asked for."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = ctx.saved_tensors
        BothAtOnce.calls += 1
        return dy @ weight, dy.flatten(0, -2).t() @ x.flatten(0, -2)


class Custom(torch.nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(hidden, hidden) / hidden ** 0.5)
        self.scale = torch.nn.Parameter(torch.ones(hidden))

    def forward(self, x: Any) -> Any:
        return x + BothAtOnce.apply(x, self.weight) * self.scale


class Checkpointed(torch.nn.Module):
    """Activation recomputation around a block."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.block = Block(hidden)

    def forward(self, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)


def blocks(count: int = 4, kind: Any = Block, seed: int = 0) -> list[Any]:
    torch.manual_seed(seed)
    return [kind() for _ in range(count)]


def batches(steps: int = STEPS, microbatches: int = MICROBATCHES, device: str = "cpu", seed: int = 1) -> list[Any]:
    """[step] of (inputs, targets), each [microbatches]."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(steps, 2, microbatches, 3, 4, HIDDEN, generator=generator).to(device)
    return [(list(step[0]), list(step[1])) for step in made]


def loss_of(output: Any, target: Any) -> Any:
    return torch.nn.functional.mse_loss(output, target)


def adamw(modules: Sequence[Any], rate: float = 1e-2) -> Any:
    return torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=rate, fused=True)


def state(modules: Sequence[Any], optimizer: Any) -> list[Any]:
    """Every parameter, moment and step count."""
    found = [p.detach().clone() for m in modules for p in m.parameters()]
    for module in modules:
        for parameter in module.parameters():
            found += [v.detach().clone() for _, v in sorted(optimizer.state.get(parameter, {}).items())]
    return found


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def native(modules: Sequence[Any], data: Sequence[Any]) -> list[Any]:
    """torch's own training: one microbatch at a time, gradients added up by autograd."""
    optimizer = adamw(modules)
    for inputs, targets in data:
        optimizer.zero_grad()
        for x, target in zip(inputs, targets):
            for module in modules:
                x = module(x)
            (loss_of(x, target) / len(inputs)).backward()
        optimizer.step()
    return state(modules, optimizer)


def copies(modules: Sequence[Any], device: str) -> list[Any]:
    return [copy.deepcopy(module).to(device) for module in modules]
