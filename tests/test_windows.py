"""What Windows lacks is not asked for: in a process from which it was taken away.

This is no test on Windows. It holds what reading can tell: signals, modules and calls that only
exist on POSIX systems.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Libraries know Windows themselves, and are imported before it is feigned
WINDOWS = """
import importlib, os, pkgutil, signal, sys
import detectron2.engine, huggingface_hub.hf_api, matplotlib.pyplot, onnx, timm, torch

gone = "SIGUSR1 SIGUSR2 SIGKILL SIGBUS SIGCHLD SIGHUP SIGQUIT pthread_sigmask".split()
for name in gone:
    delattr(signal, name)
for name in ("posix_fadvise", "fork", "getuid", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("fcntl", "resource", "pwd", "grp"):
    sys.modules[name] = None
sys.platform = "win32"
"""
IMPORTS = """
import lambda_det

for module in pkgutil.walk_packages(lambda_det.__path__, "lambda_det."):
    if "configs" not in module.name and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
TRAINING = """
from pathlib import Path
from lambda_det.distributed.spawn import _describe_end
from lambda_det.training import start
from lambda_det.training.hooks import peak_memory
from lambda_det.training.run_folder import BufferedLog
from lambda_det.training.workers import WatchedLoader
from tests.training.test_trainer import ToyTask

for steps in (3, 6):
    with BufferedLog() as log:
        start.train(ToyTask(sys.argv[1], max_iter=steps), log, resume=True)
assert Path(sys.argv[1], "model_final.pth").exists()
assert peak_memory("cpu") == 0
assert _describe_end(-6).startswith("was killed by SIGABRT, as")
"""


@pytest.mark.slow
def test_nothing_is_used_that_windows_lacks(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WINDOWS + IMPORTS + TRAINING, str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
