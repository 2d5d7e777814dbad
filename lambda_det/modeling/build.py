"""Networks by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lambda_det.foundation import Backbone
from lambda_det.modeling.checks import check_options
from lambda_det.modeling.common import StagedBackbone
from lambda_det.modeling.mobilenet import MobileNetV2
from lambda_det.modeling.resnet import LambdaResNet
from lambda_det.modeling.specs import (
    STAGES,
    MobileNetSpec,
    NetworkSpec,
    ResNetSpec,
    get_spec,
)
from lambda_det.weights.loading import load
from lambda_det.weights.provenance import DETECTRON2_PIXELS
from lambda_det.weights.public import is_public

# For each kind of network its class. It is called with a specification and with keyword arguments,
# the options that networks of the kind take; ``num_classes``, ``out_features`` and ``freeze_at``
# are among them.
NETWORK_KINDS: dict[type[NetworkSpec], type[StagedBackbone]] = {
    ResNetSpec: LambdaResNet,
    MobileNetSpec: MobileNetV2,
}


def _make(name: str, overrides: dict[str, Any], **options: Any) -> StagedBackbone:
    """The network of that name, which knows by what it was made."""
    spec = get_spec(name)
    network = NETWORK_KINDS[type(spec)]
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
        backbone.pixel_settings = load(backbone, weights, pixels=pixels, name=name)
    return backbone
