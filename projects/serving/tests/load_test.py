#!/usr/bin/env python
"""Start the server, load it from this machine, stop it under load, and print a row of a table.

    load_test.py MODEL IMAGES --clients 1 8 --seconds 20 -- --batch 4

The words after -- are for serve.py. After --seconds, and an answer for each client, the server gets
SIGTERM, and the clients go on until it is gone: each request that it accepted must have been
answered.
"""

from __future__ import annotations

import argparse
import http.client
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

SERVER = Path(__file__).resolve().parents[1] / "serve.py"
HEAD = "| clients | requests/s | p50 ms | p95 ms | p99 ms | not 200 | after SIGTERM | lost |"


def ask(port: int, bodies: list[bytes], seen: list[tuple[float, float, object]]) -> None:
    """Send one image after another until nobody listens: when, seconds, and status or error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    for body in cycle(bodies):
        start = time.perf_counter()
        try:
            connection.request("POST", "/predict", body)
            answer = connection.getresponse()
            answer.read()
            status: object = answer.status
        except ConnectionRefusedError:
            return
        except (OSError, http.client.HTTPException) as error:
            status = type(error).__name__
            connection.close()
        seen.append((start, time.perf_counter() - start, status))


def started(words: list[str], log: Path) -> tuple[subprocess.Popen, int]:
    """The server, as soon as it answers, and its port.

    It chooses the port, because one that was only looked for could be another program's by then.
    """
    with log.open("w") as file:
        command = [sys.executable, str(SERVER), *words, "--port", "0"]
        server = subprocess.Popen(command, stdout=file, stderr=file)
    while server.poll() is None:
        if running := re.search(r"running on http://127\.0\.0\.1:(\d+)", log.read_text()):
            return server, int(running.group(1))
        time.sleep(0.1)
    raise SystemExit(f"The server did not start:\n{log.read_text()}")


def measure(words: list[str], bodies: list[bytes], clients: int, seconds: float) -> dict:
    """What the clients saw, beside what the server counted."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        server, port = started(words, log)
        seen: list[tuple[float, float, object]] = []
        orders = [[*islice(cycle(bodies), i, i + len(bodies))] for i in range(clients)]
        threads = [threading.Thread(target=ask, args=(port, order, seen)) for order in orders]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        while len(seen) < len(threads) and server.poll() is None:
            time.sleep(0.1)  # on a busy machine the first answers may take longer
        server.send_signal(signal.SIGTERM)
        stopped = time.perf_counter()
        for thread in threads:
            thread.join()
        server.wait()
        counts = re.search(r"(\d+) requests were accepted, (\d+) answered", log.read_text())
        accepted, answered = map(int, counts.groups())
    statuses = Counter(status for *_, status in seen)
    # A connection that nobody had accepted when the server ended is reset; "lost" has the others
    others = Counter(
        str(status)
        for at, took, status in seen
        if status != 200 and (isinstance(status, int) or at + took <= stopped)
    )
    before = sorted(took for at, took, _ in seen if at + took <= stopped)
    cuts = statistics.quantiles(before, n=100, method="inclusive")
    refused = sum(n for status, n in statuses.items() if status == 503)  # never accepted
    return {
        "rate": len(before) / (stopped - start),
        **{f"p{percent}": cuts[percent - 1] * 1e3 for percent in (50, 95, 99)},
        "others": dict(others),
        "after": sum(at + took > stopped and status == 200 for at, took, status in seen),
        "lost": accepted - sum(n for s, n in statuses.items() if isinstance(s, int)) + refused,
        "accepted": accepted,
        "answered": answered,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("images", type=Path, help="folder")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=20)
    argv = sys.argv[1:]
    at = argv.index("--") if "--" in argv else len(argv)
    args, words = parser.parse_args(argv[:at]), argv[at + 1 :]
    files = sorted(file for file in args.images.iterdir() if file.suffix in (".jpg", ".png"))
    bodies = [file.read_bytes() for file in files[:32]]
    print(HEAD, "|---" * 8 + "|", sep="\n")
    for clients in args.clients:
        row = measure([args.model, *words], bodies, clients, args.seconds)
        figures = " | ".join(f"{row[key]:.1f}" for key in ("rate", "p50", "p95", "p99"))
        print(f"| {clients} | {figures} | {row['others'] or 0} | {row['after']} | {row['lost']} |")


if __name__ == "__main__":
    main()
