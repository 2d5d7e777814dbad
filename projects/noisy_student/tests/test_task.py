"""The student: its loss against the formula, its batches, and a run that is killed and resumed."""

import itertools
import re
from pathlib import Path

import pytest
import torch

from lambda_det.classification import load_recipe, parser, run
from lambda_det.classification.config import get_classification_config
from lambda_det.config import leaves
from lambda_det.errors import ConfigError, DataError
from noisy_student.pseudo_labels import write_pseudo_labels
from noisy_student.task import Student, StudentTask, get_student_config
from tests.classification.tiny import COLOURS, RECIPE, make_images
from tests.reliability.ends import Killed, kill_before

PROJECT = Path(__file__).parents[1]
CLASSES = sorted(COLOURS)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    make_images(root := tmp_path_factory.mktemp("pictures"))
    return root


def write_labels(path, images, first=0):
    """Of the nine images of val, from the first of them on; the label of image n is n % 3."""
    names = sorted(str(p.relative_to(images / "val")) for p in (images / "val").rglob("*.jpg"))
    rows = [(name, [(n % 3, 0.7), ((n + 1) % 3, 0.2)]) for n, name in enumerate(names)]
    write_pseudo_labels(path, rows[first:], classes=CLASSES, teacher="x", root="y")


@pytest.fixture
def arguments(images, tmp_path):
    """Makes the parsed command line of a run in tmp_path/run, 8 labelled and 12 other images."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    write_labels(tmp_path / "labels.tsv", images)
    pairs = {
        "DATA.TRAIN": images / "train",
        "DATA.VAL": images / "val",
        "DATA.PSEUDO_LABELS": tmp_path / "labels.tsv",
        "DATA.PSEUDO_IMAGES": images / "val",
        "DATA.PSEUDO_RATIO": 1.5,
        "INPUT.RANDAUGMENT.LAYERS": 0,
        "OUTPUT_DIR": tmp_path / "run",
    }

    def make(*flags, **changes):
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        words = [str(word) for pair in (pairs | changed).items() for word in pair]
        return parser().parse_args(["--config-file", str(tmp_path / "recipe.yaml"), *flags, *words])

    return make


@pytest.fixture
def task(arguments):
    return lambda **changes: StudentTask.read(arguments(**changes)).prepare(train=True)


# ----------------------------------------------------------------------------------------- the loss


class _Scores(torch.nn.Module):
    """One linear layer on the mean colour, in float64."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, images):
        return self.linear(images.double().mean((2, 3)))


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("others", [2, 9])  # for three labelled images
def test_the_loss_is_noisy_students(others, hard, monkeypatch):
    """(labelled mean x labelled + other mean x others) / labelled: main.py, lines 547 to 550."""
    model = Student(_Scores(), [0.0] * 3, [255.0] * 3, label_smoothing=0.1)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # keep the scores' digits
    images, more = (torch.randint(0, 256, (n, 8, 8, 3), dtype=torch.uint8) for n in (3, others))
    labels = torch.tensor([0, 3, 1])
    pseudo = torch.randint(4, (others,)) if hard else torch.rand(others, 4).double().softmax(1)
    batch = {"images": images, "labels": labels, "pseudo_images": more, "pseudo_labels": pseudo}
    losses = model.train()(batch)

    def mean(pixels, targets):
        logarithms = model.classifier((pixels / 255).permute(0, 3, 1, 2)).log_softmax(1)
        return -(targets * logarithms).sum(1).mean()

    def smoothed(hard_labels):
        return 0.9 * torch.nn.functional.one_hot(hard_labels, 4).double() + 0.1 / 4

    first = mean(images, smoothed(labels))
    second = mean(more, smoothed(pseudo) if hard else pseudo)
    expected = (first * 3 + second * others) / 3
    torch.testing.assert_close(sum(losses.values()), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(losses["loss"], first, rtol=1e-12, atol=0)
    assert model.eval()({"images": images}).shape == (3, 4)


def test_as_many_images_of_the_same_label_double_the_gradient():
    model = Student(_Scores(), [0.0] * 3, [255.0] * 3).train()
    images = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8)
    batch = {"images": images, "labels": torch.tensor([0, 1, 2, 3])}
    alone = {**batch, "pseudo_images": images[:0], "pseudo_labels": batch["labels"][:0]}
    twice = {**batch, "pseudo_images": images, "pseudo_labels": batch["labels"]}
    found = [
        torch.autograd.grad(sum(model(b).values()), model.classifier.linear.weight)[0]
        for b in (alone, twice)
    ]
    torch.testing.assert_close(found[1], 2 * found[0])


# ---------------------------------------------------------------------------------------- batches


def batches(task, count, begun=0):
    loader = task.build_train_loader()
    loader.begin(0, begun)
    return list(itertools.islice(loader, count))


def test_each_batch_has_other_images_in_the_ratio(task):
    """Each kind in epochs and an order of its own; the labelled one as without the others."""
    made = task()
    found = batches(made, 6)
    alone = super(StudentTask, made).build_train_loader()
    for batch, labelled in zip(found, alone, strict=False):
        assert torch.equal(batch["images"], labelled["images"])
        assert batch["pseudo_images"].shape == (12, 32, 32, 3)
        assert batch["pseudo_labels"].dtype == torch.float32
        assert torch.equal(batch["pseudo_labels"].argmax(1), batch["pseudo_indices"] % 3)
        names = made.image_names(batch)
        assert len(names) == 20 and names[8:] == list(
            map(made.pseudo.name, batch["pseudo_indices"])
        )
    seen = torch.cat([batch["pseudo_indices"] for batch in found]).tolist()
    assert all(sorted(seen[n : n + 9]) == list(range(9)) for n in range(0, 72, 9))
    (hard,) = batches(task(DATA__PSEUDO_TEMPERATURE=0), 1)
    assert torch.equal(hard["pseudo_labels"], found[0]["pseudo_indices"] % 3)


def test_batches_can_be_begun_anywhere(task):
    made = task()
    for batch, other in zip(batches(made, 5)[2:], batches(made, 3, begun=2), strict=True):
        torch.testing.assert_close(batch, other, rtol=0, atol=0)


@pytest.mark.slow
def test_killed_and_resumed_is_the_run_that_was_not(arguments, images, tmp_path, monkeypatch):
    """Of 24 labelled images, 8 a step in 2 epochs: the steps are those of the labelled ones."""
    run(arguments(OUTPUT_DIR=tmp_path / "whole"), StudentTask)
    with monkeypatch.context() as patch:
        kill_before(patch, 5)
        with pytest.raises(Killed):
            run(arguments(), StudentTask)
    write_labels(tmp_path / "labels.tsv", images, first=1)
    with pytest.raises(DataError, match=r"DATA\.PSEUDO_LABELS"):
        run(arguments("--resume"), StudentTask)
    write_labels(tmp_path / "labels.tsv", images)
    run(arguments("--resume"), StudentTask)
    whole, resumed = (
        torch.load(tmp_path / name / "model_final.pth", weights_only=True)
        for name in ("whole", "run")
    )
    assert whole["iteration"] == 5
    for part in ("model", "ema", "trainer"):
        states = (dict(leaves(state[part])) for state in (whole, resumed))
        one, other = ({k: v for k, v in s.items() if torch.is_tensor(v)} for s in states)
        assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# ---------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("DATA.PSEUDO_LABELS", ""),
        ("DATA.PSEUDO_IMAGES", ""),
        *(("DATA.PSEUDO_RATIO", value) for value in (0.0, -1.0, "nan", "inf", 0.3)),
        *(("DATA.PSEUDO_TEMPERATURE", value) for value in (-1.0, "nan")),
    ],
)
def test_values_that_cannot_be(task, key, value):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        task(**{key.replace(".", "__"): value})


def test_the_recipe_differs_by_its_data_alone():
    args = parser().parse_args(["--config-file", str(PROJECT / "semi_supervised.yaml")])
    cfg = StudentTask.read(args).cfg
    base = load_recipe(
        parser().parse_args(
            [
                "--config-file",
                str(PROJECT.parents[1] / "configs/imagenet/lambda_resnet152_224.yaml"),
            ]
        )
    )
    assert cfg.DATA.PSEUDO_LABELS and cfg.DATA.PSEUDO_IMAGES
    for section in ("MODEL", "INPUT", "SOLVER", "TEST"):
        assert cfg[section] == base[section]


def test_the_page_names_the_keys_and_files_there_are():
    text = (PROJECT / "README.md").read_text("utf-8")
    own = {key for key, _ in leaves(get_student_config())}
    assert own - {key for key, _ in leaves(get_classification_config())} <= set(
        re.findall(r"DATA\.PSEUDO_[A-Z]+", text)
    )
