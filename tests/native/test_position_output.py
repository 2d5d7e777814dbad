"""The GPU's kernels of the position output, in the emulator, against float64.

Each form runs on maps whose sides no tile divides and on one position, in programs that go on from
tile to tile. NaN lie around inputs and outputs and in the outputs.
"""

import ctypes
import itertools
import re

import pytest
import torch
from torch import Tensor

from lambda_det.layers.local import fused
from lambda_det.layers.local.fused import HEADS, QUERY_DEPTH, SCOPE, Form, _Tensors
from lambda_det.layers.local.lambda_first import dense_output
from tests.layers.reference import RESULTS, exactly, with_gradients
from tests.native import emulated
from tests.native.emulated import needs_emulator

pytestmark = needs_emulator
AROUND = 16384  # numbers, more than a fault reaches
TOLERANCES = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
# batch, height and width of the map, and the programs for it
SIZES = {
    "one position": ((1, 1, 1), 1),
    "one tile and a part": ((1, 9, 11), 1),
    "borders within tiles": ((2, 13, 35), 3),
    "a window within the map": ((1, 31, 9), 2),
}
FORMS = {f"{f.kind} {f.letter}": f for lists in fused.FORMS.values() for fs in lists for f in fs}


def around(numbers: Tensor) -> Tensor:
    """A dense copy with NaN before and behind it."""
    memory = torch.full((numbers.numel() + 2 * AROUND,), torch.nan, dtype=numbers.dtype)
    copy = memory[AROUND : AROUND + numbers.numel()].view(numbers.shape)
    return copy.copy_(numbers)


def is_untouched(numbers: Tensor) -> bool:
    memory = torch.as_strided(numbers, (numbers.numel() + 2 * AROUND,), (1,), 0)
    return bool(memory[:AROUND].isnan().all() and memory[-AROUND:].isnan().all())


class Emulated:
    """Has the method of a Kernel."""

    def __init__(self, library: ctypes.CDLL, function, is_late: bool) -> None:
        self.library, self.function, self.is_late = library, function, is_late

    def launch(self, programs: int, *arguments: Tensor | int) -> None:
        name, threads, shared_bytes, types = self.function
        values = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
        how = programs, threads, shared_bytes, values, types, self.is_late
        said = emulated.launch(self.library, name, *how)
        assert not said, said


def computed(form: Form, inputs: _Tensors, programs: int, library, made, is_late: bool):
    """What a form computes, and the conflicts of banks on the way."""
    kernels = [Emulated(library, function, is_late) for function in made.functions]
    like = inputs.grad if form.kind == "output" else getattr(inputs, form.kind)
    result = around(torch.full_like(like, torch.nan))
    sizes = *inputs.queries.shape[:3], inputs.values.shape[3]
    fused._run(form, kernels, form.programs(programs, *sizes), result, inputs)
    assert all(map(is_untouched, [result, *(x for x in inputs if x is not None)]))
    return result, library.bank_conflicts()


def check(form, v, dtype, names):
    """Compare a form with float64, and the results with copies that land early and late."""
    made = fused.program(form, v, dtype)
    library = emulated.opened(emulated.compiled(made.source, made.options))
    for name in names:
        (batch, height, width), programs = SIZES[name]
        positions = batch, height, width
        shapes = (
            (*positions, HEADS, QUERY_DEPTH),
            (*positions, v),
            (QUERY_DEPTH, SCOPE, SCOPE),
            (*positions, HEADS, v),
        )
        inputs = _Tensors(*(around(torch.randn(shape).to(dtype)) for shape in shapes))
        queries, values, embedding, grad = inputs
        exact = exactly([queries, values[..., None], embedding[:, None]])
        inputs = inputs._replace(
            # between numbers of 16 bits, to which it is rounded
            embedding=around(embedding.float() * (1 + torch.finfo(dtype).eps / 8)),
        )

        wanted = with_gradients(dense_output, exact, grad.double())
        want = dict(zip(RESULTS, wanted, strict=True))[form.kind]
        results = []
        for is_late in (True, False):
            got, conflicts = computed(form, inputs, programs, library, made, is_late)
            error = ((got.double() - want.view(got.shape)).norm() / want.norm()).item()
            assert error <= TOLERANCES[dtype], f"{name}: an error of {error:.1e}"
            assert conflicts == 0, f"{conflicts} conflicts of banks"
            results.append(got)
        assert all(torch.equal(results[0], again) for again in results[1:])


QUICK = ("output a", "values c")


@pytest.mark.parametrize("name", QUICK)
def test_small(name):
    check(FORMS[name], 64, torch.bfloat16, ["one tile and a part"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_equals_float64(name):
    check(FORMS[name], 64, torch.bfloat16, SIZES)


H200 = fused.gpu.Gpu((9, 0), 132, 227 * 1024)
# One of each kind, which an H200 takes for 128 channels. Forms of a kind differ in their tiles,
# which test_equals_float64 has, and not in how they convert.
TAKEN = [form for kind in fused.FORMS if (form := fused.form_for(kind, H200, 8, 32, 32, 128))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if form in TAKEN else pytest.mark.release)
        for name, form in FORMS.items()
    ],
)
def test_float16_and_two_slices_of_values(name):
    check(FORMS[name], 128, torch.float16, ["one tile and a part"])


# Of each architecture, the shared memory of a program
ARCHITECTURES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvrtc_compiles_what_fits(architecture):
    """Without a GPU; a thread spills little, as those did that were measured."""
    try:
        fused.gpu._bindings("nvrtc")
    except fused.gpu.Unavailable as why:
        pytest.skip(str(why))
    device = fused.gpu.Gpu(divmod(architecture, 10), 132, ARCHITECTURES[architecture] * 1024)
    for kind, dtype in itertools.product(fused.FORMS, TOLERANCES):
        for form in fused.fitting(kind, device):
            made = fused.program(form, 64, dtype)
            made = made._replace(options=(*made.options, "--ptxas-options=-v"))
            code, said = fused.gpu.compile_program(made, architecture)
            registers = max(map(int, re.findall(r"Used (\d+) registers", said)))
            spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", said)))
            print(made.name, architecture, f"{registers} registers, {spilled} bytes spilled")
            assert code.startswith(b"\x7fELF")
            assert registers * form.threads <= 2**16 and spilled <= MOST_SPILLED, said


MOST_SPILLED = 200  # bytes; those that were measured spill up to 132


def test_the_form_of_each_measured_row():
    """The fastest of the table of FORMS, and what fits other GPUs."""
    letters = {
        (2, 64, 64, 64): "aaca",
        (8, 64, 64, 64): "cbaa",
        (16, 64, 64, 64): "cbaa",
        (8, 32, 32, 128): "caba",
    }
    for sizes, want in letters.items():
        assert "".join(fused.form_for(kind, H200, *sizes).letter for kind in fused.FORMS) == want
    a100 = fused.gpu.Gpu((8, 0), 108, 163 * 1024)
    rtx = fused.gpu.Gpu((12, 0), 170, 99 * 1024)
    for device in (a100, rtx):
        for kind in fused.FORMS:
            forms = fused.fitting(kind, device)
            assert forms and all(form.shared_bytes <= device.shared_bytes for form in forms)
