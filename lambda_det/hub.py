"""``lambda-det push``: a trained detector on the Hugging Face Hub, and its way back by hf://."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cv2
import torch
import yaml

from lambda_det.detection.data.classes import ENTRY
from lambda_det.detection.data.registration import registered_files
from lambda_det.detection.inference import Taken
from lambda_det.detection.lazy import is_lazy_file
from lambda_det.errors import ConfigError, DataError, UserError, command_parser, exit_status, reason
from lambda_det.training.checkpoint_files import PUSHED, choose_checkpoint
from lambda_det.version import __version__
from lambda_det.weights.formats import WRITERS, read_checkpoint
from lambda_det.weights.provenance import initial_weights
from lambda_det.weights.public import fetch, is_public

__all__ = ["main", "of_hub", "write_folder"]

_CONFIG, _CARD, _PICTURE, _ONNX = "config.yaml", "README.md", "picture.jpg", "detector.onnx"
_OURS = {PUSHED, _CONFIG, _CARD, _PICTURE, _ONNX, f"{_ONNX}.json"}
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
# Keys that say where a run was and what was kept, not what was learnt
_NO_RECIPE = ("DATASETS.", "OUTPUT_DIR", "MODEL.DEVICE", "RECIPE.KEEP", "DATALOADER.NUM_WORKERS")
_TEXT = """\
---
license: {license}
library_name: lambda_det
pipeline_tag: {task}
tags: [lambda_det, detectron2]
---
# {name}

A detector with the backbone {network}. It finds {kinds} of {count} classes: {classes}.
{picture}
## Use

    pip install lambda-det    # and Detectron2: see the README of lambda_det

```python
found = lambda_det.Predictor("{url}")("photo.jpg")
found.boxes, found.scores, found.names, found.masks
```

`lambda-det predict --model {url} --input photos/ --output pictures` draws the results.
`MODEL.WEIGHTS {url}` starts a training from these weights.{onnx}
No file here runs a program when it is opened.

## Results

{results}
## Data

{data}
## Recipe

`{base}` with these changes:

{recipe}

## Licence and versions

The licence of these weights is {licence}. The training started from {start}.
These are the {average} weights after {step:,} steps, sent by lambda_det {version} with
PyTorch {torch} and Python {python}.
"""
_SHOWN = """
![a validation image with predictions and ground truth](picture.jpg)

The validation image in the middle of all, ordered by their results. At the left are predictions,
at the right is the ground truth.
"""
_EXAMPLES = """
Write a model card, a picture, weights and configuration to look at; nothing is sent:
  %(prog)s output/mine owner/name --folder card --license cc-by-4.0

Send them, as the account of `hf auth login` or of the token in HF_TOKEN:
  %(prog)s output/mine owner/name --license cc-by-4.0 --private
"""


def of_hub(source: Any) -> Any:
    """Fetch the detector that hf://OWNER/NAME names; anything else is returned as it is.

    Args:
        source: as a Predictor takes it. hf://OWNER/NAME/FILE.onnx is an exported detector.

    Returns:
        The folder with configuration and weights, or the file, on this machine.

    Raises:
        ConfigError: opening what is there could run a program.
        DataError: it cannot be fetched, or is something else.
    """
    if not str(source).startswith("hf://"):
        return source
    owner, name, file = [*str(source).removeprefix("hf://").strip("/").split("/", 2), "", ""][:3]
    if file and not file.endswith(".onnx"):
        raise ConfigError(
            f"{source} is refused: a detector of the Hub is hf://OWNER/NAME or a file that ends in "
            ".onnx; opening others can run a program."
        )
    wanted = [file, f"{file}.json"] if file else [_CONFIG, PUSHED]
    with _connection(f"{source} cannot be fetched", "fetch the files elsewhere and name a folder"):
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(f"{owner}/{name}", allow_patterns=wanted))
    if lacking := [part for part in wanted if not (folder / part).is_file()]:
        raise DataError(f"{source} has no {lacking[0]}, which lambda-det push writes.")
    if not file and is_lazy_file(folder / _CONFIG):
        raise ConfigError(
            f"{source} is a LazyConfig, which names programs to call: look at {folder}, and name "
            "that folder if you trust it."
        )
    return str(folder / file)


@contextlib.contextmanager
def _connection(failed: str, instead: str) -> Iterator[None]:
    """Make a sentence of what huggingface_hub raises, whose advice has many lines."""
    try:
        yield
    except Exception as error:  # it and its HTTP client have errors of many types
        said = reason(error).partition(". ")[0][:200]
        raise DataError(
            f"{failed} ({type(error).__name__}: {said}): look at the name, the connection and the "
            f"account (`hf auth whoami`), or {instead}."
        ) from error


def write_folder(
    run: Path, repository: str, folder: Path, license: str, checkpoint: str, picture: bool
) -> None:
    """Write what is sent: model card, picture, weights, configuration and a detector as ONNX.

    Args:
        run: the folder of a training of a detector.
        repository: OWNER/NAME.
        folder: made if need be. Files of an earlier call are replaced.
        license: an identifier of the Hub.
        checkpoint: as :func:`lambda_det.training.checkpoint_files.choose_checkpoint` takes it.
        picture: whether to show a validation image.

    Raises:
        UserError: one sentence on what cannot be. The folder is as it was.
    """
    if folder.is_dir() and (strange := {path.name for path in folder.iterdir()} - _OURS):
        raise ConfigError(f"{folder} holds {min(strange)}; give a folder that is empty.")
    from lambda_det.report.run_page import read_saved

    saved = read_saved(run)
    if "DATA" in saved or is_lazy_file(run / _CONFIG):
        kind = "classifier" if "DATA" in saved else "LazyConfig"
        raise ConfigError(f"{run} is a run of a {kind}; detectors of YAML can be pushed.")
    if not (file := choose_checkpoint(str(run), checkpoint)):
        raise DataError(f"{run} has no checkpoint to push.")
    content = read_checkpoint(file)
    onnx, taken = _exported(run, file), Taken.of(file, content)
    classes = content.get(ENTRY, {}).get("thing_classes", [])
    card, drawn = _card(run, repository, saved, taken, classes, license, picture, bool(onnx))
    folder.mkdir(parents=True, exist_ok=True)
    for name in _OURS:
        (folder / name).unlink(missing_ok=True)
    kept = {key: content[key] for key in (ENTRY, "iteration") if key in content}
    kept["meta"] = {
        "weights": "ema" if taken.averaged else "raw",
        "input_format": saved["INPUT"]["FORMAT"],
        "pixel_mean": saved["MODEL"]["PIXEL_MEAN"],
        "pixel_std": saved["MODEL"]["PIXEL_STD"],
    }
    state = {name: t.contiguous() for name, t in initial_weights(content)[0].items()}
    with open(folder / PUSHED, "wb") as target:
        WRITERS[".safetensors"]({**kept, "model": state}, target)
    saved["MODEL"]["WEIGHTS"] = f"hf://{repository}"
    (folder / _CONFIG).write_text(yaml.safe_dump(_without_folders(saved)), "utf-8")
    (folder / _CARD).write_text(card, "utf-8")
    if drawn is not None:
        cv2.imwrite(str(folder / _PICTURE), drawn[:, :, ::-1])
    if onnx:
        shutil.copyfile(onnx, folder / _ONNX)
        about = _without_folders(json.loads(Path(f"{onnx}.json").read_text("utf-8")))
        (folder / f"{_ONNX}.json").write_text(json.dumps(about, indent=2), "utf-8")


def _without_folders(value: Any) -> Any:
    """Plain values with names in place of absolute paths, which concern nobody else."""
    if isinstance(value, Mapping):
        return {key: _without_folders(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(part) for part in value]
    is_path = isinstance(value, str) and os.path.isabs(value)
    return Path(value).name if is_path else value


def _exported(run: Path, file: str) -> Path | None:
    """The detector that was exported as ONNX from a checkpoint of the run, if one was."""
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    for onnx in sorted(run.glob("*.onnx")):
        beside = Path(f"{onnx}.json")
        about = json.loads(beside.read_text("utf-8")) if beside.is_file() else {}
        if about.get("sha256") == digest and "scores" in about["outputs"]:
            return onnx
        print(f"{onnx} is left out: it is no detector of {file}.")
    return None


def _card(
    run: Path,
    repository: str,
    saved: Mapping[str, Any],
    taken: Taken,
    classes: list[str],
    license: str,
    shown: bool,
    onnx: bool,
) -> tuple[str, Any]:
    """The text of the model card, and a picture [H, W, 3] of uint8, RGB, or None."""
    from tabulate import tabulate

    # Matplotlib takes a second, and `import lambda_det` imports this module
    from lambda_det.report import run_page
    from lambda_det.report.results import draw_worst

    url, model, picture, data = f"hf://{repository}", saved["MODEL"], None, []
    overall, _ = run_page.results_until(run_page.read_metrics(run), taken.step)
    same = [name for name in overall if ("_EMA/" in name) == taken.averaged] or list(overall)
    results = "".join(f"- {run_page.label_of(name)}: {overall[name]:.1f}\n" for name in same)
    try:
        found = run_page.evaluate_run(run)
        parts = found.task.parts
        for part, names in (("training", parts.train_names), ("validation", parts.test_names)):
            for name in names or ():
                truth = json.loads(Path(registered_files(name)[0]).read_text("utf-8"))
                counts = f"{len(truth['images']):,} images, {len(truth['annotations']):,} objects"
                data.append(f"- {part}: {counts} ({Path(registered_files(name)[0]).name})\n")
        for kind in found.kinds:
            head = ("class", "objects", "box AP" if kind.kind == "bbox" else "mask AP", "AP50")
            rows = [(c.name, c.objects, c.ap, c.ap50) for c in kind.classes]
            results += f"\n{tabulate(rows, head, 'github', floatfmt='.1f')}\n"
        results += f"\nBy class: the {found.weights} at the last evaluation of the training.\n"
        if shown:
            drawn = draw_worst(found.entries, found.dataset, score=0.5, limit=1, start=0.5)
            picture = next((pixels for _, pixels in drawn), None)
    except UserError as error:
        print(f"The card has neither AP by class nor a picture: {error}")
    base, _, changes = run_page.what_was_changed(run, saved)
    rows = [r for r in _without_folders(changes) if not str(r[0]).startswith(_NO_RECIPE)]
    start, network = model["WEIGHTS"], model["BACKBONE"]["NAME"]
    network = model["LAMBDA_RESNET"]["NAME"] if "lambda_resnet" in network else network
    start = fetch(start).describe() if is_public(start) else Path(start).name
    return _TEXT.format(
        license=license,
        licence="not stated" if license == "other" else license,
        task="image-segmentation" if model["MASK_ON"] else "object-detection",
        name=repository.partition("/")[2],
        network=network,
        kinds="boxes and masks" if model["MASK_ON"] else "boxes",
        count=len(classes),
        classes=", ".join(classes),
        picture=_SHOWN if picture is not None else "",
        url=url,
        onnx=f" `{url}/{_ONNX}` is the detector for ONNX Runtime." if onnx else "",
        results=results or "The training was not evaluated.\n",
        data="".join(data) or "They are not known here.\n",
        base=Path(base).name,
        recipe=tabulate(rows, ("key", "before", "here"), "github", disable_numparse=True),
        start=start or "random weights",
        average="averaged" if taken.averaged else "trained",
        step=taken.step or 0,
        version=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
    ), picture


def main(argv: list[str] | None = None) -> int:
    """Do what the words after ``lambda-det push`` say, and return the exit status."""
    parser = command_parser(
        "push",
        "Send a trained detector to the Hugging Face Hub: model card, weights as "
        "safetensors, configuration, and the run's .onnx file if there is one.",
        _EXAMPLES,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a training")
    parser.add_argument("repository", metavar="OWNER/NAME", help="made if it is not there")
    parser.add_argument(
        "--folder", metavar="DIR", type=Path, help="write the files there, and send nothing"
    )
    parser.add_argument("--dry-run", action="store_true", help="the same with --folder RUN/hub")
    parser.add_argument(
        *("--license", "--licence"), default="other", metavar="ID", help="such as apache-2.0"
    )
    parser.add_argument("--private", action="store_true", help="make a repository for you alone")
    parser.add_argument("--no-picture", action="store_true", help="show no validation image")
    parser.add_argument("--checkpoint", default="best", metavar="best|last|STEP", help="of the run")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    return exit_status(lambda: _push(args))


def _push(args: argparse.Namespace) -> None:
    if not _NAME.fullmatch(args.repository):
        raise ConfigError(f"{args.repository} must have the form OWNER/NAME.")
    folder = args.folder or (args.run / "hub" if args.dry_run else None)
    options = (args.license, args.checkpoint, not args.no_picture)
    if folder:
        write_folder(args.run, args.repository, folder, *options)
        print(f"What would be sent is in {folder}; look at {folder / _CARD} first.")
        return
    with tempfile.TemporaryDirectory() as made:
        write_folder(args.run, args.repository, Path(made), *options)
        with _connection(f"{args.repository} was not sent", "write the files with --folder DIR"):
            from huggingface_hub import HfApi

            HfApi().create_repo(args.repository, private=args.private, exist_ok=True)
            sent = HfApi().upload_folder(repo_id=args.repository, folder_path=made)
    print(f"Sent: {sent}")
