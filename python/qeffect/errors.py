"""How a call says what went wrong: an operating error names the cause and the way out, a breach of contract carries
its records."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from ._api import ffi, lib

if TYPE_CHECKING:
    from .verdict import Verdict, Violation


class QEffectWarning(UserWarning):
    """Something is right and slower, or larger, than it has to be."""


class Error(Exception):
    """A call that was refused; nothing has changed.

    Attributes: `status` ("argument", "format", ...), `message` (what was found and what was expected), `remedy` (what
    to do; may be empty), `path`, `line`, `column` (the place in a file; "", 0, 0 where there is none).
    """

    def __init__(self, message: str, *, status: str = "argument", remedy: str = "", path: str = "", line: int = 0,
                 column: int = 0) -> None:
        place = path + (f":{line}" if line else "") + (f":{column}" if column else "")
        super().__init__((f"{place}: " if place else "") + message + (f" ({remedy})" if remedy else ""))
        self.status, self.message, self.remedy = status, message, remedy
        self.path, self.line, self.column = path, line, column


class ArgumentError(Error, ValueError):
    """A value that the caller passed is impossible."""


class LimitError(Error, ValueError):
    """A named limit (include/qeffect/limits.h) is exceeded."""


class OutOfMemoryError(Error, MemoryError):
    """The allocator said no."""


class FileError(Error):
    """The operating system refused a read or a write."""


class FormatError(Error, ValueError):
    """A file's content is malformed; `line` and `column` say where."""


class UnsupportedError(Error, NotImplementedError):
    """This build, machine or version cannot do it."""


class ContractError(Error):
    """A rule of docs/rules.md is broken.

    `rule` is its id ("slot.live"), `violations` the records, first in program order first; `counterexample` is the
    irreducible set of facts, as text, where a schedule was refused ("" otherwise). `trace` is the effect history that
    reproduces the verdict offline (`qeffect trace check`), where a ledger refused ("" otherwise).
    """

    def __init__(self, message: str, *, rule: str, violations: tuple["Violation", ...] = (), counterexample: str = "",
                 trace: str = "") -> None:
        super().__init__(message, status="contract")
        self.rule, self.violations, self.counterexample, self.trace = rule, violations, counterexample, trace

    @classmethod
    def of(cls, verdict: "Verdict", trace: str = "") -> "ContractError":
        """Requires: the verdict has a violation."""
        more = f" (and {verdict.total - 1} more)" if verdict.total > 1 else ""
        return cls(verdict.violations[0].text + more, rule=verdict.violations[0].rule, violations=verdict.violations,
                   trace=trace)


_KINDS: dict[int, type[Error]] = {
    lib.QE_ERROR_ARGUMENT: ArgumentError,
    lib.QE_ERROR_LIMIT: LimitError,
    lib.QE_ERROR_MEMORY: OutOfMemoryError,
    lib.QE_ERROR_IO: FileError,
    lib.QE_ERROR_FORMAT: FormatError,
    lib.QE_ERROR_UNSUPPORTED: UnsupportedError,
}


def text_of(characters: Any) -> str:
    """A C string as text; bytes that are no UTF-8 are shown as escapes."""
    return str(ffi.string(characters).decode("utf-8", "backslashreplace"))


def c_text(text: str) -> bytes:
    """A name as C takes it. Raises: ArgumentError where it is no text, holds NUL, which would end it, or what UTF-8
    does not know."""
    if not isinstance(text, str):
        raise ArgumentError(f"{text!r} is no text")
    try:
        characters = text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{text!r} cannot be written as UTF-8: {error.reason}") from error
    if b"\0" in characters:
        raise ArgumentError(f"{text!r} holds a character NUL")
    return characters


def new_error() -> Any:
    return ffi.new("qe_error *")


def check(status: int, error: Optional[Any] = None) -> None:
    """Raises what a status other than QE_OK stands for. A QE_CONTRACT with records is raised by whoever has them."""
    if status == lib.QE_OK:
        return
    name = text_of(lib.qe_status_name(status))
    if error is None or error.status == lib.QE_OK:
        raise _KINDS.get(status, Error)(f"the library answered: {name}", status=name)
    if status == lib.QE_CONTRACT:
        raise ContractError(text_of(error.message), rule="")
    raise _KINDS.get(status, Error)(text_of(error.message), status=name, remedy=text_of(error.remedy),
                                    path=text_of(error.path), line=error.line, column=error.column)
