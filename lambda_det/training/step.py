"""One optimiser step: accumulation, mixed precision, and the check that it may be taken."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from detectron2.engine import SimpleTrainer
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lambda_det.distributed.signals import received_signal
from lambda_det.errors import NonFiniteLossError
from lambda_det.training.numerics import NonFiniteNumbers, NumericsDebugger
from lambda_det.training.precision import Precision
from lambda_det.training.randomness import Purpose, seed_all
from lambda_det.training.spikes import SpikeWatch
from lambda_det.training.step_words import (
    file_names,
    listed_losses,
    memory_errors_in_words,
    of_images,
)

__all__ = ["StepTrainer"]

logger = logging.getLogger(__name__)

ORDINARILY_SKIPPED = 10  # steps in a row, while loss scaling looks for its scale


class StepTrainer(SimpleTrainer):
    """Detectron2's SimpleTrainer with gradient accumulation, autocast and a guard.

    Detectron2's AMPTrainer insists on CUDA and float16, neither of its trainers accumulates, and
    both look for NaN on the first process alone.

    What the model draws (dropout, stochastic depth, proposals) depends on the seed, the iteration
    and the place of its batch in the step: a resumed run draws what it would have drawn, and one
    process with several batches what several processes with one do.

    Attributes:
        seed: of the run, from 0.
        stop_signal: the signal that asked any process to stop by the end of the last step, the same
            number on all of them; 0 for none.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable,
        optimizer: torch.optim.Optimizer,
        *,
        precision: Precision,
        accumulate: int = 1,
        seed: int = 0,
        last_checkpoint: Callable[[], str] = str,
        cures: str = "A lower SOLVER.BASE_LR, a longer SOLVER.WARMUP_ITERS, "
        "SOLVER.CLIP_GRADIENTS or clean annotations",
        names_of: Callable[[Any], list[str]] = file_names,
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
            seed: of the run, from 0.
            last_checkpoint: gives the path to name when a loss is not finite; "" for none.
            cures: what to advise then.
            names_of: the names of the images of a batch, for messages.
        """
        super().__init__(model, data_loader, optimizer)
        self.precision = precision
        self.accumulate = accumulate
        self.seed = seed
        self.stop_signal = 0
        self.grad_scaler = precision.grad_scaler()
        self._last_checkpoint = last_checkpoint
        self._cures = cures
        self._names_of = names_of
        self._debugger: NumericsDebugger | None = None
        self._spikes = SpikeWatch()
        self._losses_before: dict[str, Tensor] = {}

    def debug_numerics(self) -> None:
        """From now on, stop at the first module whose output or gradient is not finite."""
        self._debugger = NumericsDebugger(self.model)

    def run_step(self) -> None:
        """Draw, compute, check on every process, and only then change the weights.

        Raises:
            ConfigError: the memory of the GPU is too small.
            NonFiniteLossError: on all processes, if a loss or gradient of any is NaN or infinite,
                or loss scaling finds no scale for them; on one alone, if Detectron2 stops at its
                proposals in the forward pass, or :meth:`debug_numerics` finds the module.
        """
        assert self.model.training, "the model was left in evaluation mode"
        self.optimizer.zero_grad()
        losses: dict[str, Tensor] = {}
        images: list[str] = []
        data_time = 0.0
        for index in range(self.accumulate):
            start = time.perf_counter()
            data = next(self._data_loader_iter)
            data_time += time.perf_counter() - start
            names = self._names_of(data)
            images += names
            self._seed_batch(index)
            with (
                self._no_sync_before_last(index),
                memory_errors_in_words(),
                self._non_finite_in_words(names),
                self._debugging(),
            ):
                with self.precision.autocast():
                    batch_losses = self.model(data)
                    total = sum(batch_losses.values()) / self.accumulate
                self.grad_scaler.scale(total).backward()
            for name, loss in batch_losses.items():
                losses[name] = losses.get(name, 0) + loss.detach().float() / self.accumulate
        grad_norm = self._check(losses, images)
        self._losses_before = losses
        self.write_metrics(losses, data_time, self.iter)
        self._step(grad_norm)

    def _step(self, grad_norm: float) -> None:
        """Take the step, or have loss scaling skip it."""
        storage, scaler = get_event_storage(), self.grad_scaler
        finite = math.isfinite(grad_norm)
        if finite:  # JSON has no infinity
            storage.put_scalar("grad_norm", grad_norm)
        scaler.step_if(finite, self.optimizer)
        if scaler.is_enabled():
            storage.put_scalar("skipped_steps", scaler.skipped, smoothing_hint=False)
        if self._spikes.count:
            storage.put_scalar("loss_spikes", self._spikes.count, smoothing_hint=False)
        if scaler.is_enabled() and scaler.is_hopeless:
            what = f"Loss scaling skipped {scaler.skipped_in_row} steps in a row, the last"
            cure = "SOLVER.AMP.DTYPE bfloat16 needs none. "
            raise NonFiniteLossError(self._sentence(what, [], cure))

    def _seed_batch(self, index: int) -> None:
        place = index * comm.get_world_size() + comm.get_rank()
        seed_all(Purpose.STEP, self.seed, self.iter, place, device=self.precision.device)

    def _no_sync_before_last(self, index: int):
        """The workers' gradients need to meet once a step, not once a batch."""
        if isinstance(self.model, DistributedDataParallel) and index + 1 < self.accumulate:
            return self.model.no_sync()
        return nullcontext()

    @contextmanager
    def _debugging(self) -> Iterator[None]:
        if self._debugger is None:
            yield
            return
        # Under loss scaling infinite gradients are ordinary, until no scale helps
        scaler = self.grad_scaler
        gradients = not scaler.is_enabled() or scaler.skipped_in_row >= ORDINARILY_SKIPPED
        with self._debugger.watching(gradients=gradients):
            yield

    def _check(self, losses: dict[str, Tensor], images: list[str]) -> float:
        """Agree with the other processes on whether the step may be taken.

        Returns:
            The norm of all gradients, before they are clipped; not finite if loss scaling has to
            skip the step.
        """
        if self.grad_scaler.is_enabled():
            self.grad_scaler.unscale_(self.optimizer)
        grads = [p.grad for g in self.optimizer.param_groups for p in g["params"]]
        norms = torch._foreach_norm([grad for grad in grads if grad is not None])
        grad_norm = torch.linalg.vector_norm(torch.stack(norms).float())
        values = torch.stack(list(losses.values()))
        finite = values.isfinite().all()
        if not self.grad_scaler.is_enabled():
            finite = finite & grad_norm.isfinite()
        calm = values.sum() <= self._spikes.limit
        # That somebody was asked to stop goes along: all stop after the same step
        signal = torch.full_like(grad_norm, -received_signal())
        verdict = torch.stack([finite.float(), calm.float(), signal])
        if comm.get_world_size() > 1:
            dist.all_reduce(verdict, dist.ReduceOp.MIN)
        # Where a step waits for the GPU; with loss scaling it does once more, in the scaler
        finite, calm, signal, norm, total = torch.stack(
            [*verdict, grad_norm, values.sum()]
        ).tolist()
        self.stop_signal = int(-signal)
        if not finite:
            raise NonFiniteLossError(self._describe(losses, images))
        if not calm and self._spikes.count_one(self.iter):
            self._warn_of_spike(losses, total, norm, images)
        self._spikes.add(total)
        return norm

    def _warn_of_spike(
        self, losses: dict[str, Tensor], total: float, grad_norm: float, images: list[str]
    ) -> None:
        values = {name: loss.item() for name, loss in losses.items()}
        own = total, self._spikes.median, values, images
        total, median, values, images = max(
            comm.all_gather(own), key=lambda found: found[0] / max(found[1], 1e-9)
        )
        logger.warning(
            f"Loss spike at iteration {self.iter}{of_images(images)}: {total:.4g}, where the "
            f"median of the steps before is {median:.4g} ({listed_losses(values)}, gradient norm "
            f"{grad_norm:.4g}); {self._spikes.count} so far"
        )

    def log_skipped_steps(self, steps: int) -> None:
        """Say how many of the ``steps`` of a run loss scaling has skipped, at its end."""
        if self.grad_scaler.is_enabled():
            logger.info(f"{self.grad_scaler.skipped} of {steps} steps were skipped by loss scaling")

    @contextmanager
    def _non_finite_in_words(self, images: list[str]) -> Iterator[None]:
        try:
            yield
        except NonFiniteNumbers as error:
            raise NonFiniteLossError(self._sentence(str(error), images)) from error
        except FloatingPointError as error:
            # The region proposals look for NaN by themselves. The other processes wait in a
            # collective call by now and cannot be asked; whoever started this one ends them.
            what = str(error).partition(".")[0]
            if self._losses_before:
                values = {name: loss.item() for name, loss in self._losses_before.items()}
                what += f" (the losses of the step before were {listed_losses(values)})"
            raise NonFiniteLossError(self._sentence(what, images)) from error

    def _describe(self, losses: dict[str, Tensor], images: list[str]) -> str:
        own = {name: loss.item() for name, loss in losses.items()}
        gathered = comm.all_gather((own, images))
        bad = [
            rank
            for rank, (values, _) in enumerate(gathered)
            if not all(map(math.isfinite, values.values()))
        ]
        values, images = gathered[bad[0] if bad else 0]
        where = f" on worker {bad[0]}" if bad and len(gathered) > 1 else ""
        what = "A loss is not finite" if bad else "A gradient is not finite"
        return self._sentence(f"{what}{where} ({listed_losses(values)})", images if bad else [])

    def _sentence(self, what: str, images: list[str], cure: str = "") -> str:
        """What happened, and what to do.

        Args:
            what: the beginning of the sentence.
            images: of the batch.
            cure: a sentence about one that is likely here, before the usual ones.
        """
        advice = ""
        if self._debugger is None:
            advice = "; the same command with --resume --debug-numerics names the layer"
        return (
            f"{what} at iteration {self.iter}{of_images(images)}; the weights were left as they "
            f"were, and the last good checkpoint is {self._last_checkpoint() or 'none yet'}. "
            f"{cure}{self._cures} are the usual cures{advice}."
        )

    def state_dict(self) -> dict:
        state = super().state_dict()
        state["grad_scaler"] = self.grad_scaler.state_dict()
        state["skipped_steps"] = self.grad_scaler.skipped
        state["skipped_in_row"] = self.grad_scaler.skipped_in_row
        state["loss_spikes"] = self._spikes.state_dict()
        return state

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        if self.grad_scaler.is_enabled() and state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        self.grad_scaler.skipped = state_dict.get("skipped_steps", 0)
        self.grad_scaler.skipped_in_row = state_dict.get("skipped_in_row", 0)
        if "loss_spikes" in state_dict:
            self._spikes.load_state_dict(state_dict["loss_spikes"])
