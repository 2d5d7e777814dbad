"""``lambda-det doctor``: what it finds, what it says, and that it runs where little else does."""

import os
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest
import torch

from lambda_det import doctor
from lambda_det.doctor import CHECKS, Check, examine
from lambda_det.errors import UserError

ROOT = Path(__file__).parents[1]
BY_NAME = {check.name: check for check in CHECKS}
# Of a machine or a Detectron2, which may have them where the tests run
CIRCUMSTANCES = {"detectron2._C", "GPUs", ".pth files"}


def look(name):
    """What a row says, and its problem or None, when nothing before it failed."""
    lines, problems = examine([BY_NAME[name]._replace(needs=())])
    return lines[name], problems.get(name)


@pytest.fixture
def broken(monkeypatch):
    """Make the import of a module end in an error."""

    def broken(module, error):
        def import_broken(name, package=None):
            if name == module:
                raise error
            return import_module(name, package)

        monkeypatch.setattr("importlib.import_module", import_broken)

    return broken


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in CIRCUMSTANCES])
def test_silent_where_all_is_well(name):
    text, problem = look(name)
    assert text and problem is None


PACKAGES = {"OpenCV": "cv2", "detectron2": "detectron2.modeling"}
PACKAGES |= {name: name for name in ("torch", "numpy", "torchvision", "pycocotools")}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_missing_or_broken(name, monkeypatch, broken):
    broken(PACKAGES[name], OSError("libGL.so.1: no such file\nmore"))
    text, problem = look(name)
    assert text == "no: OSError: libGL.so.1: no such file"
    assert name in problem and "libGL.so.1: no such file" in problem and "more" not in problem
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    text, problem = look(name)
    assert name in problem and PACKAGES[name] in problem


def test_a_row_waits_for_what_it_needs(broken):
    broken("torch", OSError("broken"))
    lines, problems = examine(CHECKS)
    assert "torch" in problems
    for name in ("numpy", "torchvision", "detectron2", "lambda_det", "kernels of the CPU"):
        assert "not tried without" in lines[name] and name not in problems


@pytest.mark.parametrize("number", ["2.9.1", "2.10.0+cpu"])
def test_a_pytorch_that_reads_files_unsafely(number, monkeypatch):
    monkeypatch.setattr("torch.__version__", torch.torch_version.TorchVersion(number))
    _, problem = look(".pth files")
    assert ("CVE-2026-24747" in (problem or "")) == (number == "2.9.1")
    assert not BY_NAME[".pth files"].breaks


@pytest.mark.parametrize(
    ("name", "target", "substitute", "said"),
    [
        ("torchvision", "torchvision.ops.nms", lambda *_: torch.tensor([0, 1, 2]), "instead of"),
        ("numpy", "torch.zeros", lambda size: 1 / 0, "ZeroDivisionError"),
        ("kernels of the CPU", "lambda_det.native.missing", lambda: "no g++", "no g++"),
    ],
)
def test_a_package_that_does_not_work(name, target, substitute, said, monkeypatch):
    monkeypatch.setattr(target, substitute)
    assert said in look(name)[1]


def test_a_folder_that_is_called_detectron2(monkeypatch, tmp_path):
    (tmp_path / "detectron2").mkdir()
    for name in [name for name in sys.modules if name.split(".")[0] == "detectron2"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    problem = look("detectron2")[1]
    assert str(tmp_path / "detectron2") in problem and "rename" in problem


def test_compiled_operators(broken):
    broken("detectron2._C", ModuleNotFoundError("No module named 'detectron2._C'"))
    text, problem = look("detectron2._C")
    assert "not built" in text and problem is None
    broken("detectron2._C", ImportError("undefined symbol: _ZN3c10"))
    assert "undefined symbol" in look("detectron2._C")[1]


def test_gpus(monkeypatch):
    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for value, said in ((1, None), (2, "cuda:0"), (torch.nan, "cuda:0")):
        monkeypatch.setattr(torch, "ones", lambda *n, device, value=value: value * ones(*n))
        text, problem = look("GPUs")
        assert said in problem if said else (text, problem) == ("compute", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert look("GPUs")[0].startswith("none")


@pytest.mark.parametrize(("has", "said"), [(True, "bfloat16: "), (False, "no bfloat16: ")])
def test_the_processor(monkeypatch, has, said):
    monkeypatch.setattr("lambda_det.training.precision.has_bfloat16", lambda device: has)
    assert look("processor")[0].startswith(said)


def _faulty():
    raise UserError("It fails.")


def test_report_and_status(monkeypatch, capsys):
    serious = Check("one", _faulty, "fix one", "It is needed.")
    mild = Check("two", _faulty, "fix two", breaks=False)
    well = Check("three", lambda: "works")
    cases = (
        (
            [mild, well, serious],
            1,
            ["BREAKS: It fails. It is needed.", "fix one", "note:", "fix two"],
        ),
        ([mild, well], 0, ["note: It fails.", "fix two"]),
        ([well], 0, ["Found: none"]),
    )
    for checks, status, words in cases:
        monkeypatch.setattr(doctor, "CHECKS", checks)
        assert doctor.main([]) == status
        text = capsys.readouterr().out
        assert metadata.version("torch") in text
        places = [text.index(word) for word in words]
        assert places == sorted(places)


@pytest.mark.checkout
def test_where_torch_is_missing_or_broken(tmp_path):
    """Without site-packages; the first use names the doctor, and the doctor what is missing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def python(*words):
        words = [sys.executable, *words]
        return subprocess.run(words, env=environment, capture_output=True, text=True)

    process = python("-S", "-c", "import lambda_det; lambda_det.LambdaLayer")
    assert "torch" in process.stderr and "python -m lambda_det.doctor" in process.stderr
    process = python("-S", "-m", "lambda_det.doctor")
    assert process.returncode == 1, process.stderr
    for text in ("No module named 'torch'", "pip install --upgrade --force-reinstall torch"):
        assert text in process.stdout
    (tmp_path / "torch.py").write_text("raise RuntimeError('broken')")
    process = python("-m", "lambda_det.doctor")
    assert process.returncode == 1 and "RuntimeError: broken" in process.stdout
