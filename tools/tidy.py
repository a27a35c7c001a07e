#!/usr/bin/env python3
"""Style as a test: what a reviewer should not have to look for. Prints `file:line: message`, exit 1 when there is any.

    tools/tidy.py [--library build/libqeffect.a]

Checked: sizes of files, functions and lines; words and calls that must not be there; the arrows between rooms that
ARCHITECTURE.md draws; a comment on every public function; every rule documented and tested; with --library, that the
contract core reaches for nothing but libc and libm and exports nothing but its own names.
"""
import argparse
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

FILE_LINES_MAX = 800
LINE_CHARACTERS_MAX = 120
FUNCTION_LINES_MAX = 70

TEXT_ENDINGS = (".c", ".h", ".py", ".sh", ".md", ".txt", ".cmake", ".yaml", ".yml", ".cu", ".cuh", ".cpp")
# Tables of prose lines and foreign licence text keep their own width and length.
UNMEASURED = ("LICENSE",)

# room -> the rooms it may include beside itself. Siblings are absent from each other's rows: that is the rule.
ARROWS = {
    "base": set(),
    "core": {"base"},
    "schedule": {"core", "base"},
    "plan": {"schedule", "core", "base"},
    "model": {"plan", "schedule", "core", "base"},
    "step": {"plan", "schedule", "core", "base"},
    "store": {"core", "base"},
    "config": {"base"},
    "data": {"base"},
    "backend/host": {"core", "base"},
    "backend/cuda": {"core", "base", "comm/local"}, # its transport between ranks of one process stands on that one
    "backend/te": {"backend/cuda", "core", "base"}, # it is that one, with other kernels in some ops
    "backend/check": {"core", "base"},
    "comm/local": {"core", "base"},
    "comm/mpi": {"core", "base"},
    "comm/nccl": {"core", "base"},
}
KNOWS_ALL = ("cli", "tests", "bench")

# Public headers by the room whose words they speak; one that is not listed speaks for the room of its own name.
HEADER_ROOM = {
    "status": "base", "limits": "base", "fp8": "base", "recipe": "base", "data_format": "base",
    "op": "core", "order": "core", "program": "core", "rule": "core", "ledger": "core", "trace": "core",
    "effect": "core",
    "object": "core", "backend": "core", "comm": "core", "schedule": "schedule", "simulate": "schedule",
    "draw": "schedule", "certificate": "schedule", "search": "schedule",
    "plan": "plan", "model": "model", "timed": "model", "step": "step", "memory": "step",
    "snapshot": "step", "safetensors": "store", "checkpoint": "store", "te_state": "store", "settings": "config",
    "data": "data",
    "host": "backend/host", "cuda": "backend/cuda", "te": "backend/te", "check": "backend/check", "local": "comm/local",
}

# foreign header -> rooms that may name it
FOREIGN = {
    "jansson.h": ("store", "cli", "tests"),
    "yaml.h": ("config",),
    "xxhash.h": ("base", "store"),
    "dlfcn.h": ("backend/host", "backend/cuda", "backend/te", "tests"),
    "cblas.h": ("backend/host",),
    "mpi.h": ("comm/mpi",),
    "nccl.h": ("comm/nccl",),
    "cuda_runtime.h": ("backend/cuda", "backend/te"),
}

# Split, so that this file passes its own check.
WORDS = [re.compile(rf"\b{word}\b", flags) for word, flags in (
    ("TO" + "DO", 0), ("FIX" + "ME", 0), ("XX" + "X", 0), ("HA" + "CK", 0), ("place" + "holder", re.IGNORECASE))]
MACHINE_PATH = re.compile(r"(?<![\w.$}/])/(?:home|root|work|mnt|Users)/[\w.-]+")
CALLS_EVERYWHERE = ("strcpy", "strcat", "sprintf", "vsprintf", "gets", "atoi", "atol", "atof", "strtok", "alloca")
CALLS_IN_CLI_ONLY = ("exit", "_exit", "quick_exit", "printf", "vprintf", "puts", "putchar", "perror")
# They use the default stream, for which ours do not wait, nor it for them, and may return before they are done.
CALLS_IN_TESTS_ONLY = ("cudaMemcpy", "cudaMemcpy2D", "cudaMemset", "cudaMemset2D")
STREAMS_IN_CLI_ONLY = ("stdout", "stderr")
# The one place that may print and abort below the commands: it reports a bug of our own.
LAST_WORDS = ("src/base/assert.c", "src/base/assert.h")
# A local that takes something over; a field (`object->name = strdup(...)`) belongs to its object.
OWNING_CALLS = re.compile(
    r"(?<![\w.>])\w+\s*=\s*(?:malloc|calloc|realloc|strdup|fopen|fdopen|opendir|mmap|dlopen)\s*\(")

RULE_ID = re.compile(
    r'"((?:scale|slot|weight|cache|grad|buffer|sync|schedule|step|graph|rng|seal|comm|checkpoint)\.[a-z]+)"')
FOREIGN_SYMBOL = re.compile(r"^(?:cblas_|openblas_|json_|yaml_|cuda|cublas|cudnn|nccl|MPI_|XXH|dlopen|cu[A-Z])")


class Offences:
    def __init__(self):
        self.lines = []

    def add(self, path, line, message):
        self.lines.append(f"{path}:{line}: {message}")


def repository_files():
    """Tracked and new files, without what git ignores; every file below the root where git is not at hand."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
        names = sorted(name for name in listed.decode().split("\0") if name)
    except (OSError, subprocess.CalledProcessError):
        names = sorted(walk_files())
    return [name for name in names if os.path.isfile(os.path.join(ROOT, name))]


def walk_files():
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if not f.startswith((".git", "build", "__pycache__"))]
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), ROOT)


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8", errors="replace") as file:
        return file.read()


def is_text(name):
    return name.endswith(TEXT_ENDINGS) or os.path.basename(name) in ("Makefile", "run", "LICENSE")


def room_of(name):
    """The room a file lives in: src/backend/host/x.c -> backend/host; tests/... -> tests; else None."""
    parts = name.split("/")
    if parts[0] in ("tests", "bench"):
        return parts[0]
    if parts[0] == "include" and len(parts) == 3:
        stem = os.path.splitext(parts[2])[0]
        return HEADER_ROOM.get(stem, stem)
    if parts[0] != "src" or len(parts) < 3:
        return None
    return "/".join(parts[1:3]) if parts[1] in ("backend", "comm") and len(parts) > 3 else parts[1]


def blank(match):
    """Same shape, no words: line numbers and columns stay."""
    return re.sub(r"[^\n]", " ", match.group(0))


LEXEME = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def bare_code(text):
    """C source with comments and literals blanked out."""
    return LEXEME.sub(blank, text)


def without_directives(code):
    """bare_code without preprocessor lines (continuations included), whose braces need not pair."""
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, code, flags=re.MULTILINE)


def line_at(text, index):
    return text.count("\n", 0, index) + 1


def functions(code):
    """(first line, last line, body) of each function of code that went through without_directives."""
    code = re.sub(r"\bextern\s+(?:\"C\"|   )\s*\{", blank, code)
    depth, start, opened, first, is_function, found = 0, 0, 0, 0, False, []
    for match in re.finditer(r"[{};]", code):
        token, index = match.group(0), match.start()
        if token == "{":
            if depth == 0:
                head = code[start:index]
                is_function = "(" in head and "=" not in head.split("(")[0]
                first = start + len(head) - len(head.lstrip())
                opened = index
            depth += 1
        elif token == "}":
            depth = max(0, depth - 1)
            if depth == 0:
                if is_function and opened > start:  # else it is the end of extern "C"
                    found.append((line_at(code, first), line_at(code, index), code[opened:index]))
                is_function, start = False, index + 1
        elif depth == 0:
            start = index + 1
    return found


# --- the checks: each takes what it looks at and the list of offences ---------------------------------------------

def check_sizes(name, text, offences):
    lines = text.split("\n")
    if len(lines) - 1 > FILE_LINES_MAX:
        offences.add(name, len(lines) - 1, f"the file has {len(lines) - 1} lines, at most {FILE_LINES_MAX}")
    for number, line in enumerate(lines, 1):
        told_by_a_program = name.startswith("bench/results/")
        if len(line) > LINE_CHARACTERS_MAX and not (name.endswith(".md") and "|" in line) and not told_by_a_program:
            offences.add(name, number, f"the line has {len(line)} characters, at most {LINE_CHARACTERS_MAX}")


def check_words(name, text, offences):
    for pattern in WORDS:
        for match in pattern.finditer(text):
            offences.add(name, line_at(text, match.start()), f"the word {match.group(0)} is unfinished work")
    for match in MACHINE_PATH.finditer(text):
        offences.add(name, line_at(text, match.start()), f"{match.group(0)} is a path of one machine")


def check_calls(name, code, offences):
    below_cli = name.startswith("src/") and not name.startswith("src/cli/") and name not in LAST_WORDS
    in_source = CALLS_IN_TESTS_ONLY if name.startswith("src/") else ()
    banned = CALLS_EVERYWHERE + (CALLS_IN_CLI_ONLY if below_cli else ()) + in_source
    for match in re.finditer(r"(?<![\w.>])(" + "|".join(banned) + r")\s*\(", code):
        where = " below src/cli" if match.group(1) in CALLS_IN_CLI_ONLY else ""
        offences.add(name, line_at(code, match.start()), f"{match.group(1)}() is not allowed{where}")
    if below_cli:
        for match in re.finditer(r"\b(" + "|".join(STREAMS_IN_CLI_ONLY) + r")\b", code):
            offences.add(name, line_at(code, match.start()), f"{match.group(1)} is not allowed below src/cli")


def check_functions(name, code, offences):
    for first, last, body in functions(without_directives(code)):
        if last - first + 1 > FUNCTION_LINES_MAX:
            offences.add(name, first, f"the function has {last - first + 1} lines, at most {FUNCTION_LINES_MAX}")
        owns = OWNING_CALLS.search(body)
        if owns and "QE_TRY" in body[owns.end():]:
            offences.add(name, first, "QE_TRY returns past what this function owns; use goto labels")


def included_room(target):
    parts = target.split("/")
    if parts[0] == "qeffect":
        stem = os.path.splitext(parts[-1])[0]
        return HEADER_ROOM.get(stem, stem)
    if len(parts) == 1:
        return None
    return "/".join(parts[:2]) if parts[0] in ("backend", "comm") and len(parts) > 2 else parts[0]


def check_arrows(name, text, offences):
    room = room_of(name)
    if room is None:
        return
    for match in re.finditer(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', text, re.MULTILINE):
        quote, target = match.groups()
        line = line_at(text, match.start())
        if quote == "<":
            if target in FOREIGN and room not in FOREIGN[target]:
                offences.add(name, line, f"<{target}> belongs to {' and '.join(FOREIGN[target])} alone")
            continue
        if room in KNOWS_ALL:
            continue
        other = included_room(target)
        if other is None:
            offences.add(name, line, f'"{target}" names no room; write "room/{target}"')
        elif name.startswith("include/") and not target.startswith("qeffect/"):
            offences.add(name, line, f'a public header includes the private "{target}"')
        elif room not in ARROWS:
            offences.add(name, line, f"the room {room} is not in ARROWS of tools/tidy.py")
        elif other != room and other not in ARROWS[room]:
            offences.add(name, line, f'{room} may not know {other} ("{target}")')


def check_public_comments(name, text, offences):
    """A function of a public header stands under a comment, or in one paragraph with functions that do."""
    code = without_directives(bare_code(text))
    comments = {n for match in re.finditer(r"/\*.*?\*/", text, re.DOTALL)
                for n in range(line_at(text, match.start()), line_at(text, match.end()) + 1)}
    explained, depth = False, 0
    for line, (raw, row) in enumerate(zip(text.split("\n"), code.split("\n")), 1):
        explained = bool(raw.strip()) and (explained or line in comments)
        declares = depth == 0 and re.match(r"^[a-z_][\w \t*]*\b(qe_\w+)\s*\(", row)
        if declares and not row.startswith(("typedef", "static")) and not explained:
            offences.add(name, line, f"{declares.group(1)} has no comment")
        depth += row.count("{") - row.count("}")
        if 'extern "C"' in raw:
            depth = 0


def check_rules(names, offences):
    """Every rule of the catalogue is in docs/rules.md and named by a test, as its id or as its constant."""
    catalogue = "src/core/rule.c"
    if catalogue not in names:
        return
    text = read(catalogue)
    document = read("docs/rules.md") if "docs/rules.md" in names else ""
    tests = "\n".join(read(name) for name in names if name.startswith("tests/") and is_text(name))
    seen = set()
    for match in RULE_ID.finditer(text):
        rule, line = match.group(1), line_at(text, match.start())
        if rule in seen:
            continue
        seen.add(rule)
        if not re.search(rf"(?<![\w.]){re.escape(rule)}(?![\w.]*\w)", document):
            offences.add(catalogue, line, f"{rule} is not in docs/rules.md")
        constant = "QE_RULE_" + rule.upper().replace(".", "_")
        if not re.search(rf"(?<![\w.]){re.escape(rule)}\b|\b{constant}\b", tests):
            offences.add(catalogue, line, f"{rule} is in no test")


def check_private_headers(names, offences):
    """A header that nothing includes is dead."""
    sources = "\n".join(read(name) for name in names if name.endswith((".c", ".h", ".cu", ".cpp", ".cuh")))
    for name in names:
        if name.startswith("src/") and name.endswith(".h") and f'"{name[4:]}"' not in sources:
            offences.add(name, 1, "nothing includes this header")


def check_library(path, offences):
    try:
        listed = subprocess.run(["nm", "-g", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        offences.add(path, 1, f"nm failed: {error}")
        return
    for line in listed.decode().split("\n"):
        match = re.match(r"^[0-9a-f ]*\s([A-Za-z])\s(\S+)$", line)
        if match and match.group(1) == "U" and FOREIGN_SYMBOL.match(match.group(2)):
            offences.add(path, 1, f"the contract core reaches for {match.group(2)}")
        if match and match.group(1) in "TDBRGSC" and not match.group(2).startswith(("qe_", "__asan", "__odr_asan")):
            offences.add(path, 1, f"the contract core exports {match.group(2)}, which is no name of ours")


def main():
    parser = argparse.ArgumentParser(description="style as a test", epilog="exit status: 0 clean, 1 offences")
    parser.add_argument("--library", help="libqeffect.a, to check its symbols with nm")
    options = parser.parse_args()
    offences, names = Offences(), repository_files()
    for name in (name for name in names if is_text(name)):
        text = read(name)
        check_words(name, text, offences)
        if name not in UNMEASURED:
            check_sizes(name, text, offences)
        if name.endswith((".c", ".h", ".cu", ".cuh", ".cpp")):
            code = bare_code(text)
            check_calls(name, code, offences)
            check_functions(name, code, offences)
            check_arrows(name, text, offences)
        if name.startswith("include/"):
            check_public_comments(name, text, offences)
    check_rules(names, offences)
    check_private_headers(names, offences)
    if options.library:
        check_library(options.library, offences)
    for line in offences.lines:
        print(line)
    print(f"tidy: {len(names)} files, {len(offences.lines)} offences")
    return 1 if offences.lines else 0


if __name__ == "__main__":
    sys.exit(main())
