"""Evaluation during training: raw and averaged weights, the best of them, and when to stop."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from detectron2.engine import HookBase
from detectron2.utils import comm

from lambda_det.classification.evaluation import Accuracy
from lambda_det.distributed.signals import interruptible
from lambda_det.files import replace_text
from lambda_det.training.loop import checkpoint_name
from lambda_det.training.milestones import stop_if_requested

__all__ = ["Evaluator", "describe"]

logger = logging.getLogger(__name__)

Results = dict[str, dict[str, Accuracy]]  # by part of the data, by weights

RAW, EMA = "raw", "ema"
HELD_OUT, VAL = "held_out", "val"


class Evaluator(HookBase):
    """Evaluates every so many steps and at the end, and writes summary.csv.

    A checkpoint is saved before, and says that its evaluation is still to come: a run that was
    stopped in it begins with it. :class:`Checkpoints` saves it again with the results.

    The best evaluation is that of highest top-1 on the held-out images (where there are none, on
    the validation images), of the averaged weights (where there are none, of the raw ones).

    Attributes:
        results: of the last evaluation.
        last_step, best_step: steps done at the last and at the best evaluation; -1 for none.
        best: its top-1.
        is_pending: whether the evaluation after the step that is done is still to come.
        was_pending: whether this run has begun with one.
    """

    def __init__(self, evaluate: Callable[[], Results], period: float, patience: int) -> None:
        """
        Args:
            evaluate: called on all processes alike.
            period: steps between two evaluations, which need not be whole.
            patience: evaluations in a row that may bring no better one; 0 for any number.
        """
        self._evaluate = evaluate
        self._period = period
        self._patience = patience
        self.results: Results = {}
        self.last_step = self.best_step = -1
        self.best = float("-inf")
        self.without_progress = 0
        self.is_pending = self.was_pending = False
        self._losses = 0.0  # sum over the steps since the last evaluation
        self._steps = 0

    def before_train(self) -> None:
        trainer = self.trainer
        self.was_pending = self.is_pending
        if comm.is_main_process():
            # The row of a pending one may be there, if not in a checkpoint
            cut_summary(self._summary, trainer.start_iter - self.is_pending)
        if self.is_pending:
            logger.info(f"The evaluation after step {trainer.start_iter} is still to come")
            trainer.iter = trainer.storage.iter = trainer.start_iter - 1
            self._do()
            trainer.iter = trainer.storage.iter = trainer.start_iter
        if self._out_of_patience() and trainer.start_iter < trainer.max_iter:
            logger.info("This run has stopped early already; a higher TEST.PATIENCE continues it")
            trainer.max_iter = trainer.start_iter

    def after_step(self) -> None:
        step = self.trainer.iter + 1
        if comm.is_main_process():
            self._losses += self.trainer.storage.history("total_loss").latest()
            self._steps += 1
        is_due = step // self._period > (step - 1) // self._period
        if not is_due and step < self.trainer.max_iter:
            return
        self.is_pending = True
        self.trainer.save_checkpoint(self.checkpoint_name())
        self._do()

    def checkpoint_name(self) -> str:
        """Of the checkpoint after the step that is done."""
        final = self.trainer.iter + 1 >= self.trainer.max_iter
        return "model_final" if final else checkpoint_name(self.trainer.iter)

    def _do(self) -> None:
        step = self.trainer.iter + 1
        stop_if_requested()
        self.results = interruptible(self._evaluate)
        self.last_step, self.is_pending = step, False
        self._keep_best(step)
        if comm.is_main_process():
            self._record(step)
        self._losses, self._steps = 0.0, 0
        if self._out_of_patience() and step < self.trainer.max_iter:
            logger.info(
                f"Stopping early: {self.without_progress} evaluations brought nothing better than "
                f"top-1 {self.best:.2f} of step {self.best_step}"
            )
            self.trainer.max_iter = step

    def _out_of_patience(self) -> bool:
        return 0 < self._patience <= self.without_progress

    def _keep_best(self, step: int) -> None:
        chosen = chosen_accuracy(self.results).top1
        if chosen > self.best:
            self.best, self.best_step, self.without_progress = chosen, step, 0
        else:
            self.without_progress += 1

    @property
    def _summary(self) -> Path:
        return Path(self.trainer.cfg.OUTPUT_DIR, "summary.csv")

    def _record(self, step: int) -> None:
        trainer = self.trainer
        row: dict[str, Any] = {
            "epoch": round(trainer.plan.epochs(step), 3),
            "step": step,
            "lr": trainer.storage.history("lr").latest(),
            "train_loss": round(self._losses / self._steps, 5),
            "images_per_second": self._speed(),
        }
        for part, by_weights in self.results.items():
            for weights, accuracy in by_weights.items():
                for name in ("top1", "top5", "loss"):
                    value = getattr(accuracy, name)
                    row[f"{part}_{weights}_{name}"] = round(value, 4)
                    trainer.storage.put_scalar(
                        f"{part}/{weights}_{name}", value, smoothing_hint=False
                    )
        append_summary(self._summary, row)
        best = " (the best so far)" if self.best_step == step else f"; best {self.best:.2f}"
        logger.info(f"Epoch {row['epoch']:g}: {describe(self.results)}{best}")

    def _speed(self) -> float | str:
        """Unknown of steps before a resume, which may have been taken elsewhere."""
        history = self.trainer.storage.histories().get("images_per_second")
        return round(history.median(100), 1) if history else ""

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_step": self.last_step,
            "best_step": self.best_step,
            "best": self.best,
            "without_progress": self.without_progress,
            "is_pending": self.is_pending,
            "_losses": self._losses,
            "_steps": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def chosen_accuracy(results: Results) -> Accuracy:
    """The one that counts: see :class:`Evaluator`."""
    by_weights = results.get(HELD_OUT) or results[VAL]
    return by_weights.get(EMA) or by_weights[RAW]


def describe(results: Results) -> str:
    """One line: top-1 and top-5 of each part of the data and each kind of weights."""
    return "; ".join(
        f"{part} {weights} top-1 {accuracy.top1:.2f} top-5 {accuracy.top5:.2f}"
        for part, by_weights in results.items()
        for weights, accuracy in by_weights.items()
    )


def append_summary(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a table, with the head where it is the first."""
    head, rows = _read_summary(path)
    if not set(row) <= set(head):  # the first, or a resumed run evaluates on more
        head += [name for name in row if name not in head]
        _write_summary(path, head, rows)
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, head, restval="").writerow(row)


def cut_summary(path: Path, last_step: int) -> None:
    """Drop the rows of steps that a resumed run takes again."""
    head, rows = _read_summary(path)
    kept = [row for row in rows if int(row["step"]) <= last_step]
    if kept:
        _write_summary(path, head, kept)
    else:
        path.unlink(missing_ok=True)


def _read_summary(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Head and rows, without a last row that was cut off by a kill."""
    if not path.exists():
        return [], []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        head = list(reader.fieldnames or [])
        rows = [row for row in reader if row.get("step") and row.get(head[-1]) is not None]
    return head, rows


def _write_summary(path: Path, head: list[str], rows: list[dict[str, str]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, head, restval="")
    writer.writeheader()
    writer.writerows(rows)
    replace_text(path, text.getvalue())
