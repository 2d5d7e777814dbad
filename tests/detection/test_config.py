"""Reading the configuration: what is merged, and the word on each mistake."""

import argparse
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from detectron2.config import get_cfg

from lambda_det.config import CONFIGS, add_lambda_config
from lambda_det.detection import config, load_config, parser
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError
from lambda_det.training.config_file import ZOO, ConfigFile


def _load(*argv: str):
    return load_config(parser().parse_args([str(a) for a in argv]))


def test_file_pairs_and_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("SOLVER: {BASE_LR: 1, MAX_ITER: 7}\nSEED: 3\n")
    file = tmp_path / "child.yaml"
    file.write_text("_BASE_: base.yaml\nSOLVER:\n  MAX_ITER: 8\n  STEPS: [5]\n")
    pairs = ["SOLVER.GAMMA", "1", "OUTPUT_DIR", "2024"]
    cfg = _load("--config-file", file, "--train-json", "a.json", *pairs)
    assert (cfg.SOLVER.BASE_LR, cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS) == (1.0, 8, (5,))
    assert (cfg.SEED, cfg.SOLVER.GAMMA, cfg.OUTPUT_DIR) == (3, 1.0, "2024")
    # The run's config.yaml can be used from another folder
    files = [cfg.DATASETS.TRAIN_JSON, cfg.DATASETS.TEST_JSON]
    assert files == [str(tmp_path / "a.json"), ""]
    assert _load("--test-json", "s3://a/b.json").DATASETS.TEST_JSON == "s3://a/b.json"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a", "not a mapping"),
        ("", "plain values"),
        ("_BASE_: nowhere.yaml", "nowhere.yaml"),
        ("_BASE_: bad.yaml", "bad.yaml"),
        ("SOLVER: {MAX_ITERS: 3}", "did you mean SOLVER.MAX_ITER"),
        ("SOLVER: 3", "SOLVER, which is no configuration key"),
        ("SOLVER: {MAX_ITER: {a: 3}}", "SOLVER.MAX_ITER.a"),
        ("NO_SUCH: {}", "NO_SUCH"),
        ("MODEL: {MASK_ON: 1}", "type bool"),
        ("SOLVER: {MAX_ITER: [", "plain values"),
        ("SEED: 2001-99-99", "plain values"),  # as a date
        ("OUTPUT_DIR: !!python/object/apply:os.mkdir [x]", "plain values"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path, text, words):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        _load("--config-file", file)
    assert str(file) in str(caught.value) and words in str(caught.value)


def test_what_detectron2_installs_is_trusted(tmp_path):
    """Its RetinaNet computes its anchors in the YAML file, by a tag that is refused elsewhere."""
    retinanet = ZOO / "COCO-Detection" / "retinanet_R_50_FPN_1x.yaml"
    mine, theirs = tmp_path / "mine.yaml", tmp_path / "theirs.yaml"
    mine.write_text(f"_BASE_: {retinanet}\nSEED: 3\n")
    for file in (retinanet, mine):
        cfg = _load("--config-file", file)
        assert [len(sizes) for sizes in cfg.MODEL.ANCHOR_GENERATOR.SIZES] == [3] * 5
    theirs.write_text((retinanet.parents[1] / "Base-RetinaNet.yaml").read_text())
    mine.write_text(f"_BASE_: [{retinanet}, {theirs}]\n")
    for file in (theirs, mine):
        with pytest.raises(ConfigError, match="plain values"):
            _load("--config-file", file)


@pytest.mark.parametrize(
    ("opts", "words"),
    [
        (["SOLVER.MAX_ITER"], "no partner; write SOLVER.MAX_ITER 1000"),
        (["SOLVER.MAX_ITER=3"], "without ="),
        (["SOLVER.MAX_ITER", "x"], "must be of type int"),
        (["SEED.X", "3"], "no configuration key"),
    ],
)
def test_a_bad_pair_is_named(opts, words):
    with pytest.raises(ConfigError) as caught:
        _load(*opts)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("MODEL: {POINT_HEAD: {NUM_CLASSES: 3}}", "MODEL.POINT_HEAD.NUM_CLASSES", 3),
        ("MODEL: {ROI_HEADS: {NAME: PointRendROIHeads}}", "MODEL.ROI_MASK_HEAD.NUM_FC", 2),
    ],
)
def test_the_keys_of_a_project_come_with_what_needs_them(tmp_path, text, key, value):
    file = tmp_path / "project.yaml"
    file.write_text(text)
    for pair in ([], [key, value]):
        assert attrgetter(key)(_load("--config-file", file, *pair)) == value
    assert "POINT_HEAD" not in _load().MODEL


def test_a_project_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "detectron2.projects.deeplab", None)
    with pytest.raises(ConfigError, match=r"RES4_DILATION needs detectron2.projects.deeplab"):
        _load("MODEL.RESNETS.RES4_DILATION", "2")
    with pytest.raises(ConfigError, match="NAME DeepLabV3PlusHead needs"):
        _load("MODEL.SEM_SEG_HEAD.NAME", "DeepLabV3PlusHead")
    assert _load("SOLVER.MAX_ITER", "7").SOLVER.MAX_ITER == 7


def test_projects_stay_unimported_where_nothing_asks_for_them(monkeypatch):
    imported = []
    monkeypatch.setattr(config.importlib, "import_module", imported.append)
    config.add_projects(get_cfg(), [("SOLVER.MAX_ITER", 5), ("MODEL.DEVICE", "cpu")])
    assert not imported


def test_labels_that_were_moved_with_their_run_are_found(tmp_path, monkeypatch):
    """By the file and by a checkpoint; what is given, or still there, is taken as it is."""
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "data").mkdir(parents=True)
    (old / "data/test.json").write_text("{}")
    cfg = get_cfg()
    add_lambda_config(cfg)
    cfg.DATASETS.TEST_JSON = str(old / "data/test.json")
    (old / "config.yaml").write_text(cfg.dump())

    def file(folder, *opts) -> str:
        args = argparse.Namespace(config_file=str(folder / "config.yaml"), opts=list(opts))
        recorded = ConfigFile(folder / "model_final.pth", cfg.dump())
        saved = load_config(argparse.Namespace(config_file=recorded.path, opts=opts), recorded)
        [found] = {read.DATASETS.TEST_JSON for read in (load_config(args), saved)}
        return found

    assert file(old) == str(old / "data/test.json")
    old.rename(new)
    monkeypatch.chdir(tmp_path)
    assert file(new) == file(Path("new")) == str(new / "data/test.json")
    assert file(new, "DATASETS.TEST_JSON", "a/data/test.json") == "a/data/test.json"


_FILE = "--config-file", str(CONFIGS / "quick" / "shapes_lambdaresnet26.yaml")


@pytest.mark.parametrize(
    ("opts", "needed"),
    [
        ("SOLVER.POLY_LR_POWER 3", "SOLVER.LR_SCHEDULER_NAME"),
        ("SOLVER.POLY_LR_POWER 3 SOLVER.LR_SCHEDULER_NAME poly", None),
        ("SOLVER.BETAS [0.8,0.9]", "SOLVER.OPTIMIZER"),
        ("TEST.RAW False", "SOLVER.EMA_DECAY"),
        ("TEST.RAW False SOLVER.EMA_DECAY 0.9", None),
        ("INPUT.TILE.EMPTY 0.5", "INPUT.TILE.SIZE"),
        ("INPUT.CROP.SIZE [0.5,0.5]", "INPUT.CROP.ENABLED"),
        ("SOLVER.GAMMA 0.2 SOLVER.MOMENTUM 0.8 RECIPE.EPOCHS 3 SEED 5", None),
    ],
)
def test_a_given_key_that_nothing_reads_is_named_with_what_it_needs(opts, needed, caplog):
    DetectionTask.read(parser().parse_args([*_FILE, *opts.split()]))
    said = [record.getMessage() for record in caplog.records if "Nothing reads" in record.msg]
    assert len(said) == (needed is not None)
    assert all(opts.split()[0] in words and needed in words for words in said)
