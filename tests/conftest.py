"""What holds for every test: property tests draw the same examples each time, and have no clock."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Sums over threads round differently: runs are compared bit for bit at one number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
