"""Context features on disk: small data runs the target once per row, not once per epoch.

A folder with ``features.bin`` (bfloat16 ``[tokens, F]``, rows at the store's offsets) and
``meta.json``, which is written last and holds the key: features of another target, dtype, layers
or rows are refused.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from dflash_lightning.data.store import RowStore
from dflash_lightning.target import HFTarget, compute_dtype


class FeatureCache:
    """Features of every row of a store under one target.

    Args:
        store: The rows.
        target: Loaded; its fingerprint and dtype are part of the key.
        layer_ids: Target layers, in order.

    Raises:
        ValueError: If files with this key disagree with it, or the disk is too small.
    """

    BATCH_TOKENS = 2048

    def __init__(self, store: RowStore, target: HFTarget, layer_ids: Sequence[int]) -> None:
        self.store, self.target, self.layer_ids = store, target, tuple(layer_ids)
        self.width = len(self.layer_ids) * target.config.hidden_size
        self.key = {
            "target": target.fingerprint,
            "dtype": str(compute_dtype(target.dtype, target.model.device)),
            "layer_ids": list(self.layer_ids),
            "store": store.fingerprint,
        }
        short = "-".join([target.fingerprint[:8], *map(str, layer_ids)])
        self.folder = store.path / f"features-{short}"
        self._map: np.memmap | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return int(self.store.offsets[-1]) * self.width * 2

    def build(self, rank: int, world_size: int, barrier: Callable[[], object]) -> None:
        """Compute the features unless they are there: each rank a share, meeting at ``barrier``."""
        complete = self._complete()
        if not complete:
            self._check_disk()  # on every rank: one that refuses alone leaves the others waiting
        barrier()
        if complete:
            return
        if rank == 0:
            self._reserve()
        barrier()
        self._compute(rank, world_size)
        barrier()
        if rank == 0:
            (self.folder / "meta.json").write_text(json.dumps(self.key))
        barrier()

    def _compute(self, rank: int, world_size: int) -> None:
        features = self._open("r+")
        batches = list(self._batches())[rank::world_size]
        total = sum(int(self.store.lengths[rows].sum()) for rows in batches)
        bar = tqdm(
            total=total,
            unit="tok",
            unit_scale=True,
            desc="features",
            disable=None if rank == 0 else True,
        )
        for rows in batches:
            ids = [self.store.row(row)[0] for row in rows]
            padded = np.zeros((len(rows), max(map(len, ids))), dtype=np.int64)
            for line, row_ids in zip(padded, ids, strict=True):
                line[: len(row_ids)] = row_ids
            input_ids = torch.from_numpy(padded).to(self.target.model.device)
            out = self.target.context_features(input_ids, self.layer_ids)
            out = out.to(torch.bfloat16).cpu().view(torch.int16).numpy()
            for row, row_ids, values in zip(rows, ids, out, strict=True):
                start = self.store.offsets[row]
                features[start : start + len(row_ids)] = values[: len(row_ids)]
            bar.update(sum(map(len, ids)))
        features.flush()
        bar.close()

    def row(self, index: int) -> Tensor:
        """Features of a row, bfloat16 ``[T, F]``."""
        if self._map is None:
            self._map = self._open("r")
        part = self._map[self.store.offsets[index] : self.store.offsets[index + 1]]
        return torch.from_numpy(np.array(part)).view(torch.bfloat16)

    def _complete(self) -> bool:
        meta = self.folder / "meta.json"
        if not meta.exists():
            return False
        found = json.loads(meta.read_text())
        if found != self.key:
            differing = [name for name in self.key if found.get(name) != self.key[name]]
            raise ValueError(
                f"cached features in {self.folder} were made with another {', '.join(differing)}. "
                "Delete that folder to compute them again."
            )
        return True

    def _check_disk(self) -> None:
        size = self.num_bytes
        free = shutil.disk_usage(self.store.path).free
        if size > 0.95 * free:
            raise ValueError(
                f"data.cache_features needs {size / 1e9:.1f} GB in {self.store.path}, where "
                f"{free / 1e9:.1f} GB are free. Set it to false, or move the store."
            )

    def _reserve(self) -> None:
        """Say the size and make the empty file."""
        megabytes = self.num_bytes / 1e6
        sys.stderr.write(f"features: {megabytes:,.0f} MB of bfloat16 in {self.folder}\n")
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "features.bin").open("wb") as file:
            file.truncate(self.num_bytes)

    def _open(self, mode: Literal["r", "r+"]) -> np.memmap:
        shape = (int(self.store.offsets[-1]), self.width)
        return np.memmap(self.folder / "features.bin", dtype=np.int16, mode=mode, shape=shape)

    def _batches(self) -> Iterator[np.ndarray]:
        """Rows of like length together."""
        order = np.argsort(self.store.lengths, kind="stable")
        start = 0
        while start < len(order):
            stop = start + 1
            while (
                stop < len(order)
                and (stop + 1 - start) * self.store.lengths[order[stop]] <= self.BATCH_TOKENS
            ):
                stop += 1
            yield order[start:stop]
            start = stop

    def __getstate__(self) -> dict:
        """Workers reopen the file; the target's weights stay behind."""
        return {**self.__dict__, "target": None, "_map": None}
