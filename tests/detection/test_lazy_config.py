"""LazyConfigs: reading, as settings of a run, and saving."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from detectron2.config import LazyCall, LazyConfig
from detectron2.data import MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.evaluation import (
    DatasetEvaluators,
)
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone.regnet import SimpleStem
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lambda_det.config import CONFIGS, FIXED, FREE, on_resume
from lambda_det.detection import DetectionTask
from lambda_det.detection.config_files import load_file
from lambda_det.detection.data import register_shapes
from lambda_det.detection.lazy import _check_key, dump_lazy, read_saved
from lambda_det.errors import ConfigError, DataError
from lambda_det.training.config_file import ConfigFile
from lambda_det.training.run_folder import RunFolder
from lambda_det.weights.provenance import PixelSettings
from tests.shapes import make_shapes


def loaded(*opts: str, file: Path = CONFIGS / "mask_rcnn_lambdaresnet50.py") -> DictConfig:
    return load_file(file, opts)


def test_what_is_saved_is_loaded_again(tmp_path):
    lazy = loaded("model.backbone.bottom_up.norm=GN", "+model.vis_period=7")
    (tmp_path / "config.yaml").write_text(dump_lazy(lazy))
    again = loaded(file=tmp_path / "config.yaml")
    assert dump_lazy(again) == dump_lazy(lazy)
    assert again.model.vis_period == 7
    with torch.device("meta"):
        made = (DetectionTask(config).components.make_model() for config in (lazy, again))
        before, after = (model.state_dict() for model in made)
    assert [(k, v.shape) for k, v in before.items()] == [(k, v.shape) for k, v in after.items()]
    # in the order of the file, in which nodes draw their random numbers
    assert list(again.model) == list(lazy.model)


def test_what_differs_from_a_saved_file(tmp_path):
    """What YAML cannot hold is saved as a text, and settings of the trainer are not compared."""
    call, other = LazyCall(sorted)(key=len, nesterov=True), LazyCall(sorted)(a=2)
    saved = {"a": lambda x: x, "b": object, "c": (1, 2), "d": call, "train": {"seed": 1}}
    now = saved | {"c": (1, 3), "d": LazyCall(sorted)(key=len, params=other), "train": {"amp": {}}}
    one, two = (
        dump_lazy(DictConfig(config, flags={"allow_objects": True})) for config in (saved, now)
    )
    (tmp_path / "config.yaml").write_text(one)
    assert list(RunFolder(tmp_path).changed_keys(one)) == []
    found = {key: list(map(str, values)) for key, *values in RunFolder(tmp_path).changed_keys(two)}
    assert found == {
        "c": ["[1, 2]", "[1, 3]"],
        "d.nesterov": ["True", "not set"],
        "d.params._target_": ["not set", "builtins.sorted"],
        "d.params.a": ["not set", "2"],
    }


@pytest.fixture
def task(tmp_path) -> DetectionTask:
    """Of small shapes, in folders of their own."""
    make_shapes(tmp_path, num_train=4, num_val=1, size=64)
    register_shapes(tmp_path)
    words = ["image_size=64", "train.num_workers=0", "train.total_batch_size=4"]
    words += ["train.dataset.names=shapes_train", "test.dataset.names=shapes_val"]
    return DetectionTask(loaded(*(f"dataloader.{word}" for word in words)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shapes_mine", "shapes_mine"),
        ("shapes_panoptic_train", "shapes_panoptic"),
        # Messages were once translated by replacing keys of YAML in their text, SEED among them
        ("seedlings", r"/data/SEEDLINGS/train\.json"),
    ],
)
def test_data_that_are_missing_or_not_registered_are_refused_before_a_run(
    task, tmp_path, name, words
):
    register_coco_instances("seedlings", {}, "/data/SEEDLINGS/train.json", str(tmp_path))
    task.check_data(train=True)
    task.config.dataloader.train.dataset.names = ["shapes_train", name]
    with pytest.raises((ConfigError, DataError), match=words):
        DetectionTask(task.config).check_data(train=True)


def test_a_training_on_nothing_is_refused_before_a_run(task, caplog):
    """With filter_empty False each image would be background, in all steps."""
    labels = Path(MetadataCatalog.get("shapes_train").json_file)
    content = json.loads(labels.read_text())
    labels.write_text(json.dumps(content | {"annotations": []}))
    with pytest.raises(DataError, match="shapes_train"):
        task.check_data(train=True)
    task.check_data(train=False)
    task.config.model._target_ = "detectron2.modeling.SemanticSegmentor"  # learns from masks
    DetectionTask(task.config).check_data(train=True)
    assert "no annotation" not in caplog.text
    task.config.model._target_ = "another_project.Model"  # may learn from images alone
    DetectionTask(task.config).check_data(train=True)
    assert "shapes_train: no annotation to train on" in caplog.text


def test_an_evaluation_of_nothing_is_refused(task):
    del task.config.dataloader.evaluator
    bare = DetectionTask(task.config)
    bare.check_data(train=True)
    assert bare.evaluate({"raw": None}, final=True) == {}
    with pytest.raises(ConfigError, match=r"dataloader\.evaluator"):
        bare.check_data(train=False)


def test_an_evaluator_that_cannot_be_made_ends_the_run_before_it_begins(task):
    task.config.dataloader.evaluator.task = "bbox"
    with pytest.raises(ConfigError, match=r"dataloader\.evaluator.*task"):
        DetectionTask(task.config).check_data(train=True)


def test_keys_of_train_that_nothing_reads_are_named(task, caplog):
    task.check_data(train=True)
    assert "Nothing here reads" not in caplog.text
    task.config.train.clip_gradients = {"enabled": True}
    task.config.train.lr = 0.1  # the rate is optimizer.lr
    DetectionTask(task.config).check_data(train=True)
    assert "Nothing here reads train.clip_gradients, train.lr" in caplog.text


def test_detrex_s_names_of_clipping_and_averaging():
    config = loaded()
    plain = DetectionTask(config).settings
    assert (plain.clipping, plain.ema_decay) == (None, 0)
    # What is off is not read
    config.train.clip_grad = {"enabled": False, "params": {"max_norm": "${of_another.file}"}}
    assert DetectionTask(config).settings.clipping is None
    config.train.clip_grad = {"enabled": True, "params": {"max_norm": 0.1, "norm_type": 2}}
    config.train.model_ema = {"enabled": True, "decay": 0.99}
    task = DetectionTask(config)
    clipping = task.settings.clipping
    assert (clipping.kind, clipping.limit, task.settings.ema_decay) == ("full_model", 0.1, 0.99)
    rules = {"enabled": FIXED, "decay": FIXED, "use_ema_weights_for_eval_only": FREE}
    assert {n: on_resume(task.on_resume, f"train.model_ema.{n}") for n in rules} == rules
    for impossible in ({"max_norm": 0.0}, {"max_norm": "0.1"}, {"max_norm": True}, {}):
        config.train.clip_grad.params = impossible
        with pytest.raises(ConfigError, match=r"train\.clip_grad\.params\.max_norm"):
            DetectionTask(config)


def test_the_rate_that_was_scaled_to_the_processes_reaches_the_optimiser(task):
    settings = replace(task.settings, base_lr=0.125)
    optimizer = task.components.make_optimizer(settings, nn.Linear(2, 2))
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


def test_the_files_of_averaged_weights_have_a_folder_of_their_own(task, tmp_path):
    loader = task.config.dataloader
    task.config.train.output_dir = str(tmp_path)
    one = task.components.make_evaluator("", "")
    assert one._output_dir == str(tmp_path / "inference")
    loader.evaluator.dataset_name = "shapes_val"
    loader.evaluator = LazyCall(DatasetEvaluators)(evaluators=[loader.evaluator])
    [made] = DetectionTask(task.config).components.make_evaluator("", "_EMA")._evaluators
    assert made._output_dir == str(tmp_path / "inference_EMA")


def test_an_unreadable_image_is_replaced_or_ends_the_run(task, tmp_path):
    broken = sorted((tmp_path / "shapes/train").iterdir())[0]
    broken.write_bytes(b"nothing")
    batch = next(iter(task.build_train_loader()))
    assert len(batch) == 4 and broken.name not in {Path(i["file_name"]).name for i in batch}
    task.config.dataloader.train.max_unreadable = 0
    with pytest.raises(DataError, match="as max_unreadable is 0"):
        next(iter(task.build_train_loader()))


def test_pixel_settings_are_named_by_the_keys_of_a_lazyconfig():
    pixels = DetectionTask(loaded()).pixels
    with pytest.raises(ConfigError, match=r"model\.pixel_std .*\(now"):
        pixels.check(PixelSettings("BGR", pixels.mean, [9.0] * 3), "weights.pth")


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/name:os.nowhere",
        "a: !!python/name:os.mkdir",
        "a: !!python/module:this",
        "a: !!python/object/new:os.mkdir []",
        "a: 1\nb: !!python/object/apply:os.mkdir [it_ran]",
        "a: [",
        "[]",
        None,
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_runs_nothing(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        loaded(file=file)
    assert not (tmp_path / "it_ran").exists()


def test_the_objects_of_a_saved_file(tmp_path):
    """As LazyConfig.save of Detectron2 writes them, of its own Mask R-CNN and RegNet."""
    objects = {"a": ShapeSpec(channels=8, height=7), "b": SimpleStem}
    file = tmp_path / "config.yaml"
    LazyConfig.save(DictConfig(objects, flags={"allow_objects": True}), str(file))
    file.write_text(file.read_text() + "c: !!python/tuple [1, 2]\n")
    read = read_saved(ConfigFile(file))
    assert read == objects | {"c": (1, 2)}
    assert OmegaConf.create(read, flags={"allow_objects": True}).a == objects["a"]


def test_a_value_that_is_left_to_the_command_line():
    """And a list's items have keys as well."""
    config = OmegaConf.create({"train": {"x": "???", "steps": [1, 2]}})
    for key in ("train.x", "train.steps.1"):
        _check_key(config, key)
    for key in ("train.y", "train.steps.2", "train.x.z"):
        with pytest.raises(ConfigError, match=key):
            _check_key(config, key)


@pytest.mark.parametrize(
    ("opt", "words"),
    [
        ("train.max_iter=1.5", "train.max_iter is 1.5"),
        ("train.max_itr=9", "did you mean train.max_iter"),
        ("train.max_iter.steps=1", "train.max_iter.steps"),
        ("~train.max_iter", "remove"),
        ("train.test_precision=float8", "train.test_precision is 'float8'"),
        ("optimizer.lr=0", "optimizer.lr is 0"),
        ("train.max_iter=-1", "train.max_iter is -1"),
        ("train.max_iter=True", "train.max_iter is True"),  # trained one step
        ("train.event_writers=wandb", "train.event_writers is 'wandb'"),
        ("--resume", "words after the flags"),
        ("MODEL.DEVICE", "MODEL.DEVICE"),
        ("dataloader.foo.bar=3", "dataloader.foo.bar"),
    ],
)
def test_values_and_keys_that_cannot_be(opt, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        DetectionTask(loaded(opt))


def test_helpers_of_a_file_and_new_arguments_may_be_set():
    lazy = loaded(
        "dataloader.image_size=64",
        "+dataloader.image_size=96",
        "optimizer.nesterov=True",
        "+train.wandb={project: mine}",
        "optimizer.lr=1",
    )
    assert DetectionTask(lazy).settings.base_lr == 1
    assert lazy.dataloader.image_size == 96
    assert lazy.optimizer.nesterov and lazy.train.wandb.project == "mine"


@pytest.mark.slow
def test_an_error_of_a_file_or_a_node_names_its_place(tmp_path):
    mine, saved = tmp_path / "mine.py", tmp_path / "saved.yaml"
    mine.write_text("model = 1\nother = undefined\n")
    with pytest.raises(ConfigError, match=r"mine\.py cannot be loaded: NameError: .*line 2"):
        loaded(file=mine)
    saved.write_text(dump_lazy(loaded()).replace("num_classes", "num_klasses"))
    with pytest.raises(ConfigError, match=r"configuration's model cannot be made.*num_klasses"):
        DetectionTask(loaded(file=saved)).components.make_model()


def test_the_cost_of_evaluations_of_several_test_sets_and_of_a_loader_without_a_name(task):
    config = task.config
    config.dataloader.test.dataset.names = ["shapes_val", "shapes_train"]
    both = DetectionTask(config).cost_of_evaluation()
    assert both == pytest.approx(5 * task.cost_of_evaluation())
    config.dataloader.test.dataset = {"_target_": "builtins.list"}
    assert DetectionTask(config).cost_of_evaluation() == 0
