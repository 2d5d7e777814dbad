"""Ends of a run on the command as a user starts it: what is saved, the status, and what is left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lambda_det.errors import INTERRUPTED_STATUS, PREEMPTED_STATUS
from tests import forked
from tests.processes import (
    children,
    descendants,
    is_alive,
    shared_memory,
    wait_for_the_end_of,
    wait_until,
)
from tests.reliability.runs import VARIABLES, assert_same_run, detection_words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

SECONDS = 10  # after which nothing may be left
# In one process or two, each with a loader process; the same images a step
PROCESSES = {
    "one": ["SOLVER.ACCUMULATE_GRADIENTS", "2"],
    "two": ["SOLVER.ACCUMULATE_GRADIENTS", "1"],
}


# ``lambda-det`` with processes that it forks: a spawned one imports for five seconds
FORKING = """
import sys
from lambda_det import cli
from lambda_det.distributed import launch
launch._START_METHOD, launch._TO_END = "fork", 8.0
sys.exit(cli.main(sys.argv[1:]))
"""
# Goes before it, for a disk that needs longer for a checkpoint than processes have to end
SLOWLY = """
import time
from lambda_det.training import checkpointer

def check(file, check=checkpointer.check_checkpoint):
    time.sleep(6)
    check(file)

checkpointer.check_checkpoint = check
"""


# Goes before it, for a start that is not over before a signal comes
WAITING = """
import sys
import time
from lambda_det.training import start

def wait(_):
    open(f"{sys.argv[-1]}.starts", "w").close()
    time.sleep(600)

start.seed_all_rng = wait
"""


# As users start it; a spawned process imports for five seconds
SPAWNED = pytest.param("two", "by Python", marks=pytest.mark.release)


class Command:
    """``lambda-det train`` with the arguments of a user, and what it leaves."""

    def __init__(self, processes: str, words: list[str], folder: Path) -> None:
        self.folder, self._processes = folder, processes
        flags = [] if processes == "one" else ["--num-gpus", "2"]
        words = [*flags, *words, *PROCESSES[processes], "OUTPUT_DIR", str(folder)]
        self._words = ["train", *words]
        self._output = folder.with_suffix(".txt")

    @property
    def printed(self) -> str:
        return self._output.read_text(errors="replace")

    def start(self, how: str = "forked") -> None:
        """Start it.

        Args:
            how: "forked", with processes that it forks; "slowly", the same on a slow disk;
                "waiting", the same, and it waits before it makes its folder; "spawning" Python for
                each of them; "by Python" itself as well, as a user does.
        """
        first = {"forked": "", "slowly": SLOWLY, "waiting": WAITING}
        program = ["-c", first[how] + FORKING] if how in first else ["-m", "lambda_det"]
        words = [*program, *self._words]
        if how != "by Python":
            process = forked.start(words, self._output, **VARIABLES)
            self._wait = lambda seconds: process.join(seconds) or process.exitcode
        else:
            with self._output.open("a") as file:
                process = subprocess.Popen(
                    [sys.executable, *words],
                    env={**os.environ, **VARIABLES},
                    stdout=file,
                    stderr=file,
                )
            self._wait = process.wait
        self.pid = process.pid
        self.note_what_is_there()

    def run(self) -> None:
        """Run it to its end, in processes like those that it starts."""
        if self._processes == "one":
            self.start()
            assert self._wait(300) == 0, self.printed
            return
        words = [self._words[0], *self._words[3:]]  # without --num-gpus 2
        for done in forked.run_as_torchrun(["-m", "lambda_det", *words], self.folder.parent):
            assert done.returncode == 0, done.stdout[-5000:]

    def wait_for_a_checkpoint(self) -> None:
        """Wait until it has saved one since its start; note what it has started by then."""
        pointer = self.folder / "last_checkpoint"
        before = pointer.stat().st_mtime_ns if pointer.exists() else 0

        def is_saved() -> bool:
            assert is_alive(self.pid), self.printed
            return pointer.exists() and pointer.stat().st_mtime_ns > before

        wait_until(is_saved, 200)
        self.note_what_is_there()

    def note_what_is_there(self) -> None:
        self._started = {self.pid, *descendants(self.pid)}
        self._shared = set(shared_memory(self._started))

    def training(self) -> list[int]:
        """The processes that train: this one, or those that it has started for that."""
        members = [pid for pid in self._children(self.pid) if self._children(pid)]
        return members or [self.pid]

    def loading(self) -> list[int]:
        return [child for pid in self.training() for child in self._children(pid)]

    def _children(self, pid: int) -> list[int]:
        return [child for child in children(pid) if "resource_tracker" not in _words(child)]

    def send(self, number: int, pids: list[int] | None = None) -> None:
        for pid in [self.pid] if pids is None else pids:
            os.kill(pid, number)

    def press_ctrl_c_twice(self) -> None:
        for _ in range(2):
            time.sleep(1)  # longer than between copies of one press
            self.send(signal.SIGINT, [pid for pid in self.all() if is_alive(pid)])

    def all(self) -> list[int]:
        return sorted(self._started)

    def end(self, seconds: float = SECONDS) -> int:
        """Wait for its end, and see that it leaves nothing after some seconds; its status."""
        status = self._wait(100)
        wait_for_the_end_of(self._started, seconds)
        wait_until(lambda: not any(file.exists() for file in self._shared), SECONDS)
        return status


def _words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    words = detection_words(tmp_path_factory.mktemp("data"))
    words += ["SOLVER.MAX_ITER", "24", "SOLVER.STEPS", "(12,)", "SOLVER.CHECKPOINT_PERIOD", "2"]
    return [*words, "TEST.EVAL_PERIOD", "0", "DATALOADER.NUM_WORKERS", "1"]


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a run that nothing has ended, by the number of its processes."""
    folders: dict[str, Path] = {}

    def folder(processes: str) -> Path:
        if processes not in folders:
            command = Command(processes, words, tmp_path_factory.mktemp("whole") / "run")
            command.run()
            folders[processes] = command.folder
        return folders[processes]

    return folder


@pytest.mark.parametrize(("processes", "how"), [("one", "forked"), ("two", "forked"), SPAWNED])
def test_a_scheduler_s_signals_save_all(processes, how, words, whole, tmp_path):
    """To the command alone, and to all of its processes, as Slurm and a terminal's Ctrl-C do."""
    command = Command(processes, words, tmp_path / "run")
    for number, to_all in ((signal.SIGTERM, False), (signal.SIGUSR1, True), (signal.SIGINT, True)):
        command.start(how)
        command.wait_for_a_checkpoint()
        command.send(number, command.all() if to_all else None)
        is_ctrl_c = number == signal.SIGINT
        status = INTERRUPTED_STATUS if is_ctrl_c else PREEMPTED_STATUS
        assert command.end() == status, command.printed
        last = command.printed.strip().splitlines()[-1]
        name = "Ctrl-C" if is_ctrl_c else number.name
        assert last.startswith(f"Stopped by {name} after step"), command.printed
    assert command.printed.count("press Ctrl-C again") == 1
    command.run()
    assert_same_run(whole(processes), command.folder)
    assert "Traceback" not in command.printed


@pytest.mark.parametrize(("processes", "how"), [("two", "forked"), SPAWNED])
def test_a_second_ctrl_c_ends_processes_that_wait_for_each_other(processes, how, words, tmp_path):
    """A process does not hear it in a collective call. Here it waits for one that is stopped."""
    command = Command(processes, words, tmp_path / "run")
    command.start(how)
    command.wait_for_a_checkpoint()
    command.send(signal.SIGSTOP, command.training()[1:])
    command.press_ctrl_c_twice()
    assert command.end() == INTERRUPTED_STATUS, command.printed
    assert "Traceback" not in command.printed


def test_a_second_ctrl_c_waits_for_a_checkpoint(words, tmp_path):
    command = Command("two", words, tmp_path / "run")
    command.start("slowly")
    wait_until(lambda: list(command.folder.glob("*.pth.tmp")), 200)
    command.note_what_is_there()
    command.press_ctrl_c_twice()
    assert command.end() == INTERRUPTED_STATUS, command.printed
    assert [path.name for path in command.folder.glob("*.pth*")] == ["model_0000001.pth"]
    assert (command.folder / "last_checkpoint").exists()


@pytest.mark.parametrize("how", ["forked", pytest.param("by Python", marks=pytest.mark.release)])
def test_any_process_may_be_killed(how, words, whole, tmp_path):
    """The command itself, each that trains, and one that loads images."""
    command = Command("two", words, tmp_path / "run")
    victims = {
        "the command": lambda: None,
        "rank 0": lambda: command.training()[:1],
        "rank 1": lambda: command.training()[1:],
        "a loader": lambda: command.loading()[-1:],
    }
    for name, victim in victims.items():
        command.start(how if name == "the command" else "forked")
        command.wait_for_a_checkpoint()
        assert len(command.training()) == len(command.loading()) == 2
        command.send(signal.SIGKILL, victim())
        assert command.end() in (2, -signal.SIGKILL), command.printed
    command.run()
    assert_same_run(whole("two"), command.folder)
    said = [line for line in command.printed.splitlines() if line.startswith("error: ")]
    assert ["SIGKILL" in line or "DataLoader worker" in line for line in said] == [True] * 3


@pytest.mark.parametrize(("processes", "name"), [("one", "SIGTERM"), ("two", "SIGUSR1")])
def test_a_signal_during_the_start_ends_it(processes, name, words, tmp_path):
    number = getattr(signal, name)
    command = Command(processes, words, tmp_path / "run")
    command.start("waiting")
    wait_until((tmp_path / "run.starts").exists)
    command.note_what_is_there()
    command.send(number)
    assert command.end() == -number
    assert not (tmp_path / "run").exists()


@pytest.mark.release
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_signal_while_processes_import_ends_them(name, words, tmp_path):
    number = getattr(signal, name)
    command = Command("two", words, tmp_path / "run")
    command.start("spawning")
    wait_until(lambda: len(descendants(command.pid)) > 2)
    command.note_what_is_there()
    command.send(number)
    # A spawned process sees that it has no parent as soon as it has imported PyTorch
    assert command.end(60) == -number
    assert not (tmp_path / "run").exists()
