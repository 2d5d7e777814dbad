"""Files of strangers, through every command that reads them: no program in them is run."""

import pickle
import shutil

import pytest
import torch

from lambda_det.detection.prediction import command_line as predict
from lambda_det.export import backbone_command as export_backbone
from lambda_det.export import command_line as export_model
from tests.classification.tiny import RECIPE, make_images
from tests.malicious import write_malicious
from tests.tool import load_tool
from tests.training.tiny_detector import CONFIG, save_run

lazyconfig_train_net = load_tool("lazyconfig_train_net")
train_imagenet = load_tool("train_imagenet")
train_net = load_tool("train_net")


@pytest.fixture
def mark(tmp_path):
    """What a program in a file would leave; each test must see that it is not there."""
    return tmp_path / "the-program-ran"


@pytest.fixture(scope="module")
def _run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    save_run(folder)
    return folder


@pytest.fixture
def run(_run, tmp_path):
    """The folder of a run, which a test may change."""
    return shutil.copytree(_run, tmp_path / "run")


def _refused(main, words, capsys, mark, *expected):
    assert main([str(word) for word in words]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: "), last
    for part in expected:
        assert part in last
    assert not mark.exists()


ENDINGS = pytest.mark.parametrize("ending", [".pth", ".pkl", ".pyth"])


def test_the_files_would_run_the_program(tmp_path, mark):
    for ending in (".pth", ".pkl"):
        path = write_malicious(tmp_path / f"evil{ending}", mark)
        with open(path, "rb") as file:
            torch.load(file, weights_only=False) if ending == ".pth" else pickle.load(file)
        assert mark.exists()
        mark.rmdir()


@ENDINGS
@pytest.mark.parametrize("flags", [[], ["--eval-only"]], ids=["train", "evaluate"])
def test_weights_of_a_detector(tmp_path, capsys, mark, ending, flags):
    (tmp_path / "c.yaml").write_text(CONFIG)
    evil = write_malicious(tmp_path / f"evil{ending}", mark)
    words = ["--config-file", tmp_path / "c.yaml", *flags, "MODEL.WEIGHTS", evil]
    words += ["OUTPUT_DIR", tmp_path / "run"]
    _refused(train_net.main, words, capsys, mark, str(evil), "refused")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags", [[], ["--eval-only"]], ids=["train", "evaluate"])
@pytest.mark.parametrize(
    "main", [train_net.main, train_imagenet.main], ids=["detector", "imagenet"]
)
def test_a_checkpoint_to_resume(tmp_path, capsys, mark, main, flags):
    run = tmp_path / "run"
    run.mkdir()
    evil = write_malicious(run / "model_0000005.pth", mark)
    (run / "last_checkpoint").write_text(evil.name)
    if main is train_net.main:
        (tmp_path / "c.yaml").write_text(CONFIG)
        data = []
    else:
        (tmp_path / "c.yaml").write_text(RECIPE)
        make_images(tmp_path)
        data = ["DATA.TRAIN", tmp_path / "train", "DATA.VAL", tmp_path / "val"]
    words = ["--config-file", tmp_path / "c.yaml", "--resume", *flags, *data, "OUTPUT_DIR", run]
    _refused(main, words, capsys, mark, "model_0000005.pth", "could run a program")


@pytest.mark.parametrize("place", ["OUTPUT_DIR", "MODEL"])
def test_a_configuration(tmp_path, capsys, mark, place, run):
    """As --config-file, and as the config.yaml of a run."""
    evil = f"{place}: !!python/object/apply:os.mkdir ['{mark}']\n"
    (tmp_path / "evil.yaml").write_text(evil)
    for main in (train_net.main, lazyconfig_train_net.main, train_imagenet.main):
        _refused(main, ["--config-file", tmp_path / "evil.yaml"], capsys, mark)
    good = tmp_path / "c.yaml"
    good.write_text(CONFIG)
    (run / "config.yaml").write_text(evil)
    words = ["--config-file", good, "--resume", "OUTPUT_DIR", run]
    _refused(train_net.main, words, capsys, mark)
    words = [run, "--input", good, "--output", tmp_path / "out"]
    _refused(predict.main, words, capsys, mark)
    _refused(export_model.main, [run, tmp_path / "d.onnx"], capsys, mark)
    words = [run / "model_final.pth", tmp_path / "b.pth"]
    _refused(export_backbone.main, words, capsys, mark)


@ENDINGS
def test_weights_to_predict_with(tmp_path, capsys, mark, ending, run):
    evil = write_malicious(tmp_path / f"evil{ending}", mark)
    words = ["--input", run / "config.yaml", "--output", tmp_path / "out"]
    _refused(predict.main, [evil, *words], capsys, mark, str(evil), "refused")
    write_malicious(run / "model_final.pth", mark)
    _refused(predict.main, [run, *words], capsys, mark, "model_final.pth", "refused")


@ENDINGS
def test_a_checkpoint_to_export(tmp_path, capsys, mark, ending):
    evil = write_malicious(tmp_path / f"evil{ending}", mark)
    words = [evil, tmp_path / "backbone.pth"]
    _refused(export_backbone.main, words, capsys, mark, str(evil), "refused")
    words = [evil, tmp_path / "model.onnx"]
    _refused(export_model.main, words, capsys, mark, str(evil), "refused")
    assert not (tmp_path / "model.onnx").exists()
    assert not (tmp_path / "backbone.pth").exists()
