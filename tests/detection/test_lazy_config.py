"""LazyConfigs: reading, as settings of a run, and saving."""

import argparse
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from detectron2.config import LazyCall, LazyConfig
from detectron2.data.transforms import RandomFlip, ResizeShortestEdge
from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    CityscapesSemSegEvaluator,
    COCOEvaluator,
    COCOPanopticEvaluator,
    DatasetEvaluators,
    LVISEvaluator,
)
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone.regnet import SimpleStem
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lambda_det.detection import DetectionTask, load_lazy_config
from lambda_det.detection.lazy import (
    dump_lazy,
    read_saved,
)
from lambda_det.errors import ConfigError, DataError
from lambda_det.training.run_folder import changed_keys
from lambda_det.weights.provenance import PixelSettings
from tests.shapes import shapes_by_flag

CONFIG = Path(__file__).parents[2] / "configs" / "mask_rcnn_lambdaresnet50.py"


def loaded(*opts: str, file: Path = CONFIG, **flags: str) -> DictConfig:
    return load_lazy_config(argparse.Namespace(config_file=str(file), opts=list(opts), **flags))


def test_the_largest_image_of_a_training():
    lazy = loaded("dataloader.image_size=1000")
    assert DetectionTask(lazy).parts.training_size == (1024, 1024)
    train = lazy.dataloader.train
    resize = LazyCall(ResizeShortestEdge)(short_edge_length=[640, 800], max_size=1333)
    train.mapper.augmentations = [resize, LazyCall(RandomFlip)()]
    assert DetectionTask(lazy).parts.training_size == (1344, 1344)
    del train.aspect_ratio_grouping
    assert DetectionTask(lazy).parts.training_size == (800, 1344)
    for unknown in (LazyCall(RandomFlip)(), LazyCall(RandomFlip)(crop_size=512), RandomFlip()):
        train.mapper.augmentations = [unknown]
        assert DetectionTask(lazy).parts.training_size is None


def test_what_is_saved_is_loaded_again(tmp_path):
    lazy = loaded("model.backbone.bottom_up.norm=GN", "+model.vis_period=7")
    (tmp_path / "config.yaml").write_text(dump_lazy(lazy))
    again = loaded(file=tmp_path / "config.yaml")
    assert dump_lazy(again) == dump_lazy(lazy)
    assert again.model.vis_period == 7
    with torch.device("meta"):
        before, after = (DetectionTask(r).parts.make_model().state_dict() for r in (lazy, again))
    assert [(k, v.shape) for k, v in before.items()] == [(k, v.shape) for k, v in after.items()]
    # in the order of the file, in which parts draw their random numbers
    assert list(again.model) == list(lazy.model)


def test_what_yaml_cannot_hold_is_saved_as_a_text(tmp_path):
    lazy = DictConfig(
        {"a": lambda x: x, "b": object, "c": (1, 2), "d": LazyCall(sorted)(key=len)},
        flags={"allow_objects": True},
    )
    text = dump_lazy(lazy)
    assert "builtins.sorted" in text and "[1, 2]" in text

    (tmp_path / "config.yaml").write_text(text)
    assert list(changed_keys(dump_lazy(lazy), tmp_path / "config.yaml")) == []
    lazy.c = (1, 3)
    assert [key for key, _, _ in changed_keys(dump_lazy(lazy), tmp_path / "config.yaml")] == ["c"]


def test_a_saved_configuration_is_compared_without_running_it(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "config.yaml").write_text(
        f"train:\n  output_dir: !!python/object/apply:os.mkdir ['{marker}']\n"
    )
    changes = {
        key: old for key, old, _ in changed_keys(dump_lazy(loaded()), tmp_path / "config.yaml")
    }
    assert changes["train.output_dir"] == [str(marker)] and not marker.exists()


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """The flags that name a data set to train on."""
    flags = shapes_by_flag(tmp_path, num_train=4, num_val=1, size=64)
    return {name: path for name, path in flags.items() if name.startswith("train")}


@pytest.fixture
def task(files) -> DetectionTask:
    small = ["image_size=64", "train.num_workers=0", "train.total_batch_size=4"]
    task = DetectionTask(loaded(*(f"dataloader.{pair}" for pair in small), **files))
    task.register_data()
    return task


def test_one_s_own_data(task, files):
    assert task.config.model.roi_heads.num_classes == 3
    assert task.config.dataloader.train.dataset.names == task.parts.train_names[0]
    # without test data of one's own there is nothing to evaluate on
    assert task.evaluate({"raw": None}, final=True) == {}
    task.check_data(train=True)
    with pytest.raises(ConfigError, match=r"dataloader\.test\.dataset\.names"):
        task.check_data(train=False)
    # The run's configuration has an evaluator for test data that come later
    task.config.dataloader.test_json = files["train_json"]
    task.config.dataloader.test_images = files["train_images"]
    task = DetectionTask(task.config)
    task.register_data()
    assert task.config.dataloader.evaluator.dataset_name == task.parts.test_names[0]


def test_means_in_the_other_order_are_warned_of(task, caplog):
    task.config.dataloader.train.mapper.image_format = "RGB"
    DetectionTask(task.config).check_data(train=True)  # that of the test follows
    assert "model.pixel_mean" in caplog.text


@pytest.fixture
def evaluated(task) -> DetectionTask:
    """With data to evaluate on, which are those of the training."""
    for split in ("train", "test"):
        task.config.dataloader[split].dataset.names = task.parts.train_names[0]
    task.config.dataloader.evaluator = loaded().dataloader.evaluator
    return DetectionTask(task.config)


def _evaluator(kind, name="${dataloader.test.dataset.names}", **options):
    return LazyCall(kind)(dataset_name=name, **options)


_OTHER = _evaluator(COCOEvaluator, "shapes_train")
_RETINANET = "detectron2.modeling.RetinaNet"


# A change of a configuration that could be trained and evaluated, and what the error names
REFUSED = [
    ({"model.roi_heads.num_classes": 4}, "model.roi_heads.num_classes is 4"),
    ({"dataloader.test.mapper.image_format": "RGB"}, "train.mapper.image_for"),
    ({"dataloader.train.mapper.image_format": "rgb"}, "train.mapper.image_format is 'rgb'"),
    ({"dataloader.evaluator": _OTHER}, "shapes_train"),
    ({"dataloader.evaluator": [_evaluator(COCOEvaluator), _OTHER]}, "shapes_train"),
    ({"dataloader.evaluator": LazyCall(DatasetEvaluators)(evaluators=[_OTHER])}, "shapes_train"),
    ({"dataloader.evaluator": {"_target_": "nowhere.Evaluator"}}, "nowhere"),
    ({"train.ddp.broadcast_buffers": True}, "train.ddp.broadcast_buffers"),
    ({"train.clip_grad": 1.0}, "train.clip_grad"),
    ({"train.model_ema.device": "cpu"}, "train.model_ema.device"),
    ({"train.test_aug.enabled": True, "model._target_": _RETINANET}, "train.test_aug.enabled"),
    ({"dataloader.val_share": 2.0}, "dataloader.val_share"),
    ({"dataloader.test_json": "a.json"}, "dataloader.test_images"),
    ({"train.recipe.enabled": True, "lr_multiplier.scheduler": {}}, "lr_multiplier"),
    ({"train.recipe.enabled": True, "train.recipe.epochs": -1.0}, "train.recipe.epochs"),
    ({"train.recipe.enabled": True, "train.recipe.epochs": "x"}, "train.recipe.epochs is"),
]


def test_what_is_refused_could_be_trained_without_the_change(evaluated):
    evaluated.check_data(train=True)


@pytest.mark.parametrize(("changes", "named"), REFUSED)
def test_what_cannot_be_trained_is_refused(evaluated, changes, named):
    config = evaluated.config
    for key, value in changes.items():
        OmegaConf.update(config, key, value, merge=False)
    with pytest.raises(ConfigError, match=re.escape(named)):
        DetectionTask(config).check_data(train=True)
        DetectionTask(config).prepare(train=True)


def test_rules_without_a_place_are_left_out(files, monkeypatch, caplog):
    monkeypatch.setattr("lambda_det.own_data.recipe.LEAST_BOXES", 1)
    lazy = loaded("train.recipe.enabled=True", "train.device=cpu", "train.max_iter=70", **files)
    del lazy.model.proposal_generator.anchor_generator.sizes
    task = DetectionTask(lazy).prepare(train=True)
    assert "MODEL.ANCHOR_GENERATOR.SIZES has no place" in caplog.text
    settings, scheduler = task.settings, lazy.lr_multiplier.scheduler
    assert (settings.max_iter, settings.images_per_step, settings.base_lr) == (
        70,
        2,
        pytest.approx(0.02 / 2**0.5),
    )
    assert settings.lr_steps == (54, 65) == tuple(scheduler.milestones)
    assert len(scheduler["values"]) == 3 and scheduler.num_updates == 70


def test_the_losses_of_a_test_need_augmentations(evaluated):
    loader = evaluated.parts.make_loss_loader("")
    [[image], *_] = loader
    assert image["image"].shape == (3, 64, 64) and len(image["instances"])
    del evaluated.config.dataloader.train.mapper["augmentations"]
    with pytest.raises(ConfigError, match=r"train\.test_loss needs dataloader\.train"):
        evaluated.parts.make_loss_loader("")


def test_the_training_images_are_mixed_by_keys_of_the_loader(evaluated):
    parts, key = evaluated.parts, "dataloader.train.mixing"
    OmegaConf.update(evaluated.config, f"{key}.mosaic", 1.0)
    assert len(next(iter(parts.make_train_loader(parts.settings)))[0]["image"]) == 3
    OmegaConf.update(evaluated.config, f"{key}.mosaic", 4.0)
    with pytest.raises(ConfigError, match=re.escape(f"{key}.mosaic is 4.0")):
        parts.make_train_loader(parts.settings)


class _OfLVIS(LVISEvaluator):
    pass


@pytest.mark.parametrize(
    ("evaluator", "package"),
    [
        (_evaluator(LVISEvaluator, tasks=["bbox"]), "lvis"),
        (_evaluator(_OfLVIS), "lvis"),
        ([_evaluator(COCOEvaluator), _evaluator(COCOPanopticEvaluator)], "panopticapi"),
        (_evaluator(CityscapesInstanceEvaluator), "cityscapesscripts"),
        (_evaluator(CityscapesSemSegEvaluator), "cityscapesscripts"),
    ],
)
def test_packages_of_evaluators_are_looked_for_before_the_training(
    evaluated, evaluator, package, monkeypatch
):
    evaluated.config.dataloader.evaluator = evaluator
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else 1)
    with pytest.raises(ConfigError, match=rf"dataloader\.evaluator .*{package}"):
        evaluated.check_data(train=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: 1)
    evaluated.check_data(train=True)


def test_the_files_of_evaluators_go_below_the_run(evaluated, tmp_path):
    loader = evaluated.config.dataloader
    evaluated.config.train.output_dir = str(tmp_path)
    loader.evaluator = LazyCall(DatasetEvaluators)(evaluators=[_evaluator(COCOEvaluator)])
    [made] = DetectionTask(evaluated.config).parts.make_evaluator("", "inference")._evaluators
    assert made._output_dir == str(tmp_path / "inference")


def test_an_unreadable_image_is_replaced_or_ends_the_run(task, files):
    broken = sorted(Path(files["train_images"]).iterdir())[0]
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


def test_a_saved_file_runs_nothing_as_it_is_read(tmp_path):
    file, marker = tmp_path / "config.yaml", tmp_path / "ran"
    text = f"a: 1\nb: !!python/object/apply:os.mkdir ['{marker}']\n"
    file.write_text(text)
    words = r"config\.yaml is refused: line 2 .*python/object/apply:os\.mkdir"
    with pytest.raises(ConfigError, match=words):
        loaded(file=file)
    assert not marker.exists()
    for tag in ("name:os.nowhere", "name:os.mkdir", "module:this", "object/new:os.mkdir []"):
        file.write_text(f"a: !!python/{tag}\n")
        with pytest.raises(ConfigError, match="is refused"):
            loaded(file=file)
    for text in ("a: [", "[]"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            loaded(file=file)


def test_the_objects_of_a_saved_file(tmp_path):
    """As LazyConfig.save of Detectron2 writes them, of its own Mask R-CNN and RegNet."""
    shape, stem = ShapeSpec(channels=8, height=7), SimpleStem
    node = LazyCall(sorted)(key=1)
    lazy = DictConfig({"a": shape, "b": stem, "c": node}, flags={"allow_objects": True})
    LazyConfig.save(lazy, str(tmp_path / "config.yaml"))
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("d: !!python/tuple [1, 2]\n")
    read = read_saved(tmp_path / "config.yaml")
    assert (read["a"], read["b"], read["d"]) == (shape, stem, (1, 2))
    assert OmegaConf.create(read, flags={"allow_objects": True}).a == shape


@pytest.mark.parametrize(
    ("opt", "words"),
    [
        ("train.max_iter=1.5", "must be of type int"),
        ("train.max_iter=null", "no train.max_iter"),
        ("train.max_iter.steps=1", "train.max_iter.steps"),
        ("~train.max_iter", "remove"),
        ("train.test_precision=float8", "train.test_precision is 'float8'"),
        ("model.pixel_mean=3", "must be of type list"),
        ("train.output_dir=${nowhere}", "nowhere"),
        ("lr_multiplier.scheduler.milestnes=[1]", "lr_multiplier cannot be made"),
        ("--resume", "flags come before"),
        ("MODEL.DEVICE", "'MODEL.DEVICE' is not key=value"),
        ("+dataloader.foo.bar=3", "dataloader.foo.bar"),
        ("+clip_grad=1.0", "did you mean train.clip_gradients"),
        ("+trainer={max_iter: 3}", "trainer"),
    ],
)
def test_values_and_keys_that_cannot_be(opt, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        task = DetectionTask(loaded(opt))
        task.build_scheduler(task.build_optimizer(nn.Linear(1, 1)))
    if opt.startswith("+"):
        key, value = opt[1:].split("=", 1)
        with pytest.raises(ConfigError) as caught:  # nor is it advised to add it
            loaded(f"{key}={value}")
        assert f"+{key}" not in str(caught.value)


def test_a_file_that_is_missing():
    with pytest.raises(ConfigError, match=r"nope/x\.py"):
        loaded(file=Path("nope/x.py"))


def test_helpers_of_a_file_and_new_arguments_may_be_set():
    lazy = loaded(
        "dataloader.image_size=64",
        "+dataloader.image_size=96",
        "+dataloader.evaluator.max_dets_per_image=7",
        "+optimizer.nesterov=True",
        "+dataloader.train_json=a.json",
        "optimizer.lr=1",
    )
    assert isinstance(DetectionTask(lazy).settings.base_lr, float)
    assert lazy.dataloader.image_size == 96
    assert lazy.dataloader.evaluator.max_dets_per_image == 7
    assert lazy.optimizer.nesterov and lazy.dataloader.train_json == "a.json"
