"""Whether data sets fit a detector."""

import copy
import json

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json, register_coco_instances

from lambda_det.detection.data import check_datasets
from lambda_det.detection.data.registration import has_masks
from lambda_det.detection.data.report import NO_MASK
from lambda_det.errors import ConfigError, DataError, UserError
from tests.coco import annotation, put


@pytest.fixture
def registered(cfg, content, write):
    """Write and register data sets, and name them in the config."""

    def register(train=content, test=None):
        for split, data in (("train", train), ("test", test)):
            if data is not None:
                name = f"checks_{split}"
                register_coco_instances(name, {}, *write(data, name))
                cfg.DATASETS[split.upper()] = (name,)
        return cfg

    return register


def _all(**values):
    return lambda content: [entry.update(values) for entry in content["annotations"]]


def test_images_are_opened_where_an_evaluation_would_end(registered, content, tmp_path):
    cfg = registered(content, test=content)
    (tmp_path / "checks_test" / "20.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"checks_test.*20\.png cannot be read"):
        check_datasets(cfg, train=True, test=True)
    for path in (tmp_path / "checks_train").iterdir():
        path.write_bytes(b"")
    check_datasets(cfg, train=True, test=False)
    path.unlink()
    with pytest.raises(DataError, match=r"10\.png does not exist"):
        check_datasets(cfg, train=True, test=False)


def test_what_the_data_cannot_teach_is_logged(registered, content, caplog):
    """Classes without an object; files of equal bytes to train and to evaluate on."""
    content["categories"].append({"id": 77, "name": "unseen\x1b[31m"})
    other = copy.deepcopy(content)
    _all(category_id=1)(content)
    cfg = registered(content, test=other)
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 3
    check_datasets(cfg, train=True, test=True)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("2 of 3 classes" in text and r"pear, unseen\x1b[31m" in text for text in told)
    assert any("without an object" in text and text.endswith("for pear") for text in told)
    (told,) = (text for text in told if "trained on" in text and "checks_test/10.png" in text)
    assert "--group-by" in told


def test_no_data_says_where_to_get_them(cfg):
    cfg.DATASETS.TEST = ("coco_2017_val",)
    with pytest.raises(DataError, match=r"coco_2017_val.*datasets/README\.md.*DETECTRON2_DATASETS"):
        check_datasets(cfg, train=False, test=True)


def _without_pear(content):
    content["categories"].pop()
    content["annotations"] = [a for a in content["annotations"] if a["category_id"] == 1]


def _only_crowds(content):
    content["annotations"] = content["annotations"][:2]
    _all(category_id=5, iscrowd=1)(content)


def _no_object(content):
    content["annotations"].clear()


# What changes the data to train and to evaluate on, None where these are not used; keys of the
# configuration; and what is refused
REFUSALS = {
    "another name": (
        dict,
        put("categories", name="plum"),
        [],
        "checks_test .* checks_train: .* alone has plum, ",
    ),
    "a class less": (dict, _without_pear, [], "checks_test .* checks_train: .* second pear"),
    "no class in common": (
        *(_all(category_id=1), _all(category_id=5), []),
        r"checks_test\.json has objects of pear.* of apple",
    ),
    "crowds of another class": (_only_crowds, _all(category_id=1), [], "checks_train: no ann"),
    "nothing to train on": (_no_object, dict, [], "checks_train: no ann"),
    "crowds": (_all(iscrowd=1), None, [], "checks_train"),
    "crowds, whose AP is not defined": (None, _all(iscrowd=1), [], "checks_test"),
    "nothing to evaluate on": (None, _no_object, [], "checks_test"),
    "an id twice": (put("images", id=10), None, [], "used twice.*id 10"),
    "nowhere to train": (dict, None, ["DATASETS.TRAIN", ()], r"DATASETS\.TRAIN"),
    "nowhere to test": (None, dict, ["DATASETS.TEST", ()], r"DATASETS\.TEST"),
    "another data set": (
        *(dict, None, ["DATASETS.TRAIN", ("coco_2017_trian",)]),
        "'coco_2017_trian'.*coco_2017_train",
    ),
    "format": (dict, None, ["INPUT.FORMAT", "rgb"], r"INPUT\.FORMAT is 'rgb'"),
    "no format": (dict, None, ["INPUT.FORMAT", ""], r"INPUT\.FORMAT is ''"),
    "classes": (dict, None, ["MODEL.ROI_HEADS.NUM_CLASSES", 80], "ROI_HEADS.NUM_CLASSES is 80.* 2"),
    "classes of RetinaNet": (
        *(dict, None, ["MODEL.META_ARCHITECTURE", "RetinaNet", "MODEL.RETINANET.NUM_CLASSES", 80]),
        "RETINANET.NUM_CLASSES is 80.* 2",
    ),
    "boxes alone": (
        dict,
        _all(segmentation=[]),
        ["DATASETS.TRAIN", ("checks_test",)],
        "MASK_ON.*mask",
    ),
}


@pytest.mark.parametrize("row", REFUSALS)
def test_data_and_keys_that_are_refused(registered, content, row):
    *changes, options, expected = REFUSALS[row]
    data = [copy.deepcopy(content) for _ in changes]
    for change, one in zip(changes, data, strict=True):
        if change:
            change(one)
    cfg = registered(*data)
    cfg.merge_from_list(options)
    train, test = (change is not None for change in changes)
    with pytest.raises(UserError, match=expected):
        check_datasets(cfg, train=train, test=test)


def test_another_data_set_under_a_known_name(registered):
    cfg = registered()
    MetadataCatalog.get("checks_train").thing_classes = ["cat", "dog"]
    with pytest.raises(DataError, match=r"checks_train.*cat, dog"):
        check_datasets(cfg, train=True, test=False)


def test_boxes_alone_train_no_masks_and_have_an_ap(registered, content):
    _all(segmentation=[])(content)
    cfg = registered(content, content)
    check_datasets(cfg, train=False, test=True)
    cfg.MODEL.MASK_ON = False
    check_datasets(cfg, train=True, test=True)


@pytest.mark.parametrize("masks", [True, False])
def test_a_few_bad_boxes_are_warned_of_and_masks_where_they_are_learnt(
    registered, content, caplog, masks
):
    for number in range(9, 301):
        content["annotations"].append(annotation(number, 10, [1, 1, 5, 5]))
    content["annotations"][4]["segmentation"] = [[1, 2, 3, 4]]
    content["annotations"][5]["bbox"] = [1, 1, 5, 0]
    content["annotations"][6]["segmentation"] = []
    cfg = registered(content)
    cfg.MODEL.MASK_ON = masks
    check_datasets(cfg, train=True, test=False)
    assert "annotation 6 of image 30" in caplog.text
    assert ("annotation 5 of image 30" in caplog.text) is masks
    assert (NO_MASK.text in caplog.text) is masks


@pytest.mark.parametrize(
    ("key", "value", "is_warned_of"),
    [
        ("INPUT.FORMAT", "BGR", False),
        ("INPUT.FORMAT", "RGB", True),
        ("INPUT.FORMAT", "L", False),
        ("MODEL.PIXEL_MEAN", [123, 116, 103], True),
        ("MODEL.PIXEL_MEAN", [128, 128, 128], False),
        ("DATALOADER.REPEAT_THRESHOLD", 0.0, True),
        ("DATALOADER.REPEAT_THRESHOLD", 0.001, False),
    ],
)
def test_keys_that_change_nothing_or_the_colours_are_warned_of(
    registered, caplog, key, value, is_warned_of
):
    """Means of the other order; a sampler that repeats nothing."""
    cfg = registered()
    if key == "DATALOADER.REPEAT_THRESHOLD":
        cfg.DATALOADER.SAMPLER_TRAIN = "RepeatFactorTrainingSampler"
    cfg.merge_from_list([key, value])
    check_datasets(cfg, train=True, test=False)
    assert (key in caplog.text) == is_warned_of


# -------------------------------------------------------------- data sets that are not COCO files


@pytest.fixture
def own(cfg, content, write):
    """Register data sets that give dicts of their own, changed, and name them in the config."""
    files = write(content, "own")

    def register(change=lambda record: None, split="TRAIN", name="own", **metadata):
        records = load_coco_json(*files)
        for record in records:
            for entry in record["annotations"]:
                entry["category_id"] = {1: 0, 5: 1}[entry["category_id"]]
            change(record)
        DatasetCatalog.register(name, lambda: json.loads(json.dumps(records)))
        MetadataCatalog.get(name).set(**metadata)
        cfg.DATASETS[split] = (name,)
        return cfg

    return register


def _of_each(change):
    return lambda record: [change(entry) for entry in record["annotations"]]


def _check_split(cfg, split):
    check_datasets(cfg, train=split == "TRAIN", test=split == "TEST")


# Changes of a record, and what is named
UNUSABLE = {
    "no mode": (_of_each(lambda a: a.pop("bbox_mode")), "annotation to train on.*bbox_mode"),
    "another key": (lambda r: r.update(annos=r.pop("annotations")), '"annotations"'),
    "crowds": (_of_each(lambda a: a.update(iscrowd=1)), "no annotation to train on"),
    "nothing": (lambda r: r["annotations"].clear(), "no annotation to train on"),
}
UNFIT = {
    "from 1": (
        _of_each(lambda a: a.update(category_id=a["category_id"] + 1)),
        r"category_id 2.*MODEL\.ROI_HEADS\.NUM_CLASSES",
    ),
    "no class": (_of_each(lambda a: a.pop("category_id")), "category_id None"),
    "half": (_of_each(lambda a: a.update(category_id=0.5)), r"category_id 0\.5"),
}
BOXES_ALONE = _of_each(lambda a: a.pop("segmentation"))


@pytest.mark.parametrize("split", ["TRAIN", "TEST"])
@pytest.mark.parametrize("fault", UNUSABLE | UNFIT)
def test_dicts_that_the_mapper_would_drop_or_take_for_something_else(own, split, fault):
    change, words = (UNUSABLE | UNFIT)[fault]
    if split == "TEST" and fault in UNUSABLE:
        words = "holds no annotations .*crowds and unusable boxes"
    with pytest.raises(UserError, match=f"own.*{words}|{words}.*own"):
        _check_split(own(change, split), split)


def test_semantic_masks_are_learnt_beside_annotations_without_a_box(own):
    cfg = own(UNUSABLE["no mode"][0])
    cfg.MODEL.META_ARCHITECTURE = "SemanticSegmentor"
    _check_split(cfg, "TRAIN")
    assert not any(record["annotations"] for record in DatasetCatalog.get("own"))


@pytest.mark.parametrize("split", ["TRAIN", "TEST"])
@pytest.mark.parametrize("key", ["annotations", "segmentation"])
def test_a_key_that_the_first_image_lacks(own, split, key):
    def without(record):
        if record["image_id"] == 10:
            for entry in [record] if key == "annotations" else record["annotations"]:
                del entry[key]

    _check_split(own(without, split, evaluator_type="lvis"), split)


def test_each_of_two_data_sets_of_dicts_is_looked_at(own):
    """Images without objects may be a data set of their own; a wrong key is wrong in any."""
    own(name="sound")
    own(UNUSABLE["nothing"][0], name="empty")
    cfg = own(UNUSABLE["another key"][0], name="wrong")
    cfg.DATASETS.TRAIN = ("sound", "empty")
    _check_split(cfg, "TRAIN")
    cfg.DATASETS.TRAIN = ("sound", "wrong")
    with pytest.raises(DataError, match="wrong"):
        _check_split(cfg, "TRAIN")


def test_an_evaluation_measures_boxes_where_no_dict_has_a_mask(own):
    _check_split(own(BOXES_ALONE, "TEST"), "TEST")
    assert not has_masks("own")
    _check_split(own(split="TEST", name="masked"), "TEST")
    assert has_masks("masked")
    # Pascal VOC measures boxes alone
    _check_split(own(BOXES_ALONE, "TEST", "voc", evaluator_type="pascal_voc"), "TEST")
    with pytest.raises(ConfigError, match=r"MODEL\.MASK_ON"):
        _check_split(own(BOXES_ALONE, name="voc_train", evaluator_type="pascal_voc"), "TRAIN")


def _panoptic(record):
    del record["annotations"]
    record["pan_seg_file_name"], record["segments_info"] = "x.png", []


@pytest.mark.parametrize("has_file", [False, True])
def test_the_panoptic_form_of_coco_has_no_instances_to_learn(own, write, content, has_file):
    """That with "separated" in its name has them."""
    json_file, root = write(content, "panoptic")
    files = {"json_file": json_file, "image_root": root} if has_file else {}
    cfg = own(_panoptic, evaluator_type="coco_panoptic_seg", **files)
    with pytest.raises(DataError, match=r'own: .*"annotations"'):
        _check_split(cfg, "TRAIN")
    for other in ("OfAnotherProject", "SemanticSegmentor"):
        cfg.MODEL.META_ARCHITECTURE = other
        _check_split(cfg, "TRAIN")
    cfg.MODEL.META_ARCHITECTURE, cfg.DATASETS.TEST = "GeneralizedRCNN", ("own",)
    if has_file:
        _check_split(cfg, "TEST")  # its file is the ground truth


def test_records_of_a_function_are_not_those_of_the_file_that_it_names(own, write, content):
    json_file, root = write(content, "own")
    runs = {"size": [48, 64], "counts": [72, 3000]}
    change = _of_each(lambda a: a.update(segmentation=runs, bbox=[0, 0, 64, 48]))
    cfg = own(change, evaluator_type="coco", json_file=json_file, image_root=root)
    _check_split(cfg, "TRAIN")
    records = DatasetCatalog.get("own")
    found = {type(a["segmentation"]["counts"]) for r in records for a in r["annotations"]}
    assert found == {bytes}


def test_data_that_cannot_be_read_are_named(cfg, tmp_path):
    DatasetCatalog.register("own", (tmp_path / "nowhere.json").read_text)
    cfg.DATASETS.TRAIN = ("own",)
    with pytest.raises(DataError, match=r"own .*nowhere\.json"):
        _check_split(cfg, "TRAIN")
    check_datasets(cfg, train=False, test=False)  # which reads none
