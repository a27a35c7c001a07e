#!/usr/bin/env python3
"""The same bits after any death: kills and failures at every system call on checkpoints, at random moments, and damage.

    tests/crash/crash.py --program build/qeffect --library build/tests/crash_files.so [--every N] [--only KIND]

A case is one run that meets one fault, and what must hold after it:
  * every directory that has a checkpoint's name is whole (`inspect` exits 0), whatever was going on;
  * what was there before is not lost: the newest is at least as new as it was;
  * the program died by our signal, or ended with 0 (the fault met nothing that matters) or 1 (and said why);
  * `train --resume` (or a run from nothing where nothing was saved yet) reaches the state_hash and the losses of the
    run that never stopped, and leaves no litter: checkpoints, at most `keep`, and the final weights alone.
--every N takes each N-th case, so that a minute's check meets all kinds. Standard library only.
"""
import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "end_to_end"))
from support import TINY, sample_text  # noqa: E402 (its place is known only now)

STEPS, EVERY, KEEP = 6, 2, 2
SETTINGS = ["--set", f"train.steps={STEPS}", "--set", f"checkpoint.every={EVERY}", "--set", f"checkpoint.keep={KEEP}",
            "--set", "checkpoint.path=run", "--set", "data.validation=0", "--set", "contracts.trace="]
SECONDS_MAX = 60  # a run takes some hundredths of a second
KINDS = ("before", "half", "EIO", "full")  # what is after a call is before the next one
NEED_ROOM = ("write", "fsync", "mkdir", "mkdirat", "openat")
RANDOM_KILLS, DAMAGES = 240, 260


class Failure(Exception):
    pass


def expect(condition, what):
    if not condition:
        raise Failure(what)


class Bench:
    """A folder with a text and a configuration, the reference run, and prepared beginnings."""

    def __init__(self, options, folder):
        self.program, self.library, self.folder = os.path.abspath(options.program), options.library, folder
        self.library = os.path.abspath(self.library)
        self.write("text.txt", sample_text())
        self.write("tiny.yaml", TINY)
        self.prepare()

    def path(self, *names):
        return os.path.join(self.folder, *names)

    def write(self, name, content):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(content)

    def run(self, *arguments, fault=None, log=None, kill_after=None):
        """(exit status or -signal, parsed JSON or None, standard error)."""
        environment = dict(os.environ)
        if fault or log:
            environment.update(LD_PRELOAD=self.library, QE_FAULT_FOLDER=os.path.realpath(self.path("run")))
        if fault:
            environment.update(QE_FAULT_DO=fault[0], QE_FAULT_AT=str(fault[1]))
        if log:
            environment["QE_FAULT_LOG"] = log
        process = subprocess.Popen([self.program, *arguments, "--json"], cwd=self.folder, env=environment,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if kill_after is not None:
            time.sleep(kill_after)
            process.send_signal(signal.SIGKILL)
        out, err = process.communicate(timeout=SECONDS_MAX)
        try:
            document = json.loads(out) if out else None
        except ValueError:
            document = None
        return process.returncode, document, err.decode("utf-8", "replace")

    def train(self, *more, **options):
        return self.run("train", "tiny.yaml", *SETTINGS, *more, **options)

    def clear(self):
        shutil.rmtree(self.path("run"), ignore_errors=True)

    def restore(self, scene):
        self.clear()
        if scene:
            shutil.copytree(self.path(scene), self.path("run"), symlinks=True)

    def prepare(self):
        """The reference, and `seasoned`: checkpoints that saves replace and remove, and a dead writer's litter."""
        status, document, err = self.train("--set", "checkpoint.keep=0")
        expect(status == 0, f"the reference run: {err}")
        self.hash, self.losses = document["state_hash"], {e["step"]: e["loss"] for e in document["loss_curve"]}
        # Steps are faster than the disk: the later checkpoints of a run are postponed. Each run is sure of its first.
        for every in (2, 3, 5):
            status, _, err = self.train("--set", f"checkpoint.every={every}", "--set", "checkpoint.keep=0")
            expect(status == 0, f"the run with every={every}: {err}")
        shutil.rmtree(self.path("run", f"step-{STEPS:08d}"))
        os.mkdir(self.path("run", ".qeffect-partial-1-0"))
        shutil.copy(self.path("run", "model.safetensors"), self.path("run", ".qeffect-partial-1-0"))
        os.rename(self.path("run"), self.path("seasoned"))
        self.seasoned_steps = {int(n[5:]) for n in os.listdir(self.path("seasoned")) if n.startswith("step-")}
        expect({2, 3, 5} <= self.seasoned_steps, f"prepared are {self.seasoned_steps}")

    def whole_steps(self):
        """Steps of checkpoints in run/, all of which must be complete."""
        names = [n for n in os.listdir(self.path("run")) if n.startswith("step-")] if os.path.isdir(
            self.path("run")) else []
        if not names:
            return set()
        status, document, err = self.run("inspect", "run")
        expect(status == 0, f"inspect exits {status}: {document} {err}")
        expect({e["name"] for e in document["checkpoints"]} == set(names), "inspect lists other names")
        return {e["step"] for e in document["checkpoints"]}

    def go_on(self, can_resume):
        """From whatever is there to the end: same losses, same bits, no litter."""
        status, document, err = self.train(*(("--resume", "run") if can_resume else ()))
        expect(status == 0, f"going on exits {status}: {err}")
        expect(document["state_hash"] == self.hash, f"other bits: {document['state_hash']}, not {self.hash}")
        for entry in document["loss_curve"]:
            expect(entry["loss"] == self.losses[entry["step"]], f"another loss at step {entry['step']}")
        names = sorted(os.listdir(self.path("run")))
        steps = [n for n in names if n.startswith("step-")]
        expect(f"step-{STEPS:08d}" in steps and len(steps) <= KEEP, f"checkpoints left: {steps}")
        expect(set(names) - set(steps) == {"config.json", "model.safetensors"}, f"litter: {names}")
        self.whole_steps()
        return document, err


def starts(bench):
    """name -> (prepared folder or None, arguments of the run that meets the fault)."""
    return {"fresh": (None, ()), "seasoned": ("seasoned", ("--resume", "run/step-00000002"))}


def count_calls(bench, scene, arguments):
    log = bench.path("calls.log")
    if os.path.exists(log):
        os.remove(log)
    bench.restore(scene)
    status, _, err = bench.train(*arguments, log=log)
    expect(status == 0, f"the counted run: {err}")
    with open(log, encoding="utf-8") as file:
        return [line.split(" ", 2)[1] for line in file]


def check_after(bench, scene, status, err, may_die):
    expect(status in (0, 1) or (may_die and status == -signal.SIGKILL), f"exit {status}: {err}")
    steps = bench.whole_steps()
    if scene:  # the newest of before, or a newer one: the run went on from 2, so its saves are of 4 and 6
        expect(steps & {2, 3, 5, 4, 6}, f"nothing is left: {steps}")
    bench.go_on(can_resume=bool(steps))


def fault_cases(bench):
    for name, (scene, arguments) in starts(bench).items():
        calls = count_calls(bench, scene, arguments)
        for number, call in enumerate(calls, 1):
            for kind in KINDS:
                if (kind == "half" and call != "write") or (kind == "full" and call not in NEED_ROOM):
                    continue
                yield f"{name}: {kind} at call {number} ({call})", (scene, arguments, (kind, number))


def run_fault(bench, case):
    scene, arguments, fault = case
    bench.restore(scene)
    status, _, err = bench.train(*arguments, fault=fault)
    check_after(bench, scene, status, err, fault[0] in ("before", "after", "half"))


def kill_cases(bench, source):
    for i in range(RANDOM_KILLS):
        scene, arguments = starts(bench)["fresh" if i % 2 else "seasoned"]
        yield f"killed at a random moment {i}", (scene, arguments, source.random())


def run_kill(bench, case):
    scene, arguments, share = case
    bench.restore(scene)
    begin = time.monotonic()
    if not hasattr(bench, "run_s"):
        bench.train(*arguments)
        bench.run_s = time.monotonic() - begin
        bench.restore(scene)
    status, _, err = bench.train(*arguments, kill_after=share * bench.run_s)
    check_after(bench, scene, status, err, True)


def damage_cases(bench, source):
    files = ("manifest.json", "model.safetensors", "optimizer.safetensors", "scales.safetensors", "config.json")
    for i in range(DAMAGES):
        yield f"damage {i}", (source.choice(files), source.choice(("flip", "cut", "grow", "zero", "gone")),
                              source.random(), source.randrange(8))


def damage(path, how, share, bit):
    with open(path, "rb") as file:
        content = bytearray(file.read())
    at = int(share * len(content))
    if how == "gone":
        os.remove(path)
        return
    if how == "flip":
        content[at] ^= 1 << bit
    if how == "cut":
        del content[at:]
    if how == "grow":
        content += b"\0" * (1 + bit)
    if how == "zero":
        page = at // 512 * 512
        was = bytes(content[page:page + 512])
        content[page:page + 512] = bytes(len(was))
        if bytes(content[page:page + 512]) == was:
            content[at] ^= 1
    with open(path, "wb") as file:
        file.write(content)


def run_damage(bench, case):
    """The damaged newest is named and passed over for the one before."""
    file, how, share, bit = case
    bench.restore("seasoned")
    newest = max(bench.seasoned_steps)  # also the last that was saved
    damage(bench.path("run", f"step-{newest:08d}", file), how, share, bit)
    status, document, _ = bench.run("inspect", "run")
    # A bit of what a file says of its own run or step makes it one of another run: a broken rule.
    expect(status == 1 or (status == 3 and file.endswith(".safetensors")), f"inspect exits {status}: {file}, {how}")
    named = [e["name"] for e in document["checkpoints"] if not e["verified"]]
    expect(named == [f"step-{newest:08d}"], f"named as damaged: {named}")
    document, err = bench.go_on(can_resume=True)
    expect(document["resumed_step"] < newest, f"went on from {document['resumed_step']}")
    expect(f"step-{newest:08d} is no checkpoint to go on from" in err, f"not named: {err}")


def check_syncs(bench):
    """A name is given only to what is on disk: each file, then its directory, then the rename, then the parent."""
    log = bench.path("calls.log")
    for scene, arguments in starts(bench).values():
        if os.path.exists(log):
            os.remove(log)
        bench.restore(scene)
        status, _, err = bench.train(*arguments, log=log)
        expect(status == 0, f"the logged run: {err}")
        with open(log, encoding="utf-8") as file:
            calls = [line.rstrip("\n").split(" ", 2)[1:] for line in file]
        renames = [i for i, (call, path) in enumerate(calls) if call == "renameat2" and "partial" in path]
        expect(renames, "no checkpoint was named")
        for at in renames:
            partial = calls[at][1]
            written = {path for call, path in calls[:at] if call == "write" and path.startswith(partial + "/")}
            expect(len(written) == 5, f"files of one checkpoint: {written}")
            for path in written | {partial}:
                last = max(i for i in range(at) if calls[i] == ["fsync", path])
                later = [c for c in calls[last:at] if c[0] == "write" and c[1].startswith(path)]
                expect(not later, f"written after its sync: {later}")
            after = next((i for i in range(at, len(calls)) if calls[i] == ["fsync", ""]), None)
            expect(after is not None, "the parent was not synced")


def main():
    parser = argparse.ArgumentParser(description="the same bits after any death", epilog="exit: 0 all held, 1 not")
    parser.add_argument("--program", required=True)
    parser.add_argument("--library", required=True)
    parser.add_argument("--every", type=int, default=1, help="take each N-th case")
    parser.add_argument("--only", choices=("faults", "kills", "damages"), help="only cases of this kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    source, failures, counts, begin = random.Random(options.seed), [], {}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="qeffect-crash-") as folder:
        bench = Bench(options, folder)
        try:
            check_syncs(bench)
        except Failure as failure:
            failures.append("syncs")
            print(f"FAILED order of syncs: {failure}")
        kinds = (("faults", fault_cases(bench), run_fault), ("kills", kill_cases(bench, source), run_kill),
                 ("damages", damage_cases(bench, source), run_damage))
        for kind, cases, run_case in kinds:
            if options.only not in (None, kind):
                continue
            for index, (name, case) in enumerate(list(cases)):
                if index % options.every:
                    continue
                counts[kind] = counts.get(kind, 0) + 1
                try:
                    run_case(bench, case)
                except Failure as failure:
                    failures.append(name)
                    print(f"FAILED {name}: {failure}")
    total = sum(counts.values())
    print(f"crash: {total} cases ({', '.join(f'{n} {k}' for k, n in counts.items())}), {len(failures)} failed, "
          f"seed {options.seed}, {time.monotonic() - begin:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
