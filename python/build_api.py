#!/usr/bin/env python3
"""Writes the C source of qeffect._api, the compiled door from Python to libqeffect, out of the public headers.

The declarations are the headers themselves, run through the C preprocessor, so that they are never written twice; the
C compiler then holds every constant, layout and prototype that cffi assumes against the headers once more.
"""
import argparse
import subprocess
import tempfile
from pathlib import Path

from cffi import FFI
from pycparser import c_ast, c_generator, c_parser

# What Python may call: contracts, schedules, plans. Backends and files of training are the C program's.
HEADERS = ("status", "limits", "program", "rule", "ledger", "trace", "order", "schedule", "simulate", "certificate",
           "search", "draw", "recipe", "plan", "model", "timed")
# cffi knows these; they only have to be there for the preprocessor and the parser.
LIBC_HEADERS = ("stddef.h", "stdint.h", "stdio.h")
KNOWN_TYPES = ("size_t", "int8_t", "uint8_t", "int16_t", "uint16_t", "int32_t", "uint32_t", "int64_t", "uint64_t",
               "FILE")
# Text goes in and out through streams in memory; QE_NONE is a macro, which the preprocessor has replaced.
EXTRA = """
#define QE_NONE ...
FILE *fmemopen(void *buffer, size_t size, const char *mode);
FILE *open_memstream(char **text_out, size_t *size_out);
int fclose(FILE *file);
void free(void *memory);
"""


def preprocess(compiler: str, include: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        for name in LIBC_HEADERS:
            (Path(folder) / name).touch()
        source = "".join(f'#include "qeffect/{name}.h"\n' for name in HEADERS)
        command = [compiler, "-E", "-P", "-nostdinc", f"-I{folder}", f"-I{include}", "-D__attribute__(x)=",
                   "-U__GNUC__", "-x", "c", "-"]
        return subprocess.run(command, input=source, stdout=subprocess.PIPE, check=True, text=True).stdout


def declarations(text: str) -> str:
    """Everything but bodies of inline functions, which cffi takes as prototypes."""
    known = "".join(f"typedef int {name};\n" for name in KNOWN_TYPES)
    generator = c_generator.CGenerator()
    found = []
    for node in c_parser.CParser().parse(known + text).ext[len(KNOWN_TYPES):]:
        if isinstance(node, c_ast.Pragma):
            continue
        if isinstance(node, c_ast.FuncDef):
            node = node.decl
            node.storage, node.funcspec = [], []
        found.append(generator.visit(node) + ";")
    return "\n".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", required=True, type=Path)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    ffi = FFI()
    ffi.cdef(declarations(preprocess(options.compiler, options.include)) + EXTRA)
    includes = "".join(f'#include "qeffect/{name}.h"\n' for name in HEADERS)
    ffi.set_source("qeffect._api", "#include <stdlib.h>\n" + includes)
    ffi.emit_c_code(options.output)


if __name__ == "__main__":
    main()
