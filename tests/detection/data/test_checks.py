"""Whether data sets fit a detector."""

import json

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json, register_coco_instances

from lambda_det.detection.data import check_datasets, register_shapes
from lambda_det.detection.data.registration import has_masks
from lambda_det.errors import ConfigError, DataError
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


def test_images_that_are_trained_and_evaluated_on_are_named(registered, content, caplog):
    """The two sets have files of equal bytes in two folders."""
    cfg = registered(content, test=content)
    check_datasets(cfg, train=True, test=True)
    (record,) = [r for r in caplog.records if "trained on" in r.getMessage()]
    assert record.levelname == "WARNING" and "checks_test" in record.getMessage()
    caplog.clear()
    cfg.DATASETS.TEST = ()
    check_datasets(cfg, train=True, test=False)
    assert "trained on" not in caplog.text


def test_what_the_data_cannot_teach_is_logged(registered, content, caplog):
    """A class without an object; the same images to train and to evaluate on."""
    content["categories"].append({"id": 77, "name": "unseen\x1b[31m"})
    cfg = registered(content)
    cfg.DATASETS.TEST, cfg.MODEL.ROI_HEADS.NUM_CLASSES = cfg.DATASETS.TRAIN, 3
    check_datasets(cfg, train=True, test=True)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(r"1 of 3 classes" in text and r"unseen\x1b[31m" in text for text in told)
    assert any("trained on" in text and "10.png" in text for text in told)


def test_classes_to_evaluate_on_that_are_not_trained_on_are_named(registered, content, caplog):
    other = json.loads(json.dumps(content))
    for entry in content["annotations"]:
        entry["category_id"] = content["categories"][0]["id"]
    check_datasets(registered(content, test=other), train=True, test=True)
    (record,) = [r for r in caplog.records if "without an object" in r.getMessage()]
    assert content["categories"][1]["name"] in record.getMessage()
    assert content["categories"][0]["name"] not in record.getMessage().rpartition(" for ")[2]


def test_parts_without_a_class_in_common_are_refused(registered, content):
    """As folders for the images of each class are, if they are called valid and invalid."""
    other = json.loads(json.dumps(content))
    for data, category in ((content, 0), (other, 1)):
        for entry in data["annotations"]:
            entry["category_id"] = data["categories"][category]["id"]
    with pytest.raises(DataError, match=r"checks_test\.json has objects of pear.* of apple"):
        check_datasets(registered(content, test=other), train=True, test=True)


@pytest.mark.parametrize("has_crowd", [True, False])
def test_nothing_to_train_on_beside_objects_to_evaluate_on(registered, content, has_crowd):
    """Also where the crowds are of another class than all objects to evaluate on."""
    crowds, objects = (category["id"] for category in content["categories"])
    other = json.loads(json.dumps(content))
    for entry in other["annotations"]:
        entry["category_id"] = objects
    content["annotations"] = content["annotations"][: 2 if has_crowd else 0]
    for entry in content["annotations"]:
        entry.update(category_id=crowds, iscrowd=1)
    with pytest.raises(DataError, match=r"checks_train holds no annotation"):
        check_datasets(registered(content, test=other), train=True, test=True)


def test_a_name_that_is_not_registered(cfg):
    cfg.DATASETS.TRAIN = ("coco_2017_trian",)
    with pytest.raises(ConfigError, match=r"'coco_2017_trian'.*coco_2017_train"):
        check_datasets(cfg, train=True, test=False)
    assert "coco_2017_trian" not in MetadataCatalog
    check_datasets(cfg, train=False, test=False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("coco_2017_val", ["annotations_trainval2017.zip", "DETECTRON2_DATASETS", "make_shapes"]),
        ("shapes_train", ["make_shapes.py", "DETECTRON2_DATASETS"]),
        ("mine", ["mine.json"]),
    ],
)
def test_no_data_says_where_to_get_them(cfg, tmp_path, monkeypatch, name, expected):
    if name == "mine":
        register_coco_instances("mine", {}, str(tmp_path / "mine.json"), str(tmp_path))
    else:
        register_shapes("datasets")
        # Metadata refuses a second value for a key, so its attribute is replaced from below.
        values = MetadataCatalog.get(name).__dict__
        monkeypatch.setitem(values, "json_file", str(tmp_path / "no.json"))
    cfg.DATASETS.TEST = (name,)
    with pytest.raises(DataError) as raised:
        check_datasets(cfg, train=False, test=True)
    assert all(text in str(raised.value) for text in [name, *expected])


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("GeneralizedRCNN", "MODEL.ROI_HEADS.NUM_CLASSES"),
        ("RetinaNet", "MODEL.RETINANET.NUM_CLASSES"),
    ],
)
def test_the_number_of_classes(registered, architecture, key):
    cfg = registered()
    cfg.MODEL.META_ARCHITECTURE = architecture
    cfg.merge_from_list([key, 80])
    with pytest.raises(ConfigError, match=f"{key} is 80.* 2"):
        check_datasets(cfg, train=True, test=False)
    cfg.merge_from_list([key, 2])
    check_datasets(cfg, train=True, test=False)


def _all(**values):
    return lambda content: [entry.update(values) for entry in content["annotations"]]


def _without_pear(content):
    content["categories"].pop()
    content["annotations"] = [a for a in content["annotations"] if a["category_id"] == 1]


# A change of the training or test data, keys of the configuration, and what is refused for it
REFUSALS = {
    "another name": (
        "both",
        put("categories", name="plum"),
        [],
        DataError,
        "checks_test .*plum.* checks_train ",
    ),
    "a class less": ("both", _without_pear, [], DataError, "checks_test .* checks_train .*pear"),
    "crowds": ("train", _all(iscrowd=1), [], DataError, "checks_train"),
    "crowds, whose AP is not defined": ("test", _all(iscrowd=1), [], DataError, "checks_test"),
    "nothing": ("test", lambda c: c["annotations"].clear(), [], DataError, "checks_test"),
    "an id twice": ("train", put("images", id=10), [], DataError, "used twice.*id 10"),
    "nowhere to train": ("train", dict, ["DATASETS.TRAIN", ()], ConfigError, r"DATASETS\.TRAIN"),
    "nowhere to test": ("test", dict, ["DATASETS.TEST", ()], ConfigError, r"DATASETS\.TEST"),
    **{
        f"format {order!r}": (
            "train",
            dict,
            ["INPUT.FORMAT", order],
            ConfigError,
            rf"INPUT\.FORMAT is {order!r}",
        )
        for order in ("rgb", "", "BRG")
    },
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_data_and_keys_that_are_refused(registered, content, fault):
    splits, change, options, error, expected = REFUSALS[fault]
    changed = json.loads(json.dumps(content))
    change(changed)
    cfg = registered(content if splits == "both" else changed, changed)
    cfg.merge_from_list(options)
    with pytest.raises(error, match=expected):
        check_datasets(cfg, train=splits != "test", test=splits != "train")


def test_another_data_set_under_a_known_name(registered):
    cfg = registered()
    MetadataCatalog.get("checks_train").thing_classes = ["cat", "dog"]
    with pytest.raises(DataError, match=r"checks_train.*cat, dog"):
        check_datasets(cfg, train=True, test=False)


@pytest.mark.parametrize("key", ["area", "iscrowd", "segmentation"])
@pytest.mark.parametrize("train", [True, False])
def test_keys_that_may_be_missing(registered, content, caplog, key, train):
    del content["annotations"][6][key]
    check_datasets(registered(content, content), train=train, test=not train)
    warned = any("without a mask take their box" in r.getMessage() for r in caplog.records)
    assert warned == (key == "segmentation")


@pytest.mark.parametrize("train", [True, False])
def test_boxes_alone_cannot_train_masks(registered, content, train):
    boxes = json.loads(json.dumps(content))
    for entry in boxes["annotations"]:
        entry["segmentation"] = []
    cfg = registered(content, boxes)
    if train:
        cfg.DATASETS.TRAIN = ("checks_train", "checks_test")
    with pytest.raises(ConfigError, match=r"MODEL\.MASK_ON.* of checks_test has a mask"):
        check_datasets(cfg, train=True, test=not train)
    check_datasets(cfg, train=False, test=True)  # which has box AP
    cfg.MODEL.MASK_ON = False
    check_datasets(cfg, train=True, test=not train)


@pytest.mark.parametrize("masks", [True, False])
def test_a_few_bad_boxes_are_warned_of_and_masks_where_they_are_learnt(
    registered, content, caplog, masks
):
    for number in range(9, 301):
        content["annotations"].append(annotation(number, 10, [1, 1, 5, 5]))
    content["annotations"][4]["segmentation"] = [[1, 2, 3, 4]]
    content["annotations"][5]["bbox"] = [1, 1, 5, 0]
    cfg = registered(content)
    cfg.MODEL.MASK_ON = masks
    check_datasets(cfg, train=True, test=False)
    assert "annotation 6 of image 30" in caplog.text
    assert ("annotation 5 of image 30" in caplog.text) is masks


def test_training_without_evaluation(registered):
    cfg = registered()
    cfg.DATASETS.TEST = ()
    check_datasets(cfg, train=True, test=True)


@pytest.mark.parametrize("order", ["RGB", "BGR", "L", "YUV-BT.601", "HSV"])
@pytest.mark.parametrize("means", [(103.53, 116.28, 123.675), (123, 116, 103), (128, 128, 128)])
def test_means_of_the_other_order_are_warned_of(registered, caplog, order, means):
    cfg = registered()
    cfg.INPUT.FORMAT, cfg.MODEL.PIXEL_MEAN = order, list(means)
    check_datasets(cfg, train=True, test=False)
    reversed_for = {103.53: "RGB", 123: "BGR"}.get(means[0])
    assert ("MODEL.PIXEL_MEAN" in caplog.text) == (order == reversed_for)


@pytest.mark.parametrize("threshold", [0.0, 0.001])
def test_a_sampler_that_repeats_nothing_is_warned_of(registered, caplog, threshold):
    cfg = registered()
    cfg.DATALOADER.SAMPLER_TRAIN = "RepeatFactorTrainingSampler"
    cfg.DATALOADER.REPEAT_THRESHOLD = threshold
    check_datasets(cfg, train=True, test=False)
    assert ("DATALOADER.REPEAT_THRESHOLD" in caplog.text) == (threshold == 0)


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


UNUSABLE = {
    "no mode": (
        _of_each(lambda a: a.pop("bbox_mode")),
        DataError,
        "annotation to train on.*bbox_mode",
    ),
    "another key": (lambda r: r.update(annos=r.pop("annotations")), DataError, '"annotations"'),
    "crowds": (_of_each(lambda a: a.update(iscrowd=1)), DataError, "no annotation to train on"),
    "nothing": (lambda r: r["annotations"].clear(), DataError, "no annotation to train on"),
}
UNFIT = {
    "from 1": (
        _of_each(lambda a: a.update(category_id=a["category_id"] + 1)),
        ConfigError,
        r"category_id 2.*MODEL\.ROI_HEADS\.NUM_CLASSES",
    ),
    "no class": (_of_each(lambda a: a.pop("category_id")), ConfigError, "category_id None"),
    "half": (_of_each(lambda a: a.update(category_id=0.5)), ConfigError, r"category_id 0\.5"),
    "boxes alone": (_of_each(lambda a: a.pop("segmentation")), ConfigError, r"MODEL\.MASK_ON"),
}


@pytest.mark.parametrize(
    ("split", "fault"),
    [("TRAIN", f) for f in UNUSABLE | UNFIT] + [("TEST", f) for f in UNFIT if f != "boxes alone"],
)
def test_dicts_that_the_mapper_would_drop_or_take_for_something_else(own, split, fault):
    change, error, words = (UNUSABLE | UNFIT)[fault]
    with pytest.raises(error, match=f"own.*{words}|{words}.*own"):
        _check_split(own(change, split), split)


@pytest.mark.parametrize("fault", UNUSABLE)
def test_a_test_set_of_dicts_without_annotations(own, fault):
    change = UNUSABLE[fault][0]
    with pytest.raises(DataError, match=r"own holds no annotations .*crowds and unusable boxes"):
        _check_split(own(change, "TEST"), "TEST")


def test_semantic_masks_are_learnt_beside_annotations_without_a_box(own):
    cfg = own(UNUSABLE["no mode"][0])
    cfg.MODEL.META_ARCHITECTURE = "SemanticSegmentor"
    _check_split(cfg, "TRAIN")
    assert not any(record["annotations"] for record in DatasetCatalog.get("own"))


def _without(key):
    """Take the annotations, or a key of them, from the first image alone."""

    def change(record):
        if record["image_id"] == 10:
            for entry in [record] if key == "annotations" else record["annotations"]:
                del entry[key]

    return change


@pytest.mark.parametrize("split", ["TRAIN", "TEST"])
@pytest.mark.parametrize("key", [None, "annotations", "segmentation"])
@pytest.mark.parametrize("kind", [None, "lvis"])
def test_sound_dicts_pass(own, split, key, kind):
    metadata = {"evaluator_type": kind} if kind else {}
    change = _without(key) if key else lambda record: None
    _check_split(own(change, split, **metadata), split)


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
    _check_split(own(UNFIT["boxes alone"][0], "TEST"), "TEST")
    assert not has_masks("own")
    _check_split(own(_of_each(lambda a: None), "TEST", "masked"), "TEST")
    assert has_masks("masked")


def test_pascal_voc_measures_boxes_alone(own):
    change = UNFIT["boxes alone"][0]
    _check_split(own(change, "TEST", evaluator_type="pascal_voc"), "TEST")
    cfg = own(change, "TRAIN", "own_train", evaluator_type="pascal_voc")
    with pytest.raises(ConfigError, match=r"MODEL\.MASK_ON"):
        _check_split(cfg, "TRAIN")


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
    cfg.MODEL.META_ARCHITECTURE = "OfAnotherProject"
    _check_split(cfg, "TRAIN")
    cfg.MODEL.META_ARCHITECTURE = "GeneralizedRCNN"
    cfg.DATASETS.TEST = ("own",)
    if has_file:
        _check_split(cfg, "TEST")  # its file is the ground truth
    cfg.MODEL.META_ARCHITECTURE = "SemanticSegmentor"
    _check_split(cfg, "TRAIN")


def test_records_of_a_function_are_not_those_of_the_file_that_it_names(own, write, content):
    json_file, root = write(content, "own")
    runs = {"size": [48, 64], "counts": [72, 3000]}
    change = _of_each(lambda a: a.update(segmentation=runs, bbox=[0, 0, 64, 48]))
    cfg = own(change, evaluator_type="coco", json_file=json_file, image_root=root)
    _check_split(cfg, "TRAIN")
    found = [
        a["segmentation"]["counts"] for r in DatasetCatalog.get("own") for a in r["annotations"]
    ]
    assert {type(counts) for counts in found} == {bytes}


def test_data_that_cannot_be_read_are_named(cfg, tmp_path):
    DatasetCatalog.register("own", (tmp_path / "nowhere.json").read_text)
    cfg.DATASETS.TRAIN = ("own",)
    with pytest.raises(DataError, match=r"own .*nowhere\.json"):
        _check_split(cfg, "TRAIN")


@pytest.mark.parametrize("where", [("TRAIN", "TEST"), ("TRAIN", "TRAIN")])
def test_another_order_of_classes(own, where):
    own(split=where[0], name="one", thing_classes=["apple", "pear"])
    cfg = own(split=where[1], name="two", thing_classes=["pear", "apple"])
    if where[0] == where[1]:
        cfg.DATASETS.TRAIN = ("one", "two")
    with pytest.raises(DataError, match=r"two \(pear, apple\).* one \(apple, pear\)"):
        check_datasets(cfg, train=True, test=where[0] != where[1])
