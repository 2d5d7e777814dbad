"""The two machines of ``machines.py``, whose rehearsals take too long for a test."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.reliability.machines import Machines, can_make_namespaces

pytestmark = pytest.mark.slow  # starts processes

_LISTEN = "import socket; s = socket.create_server(('{0}', 5000)); print(flush=True); s.accept()"
_CALL = "import socket; socket.create_connection(('{0}', 5000), timeout=1)"


@pytest.mark.skipif(not can_make_namespaces(), reason="a user may make no networks here")
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
