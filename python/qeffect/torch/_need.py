"""torch, or a clear word about what is missing."""
from __future__ import annotations

import re

from ..errors import UnsupportedError

OLDEST = (2, 11)

try:
    import torch as torch  # for the rest of this package
except Exception as error:  # a library that it loads may lack or be another, which is told in many ways
    raise UnsupportedError(f"qeffect.torch needs torch 2.11 or newer, which is not installed or does not load: {error}",
                           remedy="pip install 'torch>=2.11'", status="unsupported") from error

VERSION = str(getattr(torch, "__version__", "of no version"))


def version() -> tuple[int, int]:
    """(major, minor) of torch."""
    match = re.match(r"(\d+)\.(\d+)", VERSION)
    return (int(match[1]), int(match[2])) if match else (0, 0)


if version() < OLDEST:
    raise UnsupportedError(f"qeffect.torch needs torch {OLDEST[0]}.{OLDEST[1]} or newer; this is {VERSION}",
                           status="unsupported")
