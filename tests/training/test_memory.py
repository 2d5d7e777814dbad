"""What memory is free, and what is said before a step that would not fit."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lambda_det.errors import ConfigError
from lambda_det.training import memory
from lambda_det.training.memory import check_memory, free_memory
from tests.training.toy import settings

KIB = 1024


def machine(folder, *, available, groups=None, limits=()):
    """A made-up /proc and /sys/fs/cgroup: the limits are (folder, limit, used, droppable)."""
    proc, root = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:  {available // KIB} kB\n")
    (proc / "self/cgroup").write_text(groups or "0::/\n")
    for place, limit, used, droppable in limits:
        (root / place).mkdir(parents=True, exist_ok=True)
        (root / place / "memory.max").write_text(f"{limit}\n")
        (root / place / "memory.current").write_text(f"{used}\n")
        (root / place / "memory.stat").write_text(f"anon 7\ninactive_file {droppable}\n")
    return proc, root


@pytest.mark.parametrize(
    ("available", "groups", "limits", "free"),
    [
        (4096 * KIB, None, [], 4096 * KIB),
        (4096 * KIB, None, [("", 1000, 900, 50)], 150),
        (4096 * KIB, None, [("", "max", 900, 50)], 4096 * KIB),
        (4096 * KIB, "0::/a/b\n", [("a", 3000, 1000, 0), ("a/b", "max", 9, 9)], 2000),
        (4096 * KIB, None, [("", 1000, 1200, 0)], 0),
        (1 * KIB, None, [("", 9000, 100, 0)], 1 * KIB),
    ],
    ids=["no limit", "container", "max", "slice", "beyond", "small machine"],
)
def test_what_is_free(tmp_path, available, groups, limits, free):
    assert (
        free_memory(*machine(tmp_path, available=available, groups=groups, limits=limits)) == free
    )


def test_what_is_free_below_cgroups_of_version_1_and_elsewhere(tmp_path):
    proc, root = machine(tmp_path, available=4096 * KIB)
    (root / "memory").mkdir(parents=True)
    (root / "memory/memory.limit_in_bytes").write_text("5000")
    (root / "memory/memory.usage_in_bytes").write_text("4500")
    (root / "memory/memory.stat").write_text("inactive_file 1\ntotal_inactive_file 100\n")
    assert free_memory(proc, root) == 600
    assert free_memory(tmp_path / "none", tmp_path / "none") is None
    assert (free_memory() or 1 << 20) >= 1 << 20  # of this machine


class Square(nn.Module):
    """Keeps an image in float32 twice for the backward pass, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.norm = nn.BatchNorm2d(3)

    def forward(self, batch):
        pixels = torch.stack([sample["image"] for sample in batch]).float() / 255
        return {"loss": (self.norm(pixels) * self.weight).exp().mean()}


IMAGE = 3 * 96 * 64 * 4  # bytes of one in float32
KEYS = {"images_per_step": "BATCH", "accumulate": "PARTS", "num_workers": "WORKERS"}


def checked(monkeypatch, free, *, images=4, device="cpu", batch=None):
    monkeypatch.setattr(memory, "free_memory", lambda: free)
    model = Square()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = batch or [{"image": torch.ones(3, 64, 96, dtype=torch.uint8)} for _ in range(images)]
    check_memory(model, batch, settings(keys=KEYS, device=device), contextlib.nullcontext)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert model.weight.grad is None


def test_a_step_that_cannot_fit_is_refused_with_the_keys(monkeypatch):
    """It has two to seven float32 images at once for each image."""
    with pytest.raises(ConfigError, match=r"4 images of 96x64.*BATCH.*PARTS.*WORKERS"):
        checked(monkeypatch, 4 * 2 * IMAGE)
    checked(monkeypatch, 4 * 8 * IMAGE)
    with pytest.raises(ConfigError, match="12 images"):
        checked(monkeypatch, 4 * 8 * IMAGE, images=24 // 2)


def test_a_step_that_may_fit_is_warned_of(monkeypatch, caplog):
    """Of free memory from below to above there is first an error, then a warning, then nothing."""
    found = []
    for part in range(8, 40):
        caplog.clear()
        with caplog.at_level(logging.WARNING), contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(ConfigError))
            found.append("error")
            checked(monkeypatch, part * IMAGE)
            found[-1] = "warning" if "may end this training" in caplog.text else ""
    order = list(dict.fromkeys(found))
    assert order == ["error", "warning", ""] and found == sorted(found, key=order.index)


def test_images_of_several_sizes_count_as_they_are_padded(monkeypatch):
    small, large = (torch.ones(3, *size, dtype=torch.uint8) for size in ((8, 8), (64, 96)))
    with pytest.raises(ConfigError, match="2 images of 96x64"):
        checked(monkeypatch, 3 * IMAGE, batch=[{"image": small}, {"image": large}])


def test_loader_processes_that_are_not_there_yet_count(monkeypatch):
    children = [SimpleNamespace(pid=-1)] * 3
    monkeypatch.setattr(memory.multiprocessing, "active_children", lambda: children)
    with pytest.raises(ConfigError, match=r"3 loader process\(es\) 1.8 GiB"):
        checked(monkeypatch, memory.GIB, images=12)  # which would fit without them


@pytest.mark.parametrize(
    "case", ["a GPU", "unknown memory", "another batch", "no images", "an error"]
)
def test_what_is_not_checked(monkeypatch, case):
    free = None if case == "unknown memory" else 1
    batch = {
        "no images": [{"x": torch.ones(2)}],
        "another batch": {"images": torch.ones(2)},
        "an error": [{"image": torch.ones(9, 9)}],
    }
    device = "cuda" if case == "a GPU" else "cpu"
    checked(monkeypatch, free, device=device, batch=batch.get(case))
