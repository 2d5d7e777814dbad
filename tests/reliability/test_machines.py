"""Two machines rehearsed on one; ``machines.py`` has more rehearsals, of a minute or two each."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.reliability.machines import Machines, can_make_namespaces, rehearse, run_words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_namespaces(), reason="a user may make no networks here"),
]

_LISTEN = "import socket; s = socket.create_server(('{0}', 5000)); print(flush=True); s.accept()"
_CALL = "import socket; socket.create_connection(('{0}', 5000), timeout=1)"


def test_the_cable():
    with Machines() as machines:

        def run(machine, code):
            argv = [*machines.command(machine), sys.executable, "-c", code]
            return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

        server = run(0, _LISTEN.format(machines.address(0)))
        server.stdout.readline()
        machines.plug("down")
        assert run(1, _CALL.format(machines.address(0))).wait() != 0
        machines.plug("up")
        assert run(1, _CALL.format(machines.address(0))).wait() == 0
        assert server.wait() == 0


def test_a_killed_process_of_two_machines(tmp_path):
    told, folder = rehearse("worker", run_words(tmp_path), tmp_path)
    assert "goes on after" in told and (folder / "model_final.pth").exists()
