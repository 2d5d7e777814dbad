"""The size of the input and the finest map of a recipe, fitted to objects and images.

An anchor matches an object of its own size only from four strides of its map on (``recipe.py``):
that map does not resolve smaller objects. Where they are more than a third of the objects of a
class, on average over the classes, as AP is, the recipe gets a map of half the stride, and then a
larger input until they are a tenth. A step takes at most twice the time. The photographs of a test
are up to a quarter larger than the largest of the training, as far as that does not enlarge them.

A recipe's sizes are for photographs. Its budget is their pixels, which are time and memory, and not
the longer side: strips and panoramas get a larger limit of it, because objects need the shorter
side. docs/results.md has what was measured of the rule; its limits are guesses.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from detectron2.config import CfgNode

from lambda_det.modeling.specs import STRIDE
from lambda_det.own_data.recipe import LEAST_BOXES, STRIDES_PER_ANCHOR, map_strides

__all__ = ["LARGEST_SCALE", "SIZES", "FittedInput", "fit_input", "objects_in_input", "sizes_for"]

LARGEST_SCALE = 2  # scale of an image: more pixels than that show nothing new, and take time
LEAST_OF_CLASS = 10  # objects: a class of fewer says little about its sizes
# Shares of the objects of a class, on average over the classes
MOST_SMALL = 1 / 3  # up to which a recipe stays as it is
FEW_SMALL = 0.1  # the smallest tenth gets no larger input
LARGEST_COST = 2.0  # longest time of a step, as a multiple of the recipe's
TEST_SCALE = 1.25  # of the largest size in training, as far as images have these pixels
# The time of a step is a constant plus a time that grows with the pixels. Fitted to the recipe with
# MobileNet-v2 on one core: 0.71 and 0.99 s at 384 and 512 pixels, with the finer map 0.78, 1.19
# and 1.75 s at 384, 512 and 640.
_CONSTANT, _OF_PIXELS, _OF_FINER_MAP = 0.3, 0.7, 0.1
# By which the shorter side has to grow, on average, for another limit of the longer one
_LEAST_GAIN = 1.1
# Pixels of the longest image, as a multiple of the recipe's: a batch is padded to its largest image
_LARGEST_IMAGE = 1.5
SIZES = tuple(f"INPUT.{edge}_SIZE_{use}" for edge in ("MIN", "MAX") for use in ("TRAIN", "TEST"))
_ANCHORS = "MODEL.ANCHOR_GENERATOR.SIZES"
_MAPS = ("MODEL.FPN.IN_FEATURES", "MODEL.RPN.IN_FEATURES", "MODEL.ROI_HEADS.IN_FEATURES")
_FINER = {"res3": "res2", "p3": "p2"}


class _Objects(NamedTuple):
    """The objects of a training set.

    Attributes:
        sides: an array for each class: the square roots of the areas of its boxes, in pixels.
    """

    sides: list[np.ndarray]

    def below(self, least: float) -> float:
        """The share of the objects of a class below a side, on average over the classes."""
        return statistics.fmean(np.mean(of_class < least) for of_class in self.sides)

    def quantile(self, share: float) -> float:
        """The largest side of an object below which at most this share of the objects is."""
        sides = np.unique(np.concatenate(self.sides))
        index = bisect.bisect_right(sides, share, key=self.below)
        return float(sides[index - 1])

    def scaled(self, factor: float) -> _Objects:
        return _Objects([factor * of_class for of_class in self.sides])

    def row(self, least: float, base: float) -> str:
        """The share below a side, in words, where the shorter side of images is ``base``."""
        return f"{self.below(least):.0%} below {least} pixels at {base:g}"


class FittedInput(NamedTuple):
    """The keys that follow from the sizes of images and objects.

    Attributes:
        keys: of the configuration, with their values and the reasons.
        rows: for the table, before the keys: what, the choice, and why.
    """

    keys: dict[str, tuple[Any, str]]
    rows: list[tuple[str, str, str]]


def fit_input(
    cfg: CfgNode,
    images: Collection[Mapping[str, Any]],
    annotations: Iterable[Mapping[str, Any]],
    given: Collection[str],
    size: int | None = None,
) -> FittedInput:
    """Choose the size of the input, and a finer map for small objects.

    Args:
        cfg: the recipe.
        images: with id, width and height, as in COCO's format.
        annotations: as in COCO's format, with everything decided.
        given: keys of the command line. Objects do not change given sizes, maps and anchors.
        size: the given shorter side in the test, in pixels; None if it follows from the data.
    """
    keys: dict[str, tuple[Any, str]] = {}
    rows: list[tuple[str, str, str]] = []
    is_sized = size is not None or not set(SIZES).isdisjoint(given)
    shape = sizes_by_shape(cfg, images) if set(SIZES).isdisjoint(given) else {}
    if shape:
        photograph = f"{cfg.INPUT.MIN_SIZE_TEST} x {cfg.INPUT.MAX_SIZE_TEST}"
        cfg = cfg.clone()
        cfg.merge_from_list([word for pair in shape.items() for word in pair])
        why = f"for these shapes, with the pixels of {photograph}"
        keys |= {key: (value, why) for key, value in shape.items()}
        longest = cfg.INPUT.MAX_SIZE_TEST / cfg.INPUT.MIN_SIZE_TEST
        rows = [("shapes of images", f"up to {longest:.3g}:1", f"as many pixels as {photograph}")]
    own = statistics.median(min(i["width"], i["height"]) for i in images)
    largest = LARGEST_SCALE * own
    base = cfg.INPUT.MIN_SIZE_TEST
    now = max(base, *cfg.INPUT.MIN_SIZE_TRAIN)
    if size is not None:
        base = size
        keys |= {key: (value, "--size") for key, value in sizes_for(cfg, size).items()}
    elif largest < now:
        why = f"of images enlarged {LARGEST_SCALE} times at most"
        sizes = sizes_for(cfg, base * largest / now)
        keys |= {key: (value, why) for key, value in sizes.items() if key not in given}
        base = keys.get("INPUT.MIN_SIZE_TEST", (base, ""))[0]
    if is_sized:
        largest = own = base
    objects = objects_in_input(cfg, images, annotations).scaled(base / cfg.INPUT.MIN_SIZE_TEST)
    strides = map_strides(cfg)
    if sum(map(len, objects.sides)) < LEAST_BOXES or not strides:
        return FittedInput(keys, rows)
    least = STRIDES_PER_ANCHOR * min(strides)
    before = objects.row(least, base)
    why = f"{least} pixels are {STRIDES_PER_ANCHOR} strides of the finest map"
    if len(objects.sides) > 1:
        why += f"; the share is the mean over {len(objects.sides)} classes"
    if objects.below(least) <= MOST_SMALL:
        rows.append(("small objects", before, f"{why}; up to a third, it stays"))
        return FittedInput(keys, rows)
    rows.append(("small objects", before, why))
    finer = {} if {*_MAPS, _ANCHORS}.intersection(given) else _finer_maps(cfg)
    if finer:
        least //= 2
    if is_sized:
        side, limit = base, "the size is given"
    elif cfg.RECIPE.MEMORY:
        side, limit = base, "--size N takes more of the GPU's memory than was counted"
    else:
        side, limit = _side(objects, base, largest, least, bool(finer))
    objects_after = objects.scaled(side / base)
    is_limited = objects_after.below(least) > FEW_SMALL
    cost = f"a step takes {_cost(side / base, bool(finer)):.1f} times as long"
    why = f"{cost}; {limit}" if is_limited else cost
    rows.append(("", objects_after.row(least, side), why))
    changes = finer | (sizes_for(cfg, side) if side > base else {})
    in_test = STRIDE * math.floor(min(TEST_SCALE * side, own) / STRIDE)
    # on strips, the one set of them that was tried, the larger size cost 4 and 8 AP
    if in_test > side and not shape and not cfg.RECIPE.MEMORY:
        changes |= {key: v for key, v in sizes_for(cfg, in_test).items() if key.endswith("TEST")}
        rows.append(("", f"{in_test} pixels in the test", "no step takes longer for it"))
    keys |= {key: (value, "for small objects") for key, value in changes.items()}
    return FittedInput(keys, rows)


def sizes_by_shape(cfg: CfgNode, images: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    """The sizes with the recipe's number of pixels whose shorter side is largest for most images.

    The limit of the longer side is tried at the shapes that occur. The geometric mean of the
    shorter sides decides, so that a few strips among photographs change nothing.

    Args:
        cfg: has the sizes for photographs.
        images: with width and height.

    Returns:
        Values by their keys; {} where the recipe's are as good.
    """
    if cfg.INPUT.LSJ.ENABLED or not images:
        return {}
    usual = cfg.INPUT.MAX_SIZE_TEST / cfg.INPUT.MIN_SIZE_TEST
    sides = np.array([[image["width"], image["height"]] for image in images], float)
    shapes = sides.max(1) / sides.min(1)

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
    sizes = sizes_for(cfg, cfg.INPUT.MIN_SIZE_TEST * shorter_side(best))
    return {
        key: round(value * best / usual) if ".MAX_" in key else value
        for key, value in sizes.items()
    }


def sizes_for(cfg: CfgNode, side: float) -> dict[str, Any]:
    """The sizes of images in training and in the test, all changed by one factor.

    Args:
        cfg: has the sizes now.
        side: pixels of the shorter side of images in the test.

    Returns:
        Values by their keys.
    """
    factor = side / cfg.INPUT.MIN_SIZE_TEST
    sizes = {key: cfg.INPUT[key.partition(".")[2]] for key in SIZES}
    if cfg.INPUT.LSJ.ENABLED:
        sizes["INPUT.LSJ.SIZE"] = cfg.INPUT.LSJ.SIZE
    return {
        key: tuple(round(factor * one) for one in value)
        if isinstance(value, tuple | list)
        else round(factor * value)
        for key, value in sizes.items()
    }


def objects_in_input(
    cfg: CfgNode, images: Iterable[Mapping[str, Any]], annotations: Iterable[Mapping[str, Any]]
) -> _Objects:
    """The objects in pixels of an image in the test. Rare classes count only if all are rare."""
    short, longest = cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    scales = {
        image["id"]: min(
            short / min(image["width"], image["height"]),
            longest / max(image["width"], image["height"]),
        )
        for image in images
    }
    sides = defaultdict(list)
    for one in annotations:
        if not one["iscrowd"]:
            _, _, width, height = one["bbox"]
            scale = scales[one["image_id"]]
            sides[one["category_id"]].append(scale * math.sqrt(width * height))
    common = [of_class for of_class in sides.values() if len(of_class) >= LEAST_OF_CLASS]
    return _Objects([np.array(of_class) for of_class in common or sides.values()])


def _finer_maps(cfg: CfgNode) -> dict[str, Any]:
    """Keys that put a map of half the stride before the others; {} where no such map exists."""
    features = {key: list(attrgetter(key)(cfg)) for key in _MAPS}
    if not all(names and names[0] in _FINER for names in features.values()):
        return {}
    sizes = cfg.MODEL.ANCHOR_GENERATOR.SIZES
    anchors = [[size // 2 for size in sizes[0]], *sizes]
    return {key: [_FINER[names[0]], *names] for key, names in features.items()} | {
        _ANCHORS: anchors
    }


def _side(
    objects: _Objects, base: float, largest: float, least: int, finer: bool
) -> tuple[float, str]:
    """The shorter side at which a tenth of the objects are below ``least`` pixels.

    Args:
        objects: where the shorter side has ``base`` pixels.
        largest: of the shorter side for images of this size.
        finer: whether the finer map is used.

    Returns:
        Pixels of the shorter side within the limits, and the limit that was reached, if any.
    """
    pixels = _OF_PIXELS + (_OF_FINER_MAP if finer else 0)
    affordable = base * math.sqrt((LARGEST_COST - _CONSTANT) / pixels)
    wanted = base * least / objects.quantile(FEW_SMALL)
    most = STRIDE * math.floor(min(affordable, largest) / STRIDE)
    side = max(base, min(STRIDE * math.ceil(wanted / STRIDE), most))
    if largest < affordable:
        return side, f"images are enlarged {LARGEST_SCALE} times at most"
    return side, f"more pixels would take more than {LARGEST_COST:g} times"


def _cost(factor: float, finer: bool) -> float:
    """The time of a step, relative to one of the recipe, at sizes that are larger by a factor."""
    return _CONSTANT + (_OF_PIXELS + (_OF_FINER_MAP if finer else 0)) * factor**2
