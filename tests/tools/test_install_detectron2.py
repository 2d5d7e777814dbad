import csv
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.tool import load_tool

tool = load_tool("install_detectron2")
NotInstalled = load_tool("install_detectron2").NotInstalled


@pytest.fixture
def carrier(tmp_path, monkeypatch):
    """A small wheel in the form of the one on PyPI, whose checksum the tool expects."""
    files = {
        "LabGym/__init__.py": "raise ImportError('not ours')\n",
        "LabGym/detectron2/__init__.py": "from LabGym.detectron2.utils import NAME\n"
        '__version__ = "0.6"\n',
        "LabGym/detectron2/utils/__init__.py": "NAME = __name__\n",
        "LabGym/detectron2/model_zoo/configs/a.yaml": "_BASE_: LabGym.detectron2.b\n",
        "labgym-3.1.2.dist-info/METADATA": "Name: LabGym\n",
    }
    wheel = tmp_path / "labgym-3.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("LabGym/detectron2/utils/", "")
        for name, text in files.items():
            archive.writestr(name, text)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(tool, "CARRIER_SHA256", digest)
    return wheel


@pytest.fixture
def nothing_there(monkeypatch):
    """A Python with every dependency and no Detectron2; what pip is asked for is kept."""
    calls = []
    monkeypatch.setattr(tool, "check_dependencies", lambda: None)
    monkeypatch.setattr(tool, "find_installed", lambda: None)
    monkeypatch.setattr(tool, "pip", lambda *arguments: calls.append(arguments) or "")
    monkeypatch.setattr(tool, "verify_or_remove", lambda: None)
    return calls


def fake_git(folder: Path, script: str, monkeypatch) -> None:
    git = folder / "bin" / "git"
    git.parent.mkdir()
    git.write_text(f"#!/bin/sh\n{script}\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{git.parent}{os.pathsep}{os.environ['PATH']}")


def test_repack_restores_the_import_name_everywhere(carrier, tmp_path):
    with zipfile.ZipFile(tool.repack(carrier, tmp_path)) as wheel:
        names = set(wheel.namelist())
        code = {name: wheel.read(name) for name in names if name.startswith("detectron2/")}
    assert {name.split("/")[0] for name in names} == {"detectron2", "detectron2-0.6.dist-info"}
    assert code["detectron2/__init__.py"].startswith(b"from detectron2.utils import NAME\n")
    assert code["detectron2/model_zoo/configs/a.yaml"] == b"_BASE_: detectron2.b\n"
    assert not any(b"LabGym" in text for text in code.values())


def test_repack_writes_metadata_licence_and_origin(carrier, tmp_path):
    with zipfile.ZipFile(tool.repack(carrier, tmp_path)) as wheel:
        info = "detectron2-0.6.dist-info/"
        metadata = Parser().parsestr(wheel.read(info + "METADATA").decode())
        licence = wheel.read(info + "LICENSE").decode()
        notice = wheel.read(info + "NOTICE").decode()
    assert (metadata["Name"], metadata["Version"]) == ("detectron2", "0.6")
    assert metadata["License"] == "Apache-2.0"
    assert "pycocotools>=2.0.2" in metadata.get_all("Requires-Dist")
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence
    assert "labgym 3.1.2" in notice and "SHA-256" in notice


def test_repack_records_every_file_with_its_hash(carrier, tmp_path):
    with zipfile.ZipFile(tool.repack(carrier, tmp_path)) as wheel:
        rows = list(csv.reader(io.StringIO(wheel.read("detectron2-0.6.dist-info/RECORD").decode())))
        assert sorted(row[0] for row in rows) == sorted(wheel.namelist())
        for name, digest, size in rows[:-1]:
            content = wheel.read(name)
            assert int(size) == len(content)
            assert digest == tool.record_hash(content)
    assert rows[-1][1:] == ["", ""]
    # The example of the wheel specification's hash form: urlsafe base64 without padding.
    assert tool.record_hash(b"") == "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"


def test_pip_installs_the_result(carrier, tmp_path):
    wheel, site = tool.repack(carrier, tmp_path), tmp_path / "site"
    tool.pip("install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    code = "import detectron2, importlib.metadata as m; print(m.version('detectron2'))"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    answer = subprocess.run(
        [sys.executable, "-c", code + "; print(detectron2.NAME, detectron2.__file__)"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split() == [
        "0.6",
        "detectron2.utils",
        str(site / "detectron2" / "__init__.py"),
    ]


def test_a_changed_carrier_is_refused(carrier, tmp_path):
    carrier.write_bytes(carrier.read_bytes() + b"\0")
    with pytest.raises(NotInstalled, match="SHA-256"):
        tool.repack(carrier, tmp_path)
    assert not list(tmp_path.glob("detectron2-*"))


def test_an_importable_detectron2_is_left_alone(monkeypatch, capsys):
    def refuse(*arguments):
        raise AssertionError("pip was called")

    monkeypatch.setattr(tool, "pip", refuse)
    assert tool.install("auto")
    assert capsys.readouterr().out.endswith("is importable: nothing to install.\n")


def test_a_broken_detectron2_is_named_and_left_alone(tmp_path, monkeypatch, capsys):
    package = tmp_path / "detectron2"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(tool, "pip", lambda *arguments: pytest.fail("pip was called"))
    assert not tool.install("auto")
    message = capsys.readouterr().err
    assert str(package) in message and "no_such_module_anywhere" in message
    assert message.count("\n") == 1


def test_missing_dependencies_are_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "omegaconf.py").write_text("raise ImportError('No module named omegaconf')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not tool.install("auto")
    assert "pip install -r requirements.txt" in capsys.readouterr().err


def test_git_comes_first(nothing_there, tmp_path, monkeypatch, capsys):
    fake_git(tmp_path, "exit 0", monkeypatch)
    assert tool.install("auto")
    assert nothing_there == [
        (
            "install",
            "--no-build-isolation",
            "--no-deps",
            f"git+{tool.GIT_URL}@{tool.GIT_COMMIT}",
        )
    ]
    assert "installed: built from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'fatal: Could not resolve host: github.com' >&2; exit 128", "Could not resolve"),
        ("exec sleep 60", "no answer"),
        (None, "git is not installed"),
    ],
    ids=["unreachable", "silent", "missing"],
)
def test_without_git_the_wheel_is_taken(
    script, reason, nothing_there, carrier, tmp_path, monkeypatch, capsys
):
    if script is None:
        monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    else:
        fake_git(tmp_path, script, monkeypatch)
    monkeypatch.setattr(tool, "GIT_PROBE_SECONDS", 0.5)
    monkeypatch.setattr(tool, "download_carrier", lambda folder: carrier)
    assert tool.install("auto")
    assert [call[:3] for call in nothing_there] == [("install", "--no-deps", "--no-index")]
    output = capsys.readouterr()
    first, second = output.out.splitlines()
    assert reason in first and "labgym 3.1.2" in second
    assert not output.err


def test_a_failed_build_falls_through_to_the_wheel(
    nothing_there, carrier, tmp_path, monkeypatch, capsys
):
    fake_git(tmp_path, "exit 0", monkeypatch)
    monkeypatch.setattr(tool, "download_carrier", lambda folder: carrier)

    def pip(*arguments):
        if "--no-build-isolation" in arguments:
            raise NotInstalled("error: command 'g++' failed: No such file or directory")
        return ""

    monkeypatch.setattr(tool, "pip", pip)
    assert tool.install("auto")
    assert "from git: error: command 'g++' failed" in capsys.readouterr().out


def test_nothing_reachable_ends_in_one_sentence(nothing_there, tmp_path, monkeypatch, capsys):
    fake_git(tmp_path, "exit 128", monkeypatch)

    def pip(*arguments):
        raise NotInstalled("ERROR: No matching distribution found for labgym==3.1.2")

    monkeypatch.setattr(tool, "pip", pip)
    assert not tool.install("auto")
    output = capsys.readouterr()
    assert "labgym==3.1.2" in output.out
    assert output.err.startswith("error: ") and output.err.count("\n") == 1


def test_an_installation_that_does_not_import_is_removed(monkeypatch):
    calls = []

    def broken():
        raise NotInstalled("cannot be imported")

    monkeypatch.setattr(tool, "find_installed", broken)
    monkeypatch.setattr(tool, "pip", lambda *arguments: calls.append(arguments))
    with pytest.raises(NotInstalled):
        tool.verify_or_remove()
    assert calls == [("uninstall", "--yes", "detectron2")]


def test_the_telling_line_of_a_long_output():
    output = "Collecting x\nfatal: no route\n\n[notice] A new release of pip is available\n"
    assert tool.last_line(output) == "fatal: no route"
    assert tool.last_line("\n") == "no message"
