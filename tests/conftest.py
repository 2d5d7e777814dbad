"""Settings of a process before it imports anything; the rest is in fixtures.py."""

import importlib
import os
import signal
import traceback

import pytest

# A shell's script ignores Ctrl-C in what it starts in the background, and the tests press it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports matplotlib: pictures are drawn without a screen.
os.environ.setdefault("MPLBACKEND", "Agg")

# Before anything reads it: the tests make their data
os.environ.pop("DETECTRON2_DATASETS", None)

FIXTURES = "tests.fixtures"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Also that of projects/, whose tests may be run alone."""
    # A process that hands out tests would import for six seconds while others wait for it
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out and not config.pluginmanager.has_plugin(FIXTURES):
        try:
            module = importlib.import_module(FIXTURES)
        except Exception:  # which pytest would take for a fault of its own
            pytest.exit(f"{FIXTURES} cannot be imported:\n{traceback.format_exc()}", 4)
        config.pluginmanager.register(module, FIXTURES)
