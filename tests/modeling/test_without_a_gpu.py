"""What a GPU would be asked to do, on tensors without data that are on a GPU that is not there.

An operator between two devices, one that reads a value, or one whose result's size depends on
values raises an error in ``pretend_gpu``; the trace sees copies between host and device. Networks,
layers and backbones of detectors meet one setting of dtype and layout in turn.
"""

import argparse
import itertools
import math
from pathlib import Path

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from lambda_det import LambdaLayer, create_backbone, list_models
from lambda_det.detection import load_config
from lambda_det.layers.local import OPERATORS, choose, fused
from lambda_det.modeling.build import kind_of
from lambda_det.modeling.specs import STAGES, get_spec
from tests.layers import test_lambda_layer as layers
from tests.modeling.pretended_gpu import Trace, is_available, pretend_gpu
from tests.native import emulated

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
    """The number of operators of a training step's forward pass under autocast."""
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
    return trace.launches


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
    return kind_of(spec).network(spec, out_features=STAGES)


@pytest.mark.parametrize(
    ("name", "settings"), [*in_turn(NETWORKS[:1]), *in_turn(NETWORKS[1:], pytest.mark.slow)]
)
def test_networks(name, settings):
    run(lambda: _network(name), (2, 3, 64, 64), settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"), [("lambda_resnet50", 500), ("lambda_resnet50_c4", 620), ("resnet_rs50", 300)]
)
def test_networks_take_no_more_operators(name, most):
    """Of a forward pass in training mode under autocast; a convolution is one, and a norm."""
    # in float16, whose layout is the same without a GPU
    settings = [(torch.float16, torch.channels_last)]
    forward = run(lambda: create_backbone(name), (8, 3, 224, 224), settings)
    assert forward <= most, forward


DETECTORS = (
    *("mask_rcnn_lambdaresnet50", "retinanet_lambdaresnet50", "mask_rcnn_c4_lambdaresnet50"),
    *("mask_rcnn_dc5_lambdaresnet50", "deeplabv3plus_lambdaresnet50"),
)


@pytest.mark.parametrize(("name", "settings"), in_turn(DETECTORS, pytest.mark.slow))
def test_backbones_of_detectors(name, settings):
    file = str(ROOT / "configs" / f"{name}.yaml")
    cfg = load_config(argparse.Namespace(config_file=file, opts=[]))
    build = BACKBONE_REGISTRY.get(cfg.MODEL.BACKBONE.NAME)
    run(lambda: build(cfg, ShapeSpec(channels=3)), (2, 3, 128, 192), settings)


MAP = (5, 6)


def _padding():
    return torch.ones(2, 1, *MAP, dtype=torch.bool)


def _contexts():
    return torch.ones(math.prod(MAP), math.prod(MAP), dtype=torch.bool)


# Variants that differ from another one in sizes alone
SAME_OPERATORS = ("wide scope", "one head", "intra-depth", "other width", "global, same size")
SAME_OPERATORS += ("dilated beyond the map", "multi-head, intra-depth")
VARIANTS = {
    **{name: one for name, one in layers.VARIANTS.items() if name not in SAME_OPERATORS},
    "fused": {"implementation": "fused"},
    "depthwise": {"implementation": "depthwise"},
    "dense": {"implementation": "dense", "scope": 3},
    "padding": {"mask": _padding},
    "a context per query": {"mask": _contexts, "query_depth": 2},
}


@pytest.mark.parametrize(("name", "settings"), in_turn(VARIANTS))
def test_layers(name, settings, monkeypatch):
    options = {"query_depth": 8, "scope": 7} | VARIANTS[name]
    masks = [options.pop("mask")] if "mask" in options else []
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
            if channels_last:
                queries, values = (torch.empty(shape, dtype=dtype) for shape in shapes)
            else:
                order = (0, 3, 4, 1, 2)  # which is its own inverse
                maps = ([shape[axis] for axis in order] for shape in shapes)
                queries, values = (torch.empty(m, dtype=dtype).permute(order) for m in maps)
            inputs = (queries, values, torch.empty(16, 1, 5, 5, dtype=dtype))
            grad = torch.empty(2, 5, 9, 4, 8, dtype=dtype)
        with Trace() as trace:
            gradients = OPERATORS[name][1](grad, *inputs)
    for gradient, x in zip(gradients, inputs, strict=True):
        assert gradient.is_cuda and gradient.dtype == dtype and gradient.shape == x.shape
        assert gradient.stride() == x.stride()
    assert not trace.waits


def test_auto_on_a_gpu(monkeypatch, tmp_path):
    """By dtype and capability, without a tensor that has data."""
    for capability, dtype, chosen in (
        ((7, 5), torch.bfloat16, "query_first"),
        ((8, 0), torch.bfloat16, "fused"),
        ((12, 0), torch.float16, "fused"),
        ((9, 0), torch.float32, "query_first"),
    ):
        with emulated.pretend(monkeypatch, tmp_path, is_emulated=False) as machine, pretend_gpu():
            machine.capability = capability
            queries = torch.empty(1, 12, 13, 4, 16, device="cuda", dtype=dtype)
            values, embedding = (
                queries.new_empty(1, 12, 13, 64, 1),
                queries.new_empty(16, 1, 23, 23),
            )
            assert choose(queries, values, embedding) == chosen
            assert not machine.compiled


def test_sees_what_the_host_waits_for():
    with pretend_gpu():
        x = torch.randn(8, device="cuda")
        for wait in (lambda: x.cpu(), lambda: torch.zeros(8).to("cuda"), lambda: x.to("cpu") + 1):
            with Trace() as trace:
                wait()
            assert trace.waits == {"aten::_to_copy": 1}
        with Trace() as trace:
            x + 2.5, x * torch.tensor(2.0), torch.arange(8, device="cuda") + 1
        assert not trace.waits
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
        with pytest.raises(DynamicOutputShapeException):
            x[x > 0]
        with pytest.raises(RuntimeError, match="cuda:0"):
            x + torch.zeros(8)


class _Noting(nn.SyncBatchNorm):
    """Notes the layouts of its inputs."""

    def __init__(self, channels):
        super().__init__(channels)
        self.is_last = []

    def forward(self, x):
        self.is_last.append(x.is_contiguous(memory_format=torch.channels_last))
        return super().forward(x)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_synchronised_norms_get_dense_maps(layout):
    """PyTorch's makes a map per channel of a view, and all that follows would be one."""
    with pretend_gpu(), torch.device("cuda"):
        layer = LambdaLayer(16, query_depth=4, scope=3, norm=_Noting)
        y = layer(torch.empty(2, 16, 6, 7).to(memory_format=layout))
    is_last = layout == torch.channels_last
    assert layer.query_norm.is_last == layer.value_norm.is_last == [is_last]
    assert y.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("images", [2, 16])
def test_query_first_on_a_gpu_is_a_few_kernels(images):
    """As many at any batch that is one chunk (docs/gpu.md), and the host waits for none."""
    with pretend_gpu(), torch.device("cuda"):
        shapes = (images, 32, 32, 4, 16), (images, 32, 32, 128, 1), (16, 1, 23, 23)
        inputs = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        output_of, gradients_of = OPERATORS["query_first"]
        with Trace() as forward:
            output = output_of(*inputs)
        with Trace() as backward:
            gradients_of(output, *inputs)
    assert forward.launches == 10 and backward.launches <= 38
    assert not forward.waits and not backward.waits
