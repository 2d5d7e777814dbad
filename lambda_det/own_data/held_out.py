"""Hold out a share of the images of a training file to evaluate on."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lambda_det.detection.data.coco_format import READER, name_labels, read_lists
from lambda_det.detection.data.copies import are_frames, copies, numbered_runs
from lambda_det.detection.data.ground_truth import file_report
from lambda_det.errors import ConfigError, DataError, counted, listed, refused
from lambda_det.own_data.coco_files import stem_with_part, write_coco
from lambda_det.own_data.fit_input import LEAST_BOXES
from lambda_det.training.log import show

logger = logging.getLogger(__name__)


SHARES = (0.1, 0.2, 0.3, 0.5)  # the shares that are tried where none is given


class Split(NamedTuple):
    """Which images are held out.

    Attributes:
        share: of the images, above 0 and below 1: at least so many, by the hash of their names.
        group_by: a regular expression. Images stay on one side if their names have the same match
            (the first group of an expression with groups); an image without a match is alone. The
            path in the labels is searched or, where no two images or all are one group by it, the
            file's own name. Copies of one image stay on one side, whatever the expression.
        stratify: each class, and not only all images together, has its share, as far as groups
            allow.
    """

    share: float
    group_by: str = ""
    stratify: bool = False


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def smallest_share(json_file: str, image_folder: str, split: Split) -> float:
    """The smallest share that leaves images of each class; 0.0 for none, or the largest that is
    tried where groups or classes are asked for, if :func:`hold_out` says why.

    Where it can be, two images or more are held out: the best checkpoint, the threshold and the AP
    of the run would be of a single one.

    Args:
        json_file, image_folder: as of :func:`hold_out`.
        split: its groups and classes; its share does not count.
    """
    possible, refused_one = 0.0, SHARES[-1] if split.group_by or split.stratify else 0.0
    for share in SHARES:
        with contextlib.suppress(DataError):
            _, val = _halves(json_file, image_folder, split._replace(share=share))
            if not val["annotations"]:  # there would be nothing to measure by
                refused_one = 0.0
                continue
            possible = possible or share
            if len(val["images"]) > 1:
                return share
    return possible or refused_one


def hold_out(json_file: str, image_folder: str, split: Split, *, folder: Path) -> tuple[str, str]:
    """Split an annotation file in two.

    Args:
        json_file: annotations in COCO's format.
        image_folder: of its images.
        split: which images are held out.
        folder: for the two files.

    Returns:
        The files to train on and to evaluate on.

    Raises:
        ConfigError: the split is invalid.
        DataError: the file is not in COCO's format; or no image would be held out, or none would
            remain, in all or of a class.
    """
    train, val = _halves(json_file, image_folder, split)
    report = file_report(json_file, image_folder)
    labels, held_out, objects = report.json_file, len(val["images"]), len(val["annotations"])
    show(
        f"Held out to evaluate on: {held_out} of {held_out + len(train['images'])} images of "
        f"{labels}, by their names, with {numbered(objects)}; copies stay on one side"
    )
    if not split.group_by and (hint := films(report.paths)):
        logger.warning(f"{labels}: {hint}")
    if unseen := _classes(train) - _classes(val):
        logger.warning(
            f"--val-share {split.share:g} of {labels} holds out no image of "
            f"{_named(unseen, report.categories)}, whose AP remains unknown; give a larger share, "
            "--stratify, or a file with --test-json"
        )
    stem = stem_with_part(json_file)
    return write_coco(train, folder, f"{stem}_kept"), write_coco(val, folder, f"{stem}_held_out")


def numbered(objects: int) -> str:
    """The number of objects to evaluate on, and whether AP by so few is rough."""
    few = ", so few that AP is rough" if objects < LEAST_BOXES else ""
    return f"{counted(objects, 'object')}{few}"


def films(files: Sequence[str]) -> str:
    """A sentence on images that look like frames of films, of which random ones would be held out;
    "" for others.

    They have names that differ by a number alone, and neighbours are far more alike than others.
    """
    runs = numbered_runs(files, by_folder=True)
    if not are_frames(runs):
        return ""
    # a share would have all of it or nothing
    is_one = len(runs) == 1 and 2 * len(runs[0]) > len(files)
    advice = (
        r"--group-by '^(.*?)\d+\.\w+$' keeps each film on one side, where that leaves objects of "
        "each class"
    )
    return (
        f"{sum(map(len, runs))} images look like frames of {counted(len(runs), 'film')}, such as "
        f"{Path(runs[0][0]).name}, whose neighbours are alike. AP on images that are held out at "
        f"random is then too good; {_ONE_FILM if is_one else advice}"
    )


_ONE_FILM = (
    "move the labels of its last tenth into a folder val (of YOLO also the images, which data.yaml "
    "names)"
)


def _halves(
    json_file: str, image_folder: str, split: Split
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What :func:`hold_out` writes."""
    if not 0 < split.share < 1:
        raise ConfigError(
            f"--val-share {split.share:g}: give a share between 0 and 1, such as 0.1."
        )
    report = file_report(json_file, image_folder)
    names, labels, content = report.categories, report.json_file, read_lists(json_file)
    read = name_labels(content, labels)
    images = content["images"]
    files = {file["name"]: file["file_name"] for file in report.files}
    held_out = _held_out(content, files, split)
    option = f"--val-share {split.share:g} of {labels}"
    if len(held_out) in (0, len(images)):
        raise DataError(
            f"{option} would hold out {len(held_out)} of {len(images)} images; give another share, "
            "or a file with --test-json."
        )
    train, val = (part_of(content, held_out, keep) for keep in (False, True))
    val[READER] = read | {"labels": f"{labels.removesuffix(' (train)')} (held out of train)"}
    if gone := _classes(content) - _classes(train):
        raise DataError(
            f"{option} would leave no image of {_named(gone, names)} to train on; give a smaller "
            "share, or a file with --test-json."
        )
    return train, val


def _held_out(content: Mapping[str, Any], files: Mapping[str, str], split: Split) -> set[Any]:
    """The ids of the images to hold out; ``files`` are the images' by their names in the file."""
    # Names may be paths of another machine
    names = [image["file_name"] for image in content["images"]]
    given = _groups_by(split.group_by, names) if split.group_by else None
    group_of = copies({name: Path(files.get(name, name)) for name in names}, given)
    groups = defaultdict(list)
    for image, name in zip(content["images"], names, strict=True):
        groups[group_of[name]].append(image["id"])
    held_out = set()
    if split.stratify:
        classes = defaultdict(set)
        for annotation in content["annotations"]:
            classes[annotation["image_id"]].add(annotation["category_id"])
        counts = {
            name: Counter(kind for id in ids for kind in (None, *classes[id]))
            for name, ids in groups.items()
        }
        held_out = {id for name in _stratified(counts, split.share) for id in groups[name]}
    # Up to the share by the hash of the name, so an image that is added later moves one other at
    # most. Groups of more images than the share come last, the smallest first, and one group stays
    wanted = round(split.share * len(names), 6)  # a tenth of 70 is above 7 by an error of floats
    for name in sorted(groups, key=lambda name: (max(len(groups[name]), wanted), _digest(name))):
        if len(held_out) < wanted and len(held_out) + len(groups[name]) < len(names):
            held_out.update(groups[name])
    return held_out


def _groups_by(expression: str, names: Sequence[str]) -> dict[str, str]:
    """The group of each name: the match of the expression, or the name itself."""
    with refused(ConfigError, f"--group-by {expression!r} is no regular expression", "", re.error):
        pattern = re.compile(expression)
    for by_path in (True, False):
        groups = {}
        for name in names:
            match = pattern.search(name if by_path else re.split(r"[/\\]", name)[-1])
            groups[name] = (match[min(pattern.groups, 1)] or "") if match else name
        if 1 < len({*groups.values()}) < len(groups):
            return groups
    raise ConfigError(
        f"--group-by '{expression}' puts all images into one group, or each into its own, by names "
        f"such as {names[0]}. Give another expression; where they are one film, {_ONE_FILM}."
    )


def _stratified(counts: Mapping[str, Counter], share: float) -> set[str]:
    """The groups to hold out, such that a share of each class is: Sechidis et al., ECML 2011."""
    # Of each group there are the images of each class, and all of them as None
    left: Counter = sum(counts.values(), Counter())
    wanted = [{kind: part * count for kind, count in left.items()} for part in (share, 1 - share)]
    waiting = dict(sorted(counts.items(), key=lambda row: _digest(row[0])))
    held_out = set()
    while waiting:
        # the rarest class first, and images without objects last
        rare = min(filter(left.get, left), key=lambda kind: (kind is None, left[kind], str(kind)))
        chosen = [name for name in waiting if counts[name][rare]]
        for name in sorted(chosen, key=lambda name: -counts[name][rare]):
            # the part that lacks most, the first one of two
            part = max(wanted, key=lambda kinds: (kinds[rare], kinds[None]))
            if part is wanted[0]:
                held_out.add(name)
            for kind, count in waiting.pop(name).items():
                part[kind] -= count
                left[kind] -= count
    return held_out


def part_of(content: Mapping[str, Any], ids: set[Any], keep: bool = True) -> dict[str, Any]:
    """A file in COCO's format with only the images of these ids, or without them."""
    return {
        **content,
        "images": [i for i in content["images"] if (i["id"] in ids) is keep],
        "annotations": [a for a in content["annotations"] if (a["image_id"] in ids) is keep],
    }


def _classes(content: Mapping[str, Any]) -> set[Any]:
    """The categories that occur."""
    return {annotation["category_id"] for annotation in content["annotations"]}


def _named(categories: set[Any], names: Mapping[Any, str]) -> str:
    return listed(names.get(c, c) for c in sorted(categories))
