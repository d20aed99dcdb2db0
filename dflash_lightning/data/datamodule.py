"""The data module: opens the store, plans every epoch, and reshuffles within the length buckets."""

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader

from dflash_lightning.assets import CHATS, cache_folder
from dflash_lightning.batching import Batching, EpochPlan, plan_epoch
from dflash_lightning.batching.report import PlanReport
from dflash_lightning.data.checks import check_store, refuse_partial_epochs
from dflash_lightning.data.collate import Batch, RowBatches
from dflash_lightning.data.features import FeatureCache
from dflash_lightning.data.loader import TimedLoader, ignore_signals
from dflash_lightning.data.loops import mend_progress, tell_epoch_length
from dflash_lightning.data.prepare import prepare_store
from dflash_lightning.data.run_plan import Position, RunPlan
from dflash_lightning.data.sampler import BucketSampler, ValidationSampler
from dflash_lightning.data.store import RowStore, check_val_fraction, split_rows
from dflash_lightning.drafter.model import Drafter
from dflash_lightning.functional.head import Goal
from dflash_lightning.target import HFTarget

QUICKSTART = "quickstart"

AnchorRule = Literal["pair", "block"]


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
        anchor_rule: What a position needs to be an anchor: ``pair`` that it and the next one are
            supervised; ``block``, for parity with other trainers, that it is supervised and the
            whole block lies inside the row.
        label_holes: Label supervised tokens of a block behind a gap too, for parity with other
            trainers; otherwise labels end at the first gap, where a verifier stops.
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
        anchor_rule: AnchorRule = "pair",
        label_holes: bool = False,
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
        self.anchor_rule: AnchorRule = anchor_rule
        self.label_holes = label_holes
        self.cache_features = cache_features
        self.block_size = block_size
        self.rank, self.world_size, self.accumulate = 0, 1, 1
        self.features: dict[Path, FeatureCache] = {}
        self._run_plan: RunPlan | None = None
        self._val_plan: EpochPlan | None = None
        self._train_loader: TimedLoader | None = None

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
            self._fit_to_model(self.trainer)
        self._run_plan = RunPlan(
            self.train_store.lengths[self.train_rows],
            self.batching,
            seed=self.seed,
            world_size=self.world_size,
            accumulate=self.accumulate,
            epoch=0 if self.trainer is None else self.trainer.current_epoch,
            step=self._step,
            quiet=self.rank > 0,
        )
        self._val_plan = self._plan_validation()

    def _fit_to_model(self, trainer: L.Trainer) -> None:
        """Take what the model decides, and check the stores against it."""
        module = self._module
        if self.cache_features and module.goal != "ce":
            raise ValueError(
                f"model.goal must be ce where data.cache_features is true, got {module.goal}: the "
                "target's logits are not cached. Set one of them to another value."
            )
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
    def run_plan(self) -> RunPlan:
        """The plans of the run's epochs; exists after :meth:`setup`."""
        if self._run_plan is None:
            raise RuntimeError(
                "DFlashDataModule.setup() must run before its plan is used: call setup('fit'), or "
                "give it to trainer.fit."
            )
        return self._run_plan

    @property
    def plan(self) -> EpochPlan:
        """The plan that is being trained: the current epoch's, or what a restart left of it."""
        return self.run_plan.plan

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self.run_plan.epoch

    @property
    def tokens_per_epoch(self) -> int:
        """Real tokens that all ranks together see in an epoch."""
        return self.run_plan.tokens_per_epoch

    @property
    def most_anchors(self) -> int:
        """Anchors that no batch exceeds.

        A row's share is rounded up, and no row has more than its limit.
        """
        rows, tokens = self.batching.max_rows, self.batching.token_budget
        return min(self.anchors_per_row * rows, int(self.anchor_rate * tokens) + rows)

    def num_steps(self, epochs: int, *, at_most: int | None = None) -> int:
        """Optimizer steps up to the end of an epoch; see :meth:`RunPlan.num_steps`."""
        return self.run_plan.num_steps(epochs, at_most=at_most)

    def num_tokens(self, steps: int) -> int:
        """Real tokens of the first steps of the run; see :meth:`RunPlan.num_tokens`."""
        return self.run_plan.num_tokens(steps)

    def set_epoch(self, epoch: int) -> None:
        """Reshuffle within the length buckets for another epoch; nothing for the current one."""
        if not self.run_plan.set_epoch(epoch, self._step):
            return
        if self.trainer is not None:
            tell_epoch_length(self.trainer, self.plan.num_steps * self.accumulate)

    @property
    def whole_block(self) -> int | None:
        """Block size that must fit into a row behind an anchor; None under the rule ``pair``."""
        return self.block_size if self.anchor_rule == "block" else None

    def settings(self) -> dict[str, Any]:
        """What decides the rows of a batch and their anchors, by full name, in plain types."""
        batching = {f"data.batching.{k}": v for k, v in asdict(self.batching).items()}
        return {
            **batching,
            "data.batching.boundaries": list(self.plan.boundaries),
            "data.seed": self.seed,
            "data.store": self.train_store.fingerprint,
            "data.val_fraction": 0.0 if self.val_store_path else self.val_fraction,
            "data.val_store": self.val_store.fingerprint if self.val_store_path else None,
            "data.cache_features": self.cache_features,
            "data.anchor_rate": self.anchor_rate,
            "data.anchors_per_row": self.anchors_per_row,
            "data.anchor_rule": self.anchor_rule,
            "data.label_holes": self.label_holes,
        }

    def position(self) -> Position:
        """Where the run is: after the last finished optimizer step, however far workers are."""
        return self.run_plan.position(self._step)

    def resume(self, checkpoint: dict[str, Any], position: Position) -> None:
        """Go on from a checkpoint's position, and make its loops agree with the plan.

        Args:
            checkpoint: Lightning's, before its loops are restored.
            position: Where it stands.
        """
        self.run_plan.resume(position, checkpoint["global_step"])
        first_batch = self.run_plan.first_step * self.accumulate
        mend_progress(checkpoint, position, first_batch)
        # Lightning cannot know that the sampler begins where the position says.
        warnings.filterwarnings("ignore", message=r".*your dataloader is\s+not resumable")

    @property
    def _step(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_step

    def rows_of_step(self, step: int) -> list[int]:
        """Store rows of a step of the run that is in the current plan, over all ranks.

        Args:
            step: Optimizer step of the run, from 0.
        """
        plan, own = self.plan, self.run_plan.step_in_plan(step)
        places = [(r, m) for m in range(plan.accumulate) for r in range(plan.world_size)]
        rows = np.concatenate([plan.rows(own, rank, micro) for rank, micro in places])
        return self.train_rows[rows].tolist()

    def report(self) -> PlanReport:
        """Padding, waiting and mixing of the current plan; prints well, also in a notebook."""
        return self.plan.report()

    def train_dataloader(self) -> DataLoader:
        """Batches of this rank, planned anew each epoch."""
        self._train_loader = self._loader(self.train_store, BucketSampler(self))
        return self._train_loader

    def take_wait(self) -> float:
        """Seconds that training waited for batches since it was last asked."""
        loader = self._train_loader
        if loader is None:
            return 0.0
        waited, loader.waited = loader.waited, 0.0
        return waited

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

    def _loader(self, store: RowStore, sampler: BucketSampler | ValidationSampler) -> TimedLoader:
        rows = RowBatches(
            store,
            block_size=self.block_size,
            seed=self.seed,
            anchor_rate=self.anchor_rate,
            anchors_per_row=self.anchors_per_row,
            whole_block=self.whole_block,
            label_holes=self.label_holes,
            features=self.features.get(store.path),
        )
        return TimedLoader(
            rows,
            sampler=sampler,
            batch_size=None,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            worker_init_fn=ignore_signals,
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
    goal: Goal
