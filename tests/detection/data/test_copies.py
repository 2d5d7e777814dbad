"""Copies of one image, by the names of their files."""

from pathlib import Path

import pytest

from lambda_det.detection.data.copies import copies


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
    ],
)
def test_copies_have_the_name_of_their_image_and_a_word_for_a_change(image, other, are_copies):
    groups = copies({name: Path(name) for name in (image, other)})
    assert (groups[image] == groups[other]) is are_copies
