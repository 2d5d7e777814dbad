"""The kernels of this package in a model of Detectron2."""

from __future__ import annotations

import torch
from detectron2.layers import Conv2d
from detectron2.modeling.meta_arch.semantic_seg import SemSegFPNHead
from detectron2.modeling.roi_heads import (
    BaseKeypointRCNNHead,
    KRCNNConvDeconvUpsampleHead,
    MaskRCNNConvUpsampleHead,
)
from torch import Tensor, nn

from lambda_det.cpu.pooling import convolve_pooled, patch_pooling
from lambda_det.cpu.winograd import use_winograd
from lambda_det.native.calls import is_hooked
from lambda_det.process import keep_memory


def accelerate(model: nn.Module, on: bool = True, *, channels_last: bool = True) -> nn.Module:
    """Let any model of Detectron2 train and predict on a CPU in less time.

    3x3 convolutions and ROIAlign take the kernels of this package, norms with fixed statistics are
    folded into the convolutions before them, all maps are channels last, and the process keeps the
    memory that it frees (:func:`lambda_det.process.keep_memory`). Results differ by rounding; under
    autocast boxes are pooled in float32. Weights keep their names, shapes and values. On another
    device, and in traced and compiled graphs, PyTorch's operators are used; torch.jit.script needs
    the model taken back.

    Args:
        model: is changed.
        on: False undoes all of it except the kept memory; maps are contiguous then.
        channels_last: lay out the weights of convolutions so that all maps are channels last; the
            3x3 convolutions of this package need it.

    Returns:
        The model.
    """
    if on and any(parameter.device.type == "cpu" for parameter in model.parameters()):
        keep_memory()
    patch_pooling(model, on)
    if channels_last or not on:
        use_channels_last(model, on)
    use_winograd(model, on)
    return model


def use_channels_last(model: nn.Module, on: bool = True) -> None:
    """Lay the weights of all convolutions out so that their outputs are channels last, or not.

    The first convolution lays out the image, and all that follows keeps the layout of its input.
    The first layers of box heads become convolutions where that is faster.
    """
    convolve_pooled(model, on)
    left = set()
    for head in model.modules():
        # Detectron2's keypoint loss needs contiguous scores
        if isinstance(head, KRCNNConvDeconvUpsampleHead) and type(head.score_lowres) in _SCORES:
            head.score_lowres.__class__ = _SCORES[on]
        elif isinstance(head, SemSegFPNHead) and type(head.predictor) in _LOGITS:
            # Resized by PyTorch, channels last, they would be copied whole
            head.predictor.__class__ = _LOGITS[on]
        elif isinstance(head, BaseKeypointRCNNHead):
            left.update(head.modules())
        elif isinstance(head, MaskRCNNConvUpsampleHead):
            # it is the largest map; a hook or a subclass may use what the layer before made of it
            is_known = all(getattr(type(head), x) is getattr(_MASKS, x) for x in _COMPUTING)
            head.deconv_relu.inplace = on and is_known and not is_hooked(head.deconv)
    layout = torch.channels_last if on else torch.contiguous_format
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d) and module not in left:
            module.to(memory_format=layout)


class _Contiguous:
    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, C, H, W] in any layout give contiguous ones."""
        return super().forward(x).contiguous()


class _Scores(_Contiguous, nn.ConvTranspose2d):
    pass


class _Logits(_Contiguous, Conv2d):
    pass


_MASKS, _COMPUTING = MaskRCNNConvUpsampleHead, ("forward", "layers")
_SCORES = nn.ConvTranspose2d, _Scores  # as they are, and accelerated
_LOGITS = Conv2d, _Logits
