"""ONNX: a graph of torch.onnx for every size, names for its sizes, metadata, and ONNX Runtime."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config

from lambda_det.errors import ConfigError
from lambda_det.export.detections import exportable_detections
from lambda_det.export.networks import Network

OPSET = 18  # the one that torch.onnx writes without converting versions
# names of the sizes of a graph's input; with an FPN, over its largest stride
AXES = ("batch", "height", "width")
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
HOLDS_ANY_SIZE = hasattr(_config, "backed_size_oblivious")  # one graph; PyTorch 2.7 or newer


def check_possible() -> None:
    """Raise ConfigError where no file can be written here."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"An export needs other packages: pip install {' '.join(missing)}")
    if not HOLDS_ANY_SIZE:
        raise ConfigError(
            f"PyTorch {torch.__version__} can only record one graph for maps of more than one tile "
            "and another for smaller ones; use PyTorch 2.7 or newer."
        )


def record(network: Network, example: tuple[Tensor, ...]) -> ExportedProgram:
    """Record the graph of a network for its free sizes."""
    # Before 2.14 PyTorch wants maps of two positions; the file does not
    least = 1 if torch.__version__ >= "2.14" else 129
    count = {} if network.batch else {0: Dim(AXES[0], min=1)}
    sides = {}
    if not network.fixed:
        units = [Dim(name, min=-(-least // network.stride)) for name in AXES[1:]]
        axes = (1, 2) if network.detector else (2, 3)
        sides = {
            axis: network.stride * unit if network.stride > 1 else unit
            for axis, unit in zip(axes, units, strict=True)
        }
    shapes = ({**count, **sides}, count)[: len(example)]
    with (
        torch.no_grad(),
        _config.patch(backed_size_oblivious=True),  # also for sizes of 1
        # Before PyTorch 2.15 the size of a pooled map asks for the remainder of a division
        mock.patch.object(torch._meta_registrations, "div_rtn", lambda x, y: x // y),
        exportable_detections(),
    ):
        return torch.export.export(network.module, example, dynamic_shapes=shapes, strict=False)


def write(network: Network, example: tuple[Tensor, ...], path: Path) -> list[str]:
    """Write a network with names for its inputs and outputs; returns those of its outputs.

    Raises:
        RuntimeError: or one of a class derived from it: ONNX cannot hold the network.
    """
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.core import aten_sort
    from onnxscript.function_libs.torch_lib.ops.nn import aten_avg_pool2d

    def sort(x: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
        return aten_sort(x, dim, descending)  # by TopK, which is stable

    def average(x: Any, *sides: Any) -> Any:
        padding = x.producer()
        if sides[-1:] != (4,) or padding is None or padding.op_type != "Pad":
            return aten_avg_pool2d(x, *sides)
        # This is of PortableAvgPool2d. A border that does not count gives the same in less time.
        sides = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 1, 1]}
        return opset18.AveragePool(padding.inputs[0], **sides, count_include_pad=0)

    with torch.no_grad(), exportable_detections():
        outputs = list(network.module(*example))
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns of every empty list
    torch.onnx.export(
        record(network, example),
        f=str(path),
        dynamo=True,
        opset_version=OPSET,
        input_names=["images", "sizes"][: len(example)],
        output_names=outputs,
        external_data=False,
        verbose=False,
        custom_translation_table={
            torch.ops.aten.sort.stable: sort,
            torch.ops.aten.avg_pool2d.default: average,
        },
    )
    return outputs


def finish(path: Path, about: Mapping[str, Any]) -> None:
    """Name the sizes in a file, and write what is known about it to its metadata."""
    import onnx

    model = onnx.load(path)
    sizes = [dim.dim_param for dim in model.graph.input[0].type.tensor_type.shape.dim]
    symbols = [match[0] for size in sizes if (match := re.search(r"[a-z]\w*", size))]  # of "32*s77"
    # with two free sizes the number of images is fixed
    words = dict(zip(symbols, AXES[len(symbols) == 2 :], strict=False))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            for symbol, word in words.items():
                if dim.dim_param:  # to set it removes a number
                    dim.dim_param = re.sub(rf"\b{symbol}\b", word, dim.dim_param)
    texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in about.items()}
    onnx.helper.set_model_props(model, texts)
    onnx.checker.check_model(model)
    onnx.save(model, path)


def read(path: Path) -> tuple[dict[str, Any], Callable[..., dict[str, Tensor]]]:
    """A file in ONNX Runtime on the CPU: the metadata that :func:`finish` wrote, and the file as a
    function from tensors to outputs by name.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    about = dict(session.get_modelmeta().custom_metadata_map)
    for key, text in about.items():
        with contextlib.suppress(ValueError, RecursionError):  # plain words
            about[key] = json.loads(text)
    inputs, outputs = (
        [tensor.name for tensor in tensors]
        for tensors in (session.get_inputs(), session.get_outputs())
    )

    def run(*given: Tensor) -> dict[str, Tensor]:
        arrays = [x.cpu().numpy() for x in given]
        values = session.run(None, dict(zip(inputs, arrays, strict=True)))
        return {
            name: torch.from_numpy(np.array(value))
            for name, value in zip(outputs, values, strict=True)
        }

    return about, run
