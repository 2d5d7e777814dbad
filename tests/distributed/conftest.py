from __future__ import annotations

import multiprocessing

import pytest

from lambda_det.distributed import spawn


@pytest.fixture
def forked(monkeypatch):
    """Fork processes that would be spawned; a spawned one imports for seconds."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(spawn.mp, "get_context", lambda _: fork)
