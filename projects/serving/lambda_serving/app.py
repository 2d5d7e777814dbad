"""The application: POST /predict, GET /health and GET /metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from lambda_det.detection.prediction import Predictor
from lambda_det.errors import UserError
from lambda_serving.batches import Batches
from lambda_serving.images import Limits, Refused, as_json, decoded

logger = logging.getLogger(__name__)
SIZES = [2**power for power in range(9)]


class Service:
    """A detector with its queue, threads and counters.

    Attributes:
        accepted, answered: requests within the limit of the queue.
        stopping: whether the server will end soon; requests are still answered.
    """

    def __init__(self, predictor: Predictor, limits: Limits) -> None:
        self.predictor, self.limits = predictor, limits
        self.accepted = self.answered = 0
        self.stopping = False
        self.registry = kept = CollectorRegistry()
        self._requests = Counter("predict_requests", "By HTTP status", ["status"], registry=kept)
        self._seconds = Histogram("predict_seconds", "From head to answer", registry=kept)
        self._sizes = Histogram(
            "predict_batch_images", "Computed together", registry=kept, buckets=SIZES
        )
        waiting = Gauge("predict_open_requests", "Not yet answered", registry=kept)
        waiting.set_function(lambda: self.accepted - self.answered)

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """Run from the start of the server to its end, when all accepted requests are answered."""
        with ThreadPoolExecutor(2, "pixels") as self._pixels:
            # Images of several sizes are computed as if each were alone
            compute = partial(self.predictor, channels="RGB")
            limits = self.limits
            self._batches = Batches(compute, limits.batch, limits.wait, self._sizes.observe)
            yield
            await self._batches.close()
        logger.warning("%d requests were accepted, %d answered", self.accepted, self.answered)

    async def predict(self, request: Request) -> Response:
        start, headers = time.perf_counter(), {}
        try:
            content, status = await self._within_limits(request), 200
        except Refused as error:
            content, status = {"detail": str(error)}, error.status
        except ClientDisconnect:  # with the status that nginx gives it
            content, status = {"detail": "The client closed the connection."}, 499
        except Exception:
            logger.exception("a request failed")
            content, status = {"detail": "The detector failed; the server's log says why."}, 500
        if status == 503:
            headers["Retry-After"] = "1"
        if self.stopping:  # so the next request goes to another server
            headers["Connection"] = "close"
        self._requests.labels(status).inc()
        self._seconds.observe(time.perf_counter() - start)
        return JSONResponse(content, status, headers)

    async def _within_limits(self, request: Request) -> dict[str, Any]:
        if self.accepted - self.answered >= self.limits.queue:
            raise Refused(503, f"{self.limits.queue} requests are waiting already; try again.")
        self.accepted += 1
        try:
            return await asyncio.wait_for(self._answer(request), self.limits.timeout)
        except TimeoutError as error:
            text = (
                f"There was no answer in {self.limits.timeout:g} s; send fewer or smaller images."
            )
            raise Refused(504, text) from error
        except UserError as error:
            raise Refused(422, str(error)) from error
        finally:
            self.answered += 1

    async def _answer(self, request: Request) -> dict[str, Any]:
        most, data = self.limits.max_bytes, bytearray()
        said = int(request.headers.get("content-length", 0))
        async for chunk in request.stream():
            data += chunk
            if max(len(data), said) > most:
                raise Refused(413, f"The body has more than {most} bytes; send a smaller image.")
        run = asyncio.get_running_loop().run_in_executor
        image = await run(self._pixels, decoded, bytes(data), self.limits.max_pixels)
        found = await self._batches(image)
        return await run(self._pixels, as_json, found, "masks" in request.query_params)


def make_app(predictor: Predictor, limits: Limits) -> FastAPI:
    """The application; ``app.state.service`` has its counters."""
    service = Service(predictor, limits)
    app = FastAPI(title="lambda_det", lifespan=service.running)
    app.state.service = service

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        """Boxes, scores and names of the image in the body; ?masks for COCO's run lengths."""
        return await service.predict(request)

    @app.get("/health")
    async def health() -> Response:
        if service.stopping:
            return JSONResponse({"detail": "The server is stopping; ask another one."}, 503)
        return JSONResponse({"model": str(predictor.origin), "classes": predictor.class_names})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.registry), media_type=CONTENT_TYPE_LATEST)

    return app
