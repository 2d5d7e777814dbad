"""Kernels are built once, whole or not at all, for this processor; or there are none."""

import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from lambda_det import native
from lambda_det.errors import ConfigError
from lambda_det.layers.local import local_position_output
from lambda_det.native import cache, compiling
from tests.native import one_kernel

NO_KERNEL = native.missing()
needs_kernel = pytest.mark.skipif(bool(NO_KERNEL), reason=str(NO_KERNEL))
INPUTS = [torch.ones(1, 9, 9, 1, 2), torch.ones(1, 9, 9, 2, 1), torch.ones(2, 1, 3, 3)]


_run = compiling.run
_objects: dict[tuple[str, ...], bytes] = {}


def _run_once(command: list[str]) -> str:
    """As compiling.run, but what these tests have compiled by the same words comes from memory."""
    if "-c" not in command:
        return _run(command)
    *words, output = command
    if tuple(words) not in _objects:
        _run(command)
        _objects[tuple(words)] = Path(output).read_bytes()
    Path(output).write_bytes(_objects[tuple(words)])
    return ""


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No kernel in this process, and none on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiling, "run", _run_once)
    monkeypatch.setattr(compiling, "files", one_kernel.files)
    monkeypatch.setattr(compiling, "FLAGS", one_kernel.FLAGS)
    native._library.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    native._library.cache_clear()


def _script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def _opened(path, mode):
    path.chmod(mode)


def _linked(path, mode):
    """A link in a folder of this mode, to the folder that it stands for."""
    path.rename(path.with_name("elsewhere"))
    path.parent.chmod(mode)
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.posix
@pytest.mark.parametrize(
    ("change", "name", "mode"),
    [
        (_opened, "cache", 0o770),
        (_opened, "cache/lambda_det", 0o702),
        (_opened, "cache/lambda_det", 0o1777),  # where others may add files
        (_linked, "cache/lambda_det", 0o777),
    ],
)
def test_a_cache_that_others_can_change_is_not_used(
    change, name, mode, fresh, machine, monkeypatch, caplog
):
    kept = native._build(["g++"])
    change(fresh / name, mode)
    monkeypatch.setattr(tempfile, "tempdir", str(fresh))
    again = native._build(["g++"])
    assert again.parent.parent == fresh and again.parent.name not in ("cache", "elsewhere")
    assert list(kept.parent.iterdir()) == [kept] and "XDG_CACHE_HOME" in caplog.text


@pytest.mark.posix
def test_a_folder_in_one_with_the_sticky_bit_is_as_good(fresh, machine):
    (fresh / "cache").mkdir()
    (fresh / "cache").chmod(0o1777)
    assert native._build(["g++"]).parent == fresh / "cache" / "lambda_det"
    assert stat.S_IMODE((fresh / "cache" / "lambda_det").stat().st_mode) == 0o700


@pytest.mark.posix
@pytest.mark.parametrize("place", ["cache", "cache/lambda_det", "library", "open library"])
def test_what_another_user_has_or_can_write_is_not_taken(place, fresh, machine, monkeypatch):
    """As root would find it in the home of a user."""
    library = native._build(["g++"])
    foreign = library if place == "library" else fresh / place
    if place == "open library":
        library.chmod(0o620)
    real = Path.lstat

    def lstat(path):
        about = real(path)
        if path != foreign:
            return about
        return os.stat_result((*about[:4], about.st_uid + 1000, *about[5:]))

    monkeypatch.setattr(Path, "lstat", lstat)
    replaced = []
    replace = os.replace
    monkeypatch.setattr(cache.os, "replace", lambda *x: replaced.append(x) or replace(*x))
    again = native._build(["g++"])
    assert len(replaced) == 1
    assert (again.parent == library.parent) == ("library" in place)


@pytest.mark.posix
def test_without_a_private_place_there_are_no_kernels(fresh, machine, monkeypatch, caplog):
    for name in ("cache", "temporary"):
        (fresh / name).mkdir()
        (fresh / name).chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(fresh / "temporary"))
    assert native.missing() and "TMPDIR" in caplog.text
    assert not [*(fresh / "temporary").iterdir()]


# What the compiler does; the file is the one after -o
BROKEN = {
    "fails": "echo such an old compiler >&2; exit 1",
    "says it in another encoding": "printf 'na\\357ve \\377' >&2; exit 1",
    "makes rubbish": 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo x > "$2"; shift; done',
}


@pytest.mark.parametrize("kind", ["missing", "open quote", "no room", "no home", *BROKEN])
def test_without_a_working_compiler_auto_takes_another_form(kind, fresh, monkeypatch, caplog):
    compiler = {"missing": str(fresh / "none"), "open quote": "g++ '"}.get(kind, "g++")
    if kind in BROKEN:
        compiler = _script(fresh / "compiler", BROKEN[kind])
    elif kind == "no room":
        (fresh / "cache").write_text("a file where the folder should be")
    elif kind == "no home":  # as for a user that the machine does not know, with HOME unset
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(Path, "home", _homeless)
    if compiler == "g++" and NO_KERNEL:
        pytest.skip(NO_KERNEL)
    monkeypatch.setenv("CXX", compiler)
    expected = local_position_output(*INPUTS, "query_first")
    torch.testing.assert_close(local_position_output(*INPUTS), expected)
    with pytest.raises(ConfigError, match="'compiled'") as raised:
        local_position_output(*INPUTS, "compiled")
    assert compiler in str(raised.value) or "g++" in str(raised.value)
    assert ("such an old compiler" in caplog.text) is (kind == "fails")


def _homeless():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.slow
@pytest.mark.posix
@needs_kernel
def test_it_runs_on_the_threads_of_pytorch_and_leaves_no_file_where_none_is_safe(
    fresh, monkeypatch
):
    """It calls OpenMP, and brings no library of its own for that. The compiler has arguments.

    Where others can write to the cache, a folder of this process alone has it until it is loaded.
    """
    monkeypatch.setenv("CXX", "env g++ -g0")
    assert native.missing() is None
    (library,) = (fresh / "cache" / "lambda_det").iterdir()
    content = library.read_bytes()
    assert b"libgomp" not in content and b"libomp" not in content
    assert b"GOMP_parallel" in content or b"__kmpc_fork_call" in content
    (fresh / "cache").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(fresh))
    native._library.cache_clear()
    local_position_output(*INPUTS, "compiled")
    assert [*fresh.iterdir()] == [fresh / "cache"]


class _Machine:
    """A processor and a compiler for it, in place of compiling.run."""

    def __init__(self):
        self.processor, self.folder, self.compiled = "old", None, 0

    def __call__(self, command):
        if self.folder is not None:
            assert not list(self.folder.glob("*.so"))
        if "-dM" in command:
            return self.processor if "-march=native" in command else "any"
        assert not list(Path(command[command.index("-o") + 1]).parent.glob("kernels*"))
        Path(command[command.index("-o") + 1]).write_text(self.processor)
        self.compiled += 1
        return ""


@pytest.fixture
def machine(fresh, monkeypatch):
    machine = _Machine()
    monkeypatch.setattr(compiling, "run", machine)
    return machine


def test_another_source_flag_or_processor_is_another_kernel(machine, fresh, monkeypatch):
    """A change of the file, or a home shared by two machines, must not bring the wrong code."""
    built = [native._build(["g++"])]
    before = machine.compiled
    built.append(native._build(["g++"]))
    assert built[0] == built[1] and machine.compiled == before
    machine.processor = "new"
    built.append(native._build(["g++"]))
    monkeypatch.setattr(compiling, "FLAGS", [*compiling.FLAGS, "-O1"])
    built.append(native._build(["g++"]))
    monkeypatch.setattr(compiling, "files", lambda suffix: sorted(fresh.glob(f"*{suffix}")))
    for name in ("other.cpp", "other.h"):
        (fresh / name).write_text("// changed")
        built.append(native._build(["g++"]))
    assert len(set(built)) == 5
    assert [x.read_text() for x in built] == ["old", "old", "new", "new", "new", "new"]


def test_a_kernel_appears_whole_or_not_at_all(machine, fresh, monkeypatch):
    """Nothing lies under the final name while the compiler and the linker write."""
    machine.folder = fresh / "cache" / "lambda_det"
    moved, replace = [], cache.os.replace
    monkeypatch.setattr(cache.os, "replace", lambda *x: moved.append(x) or replace(*x))
    library = native._build(["g++"])
    ((origin, target),) = moved
    assert target == library and library.parent == machine.folder
    # Within one file system, so that the renaming is one step
    assert machine.folder in Path(origin).parents
    assert list(machine.folder.iterdir()) == [library]
