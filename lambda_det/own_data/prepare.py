"""Own data before a training: labels become COCO files; flags and the recipe become keys.

:func:`prepare` ends before the task begins. It is a function of data, machine and flags. Training,
evaluation and the page of a run use only its result: files in COCO's format in the folder of the
run, and keys of Detectron2 and of this package.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from detectron2.config import CfgNode
from tabulate import tabulate

from lambda_det.config import leaves, read_plain
from lambda_det.detection.config import load_config
from lambda_det.detection.config_files import get_config
from lambda_det.detection.data import register_json_datasets
from lambda_det.detection.data.coco import coco_content, file_report, read_coco
from lambda_det.detection.data.coco_format import read_json
from lambda_det.detection.data.outputs import mark_output
from lambda_det.detection.data.picture_folder import PICTURES, walk
from lambda_det.detection.saved_run import SavedRun, open_run
from lambda_det.detection.tiles import SMALLEST, Tiling
from lambda_det.errors import ConfigError, DataError, WeightsError, refused
from lambda_det.files import DRAFT
from lambda_det.own_data import recipe
from lambda_det.own_data.choice import DEFAULT, choose
from lambda_det.own_data.drafts import identifying_stem
from lambda_det.own_data.held_out import Split, hold_out, smallest_share
from lambda_det.own_data.input_size import SIZES, sizes_for
from lambda_det.own_data.labels import (
    COCO,
    FORMATS,
    as_coco,
    as_single_class,
    recognise,
    refuse_address,
)
from lambda_det.own_data.layouts import find_images, find_parts
from lambda_det.own_data.machine import Machine
from lambda_det.own_data.tile_choice import (
    AUTO,
    OF_TILES,
    TILES,
    ChosenTiles,
    choose_tiles,
    tile_flag,
)
from lambda_det.own_data.time_budget import measure_step, seconds_of
from lambda_det.training.log import show
from lambda_det.training.run_folder import refuse_other_run
from lambda_det.weights.provenance import recorded_network

__all__ = ["FOLDER", "SOURCES", "add_flags", "prepare", "refusal_of"]

logger = logging.getLogger(__name__)

FOLDER = "data"  # the folder of the files in COCO's format, within the run's
SOURCES = "sources.json"  # a file in it: the labels from which the files were made
_PARTS = ("train", "test")
_KEYS = [f"DATASETS.{part.upper()}_{what}" for part in _PARTS for what in ("JSON", "IMAGES")]
Row = tuple[str, str, str]  # a row of the table: what, the choice, and why


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that :func:`prepare` reads, and let it run before the task of the parser."""
    data = parser.add_argument_group(
        "your own data",
        f"instead of DATASETS.TRAIN and .TEST; labels of {', '.join(FORMATS)}",
    )
    data.add_argument(
        "--data",
        metavar="DIR",
        help="folder of a data set, or YOLO's data.yaml: its parts to train and to evaluate on",
    )
    data.add_argument(
        "--val-share",
        type=float,
        metavar="S",
        help="share of the training images to evaluate on, by their names, without a --test-json; "
        "0.1 with --data or without --config",
    )
    data.add_argument(
        "--stratify", action="store_const", const=True, help="each class has its share as well"
    )
    data.add_argument(
        "--group-by",
        metavar="REGEX",
        help="images whose names match it alike stay on one side, such as ^[^_]+ of a video's",
    )
    data.add_argument(
        "--single-class",
        action="store_const",
        const=True,
        help="all objects are of one class, whatever their labels call them",
    )
    schedule = parser.add_argument_group(
        "schedule and size for your data", "RECIPE in lambda_det/config.py"
    )
    schedule.add_argument(
        "--epochs", type=float, metavar="N", help="passes over the training images; 0: by a rule"
    )
    schedule.add_argument(
        "--time",
        metavar="T",
        help="as many epochs as fit into a time such as 1h, 45m or 1h30m, by the measured time of "
        "a step",
    )
    schedule.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="images a step; else by the memory of the GPUs, where the file says what it takes",
    )
    schedule.add_argument(
        "--size",
        type=int,
        metavar="N",
        help="pixels of the shorter side of images in the test; the longer side and the sizes in "
        "training change by the same factor",
    )
    schedule.add_argument(
        "--tile",
        type=tile_flag,
        metavar="N",
        help="cut images in memory into overlapping tiles of N pixels, in which objects keep their "
        "pixels; 0: whole images; auto: by a rule, as where most objects would be too small",
    )
    parser.set_defaults(prepare="lambda_det.own_data.prepare:prepare")


def prepare(args: argparse.Namespace) -> None:
    """Replace the flags for own data by a configuration, and the labels by files.

    With ``--resume`` the data and the recipe of the run stay; ``--data`` is only checked for
    changes since then.

    Args:
        args: of a parser with :func:`add_flags`. ``config_file`` and ``opts`` become those of the
            configuration, and ``records`` the messages to log.

    Raises:
        ConfigError: there is neither a file nor data, or flags do not go together.
        DataError: the data are not of a known format, not found, or not those of the run.
    """
    with _recording() as records:
        _prepare(args)
    args.records = records


@contextlib.contextmanager
def _recording() -> Iterator[list[dict[str, Any]]]:
    """Keep messages for the log of the run, which is not open yet."""
    records: list[dict[str, Any]] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept = ("name", "levelno", "levelname", "created")
            records.append({k: getattr(record, k) for k in kept} | {"msg": record.getMessage()})

    recorder, loggers = Recorder(), [logging.getLogger(n) for n in ("lambda_det", "detectron2")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.addHandler(recorder)
        one.setLevel(logging.INFO)
    try:
        yield records
    except BaseException:
        for record in records:
            if record["levelno"] >= logging.WARNING:
                logging.lastResort.handle(logging.makeLogRecord(record))
        raise
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.removeHandler(recorder)
            one.setLevel(level)


def _prepare(args: argparse.Namespace) -> None:
    if not _has_work(args):
        return
    begun = time.monotonic()
    typed = dict(zip(args.opts[::2], args.opts[1::2], strict=False))
    folder = _folder(args, typed)
    run = _PreparedRun.of(folder) if args.resume else None
    if args.config_file is None and not run:
        _check_choice(args)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="lambda_det_") as draft:
        stands = run is not None and bool(run.sources)
        data = _Data({}, {}) if stands else _read_data(args, Path(draft), rows)
        keys = _keys_of_file(args, typed, run, data, folder, Path(draft), rows)
        flags = _keys_of_flags(args, typed)
        # a chosen recipe has sizes for --size already, for the shapes of the pictures
        keys |= {key: v for key, v in flags.items() if key not in SIZES or key not in keys}
        words = [*_words(keys), *args.opts]
        cfg = load_config(argparse.Namespace(config_file=args.config_file, opts=words))
        kept = recipe.FITTED_KEYS & {*typed, *flags, *cfg.RECIPE.KEEP}
        cfg.RECIPE.KEEP = sorted(kept)
        is_derived = cfg.RECIPE.ENABLED and not args.eval_only
        if is_derived:
            recipe.check(cfg)
        files = _data_of_run(args, run, Path(draft)) if stands else _write_data(args, folder, data)
        if Path(args.config_file).parent == Path(draft):
            args.config_file = str(_copy(args.config_file, folder))
    if rows:
        show(f"What was chosen:\n{tabulate(rows, ('', 'choice', 'why'))}")
    if is_derived:
        cfg.DATASETS.update({key.partition(".")[2]: path for key, path in files.items()})
        register_json_datasets(cfg)
        if not (run and run.is_of(args.config_file)):
            machine = Machine.of(args, cfg.MODEL.DEVICE)
            if args.time is not None:
                if run and run.sources:  # the time was for the whole run
                    cfg.RECIPE.EPOCHS = run.keys["RECIPE.EPOCHS"]
                else:
                    words = [*_words(keys | files), *args.opts]
                    cfg.RECIPE.EPOCHS = _epochs_within(args, cfg, machine, words, begun)
                keys["RECIPE.EPOCHS"] = cfg.RECIPE.EPOCHS
            keys |= recipe.fit_to_data(cfg, machine)
        elif args.epochs != run.keys.get("RECIPE.EPOCHS"):
            keys |= recipe.fit_schedule(cfg)
    keys |= files | {"RECIPE.ENABLED": False, "RECIPE.KEEP": sorted(kept)}
    args.opts = [*_words(keys), *args.opts]
    # the keys count from here on
    args.data = args.train_json = args.train_images = args.test_json = args.test_images = None


def _keys_of_file(
    args: argparse.Namespace,
    typed: Mapping[str, str],
    run: _PreparedRun | None,
    data: _Data,
    folder: Path,
    draft: Path,
    rows: list[Row],
) -> dict[str, Any]:
    """The file of the configuration, chosen where none is named, and keys that belong to it.

    Where ``MODEL.WEIGHTS`` is the checkpoint of a detector, it is the configuration of that
    detector.

    Raises:
        DataError: the labels by which it would be chosen are refused.
    """
    if args.config_file is not None:
        return _keys_of_tiles(args, typed, run, data, rows)
    if run:
        args.config_file = str(run.file)
        rows.append(("recipe", args.config_file, "--resume goes on as the run was started"))
        return _keys_of_tiles(args, typed, run, data, rows)
    machine = Machine.of(args, typed.get("MODEL.DEVICE"))
    if earlier := _earlier_detector(typed):
        args.config_file = str(draft / "earlier.yaml")
        Path(args.config_file).write_text(earlier.config.dump(), "utf-8")
        network, _ = recorded_network(earlier.content)
        network = network or earlier.config.MODEL.META_ARCHITECTURE
        rows.append(("network", network, f"that of MODEL.WEIGHTS {earlier.origin.file}"))
        return {
            "MODEL.DEVICE": machine.device,
            "OUTPUT_DIR": str(folder),
            "RECIPE.ENABLED": True,
            "RECIPE.EPOCHS": 0.0,
            "RECIPE.KEEP": [],
            "SOLVER.UNSCALED": [],
            **dict.fromkeys(_KEYS, ""),
            **_keys_of_tiles(args, typed, run, data, rows),
        }
    labels = _labels_to_train_on(data)
    chosen = choose(labels["images"], labels["annotations"], typed, machine, args.size, args.tile)
    args.config_file = chosen.file
    rows += chosen.rows
    return chosen.keys


def _earlier_detector(typed: Mapping[str, str]) -> SavedRun | None:
    """The detector whose checkpoint is typed as MODEL.WEIGHTS; None for other weights."""
    file = typed.get("MODEL.WEIGHTS", "")
    if not file or not Path(file).is_file():
        return None
    # it is of a backbone, or of another trainer
    with contextlib.suppress(ConfigError, WeightsError):
        earlier = open_run(file)
        return earlier if isinstance(earlier.config, CfgNode) else None
    return None


def _keys_of_flags(args: argparse.Namespace, typed: Mapping[str, str]) -> dict[str, Any]:
    """
    Raises:
        ConfigError: a batch or a size is invalid, or sizes are also among the keys.
    """
    keys: dict[str, Any] = {}
    if args.tile is not None and "INPUT.TILE.SIZE" in typed:
        raise ConfigError("--tile and INPUT.TILE.SIZE both say how images are cut; give one.")
    if args.size is not None:
        if args.size < SMALLEST:
            raise ConfigError(f"--size is {args.size}; give {SMALLEST} pixels or more.")
        file = argparse.Namespace(config_file=args.config_file, opts=args.opts)
        keys |= sizes_for(load_config(file), args.size)
        if both := keys.keys() & typed.keys():
            raise ConfigError(f"--size and {min(both)} both say how large images are; give one.")
    if args.batch is not None:
        if args.batch < 1:
            raise ConfigError(f"--batch is {args.batch}; give 1 or more.")
        keys["SOLVER.IMS_PER_BATCH"] = args.batch
    if args.epochs is not None:
        keys |= {"RECIPE.ENABLED": True, "RECIPE.EPOCHS": args.epochs}
    if args.time is not None:
        if args.epochs is not None:
            raise ConfigError("--epochs and --time both say how long a training is; give one.")
        seconds_of(args.time)
        keys["RECIPE.ENABLED"] = True
    return keys


def _keys_of_tiles(
    args: argparse.Namespace,
    typed: Mapping[str, str],
    run: _PreparedRun | None,
    data: _Data,
    rows: list[Row],
) -> dict[str, Any]:
    """The keys of ``--tile`` where no recipe is chosen.

    A run that is resumed by the same flag keeps its tiles, which may follow from the data.

    Raises:
        ConfigError: the tiles cannot be, or there are no labels by which to choose them.
        DataError: the labels are refused.
    """
    tile = args.tile
    if tile is None:
        return {}
    if run and tile == run.sources.get("tile"):
        kept = [key for key in (*TILES, *SIZES) if key in run.keys and key not in typed]
        return {key: run.keys[key] for key in kept}
    cfg = load_config(argparse.Namespace(config_file=args.config_file, opts=args.opts))
    if tile == cfg.INPUT.TILE.SIZE:
        return {}
    if tile == 0:
        return {"INPUT.TILE.SIZE": 0}
    if tile == AUTO and args.resume and not data.parts:  # that of the run
        return {}
    if "train" not in data.wholes:
        if tile == AUTO:
            raise ConfigError(
                "--tile auto chooses tiles by the objects: add --data DIR, or --train FILE and "
                "--images DIR; or give a number of pixels."
            )
        chosen = ChosenTiles(Tiling.of_size(tile), (), [("tiles", f"{tile} pixels", "typed")])
    else:
        labels = _labels_to_train_on(data)
        chosen = choose_tiles(cfg, labels["images"], labels["annotations"], tile, cfg)
    rows += chosen.rows
    if args.size is not None or not typed.keys().isdisjoint(SIZES):
        rows += [OF_TILES] if chosen.tiling else []
        return chosen.keys
    return chosen.keys | (sizes_for(cfg, tile) if chosen.tiling and tile != AUTO else {})


def _epochs_within(
    args: argparse.Namespace, cfg: CfgNode, machine: Machine, words: list[str], begun: float
) -> float:
    """The epochs that fit into ``--time``, by the measured time of a step.

    Args:
        args: of the command line.
        cfg: its configuration.
        machine: where the training is to run.
        words: the keys of the configuration with their values, as far as they are known.
        begun: when the command was, by ``time.monotonic``.
    """
    if not machine.is_alone:
        raise ConfigError("--time is for processes of one --num-gpus; give --epochs to others.")
    derived = {
        rule.key: rule.value
        for rule in recipe.rules_for(cfg, machine)
        if rule.key not in cfg.RECIPE.KEEP
    }
    step = measure_step(args, [*_words(derived), *words])
    fitted = cfg.clone()
    fitted.merge_from_list([item for pair in derived.items() for item in pair])
    left = seconds_of(args.time) - (time.monotonic() - begun) - step.start
    epochs = recipe.epochs_within(fitted, left, step.seconds)
    show(f"--time {args.time}: a step takes {step.seconds:.3g} s here, so {epochs:.3g} epochs fit")
    return epochs


def _has_work(args: argparse.Namespace) -> bool:
    flags = (
        "data",
        "val_share",
        "stratify",
        "group_by",
        "single_class",
        "epochs",
        "batch",
        "size",
        "tile",
        "time",
    )
    if args.config_file is None or any(getattr(args, flag) is not None for flag in flags):
        return True
    for part in _PARTS:
        labels, images = getattr(args, f"{part}_json"), getattr(args, f"{part}_images")
        refuse_address(labels or "")
        if labels and Path(labels).exists() and (not images or recognise(Path(labels))[0] != COCO):
            return True
    return not args.eval_only and load_config(args).RECIPE.ENABLED


def _words(keys: Mapping[str, Any]) -> list[str]:
    """Keys and their values as words of a command line."""
    return [str(word) for pair in keys.items() for word in pair]


def _folder(args: argparse.Namespace, typed: Mapping[str, str]) -> Path:
    """The folder of the run."""
    if "OUTPUT_DIR" in typed:
        return Path(typed["OUTPUT_DIR"])
    return Path((load_config(args) if args.config_file else get_config(DEFAULT)).OUTPUT_DIR)


# ---------------------------------------------------------------------------------- the user's data
class _Data(NamedTuple):
    """The parts of a data set.

    Attributes:
        parts: files in COCO's format by "train", "test" and "rest"; the last is a test part that is
            not used.
        wholes: the files from before images were held out, by the same names.
        split: what was held out; None for nothing.
    """

    parts: dict[str, tuple[str, str]]
    wholes: dict[str, tuple[str, str]]
    split: Split | None = None


def _labels_to_train_on(data: _Data) -> dict[str, Any]:
    """In COCO's format, with everything decided, from before images were held out.

    Raises:
        DataError: the labels are refused.
    """
    truth = read_coco(*data.wholes["train"])
    if refusal := truth.report.refusal():
        raise DataError(refusal)
    return coco_content(truth)


def _read_labels(args: argparse.Namespace, draft: Path, rows: list[Row]) -> dict[str, Any]:
    """Convert labels of any format to COCO files, each with the folder of its pictures, by part.

    Raises:
        ConfigError: flags do not go together.
        DataError: the data are not of a known format, or not found.
    """
    for place in (args.data, args.train_json, args.train_images, args.test_json, args.test_images):
        refuse_address(place or "")
    if args.data and args.train_json:
        raise ConfigError("--data and --train-json both name data to train on; give one of them.")
    if args.val_share and args.test_json:
        raise ConfigError("--val-share is for data without a --test-json; give one of them.")
    parts: dict[str, tuple[str, str]] = {}
    if args.data:
        name, found = find_parts(args.data, args.train_images, folder=draft)
        rows.append(("labels", name, f"of what lies in {args.data}"))
        named = {part.name: part for part in found}
        parts["train"] = str(named["train"].labels), str(named["train"].images)
        # A test part chooses no weights: it is for the end
        used = named.get("val") or (named.get("test") if args.eval_only else None)
        if used and not args.test_json and args.val_share is None:
            images = str(args.test_images or used.images)
            parts["test"] = str(used.labels), images
            rows.append(("evaluation", used.source, f"with the images in {images}"))
        if "test" in named and named["test"] is not used and not args.test_json:
            parts["rest"] = str(named["test"].labels), str(named["test"].images)
    named = {}
    for part in _PARTS:
        labels, images = getattr(args, f"{part}_json"), getattr(args, f"{part}_images")
        if labels and not Path(labels).exists():
            raise DataError(f"The labels {labels} of --{part}-json do not exist.")
        if labels:
            named[part] = labels, images or str(find_images(labels))
        elif images and not args.data:
            raise ConfigError(f"--{part}-images is given without --{part}-json; give both.")
    files = as_coco(*named.values(), folder=draft)
    parts |= {
        part: (file, images) for file, (part, (_, images)) in zip(files, named.items(), strict=True)
    }
    if args.single_class:
        rows.append(("classes", "one", "--single-class"))
        parts = {
            part: (as_single_class(file, draft), images) for part, (file, images) in parts.items()
        }
    return parts


def _read_data(args: argparse.Namespace, draft: Path, rows: list[Row]) -> _Data:
    """The data that flags name, with images held out where nothing to evaluate on is named."""
    parts = _read_labels(args, draft, rows)
    asked = args.data or (args.config_file is None and args.train_json)
    group_by, stratify = args.group_by or "", bool(args.stratify)
    share = args.val_share
    if "train" in parts and "test" not in parts and share is None and asked:
        share = smallest_share(*parts["train"], group_by, folder=draft)
        part = f"{share:g} of the images" if share else "none: too few images"
        why = "no part of the data is called val; --val-share changes it"
        if "rest" in parts:
            why += ", and the test part is for the end"
        rows.append(("evaluation", part, why))
    if not share:
        if group_by or stratify:
            raise ConfigError("--group-by and --stratify need a --val-share.")
        return _Data(parts, parts)
    if "train" not in parts:
        raise ConfigError("--val-share needs --data or --train-json, to hold out some images.")
    split = Split(share, group_by, stratify)
    labels, images = parts["train"]
    train, test = hold_out(labels, images, split, folder=draft)
    return _Data({**parts, "train": (train, images), "test": (test, images)}, parts, split)


def _check_choice(args: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: there is nothing by which a recipe could be chosen.
    """
    if args.eval_only or not (args.data or args.train_json):
        raise ConfigError(
            "--config FILE is missing, which names a file of yours or of configs/; with --data DIR "
            "or --train FILE --images DIR it follows from the data and the machine."
        )


def _write_data(args: argparse.Namespace, folder: Path, data: _Data) -> dict[str, str]:
    """Write the parts into the folder of the run; return the keys that name them.

    Raises:
        ConfigError: the folder holds another run.
        DataError: they cannot be written.
    """
    if not data.parts:
        return {}
    if not args.resume and not args.eval_only:
        refuse_other_run(folder)
        _refuse_folder_of_data(args, folder)
    keys, rest = {}, None
    for part, (file, images) in data.parts.items():
        path = _copy(file, folder)
        if part == "rest":
            rest = path.name, os.path.abspath(os.path.expanduser(images))
            show(
                "There is a test part, which is left alone: once the training is over, "
                f"lambda-det evaluate {folder} --part test evaluates on it."
            )
            refusal = refusal_of(file, images)
            # the copy to train on is read here, as its report is kept for the registration
            train = keys["DATASETS.TRAIN_JSON"], keys["DATASETS.TRAIN_IMAGES"]
            if not refusal and _classes(file, images) != _classes(*train):
                refusal = f"{file} has other categories than the part to train on."
            if refusal:
                logger.warning(f"That command will refuse these labels as they are: {refusal}")
        else:
            keys |= _keys_of(part, path, images)
    if not args.eval_only:
        sources = {
            "labels": {part: str(file) for part, (file, _) in data.wholes.items()},
            "digests": {part: _digest(file) for part, (file, _) in data.wholes.items()},
            "held_out": data.split and data.split._asdict(),
            "single_class": bool(args.single_class),
            "tile": args.tile,
            "rest": rest,
        }
        _write(folder / FOLDER / SOURCES, json.dumps(sources, indent=1).encode())
    return keys


def _refuse_folder_of_data(args: argparse.Namespace, folder: Path) -> None:
    """
    Raises:
        ConfigError: the folder of the run has pictures of the data, which would be no data later.
    """
    named = (args.data, args.train_json, args.train_images, args.test_json, args.test_images)
    places = [os.path.realpath(place) for place in named if place and os.path.isdir(place)]
    here = os.path.realpath(folder)
    if any(Path(here).is_relative_to(place) for place in places) and any(
        path.suffix.lower() in PICTURES for path in walk(folder)
    ):
        raise ConfigError(
            f"OUTPUT_DIR {folder} has pictures of the data; give the run a folder of its own, such "
            f"as --output {folder / 'output'}."
        )


def refusal_of(file: str, images: str) -> str:
    """Why a file in COCO's format is refused with a folder of pictures; "" if it is not."""
    try:
        return file_report(file, images).refusal()
    except DataError as error:
        return str(error)


def _classes(file: str, images: str) -> list[str]:
    return list(file_report(file, images).categories.values())


def _keys_of(part: str, path: Path, images: str) -> dict[str, str]:
    return {
        f"DATASETS.{part.upper()}_JSON": str(path.absolute()),
        f"DATASETS.{part.upper()}_IMAGES": os.path.abspath(os.path.expanduser(images)),
    }


def _copy(file: str, folder: Path) -> Path:
    """Copy a file into the folder of the run, under a name that identifies its content."""
    mark_output(folder)  # before a configuration shows that it is a run's
    path = folder / FOLDER / f"{identifying_stem(Path(file))}{Path(file).suffix}"
    _write(path, Path(file).read_bytes())
    return path


def _write(path: Path, content: bytes) -> None:
    """Write a file, which other processes may write at the same time."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}{DRAFT}")
    with refused(DataError, f"{path} cannot be written", "", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(content)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def _digest(file: str) -> str:
    """A digest of the content of a file in COCO's format, without the places of its labels."""
    content = read_json(file)
    lists = [content.get(name) for name in ("images", "annotations", "categories")]
    text = json.dumps(_without_sources(lists), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _without_sources(lists: list[Any]) -> list[Any]:
    return [
        [
            {name: value for name, value in entry.items() if name != "source"}
            for entry in entries or ()
            if isinstance(entry, dict)
        ]
        for entries in lists
    ]


# ------------------------------------------------------------------------------------ data of a run
class _PreparedRun(NamedTuple):
    """A run that was prepared, in its folder.

    Attributes:
        file: its configuration.
        keys: of that, with their values.
        sources: the labels from which its data were made.
    """

    file: Path
    keys: dict[str, Any]
    sources: dict[str, Any]

    @classmethod
    def of(cls, folder: Path) -> _PreparedRun | None:
        """The run in a folder; None where there is none.

        Raises:
            ConfigError: its configuration is damaged.
        """
        file, sources = folder / "config.yaml", folder / FOLDER / SOURCES
        if not file.is_file():
            return None
        errors = (yaml.YAMLError, ValueError, AttributeError)
        with refused(ConfigError, f"{file} is not a saved configuration", "mend it", *errors):
            keys = dict(leaves(read_plain(file.read_text("utf-8"))))
        made_of = {}
        if sources.is_file():
            with refused(DataError, f"{sources} cannot be read", "remove it", ValueError):
                made_of = json.loads(sources.read_text("utf-8"))
        return cls(file, keys, made_of)

    def is_of(self, file: str) -> bool:
        return os.path.realpath(file) == os.path.realpath(self.file)


def _data_of_run(args: argparse.Namespace, run: _PreparedRun, draft: Path) -> dict[str, Any]:
    """The keys of the data of a run, and of the file to evaluate on if another is named.

    Labels of the same content are those of the run, wherever they are now. Its pictures are then in
    the folder of these labels, or in that of a flag for pictures.

    Raises:
        ConfigError: another share is held out.
        DataError: the labels have changed.
    """
    held_out = run.sources.get("held_out") or Split(0.0)._asdict()
    for flag, name in (("val_share", "share"), ("group_by", "group_by"), ("stratify", "stratify")):
        value = getattr(args, flag)
        if value is not None and value != held_out[name]:
            raise ConfigError(
                f"--resume continues the run in {run.file.parent}, which has --"
                f"{flag.replace('_', '-')} {held_out[name]!r}; now it is {value!r}."
            )
    is_single = run.sources.get("single_class", False)
    if args.single_class and not is_single:
        raise ConfigError(
            f"--resume continues the run in {run.file.parent}, which has classes of its labels; "
            "leave --single-class out, or give another --output."
        )
    args.single_class = is_single
    # it is read like any run, which finds files that were moved with it
    cfg = load_config(argparse.Namespace(config_file=str(run.file), opts=[]))
    keys = {key: value for key in _KEYS if (value := attrgetter(key)(cfg))}
    pictures = {part: getattr(args, f"{part}_images") for part in _PARTS}
    if args.data or args.train_json or args.test_json:
        before = run.sources["digests"]
        for part, (file, images) in _read_labels(args, draft, []).items():
            if part == "test" and args.test_json:
                keys |= _keys_of(part, _copy(file, run.file.parent), images)
                pictures[part] = images
            elif _digest(file) != before.get(part):
                raise DataError(
                    f"The labels in {args.data or args.train_json} have changed since the run in "
                    f"{run.file.parent} began: --resume without --data continues with its own "
                    "labels, and another --output trains on the new ones."
                )
            elif part == "rest":
                _record_rest(run, images)
            else:
                pictures[part] = images
    if run.sources.get("held_out"):  # of the pictures to train on
        pictures["test"] = pictures["test"] or pictures["train"]
    return keys | _moved_pictures(keys, pictures)


def _record_rest(run: _PreparedRun, images: str) -> None:
    """Record where the pictures of the part are now that is evaluated on in the end."""
    file, before = run.sources["rest"]
    if not _is_same_folder(before, images):
        run.sources["rest"] = file, os.path.abspath(os.path.expanduser(images))
        text = json.dumps(run.sources, indent=1)
        _write(run.file.parent / FOLDER / SOURCES, text.encode())


def _moved_pictures(keys: Mapping[str, str], pictures: Mapping[str, str | None]) -> dict[str, str]:
    """The keys of the folders of pictures that are others than those of the run.

    Args:
        keys: of the run.
        pictures: folders by part; None: as in the run.
    """
    moved = {}
    for part, folder in pictures.items():
        key = f"DATASETS.{part.upper()}_IMAGES"
        if folder and key in keys and not _is_same_folder(keys[key], folder):
            moved[key] = os.path.abspath(os.path.expanduser(folder))
            logger.info(f"The pictures of {key} {keys[key]} are taken from {moved[key]}")
    return moved


def _is_same_folder(one: str, other: str) -> bool:
    other = os.path.expanduser(other)
    return os.path.isdir(one) and os.path.isdir(other) and os.path.samefile(one, other)
