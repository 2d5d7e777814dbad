"""From flags for own data to files in COCO's format and keys of a configuration."""

import copy
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from detectron2.config import CfgNode
from PIL import Image

from lambda_det import cli, get_config
from lambda_det.detection import DetectionTask
from lambda_det.errors import ConfigError, DataError, WeightsError
from lambda_det.own_data import start
from lambda_det.own_data.command_line import main as check_main
from lambda_det.training.log import BufferedLog
from tests.coco import annotation, coco_content
from tests.detection.tiny import NARROW
from tests.own_data.parts import make, voc
from tests.reliability.runs import content, differences, metrics

BOX = [4, 6, 36, 24]
PLAIN = ["--config-file", "mask_rcnn_lambdaresnet50.yaml"]
NAMED = ["--config", "finetune/light_mobilenet_v2.yaml"]


def label(folder, number, name="cell", side=24, count=1, size=(64, 48)):
    """Give an image objects, in Pascal VOC's format."""
    things = [(name, (4, 6, 4 + side, 6 + side))] * count
    make(folder, {f"{number}.xml": voc(f"{number}.png", *things, size=size)})


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Twenty images with a Pascal VOC file each, no GPU, no connection and nothing kept."""
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(start, "_is_connected", lambda: False)
    (tmp_path / "data").mkdir()
    for number in range(20):
        Image.new("RGB", (64, 48), (number, 9, 9)).save(tmp_path / "data" / f"{number}.png")
        label(tmp_path / "data", number, "cell" if number % 2 else "rod")
    return tmp_path / "data"


class Prepared(NamedTuple):
    """What a command line became.

    Attributes:
        config: with the keys of the command line.
        file: of the configuration.
        records: the messages to log.
    """

    config: CfgNode
    file: str
    records: list


def prepared(*words):
    """A command line, which is prepared as ``lambda-det train`` does."""
    args = cli.detector_parser().parse_args(list(map(str, words)))
    if args.output:
        args.opts += ["OUTPUT_DIR", args.output]
    before = copy.deepcopy(args)
    with BufferedLog() as log:
        task = DetectionTask.read(args)
        records = [vars(record) for record in log.take()]
    assert args == before
    return Prepared(task.config, task.config_file, records)


def prepared_of(data, *words):
    """That of own data, in a run beside them."""
    return prepared("--data", data, "--output", data.parent / "run", *words)


def warned(args):
    """The warnings."""
    return [record["msg"] for record in args.records if record["levelname"] == "WARNING"]


def said(args, words):
    """How many messages have some words."""
    return sum(words in record["msg"] for record in args.records)


def table(args):
    """The rows that are logged: the value of each, with the reason."""
    (text,) = [r["msg"] for r in args.records if r["msg"].startswith("What was chosen")]
    rows = [re.split("  +", line.rstrip()) for line in text.splitlines()[3:]]
    return {row[0]: row[1:] for row in rows}


def begun(args):
    """Leave what a run of a command line that is prepared leaves; returns its configuration."""
    cfg = args.config
    task = DetectionTask(cfg).prepare(train=True)
    text = f"# --config-file {args.file}\n{task.dump()}"
    Path(cfg.OUTPUT_DIR, "config.yaml").write_text(text)
    Path(cfg.OUTPUT_DIR, "last_checkpoint").write_text("model_0000000.pth")
    return cfg


def names(file):
    """Of the images of a file in COCO's format."""
    return {image["file_name"] for image in json.loads(Path(file).read_text())["images"]}


@pytest.mark.parametrize(
    ("memory", "connected", "recipe"),
    [
        (None, False, "light_mobilenet_v2_openimages"),
        (None, True, "light_mobilenet_v2"),
        (80, True, "mask_rcnn_resnetrs101_se"),
        (6, True, "mask_rcnn_resnetrs50_se"),
        (4.5, True, "mask_rcnn_lambda_resnet26t"),
        (2, True, "light_mobilenet_v2"),
        (80, False, "light_mobilenet_v2_openimages"),
    ],
)
def test_the_recipe_follows_from_machine_and_connection(
    data, monkeypatch, memory, connected, recipe
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: memory is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(total_memory=(memory or 0) * 2**30, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(start, "_is_connected", lambda: connected)
    args = prepared_of(data)
    rows = table(args)
    assert Path(args.file).stem == recipe
    assert Path(args.file).as_posix().endswith(rows["recipe"][0])
    assert said(args, "Held out") == 1
    assert rows["MODEL.DEVICE"][0] == args.config.MODEL.DEVICE
    assert ("cpu" if memory is None else "cuda") == args.config.MODEL.DEVICE
    assert rows["labels"][0] == "Pascal VOC" and rows["images"][0] == "18 of 18"
    assert rows["start"][0].startswith("lambda://") is not connected
    assert ("MODEL.WEIGHTS" in rows["recipe"][1]) is not connected
    assert bool(said(args, "DATALOADER.NUM_WORKERS")) is (memory is not None)
    is_light_on_gpu = memory is not None and recipe.startswith("light")
    assert bool(said(args, "for this GPU")) is is_light_on_gpu


def test_weights_that_are_kept_need_no_connection(data):
    kept = data.parent / "cache" / "lambda_det" / "timm_mobilenetv2_100.ra_in1k_0.1.0.pth"
    kept.parent.mkdir(parents=True)
    kept.touch()
    args = prepared_of(data)
    assert "mobilenetv2" in table(args)["start"][0]


def test_a_connection_is_tried_once_and_briefly(monkeypatch):
    asked = []

    def refuse(request, timeout):
        asked.append(timeout)
        raise ConnectionRefusedError

    monkeypatch.setattr(start.urllib.request, "urlopen", refuse)
    for variable, tries in (("1", 0), ("0", 1)):
        monkeypatch.setenv("HF_HUB_OFFLINE", variable)
        start._is_connected.cache_clear()
        assert not start._is_connected() and not start._is_connected()
        assert len(asked) == tries and all(seconds <= 5 for seconds in asked)
    start._is_connected.cache_clear()


def test_what_is_given_counts(data, monkeypatch):
    """Keys stand behind the chosen ones; a file is not looked for; a share is another share."""
    words = ["INPUT.MIN_SIZE_TEST", "77", "MODEL.WEIGHTS", "mine.pth", "MODEL.DEVICE", "cpu"]
    args = prepared_of(data, "--val-share", "0.5", *words, "SOLVER.MAX_ITER", "900")
    cfg = args.config
    assert table(args)["start"][0] == cfg.MODEL.WEIGHTS == "mine.pth"
    # Images of 48 pixels are enlarged to 96, not to the recipe's 384
    assert cfg.INPUT.MIN_SIZE_TEST == 77 and cfg.INPUT.MIN_SIZE_TRAIN == (80, 88, 96)
    assert cfg.SOLVER.MAX_ITER == 900 and not cfg.RECIPE.ENABLED
    assert "SOLVER.MAX_ITER" in cfg.RECIPE.KEEP and cfg.TEST.EVAL_PERIOD == 180
    (text,) = [r["msg"] for r in args.records if r["msg"].startswith("What follows from these")]
    # nobody gave the recipe's 1000
    assert re.search(r"\nSOLVER\.MAX_ITER +900 +kept.*\nSOLVER\.WARMUP_ITERS +90 +a tenth", text)
    held_out, kept = names(cfg.DATASETS.TEST_JSON), names(cfg.DATASETS.TRAIN_JSON)
    assert len(held_out | kept) == 20 and 5 < len(held_out) < 15 and not held_out & kept
    monkeypatch.setattr(start, "_is_connected", lambda: True)
    args = prepared_of(data, "MODEL.WEIGHTS", "")
    assert "random" in table(args)["start"][0] and "light_lambdaresnet26" in args.file
    args = prepared_of(data, *NAMED, "--epochs", "2", "--batch", "3")
    assert Path(args.file).stem == "light_mobilenet_v2" and "recipe" not in table(args)
    solver = args.config.SOLVER
    trained = len(names(args.config.DATASETS.TRAIN_JSON))
    assert (3, -(-2 * trained // 3)) == (solver.IMS_PER_BATCH, solver.MAX_ITER)


def test_one_size_changes_all_sizes_by_one_factor(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "INPUT: {MIN_SIZE_TRAIN: [320, 352, 384], MAX_SIZE_TRAIN: 640, MIN_SIZE_TEST: 384,\n"
        "        MAX_SIZE_TEST: 640, LSJ: {ENABLED: false}}\n"
    )
    inputs = prepared("--config-file", file, "--size", 512).config.INPUT
    assert inputs.MIN_SIZE_TRAIN == (427, 469, 512) and inputs.MIN_SIZE_TEST == 512
    assert inputs.MAX_SIZE_TRAIN == inputs.MAX_SIZE_TEST == 853
    assert inputs.LSJ.SIZE == get_config("finetune/base.yaml").INPUT.LSJ.SIZE  # which is not on
    args = prepared("--config-file", "mask_rcnn_lambdaresnet50.yaml", "--size", 512)
    inputs = args.config.INPUT
    assert inputs.LSJ.SIZE == inputs.MIN_SIZE_TEST == inputs.MAX_SIZE_TEST == 512


@pytest.fixture
def photographs(data):
    """By their labels the images are large, and each has four objects of 12 pixels."""
    for number in range(20):
        label(data, number, "cell", 12, 4, (2000, 1500))
    return data


@pytest.mark.parametrize(
    ("empty", "missing", "given", "are_taken"),
    [
        (10, 0, [], True),
        (11, 0, [], False),  # more than the others
        (5, 1, [], False),  # nobody may have looked at it
        (5, 3, [], False),  # some may be lost
        (0, 3, [], False),
        (0, 0, [], False),
        (5, 0, ["DATALOADER.FILTER_EMPTY_ANNOTATIONS", "True"], False),
    ],
)
def test_yolos_empty_label_files_are_background(data, capsys, empty, missing, given, are_taken):
    shutil.copytree(data, data.parent / "photographs", ignore=shutil.ignore_patterns("*.xml"))
    photographs = data.parent / "photographs"
    lines = ["0 0.5 0.5 0.4 0.4\n"] * (20 - empty - missing) + [""] * empty
    make(photographs, {f"{number}.txt": line for number, line in enumerate(lines)})
    make(photographs, {"data.yaml": "names: [cell]\n"})
    assert check_main([str(photographs)]) == (missing > 2)
    printed = capsys.readouterr().out
    assert (f"{missing} of 20 images have no label file" in printed) is (missing > 2)
    assert (f"{empty} images with an empty label file" in printed) is (are_taken or bool(given))
    left_out = empty + missing if empty and not (are_taken or given) else 0
    assert (f"{left_out} images without an object are left out" in printed) is bool(left_out)
    run = data.parent / "run"
    args = prepared("--data", photographs, "--val-share", 0, "--output", run, *given)
    assert args.config.DATALOADER.FILTER_EMPTY_ANNOTATIONS is not are_taken
    assert table(args)["images"][0] == f"{20 if are_taken else 20 - empty - missing} of 20"
    begun(args)
    again = prepared("--data", photographs, "--val-share", 0, "--output", run, "--resume")
    assert again.config.DATALOADER.FILTER_EMPTY_ANNOTATIONS is not are_taken


def test_large_images_with_small_objects_are_cut(photographs):
    """Keys, table, and what follows from the number of tiles and from objects in them."""
    args = prepared_of(photographs, "--val-share", "0.1")
    cfg = args.config
    assert table(args)["tiles"][0] == "384 pixels, overlap 48" and "100%" in table(args)["tiles"][1]
    assert (cfg.INPUT.TILE.SIZE, cfg.INPUT.TILE.OVERLAP) == (384, 48)
    assert cfg.INPUT.MIN_SIZE_TRAIN[-1] >= 384  # the objects are larger there by the rule
    trained = len(names(cfg.DATASETS.TRAIN_JSON))
    tiles = trained + round(cfg.INPUT.TILE.EMPTY * trained)
    assert said(args, f"epochs of {tiles} tiles") and said(args, f"{tiles} tiles")
    assert said(args, f" evaluations of {30 * len(names(cfg.DATASETS.TEST_JSON))} tiles; ")
    assert not any("12 pixels" in warning for warning in warned(args))
    args = prepared_of(photographs, "--tile", "0")
    (warning,) = (warning for warning in warned(args) if "12 pixels" in warning)
    assert "100% of the objects" in warning and "--tile auto" in warning
    whole = args.config
    assert whole.INPUT.TILE.SIZE == 0
    assert (whole.SOLVER.MAX_ITER, cfg.SOLVER.MAX_ITER) == (300, 300)
    assert whole.TEST.EVAL_PERIOD < cfg.TEST.EVAL_PERIOD  # one of tiles takes longer


@pytest.mark.parametrize(
    ("config", "tile"), [([], "auto"), (NAMED, "auto"), (NAMED, "640"), ([], "4000")]
)
def test_a_run_keeps_its_tiles(photographs, config, tile):
    """Also those that followed from the data, and none where no image is larger."""
    words = [photographs, *config, "--tile", tile]
    before = begun(prepared_of(*words))
    assert same(prepared_of(*words, "--resume").config, before)
    assert same(prepared_of(photographs, "--resume").config, before)
    other = prepared_of(photographs, "--resume", "--tile", "512").config
    assert (other.INPUT.TILE.SIZE, other.SOLVER) == (512, before.SOLVER)


SOUND = [40, 30, 8, 8]  # pixels of an image of 64x48, which has twice as many in the input
BROKEN = [[1, 2, 3], "text", None, [1, 1, 0, 5]]


def write_coco(folder, boxes, name="labels.json"):
    """Labels of the 20 images in COCO's format, with these boxes in turn."""
    objects = [
        annotation(n + 1, n % 20, SOUND, bbox=box, segmentation=None) for n, box in enumerate(boxes)
    ]
    content = coco_content({n: f"{n}.png" for n in range(20)}, objects, {1: "cell"})
    (folder / name).write_text(json.dumps(content))
    return content


def test_the_size_follows_from_the_boxes_that_are_trained_on(data):
    """Boxes that are left out do not count. An image without a size has its own."""
    content = write_coco(data, [SOUND] * 500 + BROKEN)
    del content["images"][3]["width"]
    file = data / "labels.json"
    file.write_text(json.dumps(content))
    words = ["--train", file, "--images", data, "--output", data.parent / "run"]
    args = prepared(*words, "--val-share", "0")
    assert table(args)["small objects"][0] == "100% below 32 pixels at 96"
    write_coco(data, BROKEN)
    with pytest.raises(DataError, match="annotations have something"):
        prepared(*words)


@pytest.mark.parametrize(("kept", "some"), [(range(1, 6), True), (range(1), False)])
def test_of_few_images_more_or_none_are_held_out(data, kept, some):
    for number in set(range(20)).difference(kept):
        (data / f"{number}.xml").unlink()
    args = prepared_of(data)
    assert ("none" in table(args)["evaluation"][0]) is not some
    assert bool(args.config.DATASETS.TEST_JSON) is some


def test_a_command_without_own_data_is_left_alone(tmp_path, monkeypatch):
    """And imports nothing of what prepares own data."""
    monkeypatch.setattr("lambda_det.own_data.prepare.prepare", None)
    words = [*PLAIN, "OUTPUT_DIR", tmp_path / "run"]
    args = prepared(*words)
    assert not args.records and not (tmp_path / "run").exists()
    (tmp_path / "a.json").write_text("{}")
    cfg = prepared("--train-json", tmp_path / "a.json", "--train-images", tmp_path, *words).config
    assert str(tmp_path / "a.json") == cfg.DATASETS.TRAIN_JSON
    assert cfg.SOLVER == args.config.SOLVER


def test_a_single_class(data):
    args = prepared_of(data, "--single-class")
    for part in ("TRAIN", "TEST"):
        content = json.loads(Path(args.config.DATASETS[f"{part}_JSON"]).read_text())
        assert [category["name"] for category in content["categories"]] == ["object"]
        assert {one["category_id"] for one in content["annotations"]} == {1}
    cfg = begun(args)
    assert prepared_of(data, "--resume").config.DATASETS == cfg.DATASETS


def in_parts(data, *parts):
    """Parts as Roboflow writes them, with the same images; the words that name them."""
    for part in parts:
        folder = data.parent / "roboflow" / part
        folder.mkdir(parents=True)
        for file in data.glob("*.png"):
            shutil.copy(file, folder)
        write_coco(folder, [BOX] * 20, "_annotations.coco.json")
    return [*PLAIN, "--data", data.parent / "roboflow", "--output", data.parent / "run"]


@pytest.mark.parametrize("lacks", ["nothing", "annotations", "categories"])
def test_parts_that_are_there(data, lacks):
    """Files of one name are called by their part. The test part is left for the end, and not
    looked at before, as test sets are published without annotations."""
    words = in_parts(data, "train", "valid", "test")
    labels = data.parent / "roboflow" / "test" / "_annotations.coco.json"
    content = json.loads(labels.read_text())
    labels.write_text(json.dumps({key: value for key, value in content.items() if key != lacks}))
    args = prepared(*words)
    assert "valid" in table(args)["evaluation"][0] and said(args, "lambda-det evaluate")
    assert "20 objects, so few that AP is rough" in table(args)["evaluation"][1]
    assert not warned(args)
    datasets, folder = args.config.DATASETS, data.parent / "run" / "data"
    assert Path(datasets.TRAIN_JSON).name.startswith("train_annotations.coco_")
    assert Path(datasets.TEST_JSON).name.startswith("valid_annotations.coco_")
    parts = [str(data.parent / "roboflow" / part) for part in ("train", "valid", "test")]
    file, images = json.loads((folder / "sources.json").read_text())["rest"]
    assert [datasets.TRAIN_IMAGES, datasets.TEST_IMAGES, images] == parts
    assert len(names(folder / file)) == 20


def test_converted_labels_are_called_by_the_user_s_folder(data, monkeypatch):
    """However it is written, and not by the temporary folder, which has another name each time.

    Where the configuration has no recipe, nothing but the files is chosen or derived.
    """
    (data / "labels").mkdir()
    for file in data.glob("*.xml"):
        file.rename(data / "labels" / file.name)
    monkeypatch.chdir(data / "labels")
    plain, files = get_config(PLAIN[1]), []
    for number, place in enumerate((data / "labels", data / "labels", "../labels", ".")):
        run = data.parent / str(number)
        cfg = prepared(*PLAIN, "--train", place, "--images", data, "--output", run).config
        assert cfg.SOLVER == plain.SOLVER and cfg.MODEL == plain.MODEL
        assert str(data) == cfg.DATASETS.TRAIN_IMAGES and not cfg.DATASETS.TEST_JSON
        files.append(Path(cfg.DATASETS.TRAIN_JSON))
        assert len(names(files[-1])) == 20 and files[-1].parent == run / "data"
    assert files[0].name == files[1].name
    assert all(file.name.startswith("data_labels_") for file in files)


def test_without_a_validation_part_training_images_choose_the_weights(data):
    """An evaluation alone is of the test part."""
    words = in_parts(data, "train", "test")
    args = prepared(*words)
    files = args.config.DATASETS
    assert files.TRAIN_IMAGES == files.TEST_IMAGES == str(data.parent / "roboflow" / "train")
    assert not names(files.TRAIN_JSON) & names(files.TEST_JSON)
    assert "test part is for the end" in table(args)["evaluation"][1]
    test = prepared(*words, "--eval-only").config.DATASETS.TEST_IMAGES
    assert test == str(data.parent / "roboflow" / "test")


def test_a_single_part_is_trained_on_whatever_it_is_called(data):
    words = in_parts(data, "valid", "train")
    (data.parent / "roboflow" / "train" / "_annotations.coco.json").unlink()
    args = prepared(*words)
    assert said(args, "its one part is called val")
    assert said(args, "20 images of train that no labels name")
    assert "no part beside the training part is called val" in table(args)["evaluation"][1]


@pytest.mark.slow
def test_the_network_of_weights_that_are_a_detector_s(data, tmp_path):
    """Without a file; it says which, and fits the rest to the data."""
    words = ["MODEL.RPN.POST_NMS_TOPK_TEST", "55", "SOLVER.MAX_ITER", "7", "SEED", "4"]
    first = prepared("--data", data, "--output", tmp_path / "first", "--batch", "2", *words)
    task = DetectionTask(first.config).prepare(train=True)
    model = task.build_model()
    weights = tmp_path / "first" / "model_final.pth"
    content = {"model": model.state_dict(), **task.checkpoint_content({})}
    torch.save(content, weights)
    run = ["--data", data, "--output", tmp_path / "second"]
    args = prepared(*run, "MODEL.WEIGHTS", str(weights))
    cfg, folder = args.config, tmp_path / "second" / "data"
    assert table(args)["network"] == ["mobilenet_v2", f"that of MODEL.WEIGHTS {weights}"]
    assert cfg.MODEL.LAMBDA_RESNET.NAME == "mobilenet_v2"
    assert cfg.MODEL.RPN.POST_NMS_TOPK_TEST == 55 and str(weights) == cfg.MODEL.WEIGHTS
    assert cfg.SOLVER.MAX_ITER == cfg.RECIPE.MIN_STEPS and "SOLVER.MAX_ITER" not in cfg.RECIPE.KEEP
    assert Path(args.file).parent == Path(cfg.DATASETS.TRAIN_JSON).parent == folder
    torch.save({"model": model.state_dict()}, tmp_path / "bare.pth")
    assert "network" not in table(prepared(*run, "MODEL.WEIGHTS", str(tmp_path / "bare.pth")))


# ---------------------------------------------------------------------------------- with --resume
def same(cfg, other):
    """Whether two configurations train alike; of lists and tuples one is the other."""
    sections = ([one.MODEL, one.SOLVER, one.INPUT, one.DATALOADER] for one in (cfg, other))
    one, two = (json.loads(json.dumps(found)) for found in sections)
    for found in (one, two):
        del found[0]["ROI_HEADS"]["NUM_CLASSES"], found[0]["RETINANET"]["NUM_CLASSES"]
        del found[1]["UNSCALED"]
    return one == two


@pytest.fixture
def run(data):
    """The command line of a run that has begun, and its configuration."""
    words = ["--data", data, "--output", data.parent / "run", "--resume", "--epochs", "4"]
    return words, begun(prepared(*words, "SEED", "3"))


def test_a_run_goes_on_as_it_was_prepared(run, monkeypatch):
    """Whatever the machine would choose now; with flags for data or without."""
    words, cfg = run
    monkeypatch.setattr(start, "_is_connected", lambda: True)
    before = {path: path.read_bytes() for path in (Path(cfg.OUTPUT_DIR) / "data").iterdir()}
    for again in (words, words[2:5]):
        now = prepared(*again).config
        assert now.DATASETS.TRAIN_JSON == cfg.DATASETS.TRAIN_JSON and now.SEED == 3
        assert same(now, cfg)
    assert before == {path: path.read_bytes() for path in (Path(cfg.OUTPUT_DIR) / "data").iterdir()}


def test_other_epochs_change_the_schedule_alone(run):
    words, cfg = run
    now = prepared(*words[:-1], "8").config
    assert now.SOLVER.MAX_ITER == 2 * cfg.SOLVER.MAX_ITER
    assert now.SOLVER.IMS_PER_BATCH == cfg.SOLVER.IMS_PER_BATCH


@pytest.mark.parametrize("change", ["a box", "none", "the folder is gone"])
def test_a_run_keeps_its_labels_and_says_so(run, data, change):
    """A warning names labels that are others by now; whatever was held out then stays so."""
    words, cfg = run
    if change == "a box":
        label(data, 3, side=25)
    if change == "the folder is gone":
        data.rename(data.parent / "elsewhere")
        words = [*words, "DATASETS.TRAIN_IMAGES", data.parent / "elsewhere"]
        words += ["DATASETS.TEST_IMAGES", data.parent / "elsewhere"]
    for more in ([], ["--val-share", "0.3"], ["--single-class"]):
        args = prepared(*words, *more)
        now = args.config.DATASETS
        assert (now.TRAIN_JSON, now.TEST_JSON) == (cfg.DATASETS.TRAIN_JSON, cfg.DATASETS.TEST_JSON)
        assert (
            said(args, f"--resume goes on with the labels in {data.parent / 'run' / 'data'}") == 1
        )
        # which would change nothing
        assert said(args, "--val-share") == said(args, "--single-class") == bool(more)
        assert [str(data) in message for message in warned(args)] == [True] * (change == "a box")
    assert prepared(*words[2:]).config.DATASETS.TRAIN_JSON == cfg.DATASETS.TRAIN_JSON


def test_changed_labels_to_evaluate_on_are_named(data):
    for part in ("train", "val"):
        shutil.copytree(data, data.parent / "parts" / part)
    words = "--data", data.parent / "parts", "--output", data.parent / "run"
    begun(prepared(*words))
    assert not warned(prepared(*words, "--resume"))
    label(data.parent / "parts/val", 3, side=25)
    (message,) = warned(prepared(*words, "--resume"))
    assert str(data.parent / "parts") in message


def test_labels_of_coco_s_that_were_broken_since_are_named(run, data):
    mine = data.parent / "mine.json"
    content = json.loads(Path(run[1].DATASETS.TRAIN_JSON).read_text())
    mine.write_text(json.dumps(content))
    words = "--train-json", mine, "--train-images", data, "--output", data.parent / "another"
    begun(prepared(*words))
    mine.write_text(json.dumps({**content, "annotations": [5]}))
    for more in ([], ["--test-json", data]):
        (message,) = warned(prepared(*words, "--resume", *more))
        assert str(mine) in message


def test_other_images_to_evaluate_on(run, data):
    """In a training that goes on, and alone; labels of any format."""
    words, cfg = run
    for more in ([], ["--eval-only"]):
        now = prepared(*words[2:5], *more, "--test-json", data).config.DATASETS
        assert names(now.TEST_JSON) == {f"{number}.png" for number in range(20)}
        assert str(data) == now.TEST_IMAGES and now.TRAIN_JSON == cfg.DATASETS.TRAIN_JSON


def test_the_folder_of_another_run_is_left_as_it_is(run):
    words, cfg = run
    before = sorted(Path(cfg.OUTPUT_DIR).rglob("*"))
    words = [word for word in words if word != "--resume"]
    with (
        mock.patch("lambda_det.own_data.prepare.read_data") as read,
        pytest.raises(ConfigError, match="already holds a run"),
    ):
        prepared(*words, "--val-share", "0.5")
    assert not read.called
    assert sorted(Path(cfg.OUTPUT_DIR).rglob("*")) == before
    (Path(cfg.OUTPUT_DIR) / "config.yaml").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        prepared(*words, "--resume")


@pytest.mark.parametrize("output", ["../run", "."])
def test_the_labels_of_a_run_that_did_not_begin_are_taken_back(output, data, monkeypatch):
    kept = []
    at_exit = SimpleNamespace(register=lambda *work: kept.append(work))
    monkeypatch.setattr("lambda_det.own_data.run_data.atexit", at_exit)
    folder = data.parent / "run"
    folder.mkdir()
    monkeypatch.chdir(folder)
    begun(prepared("--data", data, "OUTPUT_DIR", output))
    for has_begun in (True, False):
        for take_back, *what in reversed(kept):
            take_back(*what)
        # its user, who made the folder, finds it as it was, but for the mark
        assert (folder / "data").exists() is has_begun and folder.exists()
        for name in ("config.yaml", "last_checkpoint"):
            (folder / name).unlink(missing_ok=True)


OWN, BASE = ["--data", "DATA"], ["--config", "finetune/base.yaml"]
# What is named, and the words
REFUSED = [
    ("--train-json", *OWN, "--train-json", "a.json"),
    ("s3:.*bucket", "--data", "s3://bucket/my"),
    ("gs:.*bucket", "--train", "DATA", "--images", "gs://bucket/my"),
    ("no training was started", "--resume"),
    ("--config FILE", *OWN, "--eval-only"),
    ("type --data .*data", "DATA"),
    ("sees none", *OWN, "MODEL.DEVICE", "cuda"),
    ("no device", *OWN, "MODEL.DEVICE", "cudda"),
    ("--config", *OWN, "--num-machines", "2"),
    ("--val-share", *BASE, "--val-share", "0.5"),
    ("--test-json", *OWN, "--val-share", "0.5", "--test-json", "DATA"),
    ("--val-share", *OWN, "--val-share", "0", "--group-by", "a"),
    ("'png' puts all images into one group", *OWN, "--group-by", "png"),
    ("one group.*last tenth", *OWN, "--val-share", "0.5", "--group-by", "png"),
    ("no file .*nowhere", *OWN, "--test-json", "nowhere", "--test-images", "DATA"),
    ("broken.json", "--train-json", "BROKEN", "--train-images", "DATA"),
    ("odd.json .* entry 0 is 5", *OWN, "--test-json", "ODD", "--test-images", "DATA"),
    ("--train-json", *BASE, "--images", "DATA"),
    ("--size is 8", *OWN, "--size", "8"),
    ("MAX_SIZE_TEST", *OWN, "--size", "64", "INPUT.MAX_SIZE_TEST", "600"),
    ("MIN_SIZE_TEST is 0", *OWN, "--size", "64", "INPUT.MIN_SIZE_TEST", "0"),
    ("--epochs is nan", *OWN, "--epochs", "nan"),
    ("--epochs", *OWN, "--time", "1h", "--epochs", "3"),
    ("SOLVER.MAX_ITER", *OWN, "--time", "1h", "SOLVER.MAX_ITER", "9"),
    ("TILE.SIZE is 20", *OWN, "--tile", "20"),
    ("--data", *BASE, "--tile", "auto"),
    ("--tile auto", *BASE, "--eval-only", "--tile", "auto"),
    ("not a folder", *OWN, "--output", "BROKEN"),
    ("has images of the data", *OWN, "--output", "DATA"),  # it would be left out of them later
]


@pytest.mark.parametrize("row", REFUSED, ids=" ".join)
def test_what_cannot_be_chosen_is_refused(row, data):
    named, *words = row
    broken = data.parent / "broken.json"
    broken.write_text('{"images": [')
    odd = data.parent / "odd.json"
    odd.write_text(json.dumps(coco_content({1: "1.png"}, [5], {1: "cell"})))
    places = {"DATA": data, "BROKEN": broken, "ODD": odd}
    words = [places.get(word, word) for word in words]
    with pytest.raises((ConfigError, DataError, WeightsError), match=named):
        prepared("--output", data.parent / "run", *words)
    assert not (data.parent / "run").exists() and len(list(data.iterdir())) == 40


@pytest.mark.slow
def test_one_command_trains_and_goes_on_with_equal_bits(data, monkeypatch):
    """The same line, with a connection by now and without the keys, continues with its recipe.

    Here on tiles; runs on whole images go on with equal bits in tests/reliability.
    """
    output = data.parent / "run"
    words = ["train", "--data", str(data), "--output", str(output), "--resume", "--tile", "40"]
    keys = {"SEED": 1, "SOLVER.MAX_ITER": 2, "SOLVER.CHECKPOINT_PERIOD": 1, "SOLVER.EMA_DECAY": 0.0}
    keys |= {"SOLVER.IMS_PER_BATCH": 2, "INPUT.MIN_SIZE_TRAIN": (48,), "TEST.EVAL_PERIOD": 0}
    keys |= {"INPUT.MIN_SIZE_TEST": 48, "TEST.LOSS": False}
    pairs = [str(word) for pair in keys.items() for word in pair]
    assert cli.main([*words, *pairs, *NARROW[0].split()]) == 0
    whole = content(output / "model_final.pth")["model"]
    (output / "model_final.pth").unlink()
    (output / "last_checkpoint").write_text("model_0000000.pth")
    monkeypatch.setattr(start, "_is_connected", lambda: True)
    assert cli.main(words) == 0
    assert differences(whole, content(output / "model_final.pth")["model"]) == []
    log = (output / "log.txt").read_text("utf-8")
    assert "light_mobilenet_v2_openimages.yaml" in log and "goes on" in log
    assert "Pascal VOC" in log
    assert max(metrics(output)) == 1


def test_a_run_inside_its_data_is_no_data(data, monkeypatch, capsys):
    """Neither before it has begun, nor for a second one, nor for the command given again."""
    monkeypatch.chdir(data)
    words = ["--data", ".", "--output", "output/one", "--epochs", "4"]
    prepared(*words)  # which was refused after this
    cfg = begun(prepared(*words))
    Image.new("RGB", (64, 48)).save("output/one/first_batch.jpg")
    assert prepared(*words, "--resume").config.DATASETS == cfg.DATASETS
    label(data, 3, "spore")
    other = prepared("--data", ".", "--output", "output/two").config
    content = json.loads(Path(other.DATASETS.TRAIN_JSON).read_text())
    content["images"] += json.loads(Path(other.DATASETS.TEST_JSON).read_text())["images"]
    assert [one["name"] for one in content["categories"]] == ["cell", "rod", "spore"]
    assert {image["file_name"] for image in content["images"]} == {f"{n}.png" for n in range(20)}
    assert check_main(["."]) == 0
    printed = capsys.readouterr().out
    assert "20 images" in printed and "last tenth" in printed


def test_a_share_of_the_training_part_leaves_a_given_part_out(data):
    for number in range(20):
        folder = data / ("val" if number % 5 == 0 else "train")
        folder.mkdir(exist_ok=True)
        for ending in ("png", "xml"):
            (data / f"{number}.{ending}").rename(folder / f"{number}.{ending}")
    rows = table(prepared_of(data, "--val-share", "0.5"))
    assert rows["images"][0] == "8 of 8" and "(val) is not used" in rows["evaluation"][1]


def test_flags_and_pairs_come_in_any_order():
    values = ["A", "-1e-5", "B", "-0.1,0,0", "C", "-inf", "D", "-.5", "AMP", "x"]
    args = cli.detector_parser().parse_args(["--data", "my", *values, "--epochs", "2", "SEED", "1"])
    assert args.opts == [*values, "SEED", "1"] and (args.data, args.epochs) == ("my", 2)
