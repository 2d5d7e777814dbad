"""A configuration file: what it describes, that it is opened once, and how a task gets around."""

import argparse
import builtins
import io
import os
import pickle
from collections import Counter
from pathlib import Path

import pytest

from lambda_det import cli
from lambda_det.config import CONFIGS, REMOVED_KEYS, leaves
from lambda_det.detection import DetectionTask, lazy_parser, load_config, parser
from lambda_det.detection.lazy import dump_lazy, load_lazy_config
from lambda_det.errors import ConfigError
from lambda_det.training.config_file import CLASSIFIER, DETECTOR, LAZY, ConfigFile, kind_of

YAML, PYTHON = "mask_rcnn_lambdaresnet50.yaml", "mask_rcnn_lambdaresnet50.py"


@pytest.fixture
def opened(monkeypatch):
    """How many times each file was opened, by its name."""
    counts, really = Counter(), io.open

    def count(file, *args, **options):
        if not isinstance(file, int):  # of a descriptor
            counts[Path(os.fsdecode(file)).name] += 1
        return really(file, *args, **options)

    monkeypatch.setattr(io, "open", count)
    monkeypatch.setattr(builtins, "open", count)
    return counts


@pytest.fixture
def started(monkeypatch):
    """The tasks that would be trained."""
    tasks = []
    monkeypatch.setattr(
        "lambda_det.distributed.launch.launch",
        lambda work, args, **device: tasks.append(work.keywords["task"]),
    )
    return tasks


@pytest.fixture
def saved(tmp_path):
    """A LazyConfig as its run saved it."""
    task = DetectionTask.read(lazy_parser().parse_args(["--config", str(CONFIGS / PYTHON)]))
    (tmp_path / "config.yaml").write_text(dump_lazy(task.config))
    return tmp_path / "config.yaml"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("MODEL: {MASK_ON: true}\n", DETECTOR),
        ("MODEL: {NAME: resnet50}\n", CLASSIFIER),
        ("DATA: {TRAIN: a}\n", CLASSIFIER),
        ("_BASE_: base.yaml\nSEED: 3\n", CLASSIFIER),
        ("model: {a: 3}\n", LAZY),
        ("model: {a: !!python/tuple [3]}\n", LAZY),
        ("MODEL: {a: !!python/tuple [3]}\n", DETECTOR),
        ("model: 3\n", DETECTOR),
        ("- DATA\n", DETECTOR),
        ("DATA: [\n", DETECTOR),
        ("_BASE_: mine.yaml\n", DETECTOR),
        ("_BASE_: nowhere.yaml\nDATA: {}\n", DETECTOR),
    ],
)
def test_what_a_file_describes(tmp_path, text, kind):
    (tmp_path / "base.yaml").write_text("DATA: {TRAIN: a}\n")
    (tmp_path / "mine.yaml").write_text(text)
    assert kind_of(ConfigFile(tmp_path / "mine.yaml")) == kind
    assert kind_of(ConfigFile(tmp_path / "nowhere.yaml")) == DETECTOR
    assert kind_of(ConfigFile("nowhere.py")) == LAZY


@pytest.fixture
def removed(monkeypatch):
    """Keys that an earlier version had, of YAML and of a LazyConfig."""
    for key in ("SOLVER.GONE", "train.gone"):
        monkeypatch.setitem(REMOVED_KEYS, key, "SOLVER.STAYS does it now.")


_WITH_REMOVED = {
    "yaml": ("SOLVER: {GONE: 3, BASE_LR: 0.5}\n", ["SOLVER.GONE", "3"], load_config),
    "lazy": ("model: {}\ntrain: {gone: 3, seed: 4}\n", ["train.gone=3"], load_lazy_config),
}


@pytest.mark.parametrize("kind", _WITH_REMOVED)
@pytest.mark.usefixtures("removed")
def test_a_removed_key_is_refused_by_its_name_unless_a_run_recorded_it(tmp_path, kind):
    text, words, load = _WITH_REMOVED[kind]
    file = tmp_path / "config.yaml"
    file.write_text(text)
    args = argparse.Namespace(config_file=str(file), opts=[])
    key = r"(SOLVER|train)\.(GONE|gone)"
    with pytest.raises(ConfigError, match=rf"config\.yaml sets {key}.*SOLVER\.STAYS"):
        load(args)
    (tmp_path / "log.txt").touch()  # so it is that of a run
    config = load(args)
    assert (config.SOLVER.BASE_LR if kind == "yaml" else config.train.seed) in (0.5, 4)
    assert not {"GONE", "gone"} & {*config.get("SOLVER", ()), *config.get("train", ())}
    args.opts = words
    with pytest.raises(ConfigError, match=f"command line sets {key}.*"):
        load(args)


@pytest.mark.usefixtures("removed")
def test_a_checkpoint_with_a_removed_key_is_read_without_it():
    text, words, _ = _WITH_REMOVED["yaml"]
    args = argparse.Namespace(config_file="model_final.pth", opts=[])
    recorded = ConfigFile(args.config_file, text)
    assert load_config(args, recorded).SOLVER.BASE_LR == 0.5
    args.opts = words
    with pytest.raises(ConfigError, match=r"SOLVER\.GONE"):
        load_config(args, recorded)


def test_a_removed_key_is_no_key_and_has_a_sentence():
    keys = {key for key, _ in leaves(load_config(parser().parse_args([])))}
    assert not keys & REMOVED_KEYS.keys()
    assert all(sentence.endswith(".") for sentence in REMOVED_KEYS.values())


@pytest.fixture
def program(tmp_path):
    """A LazyConfig that asks how many processes there are, and adds a letter to ``ran``."""
    (tmp_path / "mine.py").write_text(
        "from detectron2.utils import comm\n"
        "from lambda_det import get_config\n"
        f"made = get_config({PYTHON!r})\n"
        "dataloader, lr_multiplier, model = made.dataloader, made.lr_multiplier, made.model\n"
        "optimizer, train = made.optimizer, made.train\n"
        "train.log_period = 10 * comm.get_world_size()\n"
        f"with open({str(tmp_path / 'ran')!r}, 'a') as file:\n"
        "    file.write('x')\n"
    )
    return tmp_path / "mine.py"


@pytest.mark.parametrize("name", [YAML, "imagenet/lambda_resnet50_160.yaml", "saved"])
def test_a_command_opens_each_file_once(name, saved, opened, started):
    """Also those of its _BASE_."""
    file = saved if name == "saved" else CONFIGS / name
    opened.clear()
    assert cli.main(["train", "--config", str(file)]) == 0
    assert opened[file.name] == 1 and len(started) == 1
    bases = [ours for ours in opened if (file.parent / ours).is_file()]
    assert {opened[base] for base in bases} == {1}
    assert len(bases) > 1 or name == "saved"


def test_a_command_runs_the_program_of_a_lazy_config_once(program, started):
    assert cli.main(["train", "--config", str(program)]) == 0
    assert program.with_name("ran").read_text() == "x" and len(started) == 1


# ------------------------------------------------------------------------------ to other processes
class MyTask(DetectionTask):
    """A task of another project."""


def test_a_task_of_yaml_goes_to_another_process_with_its_configuration(tmp_path, opened):
    (tmp_path / "mine.yaml").write_text("MODEL: {ROI_HEADS: {NAME: PointRendROIHeads}}\n")
    flags = ["--config", str(tmp_path / "mine.yaml"), "SOLVER.EMA_DECAY", "0.9"]
    task = MyTask.read(parser().parse_args([*flags, "DATASETS.TRAIN", "()"]))
    opened.clear()
    there = pickle.loads(pickle.dumps(task)).prepare(train=False)
    assert type(there) is MyTask
    assert there.config == task.config and there.settings == task.settings
    assert there.settings.ema_decay == 0.9
    assert not opened["mine.yaml"]


def test_each_of_several_processes_runs_the_program_of_a_lazy_config(program, monkeypatch):
    """Once they are connected, because it may ask for their number."""
    task = MyTask.read(argparse.Namespace(config_file=str(program), opts=[]))
    assert task.settings.log_period == 10
    monkeypatch.setattr("detectron2.utils.comm.get_world_size", lambda: 2)
    for other in (task, pickle.loads(pickle.dumps(task))):
        there = other.prepare(train=False)
        assert there.settings.log_period == 20 and type(there) is MyTask
