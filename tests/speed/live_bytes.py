"""Counts the memory that really is alive: bytes of storages, without a device or a profiler."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations make and that are still alive.

    What a kernel takes and gives back inside is not seen. Tensors on the meta device count like
    others, so sizes that no machine holds can be counted too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        given = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _key(tensor) not in given | self.known:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes alive at once among what ``work`` makes; what was there before does not count."""
    with LiveBytes() as live:
        work()
    return live.peak
