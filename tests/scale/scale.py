#!/usr/bin/env python3
"""How long `qeffect trace check` takes for long traces, and how much memory: seconds of one core and peak MiB for some
lengths, which must grow no faster than the lengths and stay within limits where these are given.

    scale.py --program build/qeffect --writer build/tests/write_trace 2500000 5000000 10000000
"""
import argparse
import os
import subprocess
import sys


def measure(program, writer, lines):
    """CPU seconds and peak bytes of the check; its verdict must be that every rule is kept. The trace goes through a
    pipe, so the writer's time is its own and nothing lies on a disk."""
    source = subprocess.Popen([writer, str(lines)], stdout=subprocess.PIPE)
    check = subprocess.Popen([program, "trace", "check", "/dev/stdin"], stdin=source.stdout, stdout=subprocess.PIPE)
    source.stdout.close()
    text = check.stdout.read().decode()
    _, status, usage = os.wait4(check.pid, 0)
    check.returncode = os.waitstatus_to_exitcode(status)
    if source.wait() != 0 or check.returncode != 0 or "keep every rule" not in text:
        sys.exit(f"scale: {lines} lines: the check said {text!r} and ended with {check.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main():
    parser = argparse.ArgumentParser(description="long traces through qeffect trace check")
    parser.add_argument("--program", required=True)
    parser.add_argument("--writer", required=True)
    parser.add_argument("--seconds", type=float, help="limit for the longest")
    parser.add_argument("--mib", type=float, help="limit for the longest")
    parser.add_argument("--growth", type=float, default=1.25,
                        help="of what a line costs, from the shortest to the longest: caches and others on the machine")
    parser.add_argument("lines", type=int, nargs="+")
    arguments = parser.parse_args()
    rows = []
    print("     lines   CPU s   peak MiB   us/line   bytes/line")
    for lines in sorted(arguments.lines):
        seconds, peak = measure(arguments.program, arguments.writer, lines)
        rows.append((lines, seconds, peak))
        print(f"{lines:10d}  {seconds:6.2f}  {peak / 2**20:9.0f}  {seconds / lines * 1e6:8.2f}  {peak / lines:11.0f}",
              flush=True)
    (few, few_seconds, few_peak), (many, seconds, peak) = rows[0], rows[-1]
    wrong = []
    growth = arguments.growth
    if seconds / many > growth * few_seconds / few or peak / many > growth * few_peak / few:
        wrong.append("a line of the longest costs more than one of the shortest")
    if arguments.seconds and seconds > arguments.seconds:
        wrong.append(f"{seconds:.1f} s of a core, at most {arguments.seconds:g}")
    if arguments.mib and peak > arguments.mib * 2**20:
        wrong.append(f"{peak / 2**20:.0f} MiB, at most {arguments.mib:g}")
    sys.exit("scale: " + "; ".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
