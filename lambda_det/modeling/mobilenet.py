"""MobileNet-v2 with lightweight lambda blocks (Appendix E.4.2), from torchvision's MobileNet-v2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import mobilenet_v2

from lambda_det.foundation import CNNBlockBase, ShapeSpec, get_norm
from lambda_det.layers import LambdaLayer
from lambda_det.modeling.checks import check_options
from lambda_det.modeling.common import Norm, StagedBackbone, conv_norm
from lambda_det.modeling.replacements import layer_arguments
from lambda_det.modeling.specs import MobileNetSpec
from lambda_det.weights.import_names import MOBILENET_STAGES

# The text gives |k|=32 and |h|=4. With 32 query channels over the 4 heads the network has the
# paper's 3.21 M parameters and its operations to 0.5 %; with 32 for each head it has 3.24 M.
_LAYER = {"query_depth": 8, "heads": 4, "scope": 5}


class LightweightLambdaBlock(CNNBlockBase):
    """An inverted bottleneck of constant width with a lambda layer in place of the depthwise
    convolution.
    """

    def __init__(self, channels: int, *, norm: Norm, **lambda_options: Any) -> None:
        super().__init__(channels, channels, 1)
        self.conv1 = conv_norm(channels, channels, 1, norm=norm, activation=None)
        self.conv2 = LambdaLayer(channels, **layer_arguments(norm, **{**_LAYER, **lambda_options}))
        self.norm2 = get_norm(norm, channels) or nn.Identity()
        self.conv3 = conv_norm(channels, channels, 1, norm=norm, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu6(self.conv1(x))
        out = F.relu6(self.norm2(self.conv2(out)))
        return x + self.conv3(out)


class MobileNetV2(StagedBackbone):
    """MobileNet-v2 whose features are named res2 to res5, at strides 4 to 32.

    Args:
        spec: which blocks are lightweight lambda blocks.
        norm: a name that Detectron2's ``get_norm`` knows, or a function from channels to a module.
        out_features: names out of "stem" and "res2" to "res5", "linear"; None for the last.
        num_classes: also make the classifier, which consists of a dropout and ``linear``.
        freeze_at: 1 freezes the stem, 2 the stem and res2, and so on.
        dropout: probability of dropping a feature before ``linear``; the paper's is 0.2.
        lambda_options: options of the lambda layers, over the paper's.
    """

    def __init__(
        self,
        spec: MobileNetSpec,
        *,
        norm: Norm = "BN",
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        freeze_at: int = 0,
        dropout: float = 0.2,
        **lambda_options: Any,
    ) -> None:
        check_options(MobileNetV2, spec, lambda_options)
        network = mobilenet_v2(
            norm_layer=lambda channels: get_norm(norm, channels) or nn.Identity()
        )
        features = list(network.features)
        for number in spec.lambda_blocks:  # features[0] is the stem, so block i is features[i]
            features[number] = LightweightLambdaBlock(
                features[number].out_channels, norm=norm, **lambda_options
            )
        modules, shapes = {}, {}
        for index, (name, (start, end)) in enumerate(MOBILENET_STAGES.items(), 1):
            modules[name] = nn.Sequential(*features[start:end])
            shapes[name] = ShapeSpec(channels=features[end - 1].out_channels, stride=2**index)
        super().__init__(
            modules,
            shapes,
            out_features=out_features,
            num_classes=num_classes,
            dropout=dropout,
            freeze_at=freeze_at,
        )
        if num_classes is not None:
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Map images [B, 3, H, W] to the features of ``out_features``, by name."""
        features = {}
        for name in ("stem", *self.stage_names):
            x = features[name] = getattr(self, name)(x)
        return self.outputs(features)
