"""ONNX: a graph of torch.onnx, and around that of a detector what an image needs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambda_det.errors import ConfigError

__all__ = [
    "OPSET",
    "Runner",
    "finish_onnx",
    "missing_packages",
    "onnx_metadata",
    "openvino_metadata",
    "read_onnx",
    "read_openvino",
    "read_session",
    "write_onnx",
]

Runner = Callable[..., dict[str, Tensor]]  # from the inputs of a file to its outputs by name
OPSET = 18  # the one that torch.onnx writes without converting versions
AXES = ("batch", "height", "width")  # of a graph's input; of an FPN's, over its largest stride
NEEDED = ("onnx", "onnxscript", "onnxruntime")

# Resized as Detectron2's ResizeShortestEdge does. Resize is Pillow's algorithm for uint8 in
# ONNX Runtime, to a rounding, and at the border by exclude_outside. OpenVINO 2026.4 divides a
# constant by a number that it computes the wrong way round, so no dividend here is one.
BEFORE = """
<ir_version: 9, opset_import: ["" : 18]>
before (uint8[image_height, image_width, 3] image) =>
    (float[3, height, width] images, float[2] image_sides, float[2] image_scale)
<float shortest = {{{shortest}}}, float longest = {{{longest}}}, float one = {{1}},
 float half = {{0.5}}, int64[3] order = {{{order}}}, int64[1] first = {{0}}>
{{
    of_run = Gather<axis = 2>(image, order)
    planes = Transpose<perm = [2, 0, 1]>(of_run)
    batch = Unsqueeze(planes, first)
    size = Shape<end = 2>(image)
    image_sides = Cast<to = 1>(size)
    shorter = ReduceMin<keepdims = 0>(image_sides)
    longer = ReduceMax<keepdims = 0>(image_sides)
    wished = Div(shorter, {wanted})
    most = Div(longer, longest)
    shrink = Max(wished, most)
    scaled = Div(image_sides, shrink)
    above = Add(scaled, half)
    whole = Floor(above)
    new_sides = Max(whole, one)
    new_size = Cast<to = 7>(new_sides)
    resized = Resize<axes = [2, 3], mode = "linear", antialias = 1, exclude_outside = 1>
        (batch, , , new_size)
    pixels = Cast<to = 1>(resized)
    images = Squeeze(pixels, first)
    image_scale = Div(image_sides, new_sides)
}}
"""
# To pixels of the image, and not a rounding error beyond it
AFTER = """
<ir_version: 9, opset_import: ["" : 18]>
after (float[found, 4] found_boxes, float[2] image_sides, float[2] image_scale) =>
    (float[found, 4] boxes)
<int64[4] xyxy = {{1, 0, 1, 0}}>
{{
    factor = Gather(image_scale, xyxy)
    in_image = Mul(found_boxes, factor)
    border = Gather(image_sides, xyxy)
    boxes = Min(in_image, {border})
}}
"""


def missing_packages() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def write_onnx(
    program: torch.export.ExportedProgram, inputs: Sequence[str], names: Sequence[str], path: Path
) -> None:
    """Write a program, whose inputs and outputs get names."""
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.core import aten_sort
    from onnxscript.function_libs.torch_lib.ops.nn import aten_avg_pool2d

    def at_most(a: Any, b: Any) -> Any:
        # Sizes that depend on the image have bounds above int64's, which torch.export asserts
        return opset18.LessOrEqual(a, min(b, 2**63 - 1) if isinstance(b, int) else b)

    def sort(x: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
        return aten_sort(x, dim, descending)  # by TopK, which is stable

    def average(x: Any, *sides: Any) -> Any:
        padding = x.producer()
        if sides[-1:] != (4,) or padding is None or padding.op_type != "Pad":
            return aten_avg_pool2d(x, *sides)
        # Of PortableAvgPool2d. A border that does not count gives the same in less time
        sides = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 1, 1]}
        return opset18.AveragePool(padding.inputs[0], **sides, count_include_pad=0)

    translations = {
        operator.le: at_most,
        torch.ops.aten.sort.stable: sort,
        torch.ops.aten.avg_pool2d.default: average,
    }
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it warns of every empty list
    torch.onnx.export(
        program,
        f=str(path),
        dynamo=True,
        opset_version=OPSET,
        input_names=list(inputs),
        output_names=list(names),
        external_data=False,
        verbose=False,
        custom_translation_table=translations,
    )


def finish_onnx(path: Path, described: Mapping[str, Any]) -> None:
    """Name the sizes in a file, and put what is known of it into its metadata.

    Where a detector resizes, its input becomes an image [H, W, 3] of uint8, RGB, of any size, which
    is resized as in the evaluation of the run, and its output has pixels of that image.
    """
    import onnx

    model = onnx.load(path)
    sizes = [dim.dim_param for dim in model.graph.input[0].type.tensor_type.shape.dim]
    found = [symbol[0] for size in sizes if (symbol := re.search(r"[a-z]\w*", size))]  # of "32*s77"
    words = dict(zip(found, AXES[len(found) == 2 :], strict=False))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            for symbol, word in words.items():
                if dim.dim_param:  # to set it removes a number
                    dim.dim_param = re.sub(rf"\b{symbol}\b", word, dim.dim_param)
    if described.get("resizes"):
        _take_images(model.graph, described)
    if model.graph.input[0].name == "image":
        for output in model.graph.output:
            output.type.tensor_type.shape.dim[0].dim_param = "found"
    if described.get("pasted"):
        _paste(model.graph, described)
    onnx.helper.set_model_props(
        model, {k: v if isinstance(v, str) else json.dumps(v) for k, v in described.items()}
    )
    onnx.checker.check_model(model)
    onnx.save(model, path)


def _take_images(graph: Any, described: Mapping[str, Any]) -> None:
    """Put ``BEFORE`` and ``AFTER`` around the graph of a detector."""
    from onnx import parser

    shortest = described.get("min_size_test", 0)
    text = BEFORE.format(
        shortest=shortest,
        longest=described.get("max_size_test", 0) or 2**31,
        wanted="shortest" if shortest else "shorter",
        order="0, 1, 2" if described.get("input_format") == "RGB" else "2, 1, 0",
    )
    # An NMS to come wants all of a box
    border = "in_image" if "nms" in described.get("outside", ()) else "border"
    texts = (text, AFTER.format(border=border))
    before, after = (_own(parser.parse_model(part).graph) for part in texts)
    nodes = [*before.node, *graph.node, *after.node]
    graph.ClearField("node")
    graph.node.extend(nodes)
    graph.input[0].CopyFrom(before.input[0])
    graph.output[0].CopyFrom(after.output[0])
    graph.initializer.extend([*before.initializer, *after.initializer])


def _paste(graph: Any, described: Mapping[str, Any]) -> None:
    """Put after the graph of a detector what makes masks of the image out of those in their boxes.

    They are bilinear and 0 beyond the box, as Detectron2 has them; a box of no size has an empty
    mask. Pixels and cells are counted from their middle.
    """
    from onnx import TensorProto, helper
    from onnxscript import opset18 as op
    from onnxscript import script

    start = ("batch" in described) + ("normalise" in described["outside"])
    end = start + 2

    @script()
    def paste(image, boxes, found_masks):
        cells = op.Cast(op.Shape(found_masks, start=-1), to=1)
        row = op.Range(0.5, op.Squeeze(cells), 1.0)
        sides = op.Cast(op.Shape(image, start=start, end=end), to=1)
        height, width = op.Split(sides, num_outputs=2)
        x0, y0, x1, y1 = op.Split(op.Unsqueeze(boxes, [-1]), axis=-2, num_outputs=4)
        y = (op.Unsqueeze(op.Range(0.5, op.Squeeze(height), 1.0), [-1]) - y0) * cells
        x = (op.Range(0.5, op.Squeeze(width), 1.0) - x0) * cells
        by_y = op.Relu(1.0 - op.Abs(y / op.Max(y1 - y0, 1e-6) - row))
        by_x = op.Relu(1.0 - op.Abs(x / op.Max(x1 - x0, 1e-6) - op.Unsqueeze(row, [-1])))
        masks = op.MatMul(op.MatMul(by_y, op.Squeeze(found_masks, [-3])), by_x) >= 0.5
        return masks

    ends = (graph.input[0], graph.output[0])  # image and boxes
    image, boxes = (
        [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in ends
    )
    after = _own(paste.to_model_proto().graph)
    for node in after.node:
        node.input[:] = [ends[0].name if name == "image" else name for name in node.input]
    graph.node.extend(after.node)
    (masks,) = (output for output in graph.output if output.name == "found_masks")
    sizes = [*boxes[:-1], *image[start:end]]
    masks.CopyFrom(helper.make_tensor_value_info("masks", TensorProto.BOOL, sizes))


def _own(graph: Any) -> Any:
    """A graph whose names, but for those of its ends, are like no others."""
    from onnx import compose

    name = f"{graph.name}/"
    return compose.add_prefix_graph(graph, name, rename_inputs=False, rename_outputs=False)


def _package(name: str) -> Any:
    """Import a runtime.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"The file needs {name}, which is missing: pip install {name}") from error


def read_session(path: Path, optimized: bool = True) -> Any:
    """A file in ONNX Runtime; not optimized to look at it alone, which is sooner done.

    Raises:
        ConfigError: the package is missing.
    """
    runtime = _package("onnxruntime")
    options = runtime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def onnx_metadata(path: Path) -> dict[str, Any]:
    """What :func:`finish_onnx` put into a file."""
    return _values(read_session(path, optimized=False).get_modelmeta().custom_metadata_map)


def openvino_metadata(path: Path) -> dict[str, Any]:
    """The same in what OpenVINO made of it."""
    kept = _package("openvino").Core().read_model(path).get_rt_info(["framework"])
    return _values(
        {key: getattr(value, "value", value) for key, value in getattr(kept, "value", kept).items()}
    )


def _values(texts: Mapping[str, str]) -> dict[str, Any]:
    values = dict(texts)
    for key, text in texts.items():
        with contextlib.suppress(ValueError):  # plain words
            values[key] = json.loads(text)
    return values


def read_openvino(path: Path, names: list[str], device: torch.device) -> Runner:
    """A file in OpenVINO, in float32; see :class:`lambda_det.export.formats.Format`."""
    core = _package("openvino").Core()
    compiled = core.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return _runner(lambda x: list(compiled(x).values()), names)


def read_onnx(path: Path, names: list[str], device: torch.device) -> Runner:
    """A file in ONNX Runtime; see :class:`lambda_det.export.formats.Format`."""
    session = read_session(path)
    inputs = [given.name for given in session.get_inputs()]
    return _runner(lambda x: session.run(None, dict(zip(inputs, x, strict=True))), names)


def _runner(call: Callable[[list[np.ndarray]], list], names: list[str]) -> Runner:
    """Arrays to arrays as a function of tensors."""

    def run(*given: Tensor) -> dict[str, Tensor]:
        found = zip(names, call([x.cpu().numpy() for x in given]), strict=True)
        return {name: torch.from_numpy(np.array(y)) for name, y in found}

    return run
