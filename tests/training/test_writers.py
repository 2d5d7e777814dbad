"""Event writers by their names: what is refused before a run, and what a resumed run continues."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from detectron2.utils.events import EventStorage, EventWriter, TensorboardXWriter

from lambda_det.errors import ConfigError
from lambda_det.training.hooks import RunWriter
from lambda_det.training.trackers import send_report
from lambda_det.training.writers import check_writers, make_writers
from tests.training.toy import settings

_MADE = []  # the recorders, in the order of time


class Recorder(EventWriter):
    """Records its folder and everything that is written to it."""

    def __init__(self, folder):
        self.folder, self.steps = folder, []
        _MADE.append(self)

    def write(self):
        self.steps.append(self._last_write)


RECORDER = f"{__name__}.Recorder"


def _settings(folder, *writers):
    keys = {"event_writers": "EVENT_WRITERS"}
    return settings(output_dir=str(folder), event_writers=writers, keys=keys)


class _Wandb(ModuleType):
    """The part of wandb that is used here."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = SimpleNamespace(name="wandb")
        self.runs = []

    def init(self, **options):
        run = SimpleNamespace(options=options, logged=[], finish=lambda: None, settings={})
        run.log = lambda values, step=None: run.logged.append((step, values))
        run.config = SimpleNamespace(update=lambda new, allow_val_change: run.settings.update(new))
        self.runs.append(run)
        return run


@pytest.fixture
def wandb(monkeypatch):
    module = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_names_that_are_there(tmp_path):
    named = _settings(tmp_path, "tensorboard", RECORDER)
    check_writers(named)
    tensorboard, recorder = make_writers(named, 7, resumed=True)
    assert isinstance(tensorboard, TensorboardXWriter) and recorder.folder == str(tmp_path)
    assert tensorboard._last_write == recorder._last_write == 7
    assert make_writers(_settings(tmp_path), -1, resumed=False) == []


def test_wandb_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"EVENT_WRITERS.*pip install wandb"):
        check_writers(_settings("run", "wandb"))


def test_a_resumed_run_is_the_same_run_of_wandb(wandb, tmp_path):
    for start, end in ((0, 3), (3, 5), (0, 1)):
        with EventStorage(start) as storage:
            named = _settings(tmp_path, "wandb")
            (writer,) = make_writers(named, start - 1, resumed=start > 0)
            for step in range(start, end):
                storage.iter = step
                storage.put_scalar("loss", 10.0 + step)
                writer.write()
            writer.close()
    first, second, other = wandb.runs
    assert (
        other.options["id"] != first.options["id"] == second.options["id"]
        and second.options["resume"] == "allow"
    )
    assert [step for run in (first, second) for step, _ in run.logged] == [0, 1, 2, 3, 4]
    assert first.logged[0] == (0, {"loss": 10.0})


CONFIG = "SOLVER: {BASE_LR: 0.25, STEPS: [3, 4]}\nMODEL: {NAME: r50}"
PICTURE = np.full((4, 6, 3), 9, np.uint8)
TABLES = [("By class: AP", ["class", "AP"], [["a, b", "12.5"], ["c", "–"]])]


def tracked(folder, name, steps=((0, 3), (3, 5))):
    """A run and its continuation, and the report of both."""
    for start, end in steps:
        with EventStorage(start) as storage:
            named = _settings(folder, name)
            (writer,) = make_writers(named, start - 1, resumed=start > 0, config=CONFIG)
            for storage.iter in range(start, end):
                storage.put_scalars(loss=10.0 + storage.iter, odd=float("nan"))
                writer.write()
            writer.close()
    page = folder / "report.html"
    page.write_text("<p>page</p>")
    return send_report(folder, page, TABLES, [("images/worst ä.jpg", PICTURE)])


def test_wandb_gets_settings_commit_and_report(wandb, tmp_path):
    wandb.Html, wandb.Image = (lambda text, inject: text), (lambda p, caption: (caption, p.shape))
    wandb.Table = lambda columns, data: (columns, data)
    assert tracked(tmp_path, "wandb") == ["wandb"]
    first, second, last = wandb.runs
    assert last.options["id"] == second.options["id"] == first.options["id"]
    wanted = {"SOLVER.BASE_LR": 0.25, "SOLVER.STEPS": "[3, 4]", "MODEL.NAME": "r50"}
    commit = first.settings.pop("git_commit")
    assert first.settings == wanted and (commit == "" or len(commit) == 40)
    assert last.settings == {} and last.logged == [
        (
            None,
            {
                "report": "<p>page</p>",
                "worst images": [("images/worst ä.jpg", (4, 6, 3))],
                "By class: AP": (["class", "AP"], [["a, b", "12.5"], ["c", "–"]]),
            },
        )
    ]


def test_a_report_that_cannot_be_sent_is_a_warning(wandb, tmp_path, caplog):
    """As here, where the stand-in has no Html."""
    assert tracked(tmp_path, "wandb") == [] and "not sent to wandb" in caplog.text


def test_a_report_of_a_run_that_nobody_tracks_goes_nowhere(tmp_path):
    assert send_report(tmp_path, tmp_path / "report.html", [], []) == []


@pytest.mark.slow
def test_the_package_of_wandb_takes_all_of_it(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert tracked(tmp_path, "wandb") == ["wandb"]
    assert len({path.name.split("-")[3] for path in tmp_path.glob("wandb/offline-run-*")}) == 1
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/worst images*.png"))


@pytest.mark.slow
def test_mlflow_continues_one_run_and_gets_the_report(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert tracked(tmp_path, "mlflow") == ["mlflow"]
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("lambda_det")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["SOLVER.STEPS"] == "[3, 4]"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [m.step for m in history] == [0, 1, 2, 3, 4] and history[0].value == 10.0
    assert "odd" not in run.data.metrics  # no store takes all numbers that are not finite
    found = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert found == {"config.yaml", "report.html", "By class_ AP.csv", "worst images"}
    table = client.download_artifacts(run.info.run_id, "By class_ AP.csv", str(tmp_path))
    assert Path(table).read_text("utf-8").splitlines()[1] == '"a, b",12.5'


def test_mlflow_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"EVENT_WRITERS.*pip install mlflow"):
        check_writers(_settings("run", "mlflow"))


def test_tensorboard_gets_hyperparameters(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (writer,) = make_writers(_settings(tmp_path, "tensorboard"), -1, resumed=False, config=CONFIG)
    writer.close()
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    for text in (b"SOLVER.BASE_LR", b"MODEL.NAME", b"r50", b"[3, 4]"):
        assert text in content


def test_a_run_writes_to_those_that_are_named(tmp_path):
    hook, pictures = RunWriter(), []
    named = replace(_settings(tmp_path, RECORDER), log_period=2)
    task = SimpleNamespace(dump=lambda: "SOLVER: {BASE_LR: 0.25}")
    trainer = SimpleNamespace(start_iter=0, iter=0, max_iter=4, settings=named, task=task)
    hook.trainer = trainer
    with EventStorage(0) as storage:
        storage.put_scalars(total_loss=1.0, lr=0.1, time=0.1)
        hook.before_train()
        for hook.trainer.iter in range(4):
            storage.iter = hook.trainer.iter
            storage.put_image("drawn", np.zeros((3, 1, 1)))
            hook.after_step()
            pictures.append(len(storage._vis_data))
        hook.after_train()
    assert pictures == [1, 0, 1, 0]
    assert len(_MADE[-1].steps) == 3  # twice in the run, once at its end
    assert not list(tmp_path.glob("events*")) and (tmp_path / "metrics.json").exists()
