"""The server over HTTP, with a detector that finds what it is told to, and with a real one."""

import asyncio
import http.client
import io
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.structures import Boxes, Instances
from PIL import Image
from pycocotools import mask as coco_masks

from lambda_det.detection.prediction import Prediction, Predictor
from lambda_det.errors import DataError
from lambda_serving.batches import Batches
from lambda_serving.images import Limits
from tests.training.tiny_detector import save_run

SERVER = Path(__file__).parents[1] / "serve.py"


def application(detector, **limits):
    """A client of the application."""
    for name in ("fastapi", "httpx", "prometheus_client"):
        pytest.importorskip(name, reason="pip install fastapi uvicorn prometheus_client httpx")
    from fastapi.testclient import TestClient

    from lambda_serving.app import make_app

    return TestClient(make_app(detector, Limits(**limits)))


class Detector:
    """Finds one box of the image's size, with the mean of its red as score; notes its batches."""

    origin, class_names = "weights.pth", ["cell"]

    def __init__(self):
        self.batches, self.gate = [], threading.Event()
        self.gate.set()

    def __call__(self, images, channels):
        assert channels == "RGB"
        self.batches.append([image.shape for image in images])
        self.gate.wait(20)
        if any(image.shape[0] == 13 for image in images):
            raise DataError("thirteen rows cannot be computed")
        if any(image.shape[0] == 17 for image in images):
            raise RuntimeError("a fault")
        return [self._find(image) for image in images]

    def _find(self, image):
        height, width = image.shape[:2]
        found = Instances((height, width), pred_classes=torch.tensor([0]))
        found.pred_boxes = Boxes(torch.tensor([[0.0, 0.0, width, height]]))
        found.scores = torch.tensor([image[..., 0].mean() / 255], dtype=torch.float32)
        found.pred_masks = torch.from_numpy(image[None, ..., 0] > 127)
        return Prediction(found, self.class_names)


def png(height=20, width=30, red=200, kind="PNG", **options):
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, width // 2 :, 0] = red
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def bomb(width, height):
    """A PNG of black pixels, 16 kB; 1000 times as long unpacked to bits, 24000 times to RGB."""

    def chunk(kind, data):
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(2049)) for _ in range(8192))
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    data = chunk(b"IHDR", head) + chunk(b"IDAT", rows + packer.flush()) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


@pytest.fixture
def serve():
    """A function of limits that starts the application with a :class:`Detector`."""
    clients = []

    def start(detector=None, **limits):
        client = application(detector or Detector(), **limits)
        clients.append(client.__enter__())
        return client

    yield start
    for client in clients:
        client.__exit__(None, None, None)


def test_answers_what_the_detector_finds(serve):
    client = serve()
    answer = client.post("/predict?masks", content=png()).json()
    assert (answer["width"], answer["height"]) == (30, 20)
    assert answer["boxes"] == [[0, 0, 30, 20]] and answer["names"] == ["cell"]
    assert answer["scores"] == [pytest.approx(100 / 255, abs=1e-5)]  # red half: RGB, not BGR
    mask = coco_masks.decode(answer["masks"][0])
    assert mask[:, 15:].all() and not mask[:, :15].any()
    assert "masks" not in client.post("/predict", content=png()).json()
    health = client.get("/health")
    assert (health.status_code, health.json()["classes"]) == (200, ["cell"])


def test_images_stand_as_their_exif_data_say(serve):
    exif = Image.Exif()
    exif[274] = 6
    data = png(20, 30, kind="JPEG", exif=exif)
    answer = serve().post("/predict", content=data).json()
    assert (answer["width"], answer["height"]) == (20, 30)


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"no image", 415, "8 bytes are no image"),
        (b"", 415, "0 bytes are no image"),
        (png()[:60], 415, "damaged"),
        (bytes(5001), 413, "more than 5000 bytes"),
        (png(13), 422, "thirteen rows"),
        (png(17), 500, "log"),
        (png(101, 100), 413, "100x101"),
    ],
    ids=["words", "empty", "cut", "long", "refused", "fault", "large"],
)
def test_refusals_say_why_and_are_counted(serve, data, status, words):
    client = serve(max_bytes=5000, max_pixels=10_000)
    for body in (data, iter([data])):  # with its length in the head, and without
        answer = client.post("/predict", content=body)
        assert answer.status_code == status and words in answer.json()["detail"]
    assert f'predict_requests_total{{status="{status}"}} 2.0' in client.get("/metrics").text
    assert client.post("/predict", content=png()).status_code == 200


@pytest.mark.parametrize("size", [(16_384, 8_192), (80_000, 80_000)], ids=["ours", "pillow's"])
def test_bombs_are_refused_by_their_header(serve, size, monkeypatch):
    data = bomb(*size)
    assert len(data) < 20_000
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("it was decoded"))
    answer = serve().post("/predict", content=data)
    assert answer.status_code == 413 and "pixels" in answer.json()["detail"]


def _in_threads(client, bodies):
    answers = [None] * len(bodies)

    def ask(i):
        answers[i] = client.post("/predict", content=bodies[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    return threads, answers


def _until(condition):
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    pytest.fail("it never happened")


def test_requests_are_computed_together_and_only_the_bad_one_fails(serve):
    detector = Detector()
    client = serve(detector, batch=3, wait=20.0)
    threads, answers = _in_threads(client, [png(20, red=80), png(13), png(22, red=160)])
    for thread in threads:
        thread.join()
    assert sorted(map(len, detector.batches)) == [1, 1, 1, 3]
    assert [answer.status_code for answer in answers] == [200, 422, 200]
    scores = [answers[i].json()["scores"][0] * 510 for i in (0, 2)]
    assert scores == pytest.approx([80, 160], abs=0.1)  # each its own
    assert "predict_batch_images_sum 3.0" in client.get("/metrics").text


def test_a_full_queue_is_refused(serve):
    detector = Detector()
    detector.gate.clear()
    client = serve(detector, batch=1, queue=2)
    threads, answers = _in_threads(client, [png(), png()])
    service = client.app.state.service
    _until(lambda: service.accepted == 2)
    refused = client.post("/predict", content=png())
    detector.gate.set()
    assert refused.status_code == 503 and "2 requests" in refused.json()["detail"]
    assert refused.headers["Retry-After"] == "1"
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {200}


def test_a_late_answer_is_left_out(serve):
    detector = Detector()
    detector.gate.clear()
    client = serve(detector, batch=1, timeout=1.0)
    threads, answers = _in_threads(client, [png(), png()])
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {504}
    client.app.state.service.limits = Limits(timeout=60.0)  # the machine may be busy
    detector.gate.set()
    assert client.post("/predict", content=png()).status_code == 200
    # At least one that nobody waited for was not computed; a busy machine may have begun neither
    assert len(detector.batches) <= 2


def test_a_client_that_goes_away_is_no_failure_of_the_detector(serve, caplog):
    service = serve().app.state.service
    from starlette.requests import Request

    async def receive():
        return {"type": "http.disconnect"}

    request = Request({"type": "http", "headers": [], "query_string": b""}, receive)
    assert asyncio.run(service.predict(request)).status_code == 499
    assert not caplog.records and service.accepted == service.answered == 1


def test_a_stopping_server_says_so_and_answers_still(serve):
    client = serve()
    client.app.state.service.stopping = True
    assert client.get("/health").status_code == 503
    answer = client.post("/predict", content=png())
    assert (answer.status_code, answer.headers["Connection"]) == (200, "close")


def test_what_waits_is_computed_before_the_end():
    async def scene():
        batches = Batches(lambda images: [2 * image for image in images], most=2, wait=20.0)
        asked = [asyncio.ensure_future(batches(i)) for i in range(5)]
        await asyncio.sleep(0)
        await batches.close()
        return await asyncio.gather(*asked)

    assert asyncio.run(scene()) == [0, 2, 4, 6, 8]


@pytest.mark.slow
@pytest.mark.posix
def test_a_run_is_served_and_sigterm_loses_nothing(tmp_path, monkeypatch):
    config, _ = save_run(tmp_path / "run")
    client = application(Predictor(config.parent, score_threshold=0.0))
    image = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    file = tmp_path / "image.png"
    Image.fromarray(image).save(file)
    with client:
        answer = client.post("/predict", content=file.read_bytes()).json()
    found = Predictor(config.parent, score_threshold=0.0)(file)
    assert len(found) and answer["names"] == found.names
    np.testing.assert_allclose(answer["boxes"], found.boxes, atol=0.01)
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    pytest.importorskip("uvicorn", reason="pip install uvicorn")
    log, statuses = tmp_path / "log", []
    with log.open("w") as output:
        command = [sys.executable, SERVER, config.parent, "--port", "0"]
        server = subprocess.Popen(command, stdout=output, stderr=output)
    while not (port := re.search(r"running on http://127\.0\.0\.1:(\d+)", log.read_text())):
        assert server.poll() is None, log.read_text()
        time.sleep(0.1)

    def ask():
        """Send one request after another until nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=100)
        while True:
            try:
                connection.request("POST", "/predict", file.read_bytes())
                answer = connection.getresponse()
                answer.read()
                statuses.append(answer.status)
            except ConnectionRefusedError:
                return
            except (OSError, http.client.HTTPException):
                connection.close()  # it was not accepted

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(statuses) < 4 and server.poll() is None:
        time.sleep(0.1)
    server.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    server.wait()
    counts = re.search(r"(\d+) requests were accepted, (\d+) answered", log.read_text())
    assert int(counts[1]) == int(counts[2]) == len(statuses) and set(statuses) == {200}
