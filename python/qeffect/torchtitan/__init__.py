"""TorchTitan's and torch's pipelines under contract (docs/torchtitan.md).

`under_contract` takes a schedule of torch.distributed.pipelining with its stages and needs torch alone. What needs
TorchTitan says so when it is asked for: `Trainer`, `main`; `python -m qeffect.torchtitan` is TorchTitan's own training
program with these.
"""
from __future__ import annotations

from typing import Any

from .orders import from_torch, local_part, order_named, order_of, to_torch
from .runtime import ContractSchedule, Settings, under_contract

_LAZY = {"Trainer": "train", "main": "train", "ContractState": "state", "swap_linears": "convert"}

__all__ = ["ContractSchedule", "ContractState", "Settings", "Trainer", "from_torch", "local_part", "main",
           "order_named", "order_of", "swap_linears", "to_torch", "under_contract"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from importlib import import_module
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
