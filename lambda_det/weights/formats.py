"""The three forms of weight files, written, and read without running what is in them.

A .pth is a file of ``torch.save``, a .pkl a pickle of NumPy arrays as in Detectron2's model zoo, a
.safetensors holds nothing but tensors and text. The first has checksums. The other two, and a .pth
of PyTorch before 1.6 or with ``set_crc32_options(False)``, have none but that of a backbone file,
:func:`lambda_det.weights.provenance.checksum`.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from lambda_det.errors import WeightsError, reason

__all__ = [
    "READERS",
    "WRITERS",
    "check_torch_file",
    "read_checkpoint",
    "read_pickle",
    "read_safetensors",
    "read_torch",
    "write_torch",
]

# What Detectron2's and Caffe2's weight files need; anything else in a pickle may be a program
_PICKLE_GLOBALS = {
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
}
_NUMPY_TYPES = "?bBhHiIlLqQefd"


def read_torch(path: str | Path) -> Any:
    """The content of a file of ``torch.save``: tensors, arrays, plain values and their containers.

    The checksums that ``torch.save`` puts into the file, and ``torch.load`` passes over, are
    checked; the module says which files have none.

    Raises:
        WeightsError: it is damaged or holds anything else.
        OSError: it is not there or cannot be opened.
    """
    return _read_torch(path, mmap=False)


def check_torch_file(path: str | Path) -> Any:
    """As :func:`read_torch`, but its tensors stay on the disk until they are looked at.

    Use it to see whether a file is whole: it takes the time of reading it, and no memory.
    """
    return _read_torch(path, mmap=True)


def _read_torch(path: str | Path, *, mmap: bool) -> Any:
    try:
        zipped = _check_records(path)
        with _numpy_allowed():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipped)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        # torch's own message advises to switch the protection off
        raise WeightsError(
            f"{path} holds more than tensors, numbers, strings and containers of them, or is no "
            "checkpoint at all; reading it could run a program, so it is refused."
        ) from error
    except Exception as error:  # a damaged file may raise nearly anything
        raise WeightsError(
            f"{path} cannot be read: it is damaged, was not written to the end, or is not in the "
            "format of torch.save (.pth); take another checkpoint."
        ) from error


def _check_records(path: str | Path) -> bool:
    """Whether the file is a zip archive, as those of today are; its records are whole then.

    Raises:
        zipfile.BadZipFile: a record differs from its checksum; a broken archive may raise others.
        pickle.UnpicklingError: the file is of a form that older PyTorch is not safe to read.
    """
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            # Of before PyTorch 0.1.10; up to 2.5 such a file could run a program (CVE-2025-32434)
            if tarfile.is_tarfile(path):
                raise pickle.UnpicklingError("a tar archive")
            return False
        with zipfile.ZipFile(file) as archive:
            if any(record.CRC for record in archive.infolist()) and (bad := archive.testzip()):
                raise zipfile.BadZipFile(f"{bad} differs from its checksum")
    return True


def _numpy_allowed() -> AbstractContextManager:
    """Let ``torch.load`` read arrays, such as the metrics that trainers of others save along."""
    if torch.__version__ < (2, 6):  # which cannot allow a name that has moved within NumPy
        return contextlib.nullcontext()
    multiarray = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray
    moved = [
        (part, f"{module}.multiarray.{part.__name__}")
        for part in (multiarray._reconstruct, multiarray.scalar)
        for module in ("numpy.core", "numpy._core")
    ]
    types = {type(np.dtype(code)) for code in _NUMPY_TYPES}
    return torch.serialization.safe_globals([np.dtype, np.ndarray, codecs.encode, *types, *moved])


class _NumpyUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PICKLE_GLOBALS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def read_pickle(path: str | Path) -> Any:
    """The content of a pickle of arrays.

    Returns:
        That of Detectron2's model zoo as it is; that of Caffe2's in the same form.

    Raises:
        WeightsError: it is damaged or holds anything but arrays and plain values.
        OSError: it is not there or cannot be opened.
    """
    with open(path, "rb") as file:
        content = io.BytesIO(file.read())
    try:
        data = _NumpyUnpickler(content, encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise WeightsError(
            f"{path} is refused ({reason(error)}): a .pkl of "
            "weights may hold arrays, numbers, strings and containers of them alone, and be whole."
        ) from error
    if not isinstance(data, dict) or "model" in data:
        return data
    # Caffe2's: detection models keep their tensors under "blobs"
    blobs = data.get("blobs", data)
    model = {name: blob for name, blob in blobs.items() if not name.endswith("_momentum")}
    return {"model": model, "__author__": "Caffe2", "matching_heuristics": True}


def read_safetensors(path: str | Path) -> dict[str, Any]:
    """The tensors of a safetensors file under "model", and beside them what its metadata says.

    Raises:
        WeightsError: it is damaged.
        OSError: it is not there or cannot be opened.
    """
    data = Path(path).read_bytes()
    try:
        model = load_safetensors(data)
        length = int.from_bytes(data[:8], "little")
        texts = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        about = json.loads(texts[_ABOUT]) if _ABOUT in texts else {}
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise WeightsError(
            f"{path} cannot be read as safetensors ({reason(error)}): it is damaged, was not "
            "written to the end, or is in another format; take another copy."
        ) from error
    if not isinstance(about, dict):
        raise WeightsError(f"{path} has metadata {_ABOUT!r} of another kind; export it again.")
    return {**about, "model": model}


_ABOUT = "lambda_det"  # the metadata that has what stands beside "model", as JSON


def write_torch(content: Mapping[str, Any], file: IO[bytes]) -> None:
    """``torch.save`` with checksums, whatever is set elsewhere in the process."""
    if not hasattr(torch.serialization, "set_crc32_options"):  # before PyTorch 2.6: always
        torch.save(dict(content), file)
        return
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(dict(content), file)
    finally:
        torch.serialization.set_crc32_options(before)


def _write_pickle(content: Mapping[str, Any], file: IO[bytes]) -> None:
    arrays = {name: tensor.numpy() for name, tensor in content["model"].items()}
    # From protocol 5 on, NumPy refers to more functions than readers allow
    pickle.dump({**content, "model": arrays}, file, protocol=4)


def _write_safetensors(content: Mapping[str, Any], file: IO[bytes]) -> None:
    model: Mapping[str, Tensor] = content["model"]
    about = json.dumps({key: value for key, value in content.items() if key != "model"})
    file.write(save_safetensors(dict(model), metadata={"format": "pt", _ABOUT: about}))


READERS = {".pkl": read_pickle, ".safetensors": read_safetensors}  # all others: read_torch
WRITERS = {".pth": write_torch, ".pkl": _write_pickle, ".safetensors": _write_safetensors}


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a file of weights and plain values, by its ending, and run nothing in it.

    Args:
        path: of Detectron2's or Caffe2's pickles with .pkl, safetensors with .safetensors, else of
            ``torch.save``.

    Raises:
        WeightsError: if the file is missing or damaged, or holds anything else.
    """
    try:
        content = READERS.get(Path(path).suffix, read_torch)(path)
    except FileNotFoundError as error:
        raise WeightsError(f"There is no checkpoint file {path}; check the path.") from error
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be read ({error.strerror or error}); check the path and its rights."
        ) from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}, not a state dict.")
    return content
