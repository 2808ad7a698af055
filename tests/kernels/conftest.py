"""What tests of several backends share."""

import pytest
import torch

from cpt_core.kernels import backend, operators, products


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
    before = operators.active, operators.gradient_node, products.active
    yield
    operators.active, operators.gradient_node = before[:2]
    products.use(before[2])
