"""``lambda-det push``: a trained detector on the Hugging Face Hub, and its way back by hf://."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from lambda_det.detection.data.classes import ENTRY
from lambda_det.detection.saved_run import SavedRun, open_run
from lambda_det.errors import ConfigError, DataError, printable, refused
from lambda_det.training.config_file import ConfigFile
from lambda_det.training.run_folder import PUSHED, RunFolder
from lambda_det.weights.formats import WRITERS
from lambda_det.weights.provenance import RUN, initial_weights
from lambda_det.weights.public import fetch, is_public

_CONFIG, _CARD = "config.yaml", "README.md"
_OURS = {PUSHED, _CONFIG, _CARD}
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
# The library and its HTTP client raise errors of many types
_ADVICE = "look at the name, the connection and the account (`hf auth whoami`)"
_TEXT = """\
# {name}

`lambda_det.Predictor("{url}")` finds {classes}.

- weights: {average}, step {step}; {results}
- trained from: {start}
"""


def of_hub(source: str) -> str:
    """Fetch a detector.

    Args:
        source: hf://OWNER/NAME.

    Returns:
        The local folder with the weights, which record their network.

    Raises:
        ConfigError: opening the files could run a program.
        DataError: it cannot be fetched, or is something else.
    """
    name = source.removeprefix("hf://").strip("/")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{source} is refused: a detector of the Hub is hf://OWNER/NAME.")
    with refused(DataError, f"{source} cannot be fetched", _ADVICE, Exception):
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, allow_patterns=[PUSHED]))
    if not (folder / PUSHED).is_file():
        raise DataError(f"{source} has no {PUSHED}, which lambda-det push writes.")
    beside = folder / _CONFIG  # another program may have fetched it
    if beside.is_file() and ConfigFile(beside).is_lazy:
        raise ConfigError(
            f"{source} is a LazyConfig, which names programs to call: look at {folder}, and name "
            "that folder if you trust it."
        )
    return str(folder)


def write_folder(run: Path, repository: str, folder: Path, license: str, checkpoint: str) -> None:
    """Write the files to send: model card, weights and configuration.

    Args:
        run: the folder of a training of a detector.
        repository: OWNER/NAME.
        folder: is made if necessary. Files of an earlier call are replaced.
        license: an identifier of the Hub.
        checkpoint: as :meth:`lambda_det.training.run_folder.RunFolder.choose` takes it.

    Raises:
        UserError: one sentence on what cannot work. The folder stays as it was.
    """
    # Matplotlib takes a second, and `import lambda_det` imports this module
    from lambda_det.own_data.report.reading import by_label, results_of

    if folder.is_dir() and (strange := {path.name for path in folder.iterdir()} - _OURS):
        raise ConfigError(f"{folder} holds {min(strange)}; give a folder that is empty.")
    opened = open_run(run, checkpoint)
    origin, content = opened.origin, opened.content
    if isinstance(opened.config, DictConfig):
        raise ConfigError(f"{run} is a run of a LazyConfig; detectors of YAML can be pushed.")
    results = results_of(RunFolder(run).metrics(), origin.averaged, origin.step)
    card = _card(repository, opened, by_label(results), license)
    folder.mkdir(parents=True, exist_ok=True)
    config = _without_folders(opened.config)
    config["MODEL"]["WEIGHTS"] = f"hf://{repository}"
    kept = {key: content[key] for key in (ENTRY, "iteration") if key in content}
    kept[RUN] = {**content.get(RUN, {}), "config": yaml.safe_dump(config)}
    kept["meta"] = {"weights": "ema" if origin.averaged else "raw"}
    tensors = {name: t.contiguous() for name, t in initial_weights(content)[0].items()}
    with open(folder / PUSHED, "wb") as target:
        WRITERS[".safetensors"]({**kept, "model": tensors}, target)
    (folder / _CONFIG).write_text(kept[RUN]["config"], "utf-8")  # for readers
    (folder / _CARD).write_text(card, "utf-8")


def _without_folders(value: Any) -> Any:
    """Plain values with names in place of absolute paths, which are private."""
    if isinstance(value, Mapping):
        return {key: _without_folders(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(one) for one in value]
    is_path = isinstance(value, str) and os.path.isabs(value)
    return Path(value).name if is_path else value


def _card(repository: str, run: SavedRun, results: Mapping[str, float], license: str) -> str:
    """The model card: the metadata for the Hub, and the facts that the run recorded."""
    model, origin = run.config["MODEL"], run.origin
    classes = run.classes.get("thing_classes", [])
    front = {
        "license": license,
        "library_name": "lambda_det",
        "pipeline_tag": "image-segmentation" if model["MASK_ON"] else "object-detection",
    }
    start = model["WEIGHTS"]
    start = fetch(start).describe() if is_public(start) else Path(start).name
    text = _TEXT.format(
        name=repository.partition("/")[2],
        url=f"hf://{repository}",
        classes=printable(", ".join(classes)) or "objects",
        average="averaged" if origin.averaged else "raw",
        step=origin.step or 0,
        results=", ".join(f"{label} {value:.1f}" for label, value in results.items())
        or "not evaluated",
        start=start or "random weights",
    )
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n{text}"


def push(args: argparse.Namespace) -> None:
    """Send a detector, or write the files to look at.

    Raises:
        UserError: one sentence on what cannot work.
    """
    if not _NAME.fullmatch(args.repository):
        raise ConfigError(f"{args.repository} must have the form OWNER/NAME.")
    with tempfile.TemporaryDirectory() as made:
        folder = args.folder or Path(made)
        write_folder(Path(args.run), args.repository, folder, args.license, args.checkpoint)
        if args.folder:
            print(f"What would be sent is in {folder}; look at {folder / _CARD} first.")
            return
        with refused(DataError, f"{args.repository} was not sent", _ADVICE, Exception):
            from huggingface_hub import HfApi

            HfApi().create_repo(args.repository, private=args.private, exist_ok=True)
            sent = HfApi().upload_folder(repo_id=args.repository, folder_path=made)
    print(f"Sent: {sent}")
