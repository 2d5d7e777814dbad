"""The check that data sets have the keypoints and masks that a model learns and is measured by."""

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from lambda_det.detection.data import check_datasets, register_json_datasets, register_shapes
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
