"""The first hour on a GPU, rehearsed: its parts on a CPU, and what a GPU could answer, made up."""

import contextlib
import importlib.util
import json
import os
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lambda_benchmarks import detectors, first_hour, measure
from lambda_benchmarks.first_hour import ROOT, SMALL, Place, Scale
from lambda_benchmarks.units import Results, Unfinished, Unit, run_part
from lambda_det import create_backbone, get_config
from lambda_det.layers.local import IMPLEMENTATIONS
from tests import forked
from tests.shapes import make_shapes
from tests.tool import load_tool

tool = load_tool("first_hour", "projects/benchmarks")
MACHINE = {"gpu": "a card"}


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results" / "first_hour.json", MACHINE)


def unit(name, work, **others):
    return Unit("b", name, work, **others)


def row(text):
    return lambda deadline: [{"case": text, "forward_ms": 0.25, "result": "well"}]


# ---- units


def test_each_result_is_written_at_once_and_not_made_again(results):
    def stop(deadline):
        assert set(json.loads(results.path.read_text())["units"]) == {"one"}
        raise KeyboardInterrupt

    made = [unit("one", row("first")), unit("two", stop), unit("three", row("third"))]
    with pytest.raises(KeyboardInterrupt):
        run_part(made, results, 60)
    again = Results(results.path, {})
    assert again.content["machine"] == MACHINE and again.attempts(made[1]) == 1
    made[0] = unit("one", stop)
    made[1] = unit("two", row("sec|ond"))
    assert run_part(made, again, 60)
    table = results.path.with_suffix(".md").read_text()
    assert table.index("first") < table.index("sec/ond") < table.index("third")
    assert "a card" in table and table.count("0.25") == 3


def test_a_part_ends_with_its_time(results):
    made = [
        unit("one", row("one"), seconds=1000),  # the first is begun in any case
        unit("two", row("two"), seconds=1),
        unit("long", row("long"), seconds=1000),
        unit("after", row("after"), seconds=1),
    ]
    assert not run_part(made, results, 100)
    assert set(results.content["units"]) == {"one", "two"}
    assert not run_part(made[:2] + made[3:] + made[2:3], results, 0)
    assert set(results.content["units"]) == {"one", "two", "after"}
    assert run_part(made, results, 100) and results.is_finished(made[2])


def test_what_is_stopped_goes_on_in_the_next_part(results):
    def training(deadline):
        training.parts += 1
        if training.parts < 3:
            raise Unfinished
        return [{"case": "training", "result": "AP 60"}]

    training.parts = 0
    made = [unit("training", training, attempts=6), unit("after", row("after"))]
    assert not run_part(made, results, 60) and not run_part(made, results, 60)
    assert run_part(made, results, 60)
    assert "AP 60" in results.table() and "after" in results.table()


def test_errors_are_results_and_the_others_go_on(results):
    def fail(error):
        def work(deadline):
            raise error

        return work

    made = [
        unit("memory", fail(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried 3 GiB"))),
        unit("kernel", fail(RuntimeError("an illegal\nmemory access"))),
        unit("last", row("last")),
    ]
    assert run_part(made, results, 60)
    table = results.table()
    assert "out of memory" in table and "an illegal memory access" in table and "last" in table


def test_a_broken_device_ends_the_process_and_the_next_part_goes_on(results):
    def fail(deadline):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    made = [unit("kernel", fail), unit("after", row("after"))]
    assert not run_part(made, results, 60, is_broken=lambda: True)
    assert set(results.content["units"]) == {"kernel"}
    assert run_part(made, results, 60)


def test_a_unit_that_ends_its_process_is_tried_twice(results):
    made = [unit("crash", row("crash")), unit("after", row("after"))]
    for _ in range(2):
        results.begin(made[0])  # and the process was gone
    assert run_part(made, results, 60)
    assert "ended 2 times" in results.table() and "after" in results.table()


# ---- what is missing is named before the first part


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """What the command says when it ends with status 2, without a part begun."""

    def refused(*words):
        def begin(*args):
            raise AssertionError("a part was begun")

        monkeypatch.setattr(tool, "run_all", begin)
        assert tool.main(["--output", str(tmp_path / "out"), *words]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return refused


def test_no_gpu_and_an_old_driver(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for text in ("No CUDA GPUs are available", "The NVIDIA driver on your system is too old"):

        def init(text=text):
            raise RuntimeError(f"{text}\nmore")

        monkeypatch.setattr(torch.cuda, "init", init)
        said = refused()
        assert text in said and "more" not in said and "--device cpu --small" in said


def test_packages(refused, monkeypatch, capsys):
    find = importlib.util.find_spec

    def without(*names):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name in names else find(name)
        )

    without("pytest", "detectron2")
    assert "detectron2, pytest" in refused("--device", "cpu")
    without("lambda_networks")
    monkeypatch.setattr(tool, "run_once", lambda args: 0)
    assert tool.main(["--output", "x", "--device", "cpu", "--once"]) == 0
    assert "lambda-networks is not installed" in capsys.readouterr().out


def test_wrong_words(refused):
    assert "nowhere" in refused("--device", "cpu", "--bccd", "nowhere")
    with pytest.raises(SystemExit):
        refused("--parts", "az")


# ---- parts in processes


def script(tmp_path, text):
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(text))
    return str(file)


PART = """
import sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--output") + 1])
folder.mkdir(exist_ok=True)
file = folder / "first_hour.json"
done = len(file.read_text()) if file.exists() else 0
assert sys.argv[-1] == "--once"
if done < MOST:
    file.write_text("." * (done + 1))
sys.exit(0 if done + 1 == 3 else STATUS)
"""


@pytest.mark.slow
def test_parts_follow_until_nothing_is_left(tmp_path, monkeypatch):
    """Also when one is ended by a signal; without progress it ends."""
    words = ["--output", str(tmp_path / "out"), "--device", "cpu"]
    monkeypatch.setattr(tool, "check", lambda args: None)
    for status, most, expected in ((75, 3, 0), (139, 3, 0), (1, 1, 2)):
        text = PART.replace("MOST", str(most)).replace("STATUS", str(status))
        monkeypatch.setattr(tool, "__file__", script(tmp_path, text))
        assert tool.main(words) == expected
        (tmp_path / "out" / "first_hour.json").unlink()


@pytest.mark.slow
def test_a_training_is_stopped_in_time_and_may_go_on(tmp_path):
    text = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    print("begun", flush=True)
    time.sleep(60)
    """
    log = tmp_path / "log"
    with pytest.raises(Unfinished):
        # It is stopped 30 s before the deadline, when Python has started
        first_hour.run_python([script(tmp_path, text)], log, time.monotonic() + 35)
    assert log.read_text() == "begun\n"
    failing = script(tmp_path, "print('one'); raise SystemExit('the reason')")
    with pytest.raises(RuntimeError, match=r"status 1: the reason .*log"):
        first_hour.run_python([failing], log, time.monotonic() + 60)
    assert first_hour.run_python(["-c", "print(1)"], log, time.monotonic() + 60) == "1\n"


def test_on_gpus_the_parts_are_those_of_the_issue(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    names = [unit.name for unit in first_hour.units(Place("cuda", tmp_path, Scale()))]
    assert len(set(names)) == len(names)
    assert [n for n in names if "num-gpus" in n] == [f"--num-gpus {n}" for n in (1, 2, 4, 6)]
    for dtype in ("bfloat16", "float16", "float32"):
        for layout in ("channels last", "contiguous"):
            for batch in (1, 2, 8):
                assert f"position output: {dtype}, {layout}, batch {batch}" in names
                assert f"layer: {dtype}, {layout}, batch {batch}" in names
        for depth in (50, 101, 152):
            assert f"backbone: {depth} layers, {dtype}" in names
            assert f"Mask R-CNN: {depth} layers, {dtype}" in names
    others = {"torch.compile: LambdaResNet-152", "demo", "BCCD", "kill and resume", "CUDA graphs"}
    assert others | {"parts: bfloat16", "own data: 64 images a step"} <= set(names)


# ---- what is measured


def test_a_wrong_kernel_is_seen(monkeypatch):
    inputs = [
        x.requires_grad_()
        for x in first_hour.position_inputs(1, 4, 8, torch.float32, "channels last")
    ]
    texts = first_hour.position_errors(["query_first"], inputs)
    assert texts["query_first"].endswith("of the allowed")

    def wrong(queries, values, embedding):
        return IMPLEMENTATIONS["conv"](queries, values, embedding) * 1.001

    monkeypatch.setitem(IMPLEMENTATIONS, "query_first", wrong)
    assert "WRONG" in first_hour.position_errors(["query_first"], inputs)["query_first"]

    def no_memory(*inputs):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setitem(IMPLEMENTATIONS, "conv", no_memory)
    texts = first_hour.position_errors(["query_first"], inputs)
    assert "unknown" in texts["query_first"] and "out of memory" in texts["query_first"]


@pytest.mark.parametrize("layout", first_hour.LAYOUTS)
def test_inputs_lie_in_memory_as_the_layer_has_them(layout):
    queries, values, embedding = first_hour.position_inputs(2, 3, 8, torch.bfloat16, layout)
    assert queries.shape == (2, 3, 3, 4, 16) and values.shape == (2, 3, 3, 8, 1)
    assert embedding.shape == (16, 1, 5, 5)  # as large as the map allows
    assert queries.is_contiguous() == (layout == "channels last")
    assert queries.dtype == values.dtype == embedding.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["self_device_time_total", "self_cuda_time_total"])
def test_profile_of_a_gpu(name, monkeypatch, tmp_path):
    """By the names of PyTorch 2.4 and of newer ones."""
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    times = {"kernel 0": 1000.0, "kernel 1": 3000.0, "kernel 2": 4000.0}
    times |= {"aten::add": 3000.0, "module": 7000.0}  # the operators that launched them
    events = [
        SimpleNamespace(key=key, count=2, self_cpu_time_total=0, device_type=device, **{name: time})
        for key, time in times.items()
        for device in ((gpu,) if "kernel" in key else (cpu, gpu))
    ]

    class Profile:
        def __init__(self, activities):
            assert len(activities) == 2

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def key_averages(self):
            return events

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    lines = first_hour.profile(lambda: None, Place("cuda", tmp_path, SMALL), rows=2)
    assert lines == [
        "1. kernel 2: 4.00 ms, 50 %, 2 calls",
        "2. kernel 1: 3.00 ms, 38 %, 2 calls",
        "all kernels: 8.00 ms, 6 calls",
    ]


# ---- rehearsal


@pytest.fixture(autouse=True)
def _no_repeats(monkeypatch):
    monkeypatch.setattr(measure, "SHORTEST", 0)


@pytest.fixture
def smaller(monkeypatch):
    """Slim networks of few blocks; the real ones take minutes, most of all in the interpreter."""
    tiny = get_config("quick/shapes_lambdaresnet26_slim.yaml")
    tiny.MODEL.LAMBDA_RESNET.NAME = "resnet14_slim_lambda_c5"
    monkeypatch.setattr(detectors, "get_config", lambda name: tiny.clone())
    monkeypatch.setattr(
        first_hour,
        "create_backbone",
        lambda name, **options: create_backbone("resnet14_slim_lambda_c5", scope=3, **options),
    )


def rehearse(parts, folder, **options):
    place = Place("cpu", folder, SMALL, **options)
    results = Results(folder / "first_hour.json", MACHINE)
    made = [unit for unit in first_hour.units(place) if unit.part in parts]
    made = [unit for unit in made if unit.name != "--num-gpus 1"]  # as the demo
    assert run_part(made, results, 600)
    return [row for unit in made for row in results.content["units"][unit.name]["rows"]]


def run_forked(words, log, deadline, **environment):
    """As run_python, in a process that need not import PyTorch."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    folder = ROOT
    if data := environment.get("DETECTRON2_DATASETS"):  # it was read already
        folder = Path(data).parent
        if not (folder / "datasets").exists():
            (folder / "datasets").symlink_to(data)
    done = forked.run(words, log, cwd=folder, PYTHONPATH=path, **environment)
    if done.returncode not in (0, 5):
        raise RuntimeError(f"status {done.returncode}: {done.stdout}")
    return done.stdout


@pytest.mark.benchmark
@pytest.mark.release
def test_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour, "LAYOUTS", first_hour.LAYOUTS[:1])
    rows = rehearse("b", tmp_path)
    for name in first_hour.NAMES:
        (row,) = (row for row in rows if f"position output, {name}, " in row["case"])
        skipped = row.get("forward_ms") is None  # what needs a GPU
        assert name not in ("query_first", "conv") if skipped else "of the allowed" in row["result"]
    (whole,) = (row for row in rows if row["case"].startswith("timm "))
    assert whole["training_ms"] > 0
    assert sum(row["case"].startswith("3x3 convolution") for row in rows) == 1


@pytest.mark.benchmark
@pytest.mark.release
def test_networks_and_profile(tmp_path, smaller):
    rows = rehearse("cg", tmp_path)
    measured = [row for row in rows if row.get("training_ms")]
    assert sum("compiled" in row["case"] for row in measured) == 2
    assert sum("part by part" in row["case"] for row in measured) == 3
    assert sum("one function" in row["case"] for row in measured) == 2
    assert sum("computed again" in row["case"] for row in measured) == 2
    assert sum("Mask R-CNN" in row["case"] for row in measured) == 3
    assert all(row["peak_mb"] > 0 for row in measured)
    networks = [row for row in measured if " channels, " not in row["case"]]
    assert all(row["images_per_second"] > 0 for row in networks)
    assert sum("calls" in row["result"] for row in rows) == 10


@pytest.mark.benchmark
@pytest.mark.release
@pytest.mark.posix
def test_trainings_kill_and_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour, "run_python", run_forked)
    make_shapes(tmp_path / "data", num_train=8, num_val=4, size=64)
    rows = rehearse("adef", tmp_path, bccd=tmp_path / "data" / "shapes")
    by_case = {row["case"]: row for row in rows}
    assert "passed" in by_case["pytest -m gpu, all"]["result"]
    assert "bbox/AP" in by_case["the demo's training"]["result"]
    assert "bbox_EMA/AP" in by_case["BCCD by the default recipe"]["result"]
    assert by_case["own data, 2 images a step"]["images_per_second"] > 0
    ends = [row["result"] for row in rows if "CUDA_GRAPHS" in row["case"]]
    assert len(ends) == 2 and ends[0] == ends[1]  # without a GPU there are none
    assert "the same bits" in by_case["SIGKILL after step 2, then --resume"]["result"]
    assert by_case["--num-gpus 2, a step of the demo"]["training_ms"] > 0


def test_units_are_listed_and_chosen(tmp_path, capsys):
    words = ["--output", str(tmp_path), "--device", "cpu", "--list"]
    assert tool.main([*words, "--units", "layer: bfloat16", "profile"]) == 0
    names = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert len(names) == 7 and names[-1].startswith("profile of a step: ")
    assert all(name.startswith("layer: bfloat16, ") for name in names[:-1])
    assert tool.main([*words, "--parts", "a", "--units", "layer"]) == 2
    assert "--list" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


class _Card:
    """What CUDA offers to measure the device's time, on a clock that replays move."""

    def __init__(self, monkeypatch):
        self.clock = 0.0
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=self.replay))
        monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: _Event(self))

    def replay(self):
        self.clock += 0.004


class _Event:
    def __init__(self, card):
        self.card = card

    def record(self):
        self.at = self.card.clock

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def test_the_time_of_a_device_stands_beside_that_of_its_host(monkeypatch):
    _Card(monkeypatch)
    case = measure.Case("a product", lambda: (torch.nn.Linear(2, 2), (torch.ones(1, 2),)))
    setting = measure.Setting(torch.device("cpu"), rounds=1)
    (result,) = measure.measure_group(measure.Group("", [case], (measure.FORWARD,)), setting)
    assert first_hour.row_of(result, result, measure.FORWARD)["forward_device_ms"] is None
    subject = measure.Subject(case, setting)
    measure._time_device(subject, measure.FORWARD, result)
    row = first_hour.row_of(result, result, measure.FORWARD)
    assert row["forward_device_ms"] == pytest.approx(4)
    # a run that cannot be recorded leaves the wall time
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: 1 / 0)
    measure._time_device(subject, measure.BOTH, result)
    assert measure.BOTH not in result.device_seconds


def test_without_bccd_its_training_is_left_out(tmp_path):
    (bccd,) = (u for u in first_hour.units(Place("cpu", tmp_path, SMALL)) if u.name == "BCCD")
    assert "--bccd" in bccd.work(0)[0]["result"]


def test_the_command_of_one_part(tmp_path, monkeypatch, capsys):
    """In this process: what is left says status 75."""
    left = Unit("a", "never", lambda deadline: (_ for _ in ()).throw(Unfinished))
    monkeypatch.setattr(first_hour, "units", lambda place: [unit("quick", row("q")), left])
    words = ["--output", str(tmp_path), "--device", "cpu", "--small", "--once"]
    assert tool.main(words) == 75
    assert "So far is in" in capsys.readouterr().out
    assert tool.main([*words, "--parts", "b"]) == 0
    content = json.loads((tmp_path / "first_hour.json").read_text())
    assert content["machine"]["torch"] == torch.__version__ and list(content["units"]) == ["quick"]
