#!/usr/bin/env python3
"""Every GPU peer on every shape, a process for each shape, peer and kind of attention.

    bench/peers/gpu.py [--out FILE] [--shapes a,b] [--peers te,torch] [--attention both|deterministic|any]
                       [--te FOLDER] [--timeout SECONDS]

--te: where Transformer Engine lies, if Python does not find it by itself. Figures go to --out (or standard output), a
JSON line each; a process that fails or hangs leaves a line that says so, and the next one runs.
Exit status: 0 when every process ran, 1 when one failed, 77 when none could run.
"""
import argparse
import json
import os
import subprocess
import sys
import time

FOLDER = os.path.dirname(os.path.abspath(__file__))
SHAPES = ("h1024-t1024", "h2048-t2048", "h4096-t2048", "h4096-t8192")
PROGRAMS = {"te": "te_layer.py", "torch": "torch_gpu.py"}
SKIPPED = 77


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=None)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--peers", default=",".join(PROGRAMS))
    parser.add_argument("--attention", choices=("both", "deterministic", "any"), default="both")
    parser.add_argument("--te", default=None)
    parser.add_argument("--timeout", type=float, default=240.0)
    parser.add_argument("--seconds", type=float, default=None)
    return parser.parse_args()


def environment(options):
    extended = dict(os.environ)
    # PyTorch brings its libraries. Where the loader finds a toolkit's first, Transformer Engine's fused attention does
    # not come up and an unfused one runs in its place, in silence: 42 ms instead of 14.5 for 8192 tokens.
    extended.pop("LD_LIBRARY_PATH", None)
    if options.te:
        extended["PYTHONPATH"] = os.pathsep.join(filter(None, (options.te, extended.get("PYTHONPATH"))))
    return extended


def run_one(command, options, out):
    """Returns the exit status; a line that is no JSON is a library's chatter and goes to standard error."""
    begin = time.time()
    try:
        done = subprocess.run(command, env=environment(options), stdout=subprocess.PIPE, text=True,
                              timeout=options.timeout)
        status, text = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, text = 1, late.stdout or ""
        text = text.decode() if isinstance(text, bytes) else text
    for line in text.splitlines():
        target = out if line.startswith("{") else sys.stderr
        print(line, file=target, flush=True)
    print(f"{' '.join(command[1:])}: status {status}, {time.time() - begin:.0f} s", file=sys.stderr, flush=True)
    if status not in (0, SKIPPED):
        print(json.dumps({"failed": command[1:], "status": status}), file=out, flush=True)
    return status


def commands(options):
    kinds = {"both": ([], ["--deterministic"]), "deterministic": (["--deterministic"],), "any": ([],)}
    for shape in options.shapes.split(","):
        for peer in options.peers.split(","):
            for kind in kinds[options.attention]:
                command = [sys.executable, os.path.join(FOLDER, PROGRAMS[peer]), shape, *kind]
                yield command + (["--seconds", str(options.seconds)] if options.seconds else [])


def main():
    options = arguments()
    if not set(options.peers.split(",")) <= set(PROGRAMS) or not set(options.shapes.split(",")) <= set(SHAPES):
        print(f"peers: {' '.join(PROGRAMS)}; shapes: {' '.join(SHAPES)}", file=sys.stderr)
        return 2
    out = open(options.out, "a", encoding="utf-8") if options.out else sys.stdout
    statuses = [run_one(command, options, out) for command in commands(options)]
    if all(status == SKIPPED for status in statuses):
        return SKIPPED
    return int(any(status not in (0, SKIPPED) for status in statuses))


if __name__ == "__main__":
    sys.exit(main())
