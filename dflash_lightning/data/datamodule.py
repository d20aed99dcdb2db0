"""The data module: opens the store, plans every epoch, and reshuffles within the length buckets."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from dflash_lightning.assets import CHATS, cache_folder
from dflash_lightning.batching import Batching, EpochPlan, plan_epoch
from dflash_lightning.batching.report import PlanReport
from dflash_lightning.data.checks import check_store, refuse_partial_epochs
from dflash_lightning.data.collate import Batch, RowBatches
from dflash_lightning.data.features import FeatureCache
from dflash_lightning.data.prepare import prepare_store
from dflash_lightning.data.sampler import BucketSampler, ValidationSampler
from dflash_lightning.data.store import RowStore, check_val_fraction, split_rows
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.target import HFTarget

QUICKSTART = "quickstart"


class DFlashDataModule(L.LightningDataModule):
    """Rows of a store as planned batches.

    Args:
        store: Folder written by ``dflash-lightning prepare``; ``quickstart`` is the embedded data
            set, prepared with the target's tokenizer at the first run.
        batching: How rows become batches.
        seed: Of the plan and of the anchors.
        num_workers: Processes that build batches.
        val_store: A separate store for validation; otherwise ``val_fraction`` of the conversations.
        val_fraction: Share of the store's conversations that is held back for validation.
        anchor_rate: Anchors per supervised token.
        anchors_per_row: Most anchors of a row.
        cache_features: Keep the target's features of every row on disk: right for small data only.
        block_size: Tokens of a block, anchor included; under a trainer the drafter's own is taken.
    """

    def __init__(
        self,
        store: str,
        batching: Batching = Batching(),
        seed: int = 0,
        num_workers: int = 2,
        val_store: str | None = None,
        val_fraction: float = 0.05,
        anchor_rate: float = 0.25,
        anchors_per_row: int = 512,
        cache_features: bool = False,
        block_size: int = 16,
    ) -> None:
        super().__init__()
        check_val_fraction(val_fraction)
        if num_workers < 0:
            raise ValueError(
                f"num_workers must be at least 0, got {num_workers}. 0 builds batches in the main "
                "process."
            )
        if not 0 < anchor_rate <= 1 or anchors_per_row < 1:
            raise ValueError(
                "anchor_rate must be in (0, 1] and anchors_per_row at least 1, "
                f"got {anchor_rate} and {anchors_per_row}."
            )
        self.store_path = store
        self.batching = batching
        self.seed = seed
        self.num_workers = num_workers
        self.val_store_path = val_store
        self.val_fraction = val_fraction
        self.anchor_rate = anchor_rate
        self.anchors_per_row = anchors_per_row
        self.cache_features = cache_features
        self.block_size = block_size
        self.epoch = 0
        self.rank, self.world_size, self.accumulate = 0, 1, 1
        self.features: dict[Path, FeatureCache] = {}
        self._plan: EpochPlan | None = None
        self._val_plan: EpochPlan | None = None
        self._steps: dict[tuple[Batching, int, int, int, int], int] = {}

    def prepare_data(self) -> None:
        """Fetch the target and prepare the embedded data, on one process."""
        if self.trainer is not None:
            self._module.target.prepare()
        if self.store_path == QUICKSTART:
            self._open_store()

    def setup(self, stage: str) -> None:  # noqa: ARG002 - every stage needs the same
        """Open the stores, refuse what does not fit the model, and plan the epoch."""
        self.train_store = self._open_store()
        if self.val_store_path is not None:
            self.val_store = RowStore.open(self.val_store_path, setting="data.val_store")
            self.train_rows = np.arange(len(self.train_store))
            self.val_rows = np.arange(len(self.val_store))
        else:
            self.val_store = self.train_store
            conversation = self.train_store.column("conversation")
            self.train_rows, self.val_rows = split_rows(conversation, self.val_fraction)
        if self.trainer is not None:
            refuse_partial_epochs(self.trainer)
            self.rank, self.world_size = self.trainer.global_rank, self.trainer.world_size
            self.accumulate = self.trainer.accumulate_grad_batches
            self.epoch = self.trainer.current_epoch
            self._fit_to_model(self.trainer)
        self._steps = {}
        self._plan = self._make_plan(self.epoch)
        self._val_plan = self._plan_validation()

    def _fit_to_model(self, trainer: L.Trainer) -> None:
        """Take what the model decides, and check the stores against it."""
        module = self._module
        spec = module.drafter.spec
        self.block_size = spec.block_size
        for store in {s.path: s for s in (self.train_store, self.val_store)}.values():
            check_store(store, module.target, spec)
            if not self.cache_features:
                continue
            module.target.load(trainer.strategy.root_device)
            cache = FeatureCache(store, module.target, spec.target_layer_ids)
            cache.build(trainer.global_rank, trainer.world_size, trainer.strategy.barrier)
            self.features[store.path] = cache

    @property
    def _module(self) -> "TrainsDrafter":
        if self.trainer is None:
            raise ValueError(
                "store 'quickstart' needs a trainer, whose model brings the tokenizer. In a "
                "notebook: trainer.fit(module, datamodule=DFlashDataModule('quickstart'))."
            )
        return cast("TrainsDrafter", self.trainer.lightning_module)

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch; exists after :meth:`setup`."""
        if self._plan is None:
            raise RuntimeError(
                "DFlashDataModule.setup() must run before its plan is used: call setup('fit'), or "
                "give it to trainer.fit."
            )
        return self._plan

    @property
    def tokens_per_epoch(self) -> int:
        """Real tokens that all ranks together see in an epoch."""
        return int(self.train_store.lengths[self.train_rows].sum())

    def num_steps(self, epochs: int, *, at_most: int | None = None) -> int:
        """Optimizer steps of the first ``epochs`` epochs, exactly.

        Epochs differ by a few steps, so each is planned once; only its number of steps is kept.

        Args:
            epochs: How many epochs.
            at_most: Where the run ends anyway; no epoch beyond is planned.
        """
        steps = 0
        bar = tqdm(range(epochs), "planning", unit="epoch", delay=2, disable=self.rank > 0 or None)
        for epoch in bar:
            if at_most is not None and steps >= at_most:
                return at_most
            steps += self._steps_of(epoch)
        return steps if at_most is None else min(steps, at_most)

    def num_tokens(self, steps: int) -> int:
        """Real tokens of the first steps of a run, taking the steps of an epoch as equal."""
        epoch, tokens = 0, 0.0
        while steps > 0:
            planned = self._steps_of(epoch)
            tokens += self.tokens_per_epoch * min(1.0, steps / planned)
            steps -= planned
            epoch += 1
        return round(tokens)

    def _steps_of(self, epoch: int) -> int:
        """Optimizer steps of an epoch; planned where that was not done before."""
        _ = self.plan  # refused before setup
        if self._key(epoch) not in self._steps:
            self._make_plan(epoch)
        return self._steps[self._key(epoch)]

    def _key(self, epoch: int) -> tuple[Batching, int, int, int, int]:
        """What the steps of an epoch depend on, besides the rows."""
        return self.batching, self.seed, self.world_size, self.accumulate, epoch

    def set_epoch(self, epoch: int) -> None:
        """Reshuffle within the length buckets for another epoch; nothing for the current one."""
        _ = self.plan  # refused before setup
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self._plan = self._make_plan(epoch)
        if self.trainer is not None:
            _tell_epoch_length(self.trainer, self._plan.num_steps * self.accumulate)

    def report(self) -> PlanReport:
        """Padding, waiting and mixing of the current plan; prints well, also in a notebook."""
        return self.plan.report()

    def train_dataloader(self) -> DataLoader:
        """Batches of this rank, planned anew each epoch."""
        return self._loader(self.train_store, BucketSampler(self))

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """All validation rows once, dealt over the ranks; an empty list without validation rows."""
        if self._val_plan is None:
            return []
        plan = self._val_plan
        sampler = ValidationSampler(plan, self.val_rows, lambda: self.rank, lambda: self.world_size)
        return self._loader(self.val_store, sampler)

    def _plan_validation(self) -> EpochPlan | None:
        """Validation in order of length, in batches under the limits of training."""
        if not len(self.val_rows):
            return None
        lengths = self.val_store.lengths[self.val_rows]
        in_order = replace(self.batching, order="sorted", boundaries=(0, int(lengths.max())))
        try:
            return plan_epoch(lengths, in_order, seed=0, epoch=0)
        except ValueError as error:
            raise ValueError(f"validation rows: {error}") from error

    def _make_plan(self, epoch: int) -> EpochPlan:
        plan = plan_epoch(
            self.train_store.lengths[self.train_rows],
            self.batching,
            seed=self.seed,
            epoch=epoch,
            world_size=self.world_size,
            accumulate=self.accumulate,
        )
        self._steps[self._key(epoch)] = plan.num_steps
        return plan

    def _loader(self, store: RowStore, sampler: BucketSampler | ValidationSampler) -> DataLoader:
        rows = RowBatches(
            store,
            block_size=self.block_size,
            seed=self.seed,
            anchor_rate=self.anchor_rate,
            anchors_per_row=self.anchors_per_row,
            features=self.features.get(store.path),
        )
        return DataLoader(
            rows,
            sampler=sampler,
            batch_size=None,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            worker_init_fn=_ignore_signals,
            pin_memory=False,
        )

    def _open_store(self) -> RowStore:
        if self.store_path != QUICKSTART:
            return RowStore.open(self.store_path)
        target = self._module.target
        folder = cache_folder() / f"quickstart-{target.tokenizer_fingerprint}"
        return prepare_store(CHATS, target.tokenizer, folder, max_length=1024, overwrite=True)

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Move the tensors; row numbers stay where they can be read."""
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return moved._replace(rows=batch.rows)


class TrainsDrafter(Protocol):
    """What the data module asks of the module that is trained."""

    target: HFTarget
    drafter: Drafter


def _tell_epoch_length(trainer: L.Trainer, num_batches: int) -> None:
    """Lightning fixes the batches of an epoch, and when to validate, at the first one.

    A longer epoch would be cut to it and lose rows; a shorter one would end without validation.
    """
    loop = trainer.fit_loop
    if loop._combined_loader is None or trainer.limit_train_batches != 1.0:
        return
    loop.max_batches = num_batches
    loop._combined_loader.limits = [num_batches]
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(num_batches * trainer.val_check_interval))


def _ignore_signals(_worker: int) -> None:
    """A signal to the process group is for the main process; workers end when it does."""
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
