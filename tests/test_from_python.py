"""Training and runs from Python: what goes to the commands' functions, and what comes back."""

import json
import logging

import pytest

import lambda_det
from lambda_det import get_config
from lambda_det.detection.config import Prepared
from lambda_det.errors import ConfigError, DataError, UserError, WeightsError, naming_arguments
from lambda_det.training.log import BufferedLog
from tests.shapes import make_shapes
from tests.training.tiny_detector import save_run

LAZY, KEY = "mask_rcnn_lambdaresnet50.py", "train.init_checkpoint"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What would be trained, in a folder where a run has begun."""
    runs = []
    nothing = Prepared(get_config("mask_rcnn_lambdaresnet50.yaml"), None)
    monkeypatch.setattr("lambda_det.own_data.flags.prepared", lambda args, config: nothing)
    monkeypatch.setattr(
        "lambda_det.distributed.launch.launch", lambda work, args, **device: runs.append(args)
    )
    (tmp_path / "config.yaml").touch()
    return runs


@pytest.mark.parametrize(
    ("recipe", "flags", "keys", "opts"),
    [
        (
            None,
            {"epochs": 2, "batch": 4, "test": None},
            {"INPUT.MIN_SIZE_TRAIN": (48,), "SEED": 1},
            "INPUT.MIN_SIZE_TRAIN|(48,)|SEED|1",
        ),
        (LAZY, {}, {KEY: "a b", "optimizer.betas": [1, 2]}, f"{KEY}='a b'|optimizer.betas=[1, 2]"),
    ],
)
def test_flags_and_keys_are_those_of_the_command(recipe, flags, keys, opts, started, tmp_path):
    data = None if recipe else tmp_path
    run = lambda_det.train(data, recipe, output=tmp_path, resume=True, **flags, **keys)
    (args,) = started
    if not recipe:
        assert (args.data, args.epochs, args.batch) == (str(tmp_path), 2, 4)
        assert args.test_json is None
    assert args.resume and args.progress and not args.eval_only
    words = "|".join(args.opts)
    assert words.endswith(f"|{opts}") and str(tmp_path) in words.removesuffix(opts)
    assert run.folder == tmp_path


def test_a_flag_of_0_and_a_path_count(started, tmp_path):
    """0 is no False: it holds out nothing."""
    place = tmp_path / "my data"
    lambda_det.train(tmp_path, output=tmp_path, val_share=0)
    lambda_det.train(None, LAZY, output=tmp_path, num_gpus=1, **{KEY: place})
    assert started[0].val_share == 0 and started[1].opts[-1] == f"{KEY}='{place}'"


@pytest.mark.parametrize("keys", [{"bach": 4}, {"batch": "many"}, {"epoch": 3}])
def test_a_flag_that_is_none_is_refused(keys, started, tmp_path):
    with pytest.raises(ConfigError, match=next(iter(keys))):
        lambda_det.train("my", output=tmp_path, **keys)
    assert not started


@pytest.mark.slow
def test_a_tilde_is_the_home_folder(started, monkeypatch, tmp_path):
    """In every path, where a shell would have put it in."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("data", "images"):
        (tmp_path / name).mkdir()
    run = lambda_det.train("~/data", images="~/images", output="~", **{"MODEL.WEIGHTS": "~/w.pth"})
    (args,) = started
    assert run.folder == tmp_path == lambda_det.Run("~").folder
    found = [args.data, args.train_images, args.opts[-1], args.opts[1]]
    assert found == [str(tmp_path / name) for name in ("data", "images", "w.pth", "")]
    monkeypatch.setattr("lambda_det.own_data.evaluate.evaluate", lambda *_, **options: options)
    given = {name: f"~/{name}" for name in ("data", "labels", "images", "output")}
    expected = {name: str(tmp_path / name) for name in given}
    assert run.evaluate(**given) == {"part": None, **expected}
    for use in (lambda_det.check, lambda_det.Predictor, run.report, run.export):
        with pytest.raises(UserError, match=str(tmp_path)):
            use("~/nowhere")
    assert not (tmp_path / "~").exists()


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        (
            "add --resume to continue it, or give another --output.",
            "add resume=True to continue it, or give another output.",
        ),
        ("--time is too short; give --time 148m.", "time is too short; give time='148m'."),
        ("name one with --config FILE or --data DIR.", "name one with recipe=FILE or data=DIR."),
        ("--val-share 0 omits it; --tile auto cuts", "val_share=0 omits it; tile='auto' cuts"),
        ("--no-images does not open them", "open_images=False does not open them"),
        ("a--b/photo--c.jpg does not exist", "a--b/photo--c.jpg does not exist"),
        ("`pip install --no-deps lvis`, or --raw", "`pip install --no-deps lvis`, or raw=True"),
    ],
)
def test_advice_from_python_names_arguments(sentence, said):
    def fail():
        raise DataError(sentence)

    with pytest.raises(DataError) as raised:
        naming_arguments()(fail)()
    assert str(raised.value) == said


def test_the_folder_of_a_run(tmp_path):
    with pytest.raises(DataError, match="folder of a run"):
        lambda_det.Run(tmp_path)
    _, weights = save_run(tmp_path)
    run = lambda_det.Run(tmp_path)
    assert run.metrics == [] and run.predictor().origin.file == run.best == str(weights)
    assert "model_final.pth" in repr(run)
    assert run.report(pictures=1).is_file()
    weights.unlink()
    (tmp_path / "last_checkpoint").unlink()
    with pytest.raises(WeightsError, match="no checkpoint"):
        print(run.best)
    assert "without" in repr(run)


RAW, EMA = {"bbox/AP": 30.0, "bbox/AP50": 50.0}, {"bbox_EMA/AP": 40.0, "bbox_EMA/AP50": 60.0}


@pytest.mark.parametrize(("logged", "ap"), [(RAW, 30.0), (EMA, 40.0), ({**RAW, **EMA}, 40.0)])
def test_results_have_the_same_names_for_every_recipe(logged, ap, tmp_path):
    """Averaged weights count where a recipe has them."""
    (tmp_path / "config.yaml").touch()
    others = {"validation/total_loss": 1.0, "bbox/AP-bolt": 20.0}
    records = [{"iteration": 9, "total_loss": 2.0}, {"iteration": 19, **others, **logged}]
    (tmp_path / "metrics.json").write_text("".join(json.dumps(r) + "\n" for r in records))
    expected = {"step": 20, "box AP": ap, "box AP50": ap + 20}
    assert lambda_det.Run(tmp_path).evaluations == [expected]


def test_a_data_set_is_checked(tmp_path, capsys):
    make_shapes(tmp_path, num_train=2, num_val=1, size=32)
    assert lambda_det.check(tmp_path / "shapes") is True
    assert "No problem was found." in capsys.readouterr().out
    next((tmp_path / "shapes" / "train").iterdir()).unlink()
    assert lambda_det.check(tmp_path / "shapes") is False
    assert "does not exist" in capsys.readouterr().out
    labels = tmp_path / "shapes" / "annotations" / "instances_train.json"
    images = tmp_path / "shapes" / "train"
    assert lambda_det.check(labels, images, open_images=False) is True
    with pytest.raises(DataError, match="nowhere"):
        lambda_det.check(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="LABELS"):
        lambda_det.check("")


def test_each_run_of_a_process_has_its_log(tmp_path, capsys):
    """The screen has what a run shows, and the file all; a quiet one shows nothing of the rest."""
    names = ("lambda_det.training.log", "lambda_det.weights.loading", "detectron2.data.build")
    shown, hidden, of_others = map(logging.getLogger, names)
    picture = logging.getLogger("lambda_det.detection.first_batch")
    for name in "ab":
        (tmp_path / name).mkdir()
        with BufferedLog(quiet=name == "b") as log:
            shown.info(f"before {name}")
            log.open(str(tmp_path / name))
            hidden.info(f"in {name}")
            of_others.info(f"of others in {name}")
            picture.info(f"drawn for {name}")
    texts = [(tmp_path / name / "log.txt").read_text("utf-8") for name in "ab"]
    printed = capsys.readouterr().out
    counts = {
        words: [text.count(words) for text in (*texts, printed)]
        for words in ("before a", "in a", "before b", "in b", "of others", "drawn")
    }
    assert counts == {
        "before a": [1, 0, 1],
        "in a": [2, 0, 1],
        "before b": [0, 1, 1],
        "in b": [0, 2, 0],
        "of others": [1, 1, 0],
        "drawn": [1, 1, 2],
    }
