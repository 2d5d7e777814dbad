import json
import os
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection.data import check_datasets, register_json_datasets
from lambda_det.detection.data.classes import describe
from lambda_det.detection.data.coco_format import read_json
from lambda_det.errors import ConfigError, DataError
from lambda_det.own_data.held_out import Split, hold_out


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
    assert describe(cfg.DATASETS.TRAIN)["thing_classes"] == [
        "apple",
        "fig",
        "pear",
    ]  # in the order of the ids
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
    assert describe((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)) == {}
    assert "not_registered" not in MetadataCatalog
    cfg.DATASETS.TEST = ("shapes_val",)
    names = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
    assert describe(names)["thing_classes"] == ["circle", "rectangle", "triangle"]


# --------------------------------------------------------------------------------- held-out images


@pytest.fixture
def many(content, write, tmp_path, monkeypatch):
    """100 images with a class each in turn, and a cache of their own; returns file and folder."""
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    one, box = content["images"][0], content["annotations"][0]
    content["images"] = [{**one, "id": n, "file_name": f"{n}.jpg"} for n in range(100)]
    ids = [category["id"] for category in content["categories"]]
    content["annotations"] = [
        {**box, "id": n + 1, "image_id": n, "category_id": ids[n % len(ids)]} for n in range(100)
    ]
    return write(content)


def share_out(cfg, files, share):
    name_files(cfg, "TRAIN", *files)
    cfg.DATASETS.VAL_SHARE = share
    register_json_datasets(cfg)
    return [
        {Path(record["file_name"]).name for record in DatasetCatalog.get(name)}
        for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
    ]


def test_a_share_of_the_images_is_held_out_by_their_names(cfg, many, content, write):
    train, test = share_out(cfg, many, 0.2)
    assert not train & test and len(train | test) == 100 and 10 <= len(test) <= 30
    assert MetadataCatalog.get(cfg.DATASETS.TEST[0]).evaluator_type == "coco"
    before = set(DatasetCatalog)
    assert share_out(cfg, many, 0.2) == [train, test] and set(DatasetCatalog) == before
    # Other images move none, and a larger share holds the same ones out
    fewer = {**content, "images": content["images"][:60]}
    fewer["annotations"] = [a for a in content["annotations"] if a["image_id"] < 60]
    some, others = share_out(cfg, write(fewer, "fewer"), 0.2)
    assert some < train and others < test
    assert share_out(cfg, many, 0.5)[1] > test


def _named(split, files):
    """The names of the images that a split trains and evaluates on."""
    return [{i["file_name"] for i in read_json(file)["images"]} for file in hold_out(*files, split)]


def test_each_class_has_its_share(many, content, write):
    """Of a class of 10 images and of one of 90, whatever their order in the file."""
    ids = [category["id"] for category in content["categories"]]
    for number, annotation in enumerate(content["annotations"]):
        annotation["category_id"] = ids[number % 10 > 0]
    rare = {f"{number}.jpg" for number in range(0, 100, 10)}
    files = write(content)
    split = Split(0.3, stratify=True)
    train, val = _named(split, files)
    assert not train & val and len(train | val) == 100
    assert (len(val), len(val & rare)) == (30, 3)
    content["images"].reverse()
    assert _named(split, write(content, "again"))[1] == val


@pytest.mark.parametrize("split", [Split(0.3), Split(0.3, stratify=True)])
def test_a_group_stays_on_one_side(split, content, many, write):
    """Frames of ten videos; images without a number are alone."""
    for number, image in enumerate(content["images"][:90]):
        image["file_name"] = f"film{number // 10}_{number % 10}.jpg"
    files = write(content)
    for pattern in ("^film\\d+", r"(film\d+)_\d"):
        train, val = _named(split._replace(group_by=pattern), files)
        films = [{name.partition("_")[0] for name in part if "_" in name} for part in (train, val)]
        assert not films[0] & films[1] and 0 < len(films[1]) < 7


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (Split(0.2, group_by="(film"), "GROUP_BY.*regular"),
        (Split(0.2, group_by="film"), "no image's name, such as 0.jpg"),
    ],
)
def test_a_split_that_cannot_be(split, words, many):
    with pytest.raises(ConfigError, match=words):
        hold_out(*many, split)


def test_a_data_set_has_its_name_wherever_the_cache_is(cfg, many, tmp_path, monkeypatch):
    share_out(cfg, many, 0.2)
    before = cfg.DATASETS.TRAIN, cfg.DATASETS.TEST
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "elsewhere"))
    share_out(cfg, many, 0.2)
    assert before == (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST)


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
def test_files_of_a_share_are_its_own_and_others_can_read_them(many):
    before = os.umask(0o022)
    try:
        files = [file for share in (0.2, 0.20000001) for file in hold_out(*many, Split(share))]
    finally:
        os.umask(before)
    assert len(set(files)) == 4
    assert {os.stat(file).st_mode & 0o777 for file in files} == {0o644}
    assert set(Path(files[0]).parent.iterdir()) >= set(map(Path, files))


@pytest.mark.parametrize("share", [-0.1, 1.0, 10.0, float("nan")])
def test_a_share_that_is_none(cfg, many, share):
    with pytest.raises(ConfigError, match=r"VAL_SHARE"):
        share_out(cfg, many, share)


def test_a_share_that_leaves_too_little(cfg, many, content, write, caplog):
    for share, words in ((1e-9, "0 of 100"), (1 - 1e-9, "100 of 100")):
        with pytest.raises(DataError, match=f"VAL_SHARE.*{words}"):
            share_out(cfg, many, share)
    _, held_out = share_out(cfg, many, 0.2)
    content["categories"].append({"id": 77, "name": "quince"})
    for annotation in content["annotations"]:
        if f"{annotation['image_id']}.jpg" in held_out:
            annotation["category_id"] = 77
    with pytest.raises(DataError, match=r"VAL_SHARE.*quince"):
        share_out(cfg, write(content), 0.2)
    for annotation in content["annotations"]:
        number = annotation["image_id"]
        is_apple = f"{number}.jpg" in held_out or number % 2
        annotation["category_id"] = content["categories"][0]["id"] if is_apple else 77
    share_out(cfg, write(content), 0.2)
    (warning,) = [
        r.getMessage()
        for r in caplog.records
        if r.name.startswith("lambda_det.own_data") and r.levelname == "WARNING"
    ]
    assert "VAL_SHARE" in warning and "quince" in warning


def test_groups_without_a_share(cfg, many):
    cfg.DATASETS.GROUP_BY = "^.*_"
    with pytest.raises(ConfigError, match="need a --val-share"):
        share_out(cfg, many, 0.0)


def test_a_share_and_test_data_or_no_training_data(cfg, many):
    name_files(cfg, "TEST", *many)
    for files in (many, ("", "")):
        with pytest.raises(ConfigError, match=r"VAL_SHARE.*--t(est|rain)-json"):
            share_out(cfg, files, 0.1)
        name_files(cfg, "TEST", "", "")


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
