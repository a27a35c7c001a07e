"""torch, or a clear word about what is missing."""
from __future__ import annotations

import re

from ..errors import UnsupportedError

OLDEST = (2, 11)

try:
    import torch as torch  # for the rest of this package
except ImportError as error:
    raise UnsupportedError("qeffect.torch needs torch 2.11 or newer, which is not installed",
                           remedy="pip install 'torch>=2.11'", status="unsupported") from error


def version() -> tuple[int, int]:
    """(major, minor) of torch."""
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


if version() < OLDEST:
    raise UnsupportedError(f"qeffect.torch needs torch {OLDEST[0]}.{OLDEST[1]} or newer; this is {torch.__version__}",
                           status="unsupported")
