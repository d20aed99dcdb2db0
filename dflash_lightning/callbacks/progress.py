"""Progress over the tokens of the whole run, with the time left."""

import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from dflash_lightning.callbacks.run import parts, say


class TokenProgressBar(ProgressBar):
    """One bar over the real tokens of the whole run: tokens per second, and the time left from it.

    Tokens rather than steps, since a step over long rows takes longer than one over short rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bar: tqdm | None = None
        self.total_steps = 0
        self._enabled = True

    def disable(self) -> None:
        """Show nothing: Lightning's word to ranks other than 0."""
        self._enabled = False

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the bar over all tokens that the run will see."""
        module, data = parts(trainer)
        self.total_steps = module.total_steps()
        self.bar = tqdm(
            total=data.num_tokens(self.total_steps),
            initial=module.progress["tokens_seen"],  # the rate is that of this process alone
            unit="tok",
            unit_scale=True,
            smoothing=0.05,
            dynamic_ncols=True,
            file=sys.stderr,
            disable=not self._enabled,
        )

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Advance by the real tokens of a finished optimizer step, over all ranks."""
        if self.bar is None or trainer.fit_loop._should_accumulate():
            return
        stats = parts(trainer)[0].step_stats
        step = f"step {trainer.global_step}/{self.total_steps}"
        self.bar.set_description(step, refresh=False)
        self.bar.set_postfix(loss=f"{stats['loss']:.3f}", refresh=False)
        self.bar.update(int(stats["tokens"]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()

    def print(self, *args: Any, **_: Any) -> None:
        """Write a line above the bar."""
        if self._enabled:
            say(" ".join(map(str, args)))
