"""``doctor --gpu``: the CPU stands in for a GPU, with kernels that are wrong on purpose."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lambda_det import create_backbone
from lambda_det.doctor import __main__ as doctor
from lambda_det.doctor import gpu, gpu_checks
from lambda_det.doctor.gpu_checks import CONVOLUTION, Case
from lambda_det.layers import LambdaLayer
from lambda_det.layers.local import IMPLEMENTATIONS, choose, fused, verdict
from tests import forked
from tests.doctor.kernels import WRONG, wrong_beyond_a_size

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CASE = Case(2, 4, 5, 2, 8, 4, 1, 3, 5, "float32", True)


@pytest.fixture(autouse=True)
def no_verdict(monkeypatch, tmp_path):
    monkeypatch.setattr(verdict, "_in_use", {})
    monkeypatch.setattr(verdict, "_taken", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(verdict.SWITCH, raising=False)


def _args(*words):
    return doctor.parse_args(["--gpu", *words])


def _refused(capfd, *words):
    """The sentence of a command that cannot work; auto is safe all the same."""
    assert doctor.main(["--gpu", *words]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    return line


# What is looked for


@pytest.mark.parametrize("right", ["query_first", "conv", "depthwise"])
@pytest.mark.parametrize("case", [CASE, CASE._replace(dtype="float16", channels_last=False)])
def test_finds_no_fault_in_what_is_right(right, case):
    assert gpu_checks._check([right], case, CPU, 0)["error"] <= 1
    assert gpu_checks._check_large([right], case, CPU, 3000)["error"] <= 1


FAULTS = {
    "slightly_wrong": "output has an error",
    "wrong_gradient": "gradient of the values has an error",
    "in_double": "float64",
    "in_short": "output has an error",
    "less_exact_on_other_maps": "output has an error",
    "never_the_same": "differs when it is computed again",
    "across_images": "gradient of others|has an error",
    "never_empty": "without images",
    "not_written": "error of nan",
}


@pytest.mark.parametrize("name", WRONG)
def test_finds_the_fault(name, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, name, WRONG[name])
    with pytest.raises(gpu_checks._WrongError, match=FAULTS[name]):
        gpu_checks._check([name], CASE, CPU, 0)


def test_finds_the_fault_of_a_large_size(monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "wrong", wrong_beyond_a_size)
    assert gpu_checks._check_large(["wrong"], CASE, CPU, 1000)["error"] <= 1
    with pytest.raises(gpu_checks._WrongError, match="output has an error"):
        gpu_checks._check_large(["wrong"], CASE, CPU, 3000)


def test_few_images_are_compared_where_there_are_many(monkeypatch):
    monkeypatch.setattr(gpu_checks, "REFERENCE_NUMEL", 1)
    case = CASE._replace(batch=3)
    assert gpu_checks._check(["query_first"], case, CPU, 0)["error"] <= 1
    monkeypatch.setitem(IMPLEMENTATIONS, "across_images", WRONG["across_images"])
    with pytest.raises(gpu_checks._WrongError, match="gradient of others"):
        gpu_checks._check(["across_images"], case, CPU, 0)


# For which sizes


@pytest.mark.parametrize("name", ["lambda_resnet26_c4", "lambda_resnet26t"])
def test_the_sizes_are_those_that_a_run_takes(name, monkeypatch):
    with torch.device("meta"):
        found = gpu.cases_of_network(create_backbone(name), 96, 64, [1, 2], "float32", False)
    monkeypatch.setattr(verdict, "DEVICES", {"cpu"})
    verdict.use(CPU, verdict.Verdict({}, {"other sizes": {}}))
    network = create_backbone(name).eval()
    for batch in (1, 2):
        with torch.no_grad():
            network(torch.randn(batch, 3, 96, 64))
    assert {case.shape_class() for case in found} == set(verdict.taken()["classes"])


def test_the_sizes_of_a_configuration(tmp_path):
    file = tmp_path / "detector.yaml"
    file.write_text(
        f"_BASE_: {ROOT / 'configs/mask_rcnn_lambdaresnet50.yaml'}\n"
        "INPUT: {LSJ: {ENABLED: True, SIZE: 100}}\n"
        "SOLVER: {AMP: {ENABLED: True, DTYPE: float16}}\n"
    )
    cases = gpu.cases_of_options(_args("--config-file", str(file), "--batch", "3"))
    assert {case.dtype for case in cases} == {"float16"}
    assert all(case.channels_last for case in cases)  # as detectors are trained
    assert {case.batch for case in cases} == {3} and max(case.height for case in cases) <= 64
    assert {(case.height, case.width) for case in cases} <= {(s, s) for s in (4, 8, 16, 32)}
    wide = _args("--config-file", str(file), "--image-size", "64", "--dtype", "float32")
    assert {case.dtype for case in gpu.cases_of_options(wide)} == {"float32"}


RECIPE = str(ROOT / "configs/imagenet/lambda_resnet50_160.yaml")
LAZY = str(ROOT / "configs/mask_rcnn_lambdaresnet50.py")


def _cases(file, *words):
    return gpu.cases_of_options(_args("--config-file", str(file), "--batch", "1", *words))


def test_the_sizes_of_a_recipe():
    cases = _cases(RECIPE, "--batch", "64")
    assert {(case.height, case.width) for case in cases} == {(s, s) for s in (5, 10)}
    assert {(c.batch, c.dtype, c.channels_last) for c in cases} == {(64, "bfloat16", True)}


@pytest.mark.slow
def test_the_sizes_of_a_lazy_config(tmp_path):
    yaml = ROOT / "configs/mask_rcnn_lambdaresnet50.yaml"
    assert set(_cases(LAZY)) == set(_cases(yaml))
    file = tmp_path / "lazy.py"
    file.write_text(
        "from lambda_det import get_config\n"
        "cfg = get_config('mask_rcnn_lambdaresnet50.py')\n"
        "model, dataloader, optimizer = cfg.model, cfg.dataloader, cfg.optimizer\n"
        "lr_multiplier, train = cfg.lr_multiplier, cfg.train\n"
        "train.amp.enabled = train.channels_last = False\n"
        "dataloader.train.mapper.augmentations = []\n"
    )
    with pytest.raises(gpu.ConfigError, match=r"lazy\.py .* --image-size"):
        _cases(file)
    cases = _cases(file, "--image-size", "64")
    assert {(case.dtype, case.channels_last) for case in cases} == {("float32", False)}
    assert max(case.height for case in cases) == 4


def test_each_tiling_of_the_kernels_is_proved():
    """Of maps with as many positions, but for the power of 4, that need other kernels."""
    with torch.device("meta"):
        layer = LambdaLayer(64, query_depth=16, heads=4, scope=23)
        network = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 1), layer)
    found = gpu.cases_of_network(network, 34, 34, [1, 3], "bfloat16", True)
    assert {(case.batch, case.height) for case in found} == {(1, 34), (3, 34)}


@pytest.mark.parametrize("name", ["mask_rcnn_lambdaresnet50", "mask_rcnn_c4_lambdaresnet50"])
def test_says_that_the_layers_on_regions_are_not_proved(name, capfd):
    file = str(ROOT / f"configs/{name}.yaml")
    assert gpu.cases_of_options(_args("--config-file", file, "--image-size", "64"))
    out = capfd.readouterr().out
    assert ("LambdaRes5ROIHeads, on the regions, are not proved" in out) == ("c4" in name)


# Where it cannot work


def test_without_a_gpu(capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no CUDA GPU" in _refused(capfd)


def test_on_an_amd_gpu(capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Radeon")
    monkeypatch.setattr(torch.version, "hip", "6.2")
    line = _refused(capfd)
    assert "Radeon is an AMD GPU" in line and "query_first" in line


def test_before_ampere_and_without_triton(monkeypatch):
    """The others are proved, and this is not tried."""
    entries = {CASE.shape_class(): {"refused": {}}}
    monkeypatch.setattr(gpu, "unsupported", lambda name, *inputs: "the GPU is older than Ampere")
    assert not gpu._is_tried("fused", CASE, CPU, entries)
    assert "Ampere" in entries[CASE.shape_class()]["refused"]["fused"]
    monkeypatch.undo()
    monkeypatch.setattr(fused, "_kernels", lambda: "Triton is not installed")
    assert not gpu._is_tried("fused", CASE, CPU, entries)
    assert "Triton" in entries[CASE.shape_class()]["refused"]["fused"]
    assert gpu._is_tried("query_first", CASE, CPU, entries)


def test_a_cache_folder_that_cannot_be_written(capfd, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(gpu, "refusal", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    line = _refused(capfd)
    assert "XDG_CACHE_HOME" in line and "query_first" in line


def test_without_pytorch(capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor.main(["--gpu"]) == 2
    assert "--gpu needs torch" in capfd.readouterr().err


def test_a_network_without_lambda_layers(monkeypatch):
    with pytest.raises(gpu.ConfigError, match="resnet50 has no lambda layer"):
        gpu.main(_args("--model", "resnet50"), CPU)
    with pytest.raises(gpu.ConfigError, match="nothing_50"):
        gpu.main(_args("--model", "nothing_50"), CPU)


@pytest.mark.parametrize("words", [["--batch", "0"], ["--image-size", "big"], ["--dtype", "int8"]])
def test_options_that_cannot_be(words):
    with pytest.raises(SystemExit):
        _args(*words)


# The verdict


def _decided(seconds, **changes):
    entry = {
        "right": [name for name in seconds if name != CONVOLUTION],
        "seconds": {name: [time / 2, time] for name, time in seconds.items()},
        "bytes": dict.fromkeys(seconds, 10),
    }
    return gpu._decide(entry | changes, None)


def test_the_fastest_of_those_that_are_right():
    times = {CONVOLUTION: 2.0, "query_first": 1.0, "fused": 0.4, "conv": 0.3}
    taken = _decided(times)
    assert taken["take"] == "conv" and "0.15" in taken["why"] and "0.30" in taken["why"]
    assert _decided(times, right=["query_first", "fused"])["take"] == "fused"
    assert _decided(times, right=["fused"])["take"] == "fused"
    memory = {CONVOLUTION: 1, "query_first": 10, "fused": 20, "conv": 21}
    assert _decided(times, bytes=memory)["take"] == "fused"
    # A difference that the next measurement may turn round
    assert _decided({CONVOLUTION: 2.0, "query_first": 1.0, "conv": 0.98})["take"] == "query_first"


def test_nothing_to_go_by():
    assert _decided({}, right=[])["take"] == "query_first"
    taken = gpu._decide({"right": ["fused"], "seconds": {}, "bytes": {}}, "SIGSEGV")
    assert taken["take"] == "query_first" and "SIGSEGV" in taken["why"]


@pytest.mark.slow
def test_from_the_proof_to_the_choice(monkeypatch, capfd, tmp_path):
    """With two that are right, one that is wrong, and one that ends its process."""
    starts = []

    def run(command, *, input, **options):
        """The first process as it is, the others forked from one that has imported all."""
        starts.append(command)
        if len(starts) == 1:
            return subprocess.run(command, input=input, **options)
        (tmp_path / "request").write_text(input)
        done = forked.run([*command[1:], tmp_path / "request"], tmp_path / "printed")
        return subprocess.CompletedProcess(command, done.returncode, stderr=done.stdout)

    processes = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(gpu, "subprocess", processes)
    case = Case(1, 2, 3, 2, 8, 4, 1, 3, 3, "float32", True)
    names = ("query_first", "conv")
    for name in set(IMPLEMENTATIONS) - set(names):
        monkeypatch.delitem(IMPLEMENTATIONS, name)
    monkeypatch.setitem(IMPLEMENTATIONS, "slightly_wrong", None)
    monkeypatch.setitem(IMPLEMENTATIONS, "crash", None)
    monkeypatch.setattr(gpu, "CHECKS", (sys.executable, "-m", "tests.doctor.kernels"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(gpu, "LARGE", 500)
    monkeypatch.setattr(gpu, "cases_of_options", lambda args: [case])
    monkeypatch.setattr(verdict, "DEVICES", {"cpu"})
    gpu.main(_args(), CPU)
    text = capfd.readouterr().out
    assert "slightly_wrong is refused: the output has an error" in text
    assert "crash is refused: the process was ended by SIGSEGV" in text
    assert case.shape_class() in text and f"PyTorch: {torch.__version__}" in text
    # Each that was refused is the end of a process; those that are wrong are so at both sizes
    assert len(starts) == len(names) + 2 * 2 + 1
    entry = verdict.read(CPU).classes[case.shape_class()]
    assert set(entry["right"]) == set(names) and set(entry["seconds"]) == {CONVOLUTION, *names}
    assert choose(*case.inputs("cpu")) == entry["take"]
    # The driver is updated
    key = verdict.key_of(CPU)
    monkeypatch.setattr(verdict, "key_of", lambda device: {**key, "driver": "999"})
    verdict._in_use.clear(), verdict._taken.clear()
    assert choose(*case.inputs("cpu")) == "query_first"


def test_a_check_that_hangs(monkeypatch):
    monkeypatch.setattr(gpu, "CHECKS", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(gpu, "TIMEOUT", 0.2)
    jobs = [gpu._job("check", ["conv"], CASE)] * 2
    assert all("more than 0.2 s" in one["refused"] for one in gpu._do(jobs, CPU))


def test_a_process_that_cannot_start(monkeypatch):
    monkeypatch.setattr(gpu, "CHECKS", (sys.executable, "-c", "raise SystemExit('no CUDA')"))
    (outcome,) = gpu._do([gpu._job("check", ["conv"], CASE)], CPU)
    assert "status 1: no CUDA" in outcome["refused"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu(capfd):
    words = ("--gpu", "--model", "lambda_resnet26", "--image-size", "160", "--channels-last")
    assert doctor.main([*words, "--batch", "2"]) == 0
    found = verdict.read(torch.device("cuda", torch.cuda.current_device()))
    print(capfd.readouterr().out)
    assert found.classes
    for entry in found.classes.values():
        assert "query_first" in entry["right"], entry["refused"]
        assert entry["take"] in entry["right"] and entry["seconds"]
    network = create_backbone("lambda_resnet26").cuda().to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 160, 160, device="cuda").to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        network(images)
    taken = verdict.taken()["classes"]
    assert {shape: entry["take"] for shape, entry in taken.items()} == {
        shape: entry["take"] for shape, entry in found.classes.items()
    }
