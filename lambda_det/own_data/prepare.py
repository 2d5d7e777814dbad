"""Own data before a training: labels become COCO files; flags and the recipe become keys.

:func:`prepare` ends before the task begins. It is a function of data, machine and flags. Training,
evaluation and the page of a run use only its result: files in COCO's format in the folder of the
run (``run_data.py``), and a configuration with keys of Detectron2 and of this package.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from detectron2.config import CfgNode
from tabulate import tabulate

from lambda_det.detection.config import Prepared, changed_config
from lambda_det.detection.config_files import get_config
from lambda_det.detection.data import register_json_datasets
from lambda_det.detection.data.ground_truth import forget_records
from lambda_det.detection.saved_run import SavedRun, open_run
from lambda_det.detection.tiles import Tiling
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.modeling.specs import STRIDE
from lambda_det.own_data import recipe
from lambda_det.own_data.choice import DEFAULT, choose
from lambda_det.own_data.data_files import Data, Row, read_data
from lambda_det.own_data.flags import AUTO
from lambda_det.own_data.input_size import SIZES, sizes_for
from lambda_det.own_data.machine import Machine
from lambda_det.own_data.run_data import FILE_KEYS, PreparedRun, keep_file, write_data
from lambda_det.own_data.tile_choice import OF_TILES, TILES, ChosenTiles, choose_tiles
from lambda_det.own_data.time_budget import STEPS, measure_step, seconds_of
from lambda_det.training.log import show
from lambda_det.training.run_folder import RunFolder
from lambda_det.weights.provenance import recorded_network

__all__ = ["prepare"]


class _Given(NamedTuple):
    """What there is to prepare.

    Attributes:
        args: of the command line.
        keys: its keys with their values.
        folder: of the run.
        run: that is resumed; None for none.
        data: that the flags name; none where the run has its own.
        temporary: a folder for files on their way to the folder of the run.
    """

    args: argparse.Namespace
    keys: Mapping[str, str]
    folder: Path
    run: PreparedRun | None
    data: Data
    temporary: Path


class _Start(NamedTuple):
    """A configuration, before the own data are in it.

    Attributes:
        config: with the given keys.
        file: that it is of.
        keys: that belong to it besides, with their values; a given key counts more.
        rows: of the table of choices.
    """

    config: CfgNode
    file: str
    keys: dict[str, Any]
    rows: Sequence[Row] = ()


def prepare(args: argparse.Namespace, config: CfgNode | None) -> Prepared:
    """Replace the flags for own data by keys of a configuration, and the labels by files.

    With ``--resume`` the data and the recipe of the run stay; ``--data`` is only checked for
    changes since then.

    Args:
        args: of a parser with :func:`lambda_det.own_data.flags.add_flags`; they are only read.
        config: of the file that they name, with the given keys; None where they name none.

    Raises:
        ConfigError: there is neither a file nor data, or flags do not go together.
        DataError: the data are not of a known format, not found, or not the run's.
    """
    begun = time.monotonic()
    given_keys = dict(zip(args.opts[::2], args.opts[1::2], strict=False))
    folder = Path(given_keys.get("OUTPUT_DIR") or (config or get_config(DEFAULT)).OUTPUT_DIR)
    run = PreparedRun.of(folder) if args.resume else None
    if config is None and run is None:
        _check_choice(args, folder)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="lambda_det_") as place:
        temporary = Path(place)
        data = Data({}, {}) if run and run.sources else read_data(args, temporary, rows)
        given = _Given(args, given_keys, folder, run, data, temporary)
        start = _start(given, config)
        flags = _keys_of_flags(given, start.config)
        # a chosen recipe has sizes for --size already, for the shapes of the images
        sized = set(SIZES) & start.keys.keys()
        keys = start.keys | {key: v for key, v in flags.items() if key not in sized}
        cfg = _with(start, keys, args)
        kept = cfg.RECIPE.KEEP = sorted(
            recipe.FITTED_KEYS & {*given_keys, *flags, *cfg.RECIPE.KEEP}
        )
        is_derived = cfg.RECIPE.ENABLED and not args.eval_only
        if is_derived:
            recipe.check(cfg)
        files = run.data(args, temporary) if run and run.sources else write_data(args, folder, data)
        is_temporary = Path(start.file).parent == temporary
        file = str(keep_file(start.file, folder)) if is_temporary else start.file
    if rows := [*rows, *start.rows]:
        show(f"What was chosen:\n{tabulate(rows, ('', 'choice', 'why'))}")
    keys |= files
    if is_derived:
        cfg.DATASETS.update({key.partition(".")[2]: path for key, path in files.items()})
        keys |= _derived(given, start, keys, cfg, begun)
    if args.num_gpus * args.num_machines > 1:  # its processes read for themselves
        forget_records(but=())
    keys |= {"RECIPE.ENABLED": False, "RECIPE.KEEP": kept}
    return Prepared(_with(start, keys, args), file)


# -------------------------------------------------------------------------------- the configuration
def _start(given: _Given, config: CfgNode | None) -> _Start:
    """The configuration to begin with, by the first of these that there is:

    - the file of ``--config``;
    - the run that ``--resume`` continues;
    - the detector whose checkpoint is MODEL.WEIGHTS, whose schedule follows from the new data;
    - a recipe, which is chosen by the data and the machine.

    An evaluation alone, which only the first two can be, derives nothing from it.

    Args:
        given: by the command line.
        config: of the file of ``--config``; None for none.

    Raises:
        DataError: the labels by which it would be chosen are refused.
    """
    args, given_keys, run = given.args, given.keys, given.run
    if config is not None:
        return _cut(_Start(config, args.config_file, {}), given)
    if run:
        row = "recipe", str(run.file), "--resume goes on as the run was started"
        return _cut(_Start(changed_config(run.config, args.opts), str(run.file), {}, [row]), given)
    machine = Machine.of(args, given_keys.get("MODEL.DEVICE"))
    if earlier := _earlier_detector(given_keys):
        return _cut(_of_detector(earlier, given, machine), given)
    labels = given.data.to_train_on()
    chosen = choose(
        labels["images"], labels["annotations"], given_keys, machine, args.size, args.tile
    )
    return _Start(chosen.config, chosen.file, chosen.keys, chosen.rows)


def _check_choice(args: argparse.Namespace, folder: Path) -> None:
    """Refuse a command line with neither a configuration nor data.

    Raises:
        ConfigError: there is nothing by which a recipe could be chosen.
        WeightsError: a run is to go on in a folder that has none.
    """
    if args.eval_only or not (args.data or args.train_json):
        if args.resume:
            RunFolder(folder).refuse_no_run()
        if args.opts and Path(args.opts[0]).exists():
            flag = "--data" if Path(args.opts[0]).is_dir() else "--config"
            raise ConfigError(f"{args.opts[0]} follows no flag; type {flag} {args.opts[0]}.")
        raise ConfigError(
            "--config FILE is missing, which names a file of yours or of configs/; with --data DIR "
            "or --train FILE --images DIR it follows from the data and the machine."
        )


def _earlier_detector(given_keys: Mapping[str, str]) -> SavedRun | None:
    """The detector whose checkpoint is given as MODEL.WEIGHTS; None for other weights."""
    file = given_keys.get("MODEL.WEIGHTS", "")
    if not file or not Path(file).is_file():
        return None
    # it is of a backbone, or of another trainer
    with contextlib.suppress(ConfigError, WeightsError):
        earlier = open_run(file)
        return earlier if isinstance(earlier.config, CfgNode) else None
    return None


def _of_detector(earlier: SavedRun, given: _Given, machine: Machine) -> _Start:
    file = given.temporary / "earlier.yaml"
    file.write_text(earlier.config.dump(), "utf-8")
    network, _ = recorded_network(earlier.content)
    network = network or earlier.config.MODEL.META_ARCHITECTURE
    keys = {
        "MODEL.DEVICE": machine.device,
        "OUTPUT_DIR": str(given.folder),
        "RECIPE.ENABLED": True,
        "RECIPE.EPOCHS": 0.0,
        "RECIPE.KEEP": [],
        "SOLVER.UNSCALED": [],
        **dict.fromkeys(FILE_KEYS, ""),
    }
    row = "network", network, f"that of MODEL.WEIGHTS {earlier.origin.file}"
    return _Start(changed_config(earlier.config, given.args.opts), str(file), keys, [row])


# --------------------------------------------------------------------------------------------- keys
def _with(start: _Start, keys: Mapping[str, Any], args: argparse.Namespace) -> CfgNode:
    """A configuration with keys, over which the given ones count."""
    return changed_config(start.config, [*_words(keys), *args.opts])


def _words(keys: Mapping[str, Any]) -> list[str]:
    """Keys and their values as words of a command line."""
    return [str(word) for pair in keys.items() for word in pair]


def _keys_of_flags(given: _Given, config: CfgNode) -> dict[str, Any]:
    """
    Raises:
        ConfigError: a batch or a size is invalid, or sizes are also among the keys.
    """
    args, given_keys = given.args, given.keys
    keys: dict[str, Any] = {}
    if args.tile is not None and "INPUT.TILE.SIZE" in given_keys:
        raise ConfigError("--tile and INPUT.TILE.SIZE both say how images are cut; give one.")
    if args.size is not None:
        if args.size < STRIDE:
            raise ConfigError(f"--size is {args.size}; give {STRIDE} pixels or more.")
        keys |= sizes_for(config, args.size)
        if both := keys.keys() & given_keys.keys():
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


def _cut(start: _Start, given: _Given) -> _Start:
    """Add the keys of ``--tile``, where no recipe is chosen.

    A run that is resumed by the same flag keeps its tiles, which may follow from the data.

    Raises:
        ConfigError: the tiles cannot be, or there are no labels by which to choose them.
        DataError: the labels are refused.
    """
    args, given_keys, run, data = given.args, given.keys, given.run, given.data
    tile, cfg = args.tile, start.config
    if tile is None:
        return start
    if run and tile == run.sources.get("tile"):
        kept = {
            key: attrgetter(key)(run.config) for key in (*TILES, *SIZES) if key not in given_keys
        }
        return start._replace(keys=start.keys | kept)
    if tile == cfg.INPUT.TILE.SIZE:
        return start
    if tile == 0:
        return start._replace(keys=start.keys | {"INPUT.TILE.SIZE": 0})
    if tile == AUTO and args.resume and not data.parts:  # that of the run
        return start
    if "train" not in data.wholes:
        if tile == AUTO:
            raise ConfigError(
                "--tile auto chooses tiles by the objects: add --data DIR, or --train FILE and "
                "--images DIR; or give a number of pixels."
            )
        chosen = ChosenTiles(Tiling.of_size(tile), (), [("tiles", f"{tile} pixels", "given")])
    else:
        labels = data.to_train_on()
        chosen = choose_tiles(cfg, labels["images"], labels["annotations"], tile, cfg)
    keys, rows = start.keys | chosen.keys, [*start.rows, *chosen.rows]
    if args.size is not None or not given_keys.keys().isdisjoint(SIZES):
        rows += [OF_TILES] if chosen.tiling else []
    elif chosen.tiling and tile != AUTO:
        keys |= sizes_for(cfg, tile)
    return start._replace(keys=keys, rows=rows)


# -------------------------------------------------------------------- what follows from the data
def _derived(
    given: _Given, start: _Start, keys: Mapping[str, Any], cfg: CfgNode, begun: float
) -> dict[str, Any]:
    """The keys of the recipe that follow from the data.

    Args:
        given: by the command line.
        start: the configuration to begin with.
        keys: that are known by now.
        cfg: the configuration with these; its data are registered.
        begun: when the command was, by ``time.monotonic``.

    Raises:
        ConfigError: ``--time`` is too short, or is for processes that each choose.
    """
    args, run = given.args, given.run
    register_json_datasets(cfg)
    if run and run.is_of(start.file):
        return {} if args.epochs == run.config.RECIPE.EPOCHS else recipe.fit_schedule(cfg)
    machine = Machine.of(args, cfg.MODEL.DEVICE)
    if args.time is None:
        return recipe.fit_to_data(cfg, machine)
    if run and run.sources:  # the time was for the whole run
        epochs = run.config.RECIPE.EPOCHS
    elif not machine.is_alone:
        raise ConfigError("--time is for processes of one --num-gpus; give --epochs to others.")
    else:
        rules = recipe.rules_for(cfg, machine)
        derived = {rule.key: rule.value for rule in rules if rule.key not in cfg.RECIPE.KEEP}
        show(f"Measuring the time of a step: {STEPS} steps are trained, often in a minute or two")
        step = measure_step(_with(start, derived | keys, args), args.num_gpus)
        spent = time.monotonic() - begun + step.start
        fitted = changed_config(cfg, _words(derived))
        epochs = recipe.epochs_within(fitted, seconds_of(args.time), step.seconds, spent)
        show(f"--time {args.time}: a step takes {step.seconds:.3g} s, so {epochs:.3g} epochs fit")
    cfg.RECIPE.EPOCHS = epochs
    return {"RECIPE.EPOCHS": epochs, **recipe.fit_to_data(cfg, machine)}
