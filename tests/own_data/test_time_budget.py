"""As many epochs as fit into a time."""

import json
import time
from types import SimpleNamespace

import pytest

from lambda_det import cli, get_config
from lambda_det.detection import DetectionTask
from lambda_det.errors import ConfigError
from lambda_det.own_data import time_budget
from lambda_det.own_data.time_budget import TimeBudget
from tests.detection.tiny import NARROW
from tests.own_data.test_prepare import begun, data, keys, prepared  # noqa: F401


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1h", 3600),
        ("90m", 5400),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2 hours", 7200),
        ("45min", 2700),
        ("1h 10m 5s", 4205),
    ],
)
def test_times(text, seconds):
    assert cli.detector_parser().parse_args(["--data", "my", "--time", text]).time == seconds


@pytest.mark.parametrize("text", ["", " ", "1", "h", "0m", "-1h", "1h30", "soon"])
def test_what_is_no_time_is_refused_before_anything_is_read(text, capsys):
    with pytest.raises(SystemExit):
        cli.detector_parser().parse_args(["--data", "nowhere", f"--time={text}"])
    assert "1h30m" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--epochs", "3"], ["SOLVER.MAX_ITER", "9"]])
def test_two_lengths_are_refused(data, words):  # noqa: F811
    with pytest.raises(ConfigError, match=words[0]):
        prepared("--data", data, "--time", "1h", *words, "--output", data.parent / "run")


# ------------------------------------------------------------------------------------- a run, faked
class _Trainer:
    """Takes steps of one length, and evaluations of another, by a clock of its own."""

    def __init__(self, seconds, allowed, monkeypatch, images=100, tested=10):
        self.now, self.each, self.of_evaluation = 0.0, seconds, 12.0
        monkeypatch.setattr(time_budget.time, "monotonic", lambda: self.now)
        folder = SimpleNamespace(save_config=lambda *_: None, config_origin=str)
        monkeypatch.setattr(time_budget, "RunFolder", lambda _: folder)
        monkeypatch.setattr("lambda_det.own_data.fit._test_images", lambda *_: tested)
        cfg = get_config("finetune/light_lambdaresnet26.yaml")
        cfg.RECIPE.TIME, cfg.SOLVER.MAX_ITER = allowed, 10_000
        self.task = SimpleNamespace(
            config=cfg, cost_of_evaluation=lambda: 0.7 * tested, change=self._change, dump=str
        )
        self.loader = SimpleNamespace(state_dict=lambda: {"records": images})
        self.storage = SimpleNamespace(
            histories=lambda: {"time"} if self.iter >= 3 else {},
            history=lambda name: SimpleNamespace(latest=lambda: self.each),
        )
        self.evaluation = SimpleNamespace(seconds=0.0, last_step=-1)
        self.hook = TimeBudget(self.task)
        self.hook.trainer = self
        self.lengths = []  # that were set, with the number of steps before

    def _change(self, config):
        self.task.config = config

    def reschedule(self):
        self.lengths.append((self.iter + 1, self.max_iter))

    @property
    def max_iter(self):
        return self.task.config.SOLVER.MAX_ITER

    def run(self):
        self.iter = 0
        while self.iter < self.max_iter:
            self.now += self.each
            period = self.task.config.TEST.EVAL_PERIOD
            if self.iter + 1 >= self.max_iter or (period and (self.iter + 1) % period == 0):
                self.now += self.of_evaluation
                self.evaluation.seconds = self.of_evaluation
                self.evaluation.last_step = self.iter + 1
            self.hook.after_step()
            self.iter += 1
        return self


@pytest.mark.parametrize("of_evaluation", [1.0, 12.0, 40.0])
@pytest.mark.parametrize("allowed", [200.0, 900.0, 3600.0])
def test_a_run_ends_in_time_and_uses_it(allowed, of_evaluation, monkeypatch):
    """Whatever an evaluation takes: at first it is guessed by its number of images."""
    trainer = _Trainer(2.0, allowed, monkeypatch)
    trainer.of_evaluation = of_evaluation
    trainer.run()
    assert 0.75 * allowed <= trainer.now <= allowed
    assert trainer.lengths[0][0] == (5 if allowed == 200 else 9)  # a twentieth of the time at most
    assert trainer.task.config.RECIPE.TIME == 0


def test_twice_the_time_is_twice_the_steps(monkeypatch):
    counts = [_Trainer(2.0, time, monkeypatch).run().max_iter for time in (600, 1200, 2400)]
    assert counts[1] == pytest.approx(2 * counts[0], rel=0.1)
    assert counts[2] == pytest.approx(2 * counts[1], rel=0.1)


@pytest.mark.parametrize(
    ("seconds", "allowed", "images", "steps"), [(2.0, 400.0, 1000, 9), (40.0, 60.0, 100, 4)]
)
def test_a_time_in_which_no_epoch_fits_ends_the_run_after_a_few_steps(
    seconds, allowed, images, steps, monkeypatch
):
    """With one that is enough. Slow steps are not all waited for."""
    trainer = _Trainer(seconds, allowed, monkeypatch, images)
    with pytest.raises(ConfigError, match=r"--time is too short.*--resume and --time \d+m") as said:
        trainer.run()
    assert trainer.iter + 1 == steps
    enough = float(str(said.value).split("--time ")[2].split("m")[0])
    assert _Trainer(seconds, 60 * enough, monkeypatch, images).run().max_iter >= images / 4


# ------------------------------------------------------------------------------------ with --resume
@pytest.mark.parametrize("config", [[], ["--config", "finetune/light_lambdaresnet26.yaml"]])
def test_a_run_that_goes_on_keeps_its_schedule(data, config):  # noqa: F811
    words = ["--data", data, *config, "--time", "10m", "--output", data.parent / "run"]
    args = prepared(*words)
    cfg = keys(args)
    assert 590 < cfg.RECIPE.TIME <= 600 and cfg.SOLVER.MAX_ITER == 300
    begun(args)
    assert 590 < keys(prepared(*words, "--resume")).RECIPE.TIME <= 600  # nothing was timed yet
    cfg.merge_from_other_cfg(time_budget._with_steps(cfg, 123, 17))
    cfg.RECIPE.TIME = 0.0
    begun(args)
    for again in (words, ["--output", data.parent / "run"]):
        now = keys(prepared(*again, "--resume"))
        assert (now.SOLVER.MAX_ITER, now.RECIPE.TIME) == (123, 0)
        assert now.SOLVER == cfg.SOLVER and now.TEST == cfg.TEST


@pytest.mark.slow
def test_one_command_trains_for_its_time_and_ends(data, capsys):  # noqa: F811
    """The log has its table of choices at once, and one line of the time; it can be resumed."""
    output = data.parent / "run"
    limits = {"SOLVER.IMS_PER_BATCH": 2, "INPUT.MIN_SIZE_TRAIN": (48,), "INPUT.MIN_SIZE_TEST": 48}
    more = [str(word) for pair in limits.items() for word in pair] + NARROW[0].split()
    words = ["train", "--data", str(data), "--output", str(output), "--time", "20s", *more]
    started = time.monotonic()
    assert cli.main(words) == 0
    assert time.monotonic() - started < 25
    log = (output / "log.txt").read_text("utf-8")
    assert log.index("What was chosen") < log.index("--time: a step takes")
    cfg = get_config(output / "config.yaml")
    assert cfg.RECIPE.TIME == 0 and cfg.RECIPE.EPOCHS > 0
    steps = [json.loads(line)["iteration"] for line in (output / "metrics.json").open()]
    assert cfg.SOLVER.MAX_ITER - 1 in steps
    assert DetectionTask(cfg).settings.max_iter == cfg.SOLVER.MAX_ITER
    assert cli.main([*words, "--resume"]) == 0
    assert get_config(output / "config.yaml").SOLVER.MAX_ITER == cfg.SOLVER.MAX_ITER
