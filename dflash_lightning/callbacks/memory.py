"""What a batch takes: seconds and memory, the most of all ranks."""

import os
import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import lightning as L
import torch
from torch import Tensor

# What memory that ran out is called where it is no torch.OutOfMemoryError: cuBLAS, the host.
OUT_OF_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
EXPAND = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
LARGE_GAP = 0.1  # share of the card that is reserved and not used


class Memory(NamedTuple):
    """Bytes, the most of all ranks.

    Args:
        peak: Most allocated by torch at once; without a GPU, what the process grew by.
        reserved: Most held by torch's allocator.
        outside: Held on the card by others: CUDA itself, NCCL, other processes.
        card: Size of the smallest card; 0 without a GPU.
    """

    peak: int
    reserved: int
    outside: int
    card: int

    @property
    def left(self) -> int:
        """What stays free on the card at the peak."""
        return self.card - self.outside - self.reserved

    @property
    def gap(self) -> int:
        """Reserved and not in use: what fragmentation costs."""
        return self.reserved - self.peak

    @property
    def is_fragmented(self) -> bool:
        """Whether that is much, and torch's allocator is not told to avoid it."""
        return self.gap > LARGE_GAP * self.card and not segments_expand()


class Meter:
    """Seconds and memory of the batches, agreed on by all ranks.

    Args:
        trainer: Its strategy reduces.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.device = trainer.strategy.root_device
        self.reduce: Callable[..., Tensor] = trainer.strategy.reduce
        self.is_cuda = self.device.type == "cuda"
        self.most = Memory(0, 0, 0, 0)
        self.seconds = 0.0
        self._began = 0.0
        self._resident = resident_bytes()

    def start(self) -> None:
        """Begin with one batch."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._began = time.perf_counter()

    def stop(self, *, failed: bool) -> Memory | None:
        """End a batch on all ranks together: its memory, or None where it failed on any of them."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
        self.seconds = time.perf_counter() - self._began
        own = self._own()
        if failed and self.is_cuda:
            torch.cuda.empty_cache()
        # the smallest card is the largest of the negatives
        numbers = torch.tensor([failed, *own[:3], -own.card], dtype=torch.int64, device=self.device)
        reduced = self.reduce(numbers, reduce_op="max").tolist()
        any_failed, peak, reserved, outside, card = reduced
        memory = Memory(peak, reserved, outside, -card)
        self.most = Memory(*map(max, memory, self.most))
        return None if any_failed else memory

    def close(self) -> None:
        """Give back what is cached, and let later peaks count from zero."""
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def _own(self) -> Memory:
        """This rank's memory since the batch began."""
        if not self.is_cuda:
            return Memory(resident_bytes() - self._resident, 0, 0, 0)
        free, card = torch.cuda.mem_get_info(self.device)
        return Memory(
            peak=torch.cuda.max_memory_allocated(self.device),
            reserved=torch.cuda.max_memory_reserved(self.device),
            outside=card - free - torch.cuda.memory_reserved(self.device),
            card=card,
        )


def resident_bytes() -> int:
    """Most memory that this process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def segments_expand() -> bool:
    """Whether torch's allocator is told to avoid fragmentation."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return any("expandable_segments:True" in os.environ.get(name, "") for name in names)


def summary(memory: Memory, world_size: int) -> str:
    """The peak, in words."""
    ranks = f", the most of {world_size} ranks" if world_size > 1 else ""
    if not memory.card and not memory.peak:
        return f"the process needed no more memory than it held before{ranks}"
    if not memory.card:
        return f"the process grew by {gigabytes(memory.peak)}{ranks}"
    return (
        f"peak {gigabytes(memory.peak)}, with {gigabytes(memory.reserved)} reserved of "
        f"{gigabytes(memory.card)}, {gigabytes(memory.left)} left{ranks}"
    )


def out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that memory ran out."""
    is_torchs = isinstance(error, torch.OutOfMemoryError)
    return is_torchs or any(word in str(error) for word in OUT_OF_MEMORY)


def gigabytes(size: int) -> str:
    """Bytes in words.

    >>> gigabytes(61_240_000_000), gigabytes(3_500_000)
    ('61.2 GB', '3.5 MB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
