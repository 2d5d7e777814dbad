"""Copies of one image, by the names of their files, and frames of films in two parts."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lambda_det.detection.data.copies import copies, shared_copies


@pytest.mark.parametrize(
    ("image", "other", "are_copies"),
    [
        ("3.jpg", "3_crop.jpg", True),
        ("3.jpg", "3.png", True),
        ("key3.jpg", "key3_flip.png", True),
        (r"D:\me\key3.jpg", r"D:\me\crop_key3.jpg", True),
        ("key3.jpg", "key3-rot90_blur.jpg", True),
        ("key3.jpg", "key3 - Copy.jpg", True),
        ("key3_crop.jpg", "key3_scale 2.jpg", False),  # of no image that is there
        ("key3.jpg", "crop_key3.jpg", True),
        ("key3.jpg", "crop_2_key3.jpg", True),
        ("000139.jpg", "flip_000139.jpg", True),
        ("3.jpg", "crop_3.jpg", False),
        ("3000.jpg", "crop_3000.jpg", False),
        ("12_30.jpg", "flip_12_30.jpg", False),
        ("a1.jpg", "dark_a1.jpg", False),
        ("a1_jpg.rf.0c.jpg", "b/a1_jpg.rf.1d.jpg", True),
        ("a1_jpg.rf.0c.jpg", "a1_png.rf.1d.jpg", False),
    ],
)
def test_copies_have_the_name_of_their_image_and_a_word_for_a_change(image, other, are_copies):
    groups = copies({name: Path(name) for name in (image, other)})
    assert (groups[image] == groups[other]) is are_copies


@pytest.mark.parametrize(
    ("held_out", "is_a_film", "shared"),
    [
        (range(1, 30, 3), True, range(1, 30, 3)),  # each third frame
        (range(20, 30), True, []),  # the last third
        ([*range(6, 15), *range(20, 29)], True, [*range(6, 15), *range(20, 29)]),
        (range(1, 30, 3), False, []),  # photographs whose names are numbers
        (range(1, 20, 3), True, []),  # too few to tell
    ],
)
def test_frames_of_a_film_in_two_parts_are_shared(tmp_path, held_out, is_a_film, shared):
    random = np.random.default_rng(0)
    scene = Image.fromarray(random.integers(0, 256, (6, 50, 3), np.uint8)).resize((400, 48))
    parts = {"train": [], "val": []}
    for number in range(30):
        start = 2 * number if is_a_film else int(random.integers(300))
        part = "val" if number in held_out else "train"
        path = tmp_path / part / f"film_{number}.png"
        path.parent.mkdir(exist_ok=True)
        scene.crop((start, 0, start + 64, 48)).save(path)
        parts[part].append(str(path))
    pairs, kinds = shared_copies(parts)
    assert kinds.startswith("0 as") and f" {len(shared)} as frames" in kinds
    assert [Path(one).stem for one in pairs] == [f"film_{number}" for number in shared]
    assert all("val" in one and "train" in other for one, other in pairs.items())
    for one, other in pairs.items():
        one, other = (int(re.findall(r"film_(\d+)", file)[0]) for file in (one, other))
        assert abs(one - other) == min(abs(one - n) for n in range(30) if n not in held_out)
