"""Fixtures for tests of several kernel backends."""

import pytest
import torch

from cpt_extras.kernels import backend, gemm_backend, operators


@pytest.fixture(scope="module")
def compiled(cpp_kernels):
    """Return the operators that are compiled from C++."""
    return torch.ops.cpt


@pytest.fixture
def threaded():
    """Set the number of threads, and restore it afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def undecided(monkeypatch):
    """Forget the chosen backend, and restore it afterwards."""
    monkeypatch.setattr(backend, "_active", None)
    before = operators.active, operators.has_cpp_gradient, gemm_backend.active
    yield
    operators.active, operators.has_cpp_gradient = before[:2]
    gemm_backend.use(before[2])
