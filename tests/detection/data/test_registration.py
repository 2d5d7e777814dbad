import json
import re

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection.data import check_datasets, register_json_datasets, register_shapes
from lambda_det.detection.data.classes import facts_of
from lambda_det.errors import ConfigError, DataError


def name_files(cfg, split, json_file, images):
    cfg.DATASETS[f"{split}_JSON"] = json_file
    cfg.DATASETS[f"{split}_IMAGES"] = images


def test_both_files(cfg, content, write):
    content["categories"].append({"id": 3, "name": "fig"})
    name_files(cfg, "TRAIN", *write(content, "one"))
    name_files(cfg, "TEST", *write(content, "two"))
    register_json_datasets(cfg)
    (train,), (test,) = cfg.DATASETS.TRAIN, cfg.DATASETS.TEST
    assert train.startswith("one_") and test.startswith("two_")
    assert len(DatasetCatalog.get(train)) == 4
    assert MetadataCatalog.get(test).evaluator_type == "coco"
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == cfg.MODEL.RETINANET.NUM_CLASSES == 3
    assert facts_of(cfg.DATASETS.TRAIN)["thing_classes"] == [
        "apple",
        "fig",
        "pear",
    ]  # in the order of the ids
    check_datasets(cfg, train=True, test=True)


def test_records_are_decided_whoever_loads_them(cfg, content, write):
    """Roboflow's COCO has a category above all others, often with the name of one of them."""
    content["categories"] = [{**c, "supercategory": "apple"} for c in content["categories"]]
    content["categories"].append({"id": 0, "name": "apple", "supercategory": "none"})
    name_files(cfg, "TEST", *write(content, "one"))
    register_json_datasets(cfg)
    (test,) = cfg.DATASETS.TEST
    records = DatasetCatalog.get(test)
    metadata = MetadataCatalog.get(test)
    assert metadata.thing_classes == ["apple", "pear"] and len(records) == 4
    assert 0 not in metadata.thing_dataset_id_to_contiguous_id


def test_again_is_the_same(cfg, content, write):
    name_files(cfg, "TRAIN", *write(content))
    register_json_datasets(cfg)
    first, registered = cfg.clone(), set(DatasetCatalog)
    register_json_datasets(cfg)
    assert cfg == first and set(DatasetCatalog) == registered


def test_the_same_file_name_elsewhere_is_another_data_set(cfg, content, write, tmp_path):
    name_files(cfg, "TRAIN", *write(content))
    register_json_datasets(cfg)
    (first,) = cfg.DATASETS.TRAIN
    (tmp_path / "other").mkdir()
    copy = tmp_path / "other" / "set.json"
    copy.write_text(json.dumps(content))
    cfg.DATASETS.TRAIN_JSON = str(copy)
    register_json_datasets(cfg)
    (second,) = cfg.DATASETS.TRAIN
    assert second.startswith("set_") and second != first


def test_the_name_has_one_digest(cfg, content, write):
    file, images = write(content, "set_0123abcd")
    name_files(cfg, "TRAIN", file, images)
    register_json_datasets(cfg)
    (name,) = cfg.DATASETS.TRAIN
    assert re.fullmatch("set_[0-9a-f]{8}", name) and name != "set_0123abcd"


def test_training_data_alone_leave_nothing_else_to_test_on(cfg, content, write):
    name_files(cfg, "TRAIN", *write(content))
    cfg.DATASETS.TEST = ("coco_2017_val",)
    register_json_datasets(cfg)
    assert cfg.DATASETS.TEST == ()


def test_test_data_alone_set_the_classes(cfg, content, write):
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 80
    cfg.DATASETS.TRAIN = ("coco_2017_train",)
    name_files(cfg, "TEST", *write(content))
    register_json_datasets(cfg)
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 2
    assert cfg.DATASETS.TRAIN == ("coco_2017_train",)
    check_datasets(cfg, train=False, test=True)


def test_no_files_no_change(cfg):
    before = cfg.clone()
    register_json_datasets(cfg)
    assert cfg == before


@pytest.mark.parametrize("split", ["TRAIN", "TEST"])
@pytest.mark.parametrize("missing", ["JSON", "IMAGES"])
def test_one_of_a_pair(cfg, content, write, split, missing):
    name_files(cfg, split, *write(content))
    cfg.DATASETS[f"{split}_{missing}"] = ""
    flag = f"--{split.lower()}-{missing.lower()}"
    with pytest.raises(ConfigError, match=rf"{flag} \(DATASETS\.{split}_{missing}\)"):
        register_json_datasets(cfg)


def test_missing_and_broken_files(cfg, content, write, tmp_path):
    json_file, images = write(content)
    name_files(cfg, "TRAIN", json_file, str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"nowhere .*--train-images"):
        register_json_datasets(cfg)
    name_files(cfg, "TRAIN", str(tmp_path / "no.json"), images)
    with pytest.raises(DataError, match=r"no\.json"):
        register_json_datasets(cfg)


def test_class_names_of_nothing_known(cfg):
    cfg.DATASETS.TRAIN = ("not_registered",)
    cfg.DATASETS.TEST = ()
    assert facts_of((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)) == {}
    assert "not_registered" not in MetadataCatalog
    register_shapes("datasets")
    cfg.DATASETS.TEST = ("shapes_val",)
    names = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
    assert facts_of(names)["thing_classes"] == ["circle", "rectangle", "triangle"]


def _train_on_keypoints(cfg, content, write, names, flip="horizontal"):
    content["categories"][0]["keypoints"] = names
    name_files(cfg, "TRAIN", *write(content))
    cfg.MODEL.KEYPOINT_ON, cfg.INPUT.RANDOM_FLIP = True, flip
    register_json_datasets(cfg)
    return MetadataCatalog.get(cfg.DATASETS.TRAIN[0])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("left_eye", "right_eye"),
        ("Left Eye", "Right Eye"),
        ("eyeLeft", "eyeRight"),
        ("LEFT_EYE", "right_eye"),
        ("l_eye", "r_eye"),
        ("L-Eye", "R-Eye"),
        ("L_F_Paw", "R_F_Paw"),
        ("eye_l", "eye_r"),
        ("Eye.L", "Eye.R"),
        ("LEye", "REye"),
        ("l", "r"),
    ],
)
def test_a_flip_exchanges_left_and_right(cfg, content, write, caplog, left, right):
    names = ["nose", right, "l_nothing", left, "Nose"]
    with caplog.at_level("INFO"):
        metadata = _train_on_keypoints(cfg, content, write, names)
    assert metadata.keypoint_flip_map == [(left, right)]
    [record] = [r for r in caplog.records if f"{left} and {right}" in r.getMessage()]
    assert record.levelname == "INFO"


@pytest.mark.parametrize(("flip", "warned"), [("horizontal", 1), ("vertical", 0), ("none", 0)])
def test_a_flip_that_exchanges_no_keypoints_is_told(cfg, content, write, caplog, flip, warned):
    names = ["lip", "rip", "fall", "far", "cleft", "ball", "bar", "small1", "smarr1"]
    metadata = _train_on_keypoints(cfg, content, write, names, flip)
    assert metadata.keypoint_flip_map == []
    assert sum("INPUT.RANDOM_FLIP" in r.getMessage() for r in caplog.records) == warned


def test_what_cannot_be_loaded_is_refused_as_it_is_registered(cfg, content, write):
    """Before a recipe, or another process than the first, reads the data."""
    content["annotations"][4]["category_id"] = 2
    cfg.DATASETS.TRAIN_JSON, cfg.DATASETS.TRAIN_IMAGES = write(content)
    with pytest.raises(DataError, match=r"set\.json.*category_id 2"):
        register_json_datasets(cfg)
