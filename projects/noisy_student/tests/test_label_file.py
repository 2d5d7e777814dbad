import numpy as np
import pytest
from PIL import Image

from lambda_det.errors import DataError
from noisy_student.pseudo_labels import (
    PackedNames,
    PseudoLabelSource,
    read_pseudo_labels,
    write_pseudo_labels,
)

CLASSES = ["ant", "bee", "owl"]
ROWS = [
    ("b/1.png", [(2, 0.9), (0, 0.05)]),
    ("ü 0.jpg", [(0, 1.0)]),
    ("\udcff.png", [(1, 0.4), (0, 0.3), (2, 0.3)]),
    ("x", [(2, 0.12345)]),
]
HEAD = b"""# lambda_det pseudo-labels 2
# classes: ["ant", "bee", "owl"]
# teacher: somebody
# root: images
"""


def write(path, rows=ROWS, classes=CLASSES):
    return write_pseudo_labels(path, iter(rows), classes=classes, teacher="me", root="/there")


def test_the_format(tmp_path):
    """As other programs may write it."""
    assert write(tmp_path / "labels.txt", ROWS[:2]) == 2
    assert (tmp_path / "labels.txt").read_bytes() == (
        b"# lambda_det pseudo-labels 2\n"
        b'# classes: ["ant", "bee", "owl"]\n'
        b"# teacher: me\n"
        b"# root: /there\n"
        b"b/1.png\t2:0.9000,0:0.0500\n"
        b"\xc3\xbc 0.jpg\t0:1.0000\n"
    )


def test_a_file_is_read_as_it_was_written(tmp_path):
    write(tmp_path / "labels.txt")
    file = read_pseudo_labels(tmp_path / "labels.txt")
    assert (file.classes, file.teacher, file.root) == (CLASSES, "me", "/there")
    assert list(file.names) == [name for name, _ in ROWS]
    assert file.labels.tolist() == [2, 0, 1, 2] and file.labels.dtype == np.int64
    assert file.ends.tolist() == [2, 3, 6, 7] and file.pairs.tolist() == [2, 0, 0, 1, 0, 2, 2]
    expected = [0.9, 0.05, 1, 0.4, 0.3, 0.3, 0.1235]
    np.testing.assert_allclose(file.probabilities, expected, rtol=1e-3)


def test_the_last_line_may_lack_its_end(tmp_path):
    (tmp_path / "labels.txt").write_bytes(HEAD + b"a\t0:1\nb\t1:5e-1")
    file = read_pseudo_labels(tmp_path / "labels.txt")
    assert list(file.names) == ["a", "b"] and file.probabilities.tolist() == [1, 0.5]


def test_a_file_that_breaks_off_is_not_left_behind(tmp_path):
    def rows():
        yield ROWS[0]
        raise KeyboardInterrupt

    write(tmp_path / "labels.txt", ROWS[:1])
    before = (tmp_path / "labels.txt").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "labels.txt", rows())
    assert (tmp_path / "labels.txt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["labels.txt"]


@pytest.mark.parametrize("name", ["a\tb.png", "a\nb.png"])
def test_names_that_would_break_a_line(tmp_path, name):
    with pytest.raises(DataError, match=r"a\\[tn]b\.png"):
        write(tmp_path / "labels.txt", [(name, [(0, 1.0)])])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (1, b"# lambda_det pseudo-labels 1"),
        (1, b"\xff\xfe\x00"),
        (2, b"# Classes: []"),
        (2, b"# classes: [ant]"),
        (2, b'# classes: {"ant": 1}'),
        (2, b"# classes: [1]"),
        (3, b"# taught: me"),
        (4, b"a\t0:1"),
        *((6, text) for text in (b"", b"a", b"a\t0", b"a\t0:1\t", b"\t0:1", b"a\t0:1,")),
        *((6, b"a\t" + text) for text in (b"ant:1", b"1.5:1", b":1", b"3:1", b"-1:1", b"0:1:1")),
        *((6, b"a\t" + text) for text in (b"99999999999999999999:1", b"0:high", b"0:1.1")),
        *((6, b"a\t" + text) for text in (b"0:-0.1", b"0:nan", b"0:0", b"0:.5", b"0:1.2.3")),
        (6, b"a\t0:0.3,1:0.4"),  # not the highest first
        (6, b"a\t0:0.4,0:0.3"),  # a class twice
        (6, b"a\t0:0.6,1:0.5"),  # more than 1
    ],
)
def test_the_line_that_is_wrong_is_named(tmp_path, line, text):
    lines = (HEAD + b"a\t0:1\nb\t1:0.5\nc\t2:0.1\n").split(b"\n")
    lines[line - 1] = text
    (tmp_path / "labels.txt").write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=rf"labels\.txt, line {line}: ") as raised:
        read_pseudo_labels(tmp_path / "labels.txt")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [HEAD, None])
def test_a_file_without_labels(tmp_path, content):
    if content:
        (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"labels\.txt .*DATA\.PSEUDO_LABELS"):
        PseudoLabelSource(tmp_path / "labels.txt", tmp_path, CLASSES)


@pytest.fixture
def images(tmp_path):
    """Two folders of two images each; image n has the colour (n, 100, 200)."""
    for number, name in enumerate(("b/000", "b/001", "c/000", "c/001")):
        file = tmp_path / "images" / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 24), (number, 100, 200)).save(file)
    return tmp_path / "images"


def test_the_source_has_the_images_that_the_file_names(tmp_path, images):
    """In the file's order, with its labels, whatever the folders are called."""
    path = tmp_path / "labels.txt"
    write(path, [(f"{n}.png", [(c, 0.9)]) for n, c in (("c/001", 2), ("b/000", 0), ("c/000", 0))])
    source = PseudoLabelSource(path, images, CLASSES)
    assert source.classes == CLASSES and source.labels.tolist() == [2, 0, 0]
    assert [source.name(n) for n in range(3)] == ["c/001.png", "b/000.png", "c/000.png"]
    assert [int(source.load(n)[0, 0, 0]) for n in range(3)] == [3, 0, 2]


def test_images_may_lie_in_one_flat_folder(tmp_path, images):
    write(tmp_path / "labels.txt", [("001.png", [(2, 0.9)])])
    source = PseudoLabelSource(tmp_path / "labels.txt", images / "c", CLASSES)
    assert source.load(0)[0, 0, 0] == 3


def test_images_that_are_not_there(tmp_path, images):
    path = tmp_path / "labels.txt"
    write(path, [(f"{name}.png", [(2, 0.9)]) for name in ("b/000", "d/\udcff", "c/1")])
    with pytest.raises(DataError, match=r"2 of the 3 .*d/\\udcff\.png") as raised:
        PseudoLabelSource(path, images, CLASSES)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("classes", "text"),
    [
        (["ant", "bee"], r"owl"),
        (["ant", "bee", "cat"], r"labels\.txt differ: only one has cat, owl"),
        (["bee", "ant", "owl"], "order"),
    ],
)
def test_labels_of_other_classes(tmp_path, images, classes, text):
    write(tmp_path / "labels.txt", [("b/000.png", [(1, 0.9)])], classes)
    with pytest.raises(DataError, match=text):
        PseudoLabelSource(tmp_path / "labels.txt", images, CLASSES)


def test_soft_labels_by_hand(tmp_path, images):
    """What the file does not name shares the rest; the temperature sharpens or flattens."""
    write(tmp_path / "l.txt", [("b/000.png", [(2, 0.8)]), ("b/001.png", [(1, 0.6), (0, 0.3)])])
    source = PseudoLabelSource(tmp_path / "l.txt", images, CLASSES)
    np.testing.assert_allclose(source.soft_label(0, 1.0), [0.1, 0.1, 0.8], rtol=1e-5)
    np.testing.assert_allclose(source.soft_label(1, 1.0), [0.3, 0.6, 0.1], rtol=1e-5)
    squares = np.array([0.09, 0.36, 0.01])
    np.testing.assert_allclose(source.soft_label(1, 0.5), squares / squares.sum(), rtol=1e-5)
    np.testing.assert_allclose(source.soft_label(1, 1e-3), [0, 1, 0], atol=1e-6)
    np.testing.assert_allclose(source.soft_label(1, 1e6), [1 / 3] * 3, rtol=1e-4)
    assert source.soft_label(0, 1.0).dtype == np.float32


def test_packed_names():
    names = ["", "a", "ü\n", "", "long " * 100, "\udcff"]
    packed = PackedNames(names)
    assert list(packed) == names and len(packed) == 6 and len(PackedNames()) == 0
    with pytest.raises(IndexError):
        packed[-1]
