#!/usr/bin/env python3
"""Which share of small faults in the sources of the contract core its own tests notice.

A mutant is one change in one line of the ledger, of programs and traces and their violations: a comparison, an
operator, a constant, or a statement left out. Lines are left alone that only our own bugs (QE_ASSERT) or a lack of
memory (make check-faults) can reach, or that give memory back (make check-sanitize). A mutant that does not compile is
none. It is killed when a test of tests/unit/core fails, crashes or does not end. Survivors are printed with what was
changed. Those that change nothing that a test without sanitizers could see stand in equivalent.txt with the reason;
they are not tried, and count apart.

    mutants.py [--count 100] [--seed 1] [--least 0.9] [--only src/core/ledger.c]
"""
import argparse
import glob
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

FLAGS = ["-std=c17", "-D_GNU_SOURCE", "-O2", "-w", "-ffp-contract=off", "-fvisibility=hidden", "-Iinclude", "-Isrc",
         "-Itests"]
# The quick ones first: most mutants fall to them.
TESTS = ["ledger_rules", "ledger_issue", "graphs", "memory", "violations", "history", "program", "rule",
         "traces", "order", "trace_read", "recipe", "ledger_random", "oracle"]
ARGUMENTS = {"oracle": ["short", "3000"]}
SECONDS = 100  # of one test, where none takes five: a loop without end is killed, too, on a busy machine as well
SWAPS = [(" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" == ", " != "), (" != ", " == "),
         (" && ", " || "), (" || ", " && "), (" + ", " - "), (" - ", " + "), ("++", "--"), (" += ", " -= "),
         (" |= ", " &= "), (" & ", " | "), ("return 0;", "return 1;"), ("return 1;", "return 0;"), (" = 1;", " = 0;"),
         (" = 0;", " = 1;"), (" ? ", " == 0 ? "), ("if (", "if (1 || "), ("if (", "if (0 && ")]
LEFT_OUT = "(left out)"
# Images and assertions for tests, and what other rooms use and test.
ELSEWHERE = {"src/core/" + name for name in ["ledger_valid.c", "op.c", "op_layout.c", "order.c", "recipe.c"]}
UNTOUCHED = re.compile(r"QE_ASSERT|QE_STATIC_ASSERT|NULL|QE_ERROR_MEMORY|^\s*(//|/?\*|#)|^\S*static const|"
                       r"qe_error_set|put\(|free\(|_deinit\(|_destroy\(|QE_LEDGER_VALID")


def line_of(path, number):
    return open(path).read().split("\n")[number].strip()


def equivalent_mutants():
    """Entries `FILE`, `- line`, `+ changed line`, long ones going on behind two blanks; `# ...` is a reason."""
    entries, path = [], ""
    with open("tests/mutants/equivalent.txt", encoding="utf-8") as file:
        for text in file.read().split("\n"):
            if text.startswith("src/"):
                path = text
            elif text.startswith("- "):
                entries.append([path, text[2:]])
            elif text.startswith("+ "):
                entries[-1].append("" if text[2:] == LEFT_OUT else text[2:])
            elif text.startswith("  "):
                entries[-1][-1] += text[1:]
    return {tuple(entry) for entry in entries}


def mutants_of(path):
    """(line number, new line) of every change."""
    found = []
    for number, line in enumerate(open(path).read().split("\n")):
        if UNTOUCHED.search(line) or not line.startswith("    "):
            continue
        code = line.split("/*")[0]
        for old, new in SWAPS:
            at = code.find(old)
            while at >= 0:
                changed = code[:at] + new + code[at + len(old):]
                if new.endswith(("|| ", "&& ")) and old == "if (":
                    changed = close_condition(changed, at, new)
                found.append((number, changed))
                at = code.find(old, at + 1)
        if re.match(r"^\s+[a-z][^=]*\(.*\);$", code.rstrip()) and "return" not in code and " if " not in code:
            found.append((number, ""))
    return found


def close_condition(line, at, new):
    """`if (0 && a || b)` would still be b: the old condition keeps its brackets."""
    begin, depth = at + len(new), 1
    for i in range(begin, len(line)):
        depth += (line[i] == "(") - (line[i] == ")")
        if depth == 0:
            return line[:begin] + "(" + line[begin:i] + ")" + line[i:]
    return line


def run(command, **more):
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **more).returncode


def compile_to(source, folder):
    target = os.path.join(folder, source.replace("/", "_") + ".o")
    return target if run(["cc", *FLAGS, "-c", source, "-o", target]) == 0 else None


class Bench:
    def __init__(self, folder):
        self.folder = folder
        sources = glob.glob("src/base/*.c") + glob.glob("src/core/*.c") + glob.glob("tests/oracle/*.c")
        self.objects = {source: compile_to(source, folder) for source in sources}
        self.tests = {test: compile_to(f"tests/unit/core/test_{test}.c", folder) for test in TESTS}
        if None in self.objects.values() or None in self.tests.values():
            sys.exit("mutants: the sources do not compile")

    def passes(self, test, objects):
        program = os.path.join(self.folder, test)
        if run(["cc", "-o", program, self.tests[test], *objects.values(), "-lcmocka", "-lm", "-lpthread"]) != 0:
            sys.exit(f"mutants: {test} does not link")
        try:
            return run([program, *ARGUMENTS.get(test, [])], timeout=SECONDS) == 0
        except subprocess.TimeoutExpired:
            return False

    def killer(self, objects):
        """The first test that fails, or None."""
        return next((test for test in TESTS if not self.passes(test, objects)), None)

    def try_mutant(self, path, number, line):
        """The test that kills it, None where it survives, or "invalid"."""
        lines = open(path).read().split("\n")
        lines[number] = line
        copy = os.path.join(self.folder, "mutant.c")
        with open(copy, "w") as file:
            file.write("\n".join(lines))
        target = compile_to(copy, self.folder)
        if target is None:
            return "invalid"
        return self.killer({**self.objects, path: target})


def main():
    parser = argparse.ArgumentParser(description="source mutants of src/core")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--least", type=float, default=0.0, help="share that must be killed")
    parser.add_argument("--only", default="", help="change this source alone")
    arguments = parser.parse_args()
    everything = [(path, *change) for path in sorted(set(glob.glob("src/core/*.c")) - ELSEWHERE)
                  for change in mutants_of(path) if arguments.only in ("", path)]
    gone = equivalent_mutants() - {(path, line_of(path, number), line.strip()) for path, number, line in everything}
    if gone and not arguments.only:
        sys.exit(f"mutants: equivalent.txt tells of lines that are not there: {sorted(gone)[0]}")
    random.Random(arguments.seed).shuffle(everything)
    folder = tempfile.mkdtemp()
    try:
        sys.exit(measure(Bench(folder), everything, arguments))
    finally:
        shutil.rmtree(folder)


def measure(bench, everything, arguments):
    broken = bench.killer(bench.objects)
    if broken is not None:
        return f"mutants: {broken} fails without a mutant"
    killed, tried, equivalent, by_test = 0, 0, 0, {}
    known = equivalent_mutants()
    for path, number, line in everything:
        if tried == arguments.count:
            break
        if (path, line_of(path, number), line.strip()) in known:
            equivalent += 1
            continue
        killer = bench.try_mutant(path, number, line)
        if killer == "invalid":
            continue
        tried += 1
        killed += killer is not None
        by_test[killer] = by_test.get(killer, 0) + 1
        if killer is None:
            change = line.strip() or LEFT_OUT
            print(f"{tried - killed} of {tried} survive: {path}:{number + 1}: {change}", flush=True)
    told = ", ".join(f"{test} {count}" for test, count in by_test.items() if test)
    print(f"mutants: {killed} of {tried} killed ({killed / tried:.1%}) of {len(everything)}; {equivalent} more are "
          f"equivalent; first by {told}")
    return 0 if killed >= arguments.least * tried else f"mutants: fewer than {arguments.least:.0%}"


if __name__ == "__main__":
    main()
