"""ROI heads and anchors of this package, beside Detectron2's.

Imports are in functions, as ``modeling/backbones.py`` says.
"""

from __future__ import annotations

from operator import attrgetter

import torch
from detectron2.config import CfgNode
from detectron2.modeling import ANCHOR_GENERATOR_REGISTRY, anchor_generator
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads
from torch import Tensor, nn

from lambda_det.errors import ConfigError

# For keys of MODEL the values that a res5 outside of the backbone can have, and why
_ALLOWED = {
    "ROI_HEADS.IN_FEATURES": ([["res4"]], "goes on from res4"),
    "RESNETS.RES5_DILATION": ([1], "sees single regions"),
    "LAMBDA_RESNET.CHECKPOINT_ACTIVATIONS": ([False], "keeps its activations"),
    "LAMBDA_RESNET.MASK_PADDING": ([False], "sees regions without padding"),
    "LAMBDA_RESNET.SHARE_POSITIONS": (
        ["stage", ""],
        "shares no embeddings with the res4 of the backbone",
    ),
}


@ANCHOR_GENERATOR_REGISTRY.register()
class TorchvisionAnchorGenerator(anchor_generator.DefaultAnchorGenerator):
    """The anchors that torchvision's detectors were trained with, in Detectron2's order.

    Half of each side is a whole number of pixels. The distance between neighbours is the side of
    the padded image divided by the side of the map, rounded down: less than the stride on maps of
    an odd side.
    """

    def generate_cell_anchors(self, *sizes_and_ratios: Tensor) -> Tensor:
        return super().generate_cell_anchors(*sizes_and_ratios).round()

    def _grid_anchors(self, grid_sizes: list[list[int]]) -> list[Tensor]:
        height, width = (side * self.strides[0] for side in grid_sizes[0])
        anchors = []
        for (rows, columns), base in zip(grid_sizes, self.cell_anchors, strict=True):
            x, y = anchor_generator._create_grid_offsets((rows, columns), 1, self.offset, base)
            corner = torch.stack([x * (width // columns), y * (height // rows)], dim=1)
            anchors.append((corner.repeat(1, 2)[:, None] + base).flatten(0, 1))
        return anchors


@ROI_HEADS_REGISTRY.register()
class LambdaRes5ROIHeads(Res5ROIHeads):
    """Detectron2's ``Res5ROIHeads`` with the res5 of ``MODEL.LAMBDA_RESNET``.

    The context of a lambda layer is then one region, of ROI_BOX_HEAD.POOLER_RESOLUTION positions in
    each direction. Its weights are the classifier's res5, by the name ``roi_heads.res5``.
    """

    @classmethod
    def _build_res5_block(cls, cfg: CfgNode) -> tuple[nn.Sequential, int]:
        from lambda_det.modeling.backbones import layer_options
        from lambda_det.modeling.resnet import make_res5
        from lambda_det.modeling.specs import ResNetSpec, get_spec

        options = cfg.MODEL.LAMBDA_RESNET
        spec = get_spec(options.NAME)
        if not isinstance(spec, ResNetSpec):
            raise ConfigError(
                "MODEL.ROI_HEADS.NAME LambdaRes5ROIHeads needs a network whose res5 can stand by "
                f"itself, as a ResNet's can, and MODEL.LAMBDA_RESNET.NAME is {options.NAME}; take "
                "another of them."
            )
        for key, (allowed, why) in _ALLOWED.items():
            if (value := attrgetter(key)(cfg.MODEL)) not in allowed:
                raise ConfigError(
                    f"MODEL.{key} is {value}, but the res5 of LambdaRes5ROIHeads {why}; set it to "
                    f"{allowed[0]}."
                )
        return make_res5(
            spec,
            norm=options.NORM,
            stochastic_depth=options.STOCHASTIC_DEPTH,
            **layer_options(options),
        )
