"""A breach as torch's user meets it: which module, which microbatch, which line submitted the work."""
from __future__ import annotations

import contextlib
import os
import sys
from typing import Optional

from ..errors import ContractError
from ._need import torch

# Frames of ours and of torch submit nothing themselves, nor does what enters our context managers: the line that
# matters is the first one outside.
_OWN = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
        os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, contextlib.__file__)


def submitted_at() -> str:
    """`file:line` of the caller outside qeffect and torch; "" where no Python code submitted the work (the threads of
    the autograd engine)."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN) and not name.startswith("<"):
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


class Trap(ContractError):
    """A breach of contract. Beside what ContractError has: `module` (its full name), `microbatch` (None: none),
    `submitted` (`file:line` that submitted the work; of a backward without Python frames, of its forward)."""

    def __init__(self, error: ContractError, module: str, microbatch: Optional[int], submitted: str) -> None:
        where = f"module {module}" + (f", microbatch {microbatch}" if microbatch is not None else "")
        line = f", submitted at {submitted}" if submitted else ""
        super().__init__(f"{error.message}\n  {where}{line}", rule=error.rule, violations=error.violations,
                         counterexample=error.counterexample, trace=error.trace)
        self.module, self.microbatch, self.submitted = module, microbatch, submitted


def breach(rule: str, message: str, module: str, microbatch: Optional[int], submitted: str) -> Trap:
    """A trap for what was found on the host beside the ledger, by the rule that it breaks."""
    return Trap(ContractError(f"{rule}: {message}", rule=rule), module, microbatch, submitted)
