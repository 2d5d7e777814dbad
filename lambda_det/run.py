"""Run somebody's training script, unedited, with the backbones of lambda_det at hand.

The script finds the backbones in Detectron2's registry, our keys in every configuration it makes
(``detectron2.config.get_cfg()``), and the data sets shapes_train and shapes_val. All else is as if
Python had been given the script itself: its arguments, its folder on the path, its exit status.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import io
import os
import sys
from types import CodeType
from typing import Any

from lambda_det.errors import UserError

__all__ = ["main", "register"]

EXAMPLES = """examples:
  python -m lambda_det.run path/to/train_net.py --config-file my.yaml --num-gpus 8 \\
      MODEL.BACKBONE.NAME build_lambda_resnet_fpn_backbone MODEL.BACKBONE.FREEZE_AT 0
  python -m lambda_det.run lazyconfig_train_net.py --config-file my.py
  python -m lambda_det.run -m package.train --config-file my.yaml
  torchrun --nproc_per_node 8 -m lambda_det.run train.py   (a script that is made for torchrun)

The backbone heeds the keys under MODEL.LAMBDA_RESNET. The other keys of lambda_det (INPUT.LSJ,
SOLVER.ACCUMULATE_GRADIENTS, ...) are accepted, but only lambda_det's own trainer acts on them.
"""

# Tells the processes that multiprocessing spawns what to run: they import this module anew, and of
# sys.argv they see only what follows the script.
_VARIABLE = "LAMBDA_DET_RUN"
_OURS_ALONE = ("DATALOADER", "DATASETS", "INPUT", "SOLVER")  # sections with keys of our trainer


def register() -> None:
    """Register the backbones and the shapes, and add our keys to Detectron2's defaults.

    The defaults are what ``get_cfg`` copies, by whichever name a project imported it, and what
    projects with defaults of their own start from. A script that calls ``add_lambda_config`` itself
    sets the same keys to the same values once more.
    """
    import detectron2.config.defaults as detectron2_defaults

    import lambda_det.detection.data  # noqa: F401
    from lambda_det.config import add_lambda_config, leaves

    defaults = detectron2_defaults._C
    if "LAMBDA_RESNET" not in defaults.MODEL:
        known = dict(leaves(defaults))
        add_lambda_config(defaults)
        _warn_of_idle_keys({k: v for k, v in leaves(defaults) if k not in known})


def _warn_of_idle_keys(added: dict[str, Any]) -> None:
    """Have a configuration say, when it is frozen, which of its keys nobody will act on."""
    from detectron2.config import CfgNode
    from detectron2.utils import comm

    from lambda_det.config import leaves

    freeze = CfgNode.freeze

    def freeze_and_warn(cfg: CfgNode) -> None:
        freeze(cfg)
        values = dict(leaves(cfg))
        idle = [
            key
            for key, default in added.items()
            if key.startswith(_OURS_ALONE) and values.get(key, default) != default
        ]
        if idle and "lambda_det.detection" not in sys.modules and comm.is_main_process():
            CfgNode.freeze = freeze  # once is enough
            _say(
                f"warning: the configuration sets {', '.join(idle)}, which only lambda_det's own "
                "trainer acts on (tools/train_net.py); this script trains without, unless it reads "
                "them itself."
            )

    CfgNode.freeze = freeze_and_warn


def _say(message: str) -> None:
    print(f"lambda_det.run: {message}", file=sys.stderr, flush=True)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags and the target, and then what belongs to the target, to the letter."""
    parser = argparse.ArgumentParser(
        prog="python -m lambda_det.run",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [-m] SCRIPT [ARGUMENT ...]",
    )
    parser.add_argument("-m", action="store_true", dest="module", help="SCRIPT names a module")
    parser.add_argument("target", metavar="SCRIPT", help="a Python file, with its own arguments")
    end = next((i for i, word in enumerate(argv, 1) if not word.startswith("-")), len(argv))
    return parser.parse_args(argv[:end]), argv[end:]


def _load_script(path: str) -> tuple[CodeType, dict[str, Any]]:
    """The code of a file, and what its namespace starts with.

    Raises:
        UserError: there is no such file, or it is no Python.
        SyntaxError: a Python file with a mistake.
    """
    path = os.path.abspath(path)
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder; name the Python file in it that trains.")
    try:
        with io.open_code(path) as file:
            source = file.read()
    except FileNotFoundError as error:
        raise UserError(f"There is no script {path}.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: zero bytes, in Python 3.10
        if path.endswith(".py"):
            raise
        raise UserError(f"{path} is no Python file; name the training script first.") from error
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    return code, {"__file__": path, "__loader__": loader, "__package__": ""}


def _load_module(name: str) -> tuple[CodeType, dict[str, Any]]:
    """The code of a module, or of the ``__main__`` of a package, and its namespace at the start.

    Raises:
        UserError: there is no such module, or it cannot be run.
    """
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:  # a parent package, or what that one imports
        raise UserError(f"The module {name} cannot be run: {error}.") from error
    if spec is None:
        raise UserError(f"There is no module {name} on the path, which starts at {sys.path[0]}.")
    code = spec.loader.get_code(name) if hasattr(spec.loader, "get_code") else None
    if code is None:
        raise UserError(f"The module {name} holds no Python code that could be run.")
    return code, {"__file__": spec.origin, "__loader__": spec.loader, "__package__": spec.parent}


_LOADERS = {"script": _load_script, "module": _load_module}


def _warn_of_torchrun(code: CodeType) -> None:
    count = os.environ.get("WORLD_SIZE", "1")
    if count != "1" and os.environ.get("RANK") == "0" and "launch" in code.co_names:
        _say(
            f"warning: torchrun has started {count} processes, and the script calls launch(). If "
            f"that is Detectron2's, it connects none of them: {count} trainings would write into "
            f"one folder. Then start without torchrun, and give the script --num-gpus {count}."
        )


def _prepare_path(script: str) -> None:
    """Put the script's folder where ``python -m`` has put the working folder."""
    if getattr(sys.flags, "safe_path", False):  # python -P, from Python 3.11 on
        return
    working_folder, sys.path[0] = sys.path[0], os.path.dirname(os.path.realpath(script))
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.abspath(working_folder) == home and home not in sys.path:
        sys.path.append(home)  # lambda_det is not installed, and spawned processes import it, too


class _Spec(importlib.machinery.ModuleSpec):
    """Names what multiprocessing imports in a new process; relative imports are the script's."""

    parent = ""


def _execute(namespace: dict[str, Any], code: CodeType, start: dict[str, Any]) -> None:
    """Run code in the namespace of the main module, which first becomes that of a script."""
    spec = _Spec(namespace["__spec__"].name, None)
    spec.parent = start["__package__"]
    start |= {"__name__": namespace["__name__"], "__spec__": spec}
    namespace.clear()
    namespace.update(start, __doc__=None, __cached__=None)
    exec(code, namespace)


def main(namespace: dict[str, Any]) -> None:
    """Do what the command line says, or in a spawned process what its parent does.

    Args:
        namespace: of the main module, which is called ``__main__`` or, in a process that
            multiprocessing has spawned, ``__mp_main__``. The script runs in it, so that functions
            and classes that it passes to other processes are found there.
    """
    if namespace["__name__"] == "__mp_main__":
        register()
        kind, _, target = os.environ[_VARIABLE].partition(":")
        code, start = _LOADERS[kind](target)
        # The __main__ of a package does without a guard: multiprocessing never imports it anew
        if not (kind == "module" and start["__file__"].endswith("__main__.py")):
            sys.argv[0] = start["__file__"]
            _execute(namespace, code, start)
        return

    if namespace["__spec__"] is None:
        sys.exit("error: start it as python -m lambda_det.run")
    args, rest = _parse(sys.argv[1:])
    kind = "module" if args.module else "script"
    try:
        if kind == "script":
            _prepare_path(args.target)
        register()
        code, start = _LOADERS[kind](args.target)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    _warn_of_torchrun(code)
    file = start["__file__"]
    os.environ[_VARIABLE] = f"{kind}:{args.target if args.module else file}"
    sys.argv[:] = [file if args.module else args.target, *rest]
    _execute(namespace, code, start)


if __name__ in ("__main__", "__mp_main__"):
    # The module of that name, and not this one: this one's names give way to the script's.
    from lambda_det.run import main as run

    run(globals())
