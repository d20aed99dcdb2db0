"""Counts what makes a host wait for its device, on a machine that has none.

On a GPU each of these stops the host until the device has done all that is queued: reading a
number, and any operation whose size depends on the data. On a CPU they cost nothing, but they are
called all the same: as methods in Python, or as operators from within others and from the backward
pass.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
METHODS += ("nonzero", "equal", "is_nonzero", "masked_select", "unique", "allclose", "__contains__")
OPERATORS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount")
OPERATORS += ("_unique2", "unique_dim", "unique_consecutive", "repeat_interleave")


def by_mask(arguments: Any) -> bool:
    """Whether anything is indexed by a mask, whose size the host must ask for."""
    if isinstance(arguments, Tensor):
        return arguments.dtype == torch.bool
    return isinstance(arguments, (list, tuple)) and any(map(by_mask, arguments))


class Reads:
    """The waits so far, by name; ``place`` is noted with each, and may be changed."""

    def __init__(self) -> None:
        self.found: list[tuple[str | None, str]] = []
        self.place: str | None = None
        self.is_inside = False  # of a method that counts already

    def note(self, name: str) -> None:
        if not self.is_inside:
            self.found.append((self.place, name))


class _Methods(TorchFunctionMode):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = (resolve_name(func) or "").rpartition(".")[2]
        indexes = name in ("__getitem__", "__setitem__") and by_mask(args[1])
        if not indexes and name not in METHODS:
            return func(*args, **(kwargs or {}))
        self.reads.note(name)
        before, self.reads.is_inside = self.reads.is_inside, True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.reads.is_inside = before


class _Operators(TorchDispatchMode):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indexes = name in ("index", "index_put", "index_put_", "_index_put_impl_")
        if name in OPERATORS or (indexes and by_mask(args[1])):
            self.reads.note(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(reads: Reads) -> Generator[None]:
    """Count what happens inside."""
    with _Methods(reads), _Operators(reads):
        yield
