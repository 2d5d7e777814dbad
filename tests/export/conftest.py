import pytest
import torch
from torch.fx.experimental import _config

needs_any_size = pytest.mark.skipif(
    not hasattr(_config, "backed_size_oblivious"), reason="needs PyTorch 2.7"
)


@pytest.fixture(autouse=True)
def quietly(recwarn):
    """torch.jit advises against itself, and warns of each constant of a trace."""
    with torch.no_grad():
        yield
