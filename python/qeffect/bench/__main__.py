"""python -m qeffect.bench FIGURE: one line of JSON. Each figure in a process of its own: compiled helpers of earlier
shapes would slow later ones down."""
from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Optional, Sequence

from .case import AT_MOST_MS, PEERS, TURNS


def run(figure: str, turns: int, peers: Sequence[str]) -> dict[str, Any]:
    if figure == "checks":
        from .checks import run as run_checks
        return run_checks()
    import torch
    if figure == "memory":
        from .memory import run as run_memory
        found = run_memory()
    elif figure == "placement":
        from .placement import run as run_placement
        found = run_placement()
    else:
        from .layer import run as run_layer
        found = run_layer(figure, turns, peers)
    import transformer_engine
    return {**found, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "transformer_engine": str(transformer_engine.__version__)}


def main(arguments: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m qeffect.bench", description="Transformer Engine under QEffect "
                                     "beside its own graphs, on one GPU. Times in ms, medians of turns.")
    parser.add_argument("figure", choices=[*AT_MOST_MS, "memory", "placement", "checks"],
                        help="a shape: one layer, forward and backward; memory: graphs of 8 and 32 microbatches; "
                        "placement: gradients placed directly, or handed over; checks: host time of checks alone, "
                        "with torch's own modules, on a CPU too")
    parser.add_argument("--turns", type=int, default=TURNS, help="how often each work of a shape is timed")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS), help="of a shape")
    options = parser.parse_args(arguments)
    lacking = _lacking(options.figure)
    if lacking:
        print(f"qeffect.bench: needs {lacking}", file=sys.stderr)
        return 1
    print(json.dumps(run(options.figure, options.turns, options.peers)))
    return 0


def _lacking(figure: str) -> str:
    """What the figure needs and is not here; "": nothing."""
    try:
        import torch
        if figure == "checks":
            return ""
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        return f"torch and Transformer Engine 2.20: {error}"
    return "" if torch.cuda.is_available() else "a GPU"


if __name__ == "__main__":
    sys.exit(main())
