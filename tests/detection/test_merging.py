"""Detections of tiles joined to those of the image, against scenes and a slow reference."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lambda_det.detection import merging
from lambda_det.detection.merging import Detections, cuts, merge

HEIGHT, WIDTH, SIZE, OVERLAP = 170, 230, 80, 30


def tiles_of():
    rows, columns = cuts(HEIGHT, SIZE, OVERLAP), cuts(WIDTH, SIZE, OVERLAP)
    return [(x0, y0, x1, y1) for y0, y1 in rows for x0, x1 in columns]


def detections(boxes, scores, classes=None, masks=None):
    classes = np.zeros(len(scores)) if classes is None else classes
    return Detections(
        np.array(boxes, np.float32).reshape(-1, 4),
        np.array(scores, np.float32),
        np.array(classes, np.int64),
        masks,
    )


def seen(scene, classes, tile):
    """What a detector without faults finds of full masks in a tile."""
    x0, y0, x1, y1 = tile
    boxes, masks, kinds = [], [], []
    for mask, kind in zip(scene, classes, strict=True):
        part = mask[y0:y1, x0:x1]
        if part.any():
            rows, columns = np.nonzero(part.any(1))[0], np.nonzero(part.any(0))[0]
            boxes.append([columns[0] + x0, rows[0] + y0, columns[-1] + 1 + x0, rows[-1] + 1 + y0])
            masks.append(merging.runs(part, x0, y0))
            kinds.append(kind)
    return boxes, kinds, masks


def full(mask):
    result = np.zeros((HEIGHT, WIDTH), bool)
    for x, y0, y1 in mask:
        assert not result[y0:y1, x].any(), "runs that overlap"
        result[y0:y1, x] = True
    return result


def random_scene(rng):
    """Objects that do not overlap: small ones, and bars, some longer than tiles, some diagonal."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    taken, scene = np.zeros((HEIGHT, WIDTH), bool), []
    while len(scene) < 12:
        down, right = rows - rng.integers(HEIGHT), columns - rng.integers(WIDTH)
        long, short = rng.permutation([70, 4])
        mask = (
            np.abs(down - right) < 5,
            np.abs(down + right) < 5,
            (np.abs(down) < long) & (np.abs(right) < short),
            (down / rng.uniform(3, 15)) ** 2 + (right / 9) ** 2 < 1,
        )[rng.choice(4, p=[0.1, 0.1, 0.3, 0.5])]
        if not (mask & taken).any():
            taken |= mask
            scene.append(mask)
    return scene


# ------------------------------------------------------------------------------ a slow reference
def area_of(box):
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)


def common(a, b):
    return max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])


def ends_at(box, tile, other):
    """Whether a box ends at a border of its tile that lies inside of another tile."""
    for axis in (0, 1):
        near = max(2.0, 0.1 * (box[axis + 2] - box[axis]))
        for border, distance in (
            (tile[axis], box[axis] - tile[axis]),
            (tile[axis + 2], tile[axis + 2] - box[axis + 2]),
        ):
            if other[axis] < border < other[axis + 2] and distance <= near:
                return True
    return False


def similarity(a, b):
    """IoU of two detections of two tiles, or None where they are not one object."""
    shared = common(a["tile"], b["tile"])
    if a["class"] != b["class"] or not area_of(shared):
        return None
    if not area_of(common(common(a["box"], b["box"]), shared)):
        return None
    cut_a = ends_at(a["box"], a["tile"], b["tile"])
    cut_b = ends_at(b["box"], b["tile"], a["tile"])
    if a["mask"] is not None and a["mask"].any() and b["mask"].any():
        window = np.zeros_like(a["mask"])
        window[slice(shared[1], shared[3]), slice(shared[0], shared[2])] = True
        window |= not (cut_a and cut_b)
        first, second = (int((one["mask"] & window).sum()) for one in (a, b))
        both = int((a["mask"] & b["mask"] & window).sum())
    else:
        one, other = a["box"], b["box"]
        if cut_a and cut_b:
            one, other = common(one, shared), common(other, shared)
        first, second, both = area_of(one), area_of(other), area_of(common(one, other))
    least = {
        (True, True): min(first, second),
        (True, False): first,
        (False, True): second,
        (False, False): first + second - both,
    }[cut_a, cut_b]
    return both / (first + second - both) if both > 0.5 * least else None


def reference(tiles):
    """The same as :func:`merge` in loops over full masks and numbers of Python."""
    every = []
    for tile, part in sorted(tiles, key=lambda entry: (entry[0][1], entry[0][0])):
        for i, score in enumerate(part.scores):
            every.append(
                {
                    "tile": tile,
                    "box": [float(value) for value in part.boxes[i]],
                    "score": score,
                    "class": part.classes[i],
                    "mask": full(part.masks[i]) if part.masks is not None else None,
                }
            )
    pairs = []
    for i, j in itertools.combinations(range(len(every)), 2):
        if every[i]["tile"] != every[j]["tile"]:
            value = similarity(every[i], every[j])
            if value is not None:
                pairs.append((-value, i, j))
    groups = [{i} for i in range(len(every))]
    for _, i, j in sorted(pairs):
        one, other = (next(g for g in groups if k in g) for k in (i, j))
        tiles_of_both = [every[k]["tile"] for k in one | other]
        if one is not other and len(tiles_of_both) == len(set(tiles_of_both)):
            groups = [g for g in groups if g is not one and g is not other] + [one | other]
    results = []
    for group in sorted(groups, key=min):
        members = [every[k] for k in sorted(group)]
        whole = [m for m in members if not ends_at(m["box"], m["tile"], (0, 0, WIDTH, HEIGHT))]
        best = max(whole or members, key=lambda m: m["score"])
        box, mask = best["box"], best["mask"]
        if not whole:
            corners = list(zip(*(m["box"] for m in members), strict=True))
            box = [*map(min, corners[:2]), *map(max, corners[2:])]
            if mask is not None:
                mask = np.logical_or.reduce([m["mask"] for m in members])
        results.append((max(m["score"] for m in members), box, best["class"], mask, min(group)))
    return results


def with_faults(boxes, kinds, masks, rng):
    """What a real detector finds: boxes that are off, and objects that it misses or finds twice."""
    kept = np.flatnonzero(rng.random(len(boxes)) < 0.9)
    kept = np.concatenate([kept, kept[rng.random(len(kept)) < 0.2]])
    boxes = [boxes[k] + rng.normal(scale=1.5, size=4) for k in kept]
    masks = [masks[k][rng.random(len(masks[k])) < 0.9] for k in kept]
    scores = np.sort(rng.choice([0.2, 0.4, 0.6, 0.8], len(kept)))[::-1]  # some are equal
    return detections(boxes, scores, [kinds[k] for k in kept], masks)


@pytest.mark.fuzz
@pytest.mark.parametrize("with_masks", [True, False])
@given(seed=st.integers(0, 2**32 - 1))
def test_merged_as_the_slow_reference_and_in_any_order(with_masks, seed):
    rng = np.random.default_rng(seed)
    scene = random_scene(rng)
    classes = rng.integers(2, size=len(scene))
    found = [(tile, with_faults(*seen(scene, classes, tile), rng)) for tile in tiles_of()]
    if not with_masks:
        found = [(tile, part._replace(masks=None)) for tile, part in found]
    expected = sorted(reference(found), key=lambda entry: -entry[0])
    joined = sum(len(part.scores) for _, part in found) - len(expected)
    for order in (found, found[::-1], [found[k] for k in rng.permutation(len(found))]):
        merged = merge(order, HEIGHT, WIDTH)
        assert sorted(zip(merged.scores, map(tuple, merged.boxes), strict=True)) == sorted(
            (score, tuple(np.float32(box))) for score, box, *_ in expected
        )
        assert (np.diff(merged.scores) <= 0).all()
        if with_masks:
            ours = sorted(full(mask).tobytes() for mask in merged.masks)
            assert ours == sorted(entry[3].tobytes() for entry in expected)
    assert joined > 0


def test_nothing_found():
    none = detections([], [], [], [])
    assert all(len(values) == 0 for values in merge([(t, none) for t in tiles_of()], 170, 230))


LEFT, RIGHT = (0, 0, 80, 80), (50, 0, 130, 80)
NEIGHBOURS = {
    "two that touch": [[40, 10, 60, 30], [60, 10, 75, 30]],
    "two long ones side by side": [[10, 10, 120, 18], [10, 19, 120, 27]],
    "a small one in the box of a long one": [[10, 10, 120, 40], [55, 20, 65, 30]],
}


@pytest.mark.parametrize("what", NEIGHBOURS)
def test_neighbours_stay_two(what):
    """Boxes alone, each cut at the borders of both tiles."""
    found = []
    for tile in (LEFT, RIGHT):
        parts = [common(box, tile) for box in NEIGHBOURS[what]]
        found.append((tile, detections([p for p in parts if area_of(p)], [0.9, 0.8])))
    merged = merge(found, 80, 130)
    assert sorted(map(list, merged.boxes.tolist())) == sorted(NEIGHBOURS[what])


@pytest.mark.parametrize("seed", range(5))
def test_runs_within_a_rectangle(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((HEIGHT, WIDTH)) < 0.5
    (x0, x1), (y0, y1) = (np.sort(rng.choice(side, 2, False)) for side in (WIDTH, HEIGHT))
    inside = np.zeros_like(mask)
    inside[y0:y1, x0:x1] = mask[y0:y1, x0:x1]
    clipped = merging.clipped(merging.runs(mask, 0, 0), (x0, y0, x1, y1))
    assert np.array_equal(full(clipped), inside)
    assert merging.area(clipped) == inside.sum()
