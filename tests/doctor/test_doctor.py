"""Each fault that the doctor knows is simulated, and each check is silent where all is well."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import import_module, metadata
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from lambda_det import doctor as diagnosis
from lambda_det.doctor import (
    CHECKS,
    Finding,
    detectron2_checks,
    environment_checks,
    finding,
    inventory,
    package_checks,
)
from lambda_det.doctor import __main__ as doctor

ROOT = Path(__file__).parents[2]


def only(findings, breaks=True):
    """The one finding there is."""
    (found,) = findings
    assert found.breaks == breaks
    assert found.problem.endswith(".") and found.mend
    return found


@pytest.fixture
def absent(monkeypatch):
    """Make modules as if they were not installed."""

    def absent(*names):
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)

    return absent


@pytest.fixture
def versions(monkeypatch):
    """Change the versions that distributions have; None is not installed."""

    def versions(**changes):
        real = metadata.version

        def version(name):
            if name not in changes:
                return real(name)
            if changes[name] is None:
                raise metadata.PackageNotFoundError(name)
            return changes[name]

        monkeypatch.setattr(metadata, "version", version)

    return versions


@pytest.fixture
def broken(monkeypatch):
    """Make the import of a module end in an error."""

    def broken(module, error):
        def import_broken(name, package=None):
            if name == module:
                raise error
            return import_module(name, package)

        monkeypatch.setattr(finding.importlib, "import_module", import_broken)

    return broken


@pytest.fixture
def copy(monkeypatch, tmp_path):
    """A copy of Detectron2 with the files that are given."""

    def copy(**files):
        for name, text in files.items():
            path = tmp_path / "detectron2" / name.replace("__", "/")
            path = path.with_name(path.name.replace("_dot_", "."))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(detectron2_checks, "folder_of", lambda _: tmp_path / "detectron2")

    return copy


SOUND = ["torch", "torch and numpy", "torchvision", "shapely", "pycocotools", "OpenCV"]
SOUND += ["Python", "Detectron2", "names that numpy and Pillow have given up", "lambda_det"]


@pytest.mark.parametrize("name", SOUND)
def test_silent_where_the_tests_run(name):
    assert list(CHECKS[name]()) == []


def test_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert "Python 3.9," in only(package_checks.python()).problem


def test_torch(absent, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.3.1+cu121")
    assert "2.3.1+cu121 is too old" in only(package_checks.torch()).problem
    monkeypatch.setattr(torch, "__version__", "2.10.0a0+git")
    assert not list(package_checks.torch())
    absent("torch")
    assert only(package_checks.torch()).problem == "PyTorch is not installed."
    # The others leave it at that
    for check in (package_checks.torch_and_numpy, package_checks.torchvision):
        assert not list(check())
    for check in (environment_checks.cuda, detectron2_checks.lambda_det):
        assert not list(check())


def test_broken_torch(broken):
    broken("torch", OSError("libcudart.so.12: cannot open shared object file"))
    assert "(OSError: libcudart.so.12" in only(package_checks.torch()).problem


def test_torch_and_numpy(monkeypatch):
    def no_numpy(size):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch, "zeros", no_numpy)
    assert "Numpy is not available" in only(package_checks.torch_and_numpy()).problem


def test_torchvision(absent, monkeypatch):
    def no_operator(*arguments):
        raise RuntimeError("operator torchvision::nms does not exist\nmore")

    monkeypatch.setattr("torchvision.ops.nms", no_operator)
    found = only(package_checks.torchvision())
    assert "(RuntimeError: operator torchvision::nms does not exist)" in found.problem
    assert "pip install --force-reinstall torch torchvision" in found.mend
    absent("torchvision")
    assert "not installed" in only(package_checks.torchvision()).problem


def test_shapely(absent, broken, versions):
    versions(fvcore="0.1.5.post20220512")
    assert "fvcore 0.1.5.post20220512" in only(package_checks.shapely()).problem
    broken("shapely", ImportError("libgeos_c.so.1: no such file"))
    assert "libgeos_c" in only(package_checks.shapely()).problem
    absent("shapely")
    assert "not installed" in only(package_checks.shapely()).problem


def test_pycocotools(absent, broken):
    broken("pycocotools.mask", ValueError("numpy.dtype size changed, may indicate binary"))
    assert "numpy.dtype size changed" in only(package_checks.pycocotools()).problem
    absent("pycocotools")
    assert "not installed" in only(package_checks.pycocotools()).problem


def test_opencv(absent, broken):
    broken("cv2", ImportError("libGL.so.1: cannot open shared object file: No such file"))
    found = only(package_checks.opencv())
    assert "libraries of a desktop" in found.problem and "opencv-python-headless" in found.mend
    broken("cv2", ImportError("numpy.core.multiarray failed to import"))
    assert "it is broken" in only(package_checks.opencv()).problem
    absent("cv2")
    assert "not installed" in only(package_checks.opencv()).problem


def test_requirements(versions, monkeypatch, absent):
    lines = ["torch>=99", "numpy>=1.26", "fvcore>=0.1.5", 'nothing>=1; python_version < "3"']
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    versions(lambda_det="0.1.0", numpy="1.26.4", fvcore="0.1.5.post20221221")
    assert not list(package_checks.requirements())
    versions(lambda_det="0.1.0", numpy="1.25.0", fvcore=None)
    found = only(package_checks.requirements())
    assert found.problem == "lambda_det needs numpy>=1.26 (1.25.0), fvcore>=0.1.5 (not installed)."
    assert found.mend == 'pip install "numpy>=1.26" "fvcore>=0.1.5"'
    versions(lambda_det=None)
    assert not list(package_checks.requirements())
    absent("packaging.requirements")
    assert "packaging" in only(package_checks.requirements()).problem


def test_detectron2(absent, broken, monkeypatch, tmp_path):
    broken("detectron2.modeling", AttributeError("module 'x' has no attribute 'y'"))
    assert "has no attribute 'y'" in only(detectron2_checks.detectron2()).problem
    absent("detectron2")
    assert "not installed" in only(detectron2_checks.detectron2()).problem
    assert not list(detectron2_checks.compiled_operators())
    # A folder that happens to have the name, as where its repository was cloned to
    (tmp_path / "detectron2").mkdir()
    monkeypatch.delitem(sys.modules, "detectron2")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = only(detectron2_checks.detectron2())
    assert str(tmp_path / "detectron2") in found.problem and "another folder" in found.mend


def test_compiled_operators(copy, broken, monkeypatch):
    copy(__init___dot_py="")
    only(detectron2_checks.compiled_operators(), breaks=False)
    copy(_C_dot_so="")
    broken("detectron2._C", ImportError("undefined symbol: _ZN3c10"))
    assert "undefined symbol" in only(detectron2_checks.compiled_operators()).problem
    monkeypatch.undo()
    copy()
    monkeypatch.setitem(sys.modules, "detectron2._C", type(sys)("_C"))
    assert not list(detectron2_checks.compiled_operators())


def test_pkg_resources(absent, copy, versions, monkeypatch):
    copy(model_zoo__model_zoo_dot_py="import pkg_resources\n")
    monkeypatch.setattr(detectron2_checks, "is_there", lambda name: True)
    assert not list(detectron2_checks.pkg_resources())
    monkeypatch.undo()
    copy()
    absent("pkg_resources")
    versions(setuptools="84.2.1")
    found = only(detectron2_checks.pkg_resources())
    assert "setuptools 84.2.1" in found.problem and "setuptools<81" in found.mend
    versions(setuptools=None)
    assert "no setuptools is installed" in only(detectron2_checks.pkg_resources()).problem
    copy(model_zoo__model_zoo_dot_py="import importlib.resources\n")  # one that is mended
    assert not list(detectron2_checks.pkg_resources())


def test_outdated_names(copy, monkeypatch):
    copy(a_dot_py="x = np.float32(np.bool_(1)); y = Image.BILINEAR; np.bool")
    monkeypatch.setattr(numpy, "bool", bool, raising=False)
    assert not list(detectron2_checks.outdated_names())
    copy(data__t_dot_py="interp=Image.LINEAR", masks_dot_py="np.float(1)")
    monkeypatch.delattr(numpy, "float", raising=False)
    monkeypatch.delattr(Image, "LINEAR", raising=False)
    old_numpy, old_pillow = detectron2_checks.outdated_names()
    assert "np.float in masks.py" in old_numpy.problem
    assert "Image.LINEAR in data/t.py" in old_pillow.problem and "pillow" in old_pillow.problem


def test_skipped_images(copy, monkeypatch):
    copy(data__common_dot_py="cur = self._rng.sample(self._fallback_candidates, k=1)[0]")
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert not list(detectron2_checks.skipped_images())
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    only(detectron2_checks.skipped_images(), breaks=False)
    copy(data__common_dot_py="self._rng.sample(sorted(self._fallback_candidates), k=1)")
    assert not list(detectron2_checks.skipped_images())


def test_lambda_det(broken):
    broken("lambda_det.detection.data", ImportError("No module named 'simplejpeg'"))
    assert "simplejpeg" in only(detectron2_checks.lambda_det()).problem


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with or without driver, and with a PyTorch built for CUDA or not."""

    def machine(driver, built_for, available):
        (tmp_path / "version").write_text("NVRM") if driver else None
        monkeypatch.setattr(environment_checks, "_DRIVER", tmp_path / "version")
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return machine


def test_cuda(machine, monkeypatch):
    for built_for in (None, "13.0"):
        machine(False, built_for, False)
        assert not list(environment_checks.cuda())
    machine(True, None, False)
    assert "built for the CPU only" in only(environment_checks.cuda()).problem
    machine(True, "13.0", False)
    assert "cannot use a GPU" in only(environment_checks.cuda()).problem
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides the GPUs" in only(environment_checks.cuda(), breaks=False).problem


def test_gpu_that_does_not_compute(machine, monkeypatch):
    machine(True, "13.0", True)
    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device: real(*size))
    assert not list(environment_checks.cuda())

    def no_kernel(*size, device):
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(torch, "ones", no_kernel)
    assert "cuda:0 is there, but does not compute" in only(environment_checks.cuda()).problem
    monkeypatch.setattr(torch, "ones", lambda *size, device: 2 * real(*size))
    assert "8x8" in only(environment_checks.cuda()).problem


def test_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # set by hand, or by some cluster for its own ends
    assert not list(environment_checks.torchrun())
    monkeypatch.setenv("RANK", "0")
    finding = only(environment_checks.torchrun(), breaks=False)
    assert "4 unconnected trainings" in finding.problem
    monkeypatch.setenv("RANK", "1")
    assert not list(environment_checks.torchrun())  # the first process says it for all
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not list(environment_checks.torchrun())


def test_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(environment_checks, "_SHARED_MEMORY", tmp_path / "none")
    assert not list(environment_checks.shared_memory())
    monkeypatch.setattr(environment_checks, "_SHARED_MEMORY", tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**26, 0, 2**26))
    assert "64 MiB left of 64" in only(environment_checks.shared_memory()).problem
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**33, 0, 2**33))
    assert not list(environment_checks.shared_memory())


def test_open_files(monkeypatch):
    for limits, mend in (
        ((1024, 4096), "ulimit -n 4096"),
        ((256, 2**20), "ulimit -n 65536"),
        ((256, resource.RLIM_INFINITY), "ulimit -n 65536"),
        ((1024, 1024), "docker run --ulimit nofile=65536"),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        found = only(environment_checks.open_files(), breaks=False)
        assert found.mend.endswith(mend)
    for soft in (65536, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert not list(environment_checks.open_files())


def test_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert "no-such-compiler" in only(environment_checks.compiler(), breaks=False).problem
    monkeypatch.setenv("CXX", sys.executable)
    assert not list(environment_checks.compiler())


def test_a_check_that_fails_itself_does_not_stop_the_others():
    def fails():
        raise KeyError("surprise")

    def finds():
        return [Finding("Something.", "do", breaks=False)]

    first, second = diagnosis.examine({"fails": fails, "finds": finds})
    assert first.problem == "The check of fails failed itself: KeyError: 'surprise'."
    assert second.problem == "Something."


def test_operators_that_run_and_that_do_not(monkeypatch, absent):
    lines = dict(inventory.operators())
    assert lines["torchvision nms"] == lines["torchvision roi_align"] == "runs"
    assert lines["pycocotools masks"] == "run"
    monkeypatch.setattr("torchvision.ops.nms", lambda *arguments: torch.tensor([0, 1, 2]))
    absent("pycocotools")
    lines = dict(inventory.operators())
    assert lines["torchvision nms"].startswith("WRONG: keeps [0, 1, 2]")
    assert lines["pycocotools masks"].startswith("no: ModuleNotFoundError")


def test_report_and_status(monkeypatch, capsys):
    serious, mild = Finding("One fails.", "mend one"), Finding("Two is slow.", "mend two", False)
    for found, status in (([mild, serious], 1), ([mild], 0), ([], 0)):
        monkeypatch.setattr(doctor, "examine", lambda found=found: found)
        assert doctor.main([]) == status
        text = capsys.readouterr().out
        assert f"torch                   {metadata.version('torch')}" in text
        assert str(Path(import_module("detectron2").__file__).parent) in text
        expected = [f"BREAKS: {f.problem}" for f in found if f.breaks]
        expected += [f"note: {f.problem}" for f in found if not f.breaks]
        places = [text.index(line) for line in expected]
        assert places == sorted(places)
        assert all(f"mend: {f.mend}" in text for f in found)
    assert "Found: none" in text


def test_it_speaks_in_a_bare_python(tmp_path):
    def python(*arguments):
        return subprocess.run(
            [sys.executable, "-S", *arguments],  # without site-packages
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    answer = python("-m", "lambda_det.doctor")
    assert answer.returncode == 1, answer.stderr
    for text in ("PyTorch is not installed.", "Detectron2 is not installed.", "pip install torch"):
        assert text in answer.stdout
    content = json.loads(python("-m", "lambda_det.doctor", "--json").stdout)
    assert content["versions"]["torch"] == "not installed"
    assert any(f["problem"] == "Detectron2 is not installed." for f in content["findings"])
    # And whoever imports the package is sent to it
    assert "`python -m lambda_det.doctor`" in python("-c", "import lambda_det").stderr


@pytest.mark.parametrize(
    "command, importable",
    [
        (["-c", "import lambda_det; lambda_det.LambdaLayer", "--note", "lambda_det.doctor"], True),
        (["-mlambda_det.doctor", "--help"], False),
        (["-m", "lambda_det.doctor", "--help"], False),
    ],
)
def test_the_package_is_whole_but_for_the_doctor(command, importable, tmp_path):
    """Only the doctor starts where PyTorch is broken; all others get every name."""
    if not importable:
        (tmp_path / "torch.py").write_text("raise RuntimeError('broken')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    answer = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
