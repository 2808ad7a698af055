"""Functions of torch with torch's test inputs; ``make third-party`` runs more samples."""

from itertools import islice

import pytest
import torch

from bench.third_party.databases import FORMS, function_database, function_rows
from bench.third_party.examination import Row, Subject, count, examine
from bench.third_party.known_failures import unexpected_rows
from cpt_core.quantization import op_handlers
from cpt_core.quantization.op_interception import QuantizedOpsMode
from cpt_core.quantization.precision import LayerPrecision

pytestmark = pytest.mark.slow

FUNCTIONS = function_database()
MULTIPLYING = (
    "__rmatmul__ addmm addmv addbmm addr baddbmm bmm cdist corrcoef cov dot einsum inner kron linalg.matrix_power "
    "linalg.multi_dot linalg.vecdot linalg.pinv linalg.solve matmul matrix_exp mm mv nn.functional.bilinear "
    "nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d "
    "nn.functional.conv_transpose2d nn.functional.conv_transpose3d nn.functional.linear "
    "nn.functional.linear_cross_entropy nn.functional.multi_head_attention_forward "
    "nn.functional.scaled_dot_product_attention outer pca_lowrank svd_lowrank tensordot vdot"
).split()
EVERY = 8  # of the functions that do not multiply
PRODUCTS = [info for info in FUNCTIONS if info.name in MULTIPLYING]
OTHERS = [info for info in FUNCTIONS if info.name not in MULTIPLYING][::EVERY]


def names(infos):
    return [f"{info.name} {info.variant_test_name}".strip() for info in infos]


def test_op_db_equals_that_of_torch():
    assert len(FUNCTIONS) > 500
    assert {info.name for info in PRODUCTS} == set(MULTIPLYING)


@pytest.mark.parametrize("info", PRODUCTS, ids=names(PRODUCTS))
def test_op_db_matmul_is_quantized_or_reported(info):
    rows = list(islice(function_rows(info), len(FORMS)))
    assert unexpected_rows(rows) == []
    assert any(not row.skipped for row in rows)


@pytest.mark.weekly
@pytest.mark.parametrize("info", OTHERS, ids=names(OTHERS))
def test_op_db_function_without_matmul_is_unchanged(info):
    rows = list(islice(function_rows(info, FORMS[:1]), 1))
    assert unexpected_rows(rows) == []


# --- the examination sees what it is made for -------------------------------------------------------------------------


def examined(call, *inputs):
    return examine(Row("subject", ""), Subject(call), list(inputs), {})


def test_examination_reports_exact_matmul_called_quantized(monkeypatch):
    monkeypatch.setattr(op_handlers, "in_full_precision", lambda layer: layer)
    row = examined(torch.bmm, torch.randn(2, 4, 1), torch.randn(2, 1, 1))
    assert (row.matmuls, row.faults) == (
        "claimed, but exact",
        ["exact, but check calls it quantised"],
    )
    assert count([row])["without a fault"] == 0


def test_examination_reports_unrounded_operands(monkeypatch):
    rounded = LayerPrecision.round_operand

    def round_keys_alone(self, role, x, along):
        return rounded(self, role, x, along) if role.endswith("key") else x

    monkeypatch.setattr(LayerPrecision, "round_operand", round_keys_alone)
    row = examined(torch.matmul, torch.randn(9, 8), torch.randn(8, 10))
    assert "float32 operands of mm, which check calls quantised" in row.faults


def test_examination_reports_changes_in_float_mode(monkeypatch):
    monkeypatch.setattr(QuantizedOpsMode, "is_idle", lambda self, args, kwargs: False)
    query, key, value = torch.randn(3, 2, 9, 8)
    row = examined(torch.nn.functional.scaled_dot_product_attention, query, key, value)
    assert row.faults == ["float mode differs"]


def test_op_db_import_leaves_backend_flags_unfrozen():
    function_database()
    assert not torch.backends.flags_frozen()
