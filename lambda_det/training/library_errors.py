"""Errors of PyTorch and of the system in a run get the file or key, and what to do.

A library says what value it refuses and seldom the key: "Unknown pooler type: RoIAlign", or an
assertion without a word. The lines that led to the error say the rest: the keys that they read, and
variables that have the name and the value of a key.
"""

from __future__ import annotations

import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from lambda_det.distributed.launch import MAIN_GUARD
from lambda_det.errors import (
    OUT_OF_FILES,
    ConfigError,
    DataError,
    DiskError,
    UserError,
    WeightsError,
    disk_fault,
    is_out_of_files,
    reason,
    suggest,
)
from lambda_det.training.loading import LOADERS_START_BY
from lambda_det.training.run_folder import RunFolder
from lambda_det.training.settings import Settings

Values = Callable[[], Iterable[tuple[str, Any]]]  # of a configuration: its keys with their values

# A process that dies while PyTorch's thread for pinned memory takes a batch ends that thread first
_OF_A_LOADER = re.compile(r"DataLoader (worker|timed out)|Pin memory thread exited")


@contextmanager
def naming_keys(values: Values) -> Iterator[None]:
    """Name the key whose value a library refuses.

    Args:
        values: is called where a library refused one.

    Raises:
        ConfigError: the key, its value, and what is allowed.
    """
    try:
        yield
    except UserError:
        raise
    except REFUSALS as error:
        if (refusal := refused_value(error, values())) is None:
            raise
        raise refusal from error


@contextmanager
def explained(settings: Settings, values: Values = tuple) -> Iterator[None]:
    """The one place where errors of libraries get the keys and the folder of a run, and a cure.

    Args:
        settings: of the run.
        values: see :func:`naming_keys`.

    Raises:
        ConfigError: a library refused the value of a key.
        DataError: a process that loads images has ended or does not answer.
        DiskError: a file cannot be read or written, or no more files can be opened.
    """
    try:
        with naming_keys(values):
            yield
    except UserError:
        raise
    except Exception as error:
        folder, workers = settings.output_dir, settings.key("num_workers")
        if is_out_of_files(error):
            raise DiskError(f"{OUT_OF_FILES} {workers}. {_continuation(folder)}") from error
        if _OF_A_LOADER.match(str(error)):
            # a separate error may say why the process has ended
            is_told = _OF_A_LOADER.match(str(error.__cause__))
            told = reason(error.__cause__ if is_told else error).rstrip(".")
            guard = "" if LOADERS_START_BY == "fork" else f" Or {MAIN_GUARD}."
            raise DataError(
                f"{told}. Lower {workers} where memory is short or too many files are open, set it "
                f"to 0 to see the image, or raise {settings.key('timeout')} where the disk is slow."
                f"{guard} {_continuation(folder)}"
            ) from error
        if (of_system := _os_error(error)) is None:
            raise
        what = of_system.filename or f"A file of the run in {folder}"
        raise _disk_error(what, of_system, folder) from error


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Name the checkpoint that cannot be written or read back.

    Raises:
        DiskError: names the file, the cause and the last good checkpoint.
    """
    try:
        yield
    except (OSError, RuntimeError, WeightsError) as error:  # torch.save hides the first in the next
        what = f"{path} could not be written"
        raise _disk_error(what, _os_error(error) or error, str(Path(path).parent)) from error


def _disk_error(what: str, error: BaseException, folder: str) -> DiskError:
    cause = getattr(error, "strerror", None) or reason(error).rstrip(".")
    return DiskError(f"{what}: {cause}. {_continuation(folder)}")


def _continuation(folder: str) -> str:
    last = RunFolder(folder).last
    good = f"The last good checkpoint is {last}" if last else "There is no checkpoint yet"
    return f"{good}; the same command with --resume continues."


def _os_error(error: BaseException) -> OSError | None:
    """The system's error: this one, or the one that a library turned into it."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return disk_fault(error)


# ----------------------------------------------------------------------- the key of a refused value
# By which libraries refuse a value
REFUSALS = (
    ValueError,
    LookupError,
    AssertionError,
    NotImplementedError,
    OverflowError,
    ZeroDivisionError,
)
_OURS = str(Path(__file__).parents[1])
_MOST_KEYS = 8  # that a sentence names
_MOST_LETTERS = 160  # of the lines that it quotes
_STACK = "Traceback (most recent call last)"
_PLAIN = (str, int, float, list, tuple)  # of the values that a configuration holds


class _Place(NamedTuple):
    """A place in the stack of an error.

    Attributes:
        lines: of the call that failed there.
        variables: of the function, and of its ``self``.
        function: that has the lines, or that read the keys for it.
        module: the name of its package.
    """

    lines: str
    variables: Mapping[str, Any]
    function: Any
    module: str

    @classmethod
    def of(cls, trace: TracebackType) -> _Place:
        frame = trace.tb_frame
        first, last, *_ = list(frame.f_code.co_positions())[trace.tb_lasti // 2]
        lines = linecache.getlines(frame.f_code.co_filename)[(first or 1) - 1 : last]
        variables = {**getattr(frame.f_locals.get("self"), "__dict__", {}), **frame.f_locals}
        function = variables.get("from_config_func", frame.f_code)  # of Detectron2's configurable
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        return cls(" ".join(map(str.strip, lines)), variables, function, module)


def refused_value(error: BaseException, values: Iterable[tuple[str, Any]]) -> ConfigError | None:
    """The sentence about the key whose value a library refused; None where no key has it.

    What this package itself raises is no refusal of a library. Nor is an error of a loader process,
    whose words are a stack: any key in its source lines would be blamed.

    Args:
        error: one of :data:`REFUSALS`, with its traceback.
        values: the keys of the configuration with their values.
    """
    values, places = dict(values), list(_places(error))
    if not places or _STACK in str(error):
        return None
    keys = next(filter(None, _guesses(places, values)), [])
    if not 0 < len(keys) <= _MOST_KEYS:
        return None
    what = " and ".join(f"{key} is {values[key]!r}" for key in keys)
    registered = getattr(places[0].variables.get("self"), "_obj_map", None)
    if registered is not None:
        return ConfigError(
            f"{what}, which is not registered with Detectron2"
            f"{suggest(values[keys[0]], registered)} A name of your own project is registered when "
            "its module is imported (docs/use_in_your_project.md)."
        )
    words = f": {reason(error)}" if re.search("[a-z]{2}", str(error)) else ""
    lines = textwrap.shorten(places[0].lines, _MOST_LETTERS, placeholder=" ...")
    return ConfigError(f"{what}; {places[0].module} refuses it in `{lines}`{words}.")


def _places(error: BaseException) -> Iterator[_Place]:
    """The places in libraries that led to an error, the innermost first, and ours that called."""
    traces, trace = [], error.__traceback__
    while trace is not None:
        traces.append(trace)
        trace = trace.tb_next
    for trace in reversed(traces):
        is_ours = trace.tb_frame.f_code.co_filename.startswith(_OURS)
        if not (is_ours and trace is traces[-1]):
            yield _Place.of(trace)
        if is_ours:
            return


def _guesses(places: list[_Place], values: Mapping[str, Any]) -> Iterator[list[str]]:
    """The keys that may be meant, the best guess first; empty lists among them."""
    for place in places[:2]:
        yield _read(place.lines, values)
    for place in places[:2]:
        words = {*re.findall(r"\w+", place.lines)}
        held = {n: v for n, v in place.variables.items() if n in words and isinstance(v, _PLAIN)}
        named = {(name.split("_")[-1], _plain(value)) for name, value in held.items()}
        last = {key: re.split("[._]", key.lower())[-1] for key in values}
        yield [key for key, value in values.items() if (last[key], _plain(value)) in named]
    for place in places[:4]:  # what was made of a key is refused: one of those that it reads
        if place.module != "lambda_det":
            try:
                yield _read(inspect.getsource(place.function), values)
            except (OSError, TypeError):  # it has no source
                continue
    for place in places[2:4]:
        yield _read(place.lines, values)


def _read(source: str, values: Mapping[str, Any]) -> list[str]:
    """The keys that a source reads, such as ``cfg.MODEL.POINT_HEAD.NUM_CLASSES``."""
    found = dict.fromkeys(re.findall(r"\bcfg\.([A-Z][\w.]+)", source))
    return [key for key in found if key in values]


def _plain(value: Any) -> str:
    """A value for comparisons: 1 is not True, and a tuple is a list."""
    return repr(value).translate({ord("("): "[", ord(")"): "]"})
