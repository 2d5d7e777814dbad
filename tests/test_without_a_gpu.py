"""What a GPU would be asked to do, on tensors without data that are on a GPU that is not there.

An operator between two devices, one that reads a value, or one whose result's size depends on
values raises an error in ``pretend_gpu``; the trace sees copies between host and device. Each model
has one of the six settings in turn, so that all kinds of models meet all settings.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY

from lambda_det import LambdaLayer, create_backbone, list_models
from lambda_det.benchmarks.dry_run import Trace, pretend_gpu
from lambda_det.detection import load_config
from lambda_det.layers.local import compiled, fused, query_first

ROOT = Path(__file__).parents[1]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = (torch.channels_last, torch.contiguous_format)
SETTINGS = list(itertools.product(DTYPES, LAYOUTS))


def in_turn(names, quick=()):
    """Each name with a setting; those that are not quick are slow."""
    return [
        pytest.param(
            *(name, *SETTINGS[index % len(SETTINGS)]),
            marks=[] if name in quick else [pytest.mark.slow],
            id=f"{name}-{str(SETTINGS[index % len(SETTINGS)][0])[6:]}",
        )
        for index, name in enumerate(names)
    ]


def run(make, shape, dtype, layout, *more, backward=False, same_layout=True):
    """Outputs and trace of a training step's passes under autocast."""
    with pretend_gpu():
        with torch.device("cuda"):  # and not for what follows, whose devices are looked at
            model = make().train()
            x = torch.empty(shape).to(memory_format=layout).requires_grad_(backward)
            more = [other() for other in more]
        trace = Trace("cuda", given=[x, *model.parameters(), *model.buffers()])
        with trace:
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                outputs = model(x, *more)
            outputs = list(outputs.values()) if isinstance(outputs, dict) else [outputs]
            forward = trace.launches
            for output in outputs:
                assert output.is_cuda and output.dtype == dtype
                # Convolutions without a GPU give bfloat16 maps in another layout than cuDNN does
                if dtype != torch.bfloat16 and output.dim() == 4 and same_layout:
                    assert output.is_contiguous(memory_format=layout)
            if backward:
                reached = trace.backward(outputs[:])
                unreached = {n for n, p in model.named_parameters() if p not in reached}
                assert not unreached
                assert x in reached
    assert not trace.waits
    return forward, trace


# The deeper ones repeat the blocks of 152 layers
NETWORKS = [
    name for name in list_models() if not any(n in name for n in ("200", "270", "350", "420"))
]


@pytest.mark.parametrize(
    ("name", "dtype", "layout"), in_turn(NETWORKS, ("resnet50", "lambda_resnet26"))
)
def test_networks(name, dtype, layout):
    attention = "attention" in name  # which does not keep the layout
    run(lambda: create_backbone(name), (2, 3, 64, 64), dtype, layout, same_layout=not attention)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"), [("lambda_resnet50", 500), ("lambda_resnet50_c4", 600), ("resnet_rs50", 300)]
)
def test_networks_take_no_more_operators(name, most):
    """Of a forward pass in training mode under autocast; a convolution is one, and a norm."""
    forward, _ = run(lambda: create_backbone(name), (8, 3, 224, 224), torch.bfloat16, LAYOUTS[0])
    assert forward <= most


DETECTORS = (
    *("mask_rcnn_lambdaresnet50", "retinanet_lambdaresnet50", "mask_rcnn_resnetrs101_se"),
    *("mask_rcnn_c4_lambdaresnet50", "mask_rcnn_dc5_lambdaresnet50"),
    *("deeplabv3plus_lambdaresnet50", "panoptic_fpn_lambdaresnet50"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "layout"), in_turn(DETECTORS))
def test_backbones_of_detectors(name, dtype, layout):
    file = str(ROOT / "configs" / f"{name}.yaml")
    cfg = load_config(argparse.Namespace(config_file=file, opts=[]))
    build = BACKBONE_REGISTRY.get(cfg.MODEL.BACKBONE.NAME)
    run(lambda: build(cfg, ShapeSpec(channels=3)), (2, 3, 128, 192), dtype, layout)


def _padding():
    return torch.ones(2, 1, 12, 16, dtype=torch.bool)


def _contexts():
    return torch.ones(12 * 16, 12 * 16, dtype=torch.bool)


VARIANTS = {
    "as in the paper": {},
    "fused": {"implementation": "fused"},
    "conv": {"implementation": "conv"},
    "depthwise": {"implementation": "depthwise"},
    "dense": {"implementation": "dense", "scope": 3},
    "intra-depth": {"intra_depth": 4},
    "multi-head": {"multi_head": True},
    "dilation": {"dilation": 2, "scope": 5},
    "stride": {"stride": 2},
    "global": {"scope": None, "map_size": (12, 16)},
    "content only": {"scope": None},
    "position only": {"content": False},
    "l2 keys": {"key_norm": "l2"},
    "keys as they are": {"key_norm": "none"},
    "query softmax": {"query_softmax": True},
    "bias": {"position_bias": True},
    "no norm": {"norm": ""},
    "padding": {"mask": _padding},
    "a context per query": {"mask": _contexts, "query_depth": 2},
}


@pytest.mark.parametrize(("name", "dtype", "layout"), in_turn(VARIANTS, VARIANTS))
def test_layers_forward_and_backward(name, dtype, layout, monkeypatch):
    options = {"query_depth": 8, "scope": 7} | VARIANTS[name]
    masks = [options.pop("mask")] if "mask" in options else []
    monkeypatch.setattr(fused, "unsupported", lambda *inputs: None)
    run(
        *(lambda: LambdaLayer(32, **options), (2, 32, 12, 16), dtype, layout, *masks),
        backward=True,
        same_layout=not masks,
    )


@pytest.mark.parametrize(
    ("shape", "options"),
    [((2, 32, 20), {"sequence": True}), ((2, 32, 4, 6, 5), {"scope": (3, 5, 5)})],
)
def test_sequences_and_volumes(shape, options):
    def make():
        return LambdaLayer(32, query_depth=8, norm="", **options)

    run(make, shape, torch.bfloat16, torch.contiguous_format, backward=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("module", [query_first, fused])
@pytest.mark.parametrize("channels_last", [False, True])
def test_backward_operators(module, dtype, channels_last):
    """Called directly; gradients have the inputs' device, dtype, shape and layout."""
    with pretend_gpu():
        with torch.device("cuda"):
            shapes = (2, 9, 10, 4, 16), (2, 9, 10, 8, 1)
            if channels_last:
                queries, values = (torch.empty(shape, dtype=dtype) for shape in shapes)
            else:
                order = (0, 3, 4, 1, 2)  # which is its own inverse
                maps = ([shape[axis] for axis in order] for shape in shapes)
                queries, values = (torch.empty(m, dtype=dtype).permute(order) for m in maps)
            inputs = (queries, values, torch.empty(16, 1, 5, 5, dtype=dtype))
            grad = torch.empty(2, 9, 10, 4, 8, dtype=dtype)
        with Trace() as trace:
            if module is fused:
                found = fused.fused_gradients(grad, *inputs)
            else:
                found = query_first.query_first_gradients(grad, *inputs)
    for gradient, x in zip(found, inputs, strict=True):
        assert gradient.is_cuda and gradient.dtype == dtype and gradient.shape == x.shape
        assert gradient.stride() == x.stride()
    assert not trace.waits


def test_the_kernel_of_the_cpu_is_left_alone():
    with pretend_gpu():
        x = torch.empty(1, device="cuda")
        assert "on the CPU" in compiled.unsupported(x, x, x)
