"""Padding that leaves no trace in the features (``MODEL.LAMBDA_RESNET.MASK_PADDING``).

The modules of a network do not know of it. Hooks between them set padded positions to 0, which is
what a convolution sees beyond the border of a map, leave these positions out of averages, and give
the lambda layers their mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from lambda_det.modeling.resnet import LambdaResNet


class PaddingMask:
    """Gives each image of a padded batch the features that it has by itself.

    Args:
        network: gets hooks. It has to call :meth:`find` before anything else.

    Attributes:
        masks: by stride, True at positions of an image: bool [B, 1, ceil(H / stride), ceil(W /
            stride)].
    """

    def __init__(self, network: LambdaResNet) -> None:
        self.masks: dict[int, Tensor] = {}
        # Hooks are methods with their stride, not functions made here: the hooks of a copy of the
        # network then belong to the copy's mask
        for name in ("conv1", "conv2", "conv3"):  # a vanilla stem has one convolution
            if hasattr(network.stem, name):
                getattr(network.stem, name).register_forward_hook(partial(self._blank, 2))
        if hasattr(network.stem, "pool"):  # by the maximum, and activations may be negative
            network.stem.pool.register_forward_pre_hook(partial(self._hide_input, 2))
            network.stem.pool.register_forward_hook(partial(self._blank, network.stem.stride))
        stride = network.stem.stride
        stages = (getattr(network, name) for name in network.stage_names)
        for block in itertools.chain.from_iterable(stages):
            block.conv1.register_forward_hook(partial(self._blank, stride))
            if block.is_lambda:
                block.conv2.register_forward_pre_hook(partial(self._add_mask, stride))
                block.conv2.register_forward_hook(partial(self._blank, stride))
                if not getattr(block.pool, "count_include_pad", True):
                    self._average_image(block.pool, stride)
            if block.shortcut_pool is not None:
                self._average_image(block.shortcut_pool, stride)
            stride *= block.stride
            if block.se is not None:
                self._average_image(block.se.squeeze, stride)

    def find(self, images: Tensor) -> None:
        """Find the padding of a batch [B, C, H, W]."""
        self.masks = {1: image_area(images)}
        for stride in (2, 4, 8, 16, 32):
            # By an operator that rounds sizes as convolutions do, because exported graphs need it.
            self.masks[stride] = F.max_pool2d(self.masks[stride // 2].float(), 1, 2) > 0

    def bind(self, block: nn.Module) -> Callable[[Tensor], Tensor]:
        """The block with the masks of this batch, also if it computes again after another batch."""
        masks = self.masks

        def run(x: Tensor) -> Tensor:
            self.masks = masks
            return block(x)

        return run

    def _average_image(self, pool: nn.Module, stride: int) -> None:
        """Let an average pooling count only the positions of the image."""
        pool.register_forward_pre_hook(partial(self._blank_input, stride))
        pool.register_forward_hook(partial(self._divide_by_share, stride))

    def _blank(self, stride: int, module: nn.Module, args: tuple, y: Tensor) -> Tensor:
        return y * self.masks[stride].to(y.dtype)

    def _blank_input(self, stride: int, pool: nn.Module, args: tuple[Tensor]) -> Tensor:
        return self._blank(stride, pool, (), args[0])

    def _hide_input(self, stride: int, pool: nn.Module, args: tuple[Tensor]) -> Tensor:
        return args[0].masked_fill(~self.masks[stride], torch.finfo(args[0].dtype).min)

    def _divide_by_share(self, stride: int, pool: nn.Module, args: tuple, y: Tensor) -> Tensor:
        share = pool.forward(self.masks[stride].to(y.dtype))  # of positions in the image
        return y / torch.where(share > 0, share, 1)

    def _add_mask(self, stride: int, layer: nn.Module, args: tuple[Tensor]) -> tuple:
        return (*args, self.masks[stride])


def image_area(images: Tensor) -> Tensor:
    """The positions of images in a padded batch [B, C, H, W]: bool [B, 1, H, W], True in a
    rectangle at the top left.

    Detectron2 pads at the bottom and the right with zeros, after the images were normalised. A
    pixel of an image is not exactly 0 in all channels there unless the pixel mean is a whole
    number, and only complete rows and columns of such pixels at the border could be mistaken for
    padding.
    """
    nonzero = (images != 0).any(1, keepdim=True)
    nonzero |= ~nonzero.any((2, 3), keepdim=True)  # an image of only zeros has no padding
    # By sums, since ONNX has no cummax
    rows = nonzero.any(3, keepdim=True).int().flip(2).cumsum(2).flip(2) > 0  # to the last row
    columns = nonzero.any(2, keepdim=True).int().flip(3).cumsum(3).flip(3) > 0
    return rows & columns
