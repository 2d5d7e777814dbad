"""python -m lambda_det.run, with scripts that know nothing of it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from detectron2.config import CfgNode, defaults, get_cfg

from lambda_det import run
from lambda_det.config import leaves
from tests import forked
from tests.shapes import make_shapes
from tests.training.tiny_detector import CONFIG

SCRIPTS = Path(__file__).parent / "foreign_scripts"
ROOT = SCRIPTS.parents[1]
OURS = {
    "MODEL.BACKBONE.NAME": "build_lambda_resnet_fpn_backbone",
    "MODEL.BACKBONE.FREEZE_AT": "0",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": "0.0",
    "MODEL.LAMBDA_RESNET.NAME": "resnet14_slim_lambda_c5",
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
    """Run a program in another folder, where Detectron2 is imported already; what it printed."""
    (tmp_path / "datasets").symlink_to(shapes)

    def start(*words):
        words = ["-m", "lambda_det.run", *words]
        done = forked.run(words, tmp_path / "printed", cwd=tmp_path, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stdout
        return done.stdout

    return start


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(CONFIG)
    return file


@pytest.mark.slow
def test_yaml_script_trains_and_evaluates(start, config, tmp_path):
    printed = start(
        *(SCRIPTS / "train_net.py", "--config-file", config, *OPTS),
        *("DATALOADER.NUM_WORKERS", "1", "OUTPUT_DIR", "out", "INPUT.LSJ.ENABLED", "True"),
    )
    rows = [json.loads(row) for row in (tmp_path / "out" / "metrics.json").open()]
    assert any(row.get("total_loss", 0) > 0 for row in rows)
    assert "bbox/AP" in rows[-1] and "segm/AP" in rows[-1]
    assert "LambdaLayer(" in (tmp_path / "out" / "log.txt").read_text()
    # Detectron2's trainer has no jitter, and the user is told so once
    warnings = [line for line in printed.splitlines() if "lambda_det.run: warning" in line]
    assert len(warnings) == 1 and "INPUT.LSJ.ENABLED" in warnings[0]


@pytest.mark.slow
def test_lazyconfig_script_trains(start, tmp_path):
    start(
        *(SCRIPTS / "lazyconfig_train_net.py", "--config-file", SCRIPTS / "lazy_retinanet.py"),
        "train.output_dir=out",
    )
    rows = [json.loads(row) for row in (tmp_path / "out" / "metrics.json").open()]
    assert [row["iteration"] for row in rows] == [0, 1]
    assert (tmp_path / "out" / "model_final.pth").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.release)])
def test_spawned_processes_find_the_script_and_the_keys(start, config, workers):
    printed = start(
        *(SCRIPTS / "plain_train_net.py", "--num-gpus", 2, "--config-file", config, *OPTS),
        *("DATALOADER.NUM_WORKERS", workers),
    )
    _, first, second = re.search(r"^(weights) (\S+) (\S+)$", printed, re.M).groups()
    assert first == second  # the two were connected
    assert "doubled 0 2 4" in printed


SCRIPT = """
import sys, json
class Picklable: pass
print(json.dumps({
    "name": __name__, "file": __file__, "package": __package__ or "", "argv": sys.argv[1:],
    "path": sys.path[0], "main": sys.modules["__main__"].Picklable is Picklable,
}))
"""


@pytest.fixture
def here(monkeypatch, tmp_path, capsys):
    """Run in this process, which is restored afterwards; return the printed line of JSON."""
    monkeypatch.setattr(defaults, "_C", defaults._C.clone())
    monkeypatch.setattr(CfgNode, "freeze", CfgNode.freeze)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("DETECTRON2_ENV_MODULE", "")
    monkeypatch.chdir(tmp_path)

    def here(*arguments):
        monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
        run.main()
        printed = capsys.readouterr()
        return json.loads(printed.out) if printed.out else None

    return here


@pytest.mark.parametrize("words", [["folder/train"], ["-m", "their_package.train"]])
def test_script_sees_what_python_would_show_it(here, tmp_path, words):
    """Also a module of a package."""
    for file in ("folder/train", "their_package/train.py", "their_package/__init__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(SCRIPT if "train" in Path(file).name else "")
    words = [*words, "--", "--help", "-m", "x y"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    plain = subprocess.run([sys.executable, *words], capture_output=True, env=environment)
    expected = json.loads(plain.stdout)
    assert expected["argv"] == ["--", "--help", "-m", "x y"]
    assert here(*words) == expected
    assert os.environ["DETECTRON2_ENV_MODULE"] == "lambda_det.run"  # an empty one is none


def test_our_keys_are_added_once_to_detectron2s(here, tmp_path):
    """Though the script adds them itself."""
    before = dict(leaves(get_cfg()))
    (tmp_path / "aware.py").write_text(
        "import json\nimport lambda_det\nfrom detectron2.config import get_cfg\n"
        "cfg = get_cfg()\nlambda_det.add_lambda_config(cfg)\n"
        "cfg.merge_from_list(['MODEL.LAMBDA_RESNET.SCOPE', 7])\ncfg.freeze()\n"
        "print(json.dumps([cfg.MODEL.LAMBDA_RESNET.SCOPE, get_cfg().MODEL.LAMBDA_RESNET.SCOPE]))\n"
    )
    assert here("aware.py") == [7, 0]
    after = dict(leaves(get_cfg()))
    assert before.items() <= after.items()
    assert {"MODEL.LAMBDA_RESNET.NAME", "INPUT.LSJ.SIZE"} <= after.keys() - before.keys()
    defaults._C.MODEL.LAMBDA_RESNET.SCOPE = 9
    run.setup_environment()  # a second time it changes nothing
    assert get_cfg().MODEL.LAMBDA_RESNET.SCOPE == 9


def test_errors_are_the_script_s_own(here, tmp_path, capsys):
    (tmp_path / "user.py").write_text("import lambda_det.errors as e\nraise e.UserError('theirs')")
    with pytest.raises(Exception, match="theirs"):
        here("user.py")
    with pytest.raises(SystemExit) as stop:
        here("missing.py")
    assert stop.value.code == 2 and "missing.py" in capsys.readouterr().err


@pytest.mark.checkout
def test_new_processes_find_a_package_that_is_not_installed(here, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT), *(p for p in sys.path if p != str(ROOT))])
    (tmp_path / "script.py").write_text("import sys, json\nprint(json.dumps(sys.path))")
    seen = here(tmp_path / "script.py")
    assert seen[0] == str(tmp_path) and seen[-1] == str(ROOT)
