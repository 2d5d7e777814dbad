"""As many epochs as fit into a time."""

from types import SimpleNamespace

import pytest

from lambda_det import cli, get_config
from lambda_det.detection import DetectionTask
from lambda_det.errors import ConfigError
from lambda_det.own_data import time_budget
from lambda_det.own_data.time_budget import TimeBudget
from tests.detection.tiny import NARROW
from tests.own_data.test_prepare import begun, data, prepared  # noqa: F401
from tests.reliability.runs import metrics


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


# ------------------------------------------------------------------------------------- a run, faked
class _Trainer:
    """Takes steps of one length, and evaluations of another, by a clock of its own."""

    def __init__(self, monkeypatch, allowed, seconds=2.0, of_evaluation=12.0, images=100):
        self.now, self.each, self.of_evaluation = 0.0, seconds, of_evaluation
        monkeypatch.setattr(time_budget.time, "monotonic", lambda: self.now)
        folder = SimpleNamespace(save_config=lambda *_: None, config_origin=str)
        monkeypatch.setattr(time_budget, "RunFolder", lambda _: folder)
        monkeypatch.setattr("lambda_det.own_data.fit.number_of_images", lambda *_: 10)
        cfg = get_config("finetune/light_lambdaresnet26.yaml")
        cfg.RECIPE.TIME, cfg.SOLVER.MAX_ITER = allowed, 10_000
        self.task = SimpleNamespace(
            config=cfg, cost_of_evaluation=lambda: 7.0, change=self._change, dump=str
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
        self.saved = []
        self.save_checkpoint = lambda: self.saved.append((self.iter + 1, self.max_iter))

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
    trainer = _Trainer(monkeypatch, allowed, of_evaluation=of_evaluation).run()
    assert 0.75 * allowed <= trainer.now <= allowed
    assert trainer.lengths[0][0] == (5 if allowed == 200 else 9)  # a twentieth of the time at most
    assert trainer.task.config.RECIPE.TIME == 0


def test_a_time_that_is_over_at_an_evaluation_ends_the_run_there(monkeypatch):
    """Whose checkpoint becomes that of the end."""
    trainer = _Trainer(monkeypatch, 900.0, of_evaluation=900.0).run()
    assert trainer.lengths[-1][0] == trainer.evaluation.last_step == trainer.iter
    assert trainer.saved == [(trainer.iter, trainer.iter)]


@pytest.mark.parametrize(
    ("seconds", "allowed", "images", "steps"), [(2.0, 400.0, 1000, 9), (40.0, 60.0, 100, 4)]
)
def test_a_time_in_which_no_epoch_fits_ends_the_run_after_a_few_steps(
    seconds, allowed, images, steps, monkeypatch
):
    """With one that is enough. Slow steps are not all waited for."""
    trainer = _Trainer(monkeypatch, allowed, seconds, images=images)
    with pytest.raises(ConfigError, match=r"--time is too short.*--resume and --time \d+m") as said:
        trainer.run()
    assert trainer.iter + 1 == steps
    enough = float(str(said.value).split("--time ")[2].split("m")[0])
    longer = _Trainer(monkeypatch, 60 * enough, seconds, images=images).run()
    assert longer.max_iter >= images / 4


# ------------------------------------------------------------------------------------ with --resume
@pytest.mark.parametrize("config", [[], ["--config", "finetune/light_lambdaresnet26.yaml"]])
def test_a_run_that_goes_on_keeps_its_schedule(data, config):  # noqa: F811
    words = ["--data", data, *config, "--time", "10m", "--output", data.parent / "run"]
    args = prepared(*words)
    cfg = args.config
    assert 590 < cfg.RECIPE.TIME <= 600 and cfg.SOLVER.MAX_ITER == 300
    begun(args)
    assert 590 < prepared(*words, "--resume").config.RECIPE.TIME <= 600  # nothing was timed yet
    cfg.merge_from_other_cfg(time_budget._with_steps(cfg, 123, 18))
    cfg.RECIPE.TIME = 0.0
    begun(args)
    for again in (words, ["--output", data.parent / "run"]):
        now = prepared(*again, "--resume").config
        assert (now.SOLVER.MAX_ITER, now.RECIPE.TIME) == (123, 0)
        assert now.SOLVER == cfg.SOLVER and now.TEST == cfg.TEST


@pytest.mark.slow
def test_one_command_trains_for_its_time_and_ends(data):  # noqa: F811
    """The log has its table of choices at once, and one line of the time; it can be resumed."""
    output = data.parent / "run"
    limits = {"SOLVER.IMS_PER_BATCH": 2, "INPUT.MIN_SIZE_TRAIN": (48,), "INPUT.MIN_SIZE_TEST": 48}
    more = [str(word) for pair in limits.items() for word in pair] + NARROW[0].split()
    words = ["train", "--data", str(data), "--output", str(output), "--time", "12s", *more]
    assert cli.main(words) == 0
    log = (output / "log.txt").read_text("utf-8")
    assert log.index("What was chosen") < log.index("--time: a step takes")
    cfg = get_config(output / "config.yaml")
    assert cfg.RECIPE.TIME == 0 and cfg.RECIPE.EPOCHS > 0
    assert cfg.SOLVER.MAX_ITER - 1 in metrics(output)
    assert DetectionTask(cfg).settings.max_iter == cfg.SOLVER.MAX_ITER
    assert cli.main([*words, "--resume"]) == 0
    assert get_config(output / "config.yaml").SOLVER.MAX_ITER == cfg.SOLVER.MAX_ITER
