"""One optimiser step: accumulation, mixed precision, and the check that it may be taken."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from detectron2.engine import SimpleTrainer
from detectron2.utils import comm
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lambda_det.engine.precision import Precision
from lambda_det.errors import ConfigError, NonFiniteLossError

__all__ = ["StepTrainer"]


class StepTrainer(SimpleTrainer):
    """Detectron2's SimpleTrainer with gradient accumulation, autocast and a guard.

    Detectron2's AMPTrainer insists on CUDA and float16, neither of its trainers accumulates, and
    both look for NaN on the first process alone.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable,
        optimizer: torch.optim.Optimizer,
        *,
        precision: Precision,
        accumulate: int = 1,
        last_checkpoint: Callable[[], str] = str,
        cures: str = "A lower SOLVER.BASE_LR, a longer SOLVER.WARMUP_ITERS or clean annotations",
    ) -> None:
        """
        Args:
            model: takes a batch and returns a dict of losses, each a mean over the batch.
            data_loader: endless; a step draws ``accumulate`` batches of equal size from it.
            optimizer: of the model's parameters.
            precision: of the forward pass.
            accumulate: batches per step. The losses are averaged over them as they are over
                workers, so the step is that of one large batch as far as a loss is a mean of equal
                weight over images and the model has no batch norm.
            last_checkpoint: gives the path to name when a loss is not finite; "" for none.
            cures: what to advise then.
        """
        super().__init__(model, data_loader, optimizer)
        self.precision = precision
        self.accumulate = accumulate
        self.grad_scaler = precision.grad_scaler()
        self._last_checkpoint = last_checkpoint
        self._cures = cures
        self._losses_before: dict[str, Tensor] = {}

    def run_step(self) -> None:
        """Draw, compute, check on every process, and only then change the weights.

        Raises:
            ConfigError: the memory of the GPU is too small.
            NonFiniteLossError: on all processes, if a loss or gradient of any is NaN or infinite;
                on one alone, if Detectron2 stops at its proposals in the forward pass.
        """
        assert self.model.training, "the model was left in evaluation mode"
        self.optimizer.zero_grad()
        losses: dict[str, Tensor] = {}
        data_time = 0.0
        for index in range(self.accumulate):
            start = time.perf_counter()
            data = next(self._data_loader_iter)
            data_time += time.perf_counter() - start
            with self._no_sync_before_last(index):
                with _memory_errors_in_words(), self.precision.autocast():
                    batch_losses = self._forward(data)
                    total = sum(batch_losses.values()) / self.accumulate
                with _memory_errors_in_words():
                    self.grad_scaler.scale(total).backward()
            for name, loss in batch_losses.items():
                losses[name] = losses.get(name, 0) + loss.detach().float() / self.accumulate
        self._check_finite(losses)
        self._losses_before = losses
        self.write_metrics(losses, data_time, self.iter)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()

    def _no_sync_before_last(self, index: int):
        """The workers' gradients need to meet once a step, not once a batch."""
        if isinstance(self.model, DistributedDataParallel) and index + 1 < self.accumulate:
            return self.model.no_sync()
        return nullcontext()

    def _check_finite(self, losses: dict[str, Tensor]) -> None:
        finite = torch.stack(list(losses.values())).isfinite().all()
        if not self.grad_scaler.is_enabled():  # the scaler looks at the gradients itself
            grads = [p.grad for g in self.optimizer.param_groups for p in g["params"]]
            norms = torch._foreach_norm([grad for grad in grads if grad is not None])
            finite = finite & torch.stack(norms).isfinite().all()
        good = finite.float()
        if comm.get_world_size() > 1:
            dist.all_reduce(good, dist.ReduceOp.MIN)
        if good.item() == 1:
            return
        raise NonFiniteLossError(self._describe(losses))

    def _forward(self, data: list[dict]) -> dict[str, Tensor]:
        try:
            return self.model(data)
        except FloatingPointError as error:
            # The region proposals look for NaN by themselves. The other processes wait in a
            # collective call by now and cannot be asked; whoever started this one ends them.
            what = str(error).partition(".")[0]
            if self._losses_before:
                values = {name: loss.item() for name, loss in self._losses_before.items()}
                what += f" (the losses of the step before were {_listed(values)})"
            raise NonFiniteLossError(self._sentence(what)) from error

    def _describe(self, losses: dict[str, Tensor]) -> str:
        gathered = comm.all_gather({name: loss.item() for name, loss in losses.items()})
        bad = [
            rank
            for rank, values in enumerate(gathered)
            if not all(map(math.isfinite, values.values()))
        ]
        values = _listed(gathered[bad[0] if bad else 0])
        where = f" on worker {bad[0]}" if bad and len(gathered) > 1 else ""
        what = "A loss is not finite" if bad else "A gradient is not finite"
        return self._sentence(f"{what}{where} ({values})")

    def _sentence(self, what: str) -> str:
        return (
            f"{what} at iteration {self.iter}; the weights were left as they were, and the last "
            f"good checkpoint is {self._last_checkpoint() or 'none yet'}. {self._cures} are "
            "the usual cures."
        )

    def state_dict(self) -> dict:
        state = super().state_dict()
        state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        if self.grad_scaler.is_enabled() and state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])


@contextmanager
def _memory_errors_in_words() -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            "The memory of the GPU is too small for a step: raise SOLVER.ACCUMULATE_GRADIENTS, "
            "which divides the step into smaller batches, or set CHECKPOINT_ACTIVATIONS of the "
            "model True."
        ) from error


def _listed(losses: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in losses.items())
