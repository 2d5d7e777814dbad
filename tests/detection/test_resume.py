"""A detection run that is stopped anywhere and resumed is, bit by bit, the run that was not."""

import itertools
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from detectron2.modeling import GeneralizedRCNN

from lambda_det.detection import DetectionTask, parser, run, schedule
from lambda_det.errors import ConfigError, Preempted
from lambda_det.training import trainer as trainer_module
from tests.reliability.ends import end_here
from tests.reliability.runs import DETECTOR, assert_same_run, content, differences, metrics
from tests.shapes import data_words
from tests.training.toy import let_logs_reach_pytest

pytestmark = pytest.mark.slow  # trains

CONFIG = (
    DETECTOR.replace("MASK_ON: True", "MASK_ON: False").replace(
        "lambda_resnet26_slim", "resnet14_slim_lambda_c5"
    )
    + """INPUT: {MIN_SIZE_TRAIN: [40, 64], MAX_SIZE_TRAIN: 64, MIN_SIZE_TEST: 32, MAX_SIZE_TEST: 32}
DATALOADER: {NUM_WORKERS: 0}
SOLVER: {IMS_PER_BATCH: 2, BASE_LR: 0.02, MAX_ITER: 6, STEPS: [4], WARMUP_ITERS: 2,
         CHECKPOINT_PERIOD: 2}
TEST: {EVAL_PERIOD: 3}
SEED: 1
"""
)
# Six steps: checkpoints after 2, 3, 4 and 6, evaluations after 3 and 6
PRECISE = (
    "SOLVER.ACCUMULATE_GRADIENTS 2 TEST.PRECISE_BN.ENABLED True TEST.PRECISE_BN.NUM_ITER 2 "
    "SOLVER.OPTIMIZER AdamW SOLVER.BASE_LR 0.002 SOLVER.BACKBONE_MULTIPLIER 0.1 "
    "SOLVER.CLIP_GRADIENTS.ENABLED True"
)


@pytest.fixture(autouse=True)
def short_log_period(monkeypatch):
    """Records that are due at, before and after the steps at which a run is stopped."""
    monkeypatch.setattr(schedule, "LOG_PERIOD", 2)


@pytest.fixture(autouse=True)
def logs_reach_pytest(monkeypatch):
    let_logs_reach_pytest(monkeypatch)


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """A command line without its OUTPUT_DIR."""
    root = tmp_path_factory.mktemp("data")
    (root / "config.yaml").write_text(CONFIG)
    config = ["--config-file", str(root / "config.yaml")]
    return config + data_words(root, num_train=7, num_val=2, size=48)


@pytest.fixture
def train(flags):
    """Runs or resumes a training in a folder."""

    def call(folder: Path, *words: str, resume: bool = False) -> None:
        more = ["--resume"] if resume else []
        run(parser().parse_args([*flags, *more, "OUTPUT_DIR", str(folder), *words]))

    return call


def assert_same(one: Path, other: Path) -> None:
    assert_same_run(one, other)
    assert sorted(p.name for p in one.glob("*.pth")) == sorted(p.name for p in other.glob("*.pth"))


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """The folder of a run that nobody stopped."""

    @cache
    def folder(keys: str = "") -> Path:
        output = tmp_path_factory.mktemp("whole")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schedule, "LOG_PERIOD", 2)
            words = ["OUTPUT_DIR", str(output), *keys.split()]
            run(parser().parse_args([*flags, *words]))
        return output

    return folder


def test_a_drawn_seed_is_that_of_the_whole_run(train, tmp_path):
    def seed_of(folder: str, steps: int, **more: bool) -> int:
        words = ["SEED", "-1", "SOLVER.MAX_ITER", str(steps), "DATASETS.TEST_JSON", ""]
        train(tmp_path / folder, *words, **more)
        return content(tmp_path / folder / "model_final.pth")["trainer"]["seed"]

    seed = seed_of("run", 1)
    assert seed_of("run", 2, resume=True) == seed != seed_of("other", 1)


@pytest.mark.parametrize("evaluation", [1, 2])
def test_statistics_that_did_not_end_come_before_it(
    train, whole, tmp_path, monkeypatch, evaluation
):
    folder, words = tmp_path / "run", PRECISE.split()
    original, calls = trainer_module.estimate_statistics, []

    def estimate_statistics(*args):
        calls.append(1)
        if len(calls) == evaluation:
            end_here("told")
        original(*args)

    last = folder / ("model_0000002.pth", "model_final.pth")[evaluation - 1]
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "estimate_statistics", estimate_statistics)
        with pytest.raises(Preempted, match=f"after step {3 * evaluation}; {last} holds"):
            train(folder, *words)
    running = content(last)
    train(folder, *words, resume=True)
    assert_same(whole(PRECISE), folder)
    # The checkpoint has the statistics now that it was evaluated with
    precise = content(whole(PRECISE) / last.name)
    assert precise["trainer"]["hooks"]["Evaluation"]["last_step"] == 3 * evaluation
    weights = differences(running["model"], precise["model"])
    changed = {line.split(":")[0].rsplit(".", 1)[-1] for line in weights}
    assert changed == {"running_mean", "running_var", "num_batches_tracked"}


def test_a_finished_run_is_made_longer(train, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole(), folder)
    before = metrics(folder)
    train(folder, "SOLVER.MAX_ITER", "7", "SOLVER.STEPS", "(2, 4)", resume=True)
    assert content(folder / "model_final.pth")["iteration"] == 6
    after = metrics(folder)
    # By the new schedule from its first step on
    assert after[6]["lr"] == pytest.approx(before[max(before)]["lr"] / 10)
    assert differences(before, {key: after[key] for key in before}) == []
    assert max(after) == 6


def test_what_may_change_and_what_not(train, whole, tmp_path, caplog):
    folder = tmp_path / "run"
    shutil.copytree(whole(), folder)
    with pytest.raises(ConfigError, match="SEED 1; now it is 2"):
        train(folder, "SEED", "2", resume=True)
    train(folder, "DATALOADER.NUM_WORKERS", "1", "SOLVER.MAX_ITER", "7", resume=True)
    assert "the samples are others" not in caplog.text
    train(folder, "INPUT.MAX_SIZE_TRAIN", "48", "SOLVER.MAX_ITER", "8", resume=True)
    assert "INPUT.MAX_SIZE_TRAIN changed: " in caplog.text
    assert "Batch norms" not in caplog.text
    train(folder, "SOLVER.ACCUMULATE_GRADIENTS", "2", resume=True)  # as two processes would
    assert "1 from here on, and 2 before" in caplog.text


def test_a_foreign_loader_is_named_where_its_order_starts_anew(
    train, tmp_path, monkeypatch, caplog
):
    make, words = DetectionTask.build_train_loader, ["DATASETS.TEST_JSON", "", "SOLVER.MAX_ITER"]
    monkeypatch.setattr(
        DetectionTask, "build_train_loader", lambda self: list(itertools.islice(make(self), 4))
    )
    train(tmp_path / "run", *words, "1")
    assert "begin in the middle" not in caplog.text
    train(tmp_path / "run", *words, "2", resume=True)
    assert caplog.text.count("a list, cannot begin in the middle of its images") == 1


@pytest.mark.parametrize(("step", "reference"), [(0, "0"), (4, "1")])
def test_what_a_full_memory_says_to_type_continues_the_run(
    train, tmp_path, monkeypatch, step, reference
):
    """With the same images in more parts, also where accumulated batches count as processes."""
    words = ["SOLVER.REFERENCE_WORLD_SIZE", reference, "DATALOADER.ASPECT_RATIO_GROUPING", "False"]
    folder, original, taken, full = tmp_path / "run", GeneralizedRCNN.forward, [], [2 * step]

    def forward(self, images):
        if self.training:
            if full == [len(taken)]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            taken.extend(image["image_id"] for image in images)
        return original(self, images)

    monkeypatch.setattr(GeneralizedRCNN, "forward", forward)
    with pytest.raises(ConfigError) as caught:
        train(folder, *words)
    given = re.search(r"--resume and ((?:[A-Z_.]+ \d+ )+)", str(caught.value))[1].split()
    assert given[:2] == ["SOLVER.ACCUMULATE_GRADIENTS", "2"]
    full.clear()
    train(folder, *words, *given, resume=True)
    train(tmp_path / "whole", *words)
    assert len(taken) == 24 and taken[:12] == taken[12:]
    if step == 0:
        train(tmp_path / "parts", *words, *given)
        assert_same(tmp_path / "parts", folder)
