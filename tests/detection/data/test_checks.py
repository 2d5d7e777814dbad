import json
import math
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json, register_coco_instances
from PIL import Image

from lambda_det.detection.data import annotations, check_coco, check_datasets
from lambda_det.detection.data.annotations import ANNOTATION_RULES, IMAGE_RULES
from lambda_det.detection.data.report import BAD_BOX, NOTED
from lambda_det.detection.data.truth import usable_runs
from lambda_det.errors import ConfigError, DataError
from tests.coco import annotation


def test_a_sound_data_set(content, write):
    content["annotations"][1]["iscrowd"] = 1
    content["annotations"][0]["segmentation"] = {"size": [48, 64], "counts": [10, 500, 2562]}
    content["categories"][1]["keypoints"] = ["left eye", "right eye"]
    report = check_coco(*write(content))
    assert (report.images, report.annotations, report.crowds, report.usable) == (4, 8, 1, 7)
    assert report.categories == {1: "apple", 5: "pear"}
    assert report.per_category == {"apple": 4, "pear": 4}
    assert report.sizes == {"small": 8, "medium": 0, "large": 0}
    assert report.problems == {} and report.refusal() is None


def test_sizes_are_told_by_area(content, write):
    for entry, area in zip(content["annotations"], (1023, 1024, 9215, 9216), strict=False):
        entry["area"] = area
    assert check_coco(*write(content)).sizes == {"small": 5, "medium": 2, "large": 1}


def _put(where: str, place: int = -1, **values):
    """A change of an entry of a list of the file."""
    return lambda content: content[where][place].update(values)


def _fifth(**values):
    return _put("annotations", 4, **values)


def _fifth_without(key):
    return lambda content: content["annotations"][4].pop(key)


# Each kind of finding: changes to the data set, and what the first offender's text holds.
# fmt: off
FINDINGS = {
    "image id used twice": ([_put("images", 1, id=10)], "id 10"),
    "annotation id used twice": ([_put("annotations", 3, id=2)], "id 2"),
    "category id used twice": ([_put("categories", 1, id=1)], "id 1"),
    "image whose width or height is not above 0": ([_put("images", 2, width=0)], "30.png, 0x48"),
    "image of more pixels than can be read": (
        [_put("images", 2, width=2**62, height=2**62)], f"30.png, {2**62}x{2**62}"),
    "annotation of an image that is not listed": (
        [_fifth(image_id=99)], "annotation 5 of image 99"),
    "annotation of a category that is not listed": (
        [_fifth(category_id=2)], "annotation 5 of image 30 (64x48), category_id 2"),
    "bbox that is not a list of four numbers": (
        [_fifth(bbox=[1, 2, 3])], "annotation 5 of image 30 (64x48), bbox [1, 2, 3]"),
    "segmentation that is neither a list of polygons nor a run-length mask": (
        [_fifth(segmentation=[1, 2, 3, 4, 5, 6])], "annotation 5"),
    "run-length mask that does not fit its image": (
        [_fifth(segmentation={"size": [64, 48], "counts": [3072]})], "annotation 5"),
    "keypoints that are not a list of finite numbers": (
        [_fifth(keypoints=k) for k in ([1, 2, "3"], 3, [1, 2, math.nan], [1e7])], "annotation 5"),
    "iscrowd that is neither 0 nor 1": (
        [_fifth(iscrowd="no")], "annotation 5 of image 30 (64x48), iscrowd 'no'"),
    # Detectron2 asserts that it equals 0; these values do not
    "ignore flag, which Detectron2 does not know": (
        [_fifth(ignore=flag) for flag in (1, "", None, [], "0")], "annotation 5"),
    "box with NaN or infinite numbers": ([_fifth(bbox=[1, 2, math.nan, 3])], "annotation 5"),
    "box of zero or negative size": (
        [_fifth(bbox=[1, 2, 3, 0])], "annotation 5 of image 30 (64x48), bbox [1, 2, 3, 0]"),
    "box outside its image": ([_fifth(bbox=[1, 2, 64.5, 3])], "annotation 5"),
    "polygon of fewer than three points, an odd count or no numbers": (
        [_fifth(segmentation=[[1, 2, 3, 4]])], "annotation 5"),
    "annotation without segmentation": (
        [_fifth(segmentation=[]), _fifth_without("segmentation")], "annotation 5"),
    "annotation without area": ([_fifth(area=None), _fifth_without("area")], "annotation 5"),
    "area that is negative or not a finite number": (
        [_fifth(area=[]), _fifth(area=-1)], "annotation 5 of image 30 (64x48), area"),
    "annotation without iscrowd": ([_fifth_without("iscrowd")], "annotation 5"),
    "image without annotations": ([lambda c: c["images"].append({**FIFTH})], "50.png"),
}
# fmt: on
FIFTH = {"id": 50, "file_name": "50.png", "width": 64, "height": 48}
RULES = {rule.kind: rule.severity for rule in (*IMAGE_RULES, *ANNOTATION_RULES)}


@pytest.mark.parametrize(
    ("kind", "number"), [(kind, i) for kind in FINDINGS for i in range(len(FINDINGS[kind][0]))]
)
def test_each_kind_is_found_alone(content, write, kind, number):
    changes, expected = FINDINGS[kind]
    changes[number](content)
    report = check_coco(*write(content), files="none")
    # A change of an id may orphan what pointed to it; only those follow from another kind.
    follow = {"image without annotations", "annotation of an image that is not listed"}
    if kind in ("image id used twice", "category id used twice"):
        follow |= {"annotation of a category that is not listed"}
    if kind == "image whose width or height is not above 0":
        follow |= {"box outside its image"}
    assert kind in report.problems and set(report.problems) - {kind} <= follow
    problem = report.problems[kind]
    assert problem.count == 1 and expected in problem.first[0]
    assert set(RULES) <= set(FINDINGS)
    if problem.severity != NOTED:
        assert kind in report.refusal() and report.json_file in report.refusal()


@pytest.mark.parametrize("over", [0, 1])
def test_images_of_as_many_pixels_as_pillow_reads_and_one_more(content, write, over):
    pixels = 2 * Image.MAX_IMAGE_PIXELS + over
    content["images"][2].update(width=pixels, height=1)
    report = check_coco(*write(content), files="none")
    assert ("image of more pixels than can be read" in report.problems) == bool(over)
    if over:  # nor is its mask unpacked
        assert usable_runs({"size": [1, pixels], "counts": [pixels]}, 1, pixels) is None


def test_compressed_runs_that_do_not_end(monkeypatch):
    """pycocotools would write past its memory."""
    mask = np.asfortranarray(np.random.rand(40, 60) < 0.3)
    sound = mask_util.encode(mask.astype(np.uint8))["counts"]
    monkeypatch.setattr(mask_util, "decode", lambda runs: None)  # by text alone
    for counts in (sound, sound.decode(), b"", "0"):
        assert usable_runs({"size": [40, 60], "counts": counts}, 40, 60)
    for counts in ("å", "P", sound[:-1] + b"o", b"\xff", "/0", " ", None, 3):
        assert usable_runs({"size": [40, 60], "counts": counts}, 40, 60) is None


def test_only_the_first_offenders_are_kept(content, write):
    for entry in content["annotations"]:
        entry["bbox"] = [0, 0, 0, 0]
    problem = check_coco(*write(content)).of(BAD_BOX)["box of zero or negative size"]
    assert problem.count == 8 and len(problem.first) == 3


@pytest.mark.parametrize(
    "box", [[-1, -1, 10, 10], [55, 40, 10, 9], [0, 0, 65, 49]], ids=["left", "right", "both"]
)
def test_a_pixel_outside_is_a_rounding_error(content, write, box):
    content["annotations"][0]["bbox"] = box
    assert check_coco(*write(content)).problems == {}


def test_boxes_are_held_against_their_own_image(content, write):
    content["images"].reverse()  # ids need not be in order
    content["images"][0].update(width=200, height=100)  # image 40
    content["annotations"][6]["bbox"] = [100, 60, 90, 40]
    assert check_coco(*write(content)).problems == {}
    content["annotations"][4]["bbox"] = [100, 60, 90, 40]
    (problem,) = check_coco(*write(content)).problems.values()
    assert "annotation 5 of image 30 (64x48)" in problem.first[0]


def test_bad_boxes_are_borne_up_to_one_percent(content, write):
    for number in range(9, 201):
        content["annotations"].append(annotation(number, 10, [1, 1, 5, 5]))
    content["annotations"][0]["bbox"] = [1, 1, 5, 0]
    content["annotations"][1]["bbox"] = [1, 1, 5, 500]
    assert check_coco(*write(content)).refusal() is None
    content["annotations"][2]["bbox"] = [1, 1, 5, 0]
    refusal = check_coco(*write(content)).refusal()
    assert "3 of 200" in refusal and "annotation 1 of image 10" in refusal


# What is no annotation file: a text, or a change of a sound one, and what the message names
NOT_COCO = [
    *((t, "not JSON") for t in ("", "{", "\ufeff\x00", "[" * 10**6, '{"a":' * 10**6, "9" * 10**5)),
    *((t, "not in COCO format") for t in ("null", "{}", "NaN")),
    ("[]", "not in COCO format: it holds a list"),
    ('{"images": [], "annotations": []}', "'categories', the value is None"),
    ('{"images": {}, "annotations": [], "categories": []}', "'images', the value is {}"),
    ('{"images": [1], "annotations": [], "categories": []}', "'images', entry 0 is 1"),
    (
        '{"images": [{"id": 1}], "annotations": [], "categories": []}',
        "'images', the file_name of entry 0 is None",
    ),
    ('{"images": [], "annotations": [], "categories": []}', "'images' is empty"),
    (_put("images", id="10"), "id.*'10'"),
    (_put("images", width=64.0), r"width.*64\.0"),
    (_put("images", file_name=7), "file_name.*7"),
    (_put("annotations", image_id=None), "image_id.*None"),
    (_put("annotations", id=2**70), f"id.*{2**70}"),
    (_put("categories", id=True), "id.*True"),
    *((_put("categories", name=name), "name") for name in (5, None, ["a"], "\ud800")),
    *(
        (_put("categories", keypoints=names), "keypoints of category")
        for names in ("left eye", [1, 2], {"eye": 1}, 3)
    ),
]


@pytest.mark.parametrize(
    ("fault", "expected"),
    NOT_COCO,
    ids=[
        ascii(fault)[:20] if isinstance(fault, str) else ascii(named) for fault, named in NOT_COCO
    ],
)
def test_what_is_not_coco_format(content, write, fault, expected):
    json_file, images = write(content)
    if callable(fault):
        fault(content)
        fault = json.dumps(content)
    Path(json_file).write_text(fault)
    with pytest.raises(DataError, match=rf"set\.json.*{expected}"):
        check_coco(json_file, images, files="none")


def test_missing_file_and_folder(content, write, tmp_path):
    json_file, images = write(content)
    for place in ((tmp_path / "absent", images), (json_file, tmp_path / "absent")):
        with pytest.raises(DataError, match="absent"):
            check_coco(*place)


def test_images_are_opened(content, write, monkeypatch):
    json_file, images = write(content)
    Path(images, "10.png").unlink()
    data = Path(images, "20.png").read_bytes()
    Path(images, "20.png").write_bytes(data[:-3000])
    Image.new("RGB", (48, 64)).save(Path(images, "30.png"))
    report = check_coco(json_file, images)
    assert report.problems["image file missing"].count == 1
    broken = report.problems["image file unreadable or of another size"]
    assert broken.count == 2
    assert "20.png cannot be read" in broken.first[0] and "30.png is 48x64" in broken.first[1]
    # The report on the annotations is kept; what was found in the images is not.
    assert check_coco(json_file, images, files="none").problems == {}
    assert set(check_coco(json_file, images, files="sample").problems) == {"image file missing"}
    assert check_coco(json_file, images, files="few").problems == report.problems
    monkeypatch.setattr(annotations, "_FEW_FILES", report.images - 1)
    assert set(check_coco(json_file, images, files="few").problems) == {"image file missing"}


def test_a_changed_file_is_read_again(content, write):
    assert check_coco(*write(content)).annotations == 8
    content["annotations"].pop()
    assert check_coco(*write(content)).annotations == 7


# ------------------------------------------------------------------------------ check_datasets


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
    with pytest.raises(DataError, match="image file missing"):
        check_datasets(cfg, train=True, test=False)


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
        *("both", _put("categories", name="plum"), []),
        *(DataError, "checks_train .* checks_test .*plum"),
    ),
    "a class less": ("both", _without_pear, [], DataError, "checks_train .* checks_test .*pear"),
    "crowds": ("train", _all(iscrowd=1), [], DataError, "checks_train"),
    "crowds, whose AP is not defined": ("test", _all(iscrowd=1), [], DataError, "checks_test"),
    "nothing": ("test", lambda c: c["annotations"].clear(), [], DataError, "checks_test"),
    "an id twice": ("train", _put("annotations", id=1), [], DataError, "used twice.*id 1"),
    "nowhere to train": ("train", dict, ["DATASETS.TRAIN", ()], ConfigError, r"DATASETS\.TRAIN"),
    "nowhere to test": ("test", dict, ["DATASETS.TEST", ()], ConfigError, r"DATASETS\.TEST"),
    **{
        f"format {order!r}": (
            *("train", dict, ["INPUT.FORMAT", order]),
            *(ConfigError, rf"INPUT\.FORMAT is {order!r}"),
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
    cfg.DATASETS.TRAIN = ("checks_train", "checks_test")
    with pytest.raises(ConfigError, match=r"MODEL\.MASK_ON.* of checks_test has a mask"):
        check_datasets(cfg, train=train, test=not train)
    cfg.MODEL.MASK_ON = False
    check_datasets(cfg, train=train, test=not train)


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
    assert ("polygon of fewer than three points" in caplog.text) is masks


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
    "no mode": (_of_each(lambda a: a.pop("bbox_mode")), DataError, "of 8 annotations.*bbox_mode"),
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
    "boxes alone": (_of_each(lambda a: a.pop("segmentation")), ConfigError, r"MODEL\.MASK_ON"),
}


@pytest.mark.parametrize(
    ("split", "fault"),
    [("TRAIN", f) for f in UNUSABLE | UNFIT] + [("TEST", f) for f in UNFIT],
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
    change = _of_each(lambda a: a.update(segmentation=runs))
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
    with pytest.raises(DataError, match=r"one and two .*number 0: 'apple' and 'pear'"):
        check_datasets(cfg, train=True, test=where[0] != where[1])
