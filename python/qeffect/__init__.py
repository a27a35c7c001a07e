"""QEffect: declares the hidden state of low-precision pipeline training as versioned objects, proves a schedule against
them before it runs, and checks every submission while it runs.

    import qeffect
    qeffect.Schedule.generate("zbh1", ranks=4, microbatches=8).certify(memory_limit=5)
    qeffect.check_trace("qeffect-trap.qet").raise_if_broken()

Everything here is libqeffect, called through its public headers (docs/python.md). `qeffect.torch` needs torch,
`qeffect.te` Transformer Engine, `qeffect.torchtitan` TorchTitan.
"""
from ._api import lib as _lib
from .errors import (ArgumentError, ContractError, Error, FileError, FormatError, LimitError, OutOfMemoryError,
                     QEffectWarning, UnsupportedError)
from .ledger import Ledger, Submission
from .memory import Span, span, view
from .plan import Decoder, Plan, Pool, Stages, Unit, slot_counts
from .program import (Buffer, Cache, Effect, Event, Grad, Graph, Object, Program, Rng, Scale, Slot, Stream, Weight,
                      check_trace)
from .schedule import (Action, Certificate, Found, Peak, Schedule, SimulatedRank, Simulation, StageCost, search,
                       simulate)
from .verdict import Place, Verdict, Violation, rules

__version__ = "0.1.0"
EFFECTS_MAX: int = _lib.QE_EFFECTS_MAX

__all__ = [
    "Action", "ArgumentError", "Buffer", "Cache", "Certificate", "ContractError", "Decoder", "EFFECTS_MAX", "Effect",
    "Error", "Event", "FileError", "FormatError", "Found", "Grad", "Graph", "Ledger", "LimitError", "Object",
    "OutOfMemoryError", "Peak", "Place", "Plan", "Pool", "Program", "QEffectWarning", "Rng", "Scale", "Schedule",
    "SimulatedRank", "Simulation", "Slot", "Span", "StageCost", "Stages", "Stream", "Submission", "UnsupportedError",
    "Unit", "Verdict", "Violation", "Weight", "__version__", "check_trace", "rules", "search", "simulate",
    "slot_counts", "span", "view",
]
