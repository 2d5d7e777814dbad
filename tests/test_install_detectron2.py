import contextlib
import importlib.metadata
import os
import sys
import zipfile
from pathlib import Path

import pytest

from lambda_det import doctor
from lambda_det import install_detectron2 as tool

# The tool looks for pip; setuptools cannot be imported in a process after that
with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401

NotInstalled = tool.NotInstalled


@pytest.fixture
def carrier(tmp_path):
    """The folder of an unpacked wheel in the form of the one on PyPI."""
    files = {
        "LabGym/__init__.py": b"raise ImportError('not ours')\n",
        "LabGym/detectron2/__init__.py": b"from LabGym.detectron2.utils import NAME\n"
        b'__version__ = "0.6"\n',
        "LabGym/detectron2/__pycache__/__init__.cpython-311.pyc": b"\x00",
        "LabGym/detectron2/utils/__init__.py": b"NAME = __name__\n",
        "LabGym/detectron2/model_zoo/configs/v0.5/a.yaml": b"_BASE_: LabGym.detectron2.b\n",
        "labgym-3.1.2.dist-info/METADATA": b"Name: LabGym\n",
    }
    for name, content in files.items():
        (tmp_path / "carrier" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "carrier" / name).write_bytes(content)
    return tmp_path / "carrier"


@pytest.fixture
def nothing_there(monkeypatch):
    """A Python with every dependency and no Detectron2; what pip is asked for is kept."""
    calls = []
    monkeypatch.setattr(tool, "check_dependencies", lambda: None)
    monkeypatch.setattr(tool, "find_installed", lambda: "0.6" if calls else None)
    monkeypatch.setattr(tool, "python", lambda code: "")
    monkeypatch.setattr(tool, "pip", lambda *arguments: calls.append(arguments))
    return calls


def fake_command(folder: Path, name: str, script: str, monkeypatch) -> None:
    command = folder / "bin" / name
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")


def test_the_import_name_is_restored_everywhere(carrier, tmp_path):
    tool.write_source(carrier, tmp_path / "source")
    files = {
        str(path.relative_to(tmp_path / "source")): path.read_text()
        for path in (tmp_path / "source").rglob("*")
        if path.is_file()
    }
    code = {name: text for name, text in files.items() if name.startswith("detectron2/")}
    assert files.keys() - code.keys() == {"setup.py", "LICENSE", "NOTICE"}
    assert code == {
        "detectron2/__init__.py": 'from detectron2.utils import NAME\n__version__ = "0.6"\n',
        "detectron2/utils/__init__.py": "NAME = __name__\n",
        "detectron2/model_zoo/configs/v0.5/a.yaml": "_BASE_: detectron2.b\n",
    }


@pytest.mark.slow
def test_pip_installs_the_result(carrier, tmp_path, monkeypatch):
    tool.write_source(carrier, tmp_path / "source")
    site = tmp_path / "site"
    options = ("--no-deps", "--no-build-isolation", f"--target={site}")
    tool.pip("install", *options, str(tmp_path / "source"))
    [found] = importlib.metadata.distributions(path=[str(site)])
    assert (found.name, found.version) == ("detectron2", "0.6")
    texts = {path.name: path.read_text() for path in found.files if path.suffix in ("", ".yaml")}
    assert "END OF TERMS AND CONDITIONS" in texts["LICENSE"] and "a.yaml" in texts
    assert tool.CARRIER in texts["NOTICE"] and tool.CARRIER_SHA256 in texts["NOTICE"]
    monkeypatch.setenv("PYTHONPATH", str(site))
    code = "import detectron2; print(detectron2.NAME, detectron2.__file__)"
    place = site / "detectron2" / "__init__.py"
    assert tool.python(code).split() == ["detectron2.utils", str(place)]


@pytest.mark.slow
def test_pip_refuses_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "CARRIER", "carrier==1.0")
    wheel = tmp_path / "wheels/carrier-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("LabGym/detectron2/__init__.py", "")
        archive.writestr("carrier-1.0.dist-info/METADATA", "Name: carrier\nVersion: 1.0\n")
        archive.writestr("carrier-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("carrier-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(NotInstalled, match=r"(?i)hash"):
        tool.fetch_carrier(tmp_path / "carrier")
    assert not (tmp_path / "carrier/LabGym").exists()


def test_uv_where_the_environment_has_no_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "find_spec", lambda name: None)
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotInstalled, match="uv"):
        tool.pip("install", "x")
    asked = tmp_path / "asked"
    refusal = "for word; do test $word != --yes || exit 2; done"  # uv's before 2026
    fake_command(tmp_path, "uv", f'{refusal}\necho "$@" >> "{asked}"', monkeypatch)
    tool.pip("install", "--no-deps", "x")
    monkeypatch.setattr(tool, "find_installed", lambda: None)
    with pytest.raises(NotInstalled, match="does not look"):
        tool.install_package("x", compiled=False)
    first, _, last = asked.read_text().splitlines()
    assert first.split() == ["pip", "install", "--python", sys.executable, "--no-deps", "x"]
    assert last.split() == ["pip", "uninstall", "--python", sys.executable, "detectron2"]


def test_pip_is_not_to_ask_before_it_removes(monkeypatch):
    commands = []
    monkeypatch.setattr(tool, "run", commands.append)
    tool.pip("uninstall", "detectron2")
    assert commands[0][3:] == ["uninstall", "--yes", "detectron2"]


@pytest.mark.parametrize("text", ['__version__ = "0.7"', "import no_such_module_anywhere"])
def test_a_detectron2_that_is_there_is_left_alone(text, tmp_path, monkeypatch, capsys):
    """A broken one is named."""
    monkeypatch.setattr(tool, "check_dependencies", lambda: None)
    monkeypatch.setattr(tool, "pip", lambda *arguments: pytest.fail("pip was called"))
    package = tmp_path / "detectron2"
    (package / "modeling").mkdir(parents=True)
    (package / "modeling/__init__.py").touch()
    (package / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    is_whole = "version" in text
    assert tool.install("auto") == is_whole
    printed = capsys.readouterr()
    said = printed.out if is_whole else printed.err
    words = [f"0.7 in {package}"] if is_whole else ["no_such_module_anywhere"]
    assert all(word in said for word in [*words, "pip uninstall detectron2"])


def test_a_missing_dependency_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "omegaconf.py").write_text("raise ImportError('No module named omegaconf')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not tool.install("auto")
    error = capsys.readouterr().err
    assert "requirements.txt" in error and "omegaconf" in error


BUILD = "error: command 'g++' failed: No such file or directory"


@pytest.mark.parametrize(
    ("git", "reason"),
    [
        ("echo 'fatal: Could not resolve host: github.com' >&2; exit 128", "Could not resolve"),
        ("exec sleep 60", "timed out"),
        ("exit 0", "'g++' failed"),
        (None, "No such file or directory: 'git'"),
    ],
    ids=["unreachable", "silent", "build fails", "missing"],
)
def test_without_git_or_a_build_the_wheel_is_taken_and_said_before(
    git, reason, nothing_there, tmp_path, monkeypatch, capsys
):
    printed_before = []

    def pip(*arguments):
        if arguments[-1].startswith("git+"):
            raise NotInstalled(BUILD)
        printed_before.append(capsys.readouterr().out)
        nothing_there.append(arguments)
        for target in (word for word in arguments if word.startswith("--target=")):
            Path(target.removeprefix("--target="), tool.CARRIER_FOLDER).mkdir(parents=True)

    monkeypatch.setattr(tool, "pip", pip)
    if git is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        fake_command(tmp_path, "git", git, monkeypatch)
    monkeypatch.setattr(tool, "GIT_PROBE_SECONDS", 0.5)
    assert tool.install("auto")
    fetched, installed = nothing_there
    assert "--require-hashes" in fetched and "--no-build-isolation" in installed
    assert reason in printed_before[0] and tool.CARRIER in printed_before[0]


def test_nothing_reachable_ends_in_one_sentence(nothing_there, tmp_path, monkeypatch, capsys):
    """Git comes first."""

    def pip(*arguments):
        raise NotInstalled(f"no answer about {arguments[-1]}")

    monkeypatch.setattr(tool, "pip", pip)
    fake_command(tmp_path, "git", "exit 0", monkeypatch)
    assert not tool.install("auto")
    output = capsys.readouterr()
    address = f"git+{tool.GIT_URL}@{tool.GIT_COMMIT}"
    assert 0 < output.out.index(address) < output.out.index("--requirement=")
    assert output.err.startswith("error: ") and output.err.count("\n") == 1


def test_a_local_checkout(nothing_there, tmp_path, capsys):
    assert not tool.install(str(tmp_path))
    assert f"{tmp_path} is no checkout" in capsys.readouterr().out
    (tmp_path / "detectron2").mkdir()
    (tmp_path / "detectron2/__init__.py").touch()
    assert tool.install(str(tmp_path))
    assert nothing_there == [("install", "--no-build-isolation", "--no-deps", str(tmp_path))]


def test_operators_that_cannot_be_imported_are_removed(nothing_there, monkeypatch):
    def broken(code):
        raise NotInstalled("ImportError: undefined symbol")

    monkeypatch.setattr(tool, "python", broken)
    with pytest.raises(NotInstalled, match="undefined symbol"):
        tool.install_package("somewhere", compiled=True)
    assert nothing_there[-1] == ("uninstall", "detectron2")
    tool.install_package("somewhere", compiled=False)
    assert nothing_there[-1][0] == "install"


@pytest.mark.parametrize("is_there", [True, False])
def test_doctor_installs_it_from_the_given_source(monkeypatch, capsys, is_there):
    """And examines what is there then; where it cannot be had, there is nothing to examine."""
    asked = []
    monkeypatch.setattr(doctor, "install", lambda source: asked.append(source) or is_there)
    monkeypatch.setattr(doctor, "CHECKS", ())
    assert doctor.main(["--install", "--source", "git"]) == (0 if is_there else 2)
    assert asked == ["git"] and ("Versions" in capsys.readouterr().out) == is_there
    assert doctor.main([]) == 0 and asked == ["git"]


def test_the_licence_is_that_of_the_checkout_or_of_the_wheel(monkeypatch, tmp_path):
    assert "Apache License" in tool.license_text()
    (tmp_path / "LICENSE").write_text("of the wheel")
    file = importlib.metadata.PackagePath("LICENSE")
    file.dist = importlib.metadata.PathDistribution(tmp_path / "lambda_det-0.1.dist-info")
    # Beside an installed package another one may have left its own
    (tmp_path / "site" / "lambda_det").mkdir(parents=True)
    (tmp_path / "site" / "LICENSE").write_text("a stranger's")
    monkeypatch.setattr(tool, "__file__", str(tmp_path / "site" / "lambda_det" / "b.py"))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [file])
    assert tool.license_text() == "of the wheel"
