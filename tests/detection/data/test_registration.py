from __future__ import annotations

import json

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection.data import check_datasets, class_names, register_json_datasets
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
    assert class_names(cfg) == ["apple", "fig", "pear"]  # in the order of the ids
    check_datasets(cfg, train=True, test=True)


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
    assert class_names(cfg) is None
    assert "not_registered" not in MetadataCatalog
    cfg.DATASETS.TEST = ("shapes_val",)
    assert class_names(cfg) == ["circle", "rectangle", "triangle"]


@pytest.mark.parametrize("_", range(2))
def test_the_data_sets_of_a_test_are_forgotten_after_it(_):
    """So says tests/conftest.py; the second time the name would be taken."""
    DatasetCatalog.register("for_one_test", lambda: [])
