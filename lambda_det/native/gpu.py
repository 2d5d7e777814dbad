"""Kernels in CUDA C++, compiled by NVRTC for the GPU that is there when they are first used.

NVRTC and the driver are reached through ``cuda.bindings``, which PyTorch's packages for CUDA bring.
Neither a compiler nor CUDA's toolkit is needed. What was compiled is kept beside the kernels of the
CPU, where that can be written. It must prove itself on the GPU first, because nothing else has run
it there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lambda_det.native import cache

_logger = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)  # of which the kernels have instructions
_OPTIONS = ("-std=c++17",)


class Gpu(NamedTuple):
    """What decides which form of a kernel a GPU runs.

    Attributes:
        capability: its compute capability, such as (9, 0).
        multiprocessors: their number.
        shared_bytes: the most shared memory that one program may have.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int


class Function(NamedTuple):
    """A kernel in a program.

    Attributes:
        name: without mangling.
        threads: of each of the programs that a launch starts.
        shared_bytes: shared memory of each of these programs.
        types: of the arguments, ``ctypes.c_void_p`` for a tensor and ``ctypes.c_int``.
    """

    name: str
    threads: int
    shared_bytes: int
    types: tuple[type, ...]


class Program(NamedTuple):
    """What is compiled at one time.

    Attributes:
        source: of CUDA C++; no headers are there.
        functions: the kernels in it. The first one names the file.
        options: of NVRTC, beside the architecture.
    """

    source: str
    functions: tuple[Function, ...]
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.functions[0].name


class Unavailable(RuntimeError):
    """A kernel cannot be had here, or not be started; the text says why."""


# The driver and NVRTC -----------------------------------------------------------------------------


@functools.cache
def _bindings(name: str) -> ModuleType:
    """The module ``driver`` or ``nvrtc``, with its library."""
    try:
        module = importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        major, _, _ = (torch.version.cuda or "13").partition(".")
        advice = f'pip install "cuda-bindings=={major}.*"'
        raise Unavailable(f"cuda.bindings is not installed ({advice})") from error
    try:  # the library is opened by the first call
        _call(*((module.cuInit, 0) if name == "driver" else (module.nvrtcVersion,)))
    except Unavailable:
        raise
    except Exception as error:
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise Unavailable(f"cuda.bindings finds no library of its {name} ({first})") from error
    return module


def _call(function: Callable, *arguments: Any) -> Any:
    """The results of a function of ``cuda.bindings``: none, one or a tuple."""
    error, *results = function(*arguments)
    if int(error):
        raise Unavailable(f"{function.__name__} says {getattr(error, 'name', int(error))}")
    return results[0] if len(results) == 1 else tuple(results)


@functools.cache
def describe(index: int) -> Gpu:
    """The GPU of this index, as PyTorch counts them.

    Raises:
        Unavailable: the driver cannot be asked.
    """
    driver = _bindings("driver")
    handle = _call(driver.cuDeviceGet, index)
    kinds = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return _call(driver.cuDeviceGetAttribute, kind, handle)

    return Gpu(
        (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        attribute("MULTIPROCESSOR_COUNT"),
        attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    )


def _architecture(capability: tuple[int, int]) -> int:
    """The newest architecture whose machine code this GPU runs, such as 90 for sm_90."""
    nvrtc = _bindings("nvrtc")
    major, minor = capability
    known = [x for x in _call(nvrtc.nvrtcGetSupportedArchs) if x // 10 == major and x % 10 <= minor]
    if not known:
        raise Unavailable(f"this NVRTC compiles nothing for compute capability {major}.{minor}")
    return max(known)


@functools.cache
def missing(index: int) -> str | None:
    """Why this GPU runs no kernels; None if it can. Said once in the log."""
    try:
        if sys.platform == "win32":
            raise Unavailable("kernels are compiled on Linux only")
        if torch.version.hip:
            raise Unavailable("it is no NVIDIA GPU")
        capability = describe(index).capability
        if capability < LEAST_CAPABILITY:
            wanted, found = (".".join(map(str, x)) for x in (LEAST_CAPABILITY, capability))
            raise Unavailable(f"its compute capability is {found}, and the kernels need {wanted}")
        _architecture(capability)
    except Unavailable as why:
        return said(index, str(why))
    except _OTHER_BINDINGS as error:
        return said(index, f"cuda.bindings is of another kind than expected ({error})")
    return None


_OTHER_BINDINGS = AttributeError, TypeError  # of a version that has other names or arguments


def said(index: int, why: str) -> str:
    """The reason, once it is in the log."""
    _logger.warning("On cuda:%d plain PyTorch computes lambda layers, slower: %s", index, why)
    return why


# Compilation --------------------------------------------------------------------------------------


def compile_program(program: Program, architecture: int) -> tuple[bytes, str]:
    """Machine code for an architecture such as 90, and the compiler's words.

    No GPU is needed.

    Raises:
        Unavailable: the compiler refuses it; the log has its words.
    """
    nvrtc = _bindings("nvrtc")
    file = f"{program.name}.cu".encode()
    handle = _call(nvrtc.nvrtcCreateProgram, program.source.encode(), file, 0, [], [])
    try:
        options = [option.encode() for option in _all_options(program, architecture)]
        error, *_ = nvrtc.nvrtcCompileProgram(handle, len(options), options)
        # NVRTC writes into these buffers: bytes of length 1 are shared by all of Python
        said = bytes(_call(nvrtc.nvrtcGetProgramLogSize, handle) + 1)
        _call(nvrtc.nvrtcGetProgramLog, handle, said)
        words = said.decode(errors="replace").strip("\0\n ")
        if int(error):
            _logger.warning("NVRTC: %s", words)
            raise Unavailable(f"NVRTC did not compile {program.name}")
        code = bytes(_call(nvrtc.nvrtcGetCUBINSize, handle))
        _call(nvrtc.nvrtcGetCUBIN, handle, code)
        return code, words
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _all_options(program: Program, architecture: int) -> list[str]:
    return [*_OPTIONS, *program.options, f"--gpu-architecture=sm_{architecture}"]


def _key(index: int, program: Program, architecture: int) -> str:
    """Of everything that decides what is compiled and whether it works."""
    # What was proved on one kind of GPU is proved again on another one of its architecture
    driver, nvrtc = _bindings("driver"), _bindings("nvrtc")
    versions = _call(driver.cuDriverGetVersion), *_call(nvrtc.nvrtcVersion)
    facts = (
        name_of(index),
        *map(str, versions),
        *_all_options(program, architecture),
        program.source,
    )
    return cache.digest("\0".join(facts).encode())


# Kernels ------------------------------------------------------------------------------------------


class Kernel:
    """A function that was loaded to the GPU of this index, from a module of the driver."""

    def __init__(self, index: int, module: Any, function: Function) -> None:
        self._driver = _bindings("driver")
        self._device = device(index)
        self._function = _call(self._driver.cuModuleGetFunction, module, function.name.encode())
        self._shape = 1, 1, function.threads, 1, 1, function.shared_bytes
        self._types = function.types
        attribute = self._driver.CUfunction_attribute
        kind = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call(self._driver.cuFuncSetAttribute, self._function, kind, function.shared_bytes)

    def launch(self, programs: int, *arguments: Tensor | int) -> None:
        """Start programs on the current stream of this GPU, which must be the current one.

        Raises:
            Unavailable: the driver refuses it.
        """
        values = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
        how = programs, *self._shape, stream(self._device), (values, self._types), 0
        (error,) = self._driver.cuLaunchKernel(self._function, *how)
        if error == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            # PyTorch leaves a new thread without a context until it calls CUDA's runtime there
            _make_current(self._device.index)
            (error,) = self._driver.cuLaunchKernel(self._function, *how)
        if int(error):
            raise Unavailable(f"cuLaunchKernel says {getattr(error, 'name', int(error))}")


def index_of(x: Tensor) -> int | None:
    """The index of the GPU that a tensor is on, or None."""
    return (x.device.index or 0) if x.is_cuda else None


def device(index: int) -> torch.device:
    return torch.device("cuda", index)


def name_of(index: int) -> str:
    """Such as NVIDIA H200."""
    return torch.cuda.get_device_name(index)


def made_current(index: int) -> AbstractContextManager:
    """A context in which this GPU is the current one."""
    return torch.cuda.device(index)


def stream(device: torch.device) -> int:
    """PyTorch's current stream."""
    return torch.cuda.current_stream(device).cuda_stream


def is_capturing() -> bool:
    """Whether a CUDA graph records what is launched now."""
    return torch.cuda.is_current_stream_capturing()


@functools.cache
def _context(index: int) -> Any:
    driver = _bindings("driver")
    return _call(driver.cuDevicePrimaryCtxRetain, _call(driver.cuDeviceGet, index))


def _make_current(index: int) -> None:
    driver = _bindings("driver")
    _call(driver.cuCtxSetCurrent, _context(index))


def load(
    index: int, program: Program, prove: Callable[[Sequence[Kernel]], str | None]
) -> list[Kernel]:
    """The kernels of a program on a GPU, from the cache, or compiled and proved.

    Args:
        index: of the GPU, which must be the current one.
        program: what is compiled.
        prove: says what is wrong with the kernels; None if nothing is. It is asked of what was
            compiled now. What is in the cache has passed.

    Raises:
        Unavailable: they cannot be compiled or loaded, or are wrong.
        RuntimeError: a CUDA graph is being recorded, which cannot hold this.
    """
    if is_capturing():
        raise RuntimeError(
            "Kernels of lambda layers are loaded when they are first used, which a CUDA graph "
            "cannot record: run the same step once before the capture."
        )
    try:
        code = _code(index, program)
        kernels = _kernels(index, program, code.text)
        if code.is_new:
            if wrong := prove(kernels):
                raise Unavailable(f"{program.name} computes wrong numbers here ({wrong})")
            _keep(code)
        return kernels
    except _OTHER_BINDINGS as error:
        raise Unavailable(f"cuda.bindings is of another kind than expected ({error})") from error


def compile_together(index: int, programs: Sequence[Program]) -> None:
    """Compile programs side by side, because NVRTC needs a second or two for each.

    What fails is met again, and said, by :func:`load`.
    """
    new = [program for program in programs if (index, program) not in _codes]
    if len(new) < 2 or is_capturing():
        return
    with ThreadPoolExecutor(len(new)) as pool:
        for future in [pool.submit(_code, index, program) for program in new]:
            future.exception()


class _Code(NamedTuple):
    """Machine code."""

    name: str  # of its file
    text: bytes  # what the driver loads
    is_new: bool  # compiled now, and not found in the cache


_codes: dict[tuple[int, Program], _Code] = {}  # of the GPUs of this process


def _code(index: int, program: Program) -> _Code:
    """The machine code of a program, from the cache, or compiled now."""
    if (index, program) not in _codes:
        architecture = _architecture(describe(index).capability)
        name = f"{program.name}_sm_{architecture}_{_key(index, program, architecture)}"
        text = _kept(name)
        is_new = text is None
        if is_new:
            _say_that_it_takes_time()
            text, _ = compile_program(program, architecture)
        _codes[index, program] = _Code(name, text, is_new)
    return _codes[index, program]


@functools.cache
def _say_that_it_takes_time() -> None:
    _logger.info("Compiling kernels of lambda layers for this GPU, once; some 15 s")


# What cannot be kept is compiled by each process, which costs seconds and no kernels


_folder = functools.cache(cache.own_folder)
_unkept: list[Exception] = []  # what was in the way; the first reason is said


@contextlib.contextmanager
def _if_it_can_be_kept() -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _unkept.append(error)
        if _unkept[0] is error:  # also where several threads come here at once
            _logger.warning("Kernels of the GPU are compiled for this process alone: %s", error)


def _kept(name: str) -> bytes | None:
    """What the cache has by this name."""
    with _if_it_can_be_kept():
        if (folder := _folder()) and (file := cache.find(folder, name, ".cubin")):
            return file.read_bytes()
    return None


def _keep(code: _Code) -> None:
    with _if_it_can_be_kept():
        if folder := _folder():
            cache.keep(folder, code.name, ".cubin", code.text)


def _kernels(index: int, program: Program, code: bytes) -> list[Kernel]:
    driver = _bindings("driver")
    _make_current(index)
    try:
        module = _call(driver.cuModuleLoadData, code)
    except Unavailable as why:
        raise Unavailable(f"the driver is perhaps too old for this NVRTC ({why})") from why
    return [Kernel(index, module, function) for function in program.functions]


@functools.cache
def source(name: str) -> str:
    """The text of a file of this folder."""
    return (Path(__file__).parent / name).read_text("utf-8")
