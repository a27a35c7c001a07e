"""torch modules under contract: pipeline stages with explicit F, I and W, captured per slot (docs/torch.md).

Needs torch 2.11 or newer. Everything but true capture runs on a CPU, too.
"""
from . import _need as _need  # first: it says what is missing
from .callables import make_graphed_callables
from .contract import Contract
from .optimizer import StepGuard
from .pipeline import Pipeline
from .stage import Stage
from .trap import Trap
from .watch import Watch

__all__ = ["Contract", "Pipeline", "Stage", "StepGuard", "Trap", "Watch", "make_graphed_callables"]
