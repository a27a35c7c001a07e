"""Transformer Engine driven by torch's own pipelining = QEffect eager = QEffect captured, bit for bit: losses,
parameters, moments, scales, histories; cached weights or not, placement direct or copied; and from a checkpoint in a
new process."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")
te_world = pytest.importorskip("te_world", reason="Transformer Engine is not installed",
                               exc_type=(ImportError, OSError, RuntimeError))
pytestmark = [pytest.mark.te, pytest.mark.gpu]

from te_world import ORDERS, STEPS, Under, data, native, same  # noqa: E402


@pytest.fixture(autouse=True)
def clean_globals() -> Any:
    te_world.clean_globals()
    yield
    te_world.clean_globals()


def trained(order: str, recipe: str, capture: bool, **options: Any) -> tuple[list[Any], list[Any]]:
    te_world.clean_globals()
    run = Under(order, recipe, capture, **options)
    losses = [run.step(step, batch) for step, batch in enumerate(data())]
    found = run.state()
    run.pipeline.close()
    return losses, found


def moves(seen: list[Any]) -> tuple[int, int, int]:
    """How many scales move at all, how many of them rise, and how many fall."""
    tracks = [torch.stack([one[name] for one in seen]) for name in seen[0] if name.endswith(".scale")]
    steps = torch.cat([track.diff(dim=0) for track in tracks], dim=1)
    rises, falls = (steps > 0).any(0), (steps < 0).any(0)
    return int((rises | falls).sum()), int(rises.sum()), int(falls.sum())


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("order", list(ORDERS))
def test_native_eager_and_captured_have_the_same_bits(order: str, cached: bool, tmp_path: Path) -> None:
    losses, expected, seen = native(order, "delayed", cached, tmp_path / "order.csv")
    assert all(bool(one.isfinite().all()) for one in losses)
    assert moves(seen) == (24, 24, 24)  # x and w of 4 products and their dY, of 2 stages
    for capture, placement in ((False, "direct"), (True, "direct"), (False, "copy"), (True, "copy")):
        found_losses, found = trained(order, "delayed", capture, cached=cached, placement=placement)
        assert same(found_losses, losses), (capture, placement)
        assert same(found, expected), (capture, placement)


@pytest.mark.parametrize("order", ["1f1b", "zbh1"])
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_recipes_without_histories_have_the_same_bits_too(recipe: str, order: str, tmp_path: Path) -> None:
    losses, expected, _ = native(order, recipe, True, tmp_path / "order.csv")
    for capture in (False, True):
        found_losses, found = trained(order, recipe, capture)
        assert same(found_losses, losses) and same(found, expected), capture


@pytest.mark.parametrize("order, capture", [("1f1b", True), ("zbh1", False), ("zbv", True)])
def test_a_new_process_goes_on_with_the_same_bits(order: str, capture: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    run = Under(order, "delayed", True)
    for step, batch in enumerate(data()):
        if step == STEPS // 2:
            save_file(run.tensors(), str(tmp_path / "before.safetensors"))
        run.step(step, batch)
    words = [order, str(capture), str(tmp_path / "before.safetensors"), str(tmp_path / "after.safetensors")]
    subprocess.run([sys.executable, te_world.__file__, *words, str(STEPS // 2)], check=True, timeout=120)
    expected, found = run.tensors(), load_file(str(tmp_path / "after.safetensors"), device="cuda")
    assert set(expected) == set(found)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_folds_of_the_step_and_of_transformer_engine_differ() -> None:
    """Else the tests above would not tell where scales fold."""
    assert not same(trained("1f1b", "delayed", True, folds="te")[1], trained("1f1b", "delayed", True, folds="step")[1])
