"""Rows to a padded batch with anchors and labels: a pure function of (seed, epoch, row ids)."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dflash_lightning.data.features import FeatureCache
from dflash_lightning.data.store import RowStore
from dflash_lightning.functional.anchors import VALIDATION, draw_anchors, labelled_slots


class BatchIndex(NamedTuple):
    """Everything a worker needs to build a batch.

    Args:
        epoch: For the anchors; None draws the fixed anchors of validation.
        rows: Row numbers in the store, int64 ``[B]``; none makes a placeholder without labels.
        width: Padded length.
    """

    epoch: int | None
    rows: np.ndarray
    width: int


class Batch(NamedTuple):
    """A padded batch.

    Args:
        rows: Row numbers in the store, int64 ``[B]``.
        input_ids: Right-padded with 0, int64 ``[B, T]``.
        lengths: Real tokens of each row, int64 ``[B]``.
        anchors: Sorted positions, int64 ``[B, N]``.
        anchor_valid: Whether a slot holds a real anchor, bool ``[B, N]``.
        label_slots: Where the M labels belong, flat index into ``[B, N, K]``, int64 ``[M]``.
        labels: Token ids, int64 ``[M]``.
        features: Cached context features, bfloat16 ``[B, T, F]``, or None.
    """

    rows: Tensor
    input_ids: Tensor
    lengths: Tensor
    anchors: Tensor
    anchor_valid: Tensor
    label_slots: Tensor
    labels: Tensor
    features: Tensor | None


class RowBatches(Dataset):
    """Builds batches from a store.

    Args:
        store: The rows.
        block_size: Tokens of a block, anchor included (K).
        seed: Of the anchors.
        anchor_rate: Anchors per supervised token.
        anchors_per_row: Most anchors of a row.
        whole_block: Block size that must fit into the row behind an anchor; None asks for a pair of
            supervised tokens instead.
        label_holes: Label supervised slots behind a gap too.
        features: Cached features, if any.
    """

    def __init__(
        self,
        store: RowStore,
        *,
        block_size: int,
        seed: int,
        anchor_rate: float,
        anchors_per_row: int,
        whole_block: int | None = None,
        label_holes: bool = False,
        features: FeatureCache | None = None,
    ) -> None:
        self.store = store
        self.block_size = block_size
        self.seed = seed
        self.anchor_rate = anchor_rate
        self.anchors_per_row = anchors_per_row
        self.whole_block = whole_block
        self.label_holes = label_holes
        self.features = features

    def __getitem__(self, index: BatchIndex) -> Batch:
        """Build one batch."""
        if not len(index.rows):
            return self._placeholder()
        rows = [self.store.row(int(row)) for row in index.rows]
        ids = np.zeros((len(rows), index.width), dtype=np.int64)
        anchors = [
            self._anchors(index, int(row), mask)
            for row, (_, mask) in zip(index.rows, rows, strict=True)
        ]
        slots = max(map(len, anchors))
        positions = np.zeros((len(rows), slots), dtype=np.int64)
        valid = np.zeros((len(rows), slots), dtype=bool)
        label_slots, labels = [], []
        for b, (row_ids, mask) in enumerate(rows):
            ids[b, : len(row_ids)] = row_ids
            count = len(anchors[b])
            positions[b, :count], valid[b, :count] = anchors[b], True
            slot, label = self._labels(b * slots, row_ids, mask, anchors[b])
            label_slots.append(slot)
            labels.append(label)
        return Batch(
            rows=torch.from_numpy(index.rows),
            input_ids=torch.from_numpy(ids),
            lengths=torch.tensor([len(row_ids) for row_ids, _ in rows]),
            anchors=torch.from_numpy(positions),
            anchor_valid=torch.from_numpy(valid),
            label_slots=torch.from_numpy(np.concatenate(label_slots)),
            labels=torch.from_numpy(np.concatenate(labels)),
            features=self._features(index),
        )

    def _anchors(self, index: BatchIndex, row: int, mask: np.ndarray) -> np.ndarray:
        key = (VALIDATION, row) if index.epoch is None else (self.seed, index.epoch, row)
        return draw_anchors(
            mask,
            rate=self.anchor_rate,
            limit=self.anchors_per_row,
            key=key,
            whole_block=self.whole_block,
        )

    def _labels(
        self, first_block: int, ids: np.ndarray, mask: np.ndarray, anchors: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Flat slot and token of every label of a row."""
        labelled = labelled_slots(mask, anchors, self.block_size, holes=self.label_holes)
        block, k = np.nonzero(labelled)
        return (first_block + block) * self.block_size + k, ids[anchors[block] + k].astype(np.int64)

    def _features(self, index: BatchIndex) -> Tensor | None:
        if self.features is None:
            return None
        out = torch.zeros(len(index.rows), index.width, self.features.width, dtype=torch.bfloat16)
        for b, row in enumerate(index.rows):
            values = self.features.row(int(row))
            out[b, : len(values)] = values
        return out

    def _placeholder(self) -> Batch:
        """One padding token, no anchor, no label, and no row that could be counted."""
        none = torch.zeros(0, dtype=torch.int64)
        one = torch.zeros(1, 1, dtype=torch.int64)
        width = 0 if self.features is None else self.features.width
        features = None if self.features is None else torch.zeros(1, 1, width, dtype=torch.bfloat16)
        return Batch(none, one, one[0], one, one.bool(), none, none, features)
