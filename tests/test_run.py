"""python -m lambda_det.run, with scripts that know nothing of it."""

import json
import os
import re
import subprocess
import sys
import traceback
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from detectron2.config import CfgNode, defaults, get_cfg

from lambda_det import run
from lambda_det.config import leaves
from lambda_det.detection.data import make_shapes
from tests.training.tiny_detector import CONFIG

SCRIPTS = Path(__file__).parent / "foreign_scripts"
ROOT = SCRIPTS.parents[1]
OURS = {
    "MODEL.BACKBONE.NAME": "build_lambda_resnet_fpn_backbone",
    "MODEL.BACKBONE.FREEZE_AT": "0",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": "0.0",
    "MODEL.LAMBDA_RESNET.NAME": "lambda_resnet26",
    "MODEL.LAMBDA_RESNET.SCOPE": "7",
    "DATASETS.TRAIN": "('shapes_train',)",
    "DATASETS.TEST": "('shapes_val',)",
    "INPUT.MIN_SIZE_TRAIN": "(64,)",
    "SOLVER.IMS_PER_BATCH": "2",
    "SOLVER.MAX_ITER": "2",
    "SOLVER.STEPS": "()",
}
OPTS = [word for pair in OURS.items() for word in pair]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    make_shapes(root, num_train=4, num_val=2, size=64)
    return root


@pytest.fixture
def start(tmp_path, shapes):
    """Start ``lambda_det.run`` from another folder, and return what it printed."""

    def start(*arguments, status=0, before=(), **variables):
        answer = subprocess.run(
            [sys.executable, *before, "-m", "lambda_det.run", *map(str, arguments)],
            cwd=tmp_path,
            env={
                **os.environ,
                "DETECTRON2_DATASETS": str(shapes),
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert answer.returncode == status, answer.stderr
        return answer

    return start


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(CONFIG)
    return file


def test_yaml_script_trains_and_evaluates(start, config, tmp_path):
    answer = start(
        *(SCRIPTS / "train_net.py", "--config-file", config, *OPTS),
        *("DATALOADER.NUM_WORKERS", "1", "OUTPUT_DIR", "out", "INPUT.LSJ.ENABLED", "True"),
    )
    rows = [json.loads(row) for row in (tmp_path / "out" / "metrics.json").open()]
    assert any(row.get("total_loss", 0) > 0 for row in rows)
    assert "bbox/AP" in rows[-1] and "segm/AP" in rows[-1]
    assert "LambdaLayer(" in (tmp_path / "out" / "log.txt").read_text()
    # The script's trainer has no jitter, and the user hears of it once
    assert answer.stderr.count("sets INPUT.LSJ.ENABLED, which only lambda_det's") == 1


def test_lazyconfig_script_trains(start, tmp_path):
    start(
        *(SCRIPTS / "lazyconfig_train_net.py", "--config-file", SCRIPTS / "lazy_rpn.py"),
        "train.output_dir=out",
    )
    rows = [json.loads(row) for row in (tmp_path / "out" / "metrics.json").open()]
    assert [row["iteration"] for row in rows] == [0, 1]
    assert (tmp_path / "out" / "model_final.pth").is_file()


def test_spawned_processes_find_the_script_and_the_keys(start, config):
    answer = start(
        *(SCRIPTS / "plain_train_net.py", "--num-gpus", 2, "--config-file", config, *OPTS),
        *("DATALOADER.NUM_WORKERS", "0"),
    )
    _, first, second = re.search(r"^(weights) (\S+) (\S+)$", answer.stdout, re.M).groups()
    assert first == second  # the two were connected
    assert "doubled 0 2 4" in answer.stdout


SCRIPT = """
import sys, json
class Picklable: pass
def annotated(x: 1 + 1): pass
print(json.dumps({
    "name": __name__, "file": __file__, "package": __package__, "argv": sys.argv,
    "path": sys.path[0],
    "main": sys.modules["__main__"].Picklable is Picklable,
    "annotation": annotated.__annotations__["x"],
    "names": sorted(globals().keys() - {"__annotations__"}),
}))
"""


@pytest.fixture
def here(monkeypatch, tmp_path, capsys):
    """Run in this process, which afterwards is as it was; return the printed line of JSON."""
    monkeypatch.setattr(defaults, "_C", defaults._C.clone())
    monkeypatch.setattr(CfgNode, "freeze", CfgNode.freeze)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv(run._VARIABLE, "")
    monkeypatch.chdir(tmp_path)

    def here(*arguments):
        module = type(sys)("__main__")
        module.__spec__ = ModuleSpec("lambda_det.run", None)
        module.run = run  # as the main module has names, before it gives way to the script
        monkeypatch.setitem(sys.modules, "__main__", module)
        monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
        run.main(module.__dict__)
        printed = capsys.readouterr()
        here.warnings = printed.err
        return json.loads(printed.out) if printed.out else None

    return here


def test_script_sees_what_python_would_show_it(here, tmp_path):
    script = tmp_path / "folder" / "train"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    seen = here("folder/train", "--help", "-m", "--", "x y")
    plain = subprocess.run(
        [sys.executable, "folder/train", "--help", "-m", "--", "x y"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert seen == json.loads(plain.stdout) | {"package": ""}
    assert seen["argv"] == ["folder/train", "--help", "-m", "--", "x y"]
    assert seen["path"] == str(script.parent)


def test_module_sees_its_package(here, tmp_path):
    package = tmp_path / "their_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("number = 7")
    (package / "train.py").write_text("from .part import number\nassert number == 7\n" + SCRIPT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a __package__ that doesn't fit __spec__
        seen = here("-m", "their_package.train", "1")
    assert seen["argv"] == [str(package / "train.py"), "1"]
    assert seen["package"] == "their_package" and seen["main"]
    (package / "__main__.py").write_text(SCRIPT)
    assert here("-m", "their_package")["file"] == str(package / "__main__.py")


def test_aware_script_keeps_what_it_sets(here, tmp_path):
    (tmp_path / "aware.py").write_text(
        "import json\nimport lambda_det\nfrom detectron2.config import get_cfg\n"
        "cfg = get_cfg()\nlambda_det.add_lambda_config(cfg)\n"
        "cfg.merge_from_list(['MODEL.LAMBDA_RESNET.SCOPE', 7])\ncfg.freeze()\n"
        "print(json.dumps([cfg.MODEL.LAMBDA_RESNET.SCOPE, get_cfg().MODEL.LAMBDA_RESNET.SCOPE]))\n"
    )
    assert here("aware.py") == [7, 0]
    assert here("aware.py") == [7, 0]


def test_defaults_of_detectron2_stay(here, tmp_path):
    before = dict(leaves(get_cfg()))
    (tmp_path / "nothing.py").write_text("")
    here("nothing.py")
    after = dict(leaves(get_cfg()))
    assert before.items() <= after.items()
    assert {"MODEL.LAMBDA_RESNET.NAME", "INPUT.LSJ.SIZE"} <= after.keys() - before.keys()
    defaults._C.MODEL.LAMBDA_RESNET.SCOPE = 9
    run.register()  # once is enough
    assert get_cfg().MODEL.LAMBDA_RESNET.SCOPE == 9


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py"], "There is no script {}/missing.py."),
        (["."], "{} is a folder; name the Python file"),
        (["config.yaml"], "{}/config.yaml is no Python file; name the training script first."),
        (["weights.pth"], "{}/weights.pth is no Python file"),
        (["-m", "no_such.module"], "The module no_such.module cannot be run: No module named"),
        (["-m", "no_such_module"], "There is no module no_such_module on the path"),
        (["-m", "math"], "The module math holds no Python code"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(here, tmp_path, capsys, arguments, said):
    (tmp_path / "config.yaml").write_text("MODEL:\n  DEVICE: cpu\n")
    (tmp_path / "weights.pth").write_bytes(b"PK\3\4\0\0")
    with pytest.raises(SystemExit) as stop:
        here(*arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: " + said.format(tmp_path)) and error.count("\n") == 1


def test_mistakes_of_the_script_are_its_own(here, tmp_path):
    (tmp_path / "broken.py").write_text("x = (\n")
    with pytest.raises(SyntaxError):
        here("broken.py")
    (tmp_path / "user.py").write_text("import lambda_det.errors as e\nraise e.UserError('theirs')")
    with pytest.raises(run.UserError, match="theirs"):
        here("user.py")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)")
    with pytest.raises(SystemExit) as stop:
        here("leaves.py")
    assert stop.value.code == 3


def test_traceback_shows_the_lines_of_the_script(here, tmp_path):
    (tmp_path / "fails.py").write_text("def deep():\n    1 / 0  # here\n\n\ndeep()\n")
    with pytest.raises(ZeroDivisionError) as error:
        here("fails.py")
    lines = "".join(traceback.format_exception(error.value))
    assert f'File "{tmp_path}/fails.py", line 2, in deep\n    1 / 0  # here' in lines


def test_torchrun_warning(here, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "connects.py").write_text("import torch.distributed as dist\ndist.is_available()")
    here("connects.py")
    assert "torchrun" not in here.warnings
    (tmp_path / "launches.py").write_text("from detectron2.engine import launch\nlaunch(list, 1)")
    here("launches.py")
    assert "2 trainings would write into one folder" in here.warnings


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        run._parse(["-h", "x.py"])
    assert stop.value.code == 0
    assert "python -m lambda_det.run path/to/train_net.py" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        run._parse([])
    assert stop.value.code == 2


def test_new_processes_find_a_package_that_is_not_installed(here, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT), *(p for p in sys.path if p != str(ROOT))])
    (tmp_path / "script.py").write_text("import sys, json\nprint(json.dumps(sys.path))")
    assert here(tmp_path / "script.py")[0] == str(tmp_path)
    assert sys.path[-1] == str(ROOT)


def test_torchrun_starts_it(start, tmp_path):
    (tmp_path / "native.py").write_text(
        "import torch.distributed as dist\nfrom detectron2.config import get_cfg\n"
        "dist.init_process_group('gloo')\n"
        "print(dist.get_world_size(), 'LAMBDA_RESNET' in get_cfg().MODEL)\n"
        "dist.destroy_process_group()\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    assert "1 True" in start("native.py", before=torchrun).stdout
