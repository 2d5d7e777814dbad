"""Copies of one image, by the names of their files."""

from pathlib import Path

import pytest

from lambda_det.detection.data.copies import copies


@pytest.mark.parametrize(
    ("image", "other", "are_copies"),
    [
        ("3.jpg", "3_crop.jpg", True),
        ("3.jpg", "3.png", True),
        ("key3.jpg", "crop_key3.jpg", True),
        ("key3.jpg", "crop_2_key3.jpg", True),
        ("000139.jpg", "flip_000139.jpg", True),
        ("3.jpg", "crop_3.jpg", False),
        ("3000.jpg", "crop_3000.jpg", False),
        ("12_30.jpg", "flip_12_30.jpg", False),
        ("a1.jpg", "dark_a1.jpg", False),
    ],
)
def test_a_word_before_a_number_or_a_short_name_is_no_sign_of_a_copy(image, other, are_copies):
    groups = copies({name: Path(name) for name in (image, other)})
    assert (groups[image] == groups[other]) is are_copies
