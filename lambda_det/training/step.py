"""One optimiser step: accumulation, mixed precision, and the check whether it may be taken."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from detectron2.engine import SimpleTrainer
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lambda_det.distributed.signals import received_signal
from lambda_det.errors import ConfigError, NonFiniteLossError, listed
from lambda_det.training.loading import BatchesAhead
from lambda_det.training.numerics import NonFiniteNumbers, NumericsDebugger
from lambda_det.training.precision import Precision
from lambda_det.training.randomness import Purpose, seed_all
from lambda_det.training.settings import Clipping
from lambda_det.training.task import Task

logger = logging.getLogger(__name__)

_IMAGES_NAMED = 8
_ORDINARILY_SKIPPED = 10  # steps in a row, while loss scaling looks for its scale


class TrainStep:
    """Computes gradients over several batches, and takes the step if all processes agree to it.

    Detectron2's AMPTrainer insists on CUDA, neither of its trainers accumulates, and both look for
    NaN only on the first process.

    What the model draws (dropout, stochastic depth, proposals) depends on the seed, the iteration
    and the place of its batch in the step: a resumed run draws the same as an uninterrupted one,
    and one process with several batches draws the same as several processes with one batch each.

    Attributes:
        seed: of the run, from 0.
        iteration: of the step that is computed.
        stop_signal: the signal that asked any process to stop by the end of the last step, the same
            number on all of them; 0 for none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Task,
        *,
        seed: int,
        last_checkpoint: Callable[[], str],
        debug_numerics: bool = False,
    ) -> None:
        """
        Args:
            model: takes a batch and returns a dict of losses, each a mean over the batch.
            optimizer: of the model's parameters.
            task: its settings have precision, accumulation and clipping. Losses are averaged over
                the batches of a step as they are over processes, so the step equals that of one
                large batch if each loss is a mean with equal weights of images and the model has no
                batch norm. Gradients of all batches and processes are clipped together, without
                loss scaling.
            seed: of the run, from 0.
            last_checkpoint: gives the path to name when a loss is not finite; "" for none.
            debug_numerics: stop at the first module whose output or gradient is not finite.
        """
        self.model = model.train()
        self.optimizer = optimizer
        self.precision = Precision.of(task.settings)
        self.accumulate = task.settings.accumulate
        self.seed = seed
        self.iteration = 0
        self.stop_signal = 0
        self.grad_scaler = self.precision.grad_scaler()
        self._task, self._settings = task, task.settings
        self._last_checkpoint = last_checkpoint
        self._debugger = NumericsDebugger(model) if debug_numerics else None

    def run(self, batches: Iterator[Any], iteration: int) -> None:
        """Draw, compute, check on every process, and only then change the weights.

        Args:
            batches: endless; ``accumulate`` of them are used.
            iteration: counted from 0.

        Raises:
            ConfigError: the memory of the GPU is too small; the weights are as they were.
            NonFiniteLossError: on all processes, if a loss or gradient of any is NaN or infinite,
                or loss scaling finds no scale for them; on only one, if Detectron2 stops at its
                proposals in the forward pass, or ``debug_numerics`` finds the module.
        """
        assert self.model.training, "the model was left in evaluation mode"
        self.iteration = iteration
        self.optimizer.zero_grad()
        losses: dict[str, Tensor] = {}
        images: list[str] = []
        data_time = 0.0
        for index in range(self.accumulate):
            start = time.perf_counter()
            batch = next(batches)
            data_time += time.perf_counter() - start
            names = self._task.image_names(batch)
            images += names
            place = index * comm.get_world_size() + comm.get_rank()
            seed_all(Purpose.STEP, self.seed, iteration, place, device=self.precision.device)
            with (
                self._without_sync(index),
                self._user_errors(names),
                self._debugging(),
            ):
                with self.precision.autocast():
                    batch_losses = self.model(batch)
                    total = sum(batch_losses.values()) / self.accumulate
                self.grad_scaler.scale(total).backward()
            start = time.perf_counter()
            if isinstance(batches, BatchesAhead):
                batches.fetch()
            data_time += time.perf_counter() - start
            for name, loss in batch_losses.items():
                losses[name] = losses.get(name, 0) + loss.detach().float() / self.accumulate
        grad_norm = self._agree(losses, images)
        SimpleTrainer.write_metrics(losses, data_time, iteration)
        self._step(grad_norm)

    def _without_sync(self, index: int) -> AbstractContextManager:
        """Reduce the gradients over processes after the last batch of a step alone."""
        if isinstance(self.model, DistributedDataParallel) and index + 1 < self.accumulate:
            return self.model.no_sync()
        return nullcontext()

    def _debugging(self) -> AbstractContextManager:
        """Look for the first number that is not finite, where somebody wants it."""
        if self._debugger is None:
            return nullcontext()
        # with loss scaling infinite gradients are normal as long as a lower scale helps
        scaler = self.grad_scaler
        gradients = not scaler.is_enabled() or scaler.skipped_in_row >= _ORDINARILY_SKIPPED
        return self._debugger.watching(gradients=gradients)

    def _agree(self, losses: dict[str, Tensor], images: list[str]) -> float:
        """Agree whether the step may be taken; the norm of all gradients before clipping."""
        if self.grad_scaler.is_enabled():
            self.grad_scaler.unscale_(self.optimizer)
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        grad_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)).float())
        values = torch.stack(list(losses.values()))
        finite = values.isfinite().all()
        if not self.grad_scaler.is_enabled():
            finite = finite & grad_norm.isfinite()
        # the signal that asks a process to stop is part of the reduction, so all stop after the
        # same step
        signal = torch.full_like(grad_norm, -received_signal())
        verdict = torch.stack([finite.float(), signal])
        if comm.get_world_size() > 1:
            dist.all_reduce(verdict, dist.ReduceOp.MIN)
        # here a step waits for the GPU, and with loss scaling once more in the scaler
        finite, signal, norm = torch.stack([*verdict, grad_norm]).tolist()
        self.stop_signal = int(-signal)
        if not finite:
            raise NonFiniteLossError(self._describe_losses(losses, images))
        return norm

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _step(self, grad_norm: float) -> None:
        """Take the step, or let loss scaling skip it."""
        storage, scaler = get_event_storage(), self.grad_scaler
        finite = math.isfinite(grad_norm)
        if finite:
            storage.put_scalar("grad_norm", grad_norm)  # JSON has no infinity
            if self._settings.clipping:
                clip_gradients(self._parameters(), self._settings.clipping)
        scaler.step_if(finite, self.optimizer)
        if scaler.is_enabled():
            storage.put_scalar("skipped_steps", scaler.skipped, smoothing_hint=False)
        if scaler.is_enabled() and scaler.is_hopeless:
            other = self._settings.option("amp_dtype", "bfloat16")
            what = (
                f"Loss scaling skipped {scaler.skipped_in_row} steps in a row ({other} needs none)"
            )
            raise NonFiniteLossError(self._sentence(f"{what}, the last", []))

    # ------------------------------------------------------------------------------------ messages
    @contextmanager
    def _user_errors(self, images: list[str]) -> Iterator[None]:
        """Turn errors of a forward or backward pass into errors that say what to do."""
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                "The memory of the GPU is too small for the images that a step takes at once. The "
                f"same command with --resume and {self._task.smaller_batches()} takes the steps "
                f"in more batches; the last checkpoint is {self._last_checkpoint() or 'none yet'}."
            ) from error
        except NonFiniteNumbers as error:
            raise NonFiniteLossError(self._sentence(str(error), images)) from error
        except FloatingPointError as error:
            # Detectron2's region proposals look for NaN by themselves. The other processes wait in
            # a collective call by now and cannot be asked; whoever started this one ends them.
            raise NonFiniteLossError(
                self._sentence(str(error).partition(".")[0], images)
            ) from error

    def _describe_losses(self, losses: dict[str, Tensor], images: list[str]) -> str:
        finite = all(loss.isfinite() for loss in losses.values())
        gathered = comm.all_gather((finite, _listed(losses), images))
        bad = [rank for rank, (finite, *_) in enumerate(gathered) if not finite]
        _, values, images = gathered[bad[0] if bad else 0]
        where = f" in process {bad[0]}" if bad and len(gathered) > 1 else ""
        what = "A loss is not finite" if bad else "A gradient is not finite"
        return self._sentence(f"{what}{where} ({values})", images if bad else [])

    def _sentence(self, what: str, images: list[str]) -> str:
        """What happened, where, and what to do."""
        named = f" (images {listed(images, _IMAGES_NAMED)})" if images else ""
        hint = "; the same command with --resume --debug-numerics names the layer"
        return (
            f"{what} at iteration {self.iteration}{named}; the weights were left as they were, and "
            f"the last good checkpoint is {self._last_checkpoint() or 'none yet'}. What usually "
            f"helps is {self._task.advice}{'' if self._debugger else hint}."
        )

    # --------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "grad_scaler": self.grad_scaler.state_dict(),
            "skipped_steps": self.grad_scaler.skipped,
            "skipped_in_row": self.grad_scaler.skipped_in_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if self.grad_scaler.is_enabled() and state["grad_scaler"]:
            self.grad_scaler.load_state_dict(state["grad_scaler"])
        self.grad_scaler.skipped = state["skipped_steps"]
        self.grad_scaler.skipped_in_row = state["skipped_in_row"]


def clip_gradients(parameters: list[nn.Parameter], clipping: Clipping) -> None:
    """Clip gradients in place."""
    if clipping.kind == "full_model":
        clip_grad_norm_(parameters, clipping.limit, clipping.norm_type)
        return
    for parameter in parameters:
        if clipping.kind == "value":
            clip_grad_value_(parameter, clipping.limit)
        else:
            clip_grad_norm_(parameter, clipping.limit, clipping.norm_type)


def _listed(losses: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {loss.item():.4g}" for name, loss in losses.items())
