"""``python -m lambda_det.doctor --gpu``: prove the lambda layer's implementations on this GPU.

For the sizes of a network's lambda layers each implementation of the local position output is
compared with float64, forward and backward, and those that are right are timed beside the 3x3
convolution (gpu_checks.py). The verdict (:mod:`lambda_det.layers.local.verdict`) is what ``auto``
goes by from then on. Every implementation runs in processes of its own, since a kernel may crash or
hang.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor, nn

from lambda_det.classification.config import is_recipe, load_recipe
from lambda_det.classification.model import model_options
from lambda_det.detection.task import DetectionTask, load_any_config
from lambda_det.doctor.gpu_checks import CONVOLUTION, Case
from lambda_det.doctor.parts import version
from lambda_det.errors import ConfigError, reason
from lambda_det.layers import local
from lambda_det.layers.local import IMPLEMENTATIONS, unsupported, verdict
from lambda_det.modeling import create_backbone, create_classifier
from lambda_det.training.config_file import common_settings
from lambda_det.training.precision import Precision
from lambda_det.training.settings import Settings

__all__ = ["cases_of_network", "main", "prove", "refusal", "report"]

CHECKS = (sys.executable, "-m", "lambda_det.doctor.gpu_checks")
MOST_MEMORY = 2  # times that of the safe implementation, for one that is taken
LEAST_GAIN = 0.97  # of its time; differences below that are noise
LARGE = 2**31 + 2**20  # numbers of a tensor, more than 32 bits can count
TIMEOUT = 900  # seconds of a check
MOST_DENSE = 1024  # positions of a map for the dense form, whose memory grows with their square
_FENCE = "---- for an issue ----"


# The network's calls ------------------------------------------------------------------------------


def cases_of_network(
    network: nn.Module, height: int, width: int, batches: list[int], dtype: str, channels_last: bool
) -> list[Case]:
    """What the lambda layers of a network on the meta device call, one case of each class.

    Args:
        network: that takes images.
        height, width: of the images.
        batches: how many there are at once.
        dtype: "bfloat16", "float16" or "float32".
        channels_last: the layout of images and weights.
    """
    found: list[Case] = []

    def note(queries: Tensor, values: Tensor, embedding: Tensor) -> str:
        case = Case(
            *queries.shape,
            *values.shape[3:],
            *embedding.shape[2:],
            dtype=dtype,
            channels_last=channels_last or queries.stride(-1) == 1,
        )
        found.append(case)
        return verdict.FALLBACK

    network.eval()
    with torch.no_grad(), mock.patch.object(local, "choose", note):
        for batch in batches:
            network(torch.empty(batch, 3, height, width, device="meta"))
    largest: dict[str, Case] = {}
    for case in sorted(found, key=lambda case: case.batch * case.height * case.width):
        largest[case.shape_class()] = case
    return list(largest.values())


class _Training(NamedTuple):
    """What a file or a name says of a training.

    Attributes:
        network: on the meta device.
        size: height and width of the largest image; None where nobody knows.
        dtype: "bfloat16", "float16" or "float32".
        channels_last: whether images are laid out so.
        stride: that images are padded to.
    """

    network: nn.Module
    size: tuple[int, int] | None
    dtype: str
    channels_last: bool
    stride: int = 1


def _of_detector(file: str) -> _Training:
    task = DetectionTask(load_any_config(argparse.Namespace(config_file=file, opts=[])))
    with torch.device("meta"):
        network = task.parts.make_backbone()
    if "LambdaRes5ROIHeads" in task.dump():
        print(
            "The lambda layers of LambdaRes5ROIHeads, on the regions, are not proved; "
            f"auto takes {verdict.FALLBACK} for them"
        )
    dtype = str(Precision.of(task.settings))
    stride = max(network.size_divisibility, 32)
    return _Training(network, task.parts.training_size, dtype, task.parts.channels_last, stride)


def _of_recipe(file: str) -> _Training:
    words = argparse.Namespace(
        config_file=file, opts=[], synthetic_data=False, debug_numerics=False
    )
    cfg = load_recipe(words)
    with torch.device("meta"):
        network = create_classifier(cfg.MODEL.NAME, **model_options(cfg))
    dtype = str(Precision.of(Settings(**common_settings(cfg), max_iter=1)))
    return _Training(network, (cfg.INPUT.SIZE, cfg.INPUT.SIZE), dtype, cfg.MODEL.CHANNELS_LAST)


def _of_model(name: str) -> _Training:
    with torch.device("meta"):
        return _Training(create_backbone(name), (224, 224), "bfloat16", False)


def cases_of_options(args: argparse.Namespace) -> list[Case]:
    """The cases of the command line.

    Raises:
        ConfigError: there is no such file or model, it has no lambda layer, or the size of its
            images is not known.
    """
    file = args.config_file
    if not file:
        training = _of_model(args.model)
    else:
        training = _of_recipe(file) if is_recipe(file) else _of_detector(file)
    size = (args.image_size, args.image_size) if args.image_size else training.size
    if size is None:
        raise ConfigError(
            f"{file} does not say how large the images of the training are: add --image-size N."
        )
    cases = cases_of_network(
        training.network,
        *(-(-side // training.stride) * training.stride for side in size),
        args.batch,
        args.dtype or training.dtype,
        args.channels_last or training.channels_last,
    )
    if not cases:
        raise ConfigError(
            f"{file or args.model} has no lambda layer with positions, so there is nothing to "
            "prove."
        )
    return cases


# The proof ----------------------------------------------------------------------------------------


def _do(jobs: list[dict[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """What became of each job; a crash or a hang is the end of one, and not of the others."""
    outcomes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        while len(outcomes) < len(jobs):
            left = jobs[len(outcomes) :]
            results = Path(folder, f"{len(outcomes)}.jsonl")
            request = {"device": str(device), "results": str(results), "jobs": left}
            try:
                done = subprocess.run(
                    CHECKS,
                    input=json.dumps(request),
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=TIMEOUT * len(left),
                )
                end = _end_of(done)
            except subprocess.TimeoutExpired:
                end = f"it took more than {TIMEOUT} s"
            lines = results.read_text("utf-8").splitlines() if results.exists() else []
            found = [json.loads(line) for line in lines]
            if len(found) < len(left) and not any("refused" in one for one in found):
                found.append({"refused": end})
            outcomes += found
    return outcomes


def _end_of(done: subprocess.CompletedProcess) -> str:
    """How a process ended that did not do all of its jobs."""
    if done.returncode < 0:
        return f"the process was ended by {signal.Signals(-done.returncode).name}"
    last = (done.stderr.strip() or "no message").splitlines()[-1]
    return f"the process ended with status {done.returncode}: {last}"


def _job(kind: str, names: list[str], case: Case) -> dict[str, Any]:
    return {"kind": kind, "names": names, "case": list(case), "limit": LARGE}


def prove(
    cases: list[Case], device: torch.device, progress: Callable[[str], None] = lambda line: None
) -> dict[str, dict[str, Any]]:
    """Prove and time all implementations that can run on a device.

    Args:
        cases: one of each class.
        device: where.
        progress: is given a line about what is done.

    Returns:
        By class, what :class:`lambda_det.layers.local.verdict.Verdict` has, and "refused", by name
        the reason; "seconds", by name forward and with backward; "error", by name as a share of
        what is allowed; "bytes"; "case", in words.
    """
    entries = {
        case.shape_class(): {"case": str(case), "right": [], "refused": {}, "error": {}}
        for case in cases
    }
    for name in IMPLEMENTATIONS:
        tried = [case for case in cases if _is_tried(name, case, device, entries)]
        if not tried:
            continue
        progress(f"proving {name}")
        # It is about the number of images: a small map, few values and a narrow scope
        sides = (min(side, 64) for side in (tried[0].height, tried[0].width))
        narrow = {side: min(getattr(tried[0], side), 3) for side in ("scope_y", "scope_x")}
        large = tried[0]._replace(v=16, **narrow).on_map(1, *sides)
        *outcomes, last = _do(
            [*(_job("check", [name], case) for case in tried), _job("large", [name], large)], device
        )
        for case, outcome in zip(tried, outcomes, strict=True):
            entry = entries[case.shape_class()]
            if "refused" in outcome:
                entry["refused"][name] = outcome["refused"]
            elif "refused" in last:
                entry["refused"][name] = f"with more than 2^31 numbers: {last['refused']}"
            else:
                entry["right"].append(name)
                entry["error"][name] = outcome["found"]["error"]
                if "left out" in last["found"]:
                    entry["large"] = (
                        f"more than 2^31 numbers were not tried: {last['found']['left out']}"
                    )
    progress("timing what is right")
    jobs = [_job("time", entries[case.shape_class()]["right"], case) for case in cases]
    for case, outcome in zip(cases, _do(jobs, device), strict=True):
        entry = entries[case.shape_class()]
        entry |= outcome.get("found", {"seconds": {}, "bytes": {}})
        entry |= _decide(entry, outcome.get("refused"))
    return entries


def _is_tried(name: str, case: Case, device: torch.device, entries: dict[str, Any]) -> bool:
    """Whether an implementation is tried on a case.

    The reason of :func:`unsupported` is noted. It is not noted that dense is only for small maps,
    and compiled only for a CPU.
    """
    if name == "dense" and case.height * case.width > MOST_DENSE:
        return False
    if name == "compiled" and device.type != "cpu":
        return False
    why = unsupported(name, *case.on_map(1, 1, 1).inputs(device))
    if why is not None:
        entries[case.shape_class()]["refused"][name] = why
    return why is None


def _decide(entry: dict[str, Any], failed: str | None) -> dict[str, str]:
    """What is taken of a class, and why."""
    safe, times, memory = verdict.FALLBACK, entry["seconds"], entry["bytes"]
    if failed is not None or not entry["right"]:
        why = f"the times could not be taken: {failed}" if failed else "nothing was proved"
        return {"take": safe, "why": why}
    able = entry["right"]
    if safe in able:
        able = [name for name in able if memory[name] <= MOST_MEMORY * memory[safe]]
    take = min(able, key=lambda name: times[name][1])
    if safe in able and times[take][1] > LEAST_GAIN * times[safe][1]:
        take = safe
    shares = [times[take][1] / times[other][1] for other in times if other in (safe, CONVOLUTION)]
    why = f"right, and {shares[0]:.2f} of the time of a {CONVOLUTION}"
    if take != safe and safe in able:
        why += f", {shares[1]:.2f} of {safe}'s"
    return {"take": take, "why": why}


def report(key: dict[str, str], entries: dict[str, dict[str, Any]]) -> str:
    """The findings as text that belongs into an issue."""
    lines = [f"{name}: {value}" for name, value in key.items()]
    lines += [f"lambda_det: {version('lambda_det') or 'not installed'}, {platform.platform()}"]
    header = (
        "",
        "error, of the allowed",
        "forward ms",
        "with backward ms",
        "of the convolution",
        "MiB",
    )
    for entry in entries.values():
        rows = []
        for name, (forward, both) in entry["seconds"].items():
            error, memory = entry["error"].get(name), entry["bytes"][name]
            share = both / entry["seconds"][CONVOLUTION][1]
            rows.append(
                [
                    name,
                    "" if error is None else f"{error:.2f}",
                    *(f"{seconds * 1e3:.3f}" for seconds in (forward, both)),
                    f"{share:.2f}",
                    f"{memory / 2**20:.0f}" if memory else "",
                ]
            )
        lines += ["", entry["case"]]
        if rows:
            lines.append(tabulate(rows, header, tablefmt="github", disable_numparse=True))
        lines += [f"- {name} is refused: {why}" for name, why in entry["refused"].items()]
        lines += [f"- {entry['large']}"] if "large" in entry else []
        lines.append(f"auto: {entry['take']}; {entry['why']}")
    return "\n".join(lines)


def refusal() -> str | None:
    """Why nothing can be proved on this machine."""
    safe = f"auto takes {verdict.FALLBACK} here"
    if not torch.cuda.is_available():
        return (
            f"PyTorch {torch.__version__} sees no CUDA GPU, so there is nothing to prove; "
            "python -m lambda_det.doctor may say why."
        )
    if torch.version.hip:
        name = torch.cuda.get_device_name()
        return f"{name} is an AMD GPU, and the proof is for NVIDIA's alone; {safe}."
    return None


def main(args: argparse.Namespace, device: torch.device | None = None) -> None:
    """Prove, write the verdict, and print both.

    Args:
        args: of ``python -m lambda_det.doctor``.
        device: by default the current GPU.

    Raises:
        ConfigError: there is no such GPU, network or file, or the verdict cannot be written.
    """
    if device is None:
        if why := refusal():
            raise ConfigError(why)
        device = torch.device("cuda", torch.cuda.current_device())
    key = verdict.key_of(device)
    try:
        path = verdict.write(key, {})  # before work that would be lost
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"The verdict cannot be written ({reason(error)}), and auto takes {verdict.FALLBACK}: "
            "let XDG_CACHE_HOME name a folder that can be written to."
        ) from error
    cases = cases_of_options(args)
    print(f"{len(cases)} classes of shapes; this takes minutes", flush=True)
    entries = prove(cases, device, lambda line: print(line, flush=True))
    verdict.write(key, entries)
    print(f"\n{_FENCE}\n```\n{report(key, entries)}\n```\n{_FENCE}\n")
    print(f"auto goes by it from now on: {path}")
    if os.environ.get(verdict.SWITCH) == "0":
        print(f"{verdict.SWITCH}=0 is set, which switches it off")
