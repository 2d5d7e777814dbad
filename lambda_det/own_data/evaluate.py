"""``lambda-det evaluate``: a trained detector on other data, beside the results of its run."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from detectron2.config import CfgNode
from detectron2.evaluation.testing import flatten_results_dict
from omegaconf import DictConfig
from tabulate import tabulate

from lambda_det.detection.data.coco_format import read_json
from lambda_det.detection.data.copies import shared_copies
from lambda_det.detection.data.ground_truth import file_report
from lambda_det.detection.data.outputs import mark_output
from lambda_det.detection.data.registration import is_coco, registered_files
from lambda_det.detection.saved_run import SavedRun, add_checkpoint_flags, open_run
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import (
    ConfigError,
    DataError,
    UserError,
    command_parser,
    counted,
    exit_status,
    listed,
    printable,
)
from lambda_det.files import disk_of, replace_text
from lambda_det.own_data.drafts import identifying_stem
from lambda_det.own_data.labels import (
    COCO,
    as_coco,
    as_single_class,
    give_all_classes,
    refuse_address,
)
from lambda_det.own_data.layouts import find_images, find_parts
from lambda_det.own_data.report.class_results import Detections
from lambda_det.own_data.report.evaluated import evaluate_run
from lambda_det.own_data.report.reading import (
    EVALUATION,
    SCORES,
    Result,
    label_of,
    results_of,
)
from lambda_det.own_data.run_data import FOLDER, read_sources, refusal_of
from lambda_det.training.log import BufferedLog
from lambda_det.training.logged import read_metrics
from lambda_det.training.run_folder import refuse_other_run, save_config
from lambda_det.training.task import EMA, RAW
from lambda_det.weights.loading import load

__all__ = ["ResultsOnData", "evaluate", "main"]

logger = logging.getLogger(__name__)

_PARTS = ("train", "val", "test")
_RESULTS = ("inference", "inference_EMA", "inference_TTA")  # folders of an evaluation's results
_UNFINISHED = {"sentences": ["The evaluation has not ended."], "results": {}, "own": {}}
EXAMPLES = """
On the test part of the data that the run was trained on, or of another folder:
  %(prog)s output/mine --part test
  %(prog)s output/mine --data other/ --part test

On a file of labels, and the page of that:
  %(prog)s output/mine --json labels.json --images pictures/ --report

The last checkpoint, with larger images:
  %(prog)s output/mine --checkpoint last --part val INPUT.MIN_SIZE_TEST 512 INPUT.MAX_SIZE_TEST 800
"""


class _Data(NamedTuple):
    """What is evaluated on.

    Attributes:
        name: of its results' folder.
        labels: a file in COCO's format.
        images: the folder of its pictures.
        source: the user's own labels.
    """

    name: str
    labels: Path
    images: Path
    source: str


@dataclass(frozen=True, repr=False)
class ResultsOnData:
    """A trained detector on some data.

    Attributes:
        folder: with predictions, configuration and log, from which ``lambda-det report`` makes a
            page.
        weights: file and step, for a reader.
        data: the data of the evaluation, and the number of images.
        results: by their names in metrics.json.
        own: results of the run's own evaluation after the same step; {} where there was none.
        trained_on: how many of the images were trained on; None where this is unknown.
        images: number of all images.
        classes: results by class for boxes and, if there are any, for masks.
    """

    folder: Path
    weights: str
    data: str
    results: Mapping[str, Result]
    own: Mapping[str, Result]
    trained_on: int | None
    images: int
    classes: Sequence[Detections] = field(default=())

    def sentences(self) -> list[str]:
        """The weights and the data of the evaluation, and what its figures cannot show."""
        lines = [f"{self.weights}, evaluated on {self.data}."]
        if self.trained_on is None:
            lines.append("Whether these images were trained on cannot be seen.")
        elif self.trained_on:
            lines.append(
                f"{self.trained_on} of these {self.images} images were trained on, or are copies "
                "of training images: the figures say little of new images."
            )
        return lines

    def to_dict(self) -> dict[str, float]:
        """The results by the names of :attr:`lambda_det.Run.evaluations`, such as "box AP"."""
        return {label_of(n, with_weights=False): r.value for n, r in self.results.items()}

    def __repr__(self) -> str:
        return str(self)  # the last line of a notebook's cell shows it

    def __str__(self) -> str:
        rows = []
        for name, result in self.results.items():
            own = self.own.get(name)
            by_chance = "" if result.low is None else f"{result.low:.1f} to {result.high:.1f}"
            value = f"{result.value:.1f}"
            rows.append((label_of(name), value, by_chance, f"{own.value:.1f}" if own else ""))
        head = ("", "here", "by chance of the images", "at the run's own evaluation")
        parts = ["\n".join(self.sentences()), tabulate(rows, head, disable_numparse=True)]
        for detections in self.classes:
            kind = {"bbox": "boxes", "segm": "masks"}[detections.iou_type]
            classes = [
                (printable(c.name), c.objects, _figure(c.ap), _figure(c.ap50))
                for c in sorted(detections.classes, key=lambda c: -c.objects)
            ]
            parts.append(tabulate(classes, (kind, "objects", "AP", "AP50"), disable_numparse=True))
        parts.append(f"Predictions are in {self.folder}")
        return "\n\n".join(parts)


def _figure(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1f}"


def evaluate(
    run: str | Path,
    *,
    data: str | None = None,
    part: str | None = None,
    labels: str | None = None,
    images: str | None = None,
    output: str | Path | None = None,
    checkpoint: str = "best",
    raw: bool = False,
    opts: Sequence[str] = (),
) -> ResultsOnData:
    """Evaluate a trained detector, and write the results to a separate folder.

    Args:
        run: its folder, or one of its checkpoints.
        data: the folder of a data set; None for that of the run.
        part: "train", "val" or "test"; None for the test part, or the only existing one.
        labels, images: a file or folder of labels in place of ``data``, and its pictures.
        output: the folder for the results, new or of an earlier evaluation, whose results are
            replaced; None for one below "evaluations" of the run's.
        checkpoint, raw, opts: of :func:`lambda_det.detection.saved_run.open_run`.

    Raises:
        UserError: one sentence on what cannot work.
    """
    saved = open_run(run, checkpoint, raw=raw, opts=opts)
    home = Path(saved.origin.file).parent
    with contextlib.ExitStack() as stack:
        draft = stack.enter_context(tempfile.TemporaryDirectory(prefix="lambda_det_"))
        log = stack.enter_context(BufferedLog(quiet=True))
        chosen = _data(saved, home, data, part, labels, images, Path(draft))
        folder = Path(output) if output else home / "evaluations" / (chosen.name if chosen else "")
        stack.enter_context(disk_of(folder))
        refuse_other_run(folder, "--output", resumes=False)
        if output:
            _refuse_other_files(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_evaluation(folder):
            mark_output(folder)
            _begin(folder)
        if chosen:
            copied = folder / f"{chosen.name}.json"
            if copied.absolute() != chosen.labels.absolute():
                copied.write_bytes(chosen.labels.read_bytes())
            chosen = chosen._replace(labels=copied)
        config = _configuration(saved, folder, chosen)
        task = DetectionTask(config).prepare(train=False)
        task.check_weights(saved.content, saved.origin.file)
        task.check_data(train=False)
        for name in _RESULTS:  # those of an earlier evaluation may be of other weights
            if (folder / name).exists():
                shutil.rmtree(folder / name)
        _begin(folder)
        (folder / "log.txt").unlink(missing_ok=True)  # its warnings were of other data
        log.open(str(folder))
        save_config(task)
        model = task.build_model()
        averaged = saved.origin.averaged
        load(model, saved.origin.file, saved.content, complete=True, averaged=averaged)
        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
            values = task.evaluate({EMA if averaged else RAW: model}, final=True)
    records = [{"iteration": 0, **flatten_results_dict(values)}]
    own = results_of(read_metrics(home), averaged, saved.origin.step, SCORES)
    files, trained_on = _pictures(task.parts.test_names), None
    if trained := _trained_pictures(saved.config):
        pairs, _ = shared_copies({"train": trained, "test": files})
        trained_on = len({file for file, _ in pairs})
    where = chosen.source if chosen else ", ".join(task.parts.test_names)
    classes: Sequence[Detections] = ()
    with contextlib.suppress(UserError):  # the model predicts semantic masks, or nothing
        classes = evaluate_run(folder).results
    evaluated = ResultsOnData(
        folder,
        str(saved.origin),
        f"{counted(len(files), 'image')} of {printable(where)}",
        results_of(records, averaged, endings=SCORES),
        own,
        trained_on,
        len(files),
        classes,
    )
    with disk_of(folder):
        _keep(evaluated)
    return evaluated


def _data(
    saved: SavedRun,
    home: Path,
    data: str | None,
    part: str | None,
    labels: str | None,
    images: str | None,
    draft: Path,
) -> _Data | None:
    """The data that the flags name; None for the data on which the run is evaluated.

    Raises:
        ConfigError: flags do not go together.
        DataError: there is no such part, or it has objects of classes that the run does not have.
    """
    if bool(data) + bool(labels) > 1 or (images and not labels) or (labels and part):
        raise ConfigError("Give --data with or without --part, or --json with or without --images.")
    if isinstance(saved.config, DictConfig):
        if data or labels or part:
            raise ConfigError(
                "The run of a LazyConfig is evaluated on the data that its nodes say: change "
                "dataloader.test, and evaluate with --eval-only and train.init_checkpoint."
            )
        return None
    for place in (data, labels, images):
        refuse_address(place or "")
    # Most formats list no classes: those of their objects would be sorted, and some may be missing
    classes = saved.classes.get("thing_classes", ())
    is_single = read_sources(home).get("single_class", False)
    if labels:
        if not Path(labels).exists():
            raise DataError(f"The labels {labels} of --json do not exist.")
        pictures = images or str(find_images(labels))
        if is_single:
            (file,) = as_coco((labels, pictures), folder=draft)
            file = as_single_class(file, draft)
        else:
            (file,) = as_coco((labels, pictures), folder=draft, classes=classes)
        return _named(file, pictures, labels)
    if data:
        form, places = find_parts(data, folder=draft)
        parts = {p.name: (str(p.labels), str(p.images), p.source) for p in places}
        where = data
    else:
        parts, where = _parts_of_run(saved.config, home), str(home)
    if not parts and part is None:
        return None
    if part is None:
        part = next(name for name in ("test", "val", "train") if name in parts)
    if part not in parts:
        raise DataError(
            f"{where} has no part {part}, only {listed(parts)}; name other data with --data or "
            "--json."
        )
    if data:
        file, pictures, source = parts[part]
        if is_single:
            file = as_single_class(file, draft)
        elif form != COCO:
            # only this part: another one may have objects of classes that the run does not have
            content = read_json(file)
            give_all_classes([content], classes)
            Path(file).write_text(json.dumps(content), "utf-8")
        return _named(file, pictures, source)
    advice = (
        f"{where} keeps the labels of its part {part} as they were when it began; correct your "
        f"own, and evaluate with --data DIR --part {part}."
    )
    return _named(*parts[part], advice)


def _parts_of_run(cfg: CfgNode, home: Path) -> dict[str, tuple[str, str, str]]:
    """The parts of the data that were prepared for a run."""
    files = {"train": ("TRAIN_JSON", "TRAIN_IMAGES"), "val": ("TEST_JSON", "TEST_IMAGES")}
    parts = {name: tuple(cfg.DATASETS[key] for key in keys) for name, keys in files.items()}
    if rest := read_sources(home).get("rest"):
        parts["test"] = (str(home / FOLDER / rest[0]), rest[1])
    return {name: (file, images, file) for name, (file, images) in parts.items() if file}


def _named(labels: str, images: str, source: str, advice: str = "") -> _Data:
    """Add a name that identifies the content of the labels.

    Raises:
        DataError: the labels are refused. Here the message names them, and not their copy in the
            folder of the evaluation; it ends with the advice.
    """
    path = Path(labels)
    if refusal := refusal_of(labels, images):
        raise DataError(f"{refusal} {advice}".rstrip())
    return _Data(identifying_stem(path), path, Path(images), source)


def _configuration(saved: SavedRun, folder: Path, data: _Data | None) -> CfgNode | DictConfig:
    """The configuration of the run with other data and another folder."""
    config = copy.deepcopy(saved.config)
    if isinstance(config, DictConfig):
        config.train.output_dir = str(folder)
        return config
    config.OUTPUT_DIR, config.MODEL.WEIGHTS = str(folder), saved.origin.file
    # may have been moved since, and is not needed
    if not Path(config.DATASETS.TRAIN_IMAGES).is_dir():
        config.DATASETS.TRAIN_JSON = config.DATASETS.TRAIN_IMAGES = ""
    if data:
        config.DATASETS.TEST_JSON = str(data.labels.absolute())
        config.DATASETS.TEST_IMAGES = str(data.images.absolute())
    return config


def _pictures(names: Iterable[str]) -> list[str]:
    files: list[str] = []
    for name in names:
        if is_coco(name):
            files += (file["file_name"] for file in file_report(*registered_files(name)).files)
    return files


def _trained_pictures(config: CfgNode | DictConfig) -> list[str]:
    """The files on which a run was trained; [] where that is unknown."""
    if isinstance(config, DictConfig) or not config.DATASETS.TRAIN_JSON:
        return []
    with contextlib.suppress(UserError):
        report = file_report(config.DATASETS.TRAIN_JSON, config.DATASETS.TRAIN_IMAGES)
        return [file["file_name"] for file in report.files]
    return []


def _refuse_other_files(folder: Path) -> None:
    """
    Raises:
        ConfigError: the folder for the results has files, and is not that of an earlier evaluation.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is a file; give a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not _is_evaluation(folder):
        raise ConfigError(
            f"--output {folder} has files that are not those of an evaluation; give a new folder, "
            "or that of an earlier evaluation, whose results are replaced."
        )


def _is_evaluation(folder: Path) -> bool:
    """Whether a folder has the facts of an evaluation, which may not have ended."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return set(json.loads((folder / EVALUATION).read_text("utf-8"))) >= _UNFINISHED.keys()
    return False


def _begin(folder: Path) -> None:
    """Mark a folder as one of an evaluation that has no results yet."""
    replace_text(folder / EVALUATION, json.dumps(_UNFINISHED, indent=1))


def _keep(evaluated: ResultsOnData) -> None:
    """Write the facts for the page of an evaluation."""
    content = {
        "sentences": evaluated.sentences(),
        "results": {name: result._asdict() for name, result in evaluated.results.items()},
        "own": {name: result._asdict() for name, result in evaluated.own.items()},
    }
    replace_text(evaluated.folder / EVALUATION, json.dumps(content, indent=1))


def main(argv: list[str] | None = None) -> int:
    """Do what the words after ``lambda-det evaluate`` say, and return the exit status."""
    parser = command_parser(
        "evaluate",
        "Evaluate a trained detector on a part of its data or on other data: AP, AP by class, how "
        "sure they are, and the run's own beside them.",
        EXAMPLES,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, or one of its checkpoints")
    parser.add_argument("--data", metavar="DIR", help="a data set; default: that of the run")
    parser.add_argument("--part", choices=_PARTS, help="default: test, or the one that there is")
    parser.add_argument("--json", metavar="FILE_OR_DIR", help="labels of any format, instead")
    parser.add_argument("--images", metavar="DIR", help="the folder of their pictures")
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="of the results, new or of an earlier evaluation; default: below RUN/evaluations",
    )
    parser.add_argument(
        "--report", action="store_true", help="also write the page, report.html beside the results"
    )
    parser.add_argument("--device", metavar="D", help="cpu or cuda; default: MODEL.DEVICE")
    add_checkpoint_flags(parser)
    parser.add_argument("opts", nargs="*", help="configuration keys and values")
    args = parser.parse_intermixed_args(argv)
    return exit_status(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    opts = [*args.opts, *(["MODEL.DEVICE", args.device] if args.device else [])]
    evaluated = evaluate(
        args.run,
        data=args.data,
        part=args.part,
        labels=args.json,
        images=args.images,
        output=args.output,
        checkpoint=args.checkpoint,
        raw=args.raw,
        opts=opts,
    )
    print(evaluated)
    if args.report:
        # Matplotlib takes a second
        from lambda_det.own_data.report.run_page import write_report

        print(f"The page is {write_report(evaluated.folder)}")
    else:
        print(f"lambda-det report {evaluated.folder} makes a page of them")
