"""Teachers, their predictions, and the choice among them."""

import shutil

import numpy as np
import pytest
import timm
import torch

from lambda_det.classification import run
from lambda_det.classification.data import build_sources
from lambda_det.classification.data.pseudo_labels import read_pseudo_labels
from lambda_det.classification.labelling import Choice, _choose, predict, select
from lambda_det.classification.teacher import load_teacher
from lambda_det.errors import ConfigError, DataError, WeightsError
from tests.classification.tiny import COLOURS, RECIPE, make_pictures


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A short training on three colours, which it can tell apart, and its pictures."""
    from lambda_det.classification import parser

    root = tmp_path_factory.mktemp("teacher")
    make_pictures(root / "pictures")
    (root / "recipe.yaml").write_text(RECIPE)
    pairs = ["DATA.TRAIN", root / "pictures/train", "DATA.VAL", root / "pictures/val"]
    pairs += ["OUTPUT_DIR", root / "run", "SOLVER.EPOCHS", 4, "INPUT.RANDAUGMENT.LAYERS", 0]
    run(parser().parse_args(["--config-file", str(root / "recipe.yaml"), *map(str, pairs)]))
    return root / "run/model_final.pth"


@pytest.fixture(scope="module")
def teacher(checkpoint):
    return load_teacher(str(checkpoint), weights=None, classes=None, device="cpu")


@pytest.fixture
def unlabelled(checkpoint, tmp_path):
    """Pictures whose names, apart from their folder, say nothing; and one that is broken."""
    images = tmp_path / "images"
    shutil.copytree(checkpoint.parents[1] / "pictures/val", images)
    (images / "broken.jpg").write_bytes(b"\xff\xd8\xff but no more")
    return images


OPTIONS = {"batch_size": 2, "workers": 0, "max_unreadable": 1}


def test_a_teachers_labels_are_right_and_training_takes_them(teacher, unlabelled, tmp_path, recipe):
    predictions, labels = tmp_path / "labels.predictions", tmp_path / "labels.tsv"
    predict(teacher, str(unlabelled), predictions, **OPTIONS)
    counts = select(predictions, str(unlabelled), labels, teacher, Choice(0.0))
    assert counts.tolist() == [3, 3, 3]  # all but the broken one
    read = read_pseudo_labels(labels)
    assert read.classes == sorted(COLOURS)
    for index in range(len(read.names)):
        assert read.names[index].startswith(read.classes[read.labels[index]])
    cfg = recipe("DATA.PSEUDO_LABELS", labels, "DATA.PSEUDO_IMAGES", unlabelled)
    assert len(build_sources(cfg).train) == 24 + 9


def test_predictions_are_those_of_the_averaged_network(teacher, checkpoint, unlabelled, tmp_path):
    """By hand: Pillow's resizing, the network alone, softmax."""
    from PIL import Image

    import lambda_det

    content = torch.load(checkpoint, weights_only=True)
    options = content["recipe"]["options"]
    network = lambda_det.create_classifier("lambda_resnet26", 3, **options).eval()
    network.load_state_dict(content["ema"]["model"])
    predictions = tmp_path / "p"
    predict(teacher, str(unlabelled), predictions, **OPTIONS)
    lines = predictions.read_text().splitlines()[1:]
    names = sorted(str(p.relative_to(unlabelled)) for p in unlabelled.rglob("*.jpg"))
    assert len(lines) == len(names) == 10
    for name, line in zip(names, lines, strict=True):
        label, confidence = line.split("\t")
        if name == "broken.jpg":
            assert (label, confidence) == ("-1", "0")
            continue
        image = Image.open(unlabelled / name)  # 48 x 40 pixels
        image = image.resize((44, 37), Image.BICUBIC).crop((6, 2, 38, 34))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
        with torch.no_grad():
            scores = network((pixels - mean) / std).softmax(1)[0]
        assert int(label) == scores.argmax()
        assert float(confidence) == pytest.approx(scores.max().item(), abs=2e-3)


def test_stopped_it_continues_where_it_was(teacher, unlabelled, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    predict(teacher, str(unlabelled), whole, **OPTIONS)
    stopped.write_bytes(whole.read_bytes()[:-7])  # killed within a line
    asked = []
    original = type(teacher.model).forward
    monkeypatch.setattr(
        type(teacher.model),
        "forward",
        lambda self, batch: asked.append(len(batch["images"])) or original(self, batch),
    )
    predict(teacher, str(unlabelled), stopped, **OPTIONS)
    assert stopped.read_bytes() == whole.read_bytes()
    assert asked == [1]
    predict(teacher, str(unlabelled), stopped, **OPTIONS)
    assert asked == [1]


def test_predictions_of_other_images_are_not_continued(teacher, unlabelled, tmp_path):
    predictions = tmp_path / "p"
    predict(teacher, str(unlabelled), predictions, **OPTIONS)
    before = predictions.read_bytes()
    (unlabelled / "broken.jpg").unlink()
    with pytest.raises(DataError, match="of other images"):
        predict(teacher, str(unlabelled), predictions, **OPTIONS)
    assert predictions.read_bytes() == before


def test_too_many_broken_images_end_it(teacher, unlabelled, tmp_path):
    with pytest.raises(DataError, match="--max-unreadable is 0"):
        predict(teacher, str(unlabelled), tmp_path / "p", **{**OPTIONS, "max_unreadable": 0})


LABELS = np.array([0, 1, 0, 0, -1, 1, 0])
CONFIDENCES = np.array([0.9, 0.5, 0.3, 0.8, 0.0, 0.2, 0.3])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice(0.0), [0, 1, 2, 3, 5, 6]),
        (Choice(0.3), [0, 1, 2, 3, 6]),
        (Choice(0.31), [0, 1, 3]),
        (Choice(0.3, per_class=2), [0, 1, 3]),
        (Choice(0.3, per_class=3), [0, 1, 2, 3]),  # of equals the first
        (Choice(0.0, per_class=3, fill=True), [0, 1, 1, 2, 3, 5]),
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
    (tmp_path / "p").write_text("# head\n" + "0\t0.75\n" * 10)
    with pytest.raises(DataError, match=r"is 0\.750\); lower --threshold"):
        select(tmp_path / "p", str(unlabelled), tmp_path / "l", teacher, Choice(0.8))
    assert not (tmp_path / "l").exists()


@pytest.fixture(scope="module")
def timm_weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timm")
    network = timm.create_model("resnet10t", num_classes=1000)
    torch.save(network.state_dict(), folder / "weights.pth")
    from safetensors.torch import save_file

    save_file(network.state_dict(), folder / "weights.safetensors")
    return folder, network.eval()


@pytest.mark.parametrize("file", ["weights.pth", "weights.safetensors"])
def test_timms_models_are_teachers(timm_weights, file):
    folder, network = timm_weights
    weights = str(folder / file)
    teacher = load_teacher("timm:resnet10t", weights=weights, classes=None, device="cpu")
    assert teacher.classes[:2] == ["n01440764", "n01443537"] and len(teacher.classes) == 1000
    assert teacher.cfg.INPUT.SIZE == 176  # as timm says
    images = torch.randint(0, 256, (1, 176, 176, 3), dtype=torch.uint8)
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
    with torch.no_grad():
        expected = network((images.permute(0, 3, 1, 2) / 255 - mean) / std)
        torch.testing.assert_close(
            teacher.model({"images": images}), expected, atol=1e-4, rtol=1e-3
        )


class _Program:
    def __reduce__(self):
        return (print, ("it ran",))


def test_teachers_that_cannot_be(timm_weights, checkpoint, tmp_path, capsys):
    weights = str(timm_weights[0] / "weights.pth")

    def load(name, **options):
        return load_teacher(name, **{"weights": None, "classes": None, "device": "cpu", **options})

    with pytest.raises(ConfigError, match="resnet10q"):
        load("timm:resnet10q", weights=weights)
    with pytest.raises(WeightsError, match="resnet18"):
        load("timm:resnet18", weights=weights)
    with pytest.raises(ConfigError, match="knows 1000 classes, and 2 were named"):
        load("timm:resnet10t", weights=weights, classes=["a", "b"])
    with pytest.raises(WeightsError, match="does not say what it is of"):
        load(weights)
    with pytest.raises(ConfigError, match="--weights"):
        load(str(checkpoint), weights=weights)
    torch.save({"state_dict": _Program()}, tmp_path / "program.pth")
    with pytest.raises(WeightsError, match="could run a program"):
        load("timm:resnet10t", weights=str(tmp_path / "program.pth"))
    assert "it ran" not in capsys.readouterr().out
