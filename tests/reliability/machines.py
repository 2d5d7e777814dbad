"""Two machines rehearsed on one: each has a network of its own, and a cable lies between them.

Each machine runs torchrun with two training processes. Something happens to one of them after the
first checkpoint. The run must then go on from its last checkpoint to its end, at most after the
same command was started again. Linux only, where a user may make namespaces (``unshare -rn``).

    python -m tests.reliability.machines              # all rehearsals, a quarter of an hour
    python -m tests.reliability.machines cut signalled
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lambda_det.distributed.connection import IN_STEPS
from tests.processes import descendants
from tests.reliability.runs import detection_words, metrics

ROOT = Path(__file__).parents[2]
STEPS = 24
TIME_OUT = 20  # seconds in place of IN_STEPS, in the rehearsal of a lost machine
_LIMIT = 300  # seconds that anything may take
# Of torchrun, by rehearsal; PyTorch 2.4 does not have this one
_FLAGS = {"signalled": ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]}

# What torchrun starts: tools/train_net.py with a time-out of its own
_TOOL = """
import sys
from datetime import timedelta
from lambda_det.detection import parser, run
from lambda_det.errors import exit_status
from lambda_det.training import trainer
trainer.IN_STEPS = timedelta(seconds={seconds})
sys.exit(exit_status(lambda: run(parser().parse_args())))
"""


ADDRESSES = ("10.77.0.1", "10.77.0.2")
Command = list[str]


def _do(on: Command, command: str) -> None:
    subprocess.run([*on, *command.split()], check=True)


@contextmanager
def two_machines() -> Iterator[list[Command]]:
    """Two networks with a cable between them; the start of a command that runs another on each."""
    holders: list[subprocess.Popen] = []

    def hold(*command: str) -> None:
        """Have a process hold its namespaces; it has them when it has written a line."""
        command = (*command, "sh", "-c", "echo; exec sleep 86400")
        holders.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        holders[-1].stdout.readline()

    def enter(machine: int, *namespaces: str) -> Command:
        pid = str(holders[machine].pid)
        return ["nsenter", "--preserve-credentials", "-t", pid, *namespaces]

    try:
        hold("unshare", "-rn")
        hold(*enter(0, "-U"), "unshare", "-n")
        machines = [enter(machine, "-U", "-n") for machine in (0, 1)]
        _do(machines[0], "ip link add name cable0 type veth peer name cable1")
        _do(machines[0], f"ip link set cable1 netns {holders[1].pid}")
        for number, (on, address) in enumerate(zip(machines, ADDRESSES, strict=True)):
            _do(on, "ip link set lo up")
            _do(on, f"ip addr add {address}/24 dev cable{number}")
            _do(on, f"ip link set cable{number} up")
        yield machines
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


class Run:
    """A training under two torchruns."""

    def __init__(self, machines: list[Command], words: list[str], folder: Path) -> None:
        self.machines = machines
        self.folder = folder / "run"
        self._words = [*words, "OUTPUT_DIR", str(self.folder)]
        self._tool = folder / "tool.py"
        seconds = TIME_OUT if folder.name == "lost" else IN_STEPS.total_seconds()
        self._tool.write_text(_TOOL.format(seconds=seconds))
        self._flags = _FLAGS.get(folder.name, [])
        self._outputs = [folder / f"machine{machine}.txt" for machine in (0, 1)]
        self.told: list[str] = []
        self.torchruns = [self._start(machine) for machine in (0, 1)]

    def _start(self, machine: int) -> subprocess.Popen:
        argv = [*self.machines[machine], sys.executable, "-m", "torch.distributed.run"]
        argv += ["--nnodes", "2", "--nproc_per_node", "2", "--max-restarts", "3"]
        argv += ["--rdzv_backend", "c10d", "--rdzv_id", "rehearsal"]
        argv += ["--rdzv_endpoint", f"{ADDRESSES[0]}:29400"]
        # By default torchrun gives up when its rendezvous does not answer for a minute
        argv += ["--rdzv_conf", f"is_host={machine == 0},read_timeout=600"]
        argv += ["--local_addr", ADDRESSES[machine]]
        argv += self._flags
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        # Else a torchrun that is started later does not find the others (PyTorch 2.15)
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        environment["GLOO_SOCKET_IFNAME"] = f"cable{machine}"
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with self._outputs[machine].open("a") as file:
            return subprocess.Popen(
                [*argv, str(self._tool), *self._words], env=environment, stdout=file, stderr=file
            )

    def start_again(self, *machines: int) -> None:
        for machine in machines:
            self.torchruns[machine].wait()
            self.torchruns[machine] = self._start(machine)

    def wait_until(self, condition: Callable[[], object], what: str = "") -> None:
        """Wait for something, and note the seconds that it took under the name ``what``."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() < start + _LIMIT, self.said(0)[-4000:] + self.said(1)[-4000:]
            time.sleep(0.05)
        if what:
            self.told.append(f"{what} after {time.monotonic() - start:.0f} s")

    def plug(self, state: str) -> None:
        """Pull the cable ("down") or put it back ("up")."""
        _do(self.machines[0], f"ip link set cable0 {state}")

    def wait_for_loss(self, machine: int) -> None:
        """Wait until the processes of a machine say that they have lost the others."""
        self.wait_until(lambda: "has lost the connection" in self.said(machine), "told")

    def wait_for_start(self) -> None:
        """Wait until the training has begun for the second time."""
        self.wait_until(lambda: self.starts() >= 2, "it goes on")

    def starts(self) -> int:
        return (self.folder / "log.txt").read_text().count("Training from")

    def said(self, machine: int) -> str:
        return self._outputs[machine].read_text(errors="replace")

    def workers(self, machine: int) -> list[int]:
        """The training processes of a machine."""
        pid = self.torchruns[machine].pid
        started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(p) for p in started if "tool.py" in Path(f"/proc/{p}/cmdline").read_text()]

    def kill(self, machine: int) -> None:
        """End a torchrun and all that it started, at once."""
        pid = self.torchruns[machine].pid
        for process in [pid, *descendants(pid)]:
            os.kill(process, signal.SIGKILL)

    def end(self) -> None:
        """End what is left of it."""
        for machine, torchrun in enumerate(self.torchruns):
            if torchrun.poll() is None:
                self.kill(machine)


# -------------------------------------------------------------------------------------- rehearsals
def worker(run: Run) -> None:
    """SIGKILL of a process of one machine."""
    os.kill(run.workers(1)[0], signal.SIGKILL)
    run.wait_for_start()
    run.wait_for_loss(0)


def machine(run: Run) -> None:
    """SIGKILL of all processes of the second machine; torchrun is started there again."""
    run.kill(1)
    run.wait_for_loss(0)
    run.start_again(1)
    run.wait_for_start()


def host(run: Run) -> None:
    """SIGKILL of all processes of the machine with the rendezvous; both are started again."""
    run.kill(0)
    run.wait_until(lambda: run.torchruns[1].poll() is not None, "the other torchrun ends")
    run.wait_for_loss(1)
    run.start_again(0, 1)
    run.wait_for_start()


def cut(run: Run) -> None:
    """The network is cut for 60 s."""
    run.plug("down")
    time.sleep(60)
    saved = run.folder / "last_checkpoint"
    before = saved.read_text()
    run.plug("up")
    run.wait_until(lambda: saved.read_text() != before, "the next checkpoint")
    run.told.append(f"{run.starts() - 1} restarts")


def lost(run: Run) -> None:
    """Power of the second machine lost, so that no connection is closed; it comes back."""
    run.plug("down")
    run.kill(1)
    run.wait_for_loss(0)
    run.plug("up")
    run.start_again(1)
    run.wait_for_start()


def signalled(run: Run) -> None:
    """SIGUSR1 to both torchruns, which are started again."""
    for torchrun in run.torchruns:
        torchrun.send_signal(signal.SIGUSR1)
    run.wait_until(lambda: None not in [t.poll() for t in run.torchruns], "both end")
    assert "Stopped by SIGUSR1 after step" in run.said(0) + run.said(1)
    run.start_again(0, 1)
    run.wait_for_start()


REHEARSALS: dict[str, Callable[[Run], None]] = {
    rehearsal.__name__: rehearsal for rehearsal in (worker, machine, host, cut, lost, signalled)
}


def rehearse(name: str, words: list[str], root: Path) -> str:
    """What happened, with its figures, in a folder of that name below ``root``."""
    folder = root / name  # the name goes with it
    folder.mkdir()
    with two_machines() as machines:
        run = Run(machines, words, folder)
        try:
            run.wait_until((run.folder / "last_checkpoint").exists)
            REHEARSALS[name](run)
            statuses = [torchrun.wait(_LIMIT) for torchrun in run.torchruns]
            assert statuses == [0, 0], f"{statuses}\n{run.said(0)[-4000:]}{run.said(1)[-4000:]}"
        finally:
            run.end()
    assert max(metrics(run.folder)) == STEPS - 1
    return ", ".join([REHEARSALS[name].__doc__.rstrip("."), *run.told])


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = detection_words(Path(folder))
        words += ["SOLVER.MAX_ITER", str(STEPS), "SOLVER.IMS_PER_BATCH", "4"]
        words += ["SOLVER.ACCUMULATE_GRADIENTS", "1", "DATALOADER.NUM_WORKERS", "1"]
        words += ["TEST.EVAL_PERIOD", "0"]
        for name in names or REHEARSALS:
            print(f"{name}: {rehearse(name, words, Path(folder))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
