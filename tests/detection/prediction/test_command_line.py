import csv
import json
import shutil
from collections import Counter

import cv2
import pytest
import torch

from lambda_det.detection.data.image_folder import outputs_below
from lambda_det.detection.prediction import command_line as tool
from lambda_det.detection.prediction import files
from tests import forked


@pytest.fixture
def image(tmp_path, image):
    path = tmp_path / "photo.png"
    cv2.imwrite(str(path), image)
    return path


def arguments(run, image, tmp_path, *more):
    words = [run[0].parent, "--input", image, "--output", tmp_path / "out"]
    return [*map(str, words), *more]


@pytest.mark.slow
def test_works_as_a_command_from_another_folder(run, image, tmp_path):
    """With the last checkpoint of the run; what cannot be read is named at the end."""
    (tmp_path / "broken.jpg").write_text("no image")
    words = ["-m", "lambda_det", "predict", *arguments(run, image, tmp_path)]
    words.insert(words.index(str(image)), "broken.jpg")
    done = forked.run([*words, "--score-threshold", "0"], tmp_path / "printed", cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    texts = (str(run[1]), "photo.png: ", "5 instances on 1 image", "not be read: broken.jpg")
    for text in texts:
        assert text in done.stdout
    assert cv2.imread(str(tmp_path / "out" / "photo.png")).shape == (48, 64, 3)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("TEST.PRECISION", "float8"), "float8"),
        (("MODEL.DEVISE", "cpu"), "MODEL.DEVICE"),
        (("MODEL.DEVICE",), "MODEL.DEVICE"),
        (("MODEL.WEIGHTS", "other.pth"), "name the checkpoint"),
        (("detector.onnx", "--raw"), "--raw"),
        (("detector.onnx", "MODEL.DEVICE", "cpu"), "MODEL.DEVICE"),
        (("--json", "a.csv", "--csv", "a.csv"), "--csv"),
        (("--json", f"{__file__}/a.json"), "is not a folder"),
    ],
)
def test_mistakes_end_in_one_sentence(run, image, tmp_path, capsys, more, words):
    given = arguments(run, image, tmp_path)
    if more[0] == "detector.onnx":
        (tmp_path / more[0]).touch()
        given, more = [str(tmp_path / more[0]), *given[1:]], more[1:]
    assert tool.main([*given, *more]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and words in message
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_annotations_and_tables_beside_the_images(run, image, tmp_path, capsys):
    """The masks of a detector with random weights are noise, of which labels have few points."""
    out, exact, table = (tmp_path / name for name in ("out", "found.json", "found.csv"))
    words = [*arguments(run, image, tmp_path), "--format", "coco", "--json", str(exact)]
    words += ["--csv", str(table)]
    assert tool.main([*words, "--score-threshold", "0"]) == 0
    printed = capsys.readouterr().out
    assert "5 instances on 1 image" in printed and "--score-threshold" not in printed
    labels, annotations = (
        json.loads(p.read_text())["annotations"] for p in (out / "labels.json", exact)
    )
    assert len(annotations) == 5 and out in outputs_below(tmp_path)  # which are no data
    points = [
        sum(len(part) for a in found for part in a["segmentation"])
        for found in (labels, annotations)
    ]
    assert 0 < points[0] < points[1]
    with table.open(newline="") as file:
        counts = Counter(row["class"] for row in csv.DictReader(file))
    assert counts.total() == 5
    line = next(line for line in printed.splitlines() if line.startswith("photo.png: "))
    assert all(f"{count} {key}" in line for key, count in counts.items())
    (out / "photo.png").unlink()
    for file in (exact, table, tmp_path / "found_counts.csv", out / "labels.json"):
        assert tool.main(words) == 2
        assert str(file) in capsys.readouterr().err and not (out / "photo.png").exists()
        file.unlink()
    # A detector that was trained for a short time has low scores: nothing is not the last word
    assert tool.main([*words, "--overwrite", "--score-threshold", "1"]) == 0
    printed = capsys.readouterr().out
    assert "0 instances on 1 image" in printed and "on 1 of 1; a lower" in printed
    assert printed.count("--score-threshold") == 1 and "export" not in printed


def test_a_threshold_that_cannot_be_leaves_no_folder(run, image, tmp_path, capsys):
    assert tool.main([*arguments(run, image, tmp_path), "--score-threshold", "30"]) == 2
    assert "score threshold is 30" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("empty", "is_said"), [(6, True), (5, False)])
def test_most_images_without_an_instance_and_empty_masks_are_said(
    run, image, tmp_path, monkeypatch, capsys, empty, is_said
):
    def predict_on_ten(predictor, *args, **options):
        seen = Counter(image=3, frame=7)
        return files.Outcome([image], [], 9, seen, empty, empty_masks=7 * is_said)

    monkeypatch.setattr(files, "predict", predict_on_ten)
    assert tool.main(arguments(run, image, tmp_path, "--score-threshold", "0.247")) == 0
    printed = capsys.readouterr().out
    assert "9 instances on 3 images and 7 frames" in printed
    assert ("a score of 0.247 or more on 6 of 10; a lower --score" in printed) is is_said
    assert ("7 of 9 masks are empty" in printed) is is_said


@pytest.mark.slow
def test_labels_of_other_tools_beside_the_images(run, image, tmp_path, capsys):
    """Of two inputs, each label names its image; names that clash are refused before the work."""
    other, out = tmp_path / "other", tmp_path / "out"
    other.mkdir()
    shutil.copy(image, other / "two.png")
    words = [*arguments(run, image, tmp_path), "--format", "labelme"]
    words += ["--score-threshold", "0", "--input", str(image), str(other)]
    assert tool.main(words) == 0
    for picture in (image, other / "two.png"):
        file = out / "labels" / f"{picture.stem}.json"
        content = json.loads(file.read_text("utf-8"))
        assert (file.parent / content["imagePath"]).resolve() == picture.resolve()
        assert len(content["shapes"]) >= 5
    (out / "photo.png").unlink()
    (out / "two.png").unlink()
    assert tool.main(words) == 2
    assert str(out / "labels") in capsys.readouterr().err
    shutil.copy(image, other / "photo.jpg")
    shutil.rmtree(out)
    assert tool.main(words) == 2
    assert "photo.jpg and photo.png" in capsys.readouterr().err and not out.exists()


@pytest.mark.slow
def test_the_best_score_of_the_run_is_the_threshold_unless_one_is_given(
    run, image, tmp_path, capsys, caplog
):
    folder = shutil.copytree(run[0].parent, tmp_path / "run")
    content = torch.load(run[1], weights_only=True)
    recorded = {"best_scores": {"raw": 0.0625}, "config": run[0].read_text()}
    torch.save({**content, "run": recorded}, folder / "model_final.pth")
    for source, more, threshold, found in (
        (run[0].parent, [], "0.5 (no evaluation of these weights has recorded one)", ""),
        (folder, ["--score-threshold", "1"], "1", "photo.png: nothing"),
        (folder, [], "0.0625 (of the best F1 at the run's evaluation)", "5 instances"),
    ):
        assert "weak" not in caplog.text
        words = [str(source), *arguments(run, image, tmp_path)[1:], "--overwrite", *more]
        assert tool.main(words) == 0
        printed = capsys.readouterr().out
        assert f"Score threshold: {threshold}\n" in printed and found in printed
    assert "weak" in caplog.text and "--score-threshold" in caplog.text
