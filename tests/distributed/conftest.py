import pytest

from lambda_det.distributed import spawn


@pytest.fixture
def forked(monkeypatch):
    """Fork processes that would be spawned; a spawned one imports for seconds."""
    monkeypatch.setattr(spawn, "_START_METHOD", "fork")
