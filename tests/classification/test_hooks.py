"""The hooks alone, driven by hand: what they save, delete, link and say."""

from types import SimpleNamespace

import torch
from detectron2.utils.events import EventStorage
from torch import nn

from lambda_det.classification import hooks
from lambda_det.classification.evaluation import Accuracy
from lambda_det.classification.evaluator import Evaluator
from lambda_det.classification.hooks import Checkpoints, ProgressPrinter
from lambda_det.training.checkpointer import SafeCheckpointer


def _accuracy(top1):
    return Accuracy(top1, 100.0, 1.0, 9)


class Trainer:
    """As far as the hooks know one: step n has the loss n, and a checkpoint holds its step."""

    def __init__(self, folder, top1, steps, *, period, patience=0, kept=3, every=100):
        top1 = iter(top1)
        self.folder = folder
        self.cfg = SimpleNamespace(OUTPUT_DIR=str(folder))
        self.plan = SimpleNamespace(epochs=lambda step: step / 10)
        self.iter, self.start_iter, self.max_iter = 0, 0, steps
        evaluator = Evaluator(lambda: {"val": {"raw": _accuracy(next(top1))}}, period, patience)
        self.hooks = [evaluator, Checkpoints(every, evaluator)]
        self.checkpointer = SafeCheckpointer(nn.Linear(1, 1), str(folder), keep=kept)

    def save_checkpoint(self, name):
        self.checkpointer.save(name, iteration=self.iter)

    def run(self):
        with EventStorage() as self.storage:
            for hook in self.hooks:
                hook.trainer = self
                hook.before_train()
            while self.iter < self.max_iter:
                self.storage.iter = self.iter
                self.storage.put_scalars(total_loss=1.0, images_per_second=1.0, lr=0.1)
                for hook in self.hooks:
                    hook.after_step()
                self.iter += 1
        self.checkpointer.wait()
        return self


def _step(path):
    return torch.load(path, weights_only=True)["iteration"] + 1


def test_the_newest_checkpoints_are_kept(tmp_path):
    Trainer(tmp_path, [50], 6, period=100, kept=2, every=1).run()
    numbered = sorted(path.name for path in tmp_path.glob("model_0*.pth"))
    assert numbered == ["model_0000003.pth", "model_0000004.pth"]


def test_a_resumed_run_reckons_its_end_from_its_own_steps(monkeypatch, caplog):
    caplog.set_level("INFO", "lambda_det.progress")
    now = [100.0]
    monkeypatch.setattr(hooks.time, "perf_counter", lambda: now[0])
    trainer = SimpleNamespace(
        start_iter=90,
        max_iter=110,
        plan=SimpleNamespace(epochs=lambda step: step / 10),
        cfg=SimpleNamespace(
            SOLVER=SimpleNamespace(EPOCHS=11.0), MODEL=SimpleNamespace(DEVICE="cpu")
        ),
    )
    printer = ProgressPrinter(trainer)
    now[0] += 40  # ten steps of four seconds
    with EventStorage(99) as storage:
        storage.put_scalars(total_loss=1.0, lr=0.1, images_per_second=2.0, time=4.0, data_time=1.0)
        printer.write()
    assert "left 0:00:40" in caplog.text
    assert "data 1000 ms (25%)" in caplog.text


def test_the_best_is_that_of_the_best_evaluation(tmp_path):
    Trainer(tmp_path, [50, 60, 60, 40], 4, period=1).run()
    assert _step(tmp_path / "model_best.pth") == 2
    assert _step(tmp_path / "model_final.pth") == 4
