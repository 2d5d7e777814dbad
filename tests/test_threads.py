"""What is decided on threads before PyTorch is loaded; tests/test_imports.py sees that it is."""

import os
import sys

import pytest

from lambda_det import threads

OURS = {"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "50000\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_container(tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads.cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("users", "loaded", "expected"),
    [
        ({}, False, OURS),
        ({}, True, {}),
        ({"OMP_WAIT_POLICY": "active"}, False, {"OMP_NUM_THREADS": "1"}),
        ({"GOMP_SPINCOUNT": "5"}, False, {**OURS, "GOMP_SPINCOUNT": "5"}),
        ({"OMP_NUM_THREADS": "3"}, False, {**OURS, "OMP_NUM_THREADS": "3"}),
    ],
)
def test_what_the_user_has_set_stays(monkeypatch, users, loaded, expected):
    environment = dict(users)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(threads, "cpu_quota", lambda: 1)
    if not loaded:
        monkeypatch.delitem(sys.modules, "torch")
    threads.settle_threads()
    assert environment == users | expected
