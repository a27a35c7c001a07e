"""Text in and out of C functions that read and write files."""
from __future__ import annotations

import os
from typing import Any, Callable, Union

from ._api import ffi, lib
from .errors import FileError

Source = Union[str, "os.PathLike[str]"]


def load(source: Source, is_text: Callable[[str], bool]) -> tuple[bytes, str]:
    """(content, name for messages) of a path, or of text that is given itself."""
    if isinstance(source, str) and is_text(source):
        return source.encode("utf-8", "surrogateescape"), "<text>"
    path = os.fspath(source)
    try:
        with open(path, "rb") as file:
            return file.read(), path
    except OSError as error:
        raise FileError(error.strerror or str(error), status="io", path=path) from error


def with_reader(content: bytes, use: Callable[[Any], None]) -> None:
    """Calls use(FILE *) on the content."""
    memory = ffi.from_buffer("char[]", content) if content else ffi.new("char[1]")
    file = lib.fmemopen(memory, max(1, len(content)), b"r") if content else lib.fmemopen(memory, 1, b"w+")
    if file == ffi.NULL:
        raise FileError("no stream in memory could be opened", status="io")
    try:
        use(file)
    finally:
        lib.fclose(file)


def written(use: Callable[[Any], None]) -> str:
    """The text that use(FILE *) writes."""
    text, size = ffi.new("char **"), ffi.new("size_t *")
    file = lib.open_memstream(text, size)
    if file == ffi.NULL:
        raise FileError("no stream in memory could be opened", status="io")
    try:
        use(file)
    finally:
        lib.fclose(file)
        content = bytes(ffi.buffer(text[0], size[0])) if text[0] != ffi.NULL else b""
        lib.free(text[0])
    return content.decode("utf-8", "backslashreplace")
