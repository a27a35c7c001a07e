"""torch's own functions of C for what is asked at every replay: where a tensor's bytes lie, what it looks like.

They take the at::Tensor within torch's Python object. Where that is, and that they answer as torch's Python does, is
found out here on tensors of every kind that they are asked about; where this torch is another one inside, and for
tensors of other kinds, Python's ways are taken."""
from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import Any, Callable, Optional, Sequence

from .._seal import Places, Torch, attributes
from ._need import torch

_NAMES = ("aoti_torch_get_data_ptr", "aoti_torch_get_dim", "aoti_torch_get_sizes", "aoti_torch_get_dtype",
          "aoti_torch_get_device_type", "aoti_torch_get_device_index")  # of torch's stable interface for C
_KINDS = (torch.Tensor, torch.nn.Parameter)  # their objects are torch's alone; subclasses may answer otherwise
_WORD = ctypes.sizeof(ctypes.c_void_p)


@cache
def inside() -> Optional[Torch]:
    """None where torch is not as it is known here."""
    probes = [torch.zeros(3), torch.nn.Parameter(torch.zeros(2, 2)), torch.zeros(5, dtype=torch.float64)[2:],
              torch.zeros(1, 4, dtype=torch.int8), torch.zeros(()), torch.zeros(3, 0).requires_grad_()]
    try:
        library = ctypes.CDLL(torch._C.__file__)
        functions = tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _NAMES)
        offsets = [at for at in range(_WORD, torch.Tensor.__basicsize__, _WORD)
                   if all(ctypes.c_size_t.from_address(id(p) + at).value == p._cdata for p in probes)]
    except (AttributeError, OSError, TypeError):
        return None
    if len(offsets) != 1:
        return None
    made = Torch(offsets[0], _KINDS, functions)
    return made if _agrees(made, probes) else None


def _agrees(made: Torch, probes: list[Any]) -> bool:
    """It answers as torch's Python does, and tells every probe from every other."""
    for probe in probes:
        there, elsewhere = (Places(({"probe": probe},), ("probe",), (probe,), (address,), made)
                            for address in (probe.data_ptr(), probe.data_ptr() + 1))
        if (there.changed(), elsewhere.changed()) != (-1, 0):
            return False
    looks = [made.look(probe) for probe in probes]
    return (None not in looks and len(set(looks)) == len(probes) and made.fit(tuple(looks), probes)
            and looks[0] == made.look(torch.ones(3)))


def is_plain(tensor: Any) -> bool:
    """`inside` may be asked about it: its Python object is torch's own."""
    return type(tensor) in _KINDS


def count_writes(tensors: Sequence[Any]) -> Callable[[], tuple[int, ...]]:
    """What tells how often each of the tensors was written, as torch counts it."""
    return partial(attributes, tuple(tensors), "_version")


def fitting(examples: Sequence[Any]) -> Callable[[Sequence[Any]], bool]:
    """What tells whether arguments look like these: shape, dtype, device. False: not so, or it takes a closer look."""
    own = inside()
    looks = () if own is None else tuple(map(own.look, examples))
    if own is None or None in looks:
        return lambda arguments: False
    return partial(own.fit, looks)
