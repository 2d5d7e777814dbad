"""The trainer on a toy task: how a run ends by the errors of others, and where it begins again."""

import argparse
import contextlib
import errno
import os
import threading
from functools import partial
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from detectron2.engine import HookBase
from detectron2.utils.events import EventStorage
from fvcore.common.param_scheduler import ExponentialParamScheduler
from torch import nn
from torch.nn.utils import prune, spectral_norm

from lambda_det.errors import ConfigError, DiskError, Preempted, WeightsError
from lambda_det.files import replace_file
from lambda_det.training import checkpointer, start
from lambda_det.training import hooks as our_hooks
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.training.log import BufferedLog
from lambda_det.training.run_folder import RunFolder, RunLock
from lambda_det.training.task import RAW, Task
from lambda_det.training.trainer import STATISTICS_SEED, Trainer
from tests.reliability.runs import content, differences, metrics
from tests.training.toy import ToyModel, items, settings, weights


class _Loader:
    def __init__(self):
        self.begun, self.ended = [], 0

    def begin(self, seed, batches):
        self.begun.append((seed, batches))

    def __iter__(self):
        data = items(64, seed=self.begun[-1][0])[2 * self.begun[-1][1] :]
        try:
            for first in range(0, len(data), 2):
                yield data[first : first + 2]
        finally:
            self.ended += 1

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class _Noisy(ToyModel):
    """With dropout and a batch norm."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4), *self.layers)


class _AtStep(HookBase):
    """Does something in the third step, and has a checkpoint after the second."""

    def __init__(self, work):
        self._work = work

    def before_step(self):
        if self.trainer.iter == 2:
            self._work(self.trainer)


class ToyTask(Task):
    """A regression whose checkpoints, averages and statistics are those of any task."""

    on_resume = MappingProxyType({})
    metrics = ("toy/score",)

    def __init__(self, folder, work=None, **changes):
        self.settings = settings(output_dir=str(folder), checkpoint_period=2, **changes)
        self.work = work
        self.evaluated = []

        self.finished = []

    @classmethod
    def read(cls, args, file=None): ...

    def prepare(self, *, train):
        return self

    def finish(self, results):
        self.finished.append(results)

    def dump(self):
        return "A: 1\n"

    def build_model(self):
        return _Noisy()

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def build_schedule(self):
        return ExponentialParamScheduler(1.0, 0.9**self.settings.max_iter)

    def build_train_loader(self, *, for_statistics=False):
        return _Loader()

    def build_hooks(self):
        return [_AtStep(self.work)] if self.work else []

    def evaluate(self, models, *, final):
        self.evaluated.append(set(models))
        state = [float(p.detach().sum()) for m in models.values() for p in m.parameters()]
        return {"toy": {"score": sum(state)}}


@pytest.fixture(autouse=True)
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def _make_a_mistake(_):
    raise ZeroDivisionError("a mistake")


def _ask_to_stop(trainer):
    original = trainer.step.run

    def run(batches, iteration):
        original(batches, iteration)
        trainer.step.stop_signal = 15

    trainer.step.run = run


def test_a_run_with_averages_and_statistics_is_resumed_to_the_bit(folder, tmp_path):
    changes = {"ema_decay": 0.9, "precise_bn_batches": 2, "eval_period": 2.5, "patience": 9}
    (tmp_path / "whole").mkdir()
    task = ToyTask(tmp_path / "whole", **changes)
    Trainer(task).train()
    assert task.evaluated == [{"raw", "ema"}] * 3
    with pytest.raises(ZeroDivisionError):
        Trainer(ToyTask(folder, _make_a_mistake, **changes)).train()
    resumed = Trainer(ToyTask(folder, **changes), RunFolder(folder).read_newest())
    assert resumed.start_iter == 2
    resumed.train()
    for name in ("model_final.pth", "model_best.pth"):
        assert differences(content(tmp_path / "whole" / name), content(folder / name)) == []
    assert differences(metrics(tmp_path / "whole"), metrics(folder)) == []
    saved = content(folder / "model_final.pth")
    assert saved["precise_statistics"] == ["ema", "raw"] and saved["ema"]["updates"] == 6


@pytest.mark.parametrize("moment", ["evaluate", "link", "before_train"])
def test_a_line_of_the_log_is_written_after_a_kill_at_its_evaluation(
    folder, tmp_path, monkeypatch, moment
):
    """In it; after it; and after it once more where a resumed run began with it."""
    changes = {"eval_period": 3, "log_period": 2}
    (tmp_path / "whole").mkdir()
    Trainer(ToyTask(tmp_path / "whole", **changes)).train()
    first = "evaluate" if moment == "before_train" else moment
    for owner, name in (
        (SafeCheckpointer, "link"),
        (Trainer, "evaluate"),
        (our_hooks.RunWriter, "before_train"),
    ):
        if name not in (first, moment):
            continue
        trainer = Trainer(ToyTask(folder, **changes), RunFolder(folder).read_newest())
        with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
            patched.setattr(owner, name, lambda *_: 1 / 0)
            patched.setattr(Trainer, "_record", lambda _: None)  # as after a kill
            trainer.train()
        assert max(metrics(folder)) == 1
    Trainer(ToyTask(folder, **changes), RunFolder(folder).read_newest()).train()
    assert differences(metrics(tmp_path / "whole"), metrics(folder)) == []


class _Computed(ToyTask):
    """Trains a model of which a hook computes the last weights."""

    def build_model(self):
        model = _Noisy()
        self.change(model.layers[-1])
        return model


@pytest.mark.parametrize("change", [spectral_norm, partial(prune.identity, name="weight")])
def test_weights_that_a_hook_computes_are_averaged(folder, change):
    """PyTorch refuses to copy such a model. Only what is evaluated has precise statistics."""
    _Computed.change = staticmethod(change)
    changes = {"ema_decay": 0.5, "precise_bn_batches": 2, "evaluate_raw": False}
    trainer = Trainer(_Computed(folder, **changes))
    trainer.train()
    assert trainer.task.evaluated == [{"ema"}]
    assert content(folder / "model_final.pth")["precise_statistics"] == ["ema"]
    other = trainer.task.build_model().eval()
    other.load_state_dict(trainer.averaged.state_dict())
    assert not torch.equal(weights(other), weights(trainer.model))
    batch = items(4)
    assert trainer.averaged(batch) == other(batch)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_statistics_depend_on_seed_and_iteration_alone(folder, accumulate):
    """Their images have an order of their own, and not that of the steps."""
    trainer = Trainer(ToyTask(folder, seed=5, precise_bn_batches=2, accumulate=accumulate))
    trainer.iter = 1
    with EventStorage():
        trainer.evaluate()
    assert trainer._statistics_loader.begun == [(5 + STATISTICS_SEED, 2 * accumulate)]


@pytest.mark.parametrize(("work", "last"), [(_make_a_mistake, 1), (_ask_to_stop, 2), (None, 5)])
def test_what_led_to_the_end_is_on_record_and_the_loader_ends(folder, work, last):
    """Before step 20, after which the first record is due."""
    trainer = Trainer(ToyTask(folder, work))
    with contextlib.suppress(ZeroDivisionError, Preempted):
        trainer.train()
    assert list(metrics(folder)) == [last]
    assert trainer.loader.ended == 1


def _full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_the_step(folder, monkeypatch):
    """Not only with the next checkpoint, which may be thousands of steps later."""
    monkeypatch.setattr(checkpointer, "replace_file", _full_disk)
    task = ToyTask(folder, lambda trainer: trainer.checkpointer._last.exception())
    trainer = Trainer(task)
    with pytest.raises(DiskError, match=r"model_0000001\.pth could not be written: No space"):
        trainer.train()
    assert trainer.iter in (1, 2)  # the thread may be that fast


@pytest.mark.parametrize("full", [False, True])
def test_an_error_waits_for_a_checkpoint_and_is_not_hidden_by_its_error(
    folder, monkeypatch, caplog, full
):
    gate = threading.Event()

    def write(*arguments):
        assert gate.wait(30)
        (_full_disk if full else replace_file)(*arguments)

    def work(_):
        threading.Timer(0.2, gate.set).start()
        _make_a_mistake(_)

    monkeypatch.setattr(checkpointer, "replace_file", write)
    with pytest.raises(ZeroDivisionError):
        Trainer(ToyTask(folder, work)).train()
    assert ("model_0000001.pth could not be written: No space left" in caplog.text) == full
    assert bool(RunFolder(folder).last) != full


@pytest.mark.posix
def test_beside_a_run_no_other_is_possible_but_an_evaluation_is(folder):
    Trainer(ToyTask(folder)).train()
    before = {path.name for path in folder.iterdir()}
    with RunLock(str(folder)) as lock, BufferedLog() as log:
        lock.acquire()
        with pytest.raises(ConfigError, match="Another training runs in"):
            start.train(ToyTask(folder, max_iter=8), log, resume=True)
        assert {path.name for path in folder.iterdir()} == {*before, "run.lock"}
        task = ToyTask(folder)
        start.evaluate(task, log, resume=True)
        assert task.evaluated == [{RAW}]
    with BufferedLog() as log:
        start.train(ToyTask(folder, max_iter=8), log, resume=True)
    assert max(metrics(folder)) == 7


def _flags(eval_only=False):
    return argparse.Namespace(
        eval_only=eval_only, resume=True, debug_numerics=False, progress=False
    )


def test_a_training_and_an_evaluation_alone_are_finished_by_the_task(folder):
    """Where detection holds the results against TEST.EXPECTED_RESULTS."""
    for flags in (_flags(), _flags(eval_only=True)):
        task = ToyTask(folder)
        start.work(flags, task)
        assert [list(results) for results in task.finished] == [["toy"]]


def test_the_precision_of_float32_is_set_where_one_is_named(folder):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for name, convolutions in (("", before[1]), ("high", True), ("highest", False)):
            start.work(_flags(), ToyTask(folder, float32_precision=name))
            assert torch.get_float32_matmul_precision() == (name or before[0])
            assert torch.backends.cudnn.allow_tf32 == convolutions
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_another_number_of_images_per_step_is_refused(folder):
    Trainer(ToyTask(folder)).train()
    keys = {"accumulate": "ACCUMULATE", "images_per_step": "IMAGES"}
    task = ToyTask(folder, keys=keys, images_per_step=4)
    with pytest.raises(ConfigError, match=r"IMAGES 2\. This would be 4, .*ACCUMULATE"):
        Trainer(task, RunFolder(folder).read_newest())


def test_all_processes_take_the_checkpoint_of_the_first(folder, monkeypatch):
    saved = SafeCheckpointer(nn.Linear(1, 1), str(folder))
    saved.save("model_0000001")
    saved.wait()
    path = str(folder / "model_0000001.pth")
    assert start._read_newest_on_all(str(folder)).path == path
    # This is the second one, and its folder is empty or not there
    monkeypatch.setattr(start, "on_main_process", lambda work: None)
    first = [path]

    def on_others(own):
        if isinstance(own, str):
            return [first[0], own]
        return [own] if own is None else [True, own]

    monkeypatch.setattr(start, "comm", SimpleNamespace(all_gather=on_others))
    found = start._read_newest_on_all(str(folder / "elsewhere"))
    assert found.path == path and "model" in found.content
    first[0] = str(folder / "elsewhere/model_0000001.pth")
    with pytest.raises(WeightsError, match=r"Not every process finds .*elsewhere"):
        start._read_newest_on_all(str(folder / "elsewhere"))


def test_a_schedule_is_refused_before_the_model_is_made(folder):
    class Wrong(ToyTask):
        def build_schedule(self):
            raise ConfigError("no such schedule")

        def build_model(self):
            raise AssertionError("it takes long")

    with pytest.raises(ConfigError, match="no such schedule"):
        Trainer(Wrong(folder))


@pytest.mark.parametrize(
    ("groups", "rate"),
    [
        ({"layers": 0.1}, 0.1),
        # The rate of most parameters would be that of layers 2 and 4
        (
            {"layers.0": 0.05, "layers.1": 0.05, "layers.2": 0.01, "layers.4": 0.01},
            0.05,
        ),
        ({"layers.1": 0.5, "layers.2": 0.05, "layers.4": 0.05}, 0.05),
    ],
)
def test_the_rate_that_the_optimiser_was_made_with_is_recorded(folder, groups, rate):
    class Grouped(ToyTask):
        def build_optimizer(self, model):
            return torch.optim.SGD(
                [
                    {"params": own, "lr": own_rate}
                    for name, own_rate in groups.items()
                    if (own := [p for n, p in model.named_parameters() if n.startswith(name)])
                ],
                lr=0.05,
            )

    Trainer(Grouped(folder, max_iter=3)).train()
    (record, *_) = metrics(folder).values()
    assert record["lr"] == pytest.approx(rate * 0.9 ** min(metrics(folder)))
