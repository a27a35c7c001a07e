"""What a test needs and the machine lacks is a reason to skip, told by name."""
from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def missing_part(item: pytest.Item) -> str:
    """Why a marked test cannot run here; "" where it can."""
    if not any(item.get_closest_marker(name) for name in ("torch", "gpu", "te", "titan")):
        return ""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (make check-torch installs it)"
    import torch
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "no GPU"
    if item.get_closest_marker("te") and importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    if item.get_closest_marker("titan"):
        needed = ("torchtitan", "datasets", "tyro", "torchdata")
        lacking = [name for name in needed if importlib.util.find_spec(name) is None]
        if lacking:
            return f"TorchTitan 0.2.2 is not installed whole ({', '.join(lacking)})"
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        reason = missing_part(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def traces() -> Path:
    folder = Path(os.environ.get("QEFFECT_TRACES", ROOT / "tests" / "traces"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    return folder
