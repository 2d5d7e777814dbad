"""Where a network comes from: a name, a configuration, the folder of a run; and pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode, get_cfg
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from lambda_det.config import add_lambda_config, read_plain
from lambda_det.detection.data.records import read_image
from lambda_det.detection.inference import Taken, find_weights, trained_detector
from lambda_det.detection.lazy import dump_lazy, is_lazy, load_lazy_file
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError, WeightsError, listed, refused
from lambda_det.export.networks import Network, backbone_network, detector_network
from lambda_det.export.proof import MOST, prove
from lambda_det.modeling import create_backbone
from lambda_det.training.checkpoint_files import choose_checkpoint
from lambda_det.weights.formats import read_checkpoint
from lambda_det.weights.provenance import PixelSettings, recorded_network, wanted_pixels
from lambda_det.weights.public import is_public, read_public

__all__ = [
    "KnownNetwork",
    "configured_network",
    "find_checkpoint",
    "network_to_export",
    "read_images",
    "recorded_backbone",
]

# Options of create_backbone that change neither the tensors nor the features
_TRAINING = ("freeze_at", "stochastic_depth", "checkpoint_activations", "implementation", "dropout")
_NO_OPTIONS = ("name", "out_features", "weights")  # arguments of create_backbone
# Errors of reading a file that is no configuration, or has values that cannot be
_UNREADABLE = (
    *(OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, AssertionError, KeyError),
    OmegaConfBaseException,
)


@dataclass(frozen=True)
class KnownNetwork:
    """A network of lambda_det and its pixel settings.

    Attributes:
        model: one of :func:`lambda_det.list_models`.
        options: keyword arguments of :func:`lambda_det.create_backbone`.
        pixels: None if they are not known.
        known_from: "recipe", "configuration" or "name".
    """

    model: str
    options: Mapping[str, Any]
    pixels: PixelSettings | None
    known_from: str


def configured_network(file: str | Path) -> KnownNetwork | None:
    """The network that a configuration names.

    Args:
        file: YAML, of a CfgNode or a saved LazyConfig: read as plain data, no code in it is run. Or
            a LazyConfig in Python, which is run.

    Returns:
        None if the configuration does not name a network, as with a custom builder.

    Raises:
        ConfigError: the file cannot be read, or has a value that cannot be.
    """
    what = f"{file}, the configuration of the checkpoint, does not describe its network"
    with refused(ConfigError, what, "give another one with --config", *_UNREADABLE):
        program = Path(file).suffix == ".py"
        text = dump_lazy(load_lazy_file(file)) if program else Path(file).read_text("utf-8")
        loaded = read_plain(text)
        if is_lazy(loaded):
            resolved = OmegaConf.to_container(OmegaConf.create(loaded), resolve=True)
            return _network_of_lazy(resolved["model"])
        return _network_of_yacs(file)


def _network_of_yacs(file: str | Path) -> KnownNetwork | None:
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.set_new_allowed(True)  # keys of other versions and projects do not concern the backbone
    cfg.merge_from_file(str(file), allow_unsafe=False)
    builder = cfg.MODEL.BACKBONE.NAME
    if "lambda_resnet" not in builder:
        return None
    plain = builder if "deeplab" in builder else "build_lambda_resnet_backbone"  # without FPN
    with torch.device("meta"):
        backbone = BACKBONE_REGISTRY.get(plain)(cfg, ShapeSpec(channels=3))
    return _network(*backbone.created_as, PixelSettings.from_config(cfg))


def _network_of_lazy(model: Mapping[str, Any]) -> KnownNetwork | None:
    nodes = [node for node in _nodes(model) if str(node["_target_"]).endswith(".create_backbone")]
    if not nodes:
        return None
    options = {k: v for k, v in nodes[0].items() if k not in ("_target_", *_NO_OPTIONS)}
    order = model.get("input_format", "BGR")
    pixels = PixelSettings(order, model["pixel_mean"], model["pixel_std"])
    return _network(nodes[0]["name"], options, pixels)


def _nodes(value: Any) -> Iterator[Mapping[str, Any]]:
    """All nodes of a LazyConfig, given as plain data, that have a ``_target_``."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield value
        for part in value.values():
            yield from _nodes(part)
    elif isinstance(value, list):
        for part in value:
            yield from _nodes(part)


def _network(name: str, options: Mapping[str, Any], pixels: PixelSettings) -> KnownNetwork:
    options = {key: value for key, value in options.items() if key not in _TRAINING}
    mean, std = (list(map(float, values)) for values in (pixels.mean, pixels.std))
    return KnownNetwork(name, options, PixelSettings(pixels.format, mean, std), "configuration")


def find_checkpoint(path: str | Path, which: str = "best") -> str:
    """The path itself if it is a file; the checkpoint of a run if it is the folder of one.

    Args:
        which: see :func:`lambda_det.training.checkpoint_files.choose_checkpoint`.

    Raises:
        WeightsError: the folder has no such checkpoint.
    """
    if not Path(path).is_dir():
        return str(path)
    found = choose_checkpoint(str(path), which)
    if not Path(found).is_file():  # "" is none
        there = [file.name for file in sorted(Path(path).glob("*.pth"))]
        raise WeightsError(
            f"The last_checkpoint of {path} names {Path(found).name or 'no file'}, which is not "
            f"there; name a file of the folder ({listed(there)})."
        )
    return found


def recorded_backbone(weights: str) -> Network:
    """The backbone of a file that records its network, or of published weights by their URL.

    Raises:
        WeightsError: the file cannot be read, does not fit, or does not say which network it holds.
    """
    content = read_public(weights)[0] if is_public(weights) else read_checkpoint(weights)
    name, options = recorded_network(content)
    if name is None:
        raise WeightsError(
            f"{weights} does not say which network it holds: lambda-det backbone makes a file that "
            "does, and a detector is named by the folder of its run."
        )
    backbone = create_backbone(name, weights=weights, **options)
    settings = wanted_pixels(content)
    pixels = settings.as_meta() if settings else {}
    about = {"model": name, **Taken.of(weights, content).as_meta(), **pixels}
    return backbone_network(backbone, about)


def network_to_export(
    cfg: CfgNode | DictConfig,
    config_file: str,
    weights: str | None = None,
    *,
    backbone_only: bool = False,
    checkpoint: str = "best",
    raw: bool = False,
    proof: int = 0,
    apart: float = MOST,
    batch: int = 1,
    fixed: tuple[int, int] | None = None,
) -> Network:
    """The detector of a configuration, or its backbone with FPN, with weights.

    Args:
        cfg: out of ``config_file``.
        weights: a checkpoint of the whole detector; None for that of the run, if ``config_file`` is
            in the folder of one, else MODEL.WEIGHTS.
        backbone_only: leave out proposals and heads.
        checkpoint: of the run: "best", "last", or the number of its step.
        raw: the trained weights, where a checkpoint has averaged ones, too.
        proof: number of validation images that the file of a detector is compared on.
        apart: by which AP may differ on them.
        batch: of a detector, images that the file takes at once; 0 for any number.
        fixed: of a detector, height and width of its images; None for any.

    Raises:
        ConfigError: the device is not there, or the network cannot be exported.
        WeightsError: there are no weights, or they do not fit.
    """
    weights = find_weights(cfg, config_file, weights, checkpoint)
    model, taken, known = trained_detector(cfg, weights, "float32", raw=raw)
    task = DetectionTask(cfg)
    about: dict[str, Any] = {
        "config": config_file,
        "sha256": hashlib.sha256(Path(weights).read_bytes()).hexdigest(),
        **taken.as_meta(),
        **(task.pixels.as_meta() if task.pixels else {}),
        **_test_size(task),
        "classes": known.get("thing_classes"),
        "dataset": known,
    }
    if backbone_only:
        return backbone_network(model.backbone, about)
    network = detector_network(model, about, batch=batch, fixed=fixed)
    return replace(network, prove=partial(prove, cfg, known, model, proof, most=apart))


def _test_size(task: DetectionTask) -> dict[str, int]:
    """The sides that images are resized to in an evaluation; nothing where it does more to them."""
    made = task.parts.make_test_augmentations().augs
    if len(made) != 1 or not isinstance(made[0], ResizeShortestEdge):
        return {}
    return {"min_size_test": made[0].short_edge_length[0], "max_size_test": made[0].max_size}


def read_images(files: Iterable[str]) -> list[Tensor]:
    """Pictures [3, H, W], BGR.

    Raises:
        DataError: one cannot be read, or has more than 8 bits a channel.
    """
    images = (torch.from_numpy(read_image({"file_name": file})) for file in files)
    return [image.permute(2, 0, 1).float() for image in images]
