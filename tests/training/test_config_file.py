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
from lambda_det.detection.lazy import dump_lazy
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


@pytest.mark.parametrize("is_of_checkpoint", [True, False])
def test_a_removed_key_is_refused_unless_a_run_recorded_it(tmp_path, is_of_checkpoint):
    """It is recorded in a checkpoint, or as the config.yaml of a run's folder."""
    text = f"{REMOVED_KEYS[0].replace('.', ': {')}: 3, BASE_LR: 0.5}}\n"
    path = tmp_path / "config.yaml"
    path.write_text(text)
    args = argparse.Namespace(config_file=str(path), opts=[])
    with pytest.raises(ConfigError, match=rf"config\.yaml sets {REMOVED_KEYS[0]}"):
        load_config(args)
    (tmp_path / "log.txt").touch()  # so it is that of a run
    file = ConfigFile("model_final.pth", text) if is_of_checkpoint else ConfigFile(path)
    assert load_config(args, file).SOLVER.BASE_LR == 0.5
    args.opts = [REMOVED_KEYS[0], "3"]
    with pytest.raises(ConfigError, match=f"command line sets {REMOVED_KEYS[0]}"):
        load_config(args, file)


def test_a_removed_key_is_no_key():
    assert not {*REMOVED_KEYS} & {key for key, _ in leaves(load_config(parser().parse_args([])))}


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
