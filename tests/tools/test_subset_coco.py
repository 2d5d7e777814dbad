import json
import runpy
from pathlib import Path

import pytest

from lambda_det.detection.data import check_coco
from tests.shapes import make_shapes

TOOL = Path(__file__).parents[2] / "datasets" / "subset_coco.py"
main = runpy.run_path(str(TOOL))["main"]


@pytest.fixture
def shapes(tmp_path):
    make_shapes(tmp_path, num_train=5, num_val=1, size=64)
    folder = tmp_path / "shapes"
    return folder / "annotations" / "instances_train.json", folder / "train"


def test_the_first_images_keep_all_their_annotations(shapes, tmp_path, capsys):
    source, images = shapes
    target = tmp_path / "few.json"
    assert main([str(source), str(target), "--images", "2"]) == 0
    whole, few = json.loads(source.read_text()), json.loads(target.read_text())
    assert few["images"] == whole["images"][:2]
    assert few["annotations"] == [a for a in whole["annotations"] if a["image_id"] in (1, 2)]
    assert few["categories"] == whole["categories"]
    assert check_coco(target, images).refusal() is None
    assert f"2 images, {len(few['annotations'])} annotations" in capsys.readouterr().out


def test_nothing_is_overwritten_and_only_coco_format_is_read(shapes, tmp_path, capsys):
    source, _ = shapes
    before = source.read_bytes()
    assert main([str(source), str(source)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert source.read_bytes() == before
    bad, target = tmp_path / "bad.json", tmp_path / "few.json"
    for text in ("{", "[]", '{"images": []}'):
        bad.write_text(text)
        assert main([str(bad), str(target)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {bad}")
        assert not target.exists()
