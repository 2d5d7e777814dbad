"""Run a training script of Detectron2, unedited, with the backbones of lambda_det.

Our backbones are in Detectron2's registry, our keys in every configuration that the script makes
(``detectron2.config.get_cfg()``), and the data sets shapes_train and shapes_val are registered
unless the script does it, also in the processes that the script starts. MODEL.WEIGHTS may be the
URL of published weights. Everything else is as if Python ran the script.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from lambda_det.errors import command_parser

EXAMPLES = """examples:
  lambda-det run path/to/train_net.py --config-file my.yaml --num-gpus 8 \\
      MODEL.BACKBONE.NAME build_lambda_resnet_fpn_backbone MODEL.BACKBONE.FREEZE_AT 0
  lambda-det run lazyconfig_train_net.py --config-file my.py
  lambda-det run -m package.train --config-file my.yaml
  torchrun --nproc_per_node 8 -m lambda_det.run train.py    (not one that calls launch())
  DETECTRON2_ENV_MODULE=lambda_det.run python train_net.py    (the same)

The backbone uses the keys under MODEL.LAMBDA_RESNET. The other keys of lambda_det (INPUT.LSJ,
SOLVER.ACCUMULATE_GRADIENTS, ...) are accepted, but only lambda_det's own trainer acts on them.
"""


def setup_environment() -> None:
    """Register backbones, shapes and published weights, and add our keys to what ``get_cfg()``
    copies.

    A script that calls ``add_lambda_config`` itself sets the same keys to the same values again.
    """
    from detectron2.config import defaults

    from lambda_det.config import add_lambda_config
    from lambda_det.detection.config import warn_of_idle_keys
    from lambda_det.detection.data.shapes import lend_shapes
    from lambda_det.weights.addresses import register_public_weights

    lend_shapes()
    register_public_weights()
    if "LAMBDA_RESNET" not in defaults._C.MODEL:
        add_lambda_config(defaults._C)
        warn_of_idle_keys()


def main(argv: list[str] | None = None) -> None:
    parser = command_parser("run", __doc__, EXAMPLES)
    parser.usage = "%(prog)s [-h] [-m] SCRIPT [ARGUMENT ...]"
    parser.add_argument("-m", action="store_true", dest="module", help="SCRIPT names a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, with its own arguments")
    words = sys.argv[1:] if argv is None else argv
    end = next((i for i, word in enumerate(words, 1) if not word.startswith("-")), len(words))
    args = parser.parse_args(words[:end])
    if not args.module and not os.path.isfile(args.script):
        parser.error(f"there is no file {args.script}")

    setup_environment()  # of this process, which the variable below would not reach
    # Detectron2 imports the module that it names, and calls its setup_environment(), in every
    # process that imports Detectron2: those that a script spawns inherit it. A user's own module
    # stays, and would have to call ours.
    os.environ["DETECTRON2_ENV_MODULE"] = (
        os.environ.get("DETECTRON2_ENV_MODULE") or "lambda_det.run"
    )

    sys.argv = [args.script, *words[end:]]
    if not sys.flags.safe_path:  # python -P; for lambda-det its own folder is there
        here = os.getcwd() if args.module else os.path.dirname(os.path.realpath(args.script))
        sys.path[0] = here
    if args.module:
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        return
    home = str(Path(__file__).resolve().parents[1])
    if home not in sys.path:  # processes that the script spawns also import lambda_det
        sys.path.append(home)
    runpy.run_path(os.path.abspath(args.script), run_name="__main__")


if __name__ == "__main__":
    main()
