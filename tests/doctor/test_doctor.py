"""Each fault that the doctor knows is simulated, and each check is silent where all is well."""

import json
import os
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

from lambda_det.doctor import __main__ as doctor
from lambda_det.doctor import conditions
from lambda_det.doctor.conditions import CONDITIONS, Condition
from lambda_det.doctor.parts import PARTS, Finding

ROOT = Path(__file__).parents[2]


def of_part(name):
    """What a package's row prints, and its finding."""
    (row,) = (part for part in PARTS if part.name == name)
    return row.examine()


def of_condition(look):
    """The finding of the row of conditions that looks so; None where all is well."""
    (row,) = (condition for condition in CONDITIONS if condition.look is look)
    return row.examine()


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

        monkeypatch.setattr("importlib.import_module", import_broken)

    return broken


@pytest.fixture
def copy(monkeypatch, tmp_path):
    """A copy of Detectron2 with the files that are given."""

    def copy(files):
        for name, text in files.items():
            path = tmp_path / "detectron2" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(conditions, "folder_of", lambda _: tmp_path / "detectron2")

    return copy


# Of a machine, a start or a copy of Detectron2, which may have them where the tests run
CIRCUMSTANCES = {
    conditions._no_compiled_operators,
    conditions._broken_compiled_operators,
    conditions._missing_pkg_resources,
    conditions._sampled_set,
    conditions._little_shared_memory,
    conditions._few_open_files,
    conditions._hidden_gpus,
    conditions._unusable_gpus,
    conditions._torchrun,
}


def test_silent_where_all_is_well(monkeypatch):
    for part in PARTS:
        text, finding = part.examine()
        assert text and (finding is None or not finding.breaks), part.name
    for condition in CONDITIONS:
        if condition.look not in CIRCUMSTANCES:
            assert condition.examine() is None, condition.look


@pytest.mark.parametrize("part", PARTS[:-2], ids=lambda part: part.name)
def test_package_that_is_missing(absent, part):
    absent(part.module)
    text, finding = part.examine()
    assert text == "not installed" and finding.breaks
    assert part.name in finding.problem and finding.mend == part.install


@pytest.mark.parametrize("name", ["torch", "shapely", "OpenCV"])
def test_package_that_cannot_be_imported(broken, name):
    (part,) = (part for part in PARTS if part.name == name)
    broken(part.module, OSError("libGL.so.1: no such file\nmore"))
    text, finding = part.examine()
    assert text == "no: OSError: libGL.so.1: no such file"
    assert "libGL.so.1: no such file" in finding.problem and "more" not in finding.problem
    assert finding.mend == part.repair and finding.breaks


def test_package_without_what_it_needs(absent):
    absent("torch")
    for name in ("numpy", "torchvision", "detectron2", "lambda_det"):
        text, finding = of_part(name)
        assert "torch" in text and finding is None  # torch's own row tells


def test_package_that_does_not_work(monkeypatch, broken):
    broken("detectron2.modeling", AttributeError("module 'x' has no attribute 'y'"))
    assert "no attribute 'y'" in of_part("detectron2")[1].problem
    broken("lambda_det.detection", ImportError("No module named 'simplejpeg'"))
    assert "simplejpeg" in of_part("lambda_det")[1].problem
    broken("pycocotools.mask", ValueError("numpy.dtype size changed"))
    assert "numpy.dtype size changed" in of_part("pycocotools")[1].problem
    monkeypatch.undo()
    monkeypatch.setattr("torchvision.ops.nms", lambda *_: torch.tensor([0, 1, 2]))
    assert "[0, 1, 2] instead of [1, 2]" in of_part("torchvision")[1].problem

    def no_numpy(size):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch, "zeros", no_numpy)
    assert "Numpy is not available" in of_part("numpy")[1].problem


def test_kernel_that_does_not_compile(monkeypatch):
    monkeypatch.setattr("lambda_det.layers.local.compiled.unsupported", lambda *_: "no compiler")
    text, finding = of_part("The lambda layer's CPU kernel")
    assert "no compiler" in text and "CXX" in finding.mend and not finding.breaks


def test_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert "Python 3.9," in of_condition(conditions._old_python).problem


def test_requirements(versions, monkeypatch):
    lines = ["torch>=2", "numpy>=1.26", "fvcore>=0.1.5", 'nothing>=1; python_version < "3"']
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    versions(lambda_det="0.1.0", numpy="1.26.4", fvcore="0.1.5.post20221221", torch=None)
    assert of_condition(conditions._unmet_requirements) is None
    versions(lambda_det="0.1.0", numpy="1.25.0", fvcore=None, torch="1.13")
    finding = of_condition(conditions._unmet_requirements)
    for text in ("torch>=2 (1.13)", "numpy>=1.26 (1.25.0)", "fvcore>=0.1.5 (not installed)"):
        assert text in finding.problem
    assert finding.mend == 'pip install "torch>=2" "numpy>=1.26" "fvcore>=0.1.5"'
    versions(lambda_det=None)
    assert of_condition(conditions._unmet_requirements) is None


def test_folder_that_is_called_detectron2(monkeypatch, tmp_path):
    (tmp_path / "detectron2").mkdir()
    monkeypatch.delitem(sys.modules, "detectron2")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert str(tmp_path / "detectron2") in of_condition(conditions._folder_without_code).problem


def test_compiled_operators(copy, broken, monkeypatch):
    copy({"__init__.py": ""})
    assert not of_condition(conditions._no_compiled_operators).breaks
    assert of_condition(conditions._broken_compiled_operators) is None
    copy({"_C.so": ""})
    assert of_condition(conditions._no_compiled_operators) is None
    broken("detectron2._C", ImportError("undefined symbol: _ZN3c10"))
    assert "undefined symbol" in of_condition(conditions._broken_compiled_operators).problem
    monkeypatch.undo()
    copy({})
    monkeypatch.setitem(sys.modules, "detectron2._C", type(sys)("_C"))
    assert of_condition(conditions._broken_compiled_operators) is None


def test_pkg_resources(absent, copy, versions, monkeypatch):
    copy({"model_zoo/model_zoo.py": "import pkg_resources\n"})
    monkeypatch.setattr(conditions, "is_there", lambda name: True)
    assert of_condition(conditions._missing_pkg_resources) is None
    monkeypatch.undo()
    copy({})
    absent("pkg_resources")
    versions(setuptools="84.2.1")
    finding = of_condition(conditions._missing_pkg_resources)
    assert "setuptools 84.2.1" in finding.problem and "setuptools<81" in finding.mend
    versions(setuptools=None)
    assert "no setuptools" in of_condition(conditions._missing_pkg_resources).problem
    copy({"model_zoo/model_zoo.py": "import importlib.resources\n"})  # one that is mended
    assert of_condition(conditions._missing_pkg_resources) is None


def test_removed_names(copy, monkeypatch):
    copy({"a.py": "x = np.float32(np.bool_(1)); y = Image.BILINEAR; np.bool"})
    monkeypatch.setattr(numpy, "bool", bool, raising=False)
    assert of_condition(conditions._removed_names) is None
    copy({"data/t.py": "interp=Image.LINEAR", "masks.py": "np.float(1)"})
    monkeypatch.delattr(numpy, "float", raising=False)
    monkeypatch.delattr(Image, "LINEAR", raising=False)
    problem = of_condition(conditions._removed_names).problem
    assert "np.float in masks.py" in problem and "Image.LINEAR in data/t.py" in problem


def test_skipped_images(copy, monkeypatch):
    copy({"data/common.py": "cur = self._rng.sample(self._fallback_candidates, k=1)[0]"})
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert of_condition(conditions._sampled_set) is None
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    assert not of_condition(conditions._sampled_set).breaks
    copy({"data/common.py": "self._rng.sample(sorted(self._fallback_candidates), k=1)"})
    assert of_condition(conditions._sampled_set) is None


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with or without driver, and with a PyTorch built for CUDA or not."""

    def machine(driver, built_for, available=False):
        (tmp_path / "version").write_text("NVRM") if driver else None
        monkeypatch.setattr(conditions, "_DRIVER", tmp_path / "version")
        monkeypatch.setattr(shutil, "which", lambda name: None)
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return machine


def test_cuda(machine, monkeypatch):
    for built_for in (None, "13.0"):
        machine(False, built_for)
        assert of_condition(conditions._unusable_gpus) is None
    machine(True, None)
    assert "the CPU only" in of_condition(conditions._unusable_gpus).problem
    machine(True, "13.0")
    assert "CUDA 13.0" in of_condition(conditions._unusable_gpus).problem
    assert of_condition(conditions._hidden_gpus) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES=''" in of_condition(conditions._hidden_gpus).problem
    assert of_condition(conditions._unusable_gpus) is None


def test_gpu_that_does_not_compute(machine, monkeypatch):
    look = conditions._gpus_that_do_not_compute
    machine(True, "13.0", True)
    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device: real(*size))
    assert of_condition(look) is None

    def no_kernel(*size, device):
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(torch, "ones", no_kernel)
    problem = of_condition(look).problem
    assert "cuda:0" in problem and "no kernel image" in problem
    monkeypatch.setattr(torch, "ones", lambda *size, device: 2 * real(*size))
    assert "8x8" in of_condition(look).problem


def test_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # set by hand, or by a cluster for purposes of its own
    assert of_condition(conditions._torchrun) is None
    monkeypatch.setenv("RANK", "0")
    finding = of_condition(conditions._torchrun)
    assert "--num-gpus 4" in finding.mend and not finding.breaks
    monkeypatch.setenv("RANK", "1")
    assert of_condition(conditions._torchrun) is None  # rank 0 says it for all
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert of_condition(conditions._torchrun) is None


def test_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(conditions, "_SHARED_MEMORY", tmp_path / "none")
    assert of_condition(conditions._little_shared_memory) is None
    monkeypatch.setattr(conditions, "_SHARED_MEMORY", tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**26, 0, 2**26))
    assert "64 MiB left of 64" in of_condition(conditions._little_shared_memory).problem
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**33, 0, 2**33))
    assert of_condition(conditions._little_shared_memory) is None


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
    finding = of_condition(conditions._few_open_files)
    assert finding.mend.endswith(mend) and not finding.breaks if mend else finding is None


def test_check_that_fails_is_a_finding():
    def broken_look():
        raise KeyError("surprise")

    problem = Condition(broken_look, "", "").examine().problem
    assert "broken look" in problem and "KeyError: 'surprise'" in problem


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
@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_bare_python(python, flag):
    process = python("-S", "-m", "lambda_det.doctor", *flag)  # without site-packages
    assert process.returncode == 1, process.stderr
    for text in ("torch is not installed.", "detectron2 is not installed.", "pip install torch"):
        assert text in process.stdout
    if flag:
        content = json.loads(process.stdout)
        assert content["versions"]["torch"] == content["parts"]["torch"] == "not installed"


@pytest.mark.checkout
def test_import_in_a_bare_python_names_the_doctor(python):
    assert "`python -m lambda_det.doctor`" in python("-S", "-c", "import lambda_det").stderr


@pytest.mark.parametrize("command", [["-mlambda_det.doctor"], ["-m", "lambda_det.doctor"]])
def test_doctor_starts_beside_a_broken_torch(python, tmp_path, command):
    (tmp_path / "torch.py").write_text("raise RuntimeError('broken')")
    assert python(*command, "--help").returncode == 0


@pytest.mark.slow
def test_only_the_doctor_goes_without_the_package(python):
    """A command line that holds the doctor's name is not the doctor's."""
    command = ["-c", "import lambda_det; lambda_det.LambdaLayer", "--note", "lambda_det.doctor"]
    assert python(*command).returncode == 0
