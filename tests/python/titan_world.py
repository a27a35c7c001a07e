"""What the tests of qeffect.torchtitan share: a corpus, a tokenizer, a configuration, and runs."""
from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (make check-torch installs it)")

HERE = Path(__file__).resolve().parent
WORDS = ("the of and to in he was that it his her with as had for she not at but be on they have him which said from "
         "all this by were we stream graph scale slot weight gradient").split()


def assets(folder: Path) -> None:
    """A tokenizer of whole words and a corpus, made here: TorchTitan's own are not installed with it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *sorted(set(WORDS))])}
    vocabulary.update({f"<{i}>": i for i in range(len(vocabulary), 2048)})  # the model's vocabulary
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    numbers = random.Random(0)
    (folder / "corpus").mkdir()
    with open(folder / "corpus" / "data.json", "w", encoding="utf-8") as file:
        for _ in range(400):
            text = " ".join(numbers.choice(WORDS) for _ in range(numbers.randrange(100, 700)))
            file.write(json.dumps({"text": text}) + "\n")


def words(folder: Path, **more: Any) -> list[str]:
    """TorchTitan's arguments; `more`: section__key=value."""
    settings = {
        "job.dump_folder": folder / "out", "model.name": "llama3", "model.flavor": "debugmodel",
        "model.hf_assets_path": folder / "tokenizer", "optimizer.lr": 8e-4, "lr_scheduler.warmup_steps": 2,
        "training.local_batch_size": 8, "training.seq_len": 64, "training.steps": 4, "training.dataset": "c4_test",
        "training.dataset_path": folder / "corpus", "parallelism.pipeline_parallel_degree": 1,
        "parallelism.pipeline_parallel_schedule": "Interleaved1F1B", "activation_checkpoint.mode": "none",
        "debug.seed": 7, "metrics.log_freq": 1, "qeffect.ranks": 2}
    settings.update({name.replace("__", "."): value for name, value in more.items()})
    found = []
    for name, value in settings.items():
        if isinstance(value, bool):
            section, _, key = name.rpartition(".")
            found.append(f"--{section}.{'' if value else 'no-'}{key}")
        else:
            found += [f"--{name}", ",".join(value) if isinstance(value, list) else str(value)]
    return found


def train(folder: Path, kind: str, arguments: list[str], ranks: int = 1) -> list[dict[str, Any]]:
    """What each rank left behind. Raises: AssertionError with the end of what was printed."""
    left = folder / f"left-{random.randrange(10 ** 9)}"
    program = [str(HERE / "titan_run.py"), kind, str(left), *arguments]
    environment = dict(os.environ, HF_HOME=str(folder / "hf"), MASTER_PORT=str(free_port()), OMP_NUM_THREADS="1",
                       HF_DATASETS_OFFLINE="1",
                       PYTHONPATH=os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    if ranks > 1:
        program = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv_backend=c10d",
                   f"--rdzv_endpoint=localhost:{free_port()}", *program]
    run = subprocess.run([sys.executable, *program], env=environment, capture_output=True, text=True, timeout=300)
    if run.returncode != 0:
        raise AssertionError(f"titan_run {kind}: {run.returncode}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
    return [torch.load(f"{left}.{rank}", weights_only=True) for rank in range(ranks)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of losses, parameters, moments, scales and histories whose bytes differ."""
    found = [] if torch.equal(a["losses"], b["losses"]) else ["losses"]
    for group in ("parameters", "moments", "scales"):
        found += sorted(set(a[group]) ^ set(b[group]))
        found += [n for n in a[group] if n in b[group] and not torch.equal(a[group][n], b[group][n])]
    return found
