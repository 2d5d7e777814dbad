"""``lambda-det backbone``: a verified backbone file for detectors from a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lambda_det.detection.saved_run import add_checkpoint_flags, with_network
from lambda_det.errors import ConfigError, command_parser, exit_status
from lambda_det.export.backbone import extract_backbone, in_half
from lambda_det.export.public import read_source
from lambda_det.export.verify import export_backbone, passes
from lambda_det.training.checkpoint_files import find_checkpoint
from lambda_det.weights.backbone_file import check_target
from lambda_det.weights.provenance import format_options, wanted_pixels
from lambda_det.weights.public import is_public

EXAMPLES = """examples:
  %(prog)s output/imagenet/model_best.pth output/backbone.pth
      the averaged weights of a classifier, for detectors with Detectron2's default pixel settings
  %(prog)s output/mask_rcnn output/backbone.safetensors
      the backbone of a detector, from the best checkpoint of its run
  %(prog)s timm://resnetrs101.tf_in1k output/resnetrs101.pth
      published weights; the pixel settings are folded as for a classifier of ours
  %(prog)s output/backbone.pth output/backbone.pkl
      a backbone file in another format

formats of OUTPUT, each with the same tensors, pixel settings and checksum:
  .pth          a file of torch.save; Detectron2's own checkpointer loads it
  .pkl          arrays, as in Detectron2's model zoo; Detectron2's own checkpointer loads it
  .safetensors  cannot hold code; Detectron2's own checkpointer does not read it
lambda_det.create_backbone(NAME, weights=OUTPUT) and MODEL.WEIGHTS OUTPUT of a training load all
of them.

The file is written under a temporary name, loaded again, and its features are compared with those
of the checkpoint. It is renamed to OUTPUT only if they agree; with --overwrite, an existing OUTPUT
stays until then.

exit status: 0; 1 if the file failed the verification and was removed; 2 if it could not be made
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(
        "backbone", "Make a verified backbone file for detectors from a checkpoint.", EXAMPLES
    )
    parser.add_argument(
        "source",
        metavar="RUN",
        help="a checkpoint of a classifier or a detector; the folder of a run, for its best one; a "
        "file of timm or torchvision; or published weights: lambda://NAME, timm://NAME, "
        "torchvision://ENUM.MEMBER or hf://OWNER/REPOSITORY/FILE",
    )
    parser.add_argument("output", help="the backbone file: .pth, .pkl or .safetensors")
    add_checkpoint_flags(parser)
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="the network, where the file does not name it, as none of timm and torchvision does",
    )
    parser.add_argument(
        "--no-fold",
        action="store_true",
        help="do not fold the input normalisation of a classifier into its first convolution",
    )
    parser.add_argument(
        "--half",
        action="store_true",
        help="kernels and embeddings in float16; models that load them are in float32",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace OUTPUT if it exists and the new file passes",
    )
    return parser.parse_args(argv)


def export(args: argparse.Namespace) -> int:
    path = args.source
    if not is_public(path):
        path = find_checkpoint(path, args.checkpoint)
    if Path(args.output).resolve() == Path(path).resolve():
        raise ConfigError(f"{args.output} is the checkpoint itself; give OUTPUT another name.")
    check_target(args.output, overwrite=args.overwrite)
    checkpoint = with_network(read_source(path, args.model), path)
    content = extract_backbone(
        checkpoint,
        weights="model" if args.raw else None,
        fold_input=not args.no_fold,
        model=args.model,
        source=path,
    )
    content = in_half(content) if args.half else content
    errors = export_backbone(content, args.output, checkpoint, overwrite=args.overwrite)
    print(f"checkpoint: {path}\n{content_table(content, args.output)}")
    passed = passes(content, errors)
    print(f"{'verified' if passed else 'FAILED'}: largest relative error of the features:")
    for name, error in errors.items():
        print(f"  {name}: {error:.1e}")
    if not passed:
        print(f"{args.output} was not written")
    return 0 if passed else 1


def content_table(content: Mapping[str, Any], path: str) -> str:
    """The content of a backbone file as a table of text."""
    meta, tensors = content["meta"], content["model"].values()
    accuracy = (
        f"{part} " + ", ".join(f"{name} {value:.2f}" for name, value in values.items())
        for part, values in meta["accuracy"].items()
    )
    pixels = "not recorded; use those of the configuration it was trained with"
    if settings := wanted_pixels(content):
        pixels = f"{settings} (input normalisation folded)" if meta["folded"] else str(settings)
    step = f", after {meta['step']:,} steps" if meta.get("step") else ""
    network = f"{meta['model']}{format_options(meta['options'])}"
    positions = f"0 where images of {meta.get('trained_at')} pixels have none"
    rows = {
        "file": path,
        "model": f"{network}, by its {meta['known_from']}",
        "stages": ", ".join(meta["stages"]),
        "source": f"{meta.get('source')}, licence {meta.get('license') or 'not stated'}",
        "weights": ("averaged (EMA)" if meta["weights"] == "ema" else "raw") + step,
        "accuracy": "; ".join(accuracy) or "not recorded in the checkpoint",
        "statistics": meta["statistics"] or "not recorded in the checkpoint",
        "tensors": f"{len(tensors)} of {sum(t.numel() for t in tensors) / 1e6:.2f} M values",
        "offsets": positions if meta.get("unseen") else "as they are in the checkpoint",
        "sha256": meta["sha256"],
        "pixels": pixels,
    }
    if meta.get("source") is None:
        del rows["source"]
    return "\n".join(f"{name + ':':<12}{value}" for name, value in rows.items())


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status(lambda: export(args))
