"""ROI heads of this package, beside those of Detectron2."""

from __future__ import annotations

from detectron2.config import CfgNode
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads
from torch import nn

from lambda_det.errors import ConfigError
from lambda_det.modeling.backbones import layer_options
from lambda_det.modeling.replacements import Replacements
from lambda_det.modeling.resnet import make_stage
from lambda_det.modeling.specs import ResNetSpec, get_spec

__all__ = ["LambdaRes5ROIHeads"]


@ROI_HEADS_REGISTRY.register()
class LambdaRes5ROIHeads(Res5ROIHeads):
    """Detectron2's ``Res5ROIHeads`` with the res5 of ``MODEL.LAMBDA_RESNET`` for a plain ResNet's.

    The context of a lambda layer is then one region: ROI_BOX_HEAD.POOLER_RESOLUTION positions each
    way. Its weights are those of the classifier's res5, by the name ``roi_heads.res5``.
    """

    @classmethod
    def _build_res5_block(cls, cfg: CfgNode) -> tuple[nn.Sequential, int]:
        options = cfg.MODEL.LAMBDA_RESNET
        spec = get_spec(options.NAME)
        if not isinstance(spec, ResNetSpec):
            raise ConfigError(
                f"MODEL.ROI_HEADS.NAME LambdaRes5ROIHeads needs a ResNet, and "
                f"MODEL.LAMBDA_RESNET.NAME is {options.NAME}; take another of them."
            )
        if cfg.MODEL.ROI_HEADS.IN_FEATURES != ["res4"]:
            raise ConfigError(
                f"MODEL.ROI_HEADS.IN_FEATURES is {list(cfg.MODEL.ROI_HEADS.IN_FEATURES)}, but "
                'LambdaRes5ROIHeads goes on from res4; set it to ["res4"].'
            )
        if cfg.MODEL.RESNETS.RES5_DILATION != 1:
            raise ConfigError(
                "MODEL.RESNETS.RES5_DILATION is of no use to LambdaRes5ROIHeads, whose res5 sees "
                "single regions; set it to 1."
            )
        for switch in ("CHECKPOINT_ACTIVATIONS", "MASK_PADDING"):
            if options[switch]:
                raise ConfigError(
                    f"MODEL.LAMBDA_RESNET.{switch} does not reach the res5 of LambdaRes5ROIHeads, "
                    "on the regions; set it to False."
                )
        if options.SHARE_POSITIONS == "size":
            raise ConfigError(
                "MODEL.LAMBDA_RESNET.SHARE_POSITIONS size would share embeddings of res4 with the "
                "res5 of LambdaRes5ROIHeads, which is no part of the backbone; set it to stage."
            )
        layers = Replacements(spec, options.NORM, **layer_options(options))
        blocks = make_stage(
            spec,
            "res5",
            spec.channels("res4"),
            stride=2,
            norm=options.NORM,
            in_stride=16,
            layers=layers,
            stochastic_depth=options.STOCHASTIC_DEPTH,
        )
        return nn.Sequential(*blocks), spec.channels("res5")
