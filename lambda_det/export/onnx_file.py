"""ONNX: a graph of torch.onnx, names for its sizes, metadata, and ONNX Runtime."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from lambda_det.errors import ConfigError

__all__ = ["OPSET", "PACKAGES", "finish_onnx", "onnx_metadata", "read_onnx", "write_onnx"]

OPSET = 18  # the one that torch.onnx writes without converting versions
# names of the sizes of a graph's input; with an FPN, over its largest stride
AXES = ("batch", "height", "width")
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def write_onnx(
    program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], path: Path
) -> None:
    """Write a program with names for its inputs and outputs."""
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

    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns of every empty list
    torch.onnx.export(
        program,
        f=str(path),
        dynamo=True,
        opset_version=OPSET,
        input_names=list(inputs),
        output_names=list(outputs),
        external_data=False,
        verbose=False,
        custom_translation_table={
            torch.ops.aten.sort.stable: sort,
            torch.ops.aten.avg_pool2d.default: average,
        },
    )


def finish_onnx(path: Path, about: Mapping[str, Any]) -> None:
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


def _open(path: Path, *, optimized: bool = True) -> Any:
    """Open a file in ONNX Runtime; without optimization, which takes less time, only to inspect it.

    Raises:
        ConfigError: the package is missing.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ConfigError(
            f"{path} needs onnxruntime, which is missing: pip install onnxruntime"
        ) from error
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def onnx_metadata(path: Path) -> dict[str, Any]:
    """The metadata that :func:`finish_onnx` wrote to a file."""
    about = dict(_open(path, optimized=False).get_modelmeta().custom_metadata_map)
    for key, text in about.items():
        with contextlib.suppress(ValueError, RecursionError):  # plain words
            about[key] = json.loads(text)
    return about


def read_onnx(path: Path, outputs: Sequence[str]) -> Callable[..., dict[str, Tensor]]:
    """A file in ONNX Runtime on the CPU; see :class:`lambda_det.export.formats.Runner`."""
    session = _open(path)
    inputs = [tensor.name for tensor in session.get_inputs()]

    def run(*given: Tensor) -> dict[str, Tensor]:
        arrays = [x.cpu().numpy() for x in given]
        values = session.run(None, dict(zip(inputs, arrays, strict=True)))
        return {
            name: torch.from_numpy(np.array(value))
            for name, value in zip(outputs, values, strict=True)
        }

    return run
