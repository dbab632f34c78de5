"""Random hashes and vectors."""

import numpy as np
import pytest


@pytest.fixture
def random(seed) -> np.random.Generator:
    """Random numbers that the seed of the test gives."""
    return np.random.default_rng(seed)
