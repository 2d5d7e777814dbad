"""Ground truth is read once, and is what a model learns and is measured by."""

import json
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection import DetectionTask
from lambda_det.detection.data import (
    check_datasets,
    read_coco,
    register_coco_files,
    register_json_datasets,
    register_shapes,
)
from lambda_det.detection.data.ground_truth import file_report, forget_records, ground_truth
from lambda_det.detection.data.loader import training_records
from lambda_det.detection.data.mapper import TolerantMapper
from lambda_det.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("shapes")


def _configure(cfg, architecture, train, test):
    cfg.MODEL.META_ARCHITECTURE = architecture
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 3
    cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES = 4
    cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS = 4
    cfg.TEST.KEYPOINT_OKS_SIGMAS = [0.1] * 4
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (train,), (test,)
    return cfg


def _check(cfg):
    check_datasets(cfg, train=True, test=True)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("GeneralizedRCNN", "shapes"),
        ("GeneralizedRCNN", "shapes_panoptic"),
        ("PanopticFPN", "shapes_panoptic"),
        ("SemanticSegmentor", "shapes_stuff"),
        ("SemanticSegmentor", "shapes_panoptic"),
    ],
)
def test_what_fits_passes(cfg, architecture, kind):
    _check(_configure(cfg, architecture, f"{kind}_train", f"{kind}_val"))


@pytest.mark.parametrize(
    ("architecture", "train", "test", "words"),
    [
        ("PanopticFPN", "shapes", "shapes", "learns from semantic masks"),
        ("SemanticSegmentor", "shapes", "shapes_stuff", "learns from semantic masks"),
        ("GeneralizedRCNN", "shapes_stuff", "shapes", "learns from instances"),
        ("GeneralizedRCNN", "shapes", "shapes_stuff", "cannot be evaluated on shapes_stuff_val"),
        ("SemanticSegmentor", "shapes_stuff", "shapes", "predicts semantic segments"),
    ],
)
def test_a_data_set_without_ground_truth_is_refused(cfg, architecture, train, test, words):
    _configure(cfg, architecture, f"{train}_train", f"{test}_val")
    with pytest.raises(ConfigError, match=words):
        _check(cfg)


def test_losses_on_a_test_set_need_its_ground_truth(cfg):
    _configure(cfg, "PanopticFPN", "shapes_panoptic_train", "shapes_val")
    _check(cfg)
    cfg.TEST.LOSS = True
    with pytest.raises(ConfigError, match=r"shapes_val has none.*TEST\.LOSS False"):
        _check(cfg)
    check_datasets(cfg, train=False, test=True)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("NUM_CLASSES", 3, "NUM_CLASSES is 3, but shapes_stuff_train has 4 classes"),
        ("IGNORE_VALUE", 0, "255 for pixels without a class"),
    ],
)
def test_numbers_of_the_semantic_head(cfg, key, value, words):
    _configure(cfg, "SemanticSegmentor", "shapes_stuff_train", "shapes_stuff_val")
    cfg.MODEL.SEM_SEG_HEAD[key] = value
    with pytest.raises(ConfigError, match=words):
        _check(cfg)


def test_keypoints(cfg):
    _configure(cfg, "GeneralizedRCNN", "shapes_keypoints_train", "shapes_keypoints_val")
    cfg.MODEL.MASK_ON, cfg.MODEL.KEYPOINT_ON = False, True
    _check(cfg)
    cfg.TEST.KEYPOINT_OKS_SIGMAS = []
    with pytest.raises(ConfigError, match=r"KEYPOINT_OKS_SIGMAS .*17 .* 4 keypoints"):
        _check(cfg)
    cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS = 17
    with pytest.raises(ConfigError, match="NUM_KEYPOINTS is 17"):
        _check(cfg)
    cfg.DATASETS.TRAIN = ("shapes_train",)
    with pytest.raises(ConfigError, match="shapes_train"):
        _check(cfg)


@pytest.mark.parametrize("key", ["stuff_classes", "keypoint_names", "keypoint_flip_map"])
def test_another_order_of_semantic_classes_and_keypoints(cfg, key):
    architecture, kind = "GeneralizedRCNN", "keypoints"
    if key == "stuff_classes":
        architecture, kind = "SemanticSegmentor", "stuff"
    _configure(cfg, architecture, f"shapes_{kind}_train", "turned")
    cfg.MODEL.MASK_ON, cfg.MODEL.KEYPOINT_ON = False, kind == "keypoints"
    metadata = MetadataCatalog.get(f"shapes_{kind}_train").as_dict() | {"name": "turned"}
    metadata[key] = [("top", "bottom")] if key == "keypoint_flip_map" else metadata[key][::-1]
    DatasetCatalog.register("turned", lambda: DatasetCatalog.get(f"shapes_{kind}_train"))
    MetadataCatalog.get("turned").set(**metadata)
    words = f"turned .* shapes_{kind}_train "
    if key == "keypoint_flip_map":
        _check(cfg)  # nothing is flipped in an evaluation
    else:
        with pytest.raises(DataError, match=words):
            _check(cfg)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (f"shapes_{kind}_train", "turned"), ()
    with pytest.raises(DataError, match=words):
        _check(cfg)


def test_masks_that_are_missing_are_named_with_what_to_do(cfg, tmp_path):
    register_shapes(tmp_path)
    for kind in ("shapes_stuff", "shapes_panoptic"):
        _configure(cfg, "SemanticSegmentor", f"{kind}_train", f"{kind}_val")
        with pytest.raises(DataError, match=r"make_shapes.py --panoptic"):
            _check(cfg)
    _configure(cfg, "PanopticFPN", "coco_2017_train_panoptic_separated", "shapes_panoptic_val")
    with pytest.raises(DataError, match=r"coco_2017_train_panoptic_separated"):
        _check(cfg)


def test_the_mapper_completes_keypoints_and_flips_them(cfg):
    _configure(cfg, "GeneralizedRCNN", "shapes_keypoints_train", "shapes_keypoints_val")
    cfg.MODEL.MASK_ON, cfg.MODEL.KEYPOINT_ON, cfg.INPUT.LSJ.ENABLED = False, True, False
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.RANDOM_FLIP = (64,), "none"
    record = next(r for r in DatasetCatalog.get("shapes_keypoints_train") if r["annotations"])
    record["annotations"] = [dict(record["annotations"][0]) for _ in range(2)]
    del record["annotations"][1]["keypoints"]
    points = TolerantMapper(cfg)(record)["instances"].gt_keypoints.tensor
    assert points.shape == (2, 4, 3)
    assert (points[0, :, 2] > 0).all() and (points[1:, :, 2] == 0).all()
    cfg.INPUT.RANDOM_FLIP = "horizontal"
    mapper = TolerantMapper(cfg)
    drawn = [mapper(record)["instances"].gt_keypoints.tensor[0, :, 0] for _ in range(12)]
    assert len({round(float(x[0]), 2) for x in drawn}) == 2  # some are flipped
    assert all(x[0] < x[2] for x in drawn)  # and left is left of right in all


def test_a_broken_semantic_mask_is_a_fault_of_the_file(cfg, tmp_path):
    _configure(cfg, "SemanticSegmentor", "shapes_stuff_train", "shapes_stuff_val")
    cfg.MODEL.MASK_ON = False
    record = DatasetCatalog.get("shapes_stuff_train")[0]
    mapped = TolerantMapper(cfg)(record)
    assert mapped["sem_seg"].shape == mapped["image"].shape[1:]
    with pytest.raises(DataError, match=r"semantic mask .*nowhere.png"):
        TolerantMapper(cfg)({**record, "sem_seg_file_name": str(tmp_path / "nowhere.png")})


def test_keypoints_of_a_file_are_named_by_its_categories(cfg, shapes):
    folder = shapes / "shapes_panoptic"
    _configure(cfg, "GeneralizedRCNN", "", "")
    cfg.MODEL.MASK_ON, cfg.MODEL.KEYPOINT_ON = False, True
    cfg.DATASETS.TRAIN_JSON = str(folder / "annotations/keypoints_train.json")
    cfg.DATASETS.TRAIN_IMAGES = str(folder / "train")
    for _ in range(2):
        register_json_datasets(cfg)
        check_datasets(cfg, train=True, test=False)
    metadata = MetadataCatalog.get(cfg.DATASETS.TRAIN[0])
    assert metadata.keypoint_names == ["left", "top", "right", "bottom"]
    assert metadata.keypoint_flip_map == [("left", "right")]


# ------------------------------------------------------------------------------ what is read, once
def test_a_file_is_read_once_and_each_gets_its_own_copy(content, write, readings):
    content["categories"][1]["keypoints"] = ["left eye", "right eye"]
    place = write(content)
    expected = read_coco(*place)
    for _ in range(2):
        truth = ground_truth(*place)
        assert truth == expected
        assert {type(r["annotations"]) for r in truth.records} == {
            type(expected[0][0]["annotations"])
        }
        truth.records[0]["annotations"].clear()
        truth.report.files.clear()
    assert file_report(*place) == expected.report
    assert ground_truth(*place, keypoints=2) == expected  # as many as the file says
    assert readings == ["set.json"]


def test_another_number_of_keypoints_is_another_truth(content, write, readings):
    content["categories"][0]["keypoints"] = ["eye"]
    for entry in content["annotations"]:
        entry["keypoints"] = [5, 5, 2]
    place = write(content)
    counts = {}
    for number in (None, 1, 2, None, 2):
        annotations = [
            a for r in ground_truth(*place, keypoints=number).records for a in r["annotations"]
        ]
        counts.setdefault(number, set()).add(sum("keypoints" in a for a in annotations))
    assert counts == {None: {8}, 1: {8}, 2: {0}}
    assert len(readings) == 2


def test_a_file_or_a_folder_that_changed_is_read_again(content, write, readings, tmp_path):
    """Between two evaluations, with the same name for the same data set."""
    json_file, images = write(content)
    name = register_coco_files(json_file, images, "test")
    number = len(DatasetCatalog.get(name))
    other = dict(content, annotations=content["annotations"][:-1])
    (tmp_path / "new.json").write_text(json.dumps(other))
    (tmp_path / "new.json").replace(json_file)
    assert sum(len(r["annotations"]) for r in DatasetCatalog.get(name)) == 7
    assert file_report(json_file, images).annotations == 7
    Path(images, "40.png").rename(Path(images, "moved.png"))
    assert len(DatasetCatalog.get(name)) == number
    assert len(readings) == 3
    Path(json_file).unlink()
    with pytest.raises(DataError, match=r"set\.json"):
        ground_truth(json_file, images)


def test_an_image_that_was_moved_below_the_folder_is_found(content, write, readings):
    json_file, images = write(content)
    there, here = Path(images, "there"), Path(images, "here")
    there.mkdir(), here.mkdir()
    Path(images, "40.png").rename(there / "40.png")
    file_report(json_file, images)
    (there / "40.png").rename(here / "40.png")
    files = [file["file_name"] for file in file_report(json_file, images).files]
    assert str(here / "40.png") in files and len(readings) == 2


def test_what_is_forgotten_is_read_again_and_reports_stay(content, write, readings):
    places = [write(content, name) for name in ("a", "b")]
    for place in places:
        ground_truth(*place)
    forget_records(but=places[:1])
    for place in places:
        file_report(*place)
    assert readings == ["a.json", "b.json"]
    for place in places:
        ground_truth(*place)
    assert readings == ["a.json", "b.json", "b.json"]


@pytest.mark.parametrize("keys", [[], ["INPUT.TILE.SIZE", 40]])
def test_a_training_reads_each_file_once(cfg, content, write, readings, keys):
    """Checks, recipe, loaders, and four evaluations with their losses; then only the test set is
    kept, which has the same images in each of them."""
    for split, name in (("TRAIN", "a"), ("TEST", "b")):
        cfg.DATASETS[f"{split}_JSON"], cfg.DATASETS[f"{split}_IMAGES"] = write(content, name)
    cfg.merge_from_list(
        ["MODEL.DEVICE", "cpu", "TEST.LOSS", True, "INPUT.LSJ.ENABLED", False, *keys]
    )
    task = DetectionTask(cfg).prepare(train=True)
    task.check_data(train=True)
    training_records(cfg)
    task.build_train_loader()
    (name,), components, seen = task.components.test_sets, task.components, []
    for _ in range(4):
        components.make_evaluator(name, "")
        seen.append([[len(batch) for batch in components.make_loss_loader(name)]])
        seen[-1] += [[i["file_name"] for i in batch] for batch in components.make_test_loader(name)]
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert readings == ["a.json", "b.json"]
    DatasetCatalog.get(cfg.DATASETS.TRAIN[0])
    assert readings == ["a.json", "b.json", "a.json"]
