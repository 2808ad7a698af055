"""Invariances of foreign models at low bits, if they hold in float32; ``make third-party`` runs all models."""

from itertools import islice

import pytest
import torch
from torch import nn

import cpt_core as cpt
from bench.third_party.foreign_models import FAMILIES
from bench.third_party.invariances import Case, answers, count, relative_difference
from bench.third_party.known_failures import unexpected_answers
from cpt_core.quantization.roles import QUANTIZERS, Quantizer

pytestmark = [
    pytest.mark.weekly,
    pytest.mark.filterwarnings(
        "ignore:LSTM with projections is not supported with oneDNN"
    ),
]

# Every n-th model of a family.
EVERY = {"decoders": 8, "encoders": 8, "recurrent": 2, "graphs": 2, "zoo": 13}
CASES = [
    case
    for family, every in EVERY.items()
    for case in islice(FAMILIES[family](), 0, None, every)
]


def test_foreign_model_families_are_large():
    sizes = {family: len(list(cases())) for family, cases in FAMILIES.items()}
    assert sizes.keys() == EVERY.keys()
    assert sizes["decoders"] > 30
    assert sizes["encoders"] > 10


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{case.family} {case.name}" for case in CASES]
)
def test_foreign_model_keeps_float32_invariances(case):
    found = answers(case)
    assert unexpected_answers(found) == []
    assert len(found) == len(case.questions)


# --- the harness sees what it is made for -----------------------------------------------------------------------------


class BatchMean(nn.Module):
    """Module with outputs that depend on the batch, at low bits only or always."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.linear, self.always = nn.Linear(8, 8), always

    def forward(self, x):
        y = self.linear(x)
        is_quantised = (
            self.linear.precision.active_bits.has_quantized_roles
            if hasattr(self.linear, "precision")
            else False
        )
        return y + y.mean(0) if self.always or is_quantised else y


def one_sample(run):
    x = torch.randn(3, 8)
    yield run(x)[:1], run(x[:1])


def examine(module, features=8):
    """Return the answers about one sample, for a module and inputs of a width."""
    call = {"one sample": one_sample}
    inputs = torch.randn(3, features)
    return answers(
        Case("test", "module", lambda: module, lambda run: run(inputs), call)
    )


@pytest.mark.parametrize(
    ("module", "outcome"),
    [
        (nn.Sequential(nn.Linear(8, 8)), "holds"),
        (BatchMean(always=False), "broken"),
        (BatchMean(always=True), "does not apply"),  # not in float32 either
    ],
)
def test_invariance_harness_reports_outcome(module, outcome):
    assert [(a.outcome, a.error) for a in examine(module)] == [(outcome, "")]


def test_invariance_harness_reports_crashes():
    crashed = examine(nn.Linear(8, 8), features=9)
    assert [answer.outcome for answer in crashed] == ["crashed"]
    message = "test, module, all: crashed {} RuntimeError"
    assert unexpected_answers(crashed)[0].startswith(message)
    assert count(crashed) == {"test: all": {"crashed": 1}}


def test_invariance_harness_notices_dynamic_batch_ranges():
    """Use no running range, so that every batch has a dynamic one."""
    quantizers = {**QUANTIZERS, "linear_input": Quantizer("per_tensor")}
    config = cpt.QuantConfig(quantizers=quantizers)
    model = cpt.quantize_(nn.Sequential(nn.Linear(8, 8)), config).eval()
    with cpt.precision(model, 4), torch.no_grad():
        differences = [relative_difference(*pair) for pair in one_sample(model)]
    assert max(differences) > 1e-3
