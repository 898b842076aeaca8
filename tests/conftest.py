"""Fixtures that several files of tests share."""

import signal

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """SIGINT as in a terminal: a job in the background may ignore it, and its children would."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread():
    """Bits depend on the number of threads, which other tests may have set."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
