"""A copy of a network for inference, with its batch norms folded into the convolutions before."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import torch
from detectron2.layers import Conv2d
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.cpu.folding import folded, is_foldable
from lambda_det.cpu.winograd import FAST_CONVOLUTIONS, FAST_SEQUENCES
from lambda_det.layers import LambdaLayer
from lambda_det.modeling.common import SqueezeExcitation
from lambda_det.modeling.resnet import Bottleneck
from lambda_det.native.calls import Model, copied, is_hooked

# The modules of these packages call a convolution and the norm behind it only together; their code
# was read. Other code may call the norm again, or compute with the kernel.
_READ_PACKAGES = ("torch", "torchvision", "detectron2", "lambda_det")
_PLAIN_CONVOLUTIONS = (nn.Conv2d, FAST_CONVOLUTIONS[nn.Conv2d])
_CONVOLUTIONS_WITH_NORM = (Conv2d, FAST_CONVOLUTIONS[Conv2d])
# the methods by which a sequence calls its modules in their order
_IN_ORDER = (nn.Sequential.forward, *(fast.forward for fast in FAST_SEQUENCES.values()))


def fold_norms(model: Model) -> Model:
    """A copy in evaluation mode that computes the same with fewer operations.

    Norms with running statistics are folded into the convolution before them: in the convolutions
    of Detectron2, in the projections of lambda layers, and where both follow each other in an
    ``nn.Sequential``. The model itself is left as it is.

    All below a module with a hook, or of another package than PyTorch, torchvision, Detectron2 and
    this one, stays as it is, because its code could use a convolution without the norm. So does a
    convolution that is used in several places, or that differs from its norm in dtype or number of
    channels.
    """
    model = copied(model).eval()
    modules = [*model.modules()]
    places = Counter(child for module in modules for child in module._modules.values())
    left = {inner for module in modules if not _is_read(module) for inner in module.modules()}
    free = {module for module in modules if module not in left and places[module] <= 1}
    for module in modules:
        if module not in free:
            continue
        if type(module) in _CONVOLUTIONS_WITH_NORM:
            if is_foldable(module.norm, module.weight) and _fold(module, module.norm):
                module.norm = None
        elif type(module) is LambdaLayer and module.qkv in free:
            _fold_projection(module)
        elif isinstance(module, nn.Sequential) and type(module).forward in _IN_ORDER:
            _fold_sequence(module, free)
    for module in free:
        if type(module) is Bottleneck and _squeezes_early(module, free):
            module.__class__ = _FoldedBottleneck
    return model


class _FoldedBottleneck(Bottleneck):
    def widen(self, x: Tensor) -> Tensor:
        """The means of the last map follow from the means of its input, which has a fourth of the
        channels.
        """
        means = F.conv2d(self.se.squeeze(x), self.conv3.weight, self.conv3.bias)
        return self.se(self.conv3(x), means)


def _is_read(module: nn.Module) -> bool:
    """Whether all code that runs when a module is called belongs to packages that were read."""
    return type(module).__module__.partition(".")[0] in _READ_PACKAGES and not is_hooked(module)


@torch.no_grad()
def _fold(conv: nn.Conv2d, norm: nn.Module, rows: slice = slice(None)) -> bool:
    """Fold the norm of these output channels into the convolution, if the result is finite."""
    bias = conv.weight.new_zeros(conv.out_channels) if conv.bias is None else conv.bias.clone()
    weight = conv.weight.clone()  # in its layout in memory
    weight[rows], bias[rows] = folded(norm, weight[rows], bias[rows], torch.float64)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        return False
    # Others that hold the old parameters keep their values.
    conv.weight = nn.Parameter(weight, conv.weight.requires_grad)
    conv.bias = nn.Parameter(bias, conv.weight.requires_grad)
    return True


def _fold_projection(layer: LambdaLayer) -> None:
    """Fold the norms of queries and values into their rows of the projection."""
    conv, (queries, keys, _) = layer.qkv, layer.rows
    if type(conv) not in _PLAIN_CONVOLUTIONS:
        return
    for name, rows in (("query_norm", slice(queries)), ("value_norm", slice(queries + keys, None))):
        norm = getattr(layer, name)
        if is_foldable(norm, conv.weight[rows]) and _fold(conv, norm, rows):
            setattr(layer, name, nn.Identity())


def _fold_sequence(sequence: nn.Sequential, free: set[nn.Module]) -> None:
    """Fold each norm that follows a convolution that is used only here."""
    for (_, conv), (name, norm) in pairwise([*sequence._modules.items()]):
        if conv in free and _ends_with_convolution(conv) and is_foldable(norm, conv.weight):
            setattr(sequence, name, nn.Identity() if _fold(conv, norm) else norm)


def _ends_with_convolution(module: nn.Module) -> bool:
    """Whether nothing follows the convolution within the module."""
    if type(module) in _CONVOLUTIONS_WITH_NORM:
        return module.norm is None and module.activation is None
    return type(module) in _PLAIN_CONVOLUTIONS


def _squeezes_early(block: Bottleneck, free: set[nn.Module]) -> bool:
    """Whether the mean over a block's last map is its last convolution of the input's mean."""
    conv, se = block.conv3, block.se
    if type(se) is not SqueezeExcitation or type(conv) not in _CONVOLUTIONS_WITH_NORM:
        return False
    return free.issuperset((conv, se, se.squeeze)) and _ends_with_convolution(conv)
