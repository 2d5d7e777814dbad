"""Find the checkpoint of a run, and identify its network by its configuration or its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode, get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from lambda_det.config import add_lambda_config, leaves, read_plain
from lambda_det.detection.lazy import dump_lazy, is_lazy, load_lazy_file
from lambda_det.errors import ConfigError, UserError, WeightsError, listed, reason
from lambda_det.modeling import create_backbone
from lambda_det.modeling.specs import SPECS, STAGES, MobileNetSpec, ResNetSpec
from lambda_det.training.checkpointer import last_checkpoint
from lambda_det.weights.names import compare
from lambda_det.weights.provenance import PixelSettings

__all__ = [
    "KnownNetwork",
    "config_of_run",
    "find_checkpoint",
    "identify",
    "network_of_config",
]

# Options of create_backbone that change neither the tensors nor the features
_TRAINING = ("freeze_at", "stochastic_depth", "checkpoint_activations", "implementation", "dropout")
# The sections of a configuration that describe the backbone. Others may be of any project.
_OF_BACKBONE = ("MODEL.BACKBONE.", "MODEL.RESNETS.", "MODEL.LAMBDA_RESNET.", "MODEL.PIXEL_")
_CREATE = "create_backbone"
# Errors of reading a file that is no configuration
_UNREADABLE = (
    OSError,
    yaml.YAMLError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
)


@dataclass(frozen=True)
class KnownNetwork:
    """A network of lambda_det and its pixel settings.

    Attributes:
        model: one of :func:`lambda_det.list_models`.
        options: keyword arguments of :func:`lambda_det.create_backbone`.
        pixels: None if they are not known.
        known_from: "recipe", "configuration" or "tensors".
    """

    model: str
    options: Mapping[str, Any]
    pixels: PixelSettings | None
    known_from: str


def network_of_config(file: str | Path) -> KnownNetwork | None:
    """The network that a configuration names.

    Args:
        file: YAML, of a CfgNode or a saved LazyConfig: read as plain data, no code in it is run. Or
            a LazyConfig in Python, which is run.

    Returns:
        None if the configuration does not name a network, as with a custom builder.

    Raises:
        ConfigError: the file cannot be read, or its backbone is not one of lambda_det.
    """
    try:
        program = Path(file).suffix == ".py"
        text = dump_lazy(load_lazy_file(file)) if program else Path(file).read_text("utf-8")
        loaded = read_plain(text)
        if not program and not is_lazy(loaded):
            # load_config would refuse the keys of unknown projects
            loaded = CfgNode.load_yaml_with_base(str(file), allow_unsafe=False)
        if not isinstance(loaded, dict):
            raise TypeError(f"it holds a {type(loaded).__name__}")
    except _UNREADABLE as error:
        raise ConfigError(
            f"{file}, the configuration of the checkpoint, cannot be read ({reason(error)}); give "
            "another one with --config."
        ) from error
    if is_lazy(loaded):
        return _network_of_lazy(_resolved(loaded, file)["model"], file)
    values = dict(leaves(loaded))
    if "MODEL.BACKBONE.NAME" in values:
        return _network_of_yacs(values, file)
    return None


def _network_of_yacs(values: Mapping[str, Any], file: str | Path) -> KnownNetwork | None:
    cfg = get_cfg()
    add_lambda_config(cfg)
    wanted = {
        key: value
        for key, value in values.items()
        if key.startswith(_OF_BACKBONE) or key == "INPUT.FORMAT"
    }
    for key, value in wanted.items():
        _set_known(cfg, key, value, file)
    builder = cfg.MODEL.BACKBONE.NAME
    if "lambda_resnet" not in builder:
        if builder in BACKBONE_REGISTRY:
            raise ConfigError(
                f"{file} has MODEL.BACKBONE.NAME {builder}, which is no backbone of lambda_det; "
                "only those can be exported."
            )
        return None
    plain = builder if "deeplab" in builder else "build_lambda_resnet_backbone"  # without FPN
    with torch.device("meta"):
        backbone = BACKBONE_REGISTRY.get(plain)(cfg, ShapeSpec(channels=3))
    pixels = PixelSettings.from_config(cfg)
    return _network(backbone.created_as, _plain(pixels))


def _set_known(cfg: CfgNode, key: str, value: Any, file: str | Path) -> None:
    *sections, name = key.split(".")
    for section in sections:
        cfg = cfg.get(section, {})
    if name not in cfg and key.startswith("MODEL.RESNETS."):
        cfg[name] = value  # a key of DeepLab
    if name not in cfg:
        return  # a key of another version or project, which does not concern the backbone
    if isinstance(cfg[name], str) and isinstance(value, str):
        value = repr(value)  # yacs would parse the string "3" as a number
    try:
        cfg.merge_from_list([name, value])
    except (ValueError, SyntaxError) as error:
        raise ConfigError(
            f"{file} has {key} {value!r}; it must be of type {type(cfg[name]).__name__}, such as "
            f"{cfg[name]!r}."
        ) from error


def _resolved(loaded: dict[str, Any], file: str | Path) -> dict[str, Any]:
    """A LazyConfig as plain data, its references resolved."""
    try:
        return OmegaConf.to_container(OmegaConf.create(loaded), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"A reference in {file} cannot be resolved ({reason(error)}); give another "
            "configuration with --config."
        ) from error


def _network_of_lazy(model: Mapping[str, Any], file: str | Path) -> KnownNetwork | None:
    nodes = [node for node in _nodes(model) if str(node["_target_"]).endswith(f".{_CREATE}")]
    if not nodes:
        return None
    options = {
        name: value
        for name, value in nodes[0].items()
        if name not in ("_target_", "name", "out_features", "weights")
    }
    try:
        pixels = PixelSettings(
            model.get("input_format", "BGR"), model["pixel_mean"], model["pixel_std"]
        )
        return _network((nodes[0]["name"], options), _plain(pixels))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} lacks the name of {_CREATE}, or pixel_mean or pixel_std of the model: {error}."
        ) from error


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


def _plain(pixels: PixelSettings) -> PixelSettings:
    return PixelSettings(
        str(pixels.format), [float(x) for x in pixels.mean], [float(x) for x in pixels.std]
    )


def _network(created_as: tuple[str, Mapping[str, Any]], pixels: PixelSettings) -> KnownNetwork:
    name, overrides = created_as
    options = {key: value for key, value in overrides.items() if key not in _TRAINING}
    return KnownNetwork(name, options, pixels, "configuration")


def identify(state: Mapping[str, Tensor], source: str, *, imported: bool = False) -> KnownNetwork:
    """Identify the network of a backbone by the names and shapes of its tensors.

    Options that do not show in them are assumed to have their defaults.

    Args:
        state: tensors under the backbone's own names. Whole stages may be missing.
        source: name of the checkpoint for messages.
        imported: the names were those of timm or torchvision, so Detectron2's own ResNet is ruled
            out.

    Raises:
        WeightsError: no network matches, or the tensors do not determine it.
    """
    default = {"norm": "BN" if any(name.endswith("running_var") for name in state) else "GN"}
    inferred = {**default, **_layer_options(state)}
    similar = [name for name, spec in SPECS.items() if _similar(spec, state)]
    for name, options in ((n, o) for o in (default, inferred) for n in similar):
        if fits(name, options, state):
            _check_unambiguous(name, options, source, imported)
            return KnownNetwork(name, options, None, "tensors")
    raise WeightsError(
        f"{source} holds no known backbone: no network of lambda-det info has the tensors "
        f"{listed(state)}; if it was made with options, give its configuration with --config."
    )


def _check_unambiguous(name: str, options: Mapping[str, Any], source: str, imported: bool) -> None:
    spec = SPECS[name]
    if (
        not imported
        and isinstance(spec, ResNetSpec)
        and spec.design == "vanilla"
        and not spec.lambda_blocks
    ):
        raise WeightsError(
            f"{source} may hold Detectron2's own ResNet or lambda_det's {name}, whose tensors have "
            "equal names and shapes; give its configuration with --config."
        )
    if options["norm"] == "GN":
        raise WeightsError(
            f"{source} holds a {name} whose norms have no statistics and may be GN or LN; give its "
            "configuration with --config."
        )


def fits(model: str, options: Mapping[str, Any], state: Mapping[str, Tensor]) -> bool:
    """Whether the model exists and its stages have the tensors that ``state`` has of them."""
    try:
        with torch.device("meta"):
            own = create_backbone(model, **options).state_dict()
    except (UserError, TypeError):
        return False
    stages = {name.split(".")[0] for name in state}
    return bool(compare({k: v for k, v in own.items() if k.split(".")[0] in stages}, state))


def _similar(spec: ResNetSpec | MobileNetSpec, state: Mapping[str, Tensor]) -> bool:
    """A quick test whether a network may have these tensors, as building every network is slow."""
    if isinstance(spec, MobileNetSpec):
        return any(name.startswith("res2.0.conv.") for name in state)
    for index, stage in enumerate(STAGES):
        blocks = {name.split(".")[1] for name in state if name.startswith(f"{stage}.")}
        if blocks and len(blocks) != spec.blocks[index]:
            return False
        for number in map(int, filter(str.isdigit, blocks)):
            has = f"{stage}.{number}.conv2.qkv.weight" in state
            if has != spec.has_lambda(stage, number + 1):
                return False
    return True


def _layer_options(state: Mapping[str, Tensor]) -> dict[str, int]:
    """The sizes of the lambda layers, from the shapes of the first embedding and its queries."""
    for name, embedding in state.items():
        if name.endswith("conv2.position.embedding") and embedding.ndim == 4:
            depth, intra, scope, _ = embedding.shape
            rows = state.get(name.replace("position.embedding", "query_norm.weight"))
            if rows is not None and depth and len(rows) % depth == 0:
                sizes = {"query_depth": depth, "heads": len(rows) // depth}
                return {**sizes, "intra_depth": intra, "scope": scope}
    return {}


def find_checkpoint(path: str | Path) -> str:
    """The path itself if it is a file; the last checkpoint if it is the folder of a run.

    Raises:
        WeightsError: the folder has no ``last_checkpoint``, or that names a missing file.
    """
    if not Path(path).is_dir():
        return str(path)
    last = last_checkpoint(str(path))
    if not last:
        there = [file.name for file in sorted(Path(path).glob("*.pth"))]
        raise WeightsError(
            f"The folder {path} has no last_checkpoint; name a file in it ({listed(there)})."
        )
    if not Path(last).is_file():
        raise WeightsError(
            f"last_checkpoint in {path} names {Path(last).name}, which is missing; name a file."
        )
    return last


def config_of_run(checkpoint: str | Path) -> str | None:
    """The config.yaml beside a checkpoint, or None if there is none."""
    beside = Path(checkpoint).with_name("config.yaml")
    return str(beside) if beside.is_file() else None
