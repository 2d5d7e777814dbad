"""Threads, decided before PyTorch is loaded (as tests/test_imports.py sees), and kept memory."""

import os
import platform
import subprocess
import sys

import pytest

from lambda_det import process

OURS = {"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "50000\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_container(tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert process.cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("users", "loaded", "expected"),
    [
        ({}, False, OURS),
        ({}, True, {}),
        ({"OMP_WAIT_POLICY": "active"}, False, {"OMP_NUM_THREADS": "1"}),
        ({"GOMP_SPINCOUNT": "5"}, False, {**OURS, "GOMP_SPINCOUNT": "5"}),
        ({"OMP_NUM_THREADS": "3"}, False, {**OURS, "OMP_NUM_THREADS": "3"}),
    ],
)
def test_what_the_user_has_set_stays(monkeypatch, users, loaded, expected):
    environment = dict(users)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(process, "cpu_quota", lambda: 1)
    if not loaded:
        monkeypatch.delitem(sys.modules, "torch")
    process.settle_threads()
    assert environment == users | expected


# ---- freed memory is kept where glibc allocates, and not where the switch is off

# Loaded by its path, without the package: the process does not need PyTorch. It counts the pages
# that the system hands out while the same maps are made and freed over and over.
PROGRAM = """
import ctypes, importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("memory", sys.argv[1])
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)
print(memory.keep_memory())
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def step():
    for size in (3, 70, 9):
        block = libc.malloc(size * 2**20)
        ctypes.memset(block, 1, size * 2**20)
        libc.free(ctypes.c_void_p(block))

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step(), step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize("switch", ["1", "0"])
def test_maps_of_a_second_step_need_no_new_pages(switch):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, process.__file__],
        env={**os.environ, process.SWITCH: switch},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = result.stdout.split()
    assert kept == str(switch == "1")
    assert (int(faults) < 100) == (switch == "1")
