"""From flags for own data to files in COCO's format and keys of a configuration."""

import copy
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

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
from tests.detection.tiny import NARROW, on_meta

VOC = """<annotation><filename>{}.png</filename><object><name>{}</name><bndbox><xmin>4</xmin>
<ymin>6</ymin><xmax>40</xmax><ymax>30</ymax></bndbox></object></annotation>"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Twenty images with a Pascal VOC file each, no GPU, no connection and nothing kept."""
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(start, "_is_connected", lambda: False)
    (tmp_path / "data").mkdir()
    for number in range(20):
        Image.new("RGB", (64, 48), (number, 9, 9)).save(tmp_path / "data" / f"{number}.png")
        text = VOC.format(number, "cell" if number % 2 else "rod")
        (tmp_path / "data" / f"{number}.xml").write_text(text)
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


def table(args):
    """The rows that are logged: the value of each, with the reason."""
    (text,) = [r["msg"] for r in args.records if r["msg"].startswith("What was chosen")]
    rows = [re.split("  +", line.rstrip()) for line in text.splitlines()[3:]]
    return {row[0]: row[1:] for row in rows}


def keys(args):
    """What the configuration says that a command line became."""
    return args.config


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
    args = prepared("--data", data, "--output", data.parent / "run")
    rows = table(args)
    assert Path(args.file).stem == recipe
    assert Path(args.file).as_posix().endswith(rows["recipe"][0])
    assert len([r for r in args.records if r["msg"].startswith("Held out")]) == 1
    assert rows["MODEL.DEVICE"][0] == keys(args).MODEL.DEVICE
    assert ("cpu" if memory is None else "cuda") == keys(args).MODEL.DEVICE
    assert rows["labels"][0] == "Pascal VOC" and rows["images"][0] == "17"
    assert rows["start"][0].startswith("lambda://") is not connected
    assert ("Open Images" in str(rows["start"])) is not connected
    assert ("MODEL.WEIGHTS" in rows["recipe"][1]) is not connected
    assert ("DATALOADER.NUM_WORKERS" in rows) is (memory is not None)
    assert ("SOLVER.IMS_PER_BATCH" in rows) is (memory is not None and recipe.startswith("light"))
    given = prepared("--data", data, "--output", data.parent / "given", "--batch", "8")
    assert keys(given).SOLVER.IMS_PER_BATCH == 8


def test_a_run_records_the_file_that_was_chosen(data, monkeypatch):
    files = []
    monkeypatch.setattr(
        "lambda_det.training.start.run",
        lambda args, task, config_file, **_: files.append(config_file),
    )
    assert cli.main(["train", "--data", str(data), "--output", str(data.parent / "run")]) == 0
    assert [Path(file).stem for file in files] == ["light_mobilenet_v2_openimages"]


def test_weights_that_are_kept_need_no_connection(data):
    kept = data.parent / "cache" / "lambda_det" / "timm_mobilenetv2_100.ra_in1k_0.1.0.pth"
    kept.parent.mkdir(parents=True)
    kept.touch()
    args = prepared("--data", data, "--output", data.parent / "run")
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
    run = ["--output", data.parent / "run"]
    words = ["INPUT.MIN_SIZE_TEST", "77", "MODEL.WEIGHTS", "mine.pth", "MODEL.DEVICE", "cpu"]
    args = prepared("--data", data, "--val-share", "0.5", *run, *words, "SOLVER.MAX_ITER", "900")
    cfg = keys(args)
    assert table(args)["start"][0] == cfg.MODEL.WEIGHTS == "mine.pth"
    # Images of 48 pixels are enlarged to 96, not to the recipe's 384
    assert cfg.INPUT.MIN_SIZE_TEST == 77 and cfg.INPUT.MIN_SIZE_TRAIN == (80, 88, 96)
    assert cfg.SOLVER.MAX_ITER == 900 and not cfg.RECIPE.ENABLED
    assert cfg.RECIPE.KEEP == ["SOLVER.MAX_ITER"] and cfg.TEST.EVAL_PERIOD == 180
    held_out, kept = names(cfg.DATASETS.TEST_JSON), names(cfg.DATASETS.TRAIN_JSON)
    assert len(held_out | kept) == 20 and 5 < len(held_out) < 15 and not held_out & kept
    monkeypatch.setattr(start, "_is_connected", lambda: True)
    args = prepared("--data", data, *run, "MODEL.WEIGHTS", "")
    assert "random" in table(args)["start"][0] and "light_lambdaresnet26" in args.file
    args = prepared(
        *("--config", "finetune/light_mobilenet_v2.yaml", "--data", data, *run),
        *("--epochs", "2", "--batch", "3"),
    )
    assert Path(args.file).stem == "light_mobilenet_v2" and "recipe" not in table(args)
    solver = keys(args).SOLVER
    trained = len(names(keys(args).DATASETS.TRAIN_JSON))
    assert (3, -(-2 * trained // 3)) == (solver.IMS_PER_BATCH, solver.MAX_ITER)


def test_one_size_changes_all_sizes_by_one_factor(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "INPUT: {MIN_SIZE_TRAIN: [320, 352, 384], MAX_SIZE_TRAIN: 640, MIN_SIZE_TEST: 384,\n"
        "        MAX_SIZE_TEST: 640, LSJ: {ENABLED: false}}\n"
    )
    inputs = keys(prepared("--config-file", file, "--size", 512)).INPUT
    assert inputs.MIN_SIZE_TRAIN == (427, 469, 512) and inputs.MIN_SIZE_TEST == 512
    assert inputs.MAX_SIZE_TRAIN == inputs.MAX_SIZE_TEST == 853
    assert inputs.LSJ.SIZE == get_config("finetune/base.yaml").INPUT.LSJ.SIZE  # which is not on
    args = prepared("--config-file", "mask_rcnn_lambdaresnet50.yaml", "--size", 512)
    inputs = keys(args).INPUT
    assert inputs.LSJ.SIZE == inputs.MIN_SIZE_TEST == inputs.MAX_SIZE_TEST == 512


def test_small_objects_get_a_finer_map(data):
    """In the table, in the configuration, and in the anchors that follow from the data."""
    box = re.search("<object>.*</object>", VOC.replace("\n", ""))[0]
    for number in range(20):
        Image.new("RGB", (200, 200), (number, 9, 9)).save(data / f"{number}.png")
        small = [box.format("rod").replace("40<", "14<").replace("30<", "16<")] * 4
        head = f"<annotation><filename>{number}.png</filename>"
        (data / f"{number}.xml").write_text(head + "".join(small) + "</annotation>")
    args = prepared("--data", data, "--output", data.parent / "run")
    assert table(args)["finest map"][0] == "100% below 32 pixels at 384"
    assert [r["msg"] for r in args.records if "below 16 pixels at 384" in r["msg"]]
    cfg = keys(args)
    assert max(cfg.INPUT.MIN_SIZE_TRAIN) == cfg.INPUT.MIN_SIZE_TEST == 384
    model = on_meta(cfg)
    assert model.proposal_generator.anchor_generator.strides == [4, 8, 16, 32, 64]
    assert cfg.MODEL.ANCHOR_GENERATOR.SIZES[:2] == [[18], [35]]  # those of the boxes, doubled
    assert model.roi_heads.box_pooler.level_poolers[0].spatial_scale == 1 / 4


@pytest.fixture(scope="module")
def large_files():
    """Twenty large images, made once."""
    files = []
    for number in range(20):
        buffer = io.BytesIO()
        Image.new("L", (2000, 1500), number).save(buffer, "PNG", compress_level=1)
        files.append(buffer.getvalue())
    return files


@pytest.fixture
def photographs(data, large_files):
    """The images are large, and each has four objects of 12 pixels."""
    thing = re.search("<object>.*</object>", VOC.replace("\n", ""))[0].format("cell")
    thing = thing.replace("40<", "16<").replace("30<", "18<")
    for number, content in enumerate(large_files):
        (data / f"{number}.png").write_bytes(content)
        text = f"<annotation><filename>{number}.png</filename>{4 * thing}</annotation>"
        (data / f"{number}.xml").write_text(text)
    return ["--data", data, "--output", data.parent / "run"]


def test_large_images_with_small_objects_are_cut(photographs):
    """Keys, table, and what follows from the number of tiles and from objects in them."""
    args = prepared(*photographs, "--val-share", "0.1")
    cfg = keys(args)
    assert table(args)["tiles"][0] == "384 pixels" and "100%" in table(args)["tiles"][1]
    assert (cfg.INPUT.TILE.SIZE, cfg.INPUT.TILE.OVERLAP) == (384, 48)
    assert cfg.INPUT.MIN_SIZE_TRAIN[-1] >= 384  # the objects are larger there by the rule
    assert cfg.MODEL.RPN.IN_FEATURES[0] == "p2"
    trained = len(names(cfg.DATASETS.TRAIN_JSON))
    tiles = trained + round(cfg.INPUT.TILE.EMPTY * trained)
    words = f"of {tiles} tiles of {trained} images"
    assert [r["msg"] for r in args.records if words in r["msg"]]
    assert [r["msg"] for r in args.records if f"{tiles} tiles" in r["msg"]]
    is_warned = [r for r in args.records if "12 pixels" in r["msg"] and r["levelno"] > 20]
    assert not is_warned
    whole = keys(prepared(*photographs, "--tile", "0"))
    assert whole.INPUT.TILE.SIZE == 0
    assert (whole.SOLVER.MAX_ITER, cfg.SOLVER.MAX_ITER) == (300, 300)
    assert whole.TEST.EVAL_PERIOD < cfg.TEST.EVAL_PERIOD  # one of tiles takes longer


@pytest.mark.parametrize(
    "words", [["--tile", "0"], ["--size", "384"], ["--config", "finetune/light_mobilenet_v2.yaml"]]
)
def test_objects_that_are_hardly_to_be_seen_are_a_warning_before_the_training(photographs, words):
    args = prepared(*photographs, *words, "--val-share", "0.1", "--epochs", "2")
    assert keys(args).INPUT.TILE.SIZE == 0
    (warning,) = [
        r["msg"] for r in args.records if "12 pixels" in r["msg"] and r["levelname"] == "WARNING"
    ]
    assert "100% of the objects" in warning and "--tile auto" in warning


def test_check_says_that_images_will_be_cut(photographs, capsys):
    check_main([str(photographs[1])])
    said = capsys.readouterr().out
    assert "100% of the objects have less than 12 pixels" in said and "384 pixels" in said


@pytest.mark.parametrize("config", [[], ["--config", "finetune/light_mobilenet_v2.yaml"]])
def test_given_tiles_keep_their_pixels(photographs, config):
    cfg = keys(prepared(*photographs, *config, "--tile", "640"))
    assert (cfg.INPUT.TILE.SIZE, cfg.INPUT.TILE.OVERLAP) == (640, 80)
    assert cfg.INPUT.MIN_SIZE_TEST >= 640
    cfg = keys(prepared(*photographs, *config, "--tile", "640", "--size", "320"))
    assert (cfg.INPUT.TILE.SIZE, cfg.INPUT.MIN_SIZE_TEST) == (640, 320)
    given = ["INPUT.MIN_SIZE_TEST", "352", "INPUT.TILE.OVERLAP", "64"]
    args = prepared(*photographs, *config, "--tile", "640", *given)
    assert [r["msg"] for r in args.records if "given sizes" in r["msg"]]
    cfg = keys(args)
    assert (cfg.INPUT.TILE.OVERLAP, cfg.INPUT.MIN_SIZE_TEST) == (64, 352)
    args = prepared(*photographs, *config, "--tile", "auto")
    assert keys(args).INPUT.TILE.SIZE == 384
    args = prepared(*photographs, *config, "--tile", "2000")
    assert keys(args).INPUT.TILE.SIZE == 0 and "2000" in table(args)["tiles"][1]


def test_given_sizes_are_those_of_whole_images(photographs):
    for words in (["--size", "512"], ["INPUT.MIN_SIZE_TEST", "512"]):
        assert keys(prepared(*photographs, *words)).INPUT.TILE.SIZE == 0


def test_tiles_of_a_run_stay(photographs):
    before = begun(prepared(*photographs))
    for words in ([], ["--tile", "384"], ["--tile", "auto"]):
        again = keys(prepared(*photographs, "--resume", *words))
        assert (again.INPUT, again.SOLVER) == (before.INPUT, before.SOLVER)
    other = keys(prepared(*photographs, "--resume", "--tile", "512"))
    assert (other.INPUT.TILE.SIZE, other.SOLVER) == (512, before.SOLVER)


@pytest.mark.parametrize("config", [[], ["--config", "finetune/light_mobilenet_v2.yaml"]])
@pytest.mark.parametrize("tile", ["auto", "640", "4000"])
def test_the_same_command_keeps_the_tiles_of_its_run(photographs, config, tile):
    """Also those that followed from the data, and none where no image is larger."""
    words = [*photographs, *config, "--tile", tile]
    before = begun(prepared(*words))
    assert keys(prepared(*words, "--resume")).INPUT == before.INPUT


SOUND = [40, 30, 8, 8]  # pixels of an image of 64x48, which has twice as many in the input
BROKEN = [[1, 2, 3], "text", None, [1, 1, 0, 5]]


def test_the_size_follows_from_the_boxes_that_are_trained_on(data):
    """Boxes that are left out do not count. An image without a size has its own."""
    names = {number: f"{number}.png" for number in range(20)}
    boxes = [annotation(number, number % 20, SOUND) for number in range(500)]
    for number, other in enumerate(BROKEN, 500):
        boxes.append(annotation(number, 0, SOUND, bbox=other, segmentation=None))
    content = coco_content(names, boxes, {1: "rod"}, (64, 48))
    del content["images"][3]["width"]
    file = data.parent / "labels.json"
    file.write_text(json.dumps(content))
    words = ["--train", file, "--images", data, "--val-share", "0"]
    args = prepared(*words, "--output", data.parent / "run")
    assert table(args)["finest map"][0] == "100% below 32 pixels at 96"


def test_labels_that_are_refused_choose_nothing(data):
    boxes = [annotation(number, 0, SOUND, bbox=box) for number, box in enumerate(BROKEN)]
    file = data.parent / "labels.json"
    file.write_text(json.dumps(coco_content({0: "0.png"}, boxes, {1: "rod"}, (64, 48))))
    with pytest.raises(DataError, match="of 4 annotations"):
        prepared("--train", file, "--images", data, "--output", data.parent / "run")


@pytest.mark.parametrize(("kept", "some"), [(range(1, 6), True), (range(1), False)])
def test_of_few_images_more_or_none_are_held_out(data, kept, some):
    for number in set(range(20)).difference(kept):
        (data / f"{number}.xml").unlink()
    args = prepared("--data", data, "--output", data.parent / "run")
    assert ("none" in table(args)["evaluation"][0]) is not some
    assert bool(keys(args).DATASETS.TEST_JSON) is some


def test_labels_with_a_configuration_that_has_no_recipe(data):
    """They are converted, and nothing else is chosen or derived."""
    for images in (["--images", data], []):
        words = ["--config", "mask_rcnn_lambdaresnet50.yaml", "--output", data.parent / "run"]
        args = prepared(*words, "--train", data, *images)
        cfg, plain = keys(args), get_config("mask_rcnn_lambdaresnet50.yaml")
        assert str(data) == cfg.DATASETS.TRAIN_IMAGES and not cfg.DATASETS.TEST_JSON
        assert len(names(cfg.DATASETS.TRAIN_JSON)) == 20
        assert Path(cfg.DATASETS.TRAIN_JSON).parent == data.parent / "run" / "data"
        assert cfg.SOLVER == plain.SOLVER and cfg.MODEL == plain.MODEL


def test_a_command_without_own_data_is_left_alone(tmp_path):
    words = ["--config", "mask_rcnn_lambdaresnet50.yaml", "OUTPUT_DIR", str(tmp_path / "run")]
    args = prepared(*words)
    plain = args.config
    assert not args.records and not (tmp_path / "run").exists()
    (tmp_path / "a.json").write_text("{}")
    cfg = prepared("--train-json", tmp_path / "a.json", "--train-images", tmp_path, *words).config
    assert str(tmp_path / "a.json") == cfg.DATASETS.TRAIN_JSON and cfg.SOLVER == plain.SOLVER


def test_parts_that_are_there(data):
    for part in ("train", "valid", "test"):
        (data.parent / "parts" / part).mkdir(parents=True)
    folders = ("train", "train", "valid", "test")
    for file in sorted(data.iterdir()):
        file.rename(data.parent / "parts" / folders[int(file.stem) % 4] / file.name)
    words = ["--config-file", "mask_rcnn_lambdaresnet50.yaml", "--data", data.parent / "parts"]
    args = prepared(*words, "--output", data.parent / "run")
    assert "valid" in table(args)["evaluation"][0]
    files = keys(args).DATASETS
    assert files.TRAIN_IMAGES == files.TEST_IMAGES == str(data.parent / "parts")
    assert len(names(files.TRAIN_JSON)) == 10 and len(names(files.TEST_JSON)) == 5
    # The test part is for the end; its file is there for the command that the log names
    assert [r["msg"] for r in args.records if "lambda-det evaluate" in r["msg"]]
    folder = data.parent / "run" / "data"
    file, images = json.loads((folder / "sources.json").read_text())["rest"]
    assert names(folder / file) == {f"test/{n}.png" for n in range(3, 20, 4)}
    assert images == files.TEST_IMAGES


@pytest.mark.parametrize("form", ["Pascal VOC", "COCO"])
def test_a_single_class(data, tmp_path, form):
    if form == "COCO":
        for file in data.glob("*.xml"):
            file.unlink()
        objects = [annotation(n + 1, n, [4, 6, 36, 24], category_id=1 + n % 2) for n in range(20)]
        content = coco_content({n: f"{n}.png" for n in range(20)}, objects, {1: "rod", 2: "cell"})
        (data / "labels.json").write_text(json.dumps(content))
    args = prepared("--data", data, "--single-class", "--output", tmp_path / "run")
    for part in ("TRAIN", "TEST"):
        content = json.loads(Path(keys(args).DATASETS[f"{part}_JSON"]).read_text())
        assert [category["name"] for category in content["categories"]] == ["object"]
        assert {one["category_id"] for one in content["annotations"]} == {1}
    cfg = begun(args)
    again = prepared("--data", data, "--resume", "--output", tmp_path / "run")
    assert keys(again).DATASETS == cfg.DATASETS


def prepared_by_part(data, boxes):
    """Parts as Roboflow writes them, each with a box in its images; a command line with them."""
    for part, box in boxes.items():
        folder = data.parent / "roboflow" / part
        folder.mkdir(parents=True)
        for file in data.glob("*.png"):
            shutil.copy(file, folder)
        objects = [annotation(n + 1, n, box) for n in range(20)]
        content = coco_content({n: f"{n}.png" for n in range(20)}, objects, {1: "cell"})
        (folder / "_annotations.coco.json").write_text(json.dumps(content))
    words = ["--config-file", "mask_rcnn_lambdaresnet50.yaml", "--data", folder.parent]
    return prepared(*words, "--output", data.parent / "run")


BOX = [4, 6, 36, 24]


@pytest.mark.parametrize(("parts", "name"), [(["train", "valid"], "valid"), (["train"], "train")])
def test_files_of_one_name_are_called_by_their_part(data, parts, name):
    """Roboflow's are; log and page say on which data set the numbers are."""
    datasets = keys(prepared_by_part(data, dict.fromkeys(parts, BOX))).DATASETS
    assert Path(datasets.TRAIN_JSON).name.startswith("train_annotations.coco_")
    assert Path(datasets.TEST_JSON).name.startswith(f"{name}_annotations.coco_")


def test_converted_labels_are_called_by_the_user_s_folder(data, monkeypatch):
    """However it is written, and not by the temporary folder, which has another name each time."""
    (data / "labels").mkdir()
    for file in data.glob("*.xml"):
        file.rename(data / "labels" / file.name)
    monkeypatch.chdir(data / "labels")
    names = []
    for number, place in enumerate((data / "labels", data / "labels", "../labels", ".")):
        words = ["--config-file", "mask_rcnn_lambdaresnet50.yaml", "--train", place]
        args = prepared(*words, "--images", data, "--output", data.parent / str(number))
        names.append(Path(keys(args).DATASETS.TRAIN_JSON).name)
    assert names[0] == names[1]
    assert all(name.startswith("data_labels_") for name in names)


def test_without_a_validation_part_training_images_choose_the_weights(data):
    """And the test part is left for the end; an evaluation alone is of it."""
    args = prepared_by_part(data, {"train": BOX, "test": BOX})
    files = keys(args).DATASETS
    folder = str(data.parent / "roboflow" / "train")
    assert files.TRAIN_IMAGES == files.TEST_IMAGES == folder
    assert not names(files.TRAIN_JSON) & names(files.TEST_JSON)
    assert "test part is for the end" in table(args)["evaluation"][1]
    sources = json.loads((data.parent / "run" / "data" / "sources.json").read_text())
    assert sources["rest"][1] == str(data.parent / "roboflow" / "test")
    words = ["--config-file", "mask_rcnn_lambdaresnet50.yaml", "--data", data.parent / "roboflow"]
    args = prepared(*words, "--eval-only", "--output", data.parent / "other")
    assert str(data.parent / "roboflow" / "test") == keys(args).DATASETS.TEST_IMAGES


@pytest.mark.parametrize("lacks", ["annotations", "categories", "file_name"])
def test_a_test_part_without_what_an_evaluation_needs_is_left_alone_too(data, lacks):
    """Test sets are published without annotations."""
    prepared_by_part(data, dict.fromkeys(["train", "valid", "test"], BOX))
    file = data.parent / "roboflow" / "test" / "_annotations.coco.json"
    content = json.loads(file.read_text())
    for entry in (content, content["images"][0]):
        entry.pop(lacks, None)
    file.write_text(json.dumps(content))
    words = ["--config-file", "mask_rcnn_lambdaresnet50.yaml", "--data", data.parent / "roboflow"]
    args = prepared(*words, "--output", data.parent / "other")
    assert not [r["msg"] for r in args.records if r["levelname"] == "WARNING"]
    assert str(file.parent) not in (
        keys(args).DATASETS.TRAIN_IMAGES,
        keys(args).DATASETS.TEST_IMAGES,
    )


@pytest.mark.slow
def test_the_network_of_weights_that_are_a_detector_s(data, tmp_path):
    """Without a file; it says which, and fits the rest to the data."""
    words = ["MODEL.RPN.POST_NMS_TOPK_TEST", "55", "SOLVER.MAX_ITER", "7", "SEED", "4"]
    first = prepared("--data", data, "--output", tmp_path / "first", "--batch", "2", *words)
    task = DetectionTask(keys(first)).prepare(train=True)
    model = task.build_model()
    weights = tmp_path / "first" / "model_final.pth"
    content = {"model": model.state_dict(), **task.checkpoint_content({})}
    torch.save(content, weights)
    run = ["--data", data, "--output", tmp_path / "second"]
    args = prepared(*run, "MODEL.WEIGHTS", str(weights))
    cfg, name = keys(args), "mobilenet_v2"
    assert table(args)["network"] == [name, f"that of MODEL.WEIGHTS {weights}"]
    assert cfg.MODEL.RPN.POST_NMS_TOPK_TEST == 55 and name == cfg.MODEL.LAMBDA_RESNET.NAME
    assert cfg.SOLVER.MAX_ITER == cfg.RECIPE.MIN_STEPS and not cfg.RECIPE.KEEP
    assert str(tmp_path / "second") == cfg.OUTPUT_DIR and str(weights) == cfg.MODEL.WEIGHTS
    assert Path(args.file).parent == tmp_path / "second" / "data"
    assert Path(cfg.DATASETS.TRAIN_JSON).parent == tmp_path / "second" / "data"
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
        now = keys(prepared(*again))
        assert now.DATASETS.TRAIN_JSON == cfg.DATASETS.TRAIN_JSON and now.SEED == 3
        assert same(now, cfg)
    assert before == {path: path.read_bytes() for path in (Path(cfg.OUTPUT_DIR) / "data").iterdir()}


def test_the_file_of_a_run_given_again_gives_the_same(data):
    words = ["--config", "finetune/light_lambdaresnet26.yaml", "--data", data]
    words += ["--output", data.parent / "run", "--resume"]
    cfg = begun(prepared(*words))
    assert same(keys(prepared(*words)), cfg)


def test_other_epochs_change_the_schedule_alone(run):
    words, cfg = run
    now = keys(prepared(*words[:-1], "8"))
    assert now.SOLVER.MAX_ITER == 2 * cfg.SOLVER.MAX_ITER
    assert now.SOLVER.IMS_PER_BATCH == cfg.SOLVER.IMS_PER_BATCH
    assert now.MODEL.ANCHOR_GENERATOR == cfg.MODEL.ANCHOR_GENERATOR


@pytest.mark.parametrize("change", ["a box", "none", "the folder is gone"])
def test_a_run_keeps_its_labels_and_says_so(run, data, change):
    """A warning names labels that are others by now; whatever was held out then stays so."""
    words, cfg = run
    text = (data / "3.xml").read_text()
    if change == "a box":
        (data / "3.xml").write_text(text.replace("<xmax>40", "<xmax>41"))
    if change == "the folder is gone":
        data.rename(data.parent / "elsewhere")
        words = [*words, "DATASETS.TRAIN_IMAGES", data.parent / "elsewhere"]
        words += ["DATASETS.TEST_IMAGES", data.parent / "elsewhere"]
    for more in ([], ["--val-share", "0.3"], ["--single-class"]):
        args = prepared(*words, *more)
        now = keys(args).DATASETS
        assert (now.TRAIN_JSON, now.TEST_JSON) == (cfg.DATASETS.TRAIN_JSON, cfg.DATASETS.TEST_JSON)
        place = f"{data.parent / 'run' / 'data'}"
        assert len([r for r in args.records if "--resume" in r["msg"] and place in r["msg"]]) == 1
        warned = [r["msg"] for r in args.records if r["levelname"] == "WARNING"]
        assert [str(data) in message for message in warned] == [True] * (change == "a box")
    assert keys(prepared(*words[2:])).DATASETS.TRAIN_JSON == cfg.DATASETS.TRAIN_JSON


def test_other_images_to_evaluate_on(run, data):
    """In a training that goes on, and alone; labels of any format."""
    words, cfg = run
    for more in ([], ["--eval-only"]):
        now = keys(prepared(*words[2:5], *more, "--test-json", data)).DATASETS
        assert names(now.TEST_JSON) == {f"{number}.png" for number in range(20)}
        assert str(data) == now.TEST_IMAGES and now.TRAIN_JSON == cfg.DATASETS.TRAIN_JSON


def test_the_folder_of_another_run_is_left_as_it_is(run, data):
    words, cfg = run
    before = sorted(Path(cfg.OUTPUT_DIR).rglob("*"))
    words = [word for word in words if word != "--resume"]
    with pytest.raises(ConfigError, match="already holds a run"):
        prepared(*words, "--val-share", "0.5")
    assert sorted(Path(cfg.OUTPUT_DIR).rglob("*")) == before
    (Path(cfg.OUTPUT_DIR) / "config.yaml").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        prepared(*words, "--resume")


REFUSED = {
    "two data sets": (["--data", "DATA", "--train-json", "a.json"], "--train-json"),
    "an address": (["--data", "s3://bucket/my"], "s3:.*is an address"),
    "an address of images": (["--train", "DATA", "--images", "gs://bucket/my"], "is an address"),
    "no run": (["--resume"], "no training was started"),
    "an evaluation": (["--eval-only", "--data", "DATA"], "--config FILE"),
    "a folder without its flag": (["DATA"], "type --data .*data"),
    "no such GPU": (["--data", "DATA", "MODEL.DEVICE", "cuda"], "sees 0"),
    "no such device": (["--data", "DATA", "MODEL.DEVICE", "cudda"], "no device"),
    "two machines": (["--num-machines", "2", "--data", "DATA"], "--config"),
    "a share of nothing": (["--config", "finetune/base.yaml", "--val-share", "0.5"], "--val-share"),
    "a share beside a test set": (
        ["--data", "DATA", "--val-share", "0.5", "--test-json", "DATA"],
        "--test-json",
    ),
    "groups of all": (["--data", "DATA", "--val-share", "0", "--group-by", "a"], "--val-share"),
    "labels that are not there": (["--data", "DATA", "--test-json", "nowhere"], "nowhere"),
    "images alone": (["--config", "finetune/base.yaml", "--images", "DATA"], "--train-json"),
    "a small size": (["--data", "DATA", "--size", "8"], "--size is 8"),
    "two sizes": (
        ["--data", "DATA", "--size", "64", "INPUT.MAX_SIZE_TEST", "600"],
        "MAX_SIZE_TEST",
    ),
    "epochs": (["--data", "DATA", "--epochs", "nan"], "RECIPE.EPOCHS is nan"),
    "small tiles": (["--data", "DATA", "--tile", "20"], "TILE.SIZE is 20"),
    "tiles of keypoints": (
        ["--data", "DATA", "--tile", "40", "MODEL.KEYPOINT_ON", "True"],
        "MODEL.KEYPOINT_ON",
    ),
    "half a tile": (
        ["--data", "DATA", "--tile", "40", "INPUT.TILE.OVERLAP", "20"],
        "TILE.OVERLAP is 20",
    ),
    "two tiles": (["--data", "DATA", "--tile", "40", "INPUT.TILE.SIZE", "50"], "INPUT.TILE.SIZE"),
    "tiles by no objects": (["--config", "finetune/base.yaml", "--tile", "auto"], "--data"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_chosen_is_refused(case, data):
    words, message = REFUSED[case]
    words = [data if word == "DATA" else word for word in words]
    with pytest.raises((ConfigError, DataError, WeightsError), match=message):
        prepared("--output", data.parent / "run", *words)
    assert not (data.parent / "run").exists()


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
    whole = torch.load(output / "model_final.pth", weights_only=False)["model"]
    (output / "model_final.pth").unlink()
    (output / "last_checkpoint").write_text("model_0000000.pth")
    monkeypatch.setattr(start, "_is_connected", lambda: True)
    assert cli.main(words) == 0
    again = torch.load(output / "model_final.pth", weights_only=False)["model"]
    assert whole.keys() == again.keys() and all(map(torch.equal, whole.values(), again.values()))
    log = (output / "log.txt").read_text("utf-8")
    assert "light_mobilenet_v2_openimages.yaml" in log and "goes on" in log
    assert "Pascal VOC" in log
    steps = [json.loads(line)["iteration"] for line in (output / "metrics.json").open()]
    assert max(steps) == 1


def renamed(data, number, label):
    """Give the object of an image another class."""
    (data / f"{number}.xml").write_text(VOC.format(number, label))


def test_a_run_inside_its_data_is_no_data(data, monkeypatch):
    """Neither before it has begun, nor for a second one, nor for the command given again."""
    monkeypatch.chdir(data)
    words = ["--data", ".", "--output", "output/one", "--epochs", "4"]
    prepared(*words)  # which was refused after this
    cfg = begun(prepared(*words))
    Image.new("RGB", (64, 48)).save("output/one/first_batch.jpg")
    assert keys(prepared(*words, "--resume")).DATASETS == cfg.DATASETS
    renamed(data, 3, "spore")
    other = keys(prepared("--data", ".", "--output", "output/two"))
    content = json.loads(Path(other.DATASETS.TRAIN_JSON).read_text())
    content["images"] += json.loads(Path(other.DATASETS.TEST_JSON).read_text())["images"]
    assert [one["name"] for one in content["categories"]] == ["cell", "rod", "spore"]
    assert {image["file_name"] for image in content["images"]} == {f"{n}.png" for n in range(20)}


def test_a_run_does_not_go_into_the_folder_of_its_images(data):
    """Later it would be left out of the data, with the images."""
    with pytest.raises(ConfigError, match=f"{data} has images of the data"):
        prepared("--data", data, "--output", data)
    assert sorted(path.suffix for path in data.iterdir()) == 20 * [".png"] + 20 * [".xml"]


@pytest.mark.slow
def test_two_trainings_inside_their_data_and_the_first_given_again(data, monkeypatch, capsys):
    """What a training and an evaluation write there is read by neither training nor check."""
    monkeypatch.chdir(data)
    limits = {"SOLVER.MAX_ITER": 1, "SOLVER.IMS_PER_BATCH": 2, "INPUT.MIN_SIZE_TRAIN": (48,)}
    limits |= {"SOLVER.EMA_DECAY": 0.0, "SOLVER.CHECKPOINT_PERIOD": 1}
    limits |= {"INPUT.MIN_SIZE_TEST": 48, "TEST.LOSS": False}
    more = [str(word) for pair in limits.items() for word in pair] + NARROW[0].split()
    words = ["train", "--data", ".", "--output", "output/one"]
    assert cli.main([*words, *more]) == 0
    assert cli.main([*words, "--resume", *more]) == 0
    assert cli.main(["evaluate", "output/one", "--part", "val", "--output", "seen"]) == 0
    renamed(data, 3, "spore")
    assert cli.main(["train", "--data", ".", "--output", "output/two", *more]) == 0
    for name, classes in (("one", "cell rod"), ("two", "cell rod spore")):
        found = get_config(data / "output" / name / "config.yaml").DATASETS
        content = json.loads(Path(found.TRAIN_JSON).read_text())
        assert " ".join(one["name"] for one in content["categories"]) == classes
    capsys.readouterr()
    assert cli.main(["check", ".", "--no-images"]) == 0
    assert "20 images" in capsys.readouterr().out


def test_sizes_that_are_named_stay(data):
    thing = "<object><name>cell</name><bndbox><xmin>4</xmin><ymin>6</ymin><xmax>7</xmax>"
    thing += "<ymax>9</ymax></bndbox></object>"
    for number in range(20):
        text = f"<annotation><filename>{number}.png</filename>{3 * thing}</annotation>"
        (data / f"{number}.xml").write_text(text)
    run = ["--data", data, "--output", data.parent / "run"]
    named = ["--config", "finetune/light_lambdaresnet26.yaml"]
    # the map of a named configuration stays, and that of a chosen one follows from the given size
    for words, finest in ((named, "p3"), (["INPUT.MIN_SIZE_TEST", 384], "p2")):
        args = prepared(*run, *words)
        assert keys(args).INPUT.MIN_SIZE_TEST == 384
        assert keys(args).MODEL.RPN.IN_FEATURES[0] == finest


def test_flags_and_pairs_come_in_any_order():
    words = ["SEED", "1", "--data", "my", "SOLVER.BASE_LR", "-1", "--epochs", "2", "AMP", "x"]
    args = cli.detector_parser().parse_args(words)
    assert args.opts == ["SEED", "1", "SOLVER.BASE_LR", "-1", "AMP", "x"]
    assert (args.data, args.epochs) == ("my", 2)
    assert cli.detector_parser().parse_args(["--data", "my"]).opts == []
    values = ["A", "-1e-5", "B", "-0.1,0,0", "C", "-inf", "D", "-.5"]
    assert cli.detector_parser().parse_args(["--epochs", "2", *values]).opts == values
    assert cli.detector_parser().parse_args([*values, "--epochs", "2"]).opts == values


def test_labels_are_read_once(data, tmp_path, readings):
    """The user's own, and the two files that a training makes of them."""
    args = prepared("--data", data, "--output", tmp_path / "run")
    task = DetectionTask(keys(args)).prepare(train=True)
    task.check_data(train=True)
    task.build_train_loader()
    for _ in range(4):
        for name in task.components.test_sets:
            task.components.make_evaluator(name, "")
            task.components.make_test_loader(name)
            task.components.make_loss_loader(name)
    assert len(readings) == 3
