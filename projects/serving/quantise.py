#!/usr/bin/env python
"""Make a detector's .onnx smaller, and print AP and time of the run, the file and the new file.

Weights become 8-bit by channel, and activations by training images of the run, by ONNX Runtime. A
node stays as it is where its operator or module has a --keep word. --half only stores the weights
as 16-bit floats.
"""

import argparse
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.quantization import quantize_static

from lambda_det.detection.data.records import as_input, read_image
from lambda_det.detection.saved_run import open_run
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError, exit_status
from lambda_det.export.exported import ExportedDetector
from lambda_det.export.sources import network_of_run


def fed(detector: ExportedDetector, task: DetectionTask, count: int) -> Iterator[dict]:
    """The inputs of the file from training images."""
    task.register_data()
    loader = task.components.make_test_loader(task.components.train_names[0])
    for record in islice(chain.from_iterable(loader), count):
        image = as_input(read_image(record, detector.channels), detector.resize)["image"]
        images, sizes = detector.fill([image])
        yield {"images": images.numpy(), "sizes": sizes.numpy()}


def halve(graph: onnx.GraphProto) -> None:
    nodes = []
    for held in graph.initializer:
        values, name = numpy_helper.to_array(held), held.name
        if values.dtype == np.float32 and values.size >= 256:
            held.CopyFrom(numpy_helper.from_array(values.astype(np.float16), f"{name}_half"))
            nodes.append(helper.make_node("Cast", [held.name], [name], to=1))
    nodes.extend(graph.node)
    graph.ClearField("node")
    graph.node.extend(nodes)


def is_kept(node: onnx.NodeProto, words: list[str]) -> bool:
    where = [prop.value for prop in node.metadata_props if prop.key.endswith("name_scopes")]
    return any(word in f"{node.op_type} {where}" for word in words)


def quantise(args: argparse.Namespace, inputs: Iterator[dict], kept: list[str]) -> None:
    """Write the 8-bit file, in which the nodes of these names stay as they are."""
    reader = SimpleNamespace(get_next=lambda: next(inputs, None))
    kinds = ["Conv", "Gemm", "MatMul"]
    options = {"op_types_to_quantize": kinds, "nodes_to_exclude": kept, "per_channel": True}
    quantize_static(args.source, args.target, reader, **options)


def run(args: argparse.Namespace) -> None:
    if args.target.exists():
        raise ConfigError(f"{args.target} exists already; give another name.")
    opened = open_run(args.run)
    before, model = ExportedDetector(args.source), onnx.load(args.source)
    if args.half:
        halve(model.graph)
        onnx.save(model, args.target)
    else:
        kept = [node.name for node in model.graph.node if is_kept(node, args.keep)]
        quantise(args, fed(before, DetectionTask(opened.config), args.images), kept)
        smaller = onnx.load(args.target)
        smaller.metadata_props.clear()
        smaller.metadata_props.extend(model.metadata_props)
        onnx.save(smaller, args.target)
    network = network_of_run(opened, proof=args.proof)
    for path, detector in ((args.source, before), (args.target, ExportedDetector(args.target))):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB\n{network.prove(detector)}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("source", type=Path, help=".onnx of its detector")
    parser.add_argument("target", type=Path, help=".onnx to write")
    parser.add_argument("--half", action="store_true", help="see above")
    heads = ["proposal_generator", "roi_heads", "model.head"]
    parser.add_argument("--keep", nargs="*", default=heads, metavar="WORD", help=f"{heads}")
    parser.add_argument("--images", type=int, default=32, metavar="N", help="to calibrate on")
    parser.add_argument("--proof", type=int, default=100, metavar="N", help="to compare AP on")
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
