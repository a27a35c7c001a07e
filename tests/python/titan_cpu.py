"""A CPU as TorchTitan wants a device: it asks the device module for memory and names, and torch.cpu has no answers."""
from __future__ import annotations

import os
from types import SimpleNamespace

import torch

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
GPU = torch.cuda.is_available()


def on_a_cpu() -> None:
    torch.set_num_threads(1)
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    more = {"get_device_name": "cpu", "get_device_properties": SimpleNamespace(total_memory=2 ** 33),
            "reset_peak_memory_stats": None, "empty_cache": None, "memory_stats": {}, "current_device": 0}
    for name, answer in more.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)


def be_a_rank() -> None:
    """Of a run of one process, where no launcher says otherwise."""
    for key, value in ALONE.items():
        os.environ.setdefault(key, value)
    if not GPU:
        on_a_cpu()
