"""What tests of several backends share."""

import pytest
import torch

from cpt_extras.kernels import backend, gemm_backend, operators


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


@pytest.fixture
def undecided(monkeypatch):
    """As if nothing had asked for a backend yet."""
    monkeypatch.setattr(backend, "_active", None)
    before = operators.active, operators.has_cpp_gradient, gemm_backend.active
    yield
    operators.active, operators.has_cpp_gradient = before[:2]
    gemm_backend.use(before[2])
