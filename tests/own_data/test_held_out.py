"""Images that are held out: by their names, by class and by group."""

import math
import os
import re

import numpy as np
import pytest
from PIL import Image

from lambda_det.detection.data.coco import read_coco
from lambda_det.detection.data.coco_format import read_json
from lambda_det.errors import ConfigError, DataError
from lambda_det.own_data.held_out import Split, films, hold_out, smallest_share
from lambda_det.own_data.run_data import keep_file


@pytest.fixture
def many(content, write):
    """100 images with a class each in turn; returns file and folder."""
    one, box = content["images"][0], content["annotations"][0]
    content["images"] = [{**one, "id": n, "file_name": f"{n}.jpg"} for n in range(100)]
    ids = [category["id"] for category in content["categories"]]
    content["annotations"] = [
        {**box, "id": n + 1, "image_id": n, "category_id": ids[n % len(ids)]} for n in range(100)
    ]
    return write(content)


@pytest.fixture
def share_out(tmp_path_factory):
    """The names of the images that a split, or a share, trains and evaluates on."""

    def call(split, files):
        split = split if isinstance(split, Split) else Split(split)
        parts = hold_out(*files, split, folder=tmp_path_factory.mktemp("parts"))
        return [{image["file_name"] for image in read_json(part)["images"]} for part in parts]

    return call


def test_a_share_of_the_images_is_held_out_by_their_names(share_out, many, content, write):
    train, test = share_out(0.2, many)
    assert not train & test and len(train | test) == 100 and len(test) == 20
    # a larger share holds the same ones out, and an image that is added moves one other at most
    assert share_out(0.5, many)[1] > test
    for number in (98, 97, 96):
        fewer = {**content, "images": content["images"][: number + 1]}
        fewer["annotations"] = [a for a in content["annotations"] if a["image_id"] <= number]
        others = share_out(0.2, write(fewer, f"{number}"))[1]
        assert len(others) == math.ceil(0.2 * (number + 1)) and len(others - test) <= 1
        assert len(test - others - {f"{number + 1}.jpg"}) <= 1
        test = others


def test_few_objects_to_measure_by_are_said(share_out, many, caplog):
    """An evaluation of 20 objects says little."""
    caplog.set_level("INFO")
    for share, words in ((0.2, "20 of 100 .*20 objects, so few"), (0.5, "50 objects; copies")):
        share_out(share, many)
        assert re.search(words, caplog.messages[-1])


def test_messages_on_copies_name_the_file_of_the_user(many, tmp_path, content, write):
    """On both halves, and on the copy of one in the folder of a run; and no "source" of the user's,
    which means something else."""
    content["annotations"][0] |= {"source": "a web page", "bbox": [5000, 5000, 9, 9]}
    copy = keep_file((files := write(content, "sources"))[0], tmp_path)
    found = [read_coco(file, files[1]).report.findings for file in (files[0], copy)]
    assert found[0] == found[1]
    halves = hold_out(*many, Split(0.2), folder=tmp_path)
    for copy in (halves[0], keep_file(halves[0], tmp_path), keep_file(many[0], tmp_path)):
        assert read_coco(copy, many[1]).report.json_file == str(many[0])
    # AP on it is not of images that were trained on
    held_out = keep_file(halves[1], tmp_path)
    assert read_coco(held_out, many[1]).report.json_file == f"{many[0]} (held out of train)"


@pytest.mark.parametrize(("labels", "entry"), [("set (train)", {"boxes": None}), ("", {"x": 1})])
def test_images_held_out_of_a_part_are_called_so(labels, entry, content, many, tmp_path, write):
    """Also where another program wrote an entry of the name of ours."""
    content["lambda_det"] = {"labels": labels, "findings": [], **entry}
    files = write(content, "parts")
    halves = hold_out(*files, Split(0.2), folder=tmp_path)
    names = [read_coco(half, files[1]).report.json_file for half in halves]
    of = "set" if labels else files[0]
    assert names == [labels or of, f"{of} (held out of train)"]


def test_few_names_do_not_hold_out_a_single_image(share_out, content, write):
    """A tenth of 44 is five, whatever their hashes; of ten a larger share makes two."""
    one, box = content["images"][0], content["annotations"][0]
    for seed, (number, expected) in enumerate([(44, 5), (70, 7), (11, 2), (10, 2), (3, 2)] * 3):
        names = [f"photo{100 * seed + n}.jpg" for n in range(number)]
        content["images"] = [{**one, "id": n, "file_name": name} for n, name in enumerate(names)]
        content["annotations"] = [{**box, "id": n + 1, "image_id": n} for n in range(number)]
        files = write(content, f"names{seed}")
        for stratify in (False, True):
            split = Split(0, stratify=stratify)
            split = split._replace(share=smallest_share(*files, split))
            assert len(share_out(split, files)[1]) == expected


def test_the_share_holds_out_an_object(share_out, many, content, write):
    """Of 100 images, of which those that a small share holds out have none."""
    first = share_out(0.1, many)[1]
    images = {image["id"]: image["file_name"] for image in content["images"]}
    content["annotations"] = [
        a for a in content["annotations"] if images[a["image_id"]] not in first
    ]
    files = write(content, "some are empty")
    held_out = share_out(smallest_share(*files, Split(0)), files)[1]
    assert held_out & {images[annotation["image_id"]] for annotation in content["annotations"]}


def test_copies_stay_together_beside_groups(share_out, content, write):
    """Mirrored images are a group, and each is a copy of one that is in none."""
    together = {f"cat{n}{end}.jpg" for n in (20, 21) for end in ("", "_flip")}
    names = [f"cat{n}.jpg" for n in range(12)] + sorted(together)
    one, box = content["images"][0], content["annotations"][0]
    content["images"] = [{**one, "id": n, "file_name": name} for n, name in enumerate(names)]
    content["annotations"] = [{**box, "id": n + 1, "image_id": n} for n in range(len(names))]
    files = write(content, "mirrored")
    for share in (0.1, 0.3, 0.5, 0.9):
        _, val = share_out(Split(share, group_by="(flip)"), files)
        assert val & together in (set(), together)


def test_each_class_has_its_share(share_out, many, content, write):
    """Of a class of 10 images and of one of 90, whatever their order in the file."""
    ids = [category["id"] for category in content["categories"]]
    for number, annotation in enumerate(content["annotations"]):
        annotation["category_id"] = ids[number % 10 > 0]
    rare = {f"{number}.jpg" for number in range(0, 100, 10)}
    files = write(content)
    split = Split(0.3, stratify=True)
    train, val = share_out(split, files)
    assert not train & val and len(train | val) == 100
    assert (len(val), len(val & rare)) == (30, 3)
    content["images"].reverse()
    assert share_out(split, write(content, "again"))[1] == val


def test_the_default_share_is_one_of_groups_and_classes(share_out, content, many, write):
    """Of two films, each larger than a tenth, the smaller one is held out, whatever its name."""
    for other in "bg":
        for number, image in enumerate(content["images"]):
            image["file_name"] = f"{'a' if number % 3 else other}_{number}.jpg"
        files = write(content, other)
        for stratify in (False, True):
            split = Split(0, "^.", stratify)
            for share in (smallest_share(*files, split), 0.3):
                test = share_out(split._replace(share=share), files)[1]
                assert {name[0] for name in test} == {other}
    # of films a and b, of which b has no object, none is measured by
    for number, image in enumerate(content["images"]):
        image["file_name"] = f"{'a' if number % 3 else 'b'}_{number}.jpg"
    ids = {image["id"] for number, image in enumerate(content["images"]) if number % 3}
    content["annotations"] = [one for one in content["annotations"] if one["image_id"] in ids]
    assert smallest_share(*write(content, "empty"), Split(0, "^.")) == 0
    split = Split(0, stratify=True)
    split = split._replace(share=smallest_share(*many, split))
    assert (split.share, len(share_out(split, many)[1])) == (0.1, 10)


@pytest.mark.parametrize("stratify", [False, True])
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ("film{}_{}.jpg", r"(film\d+)_\d"),
        ("train/images/film{}_{}.jpg", r"^film\d+"),  # the file's own name
        ("film{}/000{}.jpg", r"\d+"),  # the path
        ("film{}/000{}.jpg", r"^(.*?)\d+\.\w+$"),
    ],
)
def test_a_group_stays_on_one_side(share_out, form, pattern, stratify, content, many, write):
    """Frames of nine videos; images without a match are alone."""
    for number, image in enumerate(content["images"][:90]):
        image["file_name"] = form.format(number // 10, number % 10)
    parts = share_out(Split(0.3, pattern, stratify), write(content))
    train, val = ({film for name in part for film in re.findall(r"film\d", name)} for part in parts)
    assert not train & val and 0 < len(val) < 7 and len(train | val) == 9


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (Split(0.2, group_by="(film"), "--group-by.*regular"),
        (Split(0.2, group_by="film"), "each into its own, by names such as 0.jpg"),
        (Split(0.5, group_by="jpg"), "'jpg' puts all images into one group.* folder val"),
        *((share, "--val-share") for share in (-0.1, 1.0, 10.0, float("nan"))),
    ],
)
def test_a_split_that_cannot_be(share_out, split, words, many):
    with pytest.raises(ConfigError, match=words):
        share_out(split, many)


def test_a_share_that_leaves_too_little(share_out, many, content, write, caplog):
    assert len(share_out(0.001, many)[1]) == 1
    with pytest.raises(DataError, match=r"--val-share.*no image of (apple|pear) to train on"):
        share_out(0.999, many)
    single = {**content, "images": content["images"][:1], "annotations": []}
    with pytest.raises(DataError, match=r"--val-share.*0 of 1 images"):
        share_out(0.5, write(single, "single"))
    _, held_out = share_out(0.2, many)
    content["categories"].append({"id": 77, "name": "quince"})
    for annotation in content["annotations"]:
        if f"{annotation['image_id']}.jpg" in held_out:
            annotation["category_id"] = 77
    with pytest.raises(DataError, match=r"--val-share.*quince"):
        share_out(0.2, write(content))
    for annotation in content["annotations"]:
        number = annotation["image_id"]
        is_apple = f"{number}.jpg" in held_out or number % 2
        annotation["category_id"] = content["categories"][0]["id"] if is_apple else 77
    share_out(0.2, write(content))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    (warning,) = (warning for warning in warnings if "quince" in warning)
    assert "--val-share" in warning


@pytest.mark.parametrize(
    ("names", "is_a_film", "said"),
    [
        (
            [f"{run}_{n}.png" for run in "ab" for n in range(5, 65, 5)],
            True,
            "24 images.* 2 films, such as a_5.png.* --group-by '",
        ),
        (
            [f"fly{n:08}.png" for n in range(20)],
            True,
            "20 images.* 1 film,.* last tenth",
        ),
        (
            [*(f"fly{n:08}.png" for n in range(20)), *(f"{n}_leaf.png" for n in range(20))],
            True,
            "20 images.* 1 film,.* --group-by '",
        ),
        ([*(f"fly{n:08}.png" for n in range(20)), "leaf.png"], True, "1 film,.* last tenth"),
        ([f"fly{n:08}.png" for n in range(20)], False, ""),
        ([f"{run}.png" for run in "abcdefghijklmnopqrst"], True, ""),
    ],
)
def test_frames_of_films_are_said_where_neighbours_are_alike(names, is_a_film, said, tmp_path):
    random = np.random.default_rng(0)

    def seen(width):
        blocks = Image.fromarray(random.integers(0, 256, (6, width // 8, 3), np.uint8))
        return blocks.resize((width, 48))

    scene = seen(400)
    for number, name in enumerate(names):
        start = 2 * number
        frame = scene.crop((start, 0, start + 64, 48)) if is_a_film else seen(64)
        frame.save(tmp_path / name)
    sentence = films([str(tmp_path / name) for name in names])
    assert bool(sentence) == bool(said) and re.search(said, sentence)


@pytest.mark.posix
def test_named_pipes_are_no_frames(tmp_path):
    pipes = [tmp_path / f"{number}.png" for number in range(20)]
    for pipe in pipes:
        os.mkfifo(pipe)
    assert films([*map(str, pipes)]) == ""
