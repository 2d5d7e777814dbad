import csv
import json
import shutil
from collections import Counter

import cv2
import numpy as np
import pytest
import torch

from lambda_det.detection.data.image_folder import outputs_below
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
    texts = (str(run[1]), "photo.png: ", "5 instances on 1 image", "1 could not be read")
    for text in texts:
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
    given = arguments(run, image, tmp_path)
    if more[0] == "detector.onnx":
        given, more = [more[0], *given[1:]], more[1:]
    given += more
    if words is None:
        with pytest.raises(SystemExit):
            tool.main(given)
        return
    assert tool.main(given) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    assert words in message
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_by_its_folder_and_annotations_beside_the_images(run, image, tmp_path, capsys):
    words = arguments(run, image, tmp_path)
    words += ["--score-threshold", "0", "--json", str(tmp_path / "found.json")]
    assert tool.main(words) == 0
    assert "5 instances on 1 image" in capsys.readouterr().out
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
    assert "0 instances on 1 image" in printed and "--score-threshold" in printed


@pytest.mark.slow
def test_labels_of_other_tools_beside_the_images(run, image, tmp_path, capsys):
    """Of two inputs, each label names its image; names that clash are refused before the work."""
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


@pytest.mark.slow
def test_counts_by_class_are_printed_and_written_as_tables(run, image, tmp_path, capsys):
    shutil.copy(image, tmp_path / "again.png")
    words = arguments(run, image, tmp_path, "--score-threshold", "0")
    words += ["--csv", str(tmp_path / "found.csv"), "--input", str(image)]
    words += [str(tmp_path / "again.png")]
    assert tool.main(words) == 0
    printed = capsys.readouterr().out
    with (tmp_path / "found.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with (tmp_path / "found_counts.csv").open(newline="") as file:
        counts = list(csv.DictReader(file))
    assert len(rows) == 10 and [row["picture"] for row in counts] == ["photo.png", "again.png"]
    for of_image in counts:
        name, total = of_image.pop("picture"), of_image.pop("total")
        assert total == "5"
        found = Counter(row["class"] for row in rows if row["picture"] == name)
        assert found == {key: int(value) for key, value in of_image.items() if int(value)}
        line = next(line for line in printed.splitlines() if line.startswith(f"{name}: "))
        assert all(f"{count} {key}" in line for key, count in found.items())
    for left, other in (("found.csv", "found_counts.csv"), ("found_counts.csv", "found.csv")):
        shutil.rmtree(tmp_path / "out")
        (tmp_path / other).rename(tmp_path / "moved.csv")
        assert tool.main(words) == 2
        assert left in capsys.readouterr().err and not (tmp_path / "out").exists()
        (tmp_path / "moved.csv").rename(tmp_path / other)
        (tmp_path / "out").mkdir()
    assert tool.main([*words, "--overwrite"]) == 0


@pytest.mark.slow
def test_the_best_score_of_the_run_is_the_threshold_unless_one_is_given(
    run, image, tmp_path, capsys, caplog
):
    folder = tmp_path / "run"
    shutil.copytree(run[0].parent, folder)
    words = [str(folder), *arguments(run, image, tmp_path)[1:], "--overwrite"]
    said = "Score threshold: "
    assert tool.main(words) == 0
    assert f"{said}0.5," in capsys.readouterr().out and "weak" not in caplog.text
    content = torch.load(run[1], weights_only=True)
    recorded = {"best_scores": {"raw": 0.0625}, "config": run[0].read_text()}
    torch.save({**content, "run": recorded}, folder / "model_final.pth")
    assert tool.main(words) == 0
    printed = capsys.readouterr().out
    assert f"{said}0.0625," in printed and "5 instances" in printed
    assert "weak" in caplog.text and "--score-threshold" in caplog.text
    caplog.clear()
    assert tool.main([*words, "--score-threshold", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"{said}1," in printed and "photo.png: nothing" in printed
    assert "weak" not in caplog.text


@pytest.mark.slow
def test_labels_to_correct_are_simple_and_annotations_exact(run, image, tmp_path):
    """The masks of a detector with random weights are noise."""
    out, exact = tmp_path / "out", tmp_path / "found.json"
    words = arguments(run, image, tmp_path, "--score-threshold", "0")
    assert tool.main([*words, "--format", "coco", "--json", str(exact)]) == 0
    points = [
        sum(len(part) for a in content["annotations"] for part in a["segmentation"])
        for content in (json.loads(p.read_text()) for p in (out / "labels.json", exact))
    ]
    assert 0 < points[0] < points[1]
