"""Files of strangers, through every command that reads them: no program in them is run."""

import pickle
import shutil

import pytest
import torch

from lambda_det.detection.prediction import command_line as predict
from lambda_det.export import backbone_command as export_backbone
from lambda_det.export import command_line as export_model
from tests.malicious import write_malicious
from tests.reliability.runs import classification_words
from tests.tool import load_tool
from tests.training.tiny_detector import save_run

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


@pytest.fixture
def refused(capsys, mark):
    """See that a command refuses a file, which it names, and that no program ran."""

    def refused(main, named, *words):
        assert main([str(word) for word in words]) == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("error: ") and str(named) in last, last
        assert not mark.exists()

    return refused


@pytest.mark.parametrize("ending", [".pth", ".pkl"])
def test_the_files_would_run_the_program(tmp_path, mark, ending):
    path = write_malicious(tmp_path / f"evil{ending}", mark)
    with open(path, "rb") as file:
        torch.load(file, weights_only=False) if ending == ".pth" else pickle.load(file)
    assert mark.exists()


def _train(config, *words):
    return ["--config-file", config, *words]


EVALUATES = pytest.mark.parametrize("flags", [[], ["--eval-only"]], ids=["train", "evaluate"])


@pytest.mark.parametrize("ending", [".pth", ".pkl", ".pyth"])
@EVALUATES
def test_weights_of_a_detector(tmp_path, refused, mark, run, ending, flags):
    evil = write_malicious(tmp_path / f"evil{ending}", mark)
    words = [*flags, "MODEL.WEIGHTS", evil, "OUTPUT_DIR", tmp_path / "new"]
    refused(train_net.main, evil, *_train(run / "config.yaml", *words))
    refused(predict.main, evil, evil, "--input", run, "--output", tmp_path / "out")
    for main, target in ((export_backbone.main, "b.pth"), (export_model.main, "m.onnx")):
        refused(main, evil, evil, tmp_path / target)
        assert not (tmp_path / target).exists()
    assert not (tmp_path / "new").exists()


@EVALUATES
@pytest.mark.parametrize("main", [train_net.main, train_imagenet.main], ids=["detector", "images"])
def test_a_checkpoint_to_resume(tmp_path, refused, mark, run, main, flags):
    folder = tmp_path / "resumed"
    folder.mkdir()
    evil = write_malicious(folder / "model_0000005.pth", mark)
    (folder / "last_checkpoint").write_text(evil.name)
    words = _train(run / "config.yaml", "--resume")
    if main is train_imagenet.main:
        words = classification_words(tmp_path)
    refused(main, evil.name, *words, *flags, "OUTPUT_DIR", folder)


def test_a_run_to_predict_with(tmp_path, refused, mark, run):
    evil = write_malicious(run / "model_final.pth", mark)
    refused(predict.main, evil, run, "--input", run, "--output", tmp_path / "out")


@pytest.mark.parametrize("place", ["OUTPUT_DIR", "MODEL"])
def test_a_configuration(tmp_path, refused, mark, place, run):
    """As --config-file, and as the config.yaml of a run."""
    evil = f"{place}: !!python/object/apply:os.mkdir ['{mark}']\n"
    (tmp_path / "evil.yaml").write_text(evil)
    for main in (train_net.main, lazyconfig_train_net.main, train_imagenet.main):
        refused(main, "", *_train(tmp_path / "evil.yaml"))
    good = shutil.copy(run / "config.yaml", tmp_path)
    (run / "config.yaml").write_text(evil)
    refused(train_net.main, "", *_train(good, "--resume", "OUTPUT_DIR", run))
    refused(predict.main, "", run, "--input", good, "--output", tmp_path / "out")
    refused(export_model.main, "", run, tmp_path / "d.onnx")
    refused(export_backbone.main, "", run / "model_final.pth", tmp_path / "b.pth")
