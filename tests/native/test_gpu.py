"""Kernels of the GPU are compiled once, proved, and kept as those of the CPU; or there are none."""

import ctypes
import threading

import pytest
import torch

from lambda_det.layers.local import fused, local_position_output
from lambda_det.native import gpu
from tests.native import emulated
from tests.native.emulated import needs_emulator
from tests.native.test_position_output import FORMS

INPUTS = [
    torch.ones(shape, dtype=torch.bfloat16)
    for shape in ((1, 3, 9, 4, 16), (1, 3, 9, 64, 1), (16, 1, 23, 23))
]
PROGRAM = gpu.Program("text", (gpu.Function("one", 32, 1024, (ctypes.c_void_p, ctypes.c_int)),))


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "kernels"


@pytest.fixture
def machine(monkeypatch, kept):
    """A GPU that notes launches and computes nothing."""
    with emulated.pretend(monkeypatch, kept, is_emulated=False) as machine:
        yield machine


def loaded(machine, prove=lambda kernels: None, program=PROGRAM):
    """Load as another process would; how often NVRTC has compiled."""
    emulated.forget()
    gpu.load(0, program, prove)
    return len(machine.compiled)


def test_it_is_compiled_and_proved_once(machine, kept):
    proofs = []
    assert loaded(machine, lambda kernels: proofs.append(1)) == 1
    (file,) = kept.iterdir()
    written = file.stat().st_mtime_ns
    assert loaded(machine, lambda kernels: proofs.append(1)) == 1
    assert file.stat().st_mtime_ns == written and len(proofs) == 1
    assert b" " == b"\x20"  # NVRTC wrote into no object that Python shares


OTHERS = {
    "driver": lambda machine: setattr(machine, "version", machine.version + 10),
    "NVRTC": lambda machine: setattr(machine.nvrtc, "nvrtcVersion", lambda: (0, 13, 3)),
    "GPU": lambda machine: setattr(machine, "capability", (12, 0)),
    "kind": lambda machine: setattr(machine, "name", "NVIDIA H100 NVL"),
    "source": PROGRAM._replace(source="other"),
    "options": PROGRAM._replace(options=("-DFLOAT16",)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_decides_the_kernel_makes_another(other, machine, kept):
    loaded(machine)
    if other in ("source", "options"):
        assert loaded(machine, program=OTHERS[other]) == 2
    else:
        OTHERS[other](machine)
        assert loaded(machine) == 2
    assert len([*kept.iterdir()]) == 2


def test_a_newer_gpu_of_a_generation_takes_the_code_of_an_older_one(machine):
    machine.capability = (8, 9)
    loaded(machine)
    assert gpu._architecture((8, 9)) == 86


@pytest.mark.parametrize("change", [lambda x: x[:1], lambda x: b"", bytes.upper])
def test_a_damaged_file_is_made_anew(change, machine, kept):
    loaded(machine)
    (file,) = kept.iterdir()
    whole = file.read_bytes()
    file.write_bytes(change(whole))
    assert loaded(machine) == 2
    assert [path.read_bytes() for path in kept.iterdir()] == [whole]


def _full(*about):
    raise OSError("the disk is full")


def _homeless():
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize(
    ("name", "refuse", "words"),
    [("keep", _full, "the disk is full"), ("cache_folder", _homeless, "home directory")],
)
def test_kernels_that_cannot_be_kept_are_those_of_this_process(
    name, refuse, words, machine, monkeypatch, kept, caplog
):
    monkeypatch.setattr(fused, "_wrong", lambda *about: None)
    monkeypatch.setattr(gpu.cache, name, refuse)
    inputs = [x.clone().requires_grad_() for x in INPUTS]
    for _ in range(2):
        local_position_output(*inputs, "fused").sum().backward()
    assert len(machine.compiled) == 4 and not (kept.exists() and [*kept.iterdir()])
    (said,) = (r.message for r in caplog.records if "this process alone" in r.message)
    assert words in said


def test_the_kernels_of_a_layer_are_compiled_side_by_side(machine, monkeypatch, caplog):
    """Each waits here until all four have begun; the log has one line of it."""
    caplog.set_level("INFO")
    monkeypatch.setattr(fused, "_wrong", lambda *about: None)
    together, compile_one = threading.Barrier(4), machine.nvrtc.nvrtcCompileProgram

    def compile_together(*about):
        together.wait(timeout=60)
        return compile_one(*about)

    machine.nvrtc.nvrtcCompileProgram = compile_together
    local_position_output(*(x.clone().requires_grad_() for x in INPUTS), "fused")
    assert len(machine.compiled) == 4
    assert [r.message for r in caplog.records if "ompiling" in r.message] == [
        "Compiling kernels of lambda layers for this GPU, once; some 15 s"
    ]


def test_what_is_wrong_is_not_kept(machine, kept):
    with pytest.raises(gpu.Unavailable, match=r"wrong numbers.*an error of 7"):
        loaded(machine, lambda kernels: "an error of 7")
    assert not [*kept.iterdir()]


def test_a_cuda_graph_is_told_to_wait(machine, monkeypatch):
    monkeypatch.setattr(fused, "_wrong", lambda *about: None)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "is_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="once before the capture"):
            local_position_output(*INPUTS, "fused")
    local_position_output(*INPUTS, "fused")
    monkeypatch.setattr(gpu, "is_capturing", lambda: True)
    local_position_output(*INPUTS, "fused")
    assert len(machine.launches) == 2


def test_a_thread_without_a_context_gets_one_and_a_launch_that_fails_is_an_error(machine):
    (kernel,) = gpu.load(0, PROGRAM, lambda kernels: None)
    machine.has_lost_context = True
    kernel.launch(5, INPUTS[0], 3)
    assert machine.launches == [("one", 5, 32, 1024, 7, (INPUTS[0].data_ptr(), 3))]
    machine.driver.cuLaunchKernel = lambda *about: (emulated._Status.CUDA_ERROR_INVALID_VALUE,)
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        kernel.launch(5, INPUTS[0], 3)


@pytest.mark.slow
@needs_emulator
@pytest.mark.parametrize("letter", ["output a", "queries a", "values c", "embedding a"])
def test_the_proof_sees_a_fault(letter, monkeypatch, kept):
    """Of each kind, on the map that a GPU gets; nothing of it is kept."""
    faults = {
        "output": ("a[i][m][1] = is_high", "a[i][m][1] = !is_high"),
        "queries": ("const uint32_t a1 = is_high", "const uint32_t a1 = !is_high"),
        "values": ("const uint32_t a0 = is_late ? before", "const uint32_t a0 = !is_late ? before"),
        "embedding": (
            "const uint32_t a0 = is_late ? high01",
            "const uint32_t a0 = !is_late ? high01",
        ),
    }
    form = FORMS[letter]
    with emulated.pretend(monkeypatch, kept) as machine:
        assert not isinstance(fused._load(0, torch.bfloat16, form, 64), str)
        assert len([*kept.iterdir()]) == 1
        machine.fault = faults[form.kind]
        machine.version += 1
        emulated.forget()
        assert "wrong numbers" in fused._load(0, torch.bfloat16, form, 64)
        assert len([*kept.iterdir()]) == 1
