"""The folder of a run: where its parts are, how each is read, and which checkpoint counts."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from filelock import FileLock, Timeout

from lambda_det.config import leaves, read_plain
from lambda_det.errors import ConfigError, DataError, WeightsError, listed, printable, refused
from lambda_det.files import TEMPORARY, replace_text
from lambda_det.weights.formats import read_checkpoint

logger = logging.getLogger(__name__)

CONFIG, LOG, METRICS = "config.yaml", "log.txt", "metrics.json"
PUSHED = "model.safetensors"  # the only weights in a folder that lambda-det push wrote
_POINTER = "last_checkpoint"
FINAL = "model_final.pth"
_BEST = "model_best.pth"
_NUMBERED = re.compile(r"model_(\d{7,})\.pth")
_ORIGIN = "# --config-file "  # the first line of a config.yaml
_WARNING = re.compile(r"\[[^\]]*\] [\w.]+ (?:WARNING|ERROR|CRITICAL): (.*)")
# Loader processes of a killed run hold its lock until they end as well
_SECONDS_TO_LOCK = 2.0
# On file systems without locks, newer versions of filelock would use a plain file as the lock,
# which a killed run leaves behind
_IS_NEW = "fallback_to_soft" in inspect.signature(FileLock.__init__).parameters
_NOT_SET = "not set"  # the value of a key that a configuration does not have

Change = tuple[str, Any, Any]  # key, value in the saved config.yaml, value now


class Checkpoint(NamedTuple):
    """A checkpoint of a run, read and verified.

    Attributes:
        path: of the file.
        content: the network's state dict under "model", the states of training beside it.
    """

    path: str
    content: dict[str, Any]


class RunFolder:
    """The folder of a run, which need not exist, or of an evaluation.

    Attributes:
        path: of the folder.
        config_file, metrics_file: in it, where they are there.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.config_file, self.metrics_file = self.path / CONFIG, self.path / METRICS

    @property
    def holds_run(self) -> bool:
        """Whether a training wrote into it."""
        names = (_POINTER, METRICS, "*.pth")
        return any(any(self.path.glob(name)) for name in names)

    @property
    def has_own_config(self) -> bool:
        """Whether its config.yaml is of a run or an evaluation, or was pushed, and is no user's."""
        written = self.holds_run or any((self.path / name).is_file() for name in (LOG, PUSHED))
        return written and self.config_file.is_file()

    def refuse_other_run(self) -> None:
        """Refuse to begin a run or an evaluation in a folder that holds a run.

        Raises:
            ConfigError: it holds a run.
        """
        if self.holds_run:
            raise ConfigError(
                f"{self.path} already holds a run: give another --output, or continue the run by "
                "train --resume."
            )

    def describe(self) -> str:
        """One line on where the results are, and how to look at them."""
        where = (
            f"Log, configuration, metrics and results are in {self.path}; lambda-det report "
            f"{self.path} makes a page of them"
        )
        return f"{where}; the last checkpoint is {self.last}" if self.last else where

    # ------------------------------------------------------------------------------- configuration
    def config(self) -> dict[str, Any]:
        """The configuration that the run saved, as plain values.

        Raises:
            DataError: it is no folder of a run.
        """
        self.refuse_no_config()
        what = f"{self.config_file} cannot be read"
        advice = "give the folder of a training or an evaluation"
        errors = (OSError, ValueError, yaml.YAMLError)  # bytes that are no UTF-8 are a ValueError
        with refused(DataError, what, advice, *errors):
            config = read_plain(self.config_file.read_text("utf-8"))
            if not isinstance(config, dict):
                raise ValueError(f"{CONFIG} has no keys")
            return config

    def refuse_no_config(self) -> None:
        """
        Raises:
            DataError: it is the folder of neither a run nor an evaluation.
        """
        if not self.config_file.is_file():
            raise DataError(
                self._such_below(CONFIG)
                or f"{self.path} is not the folder of a run or an evaluation: it has no {CONFIG}."
            )

    def _such_below(self, pattern: str) -> str:
        """A sentence on the folders below that have such a file; "" where there are none."""
        folders = sorted({file.parent for file in self.path.glob(f"*/{pattern}")})
        named = f"{self.path} is not the folder of a run; in it there is {listed(folders, 5)}."
        return named if folders else ""

    def changed_keys(self, config: str) -> Iterator[Change]:
        """Yield the keys that differ between a configuration and the saved one, if there is one.

        A key that only one of them has is a setting with its default, as of another version. Only
        in a node of a LazyConfig, which calls its ``_target_``, it is an argument and so a
        difference.

        Args:
            config: as YAML.

        Raises:
            DataError: the file is not a configuration.
        """
        if not self.config_file.exists():
            return
        before, after = dict(leaves(self.config())), dict(leaves(read_plain(config)))
        before.pop("RECIPE.KEEP", None)  # which keys were typed, and not what they are
        for key in after | before:
            then, now = before.get(key, _NOT_SET), after.get(key, _NOT_SET)
            if then != now and (_NOT_SET not in (then, now) or _is_argument(key, before | after)):
                yield key, then, now

    def save_config(self, config: str, file: str | None = None) -> None:
        """Write a configuration into the folder, which must be there.

        Args:
            config: as YAML.
            file: that it was read from, which the first line names.
        """
        own = os.path.realpath(self.config_file)
        if file and self.config_file.exists() and own == os.path.realpath(file):
            file = self.config_origin()  # this is --resume with the run's own configuration
        origin = f"{_ORIGIN}{printable(os.path.abspath(file))}\n" if file else ""
        replace_text(self.config_file, origin + config)

    def config_origin(self) -> str:
        """The file that the configuration was read from; "" where config.yaml names none."""
        with self.config_file.open(encoding="utf-8") as file:
            first = file.readline().rstrip("\n")
        return first.removeprefix(_ORIGIN) if first.startswith(_ORIGIN) else ""

    # ----------------------------------------------------------------------------- metrics and log
    def metrics(self) -> list[dict[str, float]]:
        """The lines of metrics.json; none where there is no such file.

        Lines that are none of a step are left out; a warning names them, except a last one, which
        a kill may have cut short.
        """
        if not self.metrics_file.is_file():
            return []
        metrics, texts = [], self.metrics_file.read_text("utf-8").splitlines()
        for number, text in enumerate(texts, 1):
            try:
                line = json.loads(text)
                line["iteration"] + 1
                metrics.append(line)
            except (ValueError, TypeError, KeyError):
                if number < len(texts):
                    logger.warning(f"Line {number} of {self.metrics_file} is damaged, and left out")
        return metrics

    def cut_metrics(self, first_iteration: int) -> None:
        """Drop from metrics.json what a resumed run computes again, and incomplete lines."""
        if self.metrics_file.exists():
            kept = [line for line in self.metrics() if line["iteration"] < first_iteration]
            lines = [json.dumps(line, sort_keys=True) + "\n" for line in kept]
            replace_text(self.metrics_file, "".join(lines))

    def warnings(self) -> list[tuple[str, int]]:
        """The warnings and errors in log.txt, with their counts, in their order.

        Warnings that differ only in numbers, such as the number of a step, are counted together,
        and the first one stands for all. Of a text of several lines it is the first line. Without a
        log there are none.
        """
        if not (self.path / LOG).is_file():
            return []
        alike: defaultdict[str, list[str]] = defaultdict(list)
        with (self.path / LOG).open(encoding="utf-8", errors="backslashreplace") as lines:
            for match in filter(None, map(_WARNING.match, lines)):
                alike[re.sub(r"\d[\d.,]*", "0", match[1])].append(match[1])
        return [(texts[0], len(texts)) for texts in alike.values()]

    # --------------------------------------------------------------------------------- checkpoints
    @property
    def last(self) -> str:
        """The checkpoint that the pointer names; "" where it names none.

        The file need be neither there nor whole: :meth:`read_newest` looks.
        """
        try:
            name = (self.path / _POINTER).read_bytes().decode("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""
        # Detectron2 and we write the name of a file beside it, and nothing else
        plain = name.isprintable() and os.path.basename(name) == name and name not in (".", "..")
        return str(self.path / name) if name and plain and len(name) < 256 else ""

    def choose(self, which: str = "best") -> str:
        """The checkpoint that a user asks for; "" where there is none.

        Args:
            which: "best" for the best at the evaluations, or the last one where there is no
                model_best.pth (in a folder of ``lambda-det push``, its weights); "last"; or the
                number of steps after which it was saved.

        Raises:
            WeightsError: there is no checkpoint of that step, or ``which`` is something else.
        """
        if which == "last":
            return self.last
        if which == "best":
            named = (self.path / _BEST, Path(self.last or self.path / PUSHED))
            return next((str(path) for path in named if path.is_file()), self.last)
        # model_0000099.pth is saved after 100 steps
        steps = {str(iteration_of(path.name) + 1): path for path in self.numbered()}
        if which not in steps:
            raise WeightsError(
                f"{self.path} has no checkpoint {which!r}; choose best, last, or one of the steps "
                f"{listed(steps, 10)}."
            )
        return str(steps[which])

    def lost(self) -> WeightsError:
        """The error of a run whose checkpoints have other names than its pointer says."""
        there = listed(file.name for file in sorted(self.path.glob("*.pth")))
        return WeightsError(
            f"The checkpoint that {self.path / _POINTER} names is not there "
            f"({self.last or 'it names none'}): write the name of one of the folder into it "
            f"({there}), or start again in another folder."
        )

    def refuse_no_run(self) -> None:
        """
        Raises:
            WeightsError: there is no checkpoint of any kind, so there is no run to go on with.
        """
        if not (self.last or any(self.path.glob("*.pth")) or (self.path / PUSHED).is_file()):
            raise WeightsError(
                self._such_below("*.pth")
                or f"{self.path} has no checkpoint: no training was started there, or it has saved "
                f"none yet; start one with lambda-det train --data DIR --output {self.path}."
            )

    def numbered(self, last: float = math.inf) -> list[Path]:
        """Checkpoints by their iteration, oldest first; up to iteration ``last`` if it is given.

        Later ones are there when somebody went back to an older one.
        """
        steps = {path: iteration_of(path.name) for path in self.path.glob("*.pth")}
        kept = [path for path, step in steps.items() if 0 <= step <= last]
        return sorted(kept, key=steps.get)

    def candidates(self) -> list[Path]:
        """The checkpoints from which the run may be continued, best first.

        These are the one that the pointer names, and those before it. Where the pointer names no
        existing file, they are all of the run, the last written first.
        """
        if os.path.isfile(self.last):
            named = Path(self.last)
            iteration = iteration_of(named.name)
            before = self.numbered(iteration if iteration >= 0 else math.inf)
            return [named, *(path for path in reversed(before) if path.name != named.name)]
        checkpoints = self.numbered()[::-1]
        final = self.path / FINAL
        if final.is_file():
            # A run that was made longer has numbered checkpoints that are newer.
            newer = [path for path in checkpoints if path.stat().st_mtime > final.stat().st_mtime]
            checkpoints.insert(len(newer), final)
        return checkpoints

    def read_newest(self) -> Checkpoint | None:
        """Read the newest checkpoint that is whole; None where the run has none.

        That is the one the pointer names, or the newest numbered one before it. A warning says why
        another is taken than the pointer names.

        Raises:
            WeightsError: there are checkpoints, or the pointer says so, and none is whole.
        """
        refusals: list[str] = []
        for path in self.candidates():
            try:
                content = read_checkpoint(path)
                check_model(content, path)
            except WeightsError as error:
                refusals.append(str(error))
                continue
            if str(path) != self.last:
                pointer = self.path / _POINTER
                why = " ".join(refusals) or f"{pointer} names no checkpoint that is there."
                logger.warning(f"{why} Instead {path} is taken, the newest that is whole")
            return Checkpoint(str(path), content)
        if refusals:
            raise WeightsError(
                f"No checkpoint in {self.path} is whole: {' '.join(refusals)} Write the name of "
                f"another file of the folder into {_POINTER}, or start again in another folder."
            )
        if self.last or any(self.path.glob("*.pth")):
            raise self.lost()
        return None

    def point_to(self, name: str) -> None:
        """Let the pointer name a checkpoint of the folder."""
        replace_text(self.path / _POINTER, name)

    def remove_temporary_files(self) -> None:
        """Remove the temporary files of a process that was killed while it wrote a checkpoint."""
        for path in (*self.path.glob(f"*.pth{TEMPORARY}"), self.path / (_POINTER + TEMPORARY)):
            path.unlink(missing_ok=True)

    def remove_old(self, kept: int, last: int) -> None:
        """Remove the oldest numbered checkpoints up to iteration ``last``, so that ``kept`` stay.

        The checkpoint that the pointer names stays in any case.
        """
        checkpoints = self.numbered(last)
        named = os.path.basename(self.last)
        for path in checkpoints[: max(len(checkpoints) - kept, 0)]:
            if path.name != named:
                path.unlink(missing_ok=True)


def find_checkpoint(path: str | os.PathLike, which: str = "best") -> str:
    """The path itself if it is a file; the checkpoint of a run if it is the folder of one.

    Args:
        which: see :meth:`RunFolder.choose`.

    Raises:
        WeightsError: the folder has no such checkpoint.
    """
    if not Path(path).is_dir():
        return str(path)
    run = RunFolder(path)
    run.refuse_no_run()
    checkpoint = run.choose(which)
    if not Path(checkpoint).is_file():
        raise run.lost()
    return checkpoint


def iteration_of(name: str) -> int:
    """The iteration in the name of a checkpoint's file, such as model_0000099.pth; -1 for none."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else -1


def check_model(content: Any, path: str | os.PathLike) -> None:
    """
    Raises:
        WeightsError: the content of a file is none of a checkpoint.
    """
    if not isinstance(content, dict) or "model" not in content:
        raise WeightsError(f"{path} holds no model, so it is no checkpoint of a run.")


def _is_argument(key: str, values: Mapping[str, Any]) -> bool:
    """Whether one of the sections that a key lies in is a node of a LazyConfig."""
    names = key.split(".")
    return any(".".join((*names[:end], "_target_")) in values for end in range(1, len(names)))


class RunLock:
    """The right to write to a folder, as a context that releases it at its end.

    The system releases the lock of a process that ends in any way; the file of a killed process
    stays, and locks nothing.

    Args:
        folder: need not exist.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file = Path(folder, "run.lock")
        self._lock = FileLock(self._file, **({"fallback_to_soft": False} if _IS_NEW else {}))

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock.is_locked:
            with contextlib.suppress(OSError):  # Windows does not remove a file that is open
                # Another training may have this name, where the folder was removed meanwhile
                if os.path.samestat(os.stat(self._file), self._locked):
                    self._file.unlink()
            self._lock.release()

    def acquire(self) -> None:
        """Lock the folder, if it can be written to and this object has not locked it yet.

        Raises:
            ConfigError: another training has it, or the file of somebody else.
        """
        writable = os.path.isdir(self._folder) and os.access(self._folder, os.W_OK)
        if self._lock.is_locked or not writable:
            return
        try:
            self._lock.acquire(timeout=_SECONDS_TO_LOCK)
            self._locked = os.stat(self._file)
        except (PermissionError, Timeout) as error:
            raise ConfigError(
                f"Another training runs in {self._folder}: wait for its end or stop it, or give "
                f"another --output. --eval-only is possible meanwhile. Where {self._file} belongs "
                "to somebody whose training has ended, remove it."
            ) from error
        except (NotImplementedError, OSError) as error:
            logger.warning(
                f"{self._folder} cannot be locked ({error}): nothing refuses a second training "
                "there"
            )
