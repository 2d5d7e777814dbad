"""The units of the first hour on a GPU: see projects/benchmarks/first_hour.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from detectron2.config import get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_resnet_backbone
from torch import Tensor, nn

from lambda_benchmarks.detectors import detectron2_detector, our_detector
from lambda_benchmarks.measure import (
    BOTH,
    FORWARD,
    STEP,
    Case,
    Group,
    Result,
    Setting,
    Subject,
    measure_group,
)
from lambda_benchmarks.presets import PEERS, halving, layer_cases
from lambda_benchmarks.report import figures, installed
from lambda_benchmarks.units import Row, Unfinished, Unit
from lambda_det import create_backbone
from lambda_det.layers.local import IMPLEMENTATIONS, local_position_output, unsupported
from lambda_det.modeling.common import SqueezeExcitation
from lambda_det.modeling.resnet import Bottleneck

ROOT = Path(__file__).resolve().parents[3]
# implementations for a GPU; of those left out, two build more than a GPU's memory holds
NAMES = tuple(name for name in IMPLEMENTATIONS if name not in ("compiled", "depthwise", "dense"))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LAYOUTS = ("channels last", "contiguous")
HEADS, QUERY_DEPTH, SCOPE = 4, 16, 23
# the allowed error in units of eps, as in tests/layers/test_gpu.py
TOLERANCES = {torch.bfloat16: 0.5, torch.float16: 0.5, torch.float32: 32}


@dataclass(frozen=True)
class Scale:
    """The sizes of all parts.

    Attributes:
        maps: side and channels of the maps of LambdaResNet at 1024x1024.
        batches: of position outputs and layers.
        dtypes: of everything.
        depths: of networks.
        side: of images.
        images: in a batch of networks; halved where the memory is too small.
        rounds: of each comparison.
        tests: of pytest: by name, the words that select them.
        compiler: backend of torch.compile.
        flags: more words of each training on shapes.
        steps: of a training that is killed, of one on several GPUs, and of one by CUDA graphs.
        own: images of a step of a training on own data.
        network: of a training by CUDA graphs.
    """

    maps: tuple[tuple[int, int], ...] = ((64, 256), (64, 512), (32, 512))
    batches: tuple[int, ...] = (2, 8, 1)
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    depths: tuple[int, ...] = (50, 101, 152)
    side: int = 1024
    images: int = 8
    rounds: int = 5
    tests: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("others", ("tests", "-k", "not float16 and not float32")),
        ("bfloat16", ("tests", "-k", "bfloat16")),
        ("float16", ("tests", "-k", "float16 and not bfloat16")),
        ("float32", ("tests", "-k", "float32")),
    )
    compiler: str = "inductor"
    flags: tuple[str, ...] = ()
    steps: int = 100
    own: tuple[int, ...] = (4, 16, 64)
    network: str = "lambda_resnet50"


SMALL = Scale(
    maps=((4, 32),),
    batches=(1,),
    dtypes=("float32",),
    depths=(50,),
    side=64,
    images=2,
    rounds=1,
    tests=(("all", ("tests/layers/test_gpu.py", "-k", "empty")),),
    compiler="eager",
    flags=("SOLVER.IMS_PER_BATCH", "2", "INPUT.MIN_SIZE_TRAIN", "(64,)", "SOLVER.STEPS", "()"),
    steps=4,
    own=(2,),
    network="lambda_resnet26_slim",
)


@dataclass(frozen=True)
class Place:
    """The device and the folders of the parts.

    Attributes:
        device: "cuda" or, to rehearse, "cpu".
        folder: of the results, the data and the trainings.
        scale: the sizes.
        bccd: folder of the data set BCCD, or None.
    """

    device: str
    folder: Path
    scale: Scale
    bccd: Path | None = None


def units(place: Place) -> list[Unit]:
    """All units, in the order of the parts."""
    return [
        *_tests(place),
        *_layers(place),
        *_networks(place),
        *_trainings(place),
        *_kill(place),
        *_processes(place),
        *_profile(place),
    ]


def device_problem(device: str) -> str | None:
    """PyTorch's reason why there is no such device, such as no GPU or an old driver; None if there
    is.
    """
    if torch.device(device).type != "cuda" or torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError or AssertionError
        return str(error).strip().splitlines()[0]
    return "PyTorch sees no GPU."


def is_broken(device: str) -> bool:
    """Whether an error has left a GPU in a state in which every later call fails."""
    if torch.device(device).type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # AcceleratorError, RuntimeError
        return True
    return False


# a: tests -----------------------------------------------------------------------------------------


def _tests(place: Place) -> Iterator[Unit]:
    for name, words in place.scale.tests:

        def work(deadline: float, words: Sequence[str] = words, name: str = name) -> list[Row]:
            mark = ["-m", "gpu"] if place.device == "cuda" else []
            if place.device == "cuda" and installed("pytest-xdist"):
                mark += ["-n", "8"]
            command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *mark, *words]
            text = run_python(command, place.folder / f"tests_{name}.log", deadline)
            last = [line for line in text.splitlines() if line.strip()][-1]
            return [{"case": f"pytest -m gpu, {name}", "result": last.strip("= ")}]

        yield Unit("a", f"tests: {name}", work, seconds=200)


# b: position outputs and layers -------------------------------------------------------------------


def _layers(place: Place) -> Iterator[Unit]:
    settings = itertools.product(place.scale.dtypes, LAYOUTS, place.scale.batches)
    for dtype, layout, batch in settings:
        about = f"{dtype}, {layout}, batch {batch}"
        work = partial(_position_rows, place, dtype, layout, batch)
        yield Unit("b", f"position output: {about}", work, seconds=60)
        work = partial(_layer_rows, place, dtype, layout, batch)
        yield Unit("b", f"layer: {about}", work, seconds=60)


def _position_rows(place: Place, dtype: str, layout: str, batch: int, _: float) -> list[Row]:
    rows = []
    for side, channels in place.scale.maps:
        inputs = position_inputs(batch, side, channels // HEADS, DTYPES[dtype], layout)
        about = f"{side}x{side}, v={channels // HEADS}, {dtype}, {layout}, batch {batch}"
        on_device = [x.to(place.device).requires_grad_() for x in inputs]
        reasons = {name: unsupported(name, *on_device) for name in NAMES}
        names = [name for name in NAMES if reasons[name] is None]
        with exact_float32():
            shares = position_errors(names, on_device)
            cases = [
                Case(
                    f"position output, {name}, {about}",
                    lambda name=name, inputs=inputs: (
                        partial(local_position_output, implementation=name),
                        tuple(x.requires_grad_() for x in inputs),
                    ),
                )
                for name in names
            ]
            setting = Setting(
                torch.device(place.device),
                DTYPES[dtype],
                autocast=False,
                rounds=place.scale.rounds,
                device_time=True,
            )
            results = measure_group(Group(about, cases, (FORWARD, BOTH)), setting)
        rows += [
            row_of(result, results[0], BOTH, f"error {shares[name]}")
            for name, result in zip(names, results, strict=True)
        ]
        rows += [
            {"case": f"position output, {name}, {about}", "result": why}
            for name, why in reasons.items()
            if why is not None
        ]
    return rows


def position_inputs(
    batch: int, side: int, depth: int, dtype: torch.dtype, layout: str
) -> list[Tensor]:
    """Queries, values and embedding as the layer lays them out, on the CPU."""
    parts = []
    for groups, channels in ((HEADS, QUERY_DEPTH), (depth, 1)):
        if layout == "channels last":
            parts.append(torch.randn(batch, side, side, groups, channels))
        else:
            parts.append(torch.randn(batch, groups, channels, side, side).permute(0, 3, 4, 1, 2))
    reach = min(SCOPE, 2 * side - 1)
    parts.append(torch.randn(QUERY_DEPTH, 1, reach, reach))
    return [x.to(dtype) for x in parts]


def position_errors(names: Sequence[str], inputs: list[Tensor]) -> dict[str, str]:
    """The largest error of output and gradients against float64, for each implementation.

    Returns:
        For each name a text with the error as a share of the allowed one.
    """
    queries, values, _ = inputs
    shape = (*queries.shape[:4], values.shape[3])
    grad = torch.randn(shape, device=queries.device, dtype=queries.dtype) * 2**-6
    try:
        double = [x.detach().double().requires_grad_() for x in inputs]
        exact = _with_gradients("conv", double, grad.double())
    except RuntimeError as error:
        text = f"unknown, the reference in float64 failed ({str(error).splitlines()[0][:80]})"
        return dict.fromkeys(names, text)
    limit = TOLERANCES[grad.dtype] * torch.finfo(grad.dtype).eps
    texts = {}
    for name in names:
        own = _errors(_with_gradients(name, inputs, grad), exact)
        share = max(own) / limit
        texts[name] = f"{share:.2f} of the allowed" if share <= 1 else f"{share:.2f}: WRONG"
    return texts


def _with_gradients(name: str, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    output = IMPLEMENTATIONS[name](*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


def _errors(results: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [
        ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).nan_to_num(torch.inf).item()
        for a, b in zip(results, exact, strict=True)
    ]


def _layer_rows(place: Place, dtype: str, layout: str, batch: int, _: float) -> list[Row]:
    rows = []
    peers = [name for name in PEERS if installed(name)]
    setting = Setting(
        torch.device(place.device),
        DTYPES[dtype],
        channels_last=layout == "channels last",
        rounds=place.scale.rounds,
        device_time=True,
    )
    for side, channels in place.scale.maps:
        about = f"{side}x{side}, d={channels}, {dtype}, {layout}, batch {batch}"
        cases = layer_cases([*NAMES, *peers], batch, side, channels)
        with exact_float32():
            results = measure_group(Group(about, cases, (FORWARD, BOTH)), setting)
        rows += [row_of(result, results[0], BOTH, about=about) for result in results]
    rows += [
        {"case": f"layer of {name}", "result": "not installed"}
        for name in PEERS
        if name not in peers
    ]
    return rows


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Switch off TF32, whose products have fewer digits than float32."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


def row_of(result: Result, base: Result, mode: str, text: str = "", about: str = "") -> Row:
    """A row of the table for a case: the measurements in forward and in ``mode``."""
    forward, training = (figures(result, base, name) for name in (FORWARD, mode))
    notes = [text] if text else []
    for name, figure in ((FORWARD, forward), (mode, training)):
        if "ratio" in figure:
            notes.append(f"{name} {figure['ratio'][1]:.2f} of the first")
        if "reason" in figure:
            notes.append(f"{name}: {figure['reason']}")
    if result.case.images != result.images:
        notes.append(f"with {result.case.images} images, scaled to {result.images}")
    return {
        "case": f"{result.case.name}, {about}" if about else result.case.name,
        "forward_ms": forward["seconds"][1] * 1e3 if "seconds" in forward else None,
        "forward_device_ms": _device_ms(result, FORWARD),
        "training_ms": training["seconds"][1] * 1e3 if "seconds" in training else None,
        "training_device_ms": _device_ms(result, mode),
        "images_per_second": training.get("images_per_second", [None, None])[1],
        "peak_mb": training["peak_bytes"] / 1e6 if "peak_bytes" in training else None,
        "result": "; ".join(notes),
    }


def _device_ms(result: Result, mode: str) -> float | None:
    """Milliseconds in which the GPU works, for as many images as the other times."""
    if mode not in result.device_seconds:
        return None
    scale = result.images / result.case.images if result.case.images else 1
    return result.device_seconds[mode] * scale * 1e3


# c: networks --------------------------------------------------------------------------------------


def _networks(place: Place) -> Iterator[Unit]:
    for dtype, depth in itertools.product(place.scale.dtypes, place.scale.depths):
        about = f"{depth} layers, {dtype}"
        for kind, cases in (("backbone", _backbones), ("Mask R-CNN", _detectors)):
            work = partial(_network_rows, place, cases, kind, depth, dtype)
            yield Unit("c", f"{kind}: {about}", work, seconds=150)
    for dtype in place.scale.dtypes:
        yield Unit("c", f"parts: {dtype}", partial(_parts_rows, place, dtype), seconds=30)
    for depth, (name, make) in itertools.product(place.scale.depths, PLAIN_AND_LAMBDA.items()):
        cases = partial(_compiled, name=name, make=make)
        work = partial(_network_rows, place, cases, "backbone", depth, place.scale.dtypes[0])
        yield Unit("c", f"torch.compile: {name}-{depth}", work, seconds=2.5 * depth)


def _network_rows(
    place: Place, make_cases: Any, kind: str, depth: int, dtype: str, _: float
) -> list[Row]:
    side = place.scale.side
    about = f"{dtype}{' with tf32' if dtype == 'float32' else ''}, {side}x{side}"
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    setting = Setting(
        torch.device(place.device),
        DTYPES[dtype],
        channels_last=True,
        rounds=place.scale.rounds,
        device_time=kind == "backbone",  # a detector's host waits for the device
    )
    # in float16 gradients are sometimes infinite, because there is no loss scale; no weight changes
    mode = BOTH if dtype == "float16" else STEP
    group = Group(f"{kind}, {about}", make_cases(place, depth), (FORWARD, mode))
    results = measure_group(group, setting)
    return [row_of(result, results[0], mode, about=about) for result in results]


def plain_resnet(depth: int, batch: int, side: int) -> tuple[nn.Module, tuple[Tensor]]:
    """Detectron2's own backbone, with the settings of its baselines from scratch."""
    cfg = get_cfg()
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.NORM = depth, "BN"
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    backbone = build_resnet_backbone(cfg, ShapeSpec(channels=3))
    return backbone, (torch.randn(batch, 3, side, side),)


def lambda_backbone(
    depth: int, batch: int, side: int, **options: Any
) -> tuple[nn.Module, tuple[Tensor]]:
    backbone = create_backbone(f"lambda_resnet{depth}", **options)
    return backbone, (torch.randn(batch, 3, side, side),)


class Shortcut(nn.Module):
    """The shortcut of the first block of a stage."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = Bottleneck(channels, 2 * channels, bottleneck_channels=channels // 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.block._shorten(x)


PARTS = {"squeeze-and-excitation": SqueezeExcitation, "shortcut": Shortcut}  # of so many channels


def _parts_rows(place: Place, dtype: str, _: float) -> list[Row]:
    """Parts of LambdaResNet on the map of c2, each with and without its function."""
    side, channels = place.scale.side // 4, place.scale.maps[0][1]
    sizes = place.scale.images, channels, side, side
    setting = Setting(
        torch.device(place.device),
        DTYPES[dtype],
        channels_last=True,
        rounds=place.scale.rounds,
        device_time=True,
    )
    about = f"{side}x{side}, {channels} channels, {dtype}, batch {place.scale.images}"
    rows = []
    for name, part in PARTS.items():

        def make(part: Any = part) -> tuple[nn.Module, tuple[Tensor]]:
            x = torch.randn(sizes).to(DTYPES[dtype])  # as a network's maps are
            return part(channels), (x.requires_grad_(),)

        cases = [
            Case(f"{name}, part by part", partial(part_by_part, make)),
            Case(f"{name}, one function", make),
        ]
        results = measure_group(Group(name, cases, (FORWARD, BOTH)), setting)
        rows += [row_of(result, results[0], BOTH, about=about) for result in results]
    return rows


PLAIN_AND_LAMBDA = {"Detectron2's ResNet": plain_resnet, "LambdaResNet": lambda_backbone}


def part_by_part(make: Any, **sizes: int) -> tuple[nn.Module, tuple[Tensor]]:
    """The network without functions that stand for several modules: a hook waits for each call."""
    model, inputs = make(**sizes)
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
    return model, inputs


def compiled(make: Any, backend: str, **sizes: int) -> tuple[nn.Module, tuple[Tensor]]:
    model, inputs = make(**sizes)
    return torch.compile(model, backend=backend), inputs


def _backbones(place: Place, depth: int) -> list[Case]:
    sizes = {"depth": depth, "side": place.scale.side}
    ours = partial(lambda_backbone, **sizes)
    makers = {
        f"Detectron2's ResNet-{depth}": partial(plain_resnet, **sizes),
        f"LambdaResNet-{depth}": ours,
        f"LambdaResNet-{depth}, query_first": partial(ours, implementation="query_first"),
        f"LambdaResNet-{depth}, part by part": partial(part_by_part, ours),
        f"LambdaResNet-{depth}, activations computed again": partial(
            ours, checkpoint_activations=True
        ),
    }
    return [halving(name, make, place.scale.images, {}) for name, make in makers.items()]


def _compiled(place: Place, depth: int, name: str, make: Any) -> list[Case]:
    make = partial(make, depth=depth, side=place.scale.side)
    makers = {
        f"{name}-{depth}": make,
        f"{name}-{depth}, compiled": partial(compiled, make, place.scale.compiler),
    }
    return [halving(name, make, place.scale.images, {}) for name, make in makers.items()]


def _detectors(place: Place, depth: int) -> list[Case]:
    """The detectors, all in the precision of the unit, by autocast around the whole detector."""
    plain = ["SOLVER.AMP.ENABLED", False, "MODEL.CHANNELS_LAST", True]
    again = [*plain, "MODEL.LAMBDA_RESNET.CHECKPOINT_ACTIVATIONS", True]
    sizes = {"side": place.scale.side, "device": place.device}
    makers = {
        f"Detectron2's Mask R-CNN, ResNet-{depth}": partial(detectron2_detector, depth, **sizes),
        f"Mask R-CNN, LambdaResNet-{depth}": partial(our_detector, depth, plain, **sizes),
        f"Mask R-CNN, LambdaResNet-{depth}, activations computed again": partial(
            our_detector, depth, again, **sizes
        ),
    }
    batch = max(place.scale.images // 2, 1)
    return [halving(name, make, batch, {}) for name, make in makers.items()]


# d to f: trainings as a user starts them ----------------------------------------------------------


def run_python(words: Sequence[str], log: Path, deadline: float, **environment: str) -> str:
    """Run Python with these words in the checkout, and return what it printed.

    At the deadline it gets SIGTERM, so a training saves its state.

    Raises:
        Unfinished: the time was over, or the training ended with the status to continue later.
        RuntimeError: it failed, with its last line.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **environment}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            # the training needs some seconds of the part to save its state
            status = process.wait(max(deadline - time.monotonic() - 30, 1))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            raise Unfinished from None
        finally:
            process.kill()
            process.wait()
    text = log.read_text("utf-8", "replace")
    if status == 75:
        raise Unfinished
    lines = [line for line in text.splitlines() if line.strip()] or ["nothing was printed"]
    if status not in (0, 5):  # 5: pytest found no test of these words
        raise RuntimeError(f"status {status}: {lines[-1].strip()} ({log})")
    return text


def make_shapes(place: Place) -> Path:
    """The shapes data set below the folder of the results."""
    root = place.folder / "data"
    if not (root / "shapes").is_dir():
        small = ["--num-train", "8", "--num-val", "4", "--size", "64"]
        words = [str(ROOT / "datasets/make_shapes.py"), "--root", str(root)]
        words += small if place.scale is SMALL else []
        run_python(words, place.folder / "make_shapes.log", time.monotonic() + 120)
    return root


def training(place: Place, name: str, keys: Sequence[str], processes: int = 1) -> list[str]:
    """The words of a training on shapes; it goes on where it was stopped."""
    config = ROOT / "configs/quick/shapes_lambdaresnet26_slim.yaml"
    words = ["-m", "lambda_det", "train", "--config", str(config), "--resume"]
    words += ["--output", str(place.folder / name), "--device", place.device]
    words += ["--num-gpus", str(processes)]
    return [*words, *place.scale.flags, *keys]


def metrics_of(run: Path) -> dict[str, float]:
    """The last value of each metric of a run."""
    values: dict[str, float] = {}
    for line in (run / "metrics.json").read_text("utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a line that a kill cut off
            values |= json.loads(line)
    return values


_SHOWN = (("bbox", "AP"), ("bbox", "AP50"), ("segm", "AP"))


def _result_of(run: Path) -> str:
    values = metrics_of(run)
    # The recipes for own data evaluate only averaged weights
    weights = "_EMA" if "bbox_EMA/AP" in values and "bbox/AP" not in values else ""
    names = [f"{kind}{weights}/{ap}" for kind, ap in _SHOWN if f"{kind}{weights}/{ap}" in values]
    shown = [f"{name} {values[name]:.1f}" for name in names]
    return ", ".join([*shown, f"{values['time']:.3f} s a step"])


def _trainings(place: Place) -> Iterator[Unit]:
    def demo(deadline: float) -> list[Row]:
        data = make_shapes(place)
        length = ["SOLVER.MAX_ITER", str(place.scale.steps)] if place.scale is SMALL else []
        words = training(place, "demo", length)
        run_python(words, place.folder / "demo.log", deadline, DETECTRON2_DATASETS=str(data))
        return [{"case": "the demo's training", "result": _result_of(place.folder / "demo")}]

    def bccd(deadline: float) -> list[Row]:
        if place.bccd is None:
            return [{"case": "BCCD by the default recipe", "result": "left out: no --bccd DIR"}]
        words = ["-m", "lambda_det", "train", "--data", str(place.bccd), "--resume"]
        words += ["--output", str(place.folder / "bccd"), "--device", place.device]
        words += list(place.scale.flags)
        words += ["SOLVER.MAX_ITER", str(place.scale.steps)] if place.scale is SMALL else []
        run_python(words, place.folder / "bccd.log", deadline)
        result = _result_of(place.folder / "bccd")
        return [{"case": "BCCD by the default recipe", "result": result}]

    yield Unit("d", "demo", demo, seconds=120, attempts=6)
    yield Unit("d", "CUDA graphs", partial(_graphs_rows, place), seconds=150, attempts=4)
    for images in place.scale.own:
        work = partial(_own_rows, place, images)
        yield Unit("d", f"own data: {images} images a step", work, seconds=60, attempts=4)
    yield Unit("d", "BCCD", bccd, seconds=120, attempts=6)


def _graphs_rows(place: Place, deadline: float) -> list[Row]:
    """A training with 2 images of one size a step, without CUDA graphs and by them."""
    data, scale, rows = make_shapes(place), place.scale, []
    keys = ["MODEL.WEIGHTS", "", "MODEL.LAMBDA_RESNET.NAME", scale.network, "SEED", "1"]
    keys += ["INPUT.LSJ.ENABLED", "True", "INPUT.LSJ.SIZE", str(scale.side)]
    keys += ["SOLVER.IMS_PER_BATCH", "2", "SOLVER.MAX_ITER", str(scale.steps)]
    keys += ["TEST.EVAL_PERIOD", "0"]
    for choice in ("never", "auto"):
        name = f"graphs_{choice}"
        words = training(place, name, [*keys, "SOLVER.CUDA_GRAPHS", choice])
        log = place.folder / f"{name}.log"
        text = run_python(words, log, deadline, DETECTRON2_DATASETS=str(data))
        found = metrics_of(place.folder / name)
        said = [line.strip() for line in text.splitlines() if "CUDA graphs" in line]
        notes = [f"total_loss {found['total_loss']:.4g} at the end", *said[:1]]
        case = f"{scale.network}, 2 images of {scale.side}x{scale.side}, CUDA_GRAPHS {choice}"
        rows.append({"case": case, "training_ms": found["time"] * 1e3, "result": "; ".join(notes)})
    return rows


def _own_rows(place: Place, images: int, deadline: float) -> list[Row]:
    """Some steps of the recipe that own data get here, with so many images."""
    data = place.bccd or make_shapes(place) / "shapes"
    name = f"own_{images}"
    words = ["-m", "lambda_det", "train", "--data", str(data), "--resume"]
    words += ["--output", str(place.folder / name), "--device", place.device]
    words += [*place.scale.flags, "SOLVER.MAX_ITER", str(place.scale.steps)]
    words += ["SOLVER.IMS_PER_BATCH", str(images), "TEST.EVAL_PERIOD", "0"]
    run_python(words, place.folder / f"{name}.log", deadline)
    found = metrics_of(place.folder / name)
    return [
        {
            "case": f"own data, {images} images a step",
            "training_ms": found["time"] * 1e3,
            "images_per_second": images / found["time"],
            "result": f"waits for data {found['data_time'] / found['time']:.0%} of the time",
        }
    ]


def _kill(place: Place) -> Iterator[Unit]:
    def work(deadline: float) -> list[Row]:
        data = str(make_shapes(place))
        steps = place.scale.steps
        keys = ["SEED", "1", "SOLVER.MAX_ITER", str(steps), "TEST.EVAL_PERIOD", "0"]
        keys += ["SOLVER.CHECKPOINT_PERIOD", str(steps // 2)]
        for name in ("whole", "killed"):
            words = training(place, name, keys)
            if name == "killed" and not (place.folder / "was_killed").exists():
                _start_and_kill(words, place, steps // 2 - 1, data)
                (place.folder / "was_killed").touch()
            run_python(words, place.folder / f"{name}.log", deadline, DETECTRON2_DATASETS=data)
        compare = str(ROOT / "projects/benchmarks/compare_runs.py")
        log = place.folder / "compare_runs.log"
        folders = [str(place.folder / name) for name in ("whole", "killed")]
        try:
            run_python([compare, *folders], log, deadline)
            text = "the same bits as without the kill"
        except RuntimeError:
            text = "differs: " + log.read_text("utf-8").strip().splitlines()[0]
        return [{"case": f"SIGKILL after step {steps // 2}, then --resume", "result": text}]

    yield Unit("e", "kill and resume", work, seconds=150)


def _start_and_kill(words: list[str], place: Place, step: int, data: str) -> None:
    """Start a training, and end it by SIGKILL once it has the checkpoint of this step."""
    checkpoint = place.folder / "killed" / f"model_{step:07d}.pth"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DETECTRON2_DATASETS": data}
    with (place.folder / "was_killed.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while not checkpoint.exists():
                if process.poll() is not None:
                    raise RuntimeError(f"it ended before the kill ({log.name})")
                time.sleep(0.05)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _processes(place: Place) -> Iterator[Unit]:
    most = torch.cuda.device_count() if place.device == "cuda" else 2
    numbers = sorted({1, most, *(n for n in (2, 4, 8) if n < most)})
    for number in numbers:

        def work(deadline: float, number: int = number) -> list[Row]:
            data = str(make_shapes(place))
            name = f"processes_{number}"
            keys = ["SOLVER.MAX_ITER", str(place.scale.steps), "TEST.EVAL_PERIOD", "0"]
            words = training(place, name, keys, number)
            run_python(words, place.folder / f"{name}.log", deadline, DETECTRON2_DATASETS=data)
            seconds = metrics_of(place.folder / name)["time"]
            backend = "NCCL" if place.device == "cuda" else "gloo"
            text = backend if number > 1 else "one process, without " + backend
            case = f"--num-gpus {number}, a step of the demo"
            return [{"case": case, "training_ms": seconds * 1e3, "result": text}]

        yield Unit("f", f"--num-gpus {number}", work, seconds=100, attempts=4)


# g: profile ---------------------------------------------------------------------------------------


def _profile(place: Place) -> Iterator[Unit]:
    def work(_: float) -> list[Row]:
        depth, side = place.scale.depths[0], place.scale.side
        make = partial(our_detector, depth, ["MODEL.CHANNELS_LAST", True], 2, side, place.device)
        name = f"Mask R-CNN, LambdaResNet-{depth}, {side}x{side}, 2 images"
        subject = Subject(
            Case(name, make, 2), Setting(torch.device(place.device), channels_last=True)
        )
        for _ in range(3):
            subject.run(STEP)
        return [{"case": name, "result": row} for row in profile(lambda: subject.run(STEP), place)]

    yield Unit("g", "profile of a step", work, seconds=60)


def profile(work: Any, place: Place, rows: int = 10) -> list[str]:
    """Where the time of some work goes: the kernels of a GPU that take the most, or on a CPU the
    operators.
    """
    kinds = torch.profiler.ProfilerActivity
    on_gpu = place.device == "cuda"
    activities = [kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize()

    def microseconds(event: Any) -> float:
        if not on_gpu:
            return event.self_cpu_time_total
        # PyTorch 2.4 has the older name
        older = getattr(event, "self_cuda_time_total", 0)
        return getattr(event, "self_device_time_total", older)

    events = profiler.key_averages()
    if on_gpu:
        # An operator has the time of its kernels, and its span on the GPU has the operator's name
        on_cpu = torch.autograd.DeviceType.CPU
        operators = {event.key for event in events if event.device_type == on_cpu}
        events = [event for event in events if event.key not in operators]
    events = sorted(events, key=microseconds, reverse=True)
    total = sum(map(microseconds, events)) or 1
    lines = [
        f"{number}. {event.key[:80]}: {microseconds(event) / 1e3:.2f} ms, "
        f"{100 * microseconds(event) / total:.0f} %, {event.count} calls"
        for number, event in enumerate(events[:rows], 1)
    ]
    if on_gpu:
        launches = sum(event.count for event in events)
        lines.append(f"all kernels: {total / 1e3:.2f} ms, {launches} calls")
    return lines
