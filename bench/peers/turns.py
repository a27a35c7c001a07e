#!/usr/bin/env python3
"""A layer of ours and Transformer Engine's in one graph, in turns on one chip.

    bench/peers/turns.py --qeffect PROGRAM [--shapes a,b] [--turns N] [--seconds S] [--te FOLDER] [--out FILE]

Under sustained load the chip's clock follows its power and its heat: whoever is measured on a chip that rested is
faster. So for each shape the peer gets ready first and waits; then ours (`qeffect bench layer SHAPE --device cuda`) and
the peer are measured one after the other, N times each. A JSON line per shape: medians, all turns, and ours over the
peer's. The program finds its libraries by QE_LIBRARY_PATH, which becomes its LD_LIBRARY_PATH; the peer gets none.
Exit status: 0, 1 a turn failed, 2 usage, 77 Transformer Engine or a GPU is missing.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

from gpu import FOLDER, SKIPPED, environment

OURS = {"h1024-t1024": "h1024", "h2048-t2048": "h2048", "h4096-t2048": "h4096", "h4096-t8192": "h4096-long"}

FIGURES = ("captured", "eager", "captured_all_fast_any_order", "launch_us", "guards_us")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--qeffect", required=True)
    parser.add_argument("--shapes", default="h4096-t2048,h4096-t8192")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--te", default=None)
    parser.add_argument("--out", default=None)
    return parser.parse_args()


def measure_ours(options, shape):
    """Fields of `captured`, and those of what costs the host and the guards."""
    own = dict(os.environ)
    if "QE_LIBRARY_PATH" in own:
        own["LD_LIBRARY_PATH"] = own["QE_LIBRARY_PATH"]
    command = [options.qeffect, "bench", "layer", OURS[shape], "--device", "cuda", "--seconds", str(options.seconds),
               "--json"]
    done = subprocess.run(command, env=own, stdout=subprocess.PIPE, text=True, check=True)
    layer = json.loads(done.stdout)["layers"][0]
    return {name: layer[name] for name in FIGURES}


class Peer:
    """te_layer.py, waiting for its turns."""

    def __init__(self, options, shape):
        command = [sys.executable, os.path.join(FOLDER, "te_layer.py"), shape, "--figures", "one_graph", "--seconds",
                   str(options.seconds), "--turns", str(options.turns)]
        self.process = subprocess.Popen(command, env=environment(options), stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def line(self):
        """The next JSON line; None where the process has ended. What is none is a library's chatter."""
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            print(line, end="", file=sys.stderr)
        return None

    def turn(self):
        """Returns what comes when it is done: that it is ready again, or the figure."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line()


def measure(options, shape):
    """Returns the exit status and the fields of a line."""
    peer = Peer(options, shape)
    answer = peer.line()
    ours = []
    while answer is not None and "ready" in answer:
        ours.append(measure_ours(options, shape))
        answer = peer.turn()
    status = peer.process.wait()
    if status != 0 or answer is None or "ms" not in answer:
        return status or 1, {"shape": shape, "failed": answer}
    median = statistics.median(turn["captured"]["median_ms"] for turn in ours)
    return 0, {"shape": shape, "qeffect_ms": median, "te_one_graph_ms": answer["ms"], "ratio": median / answer["ms"],
               "qeffect": ours, "te_one_graph": answer}


def main():
    options = arguments()
    shapes = options.shapes.split(",")
    if not set(shapes) <= set(OURS) or options.turns < 1:
        print(f"shapes: {' '.join(OURS)}; at least one turn", file=sys.stderr)
        return 2
    out = open(options.out, "a", encoding="utf-8") if options.out else sys.stdout
    statuses = []
    for shape in shapes:
        status, line = measure(options, shape)
        statuses.append(status)
        if status != SKIPPED:  # the peer has said what it misses
            print(json.dumps(line), file=out, flush=True)
    return SKIPPED if all(status == SKIPPED for status in statuses) else int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
