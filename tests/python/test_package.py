"""What is missing is said, and the rest works."""
from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

import qeffect


def test_the_package_needs_neither_torch_nor_transformer_engine() -> None:
    done = subprocess.run([sys.executable, "-c", "import qeffect, sys; print('torch' in sys.modules)"],
                          stdout=subprocess.PIPE, check=True, text=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("module, needed", [("qeffect.torch", "torch"), ("qeffect.te", "transformer_engine")])
def test_an_adapter_without_its_framework_says_what_it_needs(module: str, needed: str) -> None:
    if importlib.util.find_spec(needed) is not None:
        pytest.skip(f"{needed} is installed")
    with pytest.raises(qeffect.UnsupportedError, match="needs (torch 2.11|Transformer Engine 2.20)") as caught:
        importlib.import_module(module)
    assert caught.value.remedy.startswith("pip install")


def test_the_bench_says_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-m", "qeffect.bench", "h1024T1k"], stderr=subprocess.PIPE, text=True)
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("Transformer Engine is installed")
    assert done.returncode == 1 and "needs torch and Transformer Engine" in done.stderr
