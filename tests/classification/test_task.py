"""Runs from the command line on: what they leave, how they resume, what they refuse."""

import json
import math
import shutil

import pytest
import torch

from lambda_det.classification import run
from lambda_det.errors import ConfigError, DataError, UserError
from tests.classification.tiny import NETWORK, train
from tests.reliability.ends import Killed, kill_before
from tests.reliability.runs import content, differences


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def _load(path):
    return torch.load(path, weights_only=True)


SAME = ("DATA.HELD_OUT", 0.25, "SOLVER.CHECKPOINTS_KEPT", 1)


@pytest.fixture(scope="module")
def finished(images, tmp_path_factory):
    """The folder of a run that went to its end, with held-out images."""
    return train(tmp_path_factory.mktemp("finished"), images, *NETWORK, *SAME)


@pytest.mark.slow
def test_what_a_run_leaves(finished):
    # 18 images are left of 24: 18 * 2 / 8 steps, rounded
    checkpoint = _load(finished / "model_final.pth")
    assert checkpoint["iteration"] == 3
    assert checkpoint["recipe"]["classes"] == ["blue", "green", "red"]
    assert checkpoint["recipe"]["model"] == "resnet14_slim_lambda_c5"
    assert checkpoint["ema"]["updates"] == 4
    assert checkpoint["ema"]["model"].keys() == checkpoint["model"].keys()
    assert set(checkpoint["results"]) == {"held_out", "val"}
    assert checkpoint["precise_statistics"] == ["ema", "raw"]
    assert (finished / "last_checkpoint").read_text() == "model_final.pth"
    numbered = sorted(path.name for path in finished.glob("model_0*.pth"))
    assert numbered == []  # one is kept, the final one
    assert (finished / "model_best.pth").exists()
    assert list(finished.glob("events.out.tfevents*"))
    logged = [json.loads(line) for line in (finished / "metrics.json").read_text().splitlines()]
    assert {"lr", "total_loss", "val/ema_top1", "held_out/raw_top5"} <= set(logged[-1])
    rows = [line for line in logged if "val/raw_top1" in line]
    # 18 / 8 steps an epoch
    assert [row["iteration"] for row in rows] == [2, 3]
    # warmed up in 0.5 of 2 epochs: the rates of steps 2 and 3 of 4
    expected = [0.025 * (1 + math.cos(math.pi * (where - 0.25) / 0.75)) for where in (0.5, 0.75)]
    assert [row["lr"] for row in rows] == pytest.approx(expected)
    for row in rows:  # of its own images
        assert row["held_out/raw_loss"] != row["val/raw_loss"]
    best = max(rows, key=lambda row: row["held_out/ema_top1"])
    assert _load(finished / "model_best.pth")["iteration"] == best["iteration"]


def test_evaluation_of_a_file_gives_what_training_gave(finished, arguments, caplog):
    caplog.set_level("INFO")
    best = finished / "model_final.pth"
    run(arguments("--eval-only", "MODEL.WEIGHTS", best))
    row = json.loads((finished / "metrics.json").read_text().splitlines()[-1])
    line = next(r.message for r in caplog.records if "model_final.pth: val" in r.message)
    for weights in ("raw", "ema"):
        top1, top5 = (row[f"val/{weights}_{name}"] for name in ("top1", "top5"))
        assert f"val/{weights}_top1 {top1:.4g}, val/{weights}_top5 {top5:.4g}" in line


def test_a_finished_run_is_not_trained_further(finished, arguments, caplog):
    """Nor does its configuration become one that no step was taken with."""
    caplog.set_level("INFO")
    files = [finished / name for name in ("model_final.pth", "config.yaml")]
    before = [file.read_bytes() for file in files]
    run(arguments("--resume", "OUTPUT_DIR", finished, *SAME, "TEST.PATIENCE", "3"))
    assert "over after 4 steps" in caplog.text
    assert [file.read_bytes() for file in files] == before


def test_an_evaluation_that_is_to_come_records_what_it_is_made_with(finished, arguments, folder):
    """Of a run that was killed in its last evaluation, and is resumed otherwise."""
    shutil.copytree(finished, folder)
    content = _load(folder / "model_final.pth")
    content["trainer"]["hooks"]["Evaluation"]["pending"] = True
    torch.save(content, folder / "model_final.pth")
    run(arguments("--resume", "OUTPUT_DIR", folder, *SAME, "TEST.PATIENCE", "3"))
    assert "PATIENCE: 3\n" in (folder / "config.yaml").read_text()


@pytest.fixture
def renamed(images, tmp_path):
    """Makes the keys of the same images, with their classes under other names."""

    def make(**names):
        for part in ("train", "val"):
            (tmp_path / "renamed" / part).mkdir(parents=True)
            for old, new in names.items():
                (tmp_path / "renamed" / part / new).symlink_to(images / part / old)
        return ("DATA.TRAIN", tmp_path / "renamed/train", "DATA.VAL", tmp_path / "renamed/val")

    return make


@pytest.mark.slow
@pytest.mark.posix
def test_starting_from_weights_of_other_classes(finished, arguments, folder, renamed):
    # No step is taken at a rate of 0
    words = ("MODEL.WEIGHTS", finished / "model_best.pth", "SOLVER.BASE_LR", 1e-12)
    run(arguments(*renamed(blue="blue", red="red"), *words))
    before, made = _load(finished / "model_best.pth"), _load(folder / "model_final.pth")
    assert made["model"]["backbone.linear.weight"].shape == (2, 512)
    name = "backbone.res3.0.conv2.weight"
    assert torch.equal(made["model"][name], before["ema"]["model"][name])
    assert not torch.equal(made["model"][name], before["model"][name])
    torch.testing.assert_close(made["ema"]["model"][name], before["ema"]["model"][name])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("MODEL.NAME", "resnet51"), "resnet50"),
        (("SOLVER.AMP.ENABLED", True, "SOLVER.AMP.DTYPE", "float16"), "float16"),
        (("DATA.TRAIN", "nowhere"), "nowhere"),
        (("SEED", -1), "SEED"),
        (("--eval-only", "SOLVER.ACCUMULATE_GRADIENTS", 0), "ACCUMULATE_GRADIENTS"),
        (("MODEL.WEIGHTS", "nowhere.pth"), "nowhere.pth"),
        (("--eval-only",), "MODEL.WEIGHTS"),
        (("--eval-only", "--resume"), "holds none"),
    ],
)
def test_refused_before_anything_is_written(arguments, folder, words, text):
    with pytest.raises(UserError, match=text) as caught:
        run(arguments(*words))
    assert "\n" not in str(caught.value)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "already holds a run"),
        (("--resume", "MODEL.NAME", "resnet50"), "MODEL.NAME"),
        (("--resume", "SOLVER.IMS_PER_BATCH", 4), "SOLVER.IMS_PER_BATCH"),
        (("--resume", "INPUT.SIZE", 64), "INPUT.SIZE"),
        (("--resume", "DATA.HELD_OUT", 0.1), "DATA.HELD_OUT"),
    ],
)
def test_a_folder_of_another_run_is_left_as_it_is(finished, arguments, words, text):
    before = {path: path.stat().st_mtime_ns for path in finished.iterdir()}
    with pytest.raises(ConfigError, match=text):
        run(arguments(*SAME, "OUTPUT_DIR", finished, *words))
    assert {path: path.stat().st_mtime_ns for path in finished.iterdir()} == before


@pytest.mark.slow
@pytest.mark.posix
@pytest.mark.parametrize("flag", ["--eval-only", "--resume"])
def test_a_checkpoint_of_other_classes_is_refused(finished, arguments, renamed, flag):
    data = renamed(blue="blue", green="lime", red="red")
    where = {
        "--eval-only": ("MODEL.WEIGHTS", finished / "model_best.pth"),
        "--resume": ("OUTPUT_DIR", finished, *SAME),
    }
    with pytest.raises(DataError, match=r"DATA\.TRAIN differ: only one has green, lime"):
        run(arguments(flag, *data, *where[flag]))


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run, and the words that continue it."""
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy", ("OUTPUT_DIR", tmp_path / "copy", *SAME, "SOLVER.EPOCHS", 3)


@pytest.mark.slow
def test_a_run_can_be_made_longer(copied, arguments, caplog):
    caplog.set_level("INFO")
    copy, words = copied
    run(arguments("--resume", *words))
    assert _load(copy / "model_final.pth")["iteration"] == 6
    assert "SOLVER.EPOCHS 2.0 -> 3.0" in caplog.text


@pytest.mark.slow
def test_other_images_are_refused(arguments, images, tmp_path, monkeypatch):
    train = tmp_path / "train"
    shutil.copytree(images / "train", train)
    with monkeypatch.context() as patch:
        kill_before(patch, 4)
        with pytest.raises(Killed):
            run(arguments("DATA.TRAIN", train))
    (train / "red/0.jpg").unlink()
    with pytest.raises(DataError, match=r"24 .*DATA\.TRAIN"):
        run(arguments("--resume", "DATA.TRAIN", train))


@pytest.mark.slow
def test_a_compiled_network_trains_as_one_that_is_not(arguments, tmp_path, monkeypatch):
    def compile_eagerly(module):
        module._compiled_call_impl = torch.compile(module._call_impl, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_eagerly)
    words = ("MODEL.NAME", "resnet14_slim", "SOLVER.EPOCHS", 1, "MODEL.STOCHASTIC_DEPTH", 0)
    states = []
    for compiled in (False, True):
        place = tmp_path / f"{compiled}"
        run(arguments(*words, "MODEL.COMPILE", compiled, "OUTPUT_DIR", place))
        states.append(content(place / "model_final.pth"))
    assert differences(*states) == []
