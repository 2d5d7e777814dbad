"""Own data before a training: labels become COCO files; flags and the recipe become keys.

:func:`prepare` ends before the task begins. It is a function of data, machine and flags. Training,
evaluation and the page of a run use only its result: files in COCO's format in the folder of the
run (``run_data.py``), and a configuration with keys of Detectron2 and of this package.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from tabulate import tabulate

from lambda_det.detection.config import Prepared, changed_config
from lambda_det.detection.config_files import get_config
from lambda_det.detection.data import register_json_datasets
from lambda_det.detection.data.ground_truth import forget_records, ground_truth
from lambda_det.detection.data.loader import training_records
from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.data.registration import is_coco, load_records
from lambda_det.detection.data.tile_records import number_of_whole_images
from lambda_det.detection.saved_run import open_run
from lambda_det.detection.tiles import Tiling
from lambda_det.errors import ConfigError, DataError, WeightsError
from lambda_det.modeling.specs import STRIDE
from lambda_det.own_data import fit
from lambda_det.own_data.data_files import Parts, read_data
from lambda_det.own_data.fit_input import (
    SIZES,
    TILES,
    Asked,
    Choice,
    Row,
    fit_input,
    merge,
    sizes_for,
)
from lambda_det.own_data.flags import AUTO, names_data, refuse_unnamed
from lambda_det.own_data.run_data import (
    FILE_KEYS,
    PreparedRun,
    keep_file,
    refuse_folder,
    write_data,
)
from lambda_det.own_data.start import DEFAULT, Machine, Start, choose_recipe
from lambda_det.training.log import log_table, show
from lambda_det.training.run_folder import RunFolder
from lambda_det.weights.provenance import recorded_network

logger = logging.getLogger(__name__)


class _Given(NamedTuple):
    """What there is to prepare.

    Attributes:
        args: of the command line.
        keys: its keys with their values.
        folder: of the run.
        run: that is resumed; None for none.
        parts: of the data that the flags name; none where the run has its own.
        temporary: a folder for files on their way to the folder of the run.
    """

    args: argparse.Namespace
    keys: Mapping[str, str]
    folder: Path
    run: PreparedRun | None
    parts: Parts
    temporary: Path


def prepare(args: argparse.Namespace, config: CfgNode | None) -> Prepared:
    """Replace the flags for own data by keys of a configuration, and the labels by files.

    With ``--resume`` the data and the recipe of the run stay; a warning says that the labels of
    ``--data`` have changed since then.

    Args:
        args: of a parser with :func:`lambda_det.own_data.flags.add_flags`; they are only read.
        config: of the file that they name, with the given keys; None where they name none.

    Raises:
        ConfigError: there is neither a file nor data, or flags do not go together.
        DataError: the data are not of a known format, not found, or not the run's.
    """
    begun = time.monotonic()
    given_keys = dict(zip(args.opts[::2], args.opts[1::2], strict=False))
    folder = Path(given_keys.get("OUTPUT_DIR", (config or get_config(DEFAULT)).OUTPUT_DIR))
    refuse_folder(args, folder)
    run = PreparedRun(folder) if args.resume and (folder / "config.yaml").is_file() else None
    if config is None and run is None:
        if args.resume and not names_data(args):
            RunFolder(folder).refuse_no_run()
        refuse_unnamed(args)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="lambda_det_") as place:
        temporary = Path(place)
        has_data = run is not None and bool(run.sources)
        parts, digests = ({}, {}) if has_data else read_data(args, temporary, rows)
        given = _Given(args, given_keys, folder, run, parts, temporary)
        start = _start(given, config)
        flags = _keys_of_flags(given, start, begun)
        keys = start.keys | flags
        cfg = _with(start, keys, args)
        kept = cfg.RECIPE.KEEP = sorted({*given_keys, *flags, *cfg.RECIPE.KEEP})
        is_derived = cfg.RECIPE.ENABLED and not args.eval_only
        if is_derived:
            fit.check(cfg)
        Tiling.from_config(cfg)  # is refused before anything is written
        if has_data:
            files = run.data(args, given_keys, temporary)
        else:
            files = write_data(args, folder, parts, digests)
        is_temporary = Path(start.file).parent == temporary
        file = str(keep_file(start.file, folder)) if is_temporary else start.file
        keys |= files
        cfg.DATASETS.update({key.partition(".")[2]: path for key, path in files.items()})
        rows += start.rows
        keys |= _fitted(given, start, cfg, rows, is_derived=is_derived)
    if args.num_gpus * args.num_machines > 1:  # its processes read for themselves
        forget_records(but=())
    keys |= {"RECIPE.ENABLED": False, "RECIPE.KEEP": kept}
    return Prepared(_with(start, keys, args), file)


# -------------------------------------------------------------------------------- the configuration
def _start(given: _Given, config: CfgNode | None) -> Start:
    """The file of ``--config``, or the run to continue, or an earlier detector, or a recipe."""
    args, given_keys, run = given.args, given.keys, given.run
    if config is not None:
        return Start(config, args.config_file, {})
    if run:
        row = "recipe", str(run.file), "--resume goes on as the run was started"
        return Start(changed_config(run.config, args.opts), str(run.file), {}, [row])
    machine = Machine.of(args, given_keys.get("MODEL.DEVICE"))
    return _of_detector(given, machine) or choose_recipe(given_keys, machine)


def _of_detector(given: _Given, machine: Machine) -> Start | None:
    """The detector whose checkpoint is given as MODEL.WEIGHTS; None for other weights."""
    weights = given.keys.get("MODEL.WEIGHTS", "")
    if not Path(weights).is_file():
        return None
    try:
        earlier = open_run(weights)
    except (ConfigError, WeightsError):  # it is of a backbone, or of another trainer
        return None
    if not isinstance(earlier.config, CfgNode):
        return None
    file = given.temporary / "earlier.yaml"
    file.write_text(earlier.config.dump(), "utf-8")
    network, _ = recorded_network(earlier.content)
    network = network or earlier.config.MODEL.META_ARCHITECTURE
    keys = {
        "MODEL.DEVICE": machine.device,
        "OUTPUT_DIR": str(given.folder),
        "RECIPE.ENABLED": True,
        "RECIPE.EPOCHS": 0.0,
        "RECIPE.TIME": 0.0,
        "RECIPE.KEEP": [],
        "SOLVER.UNSCALED": [],
        **dict.fromkeys(FILE_KEYS, ""),
    }
    row = "network", network, f"that of MODEL.WEIGHTS {earlier.origin.file}"
    return Start(changed_config(earlier.config, given.args.opts), str(file), keys, [row])


# --------------------------------------------------------------------------------------------- keys
def _with(start: Start, keys: Mapping[str, Any], args: argparse.Namespace) -> CfgNode:
    """A configuration with keys, over which the given ones count."""
    words = [str(word) for pair in keys.items() for word in pair]
    return changed_config(start.config, [*words, *args.opts])


def _keys_of_flags(given: _Given, start: Start, begun: float) -> dict[str, Any]:
    """The keys that flags mean; what a flag says may not be among the given keys as well. The
    command began at ``begun``, by ``time.monotonic``.
    """
    args, given_keys, run = given.args, given.keys, given.run
    keys: dict[str, Any] = {}
    if _keeps_tiles(given):  # they may have followed from the data
        kept = (key for key in (*TILES, *SIZES) if key not in given_keys)
        keys |= {key: attrgetter(key)(run.config) for key in kept}
    elif isinstance(args.tile, int):
        keys["INPUT.TILE.SIZE"] = args.tile
    if args.size is not None:
        if args.size < STRIDE:
            raise ConfigError(f"--size is {args.size}; give {STRIDE} pixels or more.")
        sizes = sizes_for(start.config, args.size)
        if both := sizes.keys() & given_keys.keys():
            raise ConfigError(f"--size and {min(both)} both say how large images are; give one.")
        # those of a chosen recipe follow from the shapes of the images as well
        keys |= {} if start.is_chosen else sizes
    if args.batch is not None:
        keys["SOLVER.IMS_PER_BATCH"] = args.batch
    if args.epochs is not None:
        # In the place of a time that a stopped run had not come to
        keys |= {"RECIPE.ENABLED": True, "RECIPE.EPOCHS": args.epochs, "RECIPE.TIME": 0.0}
    if args.time is not None:
        # counts until the first steps are timed
        seconds = max(args.time - (time.monotonic() - begun), 1.0)
        keys |= {"RECIPE.ENABLED": True, "RECIPE.TIME": seconds}
        if run and not run.config.RECIPE.TIME:  # its schedule is set, and stays
            keys |= {"RECIPE.EPOCHS": run.config.RECIPE.EPOCHS, "RECIPE.TIME": 0.0}
    return keys


# -------------------------------------------------------------------- what follows from the data
def _fitted(
    given: _Given, start: Start, cfg: CfgNode, rows: list[Row], *, is_derived: bool
) -> dict[str, Any]:
    """The keys that follow from the data: sizes and tiles, or more where ``is_derived``."""
    # Two tables of the log say why. ``cfg`` has the keys that are known by now.
    args, run = given.args, given.run
    continued = run is not None and Path(start.file).resolve() == run.file.resolve()
    tile = None if _keeps_tiles(given) else args.tile
    fits_input = start.is_chosen or tile is not None
    if args.eval_only or not (is_derived or fits_input):
        _show(rows)
        return {}
    register_json_datasets(cfg)
    if not cfg.DATASETS.TRAIN:
        raise ConfigError(
            "DATASETS.TRAIN names no data to fit the training to: add --data DIR, or --train-json "
            "FILE and --train-images DIR."
        )
    if continued and not fits_input:
        _show(rows)
        if args.epochs in (None, run.config.RECIPE.EPOCHS):  # --time was for the whole run
            return {}
        records = training_records(cfg)
        schedule = fit.fit_schedule(cfg, len(records), number_of_whole_images(records))
        return _told(cfg, schedule)
    machine = Machine.of(args, cfg.MODEL.DEVICE)
    is_new = is_derived and not continued
    background, among = [], ""
    if is_new and cfg.DATASETS.TRAIN_JSON:
        report = ground_truth(cfg.DATASETS.TRAIN_JSON, cfg.DATASETS.TRAIN_IMAGES).report
        background, among = fit.background(report), f" of {report.images}"
    merge(cfg, background, cfg.RECIPE.KEEP)
    uncut = cfg.clone()
    uncut.INPUT.TILE.SIZE = 0
    records, others = list(training_records(uncut)), _other_images(given, cfg)
    asked = Asked(given.keys, args.size, tile, start.is_chosen)
    classes = MetadataCatalog.get(cfg.DATASETS.TRAIN[0]).get("thing_classes", ())
    if is_new:
        found, training = fit.fit(cfg, records, machine, asked, classes=classes, others=others)
    else:
        found, training = fit_input(cfg, records, asked, classes=classes, others=others), []
    if start.is_chosen:
        rows.append(("images", f"{len(records)}{among}", "to train on"))
    _show([*rows, *found.rows, *((key, str(value), why) for key, value, why in found.choices)])
    for warning in found.warnings:
        logger.warning(warning)
    keys = {key: value for key, value, _ in found.choices}
    return keys | _told(cfg, [*background, *training])


def _keeps_tiles(given: _Given) -> bool:
    """Whether ``--tile`` has nothing to change in the tiles of a run that is resumed."""
    run = given.run
    return run is not None and given.args.tile in (AUTO, run.config.INPUT.TILE.SIZE)


def _other_images(given: _Given, cfg: CfgNode) -> list[dict[str, Any]]:
    """The records of own data that are evaluated on, now and in the end."""
    records: list[dict[str, Any]] = []
    with contextlib.suppress(DataError):  # the later check refuses them
        for name in filter(is_coco, cfg.DATASETS.TEST if given.parts else ()):
            records += load_records(name)
        if "rest" in given.parts:
            records += ground_truth(*given.parts["rest"]).records
    return records


def _show(rows: Sequence[Row]) -> None:
    if rows:
        show(f"What was chosen:\n{tabulate(rows, ('', 'choice', 'why'))}")


def _told(cfg: CfgNode, choices: Sequence[Choice]) -> dict[str, Any]:
    """The values of choices without keys that are kept; log all, beside those that are given."""
    if not choices:
        return {}
    rows: list[tuple[str, Any, Any, str]] = []
    if cfg.DATASETS.TRAIN_JSON:
        classes = len(MetadataCatalog.get(cfg.DATASETS.TRAIN[0]).thing_classes)
        key = Detector.from_config(cfg).keys["num_classes"]
        rows.append((key or "classes", "", classes, "the categories of the labels"))
    for key, value, reason in choices:
        before, why = "", reason
        if key in cfg.RECIPE.KEEP:
            before, why = attrgetter(key)(cfg), "kept: it is given, or in RECIPE.KEEP"
        rows.append((key, before, value, why))
    log_table("What follows from these data", rows)
    return {key: value for key, value, _ in choices if key not in cfg.RECIPE.KEEP}
