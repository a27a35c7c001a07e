"""TorchTitan's own trainer on a GPU: its llama3 with Transformer Engine's linears, its schedule captured under
contract, against torch's own runtime driving the same modules natively; and its checkpoints."""
from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")

from titan_world import assets, differing, train, words  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.te, pytest.mark.titan]

STEPS = 50
# Deterministic algorithms, as everything here is compared bit for bit; the head is Transformer Engine's too, since
# torch would round its weight gradient before it is added.
WIDE = {"model__flavor": "wide", "model__converters": "qeffect", "training__seq_len": 512,
        "training__local_batch_size": 4, "training__dtype": "bfloat16", "debug__deterministic": True,
        "qeffect__recipe": "delayed", "qeffect__amax_history_len": 4, "qeffect__skip_linears": "none",
        "parallelism__pipeline_parallel_schedule": "InterleavedZeroBubble", "lr_scheduler__warmup_steps": 10,
        "metrics__log_freq": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    made = tmp_path_factory.mktemp("titan")
    assets(made)
    return Path(made)


def beside(*runs: Any) -> list[Any]:
    """Several runs at once: each is mostly start-up."""
    with ThreadPoolExecutor(len(runs)) as pool:
        return [future.result() for future in [pool.submit(run) for run in runs]]


def test_fifty_steps_equal_native_transformer_engine_bit_for_bit(folder: Path) -> None:
    cached = words(folder, **WIDE, training__steps=STEPS, qeffect__folds="te")
    anew = words(folder, **WIDE, training__steps=STEPS, qeffect__folds="te", qeffect__cache_weights=False)
    eagerly = [*anew, "--qeffect.capture", "off"]
    runs = beside(lambda: train(folder, "native", cached), lambda: train(folder, "contract", cached),
                  lambda: train(folder, "native", anew), lambda: train(folder, "contract", eagerly))
    native, captured, native_anew, eager = (run for (run,) in runs)
    for name, run in (("native", native), ("captured", captured), ("native, weights anew", native_anew),
                      ("eager, weights anew", eager)):
        print(name, run["schedule"], run.get("slots"), "capture s", run.get("capture_seconds"), "ms per step",
              round(1e3 * sorted(run["seconds"])[STEPS // 2], 2), "loss", float(run["losses"][0]),
              float(run["losses"][-1]), "peak MiB", run["peak_bytes"] >> 20)
    assert set(captured["kinds"]) == {"graph"} and set(eager["kinds"]) == {""}
    assert captured["commits"] == STEPS and len(captured["scales"]) > 200
    assert differing(captured, native) == []
    assert differing(eager, native_anew) == []
    assert captured["losses"][-1] < captured["losses"][0] - 1


def test_a_checkpoint_of_torchtitan_carries_scales_and_goes_on_with_the_same_bits(folder: Path) -> None:
    more = {"checkpoint__enable": True, "checkpoint__interval": 5, "checkpoint__last_save_model_only": False}
    whole = words(folder, **WIDE, **more, training__steps=10, job__dump_folder=folder / "whole")
    (straight,) = train(folder, "contract", whole)
    (folder / "again" / "checkpoint").mkdir(parents=True)
    shutil.copytree(folder / "whole" / "checkpoint" / "step-5", folder / "again" / "checkpoint" / "step-5")
    other = dict(WIDE, parallelism__pipeline_parallel_schedule="1F1B")  # another order, other stages
    (resumed,) = train(folder, "contract", words(folder, **other, **more, training__steps=10,
                                                 job__dump_folder=folder / "again"))
    print("slots", straight["slots"], resumed["slots"], "losses", straight["losses"].tolist())
    assert len(resumed["losses"]) == 5 and resumed["commits"] == 10
    straight["losses"] = straight["losses"][5:]
    assert differing(straight, resumed) == []


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_two_gpus_equal_native_transformer_engine_bit_for_bit(folder: Path, name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    both = dict(WIDE, training__steps=12, parallelism__pipeline_parallel_degree=2, qeffect__folds="te",
                parallelism__pipeline_parallel_schedule=name)
    native, ours = beside(*(lambda kind=kind: train(folder, kind, words(
        folder, **both, job__dump_folder=folder / f"{kind}-{name}"), ranks=2) for kind in ("native", "contract")))
    for rank in range(2):
        print(name, rank, ours[rank]["slots"], ours[rank]["kinds"], "ms per step, native and ours",
              [round(1e3 * sorted(run[rank]["seconds"])[6], 2) for run in (native, ours)])
        assert set(ours[rank]["kinds"]) == {"graph"} and ours[rank]["commits"] == 12
        assert differing(ours[rank], native[rank]) == []
