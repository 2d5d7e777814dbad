"""What ``auto`` takes on a GPU: the implementations that were proved and timed on that very GPU.

``python -m lambda_det.doctor --gpu`` proves them and writes a verdict, a JSON file in the user's
cache folder. It counts for the GPU, the driver, the PyTorch, the Triton and the sources of the
kernels that it was made with, and for nothing else. Where there is none, ``auto`` takes
``query_first``. A run never measures by itself: what it takes is known before it starts.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lambda_det.errors import reason
from lambda_det.files import replace_text
from lambda_det.layers.local.fused import DTYPES, QUERY_DEPTHS, allows_tf32, plan_text
from lambda_det.native import cache_folder

__all__ = [
    "EVERY",
    "FALLBACK",
    "SWITCH",
    "Verdict",
    "decided",
    "describe",
    "is_refused",
    "keep",
    "key_of",
    "proved_any",
    "read",
    "refuse",
    "shape_class",
    "taken",
    "use",
    "write",
]

SWITCH = "LAMBDA_DET_GPU_VERDICT"  # an environment variable; 0: no verdict is read
FALLBACK = "query_first"
EVERY = "all sizes"  # noted in the place of a class on a device where nothing was proved
DEVICES = {"cuda"}  # types of devices that verdicts are for

_FORMAT = 1
_MAKE_ONE = "python -m lambda_det.doctor --gpu makes one"
_DRIVER = Path("/proc/driver/nvidia/version")
_SOURCES = ("tensors.py", "local/fused.py", "local/fused_kernels.py")
_SOURCES += ("local/lambda_first.py", "local/query_first.py")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What is known of the implementations on a device.

    Attributes:
        key: what it counts for, see :func:`key_of`.
        classes: by :func:`shape_class`: "take", the name of an implementation, "why" it is taken,
            and "right", the names of all that were proved.
        about: where it is from, or why there is none.
    """

    key: Mapping[str, str]
    classes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    about: str = ""


def key_of(device: torch.device) -> dict[str, str]:
    """All that a proof on a device depends on, as text."""
    name, capability = device.type, ""
    if device.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return {
        "device": name,
        "compute capability": capability,
        "driver": _driver(),
        "PyTorch": str(torch.__version__),  # a class of its own, which no checkpoint may hold
        "Triton": _triton(),
        "kernels": _hash_of_sources(),
    }


def _driver() -> str:
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _DRIVER.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        found = None
    runtime = getattr(torch._C, "_cuda_getDriverVersion", int)()  # of CUDA, in every system
    return f"{found[1]}, {runtime}" if found else str(runtime)


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


@functools.cache
def _hash_of_sources() -> str:
    folder = Path(__file__).parents[1]
    texts = [(folder / name).read_bytes() for name in _SOURCES]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def shape_class(queries: Tensor, values: Tensor, embedding: Tensor) -> str:
    """The class of calls that one proof is for.

    The dtype, the layout, all sizes but the map's and the batch's, and the tiles of the fused
    kernels are the same in it, and the number of positions of the batch is within a factor of 4.

    Args:
        queries: [b, H, W, h, k].
        values: [b, H, W, v, u].
        embedding: [k, u, r_y, r_x], cut down to the offsets that occur on the map.
    """
    batch, height, width, heads, k = map(int, queries.shape)
    v, u = map(int, values.shape[3:])
    scope_y, scope_x = map(int, embedding.shape[2:])
    plan = ""
    if u == 1 and k in QUERY_DEPTHS and queries.dtype in DTYPES:  # as fused.unsupported says
        sizes = f"{batch} {height} {width} {heads} {v} {scope_x}"
        plan = f" plan {plan_text(sizes, queries.dtype == torch.float32)}"
    dtype = str(queries.dtype).removeprefix("torch.")
    if dtype == "float32" and allows_tf32():
        dtype = "tf32"
    layout = "channels_last" if queries.stride(-1) == 1 else "contiguous"
    power = ((batch * height * width).bit_length() - 1) // 2
    return (
        f"{dtype} {layout} h{heads} k{k} v{v} u{u} scope {scope_y}x{scope_x} "
        f"positions {4 ** max(power, 0)}+{plan}"
    )


# Files --------------------------------------------------------------------------------------------


def _path(key: Mapping[str, str]) -> Path:
    name = re.sub(r"[^A-Za-z0-9]+", "_", key["device"])
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"verdict_{name}_{digest}.json"


def _checksum(content: Mapping[str, Any]) -> str:
    content = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write(key: Mapping[str, str], classes: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write a verdict, with what a valid one of the same key says of other classes.

    Raises:
        OSError, RuntimeError: there is no such folder, or it cannot be written to.
    """
    path = _path(key)
    content = {
        "format": _FORMAT,
        "key": dict(key),
        "classes": {**_read_file(path, key).classes, **classes},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n")
    return path


def read(device: torch.device) -> Verdict:
    """The verdict for a device; one without classes, and the reason, where there is none to use."""
    key = key_of(device)
    if os.environ.get(SWITCH) == "0":
        return Verdict(key, about=f"{SWITCH}=0 switches the verdict off")
    try:
        path = _path(key)
        found = path.exists()
        others = sorted(path.parent.glob(f"{path.name.rpartition('_')[0]}_*.json"))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        return Verdict(key, about=f"the cache folder cannot be read ({reason(error)})")
    if found:
        return _read_file(path, key)
    about = f"there is no verdict for this {key['device']}; {_MAKE_ONE}"
    for other in others[-1:]:
        of = _read_file(other, None).key
        changed = [
            f"{name} {of[name]}, not {key[name]}"
            for name in key
            if of.get(name, key[name]) != key[name]
        ]
        if changed:
            about = f"the verdict {other} is of {', '.join(changed)}; {_MAKE_ONE}"
    return Verdict(key, about=about)


def _read_file(path: Path, key: Mapping[str, str] | None) -> Verdict:
    """The verdict of a file that must be whole, as it was written and, unless None, of this key."""
    try:
        content = json.loads(path.read_text("utf-8"))
        whole = content["checksum"] == _checksum(content) and content["format"] == _FORMAT
        found, classes = content["key"], content["classes"]
        whole = whole and (key is None or found == key)
        whole = whole and all(
            {"take", "why", "right"} <= entry.keys() for entry in classes.values()
        )
    except FileNotFoundError:
        return Verdict(key or {}, about="there is none")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        return Verdict(
            key or {},
            about=f"{path} is damaged or was not written by the doctor: remove it; {_MAKE_ONE}",
        )
    return Verdict(found, classes, f"verdict {path}")


# What this process takes --------------------------------------------------------------------------

_in_use: dict[str, Verdict] = {}  # by device
_taken: dict[tuple[str, str], dict[str, str]] = {}  # by device and class: "take" and "why"


def use(device: torch.device | str, verdict: Verdict) -> None:
    """Take what a verdict says from now on, on a device; forget what was taken there so far."""
    _in_use[str(device)] = verdict
    for place in [place for place in _taken if place[0] == str(device)]:
        del _taken[place]


def _verdict(device: str) -> Verdict:
    if device not in _in_use:
        _in_use[device] = found = read(torch.device(device))
        _logger.info(f"Local position output on {device}: {describe(found)}")
    return _in_use[device]


def describe(verdict: Verdict) -> str:
    """One line: what a verdict is, and what is taken."""
    if verdict.classes:
        return f"{verdict.about}, of {len(verdict.classes)} classes of shapes"
    return f"{FALLBACK}, since {verdict.about}"


@torch.compiler.assume_constant_result  # torch.compile has no look at files and the log
def proved_any(device: str) -> bool:
    """Whether anything was proved on a device; if not, that is noted. The log has it already."""
    found = _verdict(device)
    if not found.classes:
        _taken[device, EVERY] = {"take": FALLBACK, "why": f"nothing was proved: {found.about}"}
    return bool(found.classes)


@torch.compiler.assume_constant_result
def decided(device: str, shape: str) -> str:
    """The implementation for a class of shapes on a device; noted, and logged once."""
    entry = _taken.get((device, shape))
    if entry is None:
        entry = _verdict(device).classes.get(shape)
        if entry is None:
            entry = {"take": FALLBACK, "why": "no verdict is about these sizes"}
        _take(device, shape, entry["take"], entry["why"])
    return entry["take"]


@torch.compiler.assume_constant_result
def refuse(device: str, shape: str, why: str) -> None:
    """Take the safe implementation for a class on a device, in this process, from now on."""
    _take(device, shape, FALLBACK, why)


@torch.compiler.assume_constant_result
def is_refused(device: str, shape: str) -> bool:
    """Whether the safe implementation is what a class has on a device."""
    return _taken.get((device, shape), {}).get("take") == FALLBACK


def _take(device: str, shape: str, name: str, why: str) -> None:
    _taken[device, shape] = {"take": name, "why": why}
    _logger.info(f"Local position output on {device}, {shape}: {name}; {why}")


def keep(device: torch.device | str, recorded: Mapping[str, Any]) -> list[str]:
    """Go on with what a run took before it was resumed, where that is still proved.

    Args:
        device: of the run.
        recorded: by :func:`taken`, before.

    Returns:
        What changes, a line for each class of shapes.
    """
    verdict, changes = _verdict(str(device)), []
    classes, before_all = dict(verdict.classes), recorded.get("classes", {})
    if classes and EVERY in before_all:  # nothing was proved then
        classes = {shape: entry for shape, entry in classes.items() if shape in before_all}
        verdict = replace(verdict, about=f"this run began with it; there is a {verdict.about}")
    for shape, entry in before_all.items():
        before, known = entry["take"], classes.get(shape, {"take": FALLBACK, "right": []})
        if before == known["take"]:
            continue
        if before == FALLBACK or before in known["right"]:
            classes[shape] = {**known, "take": before, "why": "this run began with it"}
        else:
            changes.append(f"{shape}: {before} -> {known['take']}")
    use(device, replace(verdict, classes=classes))
    return changes


def taken() -> dict[str, Any]:
    """What was taken in this process and why, by class, with the keys of the verdicts behind it.

    Of several devices the first one that took something for a class counts.
    """
    keys = {device: dict(verdict.key) for device, verdict in _in_use.items()}
    classes: dict[str, dict[str, str]] = {}
    for (_, shape), entry in _taken.items():
        classes.setdefault(shape, dict(entry))
    return {"keys": keys, "classes": classes}
