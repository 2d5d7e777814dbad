"""The images that names in labels mean."""

import unicodedata

import pytest
from PIL import Image

from lambda_det.detection.data import image_folder
from lambda_det.detection.data.image_folder import ImageFolder, outputs_below, walk
from lambda_det.detection.data.outputs import mark_output
from lambda_det.files import SUFFIXES


def make(root, *names: str) -> ImageFolder:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return ImageFolder(root)


# The files of a folder, what labels call an image, and which it is
NAMES = [
    *(
        (["images/a.jpg", "images/b.jpg"], name, "images/a.jpg")
        for name in (
            "a.jpg",
            "a",
            "A.JPG",
            "./images/a.jpg",
            "/home/ann/set1/images/a.jpg",
            r"C:\pictures\images\a.jpg",
            "../../label-studio/media/upload/4/a.jpg",
            "https://example.org/data/images/a.jpg?token=1%2F2",
            "file:///images/%61.jpg",
        )
    ),
    *((["images/a.jpg"], name, None) for name in ("", ".", "xa.jpg", "https://[/c.jpg", "a.jp")),
    (["one/a.jpg", "two/a.jpg"], "set/one/a.jpg", "one/a.jpg"),
    (["A.png", "a.png"], "a.png", "a.png"),  # capital letters tell these apart
    (["one/a.jpg", "two/a.jpg"], "/data/local-files/?d=one%2Fa.jpg", "one/a.jpg"),
    (["photo #1.jpg"], "photo%20#1.jpg", "photo #1.jpg"),  # no fragment of an address
    # A folder in a name counts where it has images
    (["cam1/0.png", "cam2/1.png"], "cam2/0.png", None),
    (["cam1/0.png", "cam2/1.png"], "/home/me/cam2/0.png", None),
    (["cam1/0.png", "cam2/1.png"], "cam3/0.png", None),
    (["cam1/0.png", "cam2/1.png"], "/home/me/cam3/0.png", "cam1/0.png"),
    # The number of a project of Label Studio is no folder
    (["greenhouse/a.png", "greenhouse/b.png"], "images/1/a.png", "greenhouse/a.png"),
    (["greenhouse/a.png", "greenhouse/b.png"], "cameras/1/a.png", None),
    # CVAT's exports name a folder of their subset, which the images are not in
    *(
        (["data/images/0.png"], name, "data/images/0.png")
        for name in ("default/0.png", "images/0.png", "task_7/0.png", r"default\0.png")
    ),
    (["data/cam1/1.png", "data/cam2/1.png"], "default/cam2/1.png", "data/cam2/1.png"),
    # Two endings of one format
    (["a.jpeg"], "a.JPG", "a.jpeg"),
    (["a.TIFF"], "a.tif", "a.TIFF"),
    (["a.png"], "a.jpg", None),
]


@pytest.mark.parametrize(("there", "name", "found"), NAMES)
def test_an_image_is_found_by_the_end_of_its_name(tmp_path, there, name, found):
    expected = set() if found is None else {tmp_path / found}
    assert make(tmp_path, *there).named(name)[1] == expected


def test_a_name_is_found_without_a_walk_over_the_images_that_end_alike(tmp_path, monkeypatch):
    images = ImageFolder(tmp_path, [tmp_path / f"cam{n}/0.png" for n in range(400)])
    read, normal = [], image_folder.normal
    monkeypatch.setattr(image_folder, "normal", lambda name: read.append(name) or normal(name))
    assert images.named("lost/0.png") == ("", set())
    assert read == ["lost/0.png"]


@pytest.mark.parametrize(("form", "other"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_are_compared_in_one_form_of_unicode(tmp_path, form, other):
    images = make(tmp_path, unicodedata.normalize(form, "süß/café.jpg"))
    assert images.named(unicodedata.normalize(other, "süß/café.jpg"))[1]


@pytest.mark.posix
def test_links_are_followed_without_circles_and_hidden_folders_left_out(tmp_path):
    make(tmp_path / "store", "a.jpg", ".hidden.jpg", ".ipynb_checkpoints/a.jpg")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/images").symlink_to(tmp_path / "store")
    (tmp_path / "store/again").symlink_to(tmp_path / "data")
    (tmp_path / "store/itself.jpg").symlink_to(tmp_path / "store/itself.jpg")
    assert list(walk(tmp_path / "data")) == [tmp_path / "data/images/a.jpg"]


RUN = "OUTPUT_DIR: output/mine\n"
LAZY = "train:\n  output_dir: output/mine\n"


@pytest.mark.parametrize(
    "files, is_one",
    [
        ({"config.yaml": RUN, "log.txt": ""}, True),
        ({"config.yaml": LAZY, "metrics.json": ""}, True),
        ({"config.yaml": "names: [cup]\n", "log.txt": ""}, False),
        ({"config.yaml": RUN}, False),
        ({"log.txt": "", "metrics.json": ""}, False),
    ],
)
def test_the_folder_of_a_run_is_left_out_of_the_folder_that_it_lies_in(tmp_path, files, is_one):
    make(tmp_path, "a.png", "output/mine/first_batch.jpg", "output/mine/data/mine.json")
    for name, text in files.items():
        (tmp_path / "output/mine" / name).write_text(text)
    kept = {path.name for path in walk(tmp_path)}
    assert ("mine.json" in kept) == ("first_batch.jpg" in kept) == (not is_one)
    assert outputs_below(tmp_path) == [tmp_path / "output/mine"] * is_one
    assert {path.name for path in walk(tmp_path / "output/mine")} >= {"mine.json"}


def test_a_folder_is_marked_where_it_has_files_of_nobody_else(tmp_path):
    make(tmp_path, "mine/a.png")
    for name in ("mine", "empty", "new/below", "empty"):
        mark_output(tmp_path / name)
        (tmp_path / name / "drawn.png").touch()
    assert outputs_below(tmp_path) == [tmp_path / "empty", tmp_path / "new/below"]
    assert [path.name for path in walk(tmp_path)] == ["a.png", "drawn.png"]


def test_converted_labels_are_left_out_beside_those_that_they_were_made_of(tmp_path):
    make(tmp_path, "set/labels.xml", "set/a.png")
    mark_output(tmp_path / "set/yolo", tmp_path / "set/labels.xml")
    make(tmp_path, "set/yolo/a.txt")
    assert walk(tmp_path / "set") == [tmp_path / "set/a.png", tmp_path / "set/labels.xml"]
    (tmp_path / "set").rename(tmp_path / "moved")
    assert len(walk(tmp_path / "moved")) == 2
    (tmp_path / "moved/labels.xml").rename(tmp_path / "labels.xml")
    assert [path.name for path in walk(tmp_path / "moved")] == ["a.png", "a.txt"]


def test_pillow_reads_every_image():
    Image.init()
    read = {ending for ending, name in Image.registered_extensions().items() if name in Image.OPEN}
    assert set(SUFFIXES) - read <= {".avif", ".mpo"}  # of Pillow before 11.3; opened as a JPEG
