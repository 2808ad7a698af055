"""What tests of several backends share."""

import pytest
import torch


@pytest.fixture(scope="module")
def compiled(cpp_kernels):
    """The operators that C++ stands behind."""
    return torch.ops.cpt


@pytest.fixture
def threaded():
    """Choose the number of threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
