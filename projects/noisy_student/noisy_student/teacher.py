"""Teachers: classifiers that label images, from a checkpoint of this project or from timm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from detectron2.config import CfgNode
from torch import nn

from lambda_det.classification.config import check_ranges, get_classification_config
from lambda_det.classification.model import PixelClassifier
from lambda_det.errors import ConfigError, WeightsError, reason
from lambda_det.modeling import create_classifier
from lambda_det.weights.formats import read_checkpoint
from lambda_det.weights.names import tensors_only
from lambda_det.weights.provenance import checksum, format_options, initial_weights

__all__ = ["Teacher", "load_teacher"]

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


def load_teacher(
    teacher: str, *, weights: str | None, classes: Sequence[str] | None, device: str
) -> Teacher:
    """Load a checkpoint of tools/train_imagenet.py, or ``timm:NAME``.

    Args:
        teacher: a file, or the name of a timm model after "timm:".
        weights: a file of weights for a timm model; None downloads timm's.
        classes: names of the classes; None: the teacher's own, ImageNet's for a timm model with
            1000 classes.
        device: "cpu", "cuda", ...

    Raises:
        ConfigError: timm has no such model, the number of classes is not that of the scores, or a
            checkpoint was trained on other classes.
        WeightsError: the weights cannot be read or do not fit.
    """
    if teacher.startswith(_TIMM):
        loaded = _from_timm(teacher.removeprefix(_TIMM), weights, device)
    elif weights is not None:
        raise ConfigError("--weights belongs to a timm model; a checkpoint has its own weights.")
    else:
        loaded = _from_checkpoint(teacher, device)
    model, own_classes, description, cfg = loaded
    count = _count_scores(model, cfg)
    names = list(classes) if classes is not None else own_classes
    if names is None:
        raise ConfigError(
            f"{teacher} gives {count} scores without names of classes: give --classes, the folder "
            "that the student trains on or a file with one name a line."
        )
    if len(names) != count:
        raise ConfigError(
            f"{teacher} has {count} classes, and {len(names)} were named; use a teacher with the "
            "classes of the student's data."
        )
    if not teacher.startswith(_TIMM):  # the names of a timm model are only an assumption
        _check_names(teacher, own_classes, names)
    pixels = {"pixel_mean": model.pixel_mean, "pixel_std": model.pixel_std}
    sha256 = checksum({**model.state_dict(), **pixels})
    return Teacher(model, names, f"{description} ({sha256[:12]})", sha256, cfg)


def _check_names(teacher: str, own: Sequence[str], named: Sequence[str]) -> None:
    for label, (there, here) in enumerate(zip(own, named, strict=True)):
        if there != here:
            raise ConfigError(
                f"Class {label} of {teacher} is {there!r}, and of --classes {here!r}: leave "
                "--classes out, or use a teacher with the classes of the student's data."
            )


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


def _from_timm(
    name: str, weights: str | None, device: str
) -> tuple[PixelClassifier, list[str] | None, str, CfgNode]:
    import timm
    from timm.data import ImageNetInfo, resolve_model_data_config

    try:
        network = timm.create_model(name, pretrained=weights is None)
    except (RuntimeError, ValueError, OSError) as error:
        # OSError: no connection; RuntimeError: no such model, or no weights for it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"timm has no {name} ({reason}): check the name, or download its weights elsewhere and "
            "name the file with --weights."
        ) from error
    if weights is not None:
        _load_timm_weights(network, name, weights)
    data = resolve_model_data_config(network)
    cfg = _input_config(data["input_size"][-1], data["crop_pct"], device)
    model = PixelClassifier(
        network, [255 * value for value in data["mean"]], [255 * value for value in data["std"]]
    )
    classes = ImageNetInfo().label_names() if getattr(network, "num_classes", 0) == 1000 else None
    return model.to(device).eval(), classes, f"timm {name}", cfg


def _load_timm_weights(network: nn.Module, name: str, path: str) -> None:
    if path.endswith(".safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} cannot be read as safetensors: {error}") from error
    else:
        content = read_checkpoint(path)  # timm itself would unpickle whatever is in the file
        state = content.get("state_dict", content.get("model", content))
    try:
        network.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} does not hold the weights of timm's {name}.") from error


@torch.no_grad()
def _count_scores(model: PixelClassifier, cfg: CfgNode) -> int:
    side = cfg.INPUT.SIZE
    return model({"images": torch.zeros(1, side, side, 3, dtype=torch.uint8)}).shape[1]
