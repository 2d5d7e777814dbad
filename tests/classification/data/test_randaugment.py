"""RandAugment's operations beside Pillow's, and how they are drawn beside the reference's table."""

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from lambda_det.classification.data import randaugment
from lambda_det.classification.data.randaugment import OPERATIONS, RandAugment

SHAPES = [(1, 1), (1, 7), (9, 1), (2, 9), (3, 3), (48, 64), (97, 33)]
GREY = (128, 128, 128)


def images() -> list[np.ndarray]:
    """Noise, noise of few values, one colour, and a gradient, of each shape."""
    rng = np.random.default_rng(0)
    found = []
    for height, width in SHAPES:
        ramp = np.add.outer(np.linspace(0, 100, height), np.linspace(0, 155, width))
        for lowest, highest in ((0, 256), (100, 130), (77, 78)):
            found.append(rng.integers(lowest, highest, (height, width, 3), dtype=np.uint8))
        found.append((ramp[..., None] * [1, 0.7, 0.4]).astype(np.uint8))
    return found


IMAGES = images()


def apply(name: str, image: np.ndarray, *arguments: float) -> np.ndarray:
    before = image.copy()
    result = OPERATIONS[name][0](image, *arguments)
    assert result.dtype == np.uint8 and result.shape == image.shape and result.flags.c_contiguous
    assert not np.shares_memory(result, image)
    np.testing.assert_array_equal(image, before)
    return result


@pytest.mark.parametrize(
    ("name", "by_pillow", "values"),
    [
        ("AutoContrast", ImageOps.autocontrast, [()]),
        ("Equalize", ImageOps.equalize, [()]),
        ("Invert", ImageOps.invert, [()]),
        ("Posterize", ImageOps.posterize, [(1,), (4,), (8,)]),
        ("Solarize", ImageOps.solarize, [(0,), (1,), (128,), (255,), (384,)]),
    ],
)
def test_operations_on_single_values_are_pillows(name, by_pillow, values):
    for image in IMAGES:
        for arguments in values:
            expected = by_pillow(Image.fromarray(image), *arguments)
            np.testing.assert_array_equal(apply(name, image, *arguments), np.asarray(expected))
    np.testing.assert_array_equal(apply("Posterize", image, 12), image)
    assert not apply("Posterize", image, 0).any()


@pytest.mark.parametrize("addition", [0, 11, 165, 330])
def test_solarize_add(addition):
    for image in IMAGES:
        values = image.astype(int)
        expected = np.where(values < 128, np.minimum(values + addition, 255), values)
        np.testing.assert_array_equal(apply("SolarizeAdd", image, addition), expected)


@pytest.mark.parametrize("magnitude", [0, 1, 5, 10, 22, 30])
@pytest.mark.parametrize("name", ["Color", "Contrast", "Brightness", "Sharpness"])
def test_blends_are_pillows(name, magnitude):
    """Exact, but within 1 where the true value is whole: float32 may come out just below it."""
    percent = 18 * magnitude + 10
    values = off = 0
    for image in IMAGES:
        enhance = getattr(ImageEnhance, name)(Image.fromarray(image))
        expected = np.asarray(enhance.enhance(percent / 100), int)
        other = np.asarray(enhance.degenerate, int)
        is_whole = (100 * other + percent * (image - other)) % 100 == 0
        difference = np.abs(apply(name, image, percent / 100) - expected)
        values += image.size
        off += (difference > is_whole).sum()
        np.testing.assert_array_equal(apply(name, image, 1.0), image)
    # One colour in 100,000 has another grey, which changes all of its three channels.
    assert off <= (3 + values * 1e-4 if name == "Color" else 0)


def sampled(image: np.ndarray, inverse: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """The nearest pixels by Pillow, and where the source is within 1/64 of two pixels' border.

    Args:
        inverse: a, b, c, d, e, f that give the source (a x + b y + c, d x + e y + f) of a pixel's
            number (x, y).
    """
    a, b, c, d, e, f = inverse
    height, width = image.shape[:2]
    y, x = np.mgrid[:height, :width]
    source = np.stack([a * x + b * y + c, d * x + e * y + f])
    at_border = (np.abs((source % 1) - 0.5) < 1 / 64).any(0)
    # Pillow counts from pixels' corners, not from their centres.
    corners = (a, b, c + (1 - a - b) / 2, d, e, f + (1 - d - e) / 2)
    moved = Image.fromarray(image).transform(
        (width, height), Image.Transform.AFFINE, corners, fillcolor=GREY
    )
    return np.asarray(moved), at_border


def turned(degrees: float, width: int, height: int) -> list[float]:
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    x, y = (width - 1) / 2, (height - 1) / 2
    return [cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y]


SLOPES, PIXELS = (0.03, -0.3, 0.3, 0.21, -0.45, 0.9, 0.0), (0.0, 1.0, -1.0, 30.0, 150.0, -300.0)
# Values, and by what they move the pixels of an image of some width and height
MOVES = {
    "ShearX": (SLOPES, lambda slope, *size: [1, slope, 0, 0, 1, 0]),
    "ShearY": (SLOPES, lambda slope, *size: [1, 0, 0, slope, 1, 0]),
    "TranslateX": (PIXELS, lambda pixels, *size: [1, 0, pixels, 0, 1, 0]),
    "TranslateY": (PIXELS, lambda pixels, *size: [1, 0, 0, 0, 1, pixels]),
    "Rotate": ((0.0, 3.0, -21.0, 30.0, -30.0, 45.0, -45.0, 67.0), turned),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_are_pillows(name):
    values, inverse_of = MOVES[name]
    for value in values:
        at_borders = total = 0
        for image in IMAGES:
            height, width = image.shape[:2]
            expected, at_border = sampled(image, inverse_of(value, width, height))
            result = apply(name, image, value)
            np.testing.assert_array_equal(result[~at_border], expected[~at_border])
            at_borders += at_border.sum()
            total += at_border.size
        assert at_borders < 0.15 * total


def test_cutout_greys_the_square_as_far_as_it_lies_in_the_image():
    for image in IMAGES:
        height, width = image.shape[:2]
        rows, columns = np.mgrid[:height, :width]
        for half in (0, 1, 3, 60):
            for y, x in ((0, 0), (height - 1, width - 1), (height // 2, width // 3)):
                is_in = (y - half <= rows) & (rows < y + half)
                is_in &= (x - half <= columns) & (columns < x + half)
                expected = np.where(is_in[..., None], GREY, image)
                np.testing.assert_array_equal(apply("Cutout", image, half, y, x), expected)


_FACTORS, _SLOPES, _PIXELS = (
    [1.9, 2.8, 0.1, 1.36],
    [0.3, 0.45, 0.0, 0.21],
    [100.0, 150.0, 0.0, 70.0],
)
# The reference's level_to_arg at a magnitude of 10, 15, 0 and 7; what is signed has a random sign
ARGUMENTS = {
    "AutoContrast": None,
    "Equalize": None,
    "Invert": None,
    "Rotate": [30.0, 45.0, 0.0, 21.0],
    "Posterize": [4, 6, 0, 2],
    "Solarize": [256, 384, 0, 179],
    **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), _FACTORS),
    **dict.fromkeys(("ShearX", "ShearY"), _SLOPES),
    **dict.fromkeys(("TranslateX", "TranslateY"), _PIXELS),
    "Cutout": [40, 60, 0, 28],
    "SolarizeAdd": [110, 165, 0, 77],
}
SIGNED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")


def _probability(counts: np.ndarray) -> float:
    """That counts are as uneven as these, or more, if all places are drawn equally often."""
    from scipy import stats  # takes a second, in each process that collects tests

    return stats.chisquare(counts.ravel()).pvalue


def test_strengths_are_the_references():
    assert list(OPERATIONS) == list(ARGUMENTS)
    rng = np.random.default_rng(0)
    for name, strengths in ARGUMENTS.items():
        _, draw = OPERATIONS[name]
        for magnitude, expected in zip((10, 15, 0, 7), strengths or [()] * 4, strict=True):
            drawn = [draw(magnitude / 10, (7, 5), rng) for _ in range(400)]
            if strengths is None:
                assert set(drawn) == {()}
                continue
            values, *places = zip(*drawn, strict=True)
            assert set(np.round(np.abs(values), 9)) == {expected}
            assert type(values[0]) is type(expected)
            assert abs(np.signbit(values).mean() - 0.5 * (name in SIGNED)) < 0.1
            assert len(places) == (2 if name == "Cutout" else 0)
            if places:
                counts = np.zeros((7, 5))
                np.add.at(counts, tuple(map(list, places)), 1)
                assert _probability(counts) > 0.001


def test_operations_are_drawn_evenly_with_replacement_and_always_applied(monkeypatch):
    """Each stand-in notes its number, and adds its strength to the image."""
    drawn = []

    def stand_in(number: int) -> tuple:
        def note(image: np.ndarray, strength: float) -> np.ndarray:
            drawn.append(number)
            return image + strength

        return note, lambda strength, size, rng: (strength,)

    replacements = {name: stand_in(number) for number, name in enumerate(OPERATIONS)}
    monkeypatch.setattr(randaugment, "OPERATIONS", replacements)
    rng = np.random.default_rng(0)
    augment = RandAugment(2, 15)
    for _ in range(16 * 16 * 20):
        assert augment(np.zeros((1, 1, 3)), rng).max() == 3  # twice 1.5 times the nominal strength
    counts = np.zeros((16, 16))
    np.add.at(counts, (drawn[::2], drawn[1::2]), 1)
    assert _probability(counts) > 0.001
