"""What a GPU would be asked to do, on tensors without data that are on a GPU that is not there.

An operator between two devices, one that reads a value, or one whose result's size depends on
values raises an error in ``pretend_gpu``; the trace sees copies between host and device. Networks
and layers meet one setting of dtype and layout in turn.
"""

import itertools
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from lambda_det import LambdaLayer, list_models
from lambda_det.layers.local import OPERATORS, fused
from lambda_det.modeling.build import NETWORK_KINDS
from lambda_det.modeling.specs import STAGES, get_spec
from tests.layers import test_lambda_layer as layers
from tests.layers.reference import laid_out
from tests.modeling.pretended_gpu import Trace, is_available, pretend_gpu

pytestmark = pytest.mark.skipif(not is_available(), reason="not with this PyTorch")
ROOT = Path(__file__).parents[2]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = (torch.channels_last, torch.contiguous_format)
SETTINGS = list(itertools.product(DTYPES, LAYOUTS))


def in_turn(names, *marks):
    """Each name with one of the settings."""
    pairs = zip(names, itertools.cycle(SETTINGS))
    return [pytest.param(name, [one], marks=marks, id=name) for name, one in pairs]


def run(make, shape, settings, *more, same_layout=True):
    """A training step's forward pass under autocast, for which the host waits nowhere."""
    with pretend_gpu():
        with torch.device("cuda"):  # and not for what follows, whose devices are looked at
            model = make().train()
            more = [other() for other in more]
        for dtype, layout in settings:
            with torch.device("cuda"):
                x = torch.empty(shape).to(memory_format=layout)
            with Trace() as trace:
                with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                    outputs = model(x, *more)
                outputs = list(outputs.values()) if isinstance(outputs, dict) else [outputs]
                for output in outputs:
                    assert output.is_cuda and output.dtype == dtype
                    # Without a GPU convolutions give bfloat16 maps in another layout than cuDNN
                    if dtype != torch.bfloat16 and output.dim() == 4 and same_layout:
                        assert output.is_contiguous(memory_format=layout)
            assert not trace.waits


def _kind(spec):
    """What decides which operators a network takes: not how many blocks, where, or how wide.

    The options of its lambda layers are those of ``test_layers``.
    """
    same = ("blocks", "layer", "width", "image_size", "paper")
    facts = {name: value for name, value in vars(spec).items() if name not in same}
    return type(spec), str(facts | {"lambda_blocks": any(facts.get("lambda_blocks", ()))})


# A network of each kind, the first that is listed
NETWORKS = list({_kind(get_spec(name)): name for name in reversed(list_models())}.values())[::-1]


def _network(name):
    spec = get_spec(name)
    return NETWORK_KINDS[type(spec)](spec, out_features=STAGES)


@pytest.mark.parametrize(
    ("name", "settings"), [*in_turn(NETWORKS[:1]), *in_turn(NETWORKS[1:], pytest.mark.slow)]
)
def test_networks(name, settings):
    run(lambda: _network(name), (2, 3, 64, 64), settings)


MAP = (5, 6)


# Variants that differ from another one in sizes alone
SAME_OPERATORS = ("wide scope", "one head", "intra-depth", "other width")
SAME_OPERATORS += ("dilated beyond the map", "multi-head, intra-depth")
VARIANTS = {
    **{name: one for name, one in layers.VARIANTS.items() if name not in SAME_OPERATORS},
    "fused": {"implementation": "fused"},
    "depthwise": {"implementation": "depthwise"},
    "dense": {"implementation": "dense", "scope": 3},
    # These are of shapes
    "padding": {"mask": (2, 1, *MAP)},
    "a context per query": {"mask": (math.prod(MAP), math.prod(MAP)), "query_depth": 2},
}


@pytest.mark.parametrize(("name", "settings"), in_turn(VARIANTS))
def test_layers(name, settings, monkeypatch):
    options = {"query_depth": 8, "scope": 7} | VARIANTS[name]
    shapes = [options.pop("mask")] if "mask" in options else []
    masks = [partial(torch.ones, shape, dtype=torch.bool) for shape in shapes]
    monkeypatch.setattr(fused, "unsupported", lambda *inputs: None)
    run(
        *(lambda: LambdaLayer(32, **options), (2, 32, *MAP), settings, *masks),
        same_layout=not masks and "multi-head" not in name and "softmax of" not in name,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["query_first", "fused"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_backward_operators(name, dtype, channels_last):
    """Called directly; gradients have the inputs' device, dtype, shape and layout."""
    with pretend_gpu():
        with torch.device("cuda"):
            shapes = (2, 5, 9, 4, 16), (2, 5, 9, 8, 1)
            order = (0, 1, 2, 3, 4) if channels_last else (0, 3, 4, 1, 2)
            inputs = [laid_out(shape, order, dtype) for shape in shapes]
            inputs.append(torch.empty(16, 1, 5, 5, dtype=dtype))
            grad = torch.empty(2, 5, 9, 4, 8, dtype=dtype)
        with Trace() as trace:
            gradients = OPERATORS[name][1](grad, *inputs)
    for gradient, x in zip(gradients, inputs, strict=True):
        assert gradient.is_cuda and gradient.dtype == dtype and gradient.shape == x.shape
        assert gradient.stride() == x.stride()
    assert not trace.waits


def test_sees_what_the_host_waits_for():
    with pretend_gpu():
        x = torch.randn(8, device="cuda")
        for wait in (lambda: x.cpu(), lambda: torch.zeros(8).to("cuda"), lambda: x.to("cpu") + 1):
            with Trace() as trace:
                wait()
            assert trace.waits == {"aten::_to_copy": 1}
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
