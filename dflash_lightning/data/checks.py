"""Checks of stores and trainers before a run starts."""

from typing import Any

from dflash_lightning.data.store import RowStore
from dflash_lightning.drafter.config import DrafterSpec
from dflash_lightning.target import HFTarget


def check_store(store: RowStore, target: HFTarget, spec: DrafterSpec) -> None:
    """Refuse a store whose ids this target and drafter cannot mean.

    Raises:
        ValueError: Another tokenizer, ids outside the vocabulary, or rows with the mask token.
    """
    theirs, ours = store.meta["key"]["tokenizer"], target.tokenizer_fingerprint
    if ours is not None and theirs != ours:
        raise ValueError(
            f"data.store {store.path} was prepared with another tokenizer ({theirs}) than that of "
            f"target {target.path} ({ours}). Run `dflash-lightning prepare` with this target's."
        )
    used = store.used_ids
    if len(used) > spec.vocab_size:
        raise ValueError(
            f"data.store {store.path} holds id {len(used) - 1}, outside the target's vocabulary of "
            f"{spec.vocab_size}. Prepare it with this target's tokenizer."
        )
    if spec.mask_token_id < len(used) and used[spec.mask_token_id]:
        raise ValueError(
            f"mask_token_id must never occur in the data; {spec.mask_token_id} occurs in "
            f"{store.path}. Take a reserved token of the target."
        )


def refuse_partial_epochs(trainer: Any) -> None:
    """Refuse to cut epochs short: plan, schedule and time left are made for whole ones.

    Raises:
        ValueError: A setting of the trainer takes part of an epoch.
    """
    if trainer.fast_dev_run:
        return
    for name, whole in (("limit_train_batches", 1.0), ("overfit_batches", 0.0)):
        value = getattr(trainer, name)
        if value != whole or (isinstance(value, int) and value):
            raise ValueError(
                f"trainer.{name} must stay {whole}: an epoch is planned as a whole, got {value}. "
                "For a short run set trainer.max_steps, or prepare a smaller store."
            )
