"""Which evaluator data get; average precision where annotations lack what pycocotools asks for."""

import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import detectron2.evaluation
import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog, detection_utils
from detectron2.data.datasets import register_coco_instances
from detectron2.data.datasets.lvis import register_lvis_instances
from detectron2.evaluation import COCOEvaluator
from PIL import Image
from torch import nn

from lambda_det.detection import evaluation, matches, registry
from lambda_det.detection.data import check_datasets
from lambda_det.detection.evaluation import (
    TolerantCOCOEvaluator,
    build_evaluator,
    check_evaluators,
)
from lambda_det.detection.task import DetectionTask
from lambda_det.distributed.signals import StopRequest, catch_signals, leave_if_asked
from lambda_det.errors import ConfigError, DataError
from tests.coco import annotation, coco_content, found, true_box


@pytest.fixture
def bare_data(tmp_path):
    """Two images with one box each; no info, area, iscrowd, and one segmentation only.

    Registered as "bare", whose image files are empty; ``bare_data(annotations)`` writes others.
    """
    one = annotation(1, 1, [2, 3, 10, 8], area=None, iscrowd=None, segmentation=None)
    two = annotation(2, 2, [4, 4, 6, 6], iscrowd=None) | {"area": None}
    path = tmp_path / "bare.json"

    def write(annotations):
        content = coco_content({1: "1.png", 2: "2.png"}, annotations, {1: "a"}, size=(20, 20))
        path.write_text(json.dumps(content))

    for name in ("1.png", "2.png"):
        (tmp_path / name).touch()
    write([one, two])
    register_coco_instances("bare", {}, str(path), str(tmp_path))
    return write


def _evaluate(tmp_path, predictions):
    """Check the data, then evaluate, as a run does."""
    cfg = get_cfg()
    cfg.MODEL.MASK_ON = True
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 1
    cfg.DATASETS.TEST = ("bare",)
    cfg.OUTPUT_DIR = str(tmp_path / "output")
    check_datasets(cfg, train=False, test=True)
    evaluator = build_evaluator(cfg, "bare")
    evaluator.reset()
    for image_id, boxes in predictions.items():
        instances = found((20, 20), boxes, masks=True)
        evaluator.process([{"image_id": image_id}], [{"instances": instances}])
    return evaluator.evaluate()


@pytest.mark.parametrize(
    "changes",
    [
        {"segmentation": [[1, 2]]},
        {"segmentation": [[1, 2, math.nan, 4, 5, 6]]},
        {"area": []},
        {"area": -1},
        {"id": 0},  # pycocotools takes a match with it for no match
        # Cut at the border of the image, as its outline would not fit into memory
        {"segmentation": [[4, 4, 9e5, 4, 9e5, 9e5, 4, 9e5]], "bbox": [4, 4, 16, 16]},
        # Left out of the truth, as of training
        {"bbox": [4, 4, math.inf, 6], "segmentation": None},
    ],
    ids=str,
)
def test_what_the_checks_let_pass_does_not_break_the_evaluation(
    bare_data, tmp_path, monkeypatch, changes
):
    # One in a hundred may be bad; here it is one in two
    monkeypatch.setattr("lambda_det.detection.data.report.MAX_UNUSABLE_SHARE", 0.5)
    bare_data([annotation(1, 1, [2, 3, 10, 8]), annotation(2, 2, [4, 4, 6, 6]) | changes])
    size = 16 if changes.get("bbox") == [4, 4, 16, 16] else 6
    results = _evaluate(tmp_path, {1: [[2, 3, 12, 11]], 2: [[4, 4, 4 + size, 4 + size]]})
    assert results["segm"]["AP"] == pytest.approx(100)
    assert results["bbox"]["AP"] == pytest.approx(100)


def test_an_image_of_more_objects_than_the_detector_keeps_is_named(bare_data, tmp_path, caplog):
    numbers = range(1, 155)  # crowds do not count
    bare_data([annotation(n, 1, [2, 3, 10, 8], iscrowd=int(n > 151)) for n in numbers])
    _evaluate(tmp_path, {1: []})
    assert "up to 151 objects" in caplog.text and "TEST.DETECTIONS_PER_IMAGE" in caplog.text


@pytest.mark.usefixtures("bare_data")
def test_nothing_predicted(tmp_path):
    results = _evaluate(tmp_path, {1: [], 2: []})
    assert results["bbox"]["AP"] == results["segm"]["AP50"] == 0
    assert "best_score" not in results["bbox"]


@pytest.mark.usefixtures("bare_data")
def test_an_ap_has_its_interval(tmp_path, monkeypatch, intervals_of_few_test_sets):
    """One of two objects is found: test sets drawn from these images have an AP of 0 to 100."""
    monkeypatch.setattr(matches, "_REPLICATES", intervals_of_few_test_sets)
    results = _evaluate(tmp_path, {1: [[2, 3, 12, 11]], 2: []})
    for kind in ("bbox", "segm"):
        assert (results[kind]["AP_low"], results[kind]["AP_high"]) == (0, 100)
        assert results[kind]["best_score"] == 1


SIZE = {"height": 20, "width": 20}


def _register(records, **metadata):
    """A data set "own" that has no file; the name of an earlier one is taken again."""
    if "own" in DatasetCatalog:
        DatasetCatalog.remove("own")
        MetadataCatalog.remove("own")
    DatasetCatalog.register("own", lambda: records)
    MetadataCatalog.get("own").set(**metadata)


def _record(number, *categories):
    boxes = [true_box(2, 3, 10, 8, category) for category in categories]
    return {"file_name": f"{number}.png", "image_id": number, "annotations": boxes, **SIZE}


def test_the_ap_of_a_class_has_its_name_whatever_the_order_of_the_ids():
    """pycocotools sorts by the ids; a project may count its classes in another order."""
    records, places = [_record(0, 0), _record(1, 1)], {30: 0, 7: 1}
    names = ["found", "missed"]
    _register(records, thing_classes=names, thing_dataset_id_to_contiguous_id=places)
    evaluator = TolerantCOCOEvaluator("own", ("bbox",))
    evaluator.reset()
    outputs = [{"instances": found((20, 20), boxes)} for boxes in ([[2, 3, 12, 11]], [])]
    evaluator.process(records, outputs)
    results = evaluator.evaluate()["bbox"]
    assert (results["AP-found"], results["AP-missed"]) == (pytest.approx(100), 0)


def test_keypoints_of_another_number_do_not_count(bare_data):
    names = ["left", "right"]
    MetadataCatalog.get("bare").set(keypoint_names=names, keypoint_flip_map=[("left", "right")])
    one = annotation(1, 1, [2, 3, 10, 8], keypoints=[3, 4, 2, 9, 9, 2])
    bare_data([one, annotation(2, 2, [4, 4, 6, 6], keypoints=[5, 5, 2], num_keypoints="one")])
    evaluator = TolerantCOCOEvaluator("bare", tasks=("keypoints",), kpt_oks_sigmas=[0.05] * 2)
    DatasetCatalog.get("bare")  # which fills in the metadata
    evaluator.reset()
    instances = found((20, 20), [[2, 3, 12, 11]])
    # Half a pixel off: COCO counts keypoints from the corner of a pixel, Detectron2 from its middle
    instances.pred_keypoints = torch.tensor([[[3.5, 4.5, 1], [9.5, 9.5, 1]]])
    evaluator.process([{"image_id": 1}, {"image_id": 2}], [{"instances": instances}] * 2)
    # The object of image 2 has no keypoints left, so that what is found there counts neither way
    assert evaluator.evaluate()["keypoints"]["AP50"] == pytest.approx(100)


def test_the_truth_of_data_without_a_file_is_not_that_of_an_earlier_run(tmp_path):
    for categories in ([0, 0], [0]):
        _register([_record(1, *categories)], thing_classes=["a"])
        evaluator = TolerantCOCOEvaluator("own", tasks=("bbox",), output_dir=str(tmp_path))
        assert len(evaluator._coco_api.anns) == len(categories)


@pytest.mark.posix
@pytest.mark.usefixtures("bare_data")
def test_a_signal_ends_the_computation_of_ap_where_other_processes_wait_for_it(monkeypatch):
    def compute(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal did not end it")

    monkeypatch.setattr(COCOEvaluator, "_eval_predictions", compute)
    evaluator = TolerantCOCOEvaluator("bare", tasks=("bbox",))
    evaluator.reset()
    evaluator.process([{"image_id": 1}], [{"instances": found((20, 20), [[2, 3, 12, 11]])}])
    with catch_signals():
        assert evaluator.evaluate() == {}  # and it goes to where they meet
        with pytest.raises(StopRequest):
            leave_if_asked()


# Detectron2's name of the data, its evaluator, and the package that it needs
OTHER_KINDS = [
    ("lvis", "LVISEvaluator", "lvis"),
    ("pascal_voc", "PascalVOCDetectionEvaluator", None),
    ("cityscapes_instance", "CityscapesInstanceEvaluator", "cityscapesscripts"),
    ("cityscapes_sem_seg", "CityscapesSemSegEvaluator", "cityscapesscripts"),
]


@pytest.fixture
def other_data():
    """A configuration to evaluate on a data set "other" of an evaluator_type."""

    def make(kind: str):
        DatasetCatalog.register("other", list)
        MetadataCatalog.get("other").set(evaluator_type=kind)
        cfg = get_cfg()
        cfg.MODEL.MASK_ON = kind == "cityscapes_instance"
        if kind.endswith("sem_seg"):
            cfg.MODEL.META_ARCHITECTURE = "SemanticSegmentor"
        cfg.DATASETS.TEST = ("other",)
        return cfg

    return make


@pytest.mark.parametrize(("kind", "name", "package"), OTHER_KINDS)
def test_other_kinds_of_data_have_detectron2s_evaluators(
    other_data, monkeypatch, kind, name, package
):
    cfg = other_data(kind)
    assert getattr(registry, name) is getattr(detectron2.evaluation, name)
    # Their packages and files need not be here
    monkeypatch.setattr(registry, name, lambda dataset_name, **options: (name, dataset_name))
    assert build_evaluator(cfg, "other")._evaluators == [(name, "other")]
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: asked == package or None)
    check_evaluators(cfg)
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: None)
    if package:
        with pytest.raises(ConfigError, match=f"other .*{kind}.*pip install .*{package}"):
            check_evaluators(cfg)


def test_the_package_of_lvis_counts_with_todays_numpy(tmp_path):
    """As the task runs it: its newest release alone fails after the inference."""
    pytest.importorskip("lvis", reason="pip install lvis --no-deps")
    annotations = [annotation(number, number, [2, 3, 10, 8]) for number in (1, 2)]
    content = coco_content({1: "1.jpg", 2: "2.jpg"}, annotations, {1: "a"}, (20, 20))
    for image in content["images"]:
        image |= {"neg_category_ids": [], "not_exhaustive_category_ids": []}
        image["coco_url"] = "x/y/1.jpg"
    content["categories"][0] |= {"frequency": "f", "image_count": 2}
    path = tmp_path / "lvis.json"
    path.write_text(json.dumps({"info": {}, **content}))
    register_lvis_instances("lvis_v1_few", {}, str(path), str(tmp_path))
    assert len(DatasetCatalog.get("lvis_v1_few")) == 2
    cfg = get_cfg()
    cfg.DATASETS.TEST, cfg.OUTPUT_DIR = ("lvis_v1_few",), str(tmp_path / "output")
    check_evaluators(cfg)
    components = SimpleNamespace(
        test_sets=["lvis_v1_few"],
        make_evaluator=lambda name, ending: build_evaluator(cfg, name),
        make_test_loader=lambda name: [[{"image_id": 1}], [{"image_id": 2}]],
    )
    boxes = {1: [[2, 3, 12, 11]], 2: []}
    model = nn.Identity()
    model.forward = lambda inputs: [
        {"instances": found((20, 20), boxes[x["image_id"]])} for x in inputs
    ]
    results = {}
    DetectionTask._evaluate_on(SimpleNamespace(components=components), model, "", results)
    # One of two objects: of COCO's recalls, those up to a half
    assert results["lvis_v1_few"]["bbox"]["AP"] == pytest.approx(100 * 51 / 101)


# A change of the evaluation of masks of Cityscapes, on which Detectron2's evaluator would fail
@pytest.mark.parametrize(
    ("kind", "pairs", "named"),
    [
        ("cityscapes_panoptic_seg", [], "cityscapes_panoptic_seg"),
        ("mine", [], "mine"),
        ("cityscapes_instance", ["MODEL.MASK_ON", False], "MODEL.MASK_ON False"),
        ("cityscapes_instance", ["MODEL.META_ARCHITECTURE", "RetinaNet"], "RetinaNet"),
    ],
)
def test_data_that_nothing_here_can_evaluate(other_data, monkeypatch, kind, pairs, named):
    monkeypatch.setattr("importlib.util.find_spec", lambda asked: object())
    cfg = other_data(kind)
    if pairs:
        check_evaluators(cfg)
    cfg.merge_from_list(pairs)
    with pytest.raises(ConfigError, match=f"other .*{named}"):
        check_evaluators(cfg)


@pytest.mark.parametrize(
    "pair",
    [
        ("MODEL.META_ARCHITECTURE", "RetinaNet"),
        ("MODEL.KEYPOINT_ON", True),
        ("MODEL.LOAD_PROPOSALS", True),
    ],
)
def test_an_augmented_test_that_detectron2_cannot_make_is_refused(pair):
    cfg = get_cfg()
    cfg.merge_from_list([*pair])
    check_evaluators(cfg)
    cfg.TEST.AUG.ENABLED = True
    with pytest.raises(ConfigError, match=rf"TEST\.AUG\.ENABLED.*{pair[0]} {pair[1]}"):
        check_evaluators(cfg)


@pytest.mark.parametrize("damage", ["cut", "size"])
def test_a_broken_semantic_mask_is_named(tmp_path, damage):
    image, mask = tmp_path / "image.png", tmp_path / "mask.png"
    Image.new("L", (4, 4) if damage == "cut" else (5, 4)).save(mask)
    if damage == "cut":
        mask.write_bytes(mask.read_bytes()[:45])
    record = {"file_name": str(image), "sem_seg_file_name": str(mask)}
    DatasetCatalog.register("broken_masks", lambda: [record])
    metadata = MetadataCatalog.get("broken_masks")
    metadata.set(stuff_classes=["a", "b"], ignore_label=255, evaluator_type="sem_seg")
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE, cfg.OUTPUT_DIR = "SemanticSegmentor", str(tmp_path)
    evaluator = build_evaluator(cfg, "broken_masks")
    evaluator.reset()
    with pytest.raises(DataError, match=r"mask\.png"):
        evaluator.process([record], [{"sem_seg": torch.zeros(2, 4, 4)}])


def test_a_semantic_mask_turns_as_in_training(tmp_path):
    labels, exif = np.arange(12, dtype=np.uint8).reshape(3, 4), Image.Exif()
    exif[274] = 6
    file = str(tmp_path / "mask.png")
    Image.fromarray(labels).save(file, exif=exif)
    read = evaluation._read_labels(file, int, classes=12, ignored=255)
    trained = detection_utils.read_image(file, "L").squeeze(2)
    assert np.array_equal(read, trained) and read.shape == (4, 3)


def test_panoptic_data_are_counted_by_their_file(shapes):
    """What loads them gives no areas, by which AP tells small objects from large ones."""
    truth = evaluation.ground_truth_of("shapes_panoptic_val")
    content = json.loads(Path(MetadataCatalog.get("shapes_panoptic_val").json_file).read_text())
    areas = sorted(annotation["area"] for annotation in content["annotations"])
    assert sorted(annotation["area"] for annotation in truth.anns.values()) == areas
