"""What a test needs and the machine lacks is a reason to skip, told by name."""
from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TITANS = {"titan": "0.2.2", "titan3": "0.3.0"}


def missing_part(item: pytest.Item) -> str:
    """Why a marked test cannot run here; "" where it can."""
    if not any(item.get_closest_marker(name) for name in ("torch", "gpu", "te", *TITANS)):
        return ""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (make check-torch installs it)"
    import torch
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "no GPU"
    if item.get_closest_marker("te") and importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    for marker, version in TITANS.items():
        if item.get_closest_marker(marker):
            return missing_titan(version)
    return ""


def missing_titan(version: str) -> str:
    lacking = [n for n in ("torchtitan", "datasets", "tyro", "torchdata") if importlib.util.find_spec(n) is None]
    if lacking:
        return f"TorchTitan {version} is not installed whole ({', '.join(lacking)})"
    found = importlib.metadata.version("torchtitan")
    return "" if found == version else f"needs TorchTitan {version}; this is {found}"


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
