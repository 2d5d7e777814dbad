import os
import random

# Before anything imports matplotlib: pictures are drawn without a screen.
os.environ.setdefault("MPLBACKEND", "Agg")

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Every test sees the same random numbers, alone or among the others."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
