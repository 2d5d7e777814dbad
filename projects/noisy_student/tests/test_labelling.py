"""Teachers, their predictions, and the choice among them."""

import copy
import dataclasses
import hashlib
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import lambda_det
from lambda_det.classification import parser, run
from lambda_det.errors import ConfigError, DataError, WeightsError
from noisy_student.labelling import Choice, _choose, list_images, predict, select
from noisy_student.pseudo_labels import PseudoLabelSource, read_pseudo_labels
from noisy_student.teacher import load_teacher
from tests.classification.tiny import COLOURS, RECIPE, make_images


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root = tmp_path_factory.mktemp("teacher")
    make_images(root / "pictures")
    return root / "pictures"


@pytest.fixture(scope="module")
def trained(pictures):
    """The checkpoint of a short training on three colours, which it can tell apart."""
    root = pictures.parent
    (root / "recipe.yaml").write_text(RECIPE)
    pairs = ["DATA.TRAIN", pictures / "train", "DATA.VAL", pictures / "val"]
    pairs += ["OUTPUT_DIR", root / "run", "SOLVER.EPOCHS", 4, "INPUT.RANDAUGMENT.LAYERS", 0]
    run(parser().parse_args(["--config-file", str(root / "recipe.yaml"), *map(str, pairs)]))
    return root / "run/model_final.pth"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint like that of a training, of random weights."""
    network = lambda_det.create_classifier("lambda_resnet26_slim", 3)
    average = lambda_det.create_classifier("lambda_resnet26_slim", 3)
    recipe = {
        "model": "lambda_resnet26_slim",
        "options": {},
        "num_classes": 3,
        "classes": sorted(COLOURS),
        "pixel_mean": [123.675, 116.28, 103.53],
        "pixel_std": [58.395, 57.12, 57.375],
        "image_size": 32,
        "config": "INPUT: {SIZE: 32, TEST_CROP: 0.875}",
    }
    path = tmp_path_factory.mktemp("checkpoint") / "model_final.pth"
    states = {"model": network.state_dict(), "ema": {"model": average.state_dict()}}
    torch.save({**states, "recipe": recipe}, path)
    return path


@pytest.fixture(scope="module")
def teacher(checkpoint):
    return load(checkpoint)


def load(path):
    return load_teacher(str(path), "cpu")


@pytest.fixture
def unlabelled(pictures, tmp_path):
    """Images whose names, apart from their folder, say nothing; and one that is broken."""
    images = tmp_path / "images"
    shutil.copytree(pictures / "val", images)
    (images / "broken.jpg").write_bytes(b"\xff\xd8\xff but no more")
    return images


OPTIONS = {"batch_size": 2, "workers": 0}


@pytest.mark.slow
def test_a_teachers_labels_are_right_and_training_takes_them(trained, unlabelled, tmp_path):
    teacher = load(trained)
    predictions, labels = tmp_path / "labels.predictions", tmp_path / "labels.tsv"
    predict(teacher, list_images(str(unlabelled)), predictions, **OPTIONS)
    counts = select(predictions, list_images(str(unlabelled)), labels, teacher, Choice(0.0))
    assert counts.tolist() == [3, 3, 3]  # all but the broken one
    read = read_pseudo_labels(labels)
    assert read.classes == sorted(COLOURS)
    for index in range(len(read.names)):
        assert read.names[index].startswith(read.classes[read.labels[index]])
    assert len(PseudoLabelSource(labels, unlabelled, sorted(COLOURS))) == 9


def test_predictions_are_those_of_the_averaged_network(teacher, checkpoint, unlabelled, tmp_path):
    """By hand: Pillow's resizing, the network alone, softmax."""
    content = torch.load(checkpoint, weights_only=True)
    options = content["recipe"]["options"]
    network = lambda_det.create_classifier("lambda_resnet26_slim", 3, **options).eval()
    network.load_state_dict(content["ema"]["model"])
    predictions = tmp_path / "p"
    predict(teacher, list_images(str(unlabelled)), predictions, **OPTIONS)
    found = read_pseudo_labels(predictions)
    names = sorted(str(p.relative_to(unlabelled)) for p in unlabelled.rglob("*.jpg"))
    names.remove("broken.jpg")
    assert list(found.names) == names and len(names) == 9
    for index, name in enumerate(names):
        image = Image.open(unlabelled / name)  # 48 x 40 pixels
        image = image.resize((44, 37), Image.BICUBIC).crop((6, 2, 38, 34))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
        with torch.no_grad():
            scores = network((pixels - mean) / std).softmax(1)[0]
        kept = scores[scores >= 1e-3].sort(descending=True).values
        own = slice(found.ends[index - 1] if index else 0, found.ends[index])
        assert found.pairs[own].tolist() == scores.argsort(descending=True).tolist()[: len(kept)]
        torch.testing.assert_close(
            torch.from_numpy(found.probabilities[own]), kept, atol=2e-3, rtol=0
        )


def test_stopped_it_continues_where_it_was(teacher, unlabelled, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    predict(teacher, list_images(str(unlabelled)), whole, **OPTIONS)
    stopped.write_bytes(whole.read_bytes()[:-7])  # killed within a line
    asked = []
    original = type(teacher.model).forward
    monkeypatch.setattr(
        type(teacher.model),
        "forward",
        lambda self, batch: asked.append(len(batch["images"])) or original(self, batch),
    )
    predict(teacher, list_images(str(unlabelled)), stopped, **OPTIONS)
    assert stopped.read_bytes() == whole.read_bytes()
    assert asked == [1]
    predict(teacher, list_images(str(unlabelled)), stopped, **OPTIONS)
    assert asked == [1]


def test_predictions_of_other_images_are_not_continued(teacher, unlabelled, tmp_path):
    predictions = tmp_path / "p"
    predict(teacher, list_images(str(unlabelled)), predictions, **OPTIONS)
    before = predictions.read_bytes()
    (unlabelled / "broken.jpg").rename(unlabelled / "abroken.jpg")  # as many, in another order
    with pytest.raises(DataError, match=r"of other images.*10 images with names"):
        predict(teacher, list_images(str(unlabelled)), predictions, **OPTIONS)
    assert predictions.read_bytes() == before


def test_the_hash_of_names_tells_them_apart(tmp_path):
    for folder, names in {"a": ["1.jpg", "2.jpg"], "b": ["1.jpg2.jpg"]}.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    a, b = list_images(str(tmp_path / "a")), list_images(str(tmp_path / "b"))
    assert a.sha256 == hashlib.sha256(b"1.jpg\0002.jpg\0").hexdigest() != b.sha256
    assert [a.names[0], a.names[1]] == ["1.jpg", "2.jpg"]


@pytest.mark.slow
def test_predictions_of_another_teacher_are_not_continued(
    teacher, checkpoint, unlabelled, tmp_path
):
    """One of the same model, from a file of the same name, or of the same for other images."""
    predictions, images = tmp_path / "p", list_images(str(unlabelled))
    predict(teacher, images, predictions, **OPTIONS)
    content = torch.load(checkpoint, weights_only=True)
    next(iter(content["ema"]["model"].values())).mul_(1.001)
    torch.save(content, tmp_path / checkpoint.name)
    other = load(tmp_path / checkpoint.name)
    assert other.description != teacher.description
    cropped = teacher.cfg.clone()
    cropped.INPUT.TEST_CROP = 0.5
    larger = teacher.cfg.clone()
    larger.INPUT.SIZE = 64
    others = {
        "teacher": other,
        "weights": dataclasses.replace(teacher, sha256=other.sha256),
        "32 pixels, crop 0.875": dataclasses.replace(teacher, cfg=cropped),
        "and now .*64 pixels": dataclasses.replace(teacher, cfg=larger),
    }
    before = predictions.read_bytes()
    for word, different in others.items():
        with pytest.raises(DataError, match=f"of another teacher.*{word}"):
            predict(different, images, predictions, **OPTIONS)
    assert predictions.read_bytes() == before


def test_a_damaged_line_is_named(teacher, unlabelled, tmp_path):
    predictions, images = tmp_path / "p", list_images(str(unlabelled))
    predict(teacher, images, predictions, **OPTIONS)
    lines = predictions.read_text().splitlines()
    lines[6] = "blue/0.jpg\t3:0.5000"
    predictions.write_text("\n".join(lines) + "\n")
    before = predictions.read_bytes()
    for work in (
        lambda: predict(teacher, images, predictions, **OPTIONS),
        lambda: select(predictions, images, tmp_path / "l", teacher, Choice(0.0)),
    ):
        with pytest.raises(DataError, match="p, line 7: "):
            work()
    assert predictions.read_bytes() == before


@pytest.mark.parametrize("head", [b"\xff\n", b"name\t0\n", b"# lambda_det predictions 2 {}\n"])
def test_a_file_that_holds_no_predictions(teacher, unlabelled, tmp_path, head):
    (tmp_path / "p").write_bytes(head)
    with pytest.raises(DataError, match=r"/p, line 1: "):
        predict(teacher, list_images(str(unlabelled)), tmp_path / "p", **OPTIONS)
    assert (tmp_path / "p").read_bytes() == head


def test_scores_that_are_not_finite_end_it(teacher, unlabelled, tmp_path):
    model = copy.deepcopy(teacher.model)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    broken = dataclasses.replace(teacher, model=model)
    with pytest.raises(WeightsError, match="not finite"):
        predict(broken, list_images(str(unlabelled)), tmp_path / "p", **OPTIONS)
    assert not len(read_pseudo_labels(tmp_path / "p").names)


LABELS = np.array([0, 1, 0, 0, 1, 0])
CONFIDENCES = np.array([0.9, 0.5, 0.3, 0.8, 0.2, 0.3])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice(0.0), [0, 1, 2, 3, 4, 5]),
        (Choice(0.3), [0, 1, 2, 3, 5]),
        (Choice(0.31), [0, 1, 3]),
        (Choice(0.3, per_class=2), [0, 1, 3]),
        (Choice(0.3, per_class=3), [0, 1, 2, 3]),  # of equals the first
        (Choice(0.0, per_class=3, fill=True), [0, 1, 1, 2, 3, 4]),
        (Choice(0.85, per_class=3, fill=True), [0, 0, 0]),  # a class without any stays so
    ],
)
def test_choice(choice, expected):
    assert _choose(LABELS, CONFIDENCES, 3, choice).tolist() == expected


@pytest.mark.parametrize(
    ("arguments", "word"),
    [((1.5,), "--threshold"), ((0.3, -1), "--per-class"), ((0.3, 0, True), "--fill")],
)
def test_choices_that_cannot_be(arguments, word):
    with pytest.raises(ConfigError, match=word):
        Choice(*arguments)


def test_nothing_sure_enough(teacher, unlabelled, tmp_path):
    images = list_images(str(unlabelled))
    predict(teacher, images, tmp_path / "p", **OPTIONS)
    with pytest.raises(DataError, match=r"0\.\d{3}.*--threshold"):
        select(tmp_path / "p", images, tmp_path / "l", teacher, Choice(1.0))
    assert not (tmp_path / "l").exists()


def test_timms_models_are_teachers(monkeypatch):
    network = timm.create_model("resnet10t", num_classes=1000).eval()
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: network)
    teacher = load("timm:resnet10t")
    assert teacher.classes[:2] == ["n01440764", "n01443537"] and len(teacher.classes) == 1000
    assert teacher.cfg.INPUT.SIZE == 176  # as timm says
    images = torch.randint(0, 256, (1, 176, 176, 3), dtype=torch.uint8)
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
    with torch.no_grad():
        expected = network((images.permute(0, 3, 1, 2) / 255 - mean) / std)
        torch.testing.assert_close(
            teacher.model({"images": images}), expected, atol=1e-4, rtol=1e-3
        )
    network.num_classes = 2
    with pytest.raises(ConfigError, match="1000"):
        load("timm:resnet10t")


def test_teachers_that_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match="resnet10q"):
        load("timm:resnet10q")
    torch.save({"model": {}}, tmp_path / "weights.pth")
    with pytest.raises(WeightsError, match=r"weights\.pth .*timm:NAME"):
        load(tmp_path / "weights.pth")


def test_weights_of_another_model_than_the_recipe_s(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=True)
    content["recipe"]["model"] = "lambda_resnet50"
    torch.save(content, tmp_path / "c.pth")
    with pytest.raises(WeightsError, match="lambda_resnet50, and the averaged"):
        load(tmp_path / "c.pth")


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"model": "lambda_resnet51"}, "lambda_resnet51"), ({"options": {"colour": 3}}, "colour")],
)
def test_a_network_that_does_not_exist_here_is_named_with_its_file(
    checkpoint, tmp_path, changes, word
):
    content = torch.load(checkpoint, weights_only=True)
    content["recipe"].update(changes)
    torch.save(content, tmp_path / "c.pth")
    with pytest.raises(WeightsError, match=rf"{word}.* of {tmp_path}/c\.pth"):
        load(tmp_path / "c.pth")


def test_other_pixel_settings_are_another_teacher(teacher, checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=True)
    content["recipe"]["pixel_std"][0] += 1
    torch.save(content, tmp_path / "c.pth")
    other = load(tmp_path / "c.pth")
    assert other.sha256 != teacher.sha256
    assert f"({other.sha256[:12]})" in other.description
