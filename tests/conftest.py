"""Fixtures that several files of tests share."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Bits depend on the number of threads, which other tests may have set."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
