"""The size of the input, and tiles, by the images and objects to train on.

docs/results.md and projects/benchmarks/detectors.md have the measurements.
"""

from __future__ import annotations

import bisect
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from detectron2.config import CfgNode
from detectron2.structures import BoxMode

from lambda_det.detection.data.tile_records import number_of_whole_images
from lambda_det.detection.registry import ARCHITECTURES
from lambda_det.detection.tiles import Tiling, why_not_cut
from lambda_det.errors import ConfigError, listed
from lambda_det.modeling.specs import STRIDE
from lambda_det.own_data.flags import AUTO

# ---- The size of the input
LARGEST_SCALE = 2  # guess: of an image, since more pixels than that show nothing new
# Strips of 10:1 to 30:1: 65.8 AP with the pixels of 384x512, 60.6 with the sizes of photographs
_LARGEST_IMAGE = 1.5  # guess: pixels of the longest, as a batch is padded to its largest image
_LEAST_GAIN = 1.1  # guess: by which another limit of the longer side must enlarge the shorter one
# ---- Small objects
# An anchor of a level matches objects of its size only if its side has this number of strides: half
# a stride away, a square of four strides overlaps an equal one by an IoU of 0.62.
STRIDES_PER_ANCHOR = 4
SMALL = 12  # guess: sides of so many pixels in the input, and fewer, are hardly found
MOST = 0.5  # guess: share of small objects from which on images are cut. Of whiteflies 89 % are
# small: AP50 0.03 after 119 steps on whole images, 82.0 on tiles
LEAST_BOXES = 50  # guess: fewer say too little
LEAST_OF_CLASS = 10  # guess: a class of fewer says little about its sizes
# Shares of the objects of a class, on average over the classes, as AP is (facades: 1.5 AP more than
# over all objects): up to a third the size stays, and a tenth gets no larger input. Both are
# guesses, with which droplets gain 5 AP. A map of stride 4 beside it had 19 AP fewer on circuit
# boards, 6 to 8 fewer in short trainings on whiteflies, and no more on droplets and tomatoes
_FEW_SMALL_TO_KEEP, _FEW_SMALL = 1 / 3, 0.1
_LARGEST_COST = 2.0  # guess: time of a step, as a multiple of the recipe's
# A step takes a constant and a time that grows with the pixels. MobileNet-v2 on one core: 0.71 and
# 0.99 s at 384 and 512 pixels
_CONSTANT, _OF_PIXELS = 0.3, 0.7
# ---- Tiles
_LONGEST = 0.9  # guess: share of the objects that are not longer than the overlap
# Guesses, of the side of a tile: an object at the border lacks its surroundings
_LARGEST_OVERLAP, _LEAST_OVERLAP = 0.4, 0.125
_WHOLE = 1.5  # guess: images are whole, and others tiles of such, if they are so much longer

SIZES = tuple(f"INPUT.{edge}_SIZE_{use}" for edge in ("MIN", "MAX") for use in ("TRAIN", "TEST"))
TILES = ("INPUT.TILE.SIZE", "INPUT.TILE.OVERLAP")
_RPN_MAPS = "MODEL.RPN.IN_FEATURES"
Record = Mapping[str, Any]
Row = tuple[str, str, str]  # of the table of choices: what, the choice, and why


class Choice(NamedTuple):
    """A key with the value that follows from data and machine, and the reason."""

    key: str
    value: Any
    reason: str


class Asked(NamedTuple):
    """What a command line says of the input.

    Attributes:
        given: its keys.
        size: pixels of the shorter side in the test; None if it follows from the data.
        tile: the side of tiles, 0 for none, or "auto"; None if it follows from the data.
        is_chosen: whether the recipe was chosen, so that sizes and maps follow; those of a
            configuration that is named stay.
    """

    given: Collection[str] = ()
    size: int | None = None
    tile: int | str | None = None
    is_chosen: bool = False

    @property
    def has_size(self) -> bool:
        return self.size is not None or not set(SIZES).isdisjoint(self.given)


class Input(NamedTuple):
    """What follows from the data for the input.

    Attributes:
        rows: of the table of choices, before the keys.
        choices: keys of sizes, tiles and maps.
        warnings: to be said before a long training.
    """

    rows: list[Row]
    choices: list[Choice]
    warnings: list[str]


def merge(cfg: CfgNode, choices: Iterable[Choice], kept: Collection[str]) -> None:
    """Set the chosen values, but not those of keys that are kept."""
    for key, value, _ in choices:
        if key not in kept:
            cfg.merge_from_list([key, value])


class Facts(NamedTuple):
    """The facts of images, or of their tiles, that the rules need.

    Attributes:
        images: their number, with those that are kept as background.
        whole_images: the files of these images.
        boxes: [N, 2] widths and heights of the objects, in pixels of the image.
        frames: [N, 2] widths and heights of the images that they are in.
        classes: [N] their classes.
        masks: share of the objects that have one.
        most: the most objects of one image.
    """

    images: int
    whole_images: int
    boxes: np.ndarray
    frames: np.ndarray
    classes: np.ndarray
    masks: float
    most: int

    @classmethod
    def of(cls, records: Sequence[Record]) -> Facts:
        """Crowds and empty boxes do not count."""
        found, masks, most = [], 0, 0
        for record in records:
            objects = [a for a in record.get("annotations", ()) if not a.get("iscrowd")]
            most = max(most, len(objects))
            for one in objects:
                box = BoxMode.convert(list(one["bbox"]), one["bbox_mode"], BoxMode.XYWH_ABS)
                found.append([*box[2:], record["width"], record["height"], one["category_id"]])
                masks += bool(one.get("segmentation"))
        table = np.array(found, float).reshape(-1, 5)
        masks /= max(len(table), 1)
        table = table[(table[:, :2] > 0).all(1)]
        whole = number_of_whole_images(records)
        parts = table[:, :2], table[:, 2:4], table[:, 4].astype(int)
        return cls(len(records), whole, *parts, masks, most)

    def sides_in_test(self, cfg: CfgNode) -> np.ndarray:
        """The square roots of the areas of the boxes, at the size of images in the test."""
        frames, longest = self.frames, cfg.INPUT.MAX_SIZE_TEST
        scale = np.minimum(_side_in_test(cfg) / frames.min(1), longest / frames.max(1))
        return scale * np.sqrt(self.boxes.prod(1))

    def by_class(self, values: np.ndarray) -> dict[int, np.ndarray]:
        """Values of the objects by class. Rare classes count only if all are rare."""
        found = {int(one): values[self.classes == one] for one in np.unique(self.classes)}
        common = {one: of for one, of in found.items() if len(of) >= LEAST_OF_CLASS}
        return common or found


# ------------------------------------------------------------------------- sizes, tiles and the map
def fit_input(
    cfg: CfgNode,
    records: Sequence[Record],
    asked: Asked,
    *,
    classes: Sequence[str],
    others: Sequence[Record],
) -> Input:
    """The size of the input, and tiles.

    Args:
        cfg, records, asked, classes, others: as of :func:`lambda_det.own_data.fit.fit`.

    Raises:
        ConfigError: the given tiles cannot be.
    """
    if TILES[0] in asked.given:
        asked = asked._replace(tile=cfg.INPUT.TILE.SIZE)
    is_cut = asked.tile is None and Tiling.from_config(cfg) is not None
    facts = Facts.of(records)
    if not len(facts.boxes) or (is_cut and not asked.is_chosen):
        return Input([], [], [])
    sizes = np.array([[one["width"], one["height"]] for one in records], float)
    size = _usual_size(cfg, sizes, asked)
    small = _small_objects(size.cfg, facts, classes)
    rows, tiling, warnings = _tiles(cfg, small, facts, sizes, asked, others)
    choices: list[Choice] = []
    if tiling:
        choices = [
            Choice(TILES[0], tiling.size, "for tiles"),
            Choice(TILES[1], tiling.overlap, "for tiles"),
        ]
        if isinstance(asked.tile, int) and not asked.has_size:
            sized = sizes_for(cfg, tiling.size)
            choices += [Choice(key, v, "objects keep their pixels") for key, v in sized.items()]
            cfg = cfg.clone()
            merge(cfg, choices, asked.given)
        facts = facts._replace(frames=np.minimum(facts.frames, tiling.size))
        size = _usual_size(cfg, np.minimum(sizes, tiling.size), asked)
    elif asked.tile is not None:
        choices = [Choice(TILES[0], 0, "whole images")]
    if not asked.is_chosen:
        return Input(rows, choices, warnings)
    more, maps = _for_small_objects(size, facts, asked)
    last = {choice.key: choice for choice in (*choices, *size.choices, *maps)}
    return Input([*rows, *size.rows, *more], [*last.values()], warnings)


class _Size(NamedTuple):
    """The size of the input by the shapes and sizes of the images, before objects count.

    Attributes:
        cfg: with these sizes.
        largest: shorter side of images that are not enlarged any further.
    """

    cfg: CfgNode
    largest: float
    choices: list[Choice]
    rows: list[Row]


def _usual_size(cfg: CfgNode, sizes: np.ndarray, asked: Asked) -> _Size:
    """The size of the input for images of widths and heights [N, 2]."""
    choices: list[Choice] = []
    rows: list[Row] = []
    if not asked.is_chosen:
        return _Size(cfg, math.inf, choices, rows)
    cfg = cfg.clone()
    shape = sizes_by_shape(cfg, sizes) if set(SIZES).isdisjoint(asked.given) else {}
    if shape:
        photograph = f"{cfg.INPUT.MIN_SIZE_TEST} x {cfg.INPUT.MAX_SIZE_TEST}"
        why = f"for these shapes, with the pixels of {photograph}"
        choices += [Choice(key, value, why) for key, value in shape.items()]
        merge(cfg, choices, ())
        longest = cfg.INPUT.MAX_SIZE_TEST / cfg.INPUT.MIN_SIZE_TEST
        rows = [("shapes of images", f"up to {longest:.3g}:1", f"as many pixels as {photograph}")]
    largest = LARGEST_SCALE * statistics.median(sizes.min(1))
    now = max(cfg.INPUT.MIN_SIZE_TEST, *cfg.INPUT.MIN_SIZE_TRAIN)
    side, why = asked.size, "--size"
    if side is None and largest < now:
        side = cfg.INPUT.MIN_SIZE_TEST * largest / now
        why = f"of images enlarged {LARGEST_SCALE} times at most"
    if side is not None:
        sized = sizes_for(cfg, side)
        choices += [Choice(key, v, why) for key, v in sized.items() if key not in asked.given]
        merge(cfg, choices, ())
    return _Size(cfg, largest, choices, rows)


def sizes_by_shape(cfg: CfgNode, sizes: np.ndarray) -> dict[str, Any]:
    """The sizes with the recipe's number of pixels whose shorter side is largest for most images.

    A recipe's sizes are for photographs. Its budget is their pixels, which are time and memory, and
    not the longer side: strips and panoramas get a larger limit of it, because objects need the
    shorter side. The limit is tried at the shapes that occur. The geometric mean of the shorter
    sides decides, so that a few strips among photographs change nothing.

    Args:
        cfg: has the sizes for photographs.
        sizes: [N, 2] widths and heights of images.

    Returns:
        Values by their keys; {} where the recipe's are as good.
    """
    if cfg.INPUT.LSJ.ENABLED:
        return {}
    usual = cfg.INPUT.MAX_SIZE_TEST / cfg.INPUT.MIN_SIZE_TEST
    shapes = sizes.max(1) / sizes.min(1)

    def shorter_side(limit: float) -> float:
        """The largest shorter side, as a share of the recipe's."""
        pixels = np.mean(np.where(shapes <= limit, shapes, limit**2 / shapes))
        return min(1.0, math.sqrt(usual / pixels), math.sqrt(_LARGEST_IMAGE * usual / limit))

    def mean_side(limit: float) -> float:
        return shorter_side(limit) * math.exp(np.mean(np.log(np.minimum(1, limit / shapes))))

    limits = np.unique(np.quantile(shapes, np.linspace(0, 1, 21)))
    best = max([usual, *limits[limits > usual]], key=mean_side)
    if mean_side(best) < _LEAST_GAIN * mean_side(usual):
        return {}
    sized = sizes_for(cfg, cfg.INPUT.MIN_SIZE_TEST * shorter_side(best))
    return {
        key: round(value * best / usual) if ".MAX_" in key else value
        for key, value in sized.items()
    }


def sizes_for(cfg: CfgNode, side: float) -> dict[str, Any]:
    """The sizes of images in training and in the test, all changed by one factor.

    Args:
        cfg: has the sizes now.
        side: pixels of the shorter side of images in the test.

    Returns:
        Values by their keys.

    Raises:
        ConfigError: images keep their own sizes in the test.
    """
    factor = side / _side_in_test(cfg)
    keys = (*SIZES, "INPUT.LSJ.SIZE") if cfg.INPUT.LSJ.ENABLED else SIZES
    sizes = {key: attrgetter(key)(cfg) for key in keys}
    return {
        key: tuple(round(factor * one) for one in value)
        if isinstance(value, tuple | list)
        else round(factor * value)
        for key, value in sizes.items()
    }


def _side_in_test(cfg: CfgNode) -> int:
    """Pixels of the shorter side of images in the test, which are to be some."""
    if not cfg.INPUT.MIN_SIZE_TEST:
        raise ConfigError(
            "INPUT.MIN_SIZE_TEST is 0, so images keep their own sizes in the test, and no other "
            "size can be chosen by it; give pixels of the shorter side."
        )
    return cfg.INPUT.MIN_SIZE_TEST


def _small_objects(cfg: CfgNode, facts: Facts, names: Sequence[str]) -> str:
    """That most objects are too small in the input, in words; "" if they are not."""
    # Most of all objects count, so that a rare large class hides nothing, and most of a class, on
    # average over the classes, as AP does
    sides = facts.sides_in_test(cfg)
    shares = {one: np.mean(of < SMALL) for one, of in facts.by_class(sides).items()}
    share = np.mean(sides < SMALL)
    if len(sides) < LEAST_BOXES or max(share, statistics.fmean(shares.values())) <= MOST:
        return ""
    base = cfg.INPUT.MIN_SIZE_TEST
    words = f"{share:.0%} of the objects have less than {SMALL} pixels in an input of {base}"
    if len(shares) > 1 and names:
        worst = sorted(shares, key=shares.get, reverse=True)
        words += f" ({listed(f'{shares[one]:.0%} of {names[one]}' for one in worst)})"
    return words


# ------------------------------------------------------------------------------------------- tiles
def _tiles(
    cfg: CfgNode,
    why: str,
    facts: Facts,
    sizes: np.ndarray,
    asked: Asked,
    others: Sequence[Record],
) -> tuple[list[Row], Tiling | None, list[str]]:
    """Whether images are cut, as the sentence ``why`` may say, and into which tiles; warnings."""
    # Tiles are as large as the input, so that objects keep their pixels, or larger where most
    # objects would not fit into the overlap of two tiles, or where even the smallest tenth can be
    # reduced. Warnings say where most objects are too small and nothing is cut, and where the parts
    # have other scales.
    beside = _tiles_of(facts, sizes, others)
    wanted = asked.tile
    if wanted is None and asked.is_chosen and not asked.has_size:
        wanted = beside or (AUTO if why else None)
    refusal = why_not_cut(cfg)
    if refusal and asked.tile:
        raise ConfigError(f"--tile is {asked.tile}, and {refusal}; leave it out.")
    lengths = facts.boxes.max(1)
    long = float(np.quantile(lengths, _LONGEST, method="inverted_cdf"))
    by_rule = _side_of_tiles(cfg, facts, long)
    side = wanted if isinstance(wanted, int) else by_rule
    largest = max([sizes.max(), *(max(one["width"], one["height"]) for one in others)])
    reason = why or "--tile auto"
    if isinstance(asked.tile, int):
        reason = "given"
    elif wanted == beside:
        reason = "the images to train on are such tiles, and others are whole"
    if wanted and not refusal and side < largest:
        overlap = cfg.INPUT.TILE.OVERLAP
        if overlap < 0:
            overlap = round(max(_LEAST_OVERLAP * side, min(long, _LARGEST_OVERLAP * side)))
        row = ("tiles", f"{side} pixels, overlap {overlap}", reason)
        return [row], Tiling(side, overlap), []
    rows, warnings = [], []
    if wanted:
        no_larger = f"no image is larger than a tile of {side} pixels"
        rows = [("tiles", "none", f"{reason}, but {refusal}" if refusal else no_larger)]
    if why:
        advice = "images with more pixels would show them"
        if by_rule < largest and not refusal:
            advice = "--tile auto cuts the images into tiles, in which objects keep their pixels"
        warnings.append(f"{why}, so few will be found; {advice}.")
    if beside and asked.tile is None:
        warnings.append(
            f"The images to train on are tiles of {beside} pixels, and others are whole, where "
            "objects would be smaller; "
            f"{refusal or f'--tile {beside} evaluates and predicts on such tiles'}."
        )
    return rows, None, warnings


def _side_of_tiles(cfg: CfgNode, facts: Facts, long: float) -> int:
    """The side of a tile by the rule, in pixels; ``long`` is the length for the overlap."""
    least = STRIDES_PER_ANCHOR * _finest_stride(cfg) or STRIDE
    spare = max(1.0, float(np.quantile(np.sqrt(facts.boxes.prod(1)), _FEW_SMALL)) / least)
    side = max(cfg.INPUT.MIN_SIZE_TEST * spare, long / _LARGEST_OVERLAP)
    return STRIDE * math.ceil(side / STRIDE)


def _tiles_of(facts: Facts, sizes: np.ndarray, others: Sequence[Record]) -> int | None:
    """The side of the tiles that the training images are already, while another part is whole."""
    # Most are of the largest size, other images are longer, and objects have rather as many pixels
    # in both than the same share of an image. None where they are no tiles.
    theirs = Facts.of(others)
    if min(len(facts.boxes), len(theirs.boxes)) < LEAST_OF_CLASS:
        return None
    sides = sizes.max(1)
    longer = np.median([max(one["width"], one["height"]) for one in others]) / sides.max()
    if np.mean(sides == sides.max()) < MOST or longer < _WHOLE:
        return None
    ratio = np.median(theirs.boxes.prod(1)) / np.median(facts.boxes.prod(1))  # of areas
    return int(sides.max()) if ratio < longer else None


# ------------------------------------------------------------------------------- small objects
def _for_small_objects(size: _Size, facts: Facts, asked: Asked) -> tuple[list[Row], list[Choice]]:
    """A larger input, where many objects are below four strides of the finest map."""
    cfg, finest, sides = size.cfg, _finest_stride(size.cfg), facts.sides_in_test(size.cfg)
    base = cfg.INPUT.MIN_SIZE_TEST
    if len(sides) < LEAST_BOXES or not finest:
        return [], []
    by_class = [*facts.by_class(sides).values()]

    def below(least: float, factor: float = 1.0) -> float:
        """The share of the objects of a class below a side, on average over the classes."""
        return statistics.fmean(np.mean(factor * of_class < least) for of_class in by_class)

    least = STRIDES_PER_ANCHOR * finest
    before = f"{below(least):.0%} below {least} pixels at {base}"
    why = (
        f"{least} pixels are {STRIDES_PER_ANCHOR} strides of the finest map; up to a third may be "
        "smaller; the share is the mean over the classes"
    )
    rows = [("small objects", before, why)]
    if below(least) <= _FEW_SMALL_TO_KEEP:
        return rows, []
    side = base
    if asked.has_size:
        limit = "the size is given"
    elif cfg.RECIPE.MEMORY:
        limit = "--size N takes more of the GPU's memory than was counted"
    else:
        affordable = side * math.sqrt((_LARGEST_COST - _CONSTANT) / _OF_PIXELS)
        limit = (
            f"{_LARGEST_COST:g} times at most, with images enlarged {LARGEST_SCALE} times at most"
        )
        occurring = np.unique(np.concatenate(by_class))
        smallest = occurring[bisect.bisect_right(occurring, _FEW_SMALL, key=below) - 1]
        wanted = STRIDE * math.ceil(side * least / smallest / STRIDE)
        most = STRIDE * math.floor(min(affordable, size.largest) / STRIDE)
        side = max(side, min(wanted, most))
    factor = side / base
    cost = f"a step takes {_CONSTANT + _OF_PIXELS * factor**2:.1f} times as long"
    after = f"{below(least, factor):.0%} below {least} pixels at {side}"
    rows.append(("", after, f"{cost}; {limit}"))
    changes = sizes_for(cfg, side) if side > base else {}
    return rows, [Choice(key, value, "for small objects") for key, value in changes.items()]


def _finest_stride(cfg: CfgNode) -> int:
    """The smallest stride of the maps with anchors; 0 where there are none, or unusual ones."""
    maps = ARCHITECTURES[cfg.MODEL.META_ARCHITECTURE].anchor_maps
    is_usual = cfg.MODEL.ANCHOR_GENERATOR.NAME == "DefaultAnchorGenerator"
    if not maps or not is_usual or (maps == _RPN_MAPS and not has_rpn(cfg)):
        return 0
    levels = [re.fullmatch(r"(?:p|res)(\d)", name) for name in attrgetter(maps)(cfg)]
    if not all(levels):
        return 0
    return min(2 ** int(level[1]) for level in levels)


def has_rpn(cfg: CfgNode) -> bool:
    """Whether Detectron2's own RPN proposes objects."""
    maps = ARCHITECTURES[cfg.MODEL.META_ARCHITECTURE].anchor_maps
    return maps == _RPN_MAPS and cfg.MODEL.PROPOSAL_GENERATOR.NAME == "RPN"
