"""One training step on this rank alone, after which everything is put back."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager

import lightning as L
import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dflash_lightning.callbacks.memory import out_of_memory
from dflash_lightning.callbacks.run import parts
from dflash_lightning.data.collate import Batch


def attempt(trainer: L.Trainer, batch: Batch) -> float | None:
    """Forward, backward and optimizer step on this rank alone; None where memory runs out.

    Returns:
        The mean weighted cross-entropy in nats.
    """
    try:
        return train_once(trainer, batch)
    except RuntimeError as error:
        if out_of_memory(error):
            return None
        raise


def train_once(trainer: L.Trainer, batch: Batch) -> float:
    """One step on the bare module, in the order and with the gradients' memory of a real one.

    The backward pass of a module outside DDP reduces nothing, and the local optimizer broadcasts
    nothing: no rank waits for one that ran out of memory.
    """
    module, (optimizer,) = parts(trainer)[0], trainer.optimizers
    on_device = trainer.strategy.batch_to_device(batch)
    with trainer.precision_plugin.train_step_context():
        sums = module.sums(on_device)
    if trainer.accumulate_grad_batches == 1:
        optimizer.zero_grad()
    parameters = parameters_of(optimizer)
    in_buckets = gradients_in_buckets(trainer)
    with ExitStack() as hooks:
        for parameter in parameters if in_buckets else ():
            hooks.callback(parameter.register_post_accumulate_grad_hook(forget_gradient).remove)
        sums.numerator.backward()
    if in_buckets:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    inner = local(optimizer)
    type(inner).step(inner)  # the class's own: a schedule counts the calls of the instance's
    if in_buckets:
        optimizer.zero_grad()
    return float(sums.numerator.detach() / sums.weights.sum().clamp_min(1e-20))


def gradients_in_buckets(trainer: L.Trainer) -> bool:
    """Whether a real step's gradients take no memory beside DDP's buckets, which are there already.

    With accumulation they do: they stay outside until the last micro-batch.
    """
    model = trainer.strategy.model
    is_ddp = isinstance(model, DistributedDataParallel)
    return is_ddp and model.gradient_as_bucket_view and trainer.accumulate_grad_batches == 1


def forget_gradient(parameter: Tensor) -> None:
    """Free a gradient as soon as it is made, as DDP does once it is in its bucket."""
    parameter.grad = None


def local(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds this rank's moments."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Everything that an optimizer may change."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@contextmanager
def untouched(optimizer: Optimizer) -> Generator[Callable[[], None]]:
    """Moments and gradients are given up at the end, weights are as before, bit by bit.

    Yields:
        Puts the weights back at once, so that a batch does not see what others did to them.
    """
    parameters = parameters_of(optimizer)
    weights = [p.detach().to("cpu", copy=True) for p in parameters]

    @torch.no_grad()
    def put_back() -> None:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)

    try:
        yield put_back
    finally:
        optimizer.zero_grad()
        for holder in (optimizer, local(optimizer)):
            holder.state.clear()
        put_back()
