"""Exported networks in the runtimes that a user would take instead, for the preset ``runtimes``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lambda_benchmarks.detectors import detectron2_detector, our_detector, take_statistics
from lambda_det import accelerate, create_backbone
from lambda_det.detection.model import for_inference
from lambda_det.export import Network, backbone_network, detector_network, onnx_file
from lambda_det.export.session import example

BACKBONES = {
    "LambdaResNet-50": "lambda_resnet50",
    "ResNet-50": "resnet50",
    "ResNet-RS-50 with squeeze-and-excitation": "resnet_rs50_se",
}
Call = Callable[..., Any]


def here(network: Network, path: Path, dtype: torch.dtype) -> Call:
    """Compute it as lambda-det predict does."""
    model = for_inference(accelerate(network.original), str(dtype).removeprefix("torch."))
    if not network.detector:
        return model
    return lambda images, _: model.inference(
        [{"image": images[0].movedim(-1, 0)}], do_postprocess=False
    )


def onnx_runtime(network: Network, path: Path, dtype: torch.dtype) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    return lambda *given: session.run(
        None, {name: x.numpy() for name, x in zip(names, given, strict=True)}
    )


def openvino(network: Network, path: Path, dtype: torch.dtype) -> Call:
    import openvino

    hint = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    options = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
    options["INFERENCE_NUM_THREADS"] = torch.get_num_threads()
    compiled = openvino.Core().compile_model(path, "CPU", options)
    return lambda *given: compiled([x.numpy() for x in given])


RUNTIMES: dict[str, Callable[[Network, Path, torch.dtype], Call]] = {
    "lambda_det": here,
    "onnxruntime": onnx_runtime,
    "openvino": openvino,
}


def backbone(name: str, side: int) -> tuple[Network, tuple[Tensor, ...]]:
    images = (torch.randn(1, 3, side, side),)
    model = create_backbone(BACKBONES[name])
    take_statistics(model, *images)
    return backbone_network(model), images


def mask_rcnn(name: str, side: int) -> tuple[Network, tuple[Tensor, ...]]:
    """Mask R-CNN for images of this size; masks within their boxes."""
    if name == "ResNet-50":
        made, images = detectron2_detector(50, 1, side, "cpu")
    else:
        made, images = our_detector(50, ["SOLVER.AMP.ENABLED", False], 1, side, "cpu")
    network = detector_network(made.model, fixed=(side, side))
    sizes = torch.tensor([[side, side]], dtype=torch.int32)
    return network, (images[0].movedim(0, 2)[None].clamp(0, 255).byte(), sizes)


# the names of the compared networks, by the functions that make them
NETWORKS = {backbone: tuple(BACKBONES), mask_rcnn: ("LambdaResNet-50", "ResNet-50")}


def run_by(
    runtime: str,
    make: Callable[[str, int], tuple[Network, tuple[Tensor, ...]]],
    name: str,
    side: int,
    dtype: torch.dtype,
) -> tuple[Call, tuple[Tensor, ...]]:
    """A network of random weights in a runtime of RUNTIMES, and one image for it."""
    torch.manual_seed(0)
    network, inputs = make(name, side)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "network.onnx")
        if runtime != "lambda_det":
            onnx_file.write(network, example(network), path)
        return RUNTIMES[runtime](network, path, dtype), inputs
