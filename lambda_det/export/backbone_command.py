"""``lambda-det backbone``: a verified backbone file for detectors from a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from lambda_det.detection.command_line import add_checkpoint_flags
from lambda_det.errors import ConfigError, command_parser, exit_status
from lambda_det.files import refuse_existing, refuse_missing

EXAMPLES = """examples:
  %(prog)s output/imagenet/model_best.pth output/backbone.pth
      the averaged weights of a classifier, for detectors with Detectron2's default pixel settings
  %(prog)s output/mask_rcnn output/backbone.safetensors
      the backbone of a detector, from the best checkpoint of its run
  %(prog)s timm://resnetrs101.tf_in1k output/resnetrs101.pth
      published weights; the pixel settings are folded as for a classifier of ours
  %(prog)s output/backbone.pth output/backbone.safetensors
      a backbone file in another format

formats of OUTPUT, each with the same tensors, pixel settings and checksum:
  .pth          a file of torch.save; Detectron2's own checkpointer loads it
  .safetensors  cannot hold code; Detectron2's own checkpointer does not read it

OUTPUT is written only if its features, loaded again, are those of the checkpoint.

exit status: 0; 1 if the file failed the verification and was removed; 2 if it could not be made
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser(
        "backbone", "Make a verified backbone file for detectors from a checkpoint.", EXAMPLES
    )
    add = parser.add_argument
    text = """a checkpoint of a classifier or a detector; the folder of a run, for its best one; a
        file of timm or torchvision; or published weights: lambda://NAME, timm://NAME,
        torchvision://ENUM.MEMBER or hf://OWNER/REPOSITORY/FILE"""
    add("source", metavar="RUN", help=text)
    add("output", type=Path, help="the backbone file: .pth or .safetensors")
    add_checkpoint_flags(parser)
    text = "the network, where the file does not name it, as none of timm and torchvision does"
    add("--model", metavar="NAME", help=text)
    add("--overwrite", action="store_true", help="replace OUTPUT if the new file passes")
    return parser.parse_args(argv)


def export(args: argparse.Namespace) -> int:
    refuse_missing(args.source)
    from lambda_det.detection.saved_run import with_network
    from lambda_det.export.backbone import export_backbone, extract_backbone, read_source
    from lambda_det.export.session import passes
    from lambda_det.training.run_folder import find_checkpoint
    from lambda_det.weights.formats import WRITERS
    from lambda_det.weights.provenance import wanted_pixels
    from lambda_det.weights.public import is_public

    path = args.source
    if not is_public(path):
        path = find_checkpoint(path, args.checkpoint)
    if args.output.resolve() == Path(path).resolve():
        raise ConfigError(f"{args.output} is the checkpoint itself; give OUTPUT another name.")
    if args.output.suffix not in WRITERS:
        raise ConfigError(f"{args.output} must end in one of {', '.join(WRITERS)}.")
    refuse_existing(args.output, args.overwrite)
    checkpoint = with_network(read_source(path, args.model), path)
    content = extract_backbone(checkpoint, raw=args.raw, model=args.model, source=path)
    errors = export_backbone(content, args.output, checkpoint)
    print(f"checkpoint: {path}")
    for key, value in content["meta"].items():
        if key != "recipe":
            print(f"{key}: {value}")
    print(f"pixel settings: {wanted_pixels(content) or 'not recorded'}")
    passed = passes(errors)
    print(f"{'verified' if passed else 'FAILED'}: largest relative error of the features:")
    for name, error in errors.items():
        print(f"  {name}: {error:.1e}")
    print(f"{args.output} was {'' if passed else 'not '}written")
    return 0 if passed else 1


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return exit_status(lambda: export(args))
