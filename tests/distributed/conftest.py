import pytest

from lambda_det.distributed import launch


@pytest.fixture
def forked(monkeypatch):
    """Fork processes that would be spawned; a spawned one imports for seconds."""
    monkeypatch.setattr(launch, "_START_METHOD", "fork")
