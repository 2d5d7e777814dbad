import json
import re

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection.data import check_datasets, register_json_datasets
from lambda_det.detection.data.classes import facts_of
from lambda_det.errors import UserError


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
    in_order_of_ids = ["apple", "fig", "pear"]
    assert facts_of(cfg.DATASETS.TRAIN)["thing_classes"] == in_order_of_ids
    check_datasets(cfg, train=True, test=True)


def test_a_name_has_one_digest_of_its_place(cfg, content, write, tmp_path):
    file, images = write(content, "set_0123abcd")
    elsewhere = tmp_path / "other" / "set_0123abcd.json"
    elsewhere.parent.mkdir()
    elsewhere.write_text(json.dumps(content))
    names = []
    for place in (file, file, elsewhere):
        name_files(cfg, "TRAIN", str(place), images)
        register_json_datasets(cfg)
        names += cfg.DATASETS.TRAIN
    assert names[0] == names[1] and len({*names, "set_0123abcd"}) == 3
    assert all(re.fullmatch("set_[0-9a-f]{8}", name) for name in names)


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


@pytest.mark.parametrize(
    ("split", "changes", "named"),
    [
        ("TRAIN", {"JSON": ""}, r"--train-json \(DATASETS\.TRAIN_JSON\)"),
        ("TRAIN", {"IMAGES": ""}, r"--train-images \(DATASETS\.TRAIN_IMAGES\)"),
        ("TEST", {"IMAGES": ""}, r"--test-images \(DATASETS\.TEST_IMAGES\)"),
        ("TRAIN", {"IMAGES": "nowhere"}, "nowhere .*--train-images"),
        ("TRAIN", {"JSON": "no.json"}, r"no\.json"),
        ("TRAIN", {}, r"set\.json.*category_id 2"),  # before a recipe or another process reads it
    ],
)
def test_files_that_are_refused(cfg, content, write, split, changes, named):
    if not changes:
        content["annotations"][4]["category_id"] = 2
    name_files(cfg, split, *write(content))
    for what, value in changes.items():
        cfg.DATASETS[f"{split}_{what}"] = value
    with pytest.raises(UserError, match=named):
        register_json_datasets(cfg)


def _train_on_keypoints(cfg, content, write, names, flip="horizontal"):
    content["categories"][0]["keypoints"] = names
    name_files(cfg, "TRAIN", *write(content))
    cfg.MODEL.KEYPOINT_ON, cfg.INPUT.RANDOM_FLIP = True, flip
    register_json_datasets(cfg)
    return MetadataCatalog.get(cfg.DATASETS.TRAIN[0])


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("Left Eye", "Right Eye"),
        ("eyeLeft", "eyeRight"),
        ("LEFT_EYE", "right_eye"),
        ("L-Eye", "R-Eye"),
        ("L_F_Paw", "R_F_Paw"),
        ("eye_l", "eye_r"),
        ("Eye.L", "Eye.R"),
        ("LEye", "REye"),
        ("l", "r"),
    ],
)
def test_a_flip_exchanges_left_and_right(cfg, content, write, left, right):
    names = ["nose", right, "l_nothing", left, "Nose"]
    metadata = _train_on_keypoints(cfg, content, write, names)
    assert metadata.keypoint_flip_map == [(left, right)]


@pytest.mark.parametrize(("flip", "warned"), [("horizontal", True), ("none", False)])
def test_a_flip_that_exchanges_no_keypoints_is_told(cfg, content, write, caplog, flip, warned):
    names = ["lip", "rip", "fall", "far", "cleft", "ball", "bar", "small1", "smarr1"]
    metadata = _train_on_keypoints(cfg, content, write, names, flip)
    assert metadata.keypoint_flip_map == []
    assert ("INPUT.RANDOM_FLIP" in caplog.text) == warned
