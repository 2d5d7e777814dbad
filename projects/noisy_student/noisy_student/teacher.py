"""Teachers: classifiers that label images, from a checkpoint of this project or from timm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from detectron2.config import CfgNode

from lambda_det.classification.config import check_ranges, get_classification_config
from lambda_det.classification.model import PixelClassifier
from lambda_det.errors import ConfigError, WeightsError, reason
from lambda_det.modeling import create_classifier
from lambda_det.weights.formats import read_checkpoint
from lambda_det.weights.names import tensors_only
from lambda_det.weights.provenance import checksum, format_options, initial_weights

_TIMM = "timm:"


@dataclass(frozen=True)
class Teacher:
    """A classifier with its classes and settings.

    Attributes:
        model: on its device, in evaluation mode.
        classes: names in the order of the scores.
        description: one line that ends with the first digits of ``sha256``.
        sha256: checksum of its weights and of the mean and deviation of its pixels.
        cfg: the size and crop of its images, in INPUT, and its device.
    """

    model: PixelClassifier
    classes: list[str]
    description: str
    sha256: str
    cfg: CfgNode


def load_teacher(teacher: str, device: str) -> Teacher:
    """Load a checkpoint of tools/train_imagenet.py, or ``timm:NAME``.

    Args:
        teacher: a file, or the name of a timm model of ImageNet's 1000 classes after "timm:".
        device: "cpu", "cuda", ...

    Raises:
        ConfigError: timm has no such model, or it has other classes.
        WeightsError: the weights cannot be read or do not fit.
    """
    if teacher.startswith(_TIMM):
        model, classes, description, cfg = _from_timm(teacher.removeprefix(_TIMM), device)
    else:
        model, classes, description, cfg = _from_checkpoint(teacher, device)
    pixels = {"pixel_mean": model.pixel_mean, "pixel_std": model.pixel_std}
    sha256 = checksum({**model.state_dict(), **pixels})
    return Teacher(model, classes, f"{description} ({sha256[:12]})", sha256, cfg)


def _input_config(size: int, crop: float, device: str) -> CfgNode:
    cfg = get_classification_config()
    cfg.INPUT.SIZE = size
    cfg.INPUT.TEST_CROP = crop
    cfg.MODEL.DEVICE = device
    check_ranges(cfg)
    return cfg


def _from_checkpoint(path: str, device: str) -> tuple[PixelClassifier, list[str], str, CfgNode]:
    checkpoint = read_checkpoint(path)
    recipe = checkpoint.get("recipe")
    if not isinstance(recipe, Mapping):
        raise WeightsError(
            f"{path} has no recipe: a teacher is a checkpoint of tools/train_imagenet.py, or "
            "timm:NAME."
        )
    name, options = recipe["model"], recipe["options"]
    try:
        classifier = create_classifier(name, recipe["num_classes"], **options)
    except (ConfigError, TypeError) as error:  # TypeError: an option that does not exist (any more)
        raise WeightsError(
            f"The network {name}{format_options(options)} of {path} cannot be created: "
            f"{reason(error)}"
        ) from error
    state, which = initial_weights(checkpoint)
    try:
        classifier.load_state_dict(tensors_only(state, path))
    except RuntimeError as error:
        raise WeightsError(
            f"{path} names {name}, and {which} in it do not fit that model."
        ) from error
    crop = CfgNode.load_cfg(recipe["config"]).INPUT.TEST_CROP
    cfg = _input_config(recipe["image_size"], crop, device)
    model = PixelClassifier(classifier, recipe["pixel_mean"], recipe["pixel_std"])
    description = f"{name}, {which} of {Path(path).name}"
    return model.to(device).eval(), recipe["classes"], description, cfg


def _from_timm(name: str, device: str) -> tuple[PixelClassifier, list[str], str, CfgNode]:
    import timm
    from timm.data import ImageNetInfo, resolve_model_data_config

    try:
        network = timm.create_model(name, pretrained=True)
    except (RuntimeError, ValueError, OSError) as error:
        # OSError: no connection; RuntimeError: no such model, or no weights for it
        raise ConfigError(
            f"timm has no {name} ({type(error).__name__}: {reason(error)}): check the name and the "
            "connection."
        ) from error
    if getattr(network, "num_classes", 0) != 1000:
        raise ConfigError(f"timm's {name} has other classes than ImageNet's 1000.")
    data = resolve_model_data_config(network)
    cfg = _input_config(data["input_size"][-1], data["crop_pct"], device)
    model = PixelClassifier(
        network, [255 * value for value in data["mean"]], [255 * value for value in data["std"]]
    )
    return model.to(device).eval(), ImageNetInfo().label_names(), f"timm {name}", cfg
