"""What Lightning's loops must be told, lest they lose rows silently.

Lightning fixes the batches of an epoch once, and counts a checkpoint's batches against whatever the
next epoch holds. Here epochs differ in length, and what is left of one may be dealt anew.
"""

from typing import Any

import lightning as L

from dflash_lightning.data.run_plan import Position


def tell_epoch_length(trainer: L.Trainer, num_batches: int) -> None:
    """Say how many batches the epoch has that begins now, and when to validate in it.

    A longer epoch would be cut to the first one's length; a shorter one would end without
    validation.
    """
    loop = trainer.fit_loop
    if loop._combined_loader is None or trainer.limit_train_batches != 1.0:
        return
    loop.max_batches = num_batches
    loop._combined_loader.limits = [num_batches]
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(num_batches * trainer.val_check_interval))


def keep_step_axis(trainer: L.Trainer) -> None:
    """Make loggers' steps those of the optimizer, from 0; call it before each batch.

    Lightning counts them apart, and one too many where the rest of an epoch is dealt anew.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def mend_progress(checkpoint: dict[str, Any], position: Position, first_batch: int) -> None:
    """Make the loops of a checkpoint agree with the plan that goes on.

    Args:
        checkpoint: Changed in place, before Lightning reads its loops.
        position: Where the checkpoint stands.
        first_batch: Batches that a rank has behind it in the plan that goes on.
    """
    loop = checkpoint["loops"]["fit_loop"]
    validation = loop["epoch_loop.val_loop.batch_progress"]
    for part in ("total", "current"):  # a validation that goes on would begin behind its batches
        validation[part] = dict.fromkeys(validation[part], 0)
    batches = loop["epoch_loop.batch_progress"]
    epochs = loop["epoch_progress"]
    # A run that max_steps ends within an epoch counts that epoch as done.
    within = not position.finished and epochs["current"]["processed"] == position.epoch
    if within and batches["current"]["processed"] == first_batch:
        return  # saved at the end of a step of the same plan: Lightning's own count is right
    if not within:
        epoch = position.epoch
        begun = epoch + 1  # of a finished epoch say: it is completed, the next not begun
        done = begun if position.finished else epoch
        for part in ("total", "current"):
            epochs[part] = {"ready": begun, "started": begun, "processed": done, "completed": done}
    for name in batches["current"]:
        batches["current"][name] = first_batch
        batches["total"][name] = batches["total"]["ready"]
    batches["is_last_batch"] = False
