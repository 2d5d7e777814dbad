"""Reading the configuration: what is merged, and the word on each mistake."""

from __future__ import annotations

import pytest

from lambda_det.engine import load_config, parser
from lambda_det.errors import ConfigError


def _load(*argv: str):
    return load_config(parser().parse_args([str(a) for a in argv]))


def test_file_pairs_and_flags(tmp_path):
    (tmp_path / "base.yaml").write_text("SOLVER: {BASE_LR: 1, MAX_ITER: 7}\nSEED: 3\n")
    file = tmp_path / "child.yaml"
    file.write_text("_BASE_: base.yaml\nSOLVER:\n  MAX_ITER: 8\n  STEPS: [5]\n")
    pairs = ["SOLVER.GAMMA", "1", "OUTPUT_DIR", "2024"]
    cfg = _load("--config-file", file, "--train-json", "a.json", *pairs)
    assert (cfg.SOLVER.BASE_LR, cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS) == (1.0, 8, (5,))
    assert (cfg.SEED, cfg.SOLVER.GAMMA, cfg.OUTPUT_DIR) == (3, 1.0, "2024")
    assert cfg.DATASETS.TRAIN_JSON == "a.json" and cfg.DATASETS.TEST_JSON == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b\n", "not a mapping"),
        ("", "not a mapping"),
        ("just words", "not a mapping"),
        ("_BASE_: nowhere.yaml\n", "nowhere.yaml"),
        ("SOLVER: {MAX_ITERS: 3}\n", "did you mean SOLVER.MAX_ITER?"),
        ("SOLVER: 3\n", "SOLVER is a section"),
        ("SOLVER: {MAX_ITER: {a: 3}}\n", "sets SOLVER.MAX_ITER.a, which is no configuration key"),
        ("NO_SUCH: {}\n", "sets NO_SUCH, which is no configuration key"),
        ("SOLVER: {MAX_ITER: many}\n", "must be of type int"),
        ("MODEL: {MASK_ON: 1}\n", "must be of type bool"),
        ("SOLVER: {MAX_ITER: [\n", "not valid YAML"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path, text, words):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        _load("--config-file", file)
    assert str(file) in str(caught.value) and words in str(caught.value)


def test_a_file_cannot_run_a_program(tmp_path):
    mark = tmp_path / "ran"
    file = tmp_path / "evil.yaml"
    file.write_text(f"OUTPUT_DIR: !!python/object/apply:os.mkdir ['{mark}']\n")
    with pytest.raises(ConfigError, match="plain values"):
        _load("--config-file", file)
    assert not mark.exists()


def test_a_missing_file_suggests_a_near_one(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mask_rcnn_xyz50.yaml").write_text("SEED: 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"configs/mask_rcnn_xyz50\.yaml"):
        _load("--config-file", "configs/mask_rcnn_xyz5.yaml")


@pytest.mark.parametrize(
    ("opts", "words"),
    [
        (["SOLVER.MAX_ITER"], "no partner"),
        (["SOLVER.MAX_ITER=3"], "without ="),
        (["SOLVER.MAX_ITER", "3", "--resume"], "--resume stands among"),
        (["SOLVER.MAXITER", "3"], "did you mean SOLVER.MAX_ITER"),
        (["SOLVER.MAX_ITER", "x"], "must be of type int"),
        (["MODEL", "x"], "MODEL is a section"),
        (["SEED.X", "3"], "no configuration key"),
    ],
)
def test_a_bad_pair_is_named(opts, words):
    with pytest.raises(ConfigError) as caught:
        _load(*opts)
    assert words in str(caught.value)
