"""Networks by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lambda_det.foundation import Backbone
from lambda_det.modeling.checks import check_options, taken_options
from lambda_det.modeling.common import StagedBackbone
from lambda_det.modeling.mobilenet import MobileNetV2
from lambda_det.modeling.resnet import LambdaResNet, make_res5
from lambda_det.modeling.specs import (
    SPECS,
    STAGES,
    MobileNetSpec,
    NetworkSpec,
    ResNetSpec,
    get_spec,
)
from lambda_det.weights.loading import load
from lambda_det.weights.provenance import DETECTRON2_PIXELS
from lambda_det.weights.public import is_public


@dataclass(frozen=True)
class NetworkKind:
    """A kind of network: a row of :data:`NETWORK_KINDS`.

    Attributes:
        network: the class. It is called with a specification and with keyword arguments, the
            options that networks of the kind take; ``num_classes``, ``out_features`` and
            ``freeze_at`` are among them.
        res5: makes the last stage by itself and says its channels, as :func:`make_res5`. None for
            networks whose last stage detectors cannot take as their heads.
    """

    network: type[StagedBackbone]
    res5: Callable[..., tuple[nn.Sequential, int]] | None = None


NETWORK_KINDS: dict[type[NetworkSpec], NetworkKind] = {
    ResNetSpec: NetworkKind(LambdaResNet, res5=make_res5),
    MobileNetSpec: NetworkKind(MobileNetV2),
}


def kind_of(spec: NetworkSpec) -> NetworkKind:
    """The kind of a network."""
    return NETWORK_KINDS[type(spec)]


def norm_option(name: str, norm: str) -> dict[str, str]:
    """The norm of a configuration as an argument of :func:`create_backbone` or
    :func:`create_classifier`.

    A network with norms of its own gets none at the default. Other norms of it, and unknown
    networks, are refused when the network is made.
    """
    spec = SPECS.get(name)
    has_own_norms = spec and "norm" not in taken_options(kind_of(spec).network, spec)
    return {} if has_own_norms and norm == "BN" else {"norm": norm}


def _make(name: str, overrides: dict[str, Any], **options: Any) -> StagedBackbone:
    """The network of that name, which knows by what it was made."""
    spec = get_spec(name)
    network = kind_of(spec).network
    check_options(network, spec, overrides, name)
    backbone = network(spec, **options, **overrides)
    backbone.created_as = (name, overrides)
    return backbone


class Classifier(nn.Module):
    """An image classifier: ``backbone`` up to its ``linear`` layer."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, num_classes]."""
        return self.backbone(images)["linear"]


def create_classifier(name: str, num_classes: int = 1000, **overrides: Any) -> Classifier:
    """Make the classifier of that name.

    Args:
        name: one of :func:`lambda_det.list_models`.
        num_classes: size of the output.
        overrides: arguments of :class:`LambdaResNet` (or :class:`MobileNetV2`) and of its lambda
            layers.

    Raises:
        ConfigError: there is no such model, it takes no such option, or an option cannot work.
    """
    return Classifier(_make(name, overrides, num_classes=num_classes))


def create_backbone(
    name: str,
    out_features: Sequence[str] = STAGES,
    weights: str | Path | None = None,
    **overrides: Any,
) -> Backbone:
    """Make the backbone of that name, for use without any configuration.

    Args:
        name: one of :func:`lambda_det.list_models`.
        out_features: names out of "stem", "res2" to "res5".
        weights: a checkpoint of the backbone, of a classifier or of a detector, that must hold
            every tensor of the backbone: .pth, .pkl or .safetensors. A file that records another
            model is refused. Or a URL of published weights, which become weights for the default
            pixel settings of Detectron2.
        overrides: arguments of :class:`LambdaResNet` (or :class:`MobileNetV2`) and of its lambda
            layers.

    Returns:
        The network, with two notes: ``created_as``, its name and overrides, and
        ``pixel_settings``, the images that its weights are for, None where that is not known.

    Raises:
        ConfigError: there is no such model, it takes no such option, or an option cannot work.
        WeightsError: the weights cannot be read or don't fit.
    """
    backbone = _make(name, overrides, out_features=out_features)
    backbone.pixel_settings = None
    if weights is not None:
        pixels = DETECTRON2_PIXELS if is_public(weights) else None
        backbone.pixel_settings = load(backbone, weights, pixels=pixels, name=name).pixels
    return backbone
