"""Files of weights: damage is noticed, and what has no checksum is read nevertheless."""

import importlib
import io
import pickle
import random
import tarfile
import zipfile
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save

from lambda_det.errors import WeightsError
from lambda_det.weights.formats import (
    read_pickle,
    read_safetensors,
    read_torch,
)
from tests.reliability.runs import differences


@pytest.fixture(scope="module")
def state():
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layer{i}.weight": torch.randn(9, 7, generator=generator) for i in range(8)}
    shared = torch.arange(20)
    plain = {"iteration": 3, "rates": [0.5, 0.25], "name": "lambda", "none": None}
    return {"model": tensors, "views": [shared[:5], shared[5:]], "trainer": plain}


@pytest.fixture(scope="module")
def data(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


READERS = pytest.mark.parametrize("read", [read_torch, partial(read_torch, mmap=True)])


@READERS
def test_what_was_written_is_read(state, data, tmp_path, read):
    (tmp_path / "a.pth").write_bytes(data)
    assert differences(read(tmp_path / "a.pth"), state) == []


@READERS
def test_a_file_that_was_cut_anywhere_is_refused(data, tmp_path, read):
    path = tmp_path / "a.pth"
    for part in range(20):
        path.write_bytes(data[: len(data) * part // 20])
        with pytest.raises(WeightsError, match=r"a\.pth"):
            read(path)
    path.write_bytes(data[:-1])
    with pytest.raises(WeightsError, match=r"a\.pth"):
        read(path)


@pytest.mark.fuzz
@READERS
def test_a_byte_that_was_altered_anywhere_is_noticed_or_does_nothing(state, data, tmp_path, read):
    rng = random.Random(0)
    path, noticed = tmp_path / "a.pth", 0
    for _ in range(200):
        place = rng.randrange(len(data))
        altered = bytearray(data)
        altered[place] ^= rng.randrange(1, 256)
        path.write_bytes(altered)
        try:
            content = read(path)
        except WeightsError:
            noticed += 1
        else:
            assert differences(content, state) == [], place
    assert noticed > 50  # the rest are names and dates of the archive, and the padding of members


@READERS
def test_the_form_of_before_pytorch_1_6_is_read(state, tmp_path, read):
    torch.save(state, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    assert differences(read(tmp_path / "a.pth"), state) == []


@READERS
def test_a_tar_archive_is_refused(tmp_path, monkeypatch, read):
    """The format before PyTorch 0.1.10. Up to 2.5, weights_only did not protect against it."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("left to PyTorch"))
    with tarfile.open(tmp_path / "a.pth", "w") as archive:
        for name in ("pickle", "storages", "tensors", "sys_info"):
            content = pickle.dumps(0)
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    with pytest.raises(WeightsError, match=r"a\.pth"):
        read(tmp_path / "a.pth")


@READERS
def test_members_that_are_compressed_are_refused_before_they_are_unpacked(
    tmp_path, monkeypatch, read
):
    """torch.save never compresses; some megabytes can become more than the memory."""
    with zipfile.ZipFile(tmp_path / "a.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps(0))
        archive.writestr("a/data/0", bytes(1 << 20))
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_, **__: pytest.fail("unpacked"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("left to PyTorch"))
    with pytest.raises(WeightsError, match=r"a\.pth"):
        read(tmp_path / "a.pth")


def test_metadata_with_values_too_deep_in_one_another_are_refused(tmp_path):
    metadata = {"lambda_det": "[" * 100_000}
    (tmp_path / "a.safetensors").write_bytes(save({"w": torch.ones(1)}, metadata))
    with pytest.raises(WeightsError, match=r"a\.safetensors"):
        read_safetensors(tmp_path / "a.safetensors")


def test_a_pickle_that_names_a_module_with_a_control_character_is_refused_in_one_line(tmp_path):
    (tmp_path / "a.pkl").write_bytes(b"cnu\x1bmpy\nload\n.")
    with pytest.raises(WeightsError, match=r"a\.pkl.*nu\\x1bmpy") as raised:
        read_pickle(tmp_path / "a.pkl")
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_of_every_protocol_of_pickle_are_read(tmp_path, protocol):
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {"rows": rows, "columns": np.asfortranarray(rows), "scalar": np.float32(3)}
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"model": arrays}, protocol))
    read = read_pickle(tmp_path / "a.pkl")["model"]
    assert {name: array.tolist() for name, array in read.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


# What pickles of arrays refer to; another name may be a function that runs a program
OF_ARRAYS = {
    *("_codecs.encode", "collections.OrderedDict", "numpy.dtype", "numpy.ndarray"),
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    *("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer"),
}
MODULES = (
    *("_codecs", "builtins", "codecs", "collections", "functools", "importlib", "numpy"),
    *("operator", "os", "pickle", "shutil", "subprocess", "sys"),
)
# Names of Python 2, which a pickle may have, and of what hangs on an allowed name
HIDDEN = [
    *(("__builtin__", "eval"), ("copy_reg", "_reconstructor"), ("posix", "system")),
    *(("collections", "OrderedDict.fromkeys"), ("numpy", "ndarray.tofile")),
]


@pytest.mark.slow
def test_a_pickle_refers_to_what_arrays_need_and_to_nothing_else(tmp_path):
    every = [(m, name) for m in MODULES for name in dir(importlib.import_module(m))]
    read = set()
    for module, name in [*every, *HIDDEN]:
        words = [b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)]
        (tmp_path / "a.pkl").write_bytes(b"\x80\x04" + b"".join(words) + b"\x93.")
        try:
            read_pickle(tmp_path / "a.pkl")
        except WeightsError as error:
            assert f"{module}.{name}" in str(error)
        else:
            read.add(f"{module}.{name}")
    assert read and read <= OF_ARRAYS
