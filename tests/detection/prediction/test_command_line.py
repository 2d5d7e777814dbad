import json
import shutil

import cv2
import numpy as np
import pytest

from lambda_det.detection.data.picture_folder import outputs_below
from lambda_det.detection.prediction import command_line as tool
from tests import forked


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "photo.png"
    cv2.imwrite(str(path), np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8))
    return path


def arguments(run, image, tmp_path, *more):
    words = [run[0].parent, "--input", image, "--output", tmp_path / "out"]
    return [*map(str, words), *more]


@pytest.mark.slow
def test_works_as_a_command_from_another_folder(run, image, tmp_path):
    """With the last checkpoint of the run; what cannot be read is counted."""
    (tmp_path / "broken.jpg").write_text("no image")
    words = ["-m", "lambda_det", "predict", *arguments(run, image, tmp_path)]
    words.insert(words.index(str(image)), "broken.jpg")
    done = forked.run([*words, "--score-threshold", "0"], tmp_path / "printed", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    for text in (str(run[1]), "5 instances on 1 picture", "1 could not be read"):
        assert text in done.stdout
    assert cv2.imread(str(tmp_path / "out" / "photo.png")).shape == (48, 64, 3)


@pytest.mark.slow
def test_keys_at_the_end_change_the_model_which_computes_in_bfloat16(run, image, tmp_path, capsys):
    more = ("--score-threshold", "0", "--precision", "bfloat16", "TEST.DETECTIONS_PER_IMAGE", "2")
    assert tool.main(arguments(run, image, tmp_path, *more)) == 0
    assert "2 instances" in capsys.readouterr().out


def test_a_checkpoint_stands_for_the_folder_of_its_run(run, image, tmp_path, capsys):
    words = arguments(run, image, tmp_path)
    assert tool.main([str(run[1]), *words[1:]]) == 0
    assert str(run[1]) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("TEST.PRECISION", "float8"), "float8"),
        (("MODEL.DEVISE", "cpu"), "MODEL.DEVICE"),
        (("MODEL.DEVICE",), "MODEL.DEVICE"),
        (("MODEL.WEIGHTS", "other.pth"), "name the checkpoint"),
        (("detector.onnx", "--raw"), "--raw"),
        (("detector.onnx", "MODEL.DEVICE", "cpu"), "MODEL.DEVICE"),
        (("--limit", "3"), None),  # without a data set
        (("--limit", "0", "--dataset", "a"), None),
    ],
)
def test_mistakes_end_in_one_sentence(run, image, tmp_path, capsys, more, words):
    typed = arguments(run, image, tmp_path)
    if more[0] == "detector.onnx":
        typed, more = [more[0], *typed[1:]], more[1:]
    typed += more
    if words is None:
        with pytest.raises(SystemExit):
            tool.main(typed)
        return
    assert tool.main(typed) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    assert words in message
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_by_its_folder_and_annotations_beside_the_pictures(run, image, tmp_path, capsys):
    words = arguments(run, image, tmp_path)
    words += ["--score-threshold", "0", "--json", str(tmp_path / "found.json")]
    assert tool.main(words) == 0
    assert "5 instances on 1 picture" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "found.json").read_text())["annotations"]) == 5
    assert tmp_path / "out" in outputs_below(tmp_path)  # which are no data
    (tmp_path / "out/photo.png").unlink()
    assert tool.main(words) == 2
    assert "found.json" in capsys.readouterr().err
    assert not (tmp_path / "out/photo.png").exists()
    assert tool.main([*words, "--overwrite"]) == 0
    assert "--score-threshold" not in capsys.readouterr().out
    # A detector that was trained for a short time has low scores: nothing is not the last word
    words[words.index("0")] = "1"
    assert tool.main([*words, "--overwrite"]) == 0
    printed = capsys.readouterr().out
    assert "0 instances on 1 picture" in printed and "--score-threshold" in printed


@pytest.mark.slow
def test_labels_of_other_tools_beside_the_pictures(run, image, tmp_path, capsys):
    """Of two inputs, each label names its picture; names that clash are refused before the work."""
    other, out = tmp_path / "other", tmp_path / "out"
    other.mkdir()
    shutil.copy(image, other / "two.png")
    words = [run[0].parent, "--output", out, "--score-threshold", "0"]
    words = [*map(str, words), "--format", "labelme", "--input", str(image)]
    assert tool.main([*words, str(other)]) == 0
    for name, picture in (("photo", image), ("two", other / "two.png")):
        file = out / "labels" / f"{name}.json"
        content = json.loads(file.read_text("utf-8"))
        assert (file.parent / content["imagePath"]).resolve() == picture.resolve()
        assert len(content["shapes"]) >= 5
    (out / "photo.png").unlink()
    assert tool.main(words) == 2
    assert str(out / "labels") in capsys.readouterr().err
    shutil.copy(image, other / "photo.jpg")
    shutil.rmtree(out)
    assert tool.main([*words, str(other)]) == 2
    assert "photo.jpg and photo.png" in capsys.readouterr().err and not out.exists()
