"""What a command line leaves open: parts of the data, recipe, device, sizes of the input."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from lambda_det import cli
from lambda_det.detection.command_line import parser
from lambda_det.detection.task import load_any_config
from lambda_det.errors import ConfigError, DataError
from lambda_det.own_data import choice
from lambda_det.own_data.held_out import Split, hold_out
from lambda_det.own_data.labels import as_coco

VOC = """<annotation><filename>{}.png</filename><object><name>{}</name><bndbox><xmin>4</xmin>
<ymin>6</ymin><xmax>40</xmax><ymax>30</ymax></bndbox></object></annotation>"""


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Twenty pictures with a Pascal VOC file each, no GPU, no connection and nothing kept."""
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(choice, "_is_connected", lambda: False)
    (tmp_path / "data").mkdir()
    for number in range(20):
        Image.new("RGB", (64, 48), (number, 9, 9)).save(tmp_path / "data" / f"{number}.png")
        text = VOC.format(number, "cell" if number % 2 else "rod")
        (tmp_path / "data" / f"{number}.xml").write_text(text)
    return tmp_path / "data"


def arguments(*words):
    parsed = parser()
    parsed.set_defaults(config_file=None)
    return parsed.parse_args(list(map(str, words)))


def table(args, caplog):
    """The rows that are logged: the value of each, with the reason."""
    caplog.set_level(logging.INFO)
    choice.complete(args)
    return {row[0]: row[1:] for row in args.choices}


@pytest.mark.parametrize(
    ("memory", "connected", "recipe"),
    [
        (None, False, "light_lambdaresnet26"),
        (None, True, "light_mobilenet_v2"),
        (80, True, "mask_rcnn_resnetrs101_se"),
        (6, True, "mask_rcnn_resnetrs50_se"),
        (4.5, True, "mask_rcnn_lambda_resnet26t"),
        (2, True, "light_mobilenet_v2"),
        (80, False, "light_lambdaresnet26"),
    ],
)
def test_the_recipe_follows_from_machine_and_connection(
    data, monkeypatch, caplog, memory, connected, recipe
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: memory is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(total_memory=(memory or 0) * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(choice, "_is_connected", lambda: connected)
    args = arguments("--data", data)
    rows = table(args, caplog)
    assert Path(args.config_file).stem == recipe and rows["recipe"][0] == args.config_file
    assert args.opts[:2] == ["MODEL.DEVICE", "cpu" if memory is None else "cuda"]
    assert rows["labels"][0] == "Pascal VOC" and rows["images"][0] == "20"
    assert rows["start"][0].startswith("lambda://") is not connected
    assert all(text in caplog.text for text in (recipe, rows["recipe"][1], "What was chosen"))


def test_weights_that_are_kept_need_no_connection(data, caplog):
    kept = data.parent / "cache" / "lambda_det" / "timm_mobilenetv2_100.ra_in1k_0.1.0.pth"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert "mobilenetv2" in table(arguments("--data", data), caplog)["start"][0]


def test_a_connection_is_tried_once_and_briefly(monkeypatch):
    asked = []

    def refuse(request, timeout):
        asked.append(timeout)
        raise ConnectionRefusedError

    monkeypatch.setattr(choice.urllib.request, "urlopen", refuse)
    for variable, tries in (("1", 0), ("0", 1)):
        monkeypatch.setenv("HF_HUB_OFFLINE", variable)
        choice._is_connected.cache_clear()
        assert not choice._is_connected() and not choice._is_connected()
        assert len(asked) == tries and all(seconds <= 5 for seconds in asked)
    choice._is_connected.cache_clear()


def test_what_is_typed_counts(data, caplog, monkeypatch):
    """Keys stand behind the chosen ones; a file is not looked for; a share is another share."""
    words = ["INPUT.MIN_SIZE_TEST", "77", "MODEL.WEIGHTS", "mine.pth", "MODEL.DEVICE", "cpu"]
    args = arguments("--data", data, "--val-share", "0.3", *words)
    rows = table(args, caplog)
    cfg = load_any_config(args)
    assert rows["start"][0] == cfg.MODEL.WEIGHTS == "mine.pth" and cfg.DATASETS.VAL_SHARE == 0.3
    # Images of 48 pixels are enlarged to 96, not to the recipe's 384
    assert cfg.INPUT.MIN_SIZE_TEST == 77 and cfg.INPUT.MIN_SIZE_TRAIN == (80, 88, 96)
    monkeypatch.setattr(choice, "_is_connected", lambda: True)
    args = arguments("--data", data, "MODEL.WEIGHTS", "")
    assert (
        "random" in table(args, caplog)["start"][0] and "light_lambdaresnet26" in args.config_file
    )
    args = arguments("--config", "finetune/mask_rcnn_resnetrs50_se.yaml", "--data", data)
    rows = table(args, caplog)
    assert Path(args.config_file).stem == "mask_rcnn_resnetrs50_se"
    assert args.opts == [] and args.val_share == choice.VAL_SHARE and "recipe" not in rows


@pytest.mark.parametrize(("kept", "some"), [(range(1, 6), True), (range(1), False)])
def test_of_few_images_more_or_none_are_held_out(data, caplog, kept, some):
    for number in set(range(20)).difference(kept):
        (data / f"{number}.xml").unlink()
    args = arguments("--data", data)
    row = table(args, caplog)["evaluation"][0]
    assert (args.val_share is not None) is some and ("none" in row) is not some
    assert not some or hold_out(
        *as_coco((args.train_json, args.train_images)), "", Split(args.val_share)
    )


def test_a_share_that_nobody_typed_stays_over_a_resume(data, caplog):
    """Of few images a larger one was taken, and there are more now."""
    words = ["--config", "mask_rcnn_lambdaresnet50.yaml", "--data", data, "--resume"]
    words += ["--output", data.parent]
    assert table(args := arguments(*words), caplog) and args.val_share == choice.VAL_SHARE
    (data.parent / "config.yaml").write_text("DATASETS: {VAL_SHARE: 0.3}")
    assert table(args := arguments(*words), caplog) and args.val_share == 0.3
    (data.parent / "config.yaml").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        choice.complete(arguments(*words))


def test_keys_for_data_count_as_their_flags(data, caplog):
    """And a key of the folder of the run is where it goes on."""
    words = ["--config", "mask_rcnn_lambdaresnet50.yaml", "--data", data]
    for key, value in (("VAL_SHARE", 0.3), ("TEST_JSON", data)):
        args = arguments(*words, f"DATASETS.{key}", str(value))
        assert "evaluation" not in table(args, caplog)
        assert getattr(args, key.lower()) == (value if key != "TEST_JSON" else str(data))
        assert load_any_config(args) is not None
    (data.parent / "config.yaml").write_text("DATASETS: {VAL_SHARE: 0.3}")
    args = arguments(*words, "--resume", "OUTPUT_DIR", data.parent)
    assert table(args, caplog) and args.val_share == 0.3


def test_files_with_a_configuration_are_as_they_were(data, caplog):
    for images in (["--images", data], []):
        args = arguments("--config", "finetune/base.yaml", "--train", data, *images)
        assert table(args, caplog) == {} and args.val_share is None
        assert (args.train_json, args.train_images) == (str(data), str(data))


def test_parts_that_are_there(data, caplog):
    for part in ("train", "valid"):
        (data.parent / "parts" / part).mkdir(parents=True)
    for number, file in enumerate(sorted(data.iterdir())):
        file.rename(data.parent / "parts" / ("train" if number % 4 < 2 else "valid") / file.name)
    words = ["--config-file", "mask_rcnn_lambdaresnet50.yaml", "--data", data.parent / "parts"]
    args = arguments(*words)
    assert "valid" in table(args, caplog)["evaluation"][0] and args.val_share is None
    keys = load_any_config(args).DATASETS
    assert keys.TRAIN_IMAGES == keys.TEST_IMAGES == str(data.parent / "parts")
    assert len(json.loads(Path(keys.TEST_JSON).read_text())["images"]) == 10


REFUSED = {
    "two data sets": (["--data", "DATA", "--train-json", "a.json"], "--train-json"),
    "an address": (["--data", "s3://bucket/my"], "s3:.*is an address"),
    "an address of images": (["--train", "DATA", "--images", "gs://bucket/my"], "is an address"),
    "no data": (["--resume"], "--config FILE"),
    "an evaluation": (["--eval-only", "--data", "DATA"], "--config FILE"),
    "no such GPU": (["--data", "DATA", "MODEL.DEVICE", "cuda"], "sees 0"),
    "no such device": (["--data", "DATA", "MODEL.DEVICE", "cudda"], "no device"),
    "two machines": (["--num-machines", "2", "--data", "DATA"], "--config"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_chosen_is_refused(case, data):
    words, message = REFUSED[case]
    with pytest.raises((ConfigError, DataError), match=message):
        choice.complete(arguments(*(data if word == "DATA" else word for word in words)))


@pytest.mark.slow
def test_one_command_trains_and_goes_on_with_equal_bits(data, monkeypatch):
    """The same line, with a connection by now and without the keys, continues with its recipe."""
    output = data.parent / "run"
    words = ["train", "--data", str(data), "--output", str(output), "--resume"]
    keys = {"SEED": 1, "SOLVER.MAX_ITER": 2, "SOLVER.CHECKPOINT_PERIOD": 1, "SOLVER.EMA_DECAY": 0.0}
    keys |= {"SOLVER.IMS_PER_BATCH": 2, "INPUT.MIN_SIZE_TRAIN": (48,), "TEST.EVAL_PERIOD": 0}
    assert cli.main([*words, *(str(word) for pair in keys.items() for word in pair)]) == 0
    whole = torch.load(output / "model_final.pth", weights_only=False)["model"]
    (output / "model_final.pth").unlink()
    (output / "last_checkpoint").write_text("model_0000000.pth")
    monkeypatch.setattr(choice, "_is_connected", lambda: True)
    assert cli.main(words) == 0
    again = torch.load(output / "model_final.pth", weights_only=False)["model"]
    assert whole.keys() == again.keys() and all(map(torch.equal, whole.values(), again.values()))
    log = (output / "log.txt").read_text("utf-8")
    assert "light_lambdaresnet26.yaml" in log and "goes on" in log
    assert "Pascal VOC" in log
    steps = [json.loads(line)["iteration"] for line in (output / "metrics.json").open()]
    assert max(steps) == 1
