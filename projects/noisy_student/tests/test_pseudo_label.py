import pytest
import timm

from tests.classification.tiny import make_images
from tests.malicious import write_malicious
from tests.tool import load_tool

tool = load_tool("pseudo_label", "projects/noisy_student")


@pytest.fixture
def words(tmp_path, monkeypatch):
    """A command line with a small timm teacher."""
    make_images(tmp_path)
    network = timm.create_model("test_resnet", num_classes=1000)
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: network)
    (tmp_path / "file").touch()
    start = ["timm:test_resnet", tmp_path / "train", tmp_path / "labels.tsv", "--workers", 0]
    return [str(word) for word in (*start, "--threshold", 0, "--device", "cpu")]


def test_it_labels_and_does_not_overwrite(words, tmp_path, capsys):
    assert tool.main(words) == 0
    assert "24 labels" in capsys.readouterr().out
    assert tool.main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert tool.main([*words, "--overwrite", "--per-class", "1"]) == 0  # without asking again
    lines = (tmp_path / "labels.tsv").read_text().splitlines()
    assert lines[0].startswith("# lambda_det pseudo-labels")
    assert 5 <= len(lines) < 28


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--threshold", "2"], "--threshold"),
        (["--fill"], "--per-class"),
        (["--batch-size", "0"], "--batch-size"),
        (["--workers", "-1"], "--workers"),
        (["--device", "tpu9"], "device"),
    ],
)
def test_mistakes_are_one_sentence(words, tmp_path, capsys, more, word):
    assert tool.main([*words, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and word in error and error.count("\n") == 1
    assert not (tmp_path / "labels.tsv").exists()


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    ("labels", "word"),
    [
        ("file/labels.tsv", "cannot be written"),
        ("file/deeper/labels.tsv", "cannot be written"),
        ("train", "train is a folder"),
        (".", ". is a folder"),
        ("taken", "taken.predictions is a folder"),
    ],
)
def test_labels_that_cannot_be_written(words, tmp_path, capsys, monkeypatch, labels, word, more):
    (tmp_path / "taken.predictions").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("noisy_student.teacher.load_teacher", None)  # before anything is computed
    before = sorted(tmp_path.rglob("*"))
    words[2] = labels
    assert tool.main([*words, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and word in error and error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_read_only_folder(words, capsys, monkeypatch):
    monkeypatch.setattr("noisy_student.teacher.load_teacher", None)
    monkeypatch.setattr(tool.os, "access", lambda path, mode: False)  # root may write anywhere
    assert tool.main(words) == 2
    assert "read-only" in capsys.readouterr().err


def test_a_missing_image_folder(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("noisy_student.teacher.load_teacher", None)
    words[1] = str(tmp_path / "nowhere")
    assert tool.main(words) == 2
    assert capsys.readouterr().err == f"error: There is no image folder {words[1]}.\n"
    (tmp_path / "nowhere").mkdir()
    assert tool.main(words) == 2
    assert capsys.readouterr().err == f"error: There are no images in {words[1]}.\n"


@pytest.mark.parametrize("ending", [".pth", ".pkl"])
def test_a_program_in_a_teachers_file_does_not_run(tmp_path, capsys, ending):
    make_images(tmp_path)
    mark = tmp_path / "the-program-ran"
    evil = write_malicious(tmp_path / f"evil{ending}", mark)
    assert tool.main([str(evil), str(tmp_path / "train"), str(tmp_path / "labels.tsv")]) == 2
    error = capsys.readouterr().err
    assert str(evil) in error and "refused" in error and not mark.exists()
