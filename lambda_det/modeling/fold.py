"""A copy of a network for inference, with its batch norms folded into the convolutions before."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from detectron2.layers import Conv2d
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.cpu.folding import folded, is_foldable
from lambda_det.cpu.winograd import FAST_CONVOLUTIONS, FAST_SEQUENCES
from lambda_det.layers import LambdaLayer
from lambda_det.modeling.parts import SqueezeExcitation
from lambda_det.modeling.resnet import Bottleneck
from lambda_det.native.calls import is_hooked

Model = TypeVar("Model", bound=nn.Module)

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

    A norm stays as it is where the result could differ: its convolution is used in several places,
    or has a kernel that is computed (weight norm, spectral norm, pruning); there is a hook between
    the two; they differ in dtype or number of channels; or a module or a hook of another package
    than PyTorch, torchvision, Detectron2 and this one is around them, because its code could use
    one without the other.
    """
    model = _copied(model).eval()
    network = _Network(model)
    for module in [*model.modules()]:
        if type(module) in _CONVOLUTIONS_WITH_NORM:
            _fold_own_norm(module, network)
        elif type(module) is LambdaLayer:
            _fold_projection(module, network)
        elif isinstance(module, nn.Sequential) and type(module).forward in _IN_ORDER:
            _fold_sequence(module, network)
    for module in model.modules():
        if type(module) is Bottleneck and _squeezes_early(module, network):
            module.__class__ = _FoldedBottleneck
    return model


def _copied(model: Model) -> Model:
    """A copy of a network, also after weight norm or pruning computed a kernel.

    Such a kernel is part of autograd's graph, which cannot be copied.
    """
    attributes = (x for module in model.modules() for x in vars(module).values())
    computed = [x for x in attributes if isinstance(x, Tensor) and not x.is_leaf]
    return copy.deepcopy(model, {id(x): x.detach().clone() for x in computed})


class _FoldedBottleneck(Bottleneck):
    def widen(self, x: Tensor) -> Tensor:
        """The means of the last map follow from the means of its input, which has a fourth of the
        channels.
        """
        means = F.conv2d(self.se.squeeze(x), self.conv3.weight, self.conv3.bias)
        return self.se(self.conv3(x), means)


class _Network:
    """What must be known about a whole network before one of its convolutions is changed."""

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        self._places = Counter(child for m in modules for child in m._modules.values())
        self._seen_by_others = {inner for m in modules if not _is_read(m) for inner in m.modules()}

    def is_seen_by_others(self, module: nn.Module) -> bool:
        """Whether code that was not read may use a module."""
        return module in self._seen_by_others

    def is_changeable(self, conv: nn.Conv2d) -> bool:
        """Whether a convolution may compute something else from now on.

        A second convolution that shares the kernel does not prevent it, because that one keeps the
        kernel.
        """
        is_plain = all(type(x) is nn.Parameter for x in (conv.weight, conv.bias) if x is not None)
        return is_plain and self._places[conv] <= 1 and not self.is_seen_by_others(conv)


def _is_read(module: nn.Module) -> bool:
    """Whether all code that runs when a module is called belongs to packages that were read."""
    codes = (
        type(module),
        inspect.getattr_static(module, "forward"),  # that of the object, if it has one
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
    )
    return all(map(_is_of_read_package, codes))


def _is_of_read_package(code: Any) -> bool:
    """Whether a class or a function is defined in such a package."""
    while isinstance(code, partial):
        code = code.func
    return str(getattr(code, "__module__", "")).partition(".")[0] in _READ_PACKAGES


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


def _fold_own_norm(conv: Conv2d, network: _Network) -> None:
    """Fold the norm that a convolution of Detectron2 calls itself."""
    # Hooks on the convolution see only the map behind the norm
    if network.is_changeable(conv) and is_foldable(conv.norm, conv.weight):
        conv.norm = None if _fold(conv, conv.norm) else conv.norm


def _fold_projection(layer: LambdaLayer, network: _Network) -> None:
    """Fold the norms of queries and values into their rows of the projection."""
    conv, (queries, keys, _) = layer.qkv, layer.rows
    if type(conv) not in _PLAIN_CONVOLUTIONS or is_hooked(conv) or not network.is_changeable(conv):
        return
    for name, rows in (("query_norm", slice(queries)), ("value_norm", slice(queries + keys, None))):
        norm = getattr(layer, name)
        if is_foldable(norm, conv.weight[rows]) and _fold(conv, norm, rows):
            setattr(layer, name, nn.Identity())


def _fold_sequence(sequence: nn.Sequential, network: _Network) -> None:
    """Fold each norm that follows a convolution."""
    for (_, conv), (name, norm) in pairwise([*sequence._modules.items()]):
        if not _ends_with_convolution(conv) or is_hooked(conv) or not network.is_changeable(conv):
            continue
        if is_foldable(norm, conv.weight) and _fold(conv, norm):
            setattr(sequence, name, nn.Identity())


def _ends_with_convolution(module: nn.Module | None) -> bool:
    """Whether nothing follows the convolution within the module."""
    if type(module) in _CONVOLUTIONS_WITH_NORM:
        return module.norm is None and module.activation is None
    return type(module) in _PLAIN_CONVOLUTIONS


def _squeezes_early(block: Bottleneck, network: _Network) -> bool:
    """Whether the mean over a block's last map equals its last convolution of the mean of the
    input.
    """
    conv, se = block.conv3, block.se
    if type(se) is not SqueezeExcitation or type(conv) not in _CONVOLUTIONS_WITH_NORM:
        return False
    unseen = not (is_hooked(conv) or is_hooked(se) or network.is_seen_by_others(se.squeeze))
    return unseen and _ends_with_convolution(conv)
