"""Ground truth is read once, and is what a model learns and is measured by."""

import contextlib
import json
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from lambda_det.detection import DetectionTask
from lambda_det.detection.data import (
    check_datasets,
    read_coco,
    register_coco_files,
    register_shapes,
)
from lambda_det.detection.data.ground_truth import file_report, forget_records, ground_truth
from lambda_det.detection.data.loader import training_records
from lambda_det.detection.data.mapper import TolerantMapper
from lambda_det.detection.data.registration import load_records
from lambda_det.detection.data.truth import Decided
from lambda_det.detection.evaluation import ground_truth_of
from lambda_det.errors import DataError, UserError

pytestmark = pytest.mark.usefixtures("shapes")


def _configure(cfg, architecture, train, test, *pairs):
    cfg.MODEL.META_ARCHITECTURE = architecture
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 3
    cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES = 4
    cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS = 4
    cfg.TEST.KEYPOINT_OKS_SIGMAS = [0.1] * 4
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (f"{train}_train",), (f"{test}_val",)
    cfg.merge_from_list(list(pairs))
    return cfg


KEYPOINTS = ("MODEL.MASK_ON", False, "MODEL.KEYPOINT_ON", True)
RCNN, PANOPTIC, SEMANTIC = "GeneralizedRCNN", "PanopticFPN", "SemanticSegmentor"
# The detector, what it is trained and evaluated on, keys, and what is named if that is refused
FITS = [
    (RCNN, "shapes", "shapes", (), None),
    (RCNN, "shapes_panoptic", "shapes_panoptic", (), None),
    (PANOPTIC, "shapes_panoptic", "shapes_panoptic", (), None),
    (SEMANTIC, "shapes_stuff", "shapes_stuff", (), None),
    (SEMANTIC, "shapes_panoptic", "shapes_panoptic", (), None),
    (PANOPTIC, "shapes", "shapes", (), "shapes_train"),
    (SEMANTIC, "shapes", "shapes_stuff", (), "shapes_train"),
    (RCNN, "shapes_stuff", "shapes", (), "shapes_stuff_train"),
    (RCNN, "shapes", "shapes_stuff", (), "shapes_stuff_val"),
    (SEMANTIC, "shapes_stuff", "shapes", (), "shapes_val"),
    # The losses of an evaluation need more than the evaluation
    (PANOPTIC, "shapes_panoptic", "shapes", (), None),
    (PANOPTIC, "shapes_panoptic", "shapes", ("TEST.LOSS", True), r"shapes_val.*TEST\.LOSS"),
    *(
        (SEMANTIC, "shapes_stuff", "shapes_stuff", (f"MODEL.SEM_SEG_HEAD.{key}", value), key)
        for key, value in (("NUM_CLASSES", 3), ("IGNORE_VALUE", 0))
    ),
    (RCNN, "shapes_keypoints", "shapes_keypoints", KEYPOINTS, None),
    (RCNN, "shapes", "shapes_keypoints", KEYPOINTS, "shapes_train"),
    *(
        (RCNN, "shapes_keypoints", "shapes_keypoints", (*KEYPOINTS, *pair), named)
        for *pair, named in (
            ("TEST.KEYPOINT_OKS_SIGMAS", [], "KEYPOINT_OKS_SIGMAS .*17 .* 4 keypoints"),
            ("MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS", 17, "NUM_KEYPOINTS is 17"),
        )
    ),
]


@pytest.mark.parametrize(("architecture", "train", "test", "pairs", "named"), FITS)
def test_what_fits_passes(cfg, architecture, train, test, pairs, named):
    _configure(cfg, architecture, train, test, *pairs)
    with pytest.raises(UserError, match=named) if named else contextlib.nullcontext():
        check_datasets(cfg, train=True, test=True)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("shapes_panoptic", "make_shapes.py --panoptic"),
        ("coco_2017", "coco_2017_train_panoptic_separated"),
    ],
)
def test_masks_that_are_missing_are_named_with_what_to_do(cfg, tmp_path, kind, named):
    register_shapes(tmp_path)
    _configure(cfg, PANOPTIC, kind, "shapes_panoptic")
    if kind == "coco_2017":
        cfg.DATASETS.TRAIN = (named,)
    with pytest.raises(DataError, match=named):
        check_datasets(cfg, train=True, test=True)


def test_the_mapper_completes_keypoints_and_knows_their_sides(cfg):
    """test_transforming.py flips some."""
    _configure(cfg, RCNN, "shapes_keypoints", "shapes_keypoints", *KEYPOINTS)
    cfg.INPUT.LSJ.ENABLED = False
    record = next(r for r in DatasetCatalog.get("shapes_keypoints_train") if r["annotations"])
    record["annotations"] = [dict(record["annotations"][0]) for _ in range(2)]
    del record["annotations"][1]["keypoints"]
    mapper = TolerantMapper(cfg)
    points = mapper(record)["instances"].gt_keypoints.tensor
    assert points.shape == (2, 4, 3)
    assert points[0, :, 2].all() and not points[1, :, 2].any()
    names = MetadataCatalog.get("shapes_keypoints_train").keypoint_names
    flipped = [names[place] for place in mapper.keypoint_hflip_indices]
    assert flipped == ["right", "top", "left", "bottom"]


def test_a_broken_semantic_mask_is_a_fault_of_the_file(cfg, tmp_path):
    _configure(cfg, SEMANTIC, "shapes_stuff", "shapes_stuff", "MODEL.MASK_ON", False)
    record = DatasetCatalog.get("shapes_stuff_train")[0]
    mapped = TolerantMapper(cfg)(record)
    assert mapped["sem_seg"].shape == mapped["image"].shape[1:]
    with pytest.raises(DataError, match=r"semantic mask .*nowhere.png"):
        TolerantMapper(cfg)({**record, "sem_seg_file_name": str(tmp_path / "nowhere.png")})


# ------------------------------------------------------------------------------ what is read, once
def test_a_file_is_read_once_and_each_gets_its_own_copy(content, write, readings):
    content["categories"][1]["keypoints"] = ["left eye", "right eye"]
    place = write(content)
    expected = read_coco(*place)
    for _ in range(2):
        truth = ground_truth(*place)
        assert truth == expected
        assert {type(r["annotations"]) for r in truth.records} == {Decided}
        truth.records[0]["annotations"].clear()
        truth.report.files.clear()
    assert file_report(*place) == expected.report
    assert readings == ["set.json"]


_SIDES = ["left", "right"]


@pytest.mark.parametrize(
    ("names", "in_file", "number"),
    [
        *((None, in_file, number) for in_file, number in (([], 8), (["eye"], 8), (_SIDES, 0))),
        *((["eye"], in_file, 8) for in_file in ([], ["eye"], _SIDES)),
        *((_SIDES, in_file, 0) for in_file in ([], ["eye"])),
    ],
)
def test_keypoints_are_as_many_as_a_data_set_names(content, write, names, in_file, number):
    content["categories"][0]["keypoints"] = in_file
    for entry in content["annotations"]:
        entry["keypoints"] = [5, 5, 2]
    name = f"keypoints_{len(in_file)}_{names}"
    register_coco_instances(name, {"keypoint_names": names} if names else {}, *write(content))
    records = load_records(name)
    assert sum("keypoints" in a for r in records for a in r["annotations"]) == number
    counted = ground_truth_of(name).anns.values()
    assert sum(one.get("num_keypoints", 0) for one in counted) == number * bool(names)


def test_a_file_or_a_folder_that_changed_is_read_again(content, write, readings, tmp_path):
    """Between two evaluations, with the same name for the same data set."""
    json_file, images = write(content)
    there, here = Path(images, "there"), Path(images, "here")
    there.mkdir(), here.mkdir()
    Path(images, "40.png").rename(there / "40.png")
    name = register_coco_files(json_file, images, "test")
    number = len(DatasetCatalog.get(name))
    other = dict(content, annotations=content["annotations"][:-1])
    (tmp_path / "new.json").write_text(json.dumps(other))
    (tmp_path / "new.json").replace(json_file)
    assert sum(len(r["annotations"]) for r in DatasetCatalog.get(name)) == 7
    assert file_report(json_file, images).annotations == 7
    (there / "40.png").rename(here / "40.png")
    assert len(DatasetCatalog.get(name)) == number
    assert str(here / "40.png") in {f["file_name"] for f in file_report(json_file, images).files}
    assert len(readings) == 3
    Path(json_file).unlink()
    with pytest.raises(DataError, match=r"set\.json"):
        ground_truth(json_file, images)


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
