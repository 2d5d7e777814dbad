"""Each fault that the doctor knows is simulated, and each check is silent where all is well."""

import os
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import import_module, metadata
from pathlib import Path

import pytest
import torch

from lambda_det.doctor import __main__ as doctor
from lambda_det.doctor import checks
from lambda_det.doctor.checks import CHECKS, Finding

ROOT = Path(__file__).parents[2]
BY_NAME = {check.name: check for check in CHECKS}
# Of a machine or a Detectron2, which may have them where the tests run
CIRCUMSTANCES = {"detectron2._C", "GPUs", "shared memory", "open files"}


def finding_of(name):
    return BY_NAME[name].run()[1]


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
    text, finding = BY_NAME[name].run()
    assert text and finding is None


PACKAGES = {"OpenCV": "cv2", "detectron2": "detectron2.modeling"}
PACKAGES |= {name: name for name in ("torch", "numpy", "torchvision", "shapely", "pycocotools")}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_missing_or_broken(name, monkeypatch, broken):
    broken(PACKAGES[name], OSError("libGL.so.1: no such file\nmore"))
    text, finding = BY_NAME[name].run()
    assert text == "no: OSError: libGL.so.1: no such file"
    assert "libGL.so.1: no such file" in finding.problem and "more" not in finding.problem
    assert name in finding.problem and finding.mend == BY_NAME[name].advice and finding.breaks
    monkeypatch.setitem(sys.modules, PACKAGES[name].partition(".")[0], None)
    text, finding = BY_NAME[name].run()
    assert text == f"{name} is not installed." and finding.problem.startswith(text)


def test_a_row_waits_for_what_it_needs(broken):
    broken("torch", OSError("broken"))
    lines, findings = checks.examine()
    assert [f.problem for f in findings if "torch" in f.problem] == [findings[0].problem]
    for name in ("numpy", "torchvision", "detectron2", "lambda_det", "kernels of the CPU"):
        assert "not tried without" in lines[name]


@pytest.mark.parametrize(
    ("name", "target", "substitute", "said"),
    [
        ("torchvision", "torchvision.ops.nms", lambda *_: torch.tensor([0, 1, 2]), "instead of"),
        ("numpy", "torch.zeros", lambda size: 1 / 0, "ZeroDivisionError"),
        ("pycocotools", "pycocotools.mask.area", lambda mask: 7, "7 instead of 15"),
        (
            "kernels of the CPU",
            "lambda_det.layers.local.compiled.unsupported",
            lambda *_: "no compiler",
            "no compiler",
        ),
    ],
)
def test_a_package_that_does_not_work(name, target, substitute, said, monkeypatch):
    monkeypatch.setattr(target, substitute)
    finding = finding_of(name)
    assert said in finding.problem and finding.breaks == BY_NAME[name].breaks


def test_a_folder_that_is_called_detectron2(monkeypatch, tmp_path):
    (tmp_path / "detectron2").mkdir()
    monkeypatch.delitem(sys.modules, "detectron2")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    finding = finding_of("detectron2")
    assert str(tmp_path / "detectron2") in finding.problem and "rename" in finding.mend


def test_compiled_operators(monkeypatch, tmp_path, broken):
    monkeypatch.setattr(checks, "folder_of", lambda _: tmp_path)
    text, finding = BY_NAME["detectron2._C"].run()
    assert "not built" in text and finding is None
    (tmp_path / "_C.so").touch()
    broken("detectron2._C", ImportError("undefined symbol: _ZN3c10"))
    assert "undefined symbol" in finding_of("detectron2._C").problem


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with or without driver, and with a PyTorch built for CUDA or not."""

    def machine(driver, built_for=None, available=False):
        (tmp_path / "version").write_text("NVRM") if driver else None
        monkeypatch.setattr(checks, "_DRIVER", tmp_path / "version")
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return machine


def test_gpus(machine, monkeypatch):
    machine(False, "13.0")
    assert BY_NAME["GPUs"].run() == ("none", None)
    for built_for, said in ((None, "the CPU only"), ("13.0", "CUDA 13.0")):
        machine(True, built_for)
        assert said in finding_of("GPUs").problem
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text, finding = BY_NAME["GPUs"].run()
    assert "CUDA_VISIBLE_DEVICES" in text and finding is None
    machine(True, "13.0", True)
    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device: real(*size))
    assert finding_of("GPUs") is None

    def no_kernel(*size, device):
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(torch, "ones", no_kernel)
    assert "no kernel image" in finding_of("GPUs").problem
    monkeypatch.setattr(torch, "ones", lambda *size, device: 2 * real(*size))
    assert "cuda:0" in finding_of("GPUs").problem


def test_shared_memory(monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    for folder, size, said in (
        ("none", 0, None),
        (".", 2**26, "64 MiB left of 64"),
        (".", 2**33, None),
    ):
        monkeypatch.setattr(checks, "_SHARED_MEMORY", tmp_path / folder)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, size=size: usage(size, 0, size))
        finding = finding_of("shared memory")
        assert said in finding.problem if said else finding is None


@pytest.mark.parametrize(
    ("limits", "mend"),
    [
        ((1024, 4096), "ulimit -n 4096"),
        ((256, 2**20), "ulimit -n 65536"),
        ((256, None), "ulimit -n 65536"),
        ((1024, 1024), "docker run --ulimit nofile=65536"),
        ((65536, 65536), None),
        ((None, None), None),
    ],
)
def test_open_files(monkeypatch, limits, mend):
    resource = pytest.importorskip("resource")
    limits = tuple(resource.RLIM_INFINITY if limit is None else limit for limit in limits)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    finding = finding_of("open files")
    assert finding.mend.endswith(mend) and not finding.breaks if mend else finding is None


def test_report_and_status(monkeypatch, capsys):
    serious, mild = Finding("One fails.", "mend one"), Finding("Two is slow.", "mend two", False)
    for found, status in (([mild, serious], 1), ([mild], 0), ([], 0)):
        monkeypatch.setattr(doctor, "examine", lambda found=found: ({"torch": "works"}, found))
        assert doctor.main([]) == status
        text = capsys.readouterr().out
        assert metadata.version("torch") in text and "GPU available" in text
        assert str(Path(import_module("detectron2").__file__).parent) in text
        expected = [f"BREAKS: {f.problem}" for f in found if f.breaks]
        expected += [f"note: {f.problem}" for f in found if not f.breaks]
        places = [text.index(line) for line in expected]
        assert places == sorted(places)
        assert all(f"mend: {f.mend}" in text for f in found)
    assert "Found: none" in text


@pytest.fixture
def python(tmp_path):
    """Run Python in another folder, by its arguments; modules there go before others."""

    def python(*arguments):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
            capture_output=True,
            text=True,
        )

    return python


@pytest.mark.checkout
def test_where_torch_is_missing_or_broken(python, tmp_path):
    """Without site-packages; the first use names the doctor, and the doctor what is missing."""
    process = python("-S", "-c", "import lambda_det; lambda_det.LambdaLayer")
    assert "torch" in process.stderr and "python -m lambda_det.doctor" in process.stderr
    process = python("-S", "-m", "lambda_det.doctor")
    assert process.returncode == 1, process.stderr
    for text in ("torch is not installed.", "pip install --upgrade --force-reinstall torch"):
        assert text in process.stdout
    (tmp_path / "torch.py").write_text("raise RuntimeError('broken')")
    process = python("-m", "lambda_det.doctor")
    assert process.returncode == 1 and "RuntimeError: broken" in process.stdout
    assert "--gpu cannot work here" in python("-m", "lambda_det.doctor", "--gpu").stderr
