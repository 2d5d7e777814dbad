"""Readers of the three formats of weight files, and writers of two. Reading never runs their code.

- .pth: a file of ``torch.save``. It has checksums, unless PyTorch before 1.6 wrote it or
  ``set_crc32_options(False)`` was set.
- .pkl: a pickle of NumPy arrays, as in Detectron2's model zoo, which is only read. It has no
  checksums.
- .safetensors: tensors and text only. It has no checksums.

Backbone files carry a checksum of their own, :func:`lambda_det.weights.provenance.checksum`.
"""

from __future__ import annotations

import codecs
import contextlib
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

from lambda_det.errors import WeightsError, refused

# The globals that weight files of Detectron2 and Caffe2 need. Any other may run code.
_PICKLE_GLOBALS = {
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),  # of protocol 5, which Python 3.14 writes
    ("numpy._core.numeric", "_frombuffer"),
}
_NUMPY_TYPES = "?bBhHiIlLqQefd"


def check_address(address: str) -> None:
    """Refuse a file that strangers may have written and that this PyTorch cannot read safely.

    Args:
        address: of a file that would be downloaded. Its suffix decides on the format, as in
            :func:`read_checkpoint`.

    Raises:
        WeightsError: it is a file of ``torch.save``, and PyTorch is older than 2.10.
    """
    if Path(address).suffix not in READERS and is_torch_load_unsafe():
        raise WeightsError(
            f"{address} is refused: PyTorch {torch.__version__} cannot read a file of torch.save "
            "from strangers safely (CVE-2026-24747). Take a .safetensors file or PyTorch 2.10, or "
            "download the file and give its path if you trust where it comes from."
        )


def is_torch_load_unsafe() -> bool:
    """Whether a file can write to memory at will when this PyTorch reads it: CVE-2026-24747."""
    return torch.__version__ < (2, 10)


def read_torch(path: str | Path, *, mmap: bool = False) -> Any:
    """Read a file of ``torch.save``: tensors, arrays, plain values and containers of them.

    Verifies the checksums in the file, which ``torch.load`` ignores.

    Args:
        path: of the file.
        mmap: only verify it, in the time of one read and next to no memory. Do not use the tensors,
            which are mapped from the disk: one that is longer than its member of the archive shows
            the bytes behind it.

    Raises:
        WeightsError: the file is damaged or holds anything else.
        OSError: the file is missing or cannot be opened.
    """
    try:
        zipped = _check_members(path)
        with _numpy_allowed():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and zipped)
    except (OSError, WeightsError):
        raise
    except pickle.UnpicklingError as error:
        # The message of torch advises to disable the protection
        raise WeightsError(
            f"{path} is refused: it holds more than tensors, numbers, strings and containers of "
            "them, and reading it could run a program."
        ) from error
    except Exception as error:  # a damaged file raises errors of many types
        raise WeightsError(
            f"{path} cannot be read: it is damaged, incomplete, or not in the format of torch.save "
            "(.pth); use another checkpoint."
        ) from error


def _check_members(path: str | Path) -> bool:
    """Verify a zip archive, the format of ``torch.save`` since PyTorch 1.6; False if it is none."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            # The format before PyTorch 0.1.10. With weights_only=True it can still run a program
            # in PyTorch up to 2.5 (CVE-2025-32434).
            if tarfile.is_tarfile(path):
                raise pickle.UnpicklingError("a tar archive")
            file.seek(0)
            if file.read(1) != pickle.PROTO:  # of torch.save before PyTorch 1.6
                raise WeightsError(
                    f"{path} is no checkpoint, or is damaged: name a run or one of its checkpoints."
                )
            return False
        with zipfile.ZipFile(file) as archive:
            # torch.save never compresses, and a few megabytes could take all memory
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise zipfile.BadZipFile("it has compressed members")
            if any(member.CRC for member in archive.infolist()) and (bad := archive.testzip()):
                raise zipfile.BadZipFile(f"{bad} differs from its checksum")
    return True


def _numpy_allowed() -> AbstractContextManager:
    """Allow NumPy arrays in ``torch.load``. Trainers of other projects save metrics as such."""
    if torch.__version__ < (2, 6):  # cannot allow a function whose module was renamed in NumPy
        return contextlib.nullcontext()
    multiarray = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray
    moved = [
        (made, f"{module}.multiarray.{made.__name__}")
        for made in (multiarray._reconstruct, multiarray.scalar)
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
    """Read a pickle of arrays.

    Returns:
        The content of a file of Detectron2's model zoo. Files of Caffe2 are converted to that form.

    Raises:
        WeightsError: the file is damaged or holds anything but arrays and plain values.
        OSError: the file is missing or cannot be opened.
    """
    advice = "a .pkl of weights must be complete and hold only arrays, numbers, strings and lists"
    # A damaged pickle raises errors of many types
    with open(path, "rb") as file, refused(WeightsError, f"{path} is refused", advice, Exception):
        data = _NumpyUnpickler(file, encoding="latin1").load()
    if not isinstance(data, dict) or "model" in data:
        return data
    # A file of Caffe2. Those of detectors have their tensors under "blobs".
    blobs = data.get("blobs", data)
    model = {name: blob for name, blob in blobs.items() if not name.endswith("_momentum")}
    return {"model": model, "__author__": "Caffe2", "matching_heuristics": True}


def read_safetensors(path: str | Path) -> dict[str, Any]:
    """Read a safetensors file.

    Returns:
        "model": the tensors. If lambda_det wrote the file, also the other entries of its content.

    Raises:
        WeightsError: the file is damaged.
        OSError: the file is missing or cannot be opened.
    """
    data = Path(path).read_bytes()
    advice = "it is damaged, incomplete, or in another format: use another copy"
    errors = (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError)
    with refused(WeightsError, f"{path} cannot be read as safetensors", advice, *errors):
        model = load_safetensors(data)
        length = int.from_bytes(data[:8], "little")
        texts = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        about = json.loads(texts[_ABOUT]) if _ABOUT in texts else {}
        return {**about, "model": model}


_ABOUT = "lambda_det"  # key of the metadata that holds all entries but "model", as JSON


def _write_safetensors(content: Mapping[str, Any], file: IO[bytes]) -> None:
    model: Mapping[str, Tensor] = content["model"]
    about = json.dumps({key: value for key, value in content.items() if key != "model"})
    file.write(save_safetensors(dict(model), metadata={"format": "pt", _ABOUT: about}))


READERS = {".pkl": read_pickle, ".safetensors": read_safetensors}  # others: read_torch
WRITERS = {".pth": torch.save, ".safetensors": _write_safetensors}


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a file of weights and plain values without running code in it.

    Args:
        path: the suffix decides on the format. .pkl: pickles of Detectron2 or Caffe2.
            .safetensors: safetensors. Any other: ``torch.save``.

    Raises:
        WeightsError: the file is missing or damaged, or holds anything else.
    """
    with refused(WeightsError, f"{path} cannot be read", "check its path", OSError):
        content = READERS.get(Path(path).suffix, read_torch)(path)
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__} instead of a state dict.")
    return content
