"""The generated data sets have their names only where no other project has them."""

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection.data import register_shapes
from lambda_det.detection.data.registration import registered_files
from lambda_det.detection.data.shapes import lend_shapes, register_shapes_among
from lambda_det.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """No data set has such a name, and none has it afterwards."""

    def remove():
        for name in [name for name in DatasetCatalog if name.startswith("shapes_")]:
            DatasetCatalog.remove(name)
            if name in MetadataCatalog:
                MetadataCatalog.remove(name)

    remove()
    monkeypatch.setattr(DatasetCatalog, "register", DatasetCatalog.register)
    yield
    remove()


def _register_theirs():
    DatasetCatalog.register("shapes_train", lambda: ["theirs"])
    MetadataCatalog.get("shapes_train").set(thing_classes=["a"])


def _are_theirs() -> bool:
    classes = MetadataCatalog.get("shapes_train").thing_classes
    return DatasetCatalog.get("shapes_train") == ["theirs"] and classes == ["a"]


def test_they_are_registered_where_one_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    register_shapes_among(["coco_2017_val", "mine"])
    assert "shapes_val" not in DatasetCatalog
    with pytest.raises(DataError, match="make_shapes"):  # nothing is in that folder
        registered_files("shapes_val")
    assert MetadataCatalog.get("shapes_train").image_root == str(tmp_path / "shapes/train")
    with pytest.raises(ConfigError, match=r"shapes_trian.*shapes_train"):
        registered_files("shapes_trian")


def test_a_name_of_another_project_stays(tmp_path):
    _register_theirs()
    register_shapes_among(["shapes_train", "shapes_val"])
    assert _are_theirs() and "shapes_val" in DatasetCatalog
    lend_shapes()
    assert _are_theirs()
    with pytest.raises(ConfigError, match="'shapes_train'"):
        register_shapes(tmp_path)
    assert _are_theirs()
    assert MetadataCatalog.get("shapes_val").image_root != str(tmp_path / "shapes/val")


def test_a_script_may_register_a_name_of_ours():
    """And without us what it registered twice is refused, as ever."""
    for _ in range(2):
        lend_shapes()
    _register_theirs()
    assert _are_theirs()
    with pytest.raises(AssertionError, match="already registered"):
        _register_theirs()
