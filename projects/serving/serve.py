#!/usr/bin/env python
"""Serve a trained or exported detector over HTTP; --help shows how."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from dataclasses import fields
from importlib.util import find_spec
from types import FrameType

from lambda_det.detection.prediction import Predictor
from lambda_det.errors import ConfigError, exit_status
from lambda_serving.images import Limits

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="POST an image to /predict; /health and /metrics are for those who watch. "
        "SIGTERM ends the server when all that it accepted is answered.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", help="folder of a run, exported file (.onnx), hf://OWNER/NAME")
    add("--host", default="127.0.0.1", help="0.0.0.0 for other machines")
    add("--port", type=int, default=8000, help="of the server; 0: a free one")
    add("--device", help="cpu or cuda")
    add(
        "--score-threshold",
        type=float,
        help="lowest score to answer; None: the best of the evaluation",
    )
    add("--drain", type=float, default=1.0, help="seconds after SIGTERM for what comes late")
    for entry in fields(Limits):
        flag, kind = "--" + entry.name.replace("_", "-"), type(entry.default)
        add(flag, type=kind, default=entry.default, help=entry.metadata["help"])
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigError(f"{missing[0]} is missing; pip install {' '.join(PACKAGES)}")
    import uvicorn

    from lambda_serving.app import make_app

    limits = Limits(**{entry.name: getattr(args, entry.name) for entry in fields(Limits)})
    threshold = args.score_threshold
    predictor = Predictor(
        args.model, score_threshold=threshold, device=args.device, batch_size=limits.batch
    )
    app = make_app(predictor, limits)

    class Server(uvicorn.Server):
        """Reports that it will stop before it does, so senders of requests can choose another
        server.
        """

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if sig == signal.SIGINT or app.state.service.stopping:
                super().handle_exit(sig, frame)
                return
            app.state.service.stopping = True
            threading.Timer(args.drain, super().handle_exit, (sig, frame)).start()

    Server(uvicorn.Config(app, host=args.host, port=args.port, access_log=False)).run()


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
