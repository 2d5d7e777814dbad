"""A GPU that is not there: NVRTC is g++, and the driver runs the kernels by emulator.h.

``pretend`` puts both in the place of ``cuda.bindings``, for tensors on the CPU. Everything from the
choice of a form to the launch is then the code that a GPU gets.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lambda_det.layers.local import compiled as of_cpu
from lambda_det.native import cache, gpu

MISSING = None
if not sys.platform.startswith("linux") or shutil.which("g++") is None:
    MISSING = "the emulator needs Linux and g++"
needs_emulator = pytest.mark.skipif(bool(MISSING), reason=str(MISSING))
EMULATOR = Path(__file__).with_name("emulator.h")
FLAGS = [
    "-O1",
    "-ftree-vectorize",
    "-std=c++17",
    "-Wno-unknown-pragmas",
    "-shared",
    "-fPIC",
    "-DEMULATED",
]


# Libraries by what they are made of: several files of tests, each in a process, take the same
KEPT = Path(__file__).parents[2] / ".pytest_cache" / "emulated"


@functools.cache
def compiled(source: str, options: tuple[str, ...] = ()) -> bytes:
    """A library of the kernels of this text, and of the emulator."""
    flags = [*FLAGS, *options]
    made_of = (EMULATOR.read_text("utf-8"), source, *flags, _version())
    kept = KEPT / hashlib.sha256("\0".join(made_of).encode()).hexdigest()
    with contextlib.suppress(FileNotFoundError):
        return kept.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        text, library = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        text.write_text(f'#include "{EMULATOR}"\n{source}', "utf-8")
        command = ["g++", *flags, str(text), "-o", str(library)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        code = library.read_bytes()
    with contextlib.suppress(OSError):  # a folder that cannot be written
        KEPT.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(code)
        temporary.replace(kept)
    return code


@functools.cache
def _version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout


@functools.cache
def opened(code: bytes) -> ctypes.CDLL:
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(code)
        file.flush()
        library = ctypes.CDLL(file.name)
    library.launch.restype = ctypes.c_char_p
    library.bank_conflicts.restype = ctypes.c_long
    return library


def launch(
    library: ctypes.CDLL,
    name: str,
    programs: int,
    threads: int,
    shared_bytes: int,
    values: tuple[int, ...],
    kinds: tuple[type, ...],
    is_late: bool = False,
) -> str:
    """Run a kernel; what the emulator found wrong."""
    held = [kind(value) for kind, value in zip(kinds, values, strict=True)]
    arguments = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
    function = ctypes.cast(getattr(library, name), ctypes.c_void_p)
    how = programs, threads, shared_bytes, int(is_late)
    return library.launch(function, len(held), arguments, *how).decode()


def fill(buffer: bytes, content: bytes) -> tuple[int]:
    """Write into an object of bytes, as the functions of NVRTC do."""
    address = id(buffer) + bytes.__basicsize__ - 1
    assert len(buffer) >= len(content) and len(buffer) > 1  # Python shares shorter ones
    ctypes.memmove(address, content, len(content))
    return (_Status.SUCCESS,)


# In place of cuda.bindings ------------------------------------------------------------------------


class _Status(IntEnum):
    SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201


class _Names:
    """Stands for an enumeration: each name is its own value."""

    def __getattr__(self, name: str) -> str:
        return name


class Launch(NamedTuple):
    """What the driver was asked to start."""

    name: str
    programs: int
    threads: int
    shared_bytes: int
    stream: int
    values: tuple[int, ...]


class Pretended:
    """A driver and an NVRTC.

    Attributes:
        name, capability: of the GPU.
        multiprocessors: few, so that a program has several tiles.
        shared_bytes: of a program.
        version: of the driver.
        architectures: that NVRTC compiles for.
        compiled: the names of the files that NVRTC compiled.
        launches: what the driver started.
        fault: replaces a text of the source by another before it is compiled.
        has_lost_context: as a new thread has, until a context is made current.
        is_emulated: whether kernels are compiled and run, and not noted alone.
    """

    def __init__(self, is_emulated: bool = True) -> None:
        self.is_emulated = is_emulated
        self.name = "NVIDIA H200"
        self.capability, self.multiprocessors, self.shared_bytes = (9, 0), 3, 227 * 1024
        self.version, self.architectures = 13000, [80, 86, 90, 100, 120]
        self.compiled: list[str] = []
        self.launches: list[Launch] = []
        self.fault: tuple[str, str] | None = None
        self.has_lost_context = False
        self.driver = types.SimpleNamespace(
            CUdevice_attribute=_Names(),
            CUfunction_attribute=_Names(),
            CUresult=_Status,
            **{name: getattr(self, name) for name in dir(self) if name.startswith("cu")},
        )
        self.nvrtc = types.SimpleNamespace(
            **{name: getattr(self, name) for name in dir(self) if name.startswith("nvrtc")}
        )

    # the driver

    def cuInit(self, flags):
        return (_Status.SUCCESS,)

    def cuDriverGetVersion(self):
        return _Status.SUCCESS, self.version

    def cuDeviceGet(self, index):
        return _Status.SUCCESS, index

    def cuDeviceGetAttribute(self, kind, device):
        numbers = {
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": self.capability[0],
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": self.capability[1],
            "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": self.multiprocessors,
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": self.shared_bytes,
        }
        return _Status.SUCCESS, numbers[kind]

    def cuDevicePrimaryCtxRetain(self, device):
        return _Status.SUCCESS, f"context {device}"

    def cuCtxSetCurrent(self, context):
        self.has_lost_context = False
        return (_Status.SUCCESS,)

    def cuModuleLoadData(self, code):
        return _Status.SUCCESS, opened(code) if self.is_emulated else None

    def cuModuleGetFunction(self, module, name):
        return _Status.SUCCESS, (module, name.decode())

    def cuFuncSetAttribute(self, function, kind, number):
        assert kind == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        is_good = number <= self.shared_bytes
        return (_Status.SUCCESS if is_good else _Status.CUDA_ERROR_INVALID_VALUE,)

    def cuLaunchKernel(self, function, x, y, z, threads, ty, tz, shared, stream, parameters, extra):
        if self.has_lost_context:
            return (_Status.CUDA_ERROR_INVALID_CONTEXT,)
        assert (y, z, ty, tz, extra) == (1, 1, 1, 1, 0)
        library, name = function
        self.launches.append(Launch(name, x, threads, shared, stream, parameters[0]))
        if self.is_emulated:
            said = launch(library, name, x, threads, shared, *parameters)
            assert not said, said
        return (_Status.SUCCESS,)

    # NVRTC

    def nvrtcVersion(self):
        return _Status.SUCCESS, 13, 2

    def nvrtcGetSupportedArchs(self):
        return _Status.SUCCESS, self.architectures

    def nvrtcCreateProgram(self, source, name, count, headers, names):
        assert (count, headers, names) == (0, [], [])
        return _Status.SUCCESS, {"source": source.decode(), "name": name.decode()}

    def nvrtcCompileProgram(self, program, count, options):
        options = [option.decode() for option in options]
        assert count == len(options)
        assert options[-1].removeprefix("--gpu-architecture=sm_") in map(str, self.architectures)
        source = program["source"]
        if self.fault:
            assert self.fault[0] in source
            source = source.replace(*self.fault)
        self.compiled.append(program["name"])
        definitions = tuple(x for x in options if x.startswith("-D"))
        is_emulated = self.is_emulated
        program["code"] = compiled(source, definitions) if is_emulated else source.encode()
        return (_Status.SUCCESS,)

    def nvrtcGetProgramLogSize(self, program):
        return _Status.SUCCESS, 1  # the end of an empty text

    def nvrtcGetProgramLog(self, program, buffer):
        return fill(buffer, b"\0")

    def nvrtcGetCUBINSize(self, program):
        return _Status.SUCCESS, len(program["code"])

    def nvrtcGetCUBIN(self, program, buffer):
        return fill(buffer, program["code"])

    def nvrtcDestroyProgram(self, program):
        return (_Status.SUCCESS,)


def forget() -> None:
    """What this process knows of GPUs and has loaded."""
    from lambda_det.layers.local import fused

    of_gpu = gpu._bindings, gpu.describe, gpu.missing, gpu._context
    of_gpu += gpu._folder, gpu._say_that_it_takes_time
    for function in (*of_gpu, fused._load, fused._plans):
        function.cache_clear()
    gpu._codes.clear()
    gpu._unkept.clear()


@contextlib.contextmanager
def pretend(monkeypatch, folder: Path, is_emulated: bool = True):
    """A :class:`Pretended` GPU for tensors on the CPU, which keeps kernels in a folder."""
    machine = Pretended(is_emulated)
    # By the test's own monkeypatch: what a test changes besides is undone before this
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name in ("driver", "nvrtc"):
        monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", getattr(machine, name))
    monkeypatch.setattr(cache, "cache_folder", lambda: folder)
    monkeypatch.setattr(of_cpu, "unsupported", lambda *inputs: "the tensors are on a GPU")
    monkeypatch.setattr(gpu, "index_of", lambda x: 0)
    monkeypatch.setattr(gpu, "device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(gpu, "name_of", lambda index: machine.name)
    monkeypatch.setattr(gpu, "made_current", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(gpu, "stream", lambda device: 7)
    monkeypatch.setattr(gpu, "is_capturing", lambda: False)
    forget()
    yield machine
    forget()
