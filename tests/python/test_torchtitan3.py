"""TorchTitan 0.3.0's own trainer with its pipeline under contract, on a CPU, uncaptured and replayed."""
from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")

from titan_world import HERE, assets, differing, free_port  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.titan3]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> Path:
    made = Path(tmp_path_factory.mktemp("titan3"))
    assets(made)
    return made


def train(folder: Path, kind: str, schedule: str, ranks: int, capture: str) -> list[dict[str, Any]]:
    left = folder / f"left-{random.randrange(10 ** 9)}"
    program = [str(HERE / "titan3_run.py"), kind, str(left), str(folder), schedule, str(ranks), capture]
    if ranks > 1:
        program = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv_backend=c10d",
                   f"--rdzv_endpoint=localhost:{free_port()}", *program]
    environment = dict(os.environ, HF_HOME=str(folder / "hf"), MASTER_PORT=str(free_port()), OMP_NUM_THREADS="1",
                       HF_DATASETS_OFFLINE="1",
                       PYTHONPATH=os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    run = subprocess.run([sys.executable, *program], env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-4000:]}"
    return [torch.load(f"{left}.{rank}", weights_only=True) for rank in range(ranks)]


@pytest.mark.parametrize("schedule, ranks", [("InterleavedZeroBubble", 1), ("Interleaved1F1B", 2)])
def test_the_trainer_of_0_3_0_has_the_bits_of_torchs_own_runtime(corpus: Path, schedule: str, ranks: int) -> None:
    expected = train(corpus, "native", schedule, ranks, "off")
    for capture in ("off", "host"):
        found = train(corpus, "contract", schedule, ranks, capture)
        assert [one["schedule"] for one in found] == ["ContractSchedule"] * ranks
        assert [differing(a, b) for a, b in zip(found, expected)] == [[]] * ranks
