"""Freed memory is kept where glibc allocates, and not where the switch is off."""

import os
import platform
import subprocess
import sys

import pytest

from lambda_det.distributed import memory

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
        [sys.executable, "-c", PROGRAM, memory.__file__],
        env={**os.environ, memory.SWITCH: switch},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = result.stdout.split()
    assert kept == str(switch == "1")
    assert (int(faults) < 100) == (switch == "1")
