"""Layers of torch with torch's test inputs; ``make third-party`` runs all inputs."""

from itertools import islice

import pytest
import torch

from bench.third_party.databases import module_database, module_rows
from bench.third_party.known_failures import unexpected_rows

pytestmark = pytest.mark.slow

MOST_ROWS = 2  # of a layer, the first is in training
LAYERS = module_database()


def test_module_db_equals_that_of_torch():
    assert len(LAYERS) > 100
    assert torch.nn.Linear in {info.module_cls for info in LAYERS}


@pytest.mark.parametrize("info", LAYERS, ids=[info.name for info in LAYERS])
def test_module_db_layer_behaves_as_documented(info):
    rows = list(islice(module_rows(info), MOST_ROWS))
    assert unexpected_rows(rows) == []
