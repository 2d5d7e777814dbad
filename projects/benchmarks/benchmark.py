#!/usr/bin/env python
"""Measure what this machine does with parts of lambda_det, beside what there is elsewhere."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

EXAMPLES = """Everything a preset can be told: projects/benchmarks/benchmark.py --preset NAME --help

examples:
  projects/benchmarks/benchmark.py --preset layer --small
  projects/benchmarks/benchmark.py --preset networks --device cuda --dtype bfloat16 --json n.json
  projects/benchmarks/benchmark.py --preset size --plot size.png
"""

# What each preset compares
PRESETS = {
    "local": """The implementations of the local position output, compared with each other.

Without the projections and norms of the layer: queries, values and embedding are the inputs, of the
dtype that is asked for. Ratios are to the first implementation. That of the matrix product at the
end, of as many multiply-adds as the sum needs, is the share of the matrix rate that it reaches.""",
    "layer": """The whole lambda layer, with projections and norms, against the 3x3 convolution.

The sizes are those of LambdaResNet at 1024x1024: c4 with 256 channels, the first block of c5 with
512 channels before its pooling, and c5; |k|=16, |h|=4, |m|=23x23. Other people's layers, with
--peer, have the same sizes.""",
    "attention": """Lambda layers against global, axial and local self-attention: Table 4.

A ResNet-50 whose 3x3 convolutions are all replaced. The paper's memory is that of attention maps or
position embeddings alone, for 128 images; here it is what a run takes in all. Heads of attention
are 8, with which the paper's figures come out, but for axial self-attention: 4.3 GB beside 4.8.
The rows of self-attention need PYTHONPATH=projects/paper and
DETECTRON2_ENV_MODULE=lambda_paper.attention in the environment.""",
    "placement": """Where lambda layers stand in a ResNet, and how many: Tables 12 and 13.

Classifiers of 1000 classes in inference and in a training step, without and with
squeeze-and-excitation; ratios are to the network without lambda layers. (Tables 13 and 14 on
arXiv.)""",
    "networks": """LambdaResNet against ResNet-RS of the same depth as backbones, at 1024x1024.

Features of res2 to res5 without a detector's heads; a training step is forward, backward and SGD.
Ratios are to ResNet-RS without squeeze-and-excitation.""",
    "detector": """Whole Mask R-CNNs against Detectron2's own with a ResNet-FPN, at 1024x1024.

Both have the heads of the paper's training, and random weights. Detectron2's is built and run as
its train_net.py does, in float32. LambdaResNet's is in our default settings, whose precision
depends on the device, in float32, and in float32 with contiguous maps. A training step is forward,
backward and SGD; inference ends with the masks of 100 objects.""",
    "convert": """What convert_lambda_layers brings for timm's three lambda ResNets, at 1024x1024.

Whole classifiers with random weights: timm's own layers, and the same network with ours in their
places. Inference, and a training step of forward, backward and SGD. Ratios are to timm's.
lambda_resnet26rpt_256 is made for images of that size here, as its embeddings span the whole map;
timm's memory for them grows with the square of the positions.""",
    "families": """LambdaResNets, ResNet-RS, EfficientNets, ViT-L/16: Figure 4, Tables 5 and 18.

Inference and training steps, each at the size of its own images, beside the accuracy that the
papers print (ours is not measured here; most points of ResNet-RS are not printed). As in the paper,
a batch of 1024 images is halved until it fits, and times are given for 1024 images, beside Table
18. EfficientNets and ViT are timm's, without weights. The plot has time per image against accuracy.
On the CPU the batch is 4.""",
    "hybrid": """LambdaResNet-420 at 320x320, and the same with self-attention: Appendix E.2.

Global self-attention, 8 heads, in the places of the lambda layers. The paper's memory is that of
position embeddings or attention maps alone, which is counted below the table, for Table 4, too;
here peak memory is what a run takes in all. The row of self-attention needs
PYTHONPATH=projects/paper and DETECTRON2_ENV_MODULE=lambda_paper.attention in the environment.""",
    "size": """Cost against the size of the images: a layer, a network, and its memory.

The layer stands in c4, so its map has a sixteenth of the image's side, and 256 channels. Forward
and backward, batch 1. The memory by stage is what the forward pass keeps for the backward pass, of
one image.""",
    "data": """How many training images one core decodes and augments in a second.

Classification: beside timm and torchvision. All start from the bytes of JPEG files in memory and
end with an image of 224x224; the ratios are to plain Pillow decoding. Detection: from a file and
its polygons to 1024x1024 with the paper's jitter of 0.1 to 2.0; the ratios are to Detectron2's own
mapper with the same augmentations, which draws the same numbers. All take turns, so that a machine
that slows down slows all of them. One process, one thread; only its own processor time counts, not
its waiting for others.""",
}
DEFAULT = "local"
BATCHES = {
    "layer": "1",
    "attention": "128 on a GPU, 8 on the CPU; --small: 1",
    "placement": "64 on a GPU, 8 on the CPU; --small: 1",
    "networks": "1",
    "detector": "1",
    "convert": "1",
    "families": "1024 on a GPU, 4 on the CPU; --small: 1",
    "hybrid": "32 on a GPU, 1 on the CPU",
}
IMAGE_SIZES = {
    "attention": "224; --small: 160",
    "placement": "the paper's, 224 or 256; --small: 128",
    "networks": "1024; --small: 512",
    "detector": "1024; --small: 256",
    "convert": "1024; --small: 256",
    "hybrid": "320; --small: LambdaResNet-50 at 160",
}
ALL_OR_FASTEST = "all of the device; --small: without the slowest"
IMPLEMENTATIONS = {
    "local": ALL_OR_FASTEST,
    "layer": ALL_OR_FASTEST,
    "networks": "auto",
    "size": "auto",
}
PEERS = ("lambda-networks", "timm")


def add_options(parser: argparse.ArgumentParser, preset: str) -> None:
    add = parser.add_argument
    add("--runs", type=int, help="rounds that are counted (5; --small: 3)")
    add("--json", metavar="FILE", help="write all figures to a new file")
    add("--small", action="store_true", help="a form for two cores and two minutes")
    if preset == "data":
        text = "take 64 images, spread evenly over a folder, instead of making some"
        add("--images", metavar="FOLDER", help=text)
        text = "in COCO's format, of 64 images of --images, for the pipelines of detection"
        add("--annotations", metavar="FILE.json", help=text)
        return
    add("--plot", metavar="FILE.png", help="draw the figures to a new file")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    if preset != "detector":
        text = "of the products, those other than float32 by autocast (float32)"
        add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help=text)
    text = "of tensors on the CPU, beyond which a case is out of memory (what is available)"
    add("--memory-limit", type=float, metavar="GB", help=text)
    if preset not in ("local", "detector"):
        text = "weights and maps in that memory format"
        add("--channels-last", action="store_true", help=text)
    if preset in BATCHES:
        text = f"images at a time ({BATCHES[preset]})"
        add("--batch", type=int, metavar="N", help=text)
    if preset in IMAGE_SIZES:
        text = f"side of the images ({IMAGE_SIZES[preset]})"
        add("--image-size", type=int, metavar="SIDE", help=text)
    if preset in IMPLEMENTATIONS:
        text = f"auto or names of docs/layer.md ({IMPLEMENTATIONS[preset]})"
        add("--implementations", nargs="+", metavar="NAME", help=text)
    if preset == "size":
        text = "of layers and networks (256 to 2048; --small: networks 256 and 384)"
        add("--image-sizes", nargs="+", type=int, metavar="SIDE", help=text)
    if preset == "layer":
        text = f"also measure the layer of these packages, where installed: {', '.join(PEERS)}"
        add("--peer", nargs="+", choices=PEERS, default=[], metavar="NAME", help=text)
    if preset == "networks":
        text = "also a LambdaResNet that keeps only each block's input for the backward pass"
        add("--checkpoint-activations", action="store_true", help=text)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as our other tools do, and not how to use it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {self.prog}: {message}.\n")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of the one preset that is asked for, and ``preset`` itself.

    An option of another preset is refused, so that nobody believes that it was followed.
    """
    formatting = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    summaries = "\n".join(f"  {name:10} {_summary(name)}" for name in PRESETS)
    epilog = f"presets:\n{summaries}\n\n{EXAMPLES}"
    first = Parser("benchmark.py", description=__doc__, epilog=epilog, add_help=False, **formatting)
    first.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"({DEFAULT})")
    asked, rest = first.parse_known_args(argv)
    if asked.preset is None and {"-h", "--help"} & set(rest):
        first.add_argument("-h", "--help", action="help", help="show this and end")
        first.print_help()
        raise SystemExit(0)
    name = asked.preset or DEFAULT
    parsers = {}
    for preset, text in PRESETS.items():
        parsers[preset] = Parser(f"benchmark.py --preset {preset}", description=text, **formatting)
        add_options(parsers[preset], preset)
    args, unknown = parsers[name].parse_known_args(rest)
    for option in unknown:
        flag = option.partition("=")[0]
        owners = [preset for preset in PRESETS if flag in parsers[preset]._option_string_actions]
        parsers[name].error(
            f"{flag} is an option of {', '.join(owners)}"
            if owners
            else f"there is no {option!r}; --help lists the options"
        )
    args.preset = name
    return args


def _summary(name: str) -> str:
    return PRESETS[name].partition("\n")[0]


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    # The profiler counts allocations here; its notes about missing devices are of no use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    from lambda_benchmarks.session import run
    from lambda_det.errors import exit_status

    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
