"""Programs in processes that are forked from one that has imported PyTorch and the package.

A process that imports them itself takes five seconds of a core to begin. Whatever is decided while
importing is decided already here, so a test of that starts Python itself.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.pool import ThreadPool
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

_PRELOADED = (
    *("lambda_det.detection", "lambda_det.classification", "lambda_det.own_data.report.run_page"),
    # What every run imports when it starts and opens its log
    *("lambda_det.detection.task", "lambda_det.classification.task", "lambda_det.training.start"),
    "torch.utils.tensorboard",
)

# A program like `torchrun --nproc_per_node 2 --max-restarts 2`, with processes that it forks
LAUNCHER = """
import runpy
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def work(*words):
    sys.argv = [*words]
    runpy.run_path(words[0], run_name="__main__")

config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=2, start_method="fork",
    run_id="forked", rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
)
elastic_launch(config, work)(*sys.argv[1:])
"""

# Windows has no fork
START_METHOD = "spawn" if sys.platform == "win32" else "forkserver"
CONTEXT = multiprocessing.get_context(START_METHOD)
if START_METHOD == "forkserver":
    CONTEXT.set_forkserver_preload([*_PRELOADED, __name__, "tests.preloaded"])


def start(
    words: Sequence[object], output: Path, *, cwd: Path | None = None, **variables: str
) -> BaseProcess:
    """Start a program, as ``python WORDS`` does.

    Args:
        words: a file, "-m" and a module, or "-c" and a program, each with its arguments.
        output: the file to which all that it prints is added.
        cwd: the folder in which it runs; by default this one.
        variables: of the environment, beside those of this process. What PyTorch or the package
            read at import stays as it is in this process.
    """
    environment = {**os.environ, **variables}
    arguments = (list(map(str, words)), output.absolute(), cwd or Path.cwd(), environment)
    process = CONTEXT.Process(target=_main, args=arguments)
    process.start()
    return process


def run(
    words: Sequence[object], output: Path, *, seconds: float = 600, **options: object
) -> subprocess.CompletedProcess:
    """Run a program to its end, with the arguments of ``start``.

    Returns:
        Its status, and all that it printed as ``stdout``.
    """
    before = output.stat().st_size if output.exists() else 0
    process = start(words, output, **options)
    process.join(seconds)
    if process.is_alive():
        process.kill()
        raise AssertionError(f"{words} takes over {seconds} s; see {output}")
    printed = output.read_bytes()[before:].decode() if output.exists() else ""
    return subprocess.CompletedProcess(words, process.exitcode, printed)


def run_as_torchrun(
    words: Sequence[object], folder: Path, *, number: int = 2, **options: object
) -> list[subprocess.CompletedProcess]:
    """Run a program in processes with the variables by which torchrun connects them."""
    # As torchrun does: a port that was only looked for could be another program's by then
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_PORT": store.port}
    # PyTorch 2.4 reads the second only together with the first
    shared.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT=0)
    with ThreadPool(number) as pool:

        def run_rank(rank: int) -> subprocess.CompletedProcess:
            variables = {**shared, "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
            output = folder / f"printed_by_{rank}"
            return run(words, output, **{k: str(v) for k, v in variables.items()}, **options)

        return pool.map(run_rank, range(number))


def print_into(file: Path) -> None:
    """Add what this process prints to a file."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def as_started() -> None:
    """Undo what tells a process of multiprocessing from one that a user starts."""
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Else shared memory would be left until the process ends from which all are forked
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    # Else workers of loaders would come from a forkserver of their own
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # spawned processes look for scripts there


def _main(words: list[str], output: Path, cwd: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.chdir(cwd)
    print_into(output)
    as_started()
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, str(cwd))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent.absolute()))
        runpy.run_path(words[0], run_name="__main__")
