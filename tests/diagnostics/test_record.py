"""Rounding statistics of ``record``, and training that is unaffected by the recording."""

import copy
import math
import pickle
from contextlib import nullcontext
from functools import cache
from itertools import product

import pytest
import torch
from helpers import identical, refused
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel

import cpt_core as cpt
from cpt_core.graphs.graph import Graph
from cpt_core.models.gnn import GraphNet
from cpt_core.quantization.convert import layer_precisions
from cpt_extras.diagnostics import recording as recorder
from cpt_extras.diagnostics import rounding_stats
from cpt_extras.diagnostics.recording import (
    COMPILED,
    MIN_GRADIENT_TO_NOISE,
    STATISTICS,
)
from cpt_extras.kernels.operators import fake_quantize

STEPS = 6


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- models of every kind: a model and its call for a step ------------------------------------------------------------


def linear():
    model = nn.Sequential(
        nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3, bias=False)
    )
    return model, lambda step: model(drawn(2, 4, 6, seed=step))


def convolution():
    parts = (
        nn.Conv1d(2, 4, 3),
        nn.Unflatten(1, (2, 2)),
        nn.Conv2d(2, 4, 2),
        nn.ReLU(inplace=True),
    )
    model = nn.Sequential(*parts, nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 2, (2, 1, 2)))
    return model, lambda step: model(drawn(3, 2, 9, seed=step))


def lstm():
    model = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    return model, lambda step: model(drawn(5, 2, 3, seed=step))[0]


def packed_lstm():
    model = nn.LSTM(3, 4, bidirectional=True)
    return (
        model,
        lambda step: (
            model(pack_sequence([drawn(n, 3, seed=step + n) for n in (4, 3, 1)]))[
                0
            ].data
        ),
    )


def graph_net(kind):
    model = GraphNet(kind, 6, 3, 8, 2, dropout=0.0)
    graph = Graph(torch.tensor([0, 2, 3, 5]), torch.tensor([1, 2, 0, 0, 1]), 3)
    return model, lambda step: model(graph, drawn(3, 6, seed=step))


def attention():
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    config = BertConfig(
        vocab_size=2, max_position_embeddings=8, hidden_dropout_prob=0.0, **sizes
    )
    config.attention_probs_dropout_prob = 0.0
    model = BertModel(config, add_pooling_layer=False)
    return (
        model,
        lambda step: model(inputs_embeds=drawn(2, 5, 8, seed=step)).last_hidden_state,
    )


KINDS = {
    "linear": linear,
    "convolution": convolution,
    "lstm": lstm,
    "packed lstm": packed_lstm,
    "gcn": lambda: graph_net("gcn"),
    "sage": lambda: graph_net("sage"),
    "attention": attention,
}
FORMATS = {
    3: "e2m1",
    4: "mx(e2m1,2):partial=1",
    5: "e4m3",
    6: "symmetric6",
    7: "e5m2",
    8: "e4m3",
}
APART = {
    "activation": None,
    "weight": None,
    "error": {8: "e4m3:rounding=stochastic"},
    "weight_gradient": {8: "e5m2"},
}
INTEGER = cpt.QuantConfig(aggregation="quantized", execution="integer")
CONFIGS = {
    "simulated": cpt.QuantConfig(aggregation="quantized"),
    "integer": INTEGER,
    "shared steps": INTEGER.with_shared_steps(),
    "ladder": cpt.QuantConfig(ladder=FORMATS),
    "gradients apart": cpt.QuantConfig(ladder=APART),
}


def made(kind, config="simulated"):
    torch.manual_seed(0)
    model, call = KINDS[kind]()
    return cpt.quantize_(model, CONFIGS[config]), call


def trained(model, call, record=None):
    """Train with two passes in every second step, and return losses, parameters and running ranges."""
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=1)
    scheduler, optimizer = (
        cpt.PrecisionScheduler(model, schedule),
        torch.optim.SGD(model.parameters(), 0.1),
    )
    losses = []
    with nullcontext() if record is None else record:
        for step in range(STEPS):
            for part in range(1 + step % 2):
                loss = call(10 * step + part).square().mean()
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    ranges = [
        v for p in layer_precisions(model).values() for v in p.get_running().values()
    ]
    return [torch.stack(losses), *(p.detach() for p in model.parameters()), *ranges]


@cache
def recorded(kind, config):
    """Train with a recording, compare with a plain training, and return the model and the recording."""
    alone = trained(*made(kind, config))
    model, call = made(kind, config)
    recording = cpt.diagnostics.record(model, every=1)
    assert identical(trained(model, call, recording), alone)
    return model, recording


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        *product(KINDS, ["simulated"]),
        *product(["linear", "convolution", "lstm", "gcn"], ["shared steps"]),
        ("sage", "integer"),
        *product(["convolution", "packed lstm", "attention"], ["ladder"]),
        *product(["linear", "attention"], ["gradients apart"]),
    ],
)
def test_record_leaves_training_bit_exact(kind, config):
    """Record every role without a change of losses, parameters, ranges or noise keys."""
    model, recording = recorded(kind, config)
    assert recording.steps == list(range(STEPS))
    assert not any(p.observer for p in layer_precisions(model).values())
    recurrent = [name for name, m in model.named_modules() if isinstance(m, nn.LSTM)]
    hidden = [f"{name}/grad of the hidden state's matmul" for name in recurrent]
    assert recording.missing_roles == dict.fromkeys(hidden, recorder.RECURRENCE)

    table = recording.table()
    # no module here runs an operation of another kind, or computes its weight
    absent = ("linear_", "conv_", "attention_", "computed_", "untracked_", "bias")
    expected = {
        (name, role)
        for name, p in layer_precisions(model).items()
        for role in (*p.quantizers, "weight_grad" * (config == "gradients apart"))
        if role and not role.startswith(absent)
    }
    seen = set(zip(table["layer"], table["role"], strict=True))
    assert {pair for pair in seen if pair[1] != "bias"} == expected
    columns = ["low", "high", "relative_error", "underflow", "levels_used"]
    assert table[columns].notna().all(axis=None)
    assert (table["clipped"].isna() == table["grid"].str.contains("mx")).all()
    assert (table["high"] >= table["low"]).all()
    assert table["levels_used"].between(0, 1, inclusive="right").all()

    if config == "shared steps":  # integers come from the same tensors
        index = ["step", "layer", "role"]
        integers, simulated = (
            t.set_index(index)["elements"].sort_index()
            for t in (table, recorded(kind, "simulated")[1].table())
        )
        assert simulated.equals(integers)
    if config == "gradients apart":
        gradients = table[table["role"].isin(["grad", "weight_grad"])]
        grids = gradients["role"] + gradients["grid"].str.replace(
            r".*\|", " ", regex=True
        )
        assert set(grids) == {"grad e4m3", "weight_grad e5m2"}
        assert gradients["gradient_to_noise"].gt(1).all()
        assert (gradients["level"] == 8).all()


# --- every statistic by hand ------------------------------------------------------------------------------------------


def row_of(recording, role, layer="0", step=0):
    table = recording.table().set_index(["layer", "role", "step"], drop=False)
    return table.loc[(layer, role, step)]


def one_pass(x, weight, bits=2, q_grad=2, config=None, gradient=None):
    layer = nn.Linear(weight.shape[1], len(weight), bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    cpt.quantize_(model := nn.Sequential(layer), config)
    recording = cpt.diagnostics.record(model, every=1)
    with cpt.precision(model, bits, q_grad), recording:
        y = model(x)
        y.backward(torch.ones_like(y) if gradient is None else gradient)
    return model, recording


PER_SAMPLE_MEAN = cpt.QuantConfig(
    quantizers={
        **cpt.quantization.QUANTIZERS,
        "linear_input": cpt.quantization.Quantizer("per_sample_mean"),
    }
)
# what is measured: (input, weight), bits, config, role, and the values of its row
HAND_COMPUTED = {
    # 0, 0.25, 1.25, 3 become 0, 0, 1, 3; 0.25 is one of the three that are not 0
    "range of a tensor": (
        ([[0.0, 0.25, 1.25, 3.0]], torch.eye(4)),
        2,
        None,
        "input",
        {"step": 0, "layer": "0", "level": 2, "bits": 2, "grid": "per_tensor"}
        | {"elements": 4, "low": 0, "high": 3, "clipped": 0, "levels_used": 3 / 4}
        | {"relative_error": math.sqrt(0.125 / 10.625), "underflow": 1 / 3}
        | {"snr_db": 10 * math.log10(10.625 / 0.125), "gradient_to_noise": math.nan},
    ),
    # three of four values in the row (0, 1.25, 3), and one without error in (5, 5, 5)
    "ranges of rows": (
        ([[0.0] * 3], [[0.0, 1.25, 3.0], [5.0, 5.0, 5.0]]),
        2,
        None,
        "weight",
        {"low": 0, "high": 5, "levels_used": 0.5, "elements": 6}
        | {"relative_error": 0.25 / math.sqrt(1.25**2 + 9 + 75)},
    ),
    # 6 alone is clipped on the range (0, 4), the mean of the ranges (0, 2) and (0, 6)
    "clipped values": (
        ([[0.0, 2.0], [0.0, 6.0]], torch.eye(2)),
        2,
        PER_SAMPLE_MEAN,
        "input",
        {"low": 0, "high": 4, "clipped": 0.25},
    ),
    # 6, 1.2, 0.2, -3 become 6, 1, 0, -3, which are four of fifteen values
    "number format": (
        ([[6.0, 1.2, 0.2, -3.0]], torch.eye(4)),
        3,
        CONFIGS["ladder"],
        "input",
        {"level": 3, "bits": 4, "grid": "per_tensor|e2m1", "clipped": 0}
        | {"relative_error": math.sqrt(2 * 0.2**2 / (36 + 1.2**2 + 0.2**2 + 9))}
        | {"underflow": 0.25, "levels_used": 4 / 15},
    ),
    # two of fifteen values of e2m1 in the first block of four, and one in the second
    "blocks": (
        ([[1.0, 1.0, 2.0, 2.0, 300.0, 300.0]], torch.eye(6)),
        2,
        cpt.QuantConfig(ladder={2: "mx(e2m1,4):partial=1"}),
        "input",
        {"levels_used": 1.5 / 15, "clipped": math.nan, "low": 1, "high": 300},
    ),
}


@pytest.mark.parametrize("case", HAND_COMPUTED)
def test_record_statistics_match_hand_values(case):
    operands, bits, config, role, expected = HAND_COMPUTED[case]
    x, weight = map(torch.as_tensor, operands)
    _, recording = one_pass(x, weight, bits, 2 if bits == 2 else 8, config)
    row = row_of(recording, role)
    for name, value in expected.items():
        if not isinstance(value, str):
            value = pytest.approx(value, rel=1e-5, nan_ok=True)
        assert row[name] == value, name


def test_record_reuses_training_noise_key():
    gradient = drawn(5, 3)
    model, recording = one_pass(drawn(5, 4), drawn(3, 4, seed=1), gradient=gradient)
    key = layer_precisions(model)["0"].noise_key
    rounded = fake_quantize(gradient, torch.tensor(3.0), "per_position", key - 1)[
        0
    ]  # the key before the pass
    assert not torch.equal(
        rounded, fake_quantize(gradient, torch.tensor(3.0), "per_position", key)[0]
    )
    row, noise = row_of(recording, "grad"), (rounded - gradient).double().norm()
    assert row["gradient_to_noise"] == pytest.approx(
        float(gradient.double().norm() / noise)
    )
    assert row["gradient_to_noise"] * row["relative_error"] == pytest.approx(1)
    assert (
        row["snr_db"] > 20 * math.log10(MIN_GRADIENT_TO_NOISE)
        or row["gradient_to_noise"] <= 3**0.5
    )


def test_record_separates_gradient_levels():
    """Round the weight gradient exactly at two bits, and the input gradient with errors at one bit."""
    model = cpt.quantize_(
        nn.Sequential(nn.Linear(4, 4)),
        cpt.QuantConfig().with_gradient_rounding("nearest"),
    )
    start = torch.optim.SGD(model.parameters(), 0.1)
    cpt.PrecisionScheduler(
        model,
        cpt.RoleSchedules(cpt.StaticSchedule(8, 1), 8, error=1, weight_gradient=2),
    )
    with cpt.diagnostics.record(model, every=1) as recording:
        model(drawn(1, 4).requires_grad_()).backward(
            torch.tensor([[0.0, 1.0, 2.0, 3.0]])
        )
        start.step()
    error, weight = row_of(recording, "grad"), row_of(recording, "weight_grad")
    assert (
        error["level"],
        error["levels_used"],
        weight["level"],
        weight["levels_used"],
    ) == (1, 1, 2, 1)
    assert error["relative_error"] == pytest.approx(math.sqrt(2 / 14))
    assert (weight["relative_error"], weight["snr_db"]) == (0, math.inf)


def rounded_apart(states):
    """Return the relative error of states rounded to three bits, each on a separate range."""
    errors = [
        fake_quantize(s.contiguous(), torch.tensor(7.0), "per_tensor")[0] - s
        for s in states
    ]
    return pytest.approx(
        float(torch.cat(errors).norm() / torch.cat(states).norm()), rel=1e-5
    )


def record_lstm(x):
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(nn.LSTM(2, 3, bidirectional=True)))
    recording = cpt.diagnostics.record(model, every=1)
    with cpt.precision(model, 3, 8), recording:
        return model(x)[0], recording


def test_record_measures_hidden_states_per_step():
    """Measure the hidden state of every step on a separate range."""
    x, zero = drawn(4, 2, 2), torch.zeros(2, 3)
    y, recording = record_lstm(x)
    y = y.detach()
    for role, states in {
        "hidden_l0": [zero, *y[:-1, :, :3]],
        "hidden_l0_reverse": [*y[1:, :, 3:], zero],
        "input_l0": list(x),
    }.items():
        row = row_of(recording, role)
        assert row["relative_error"] == rounded_apart(states)
        assert row["low"] == min(float(s.min()) for s in states)


def test_record_follows_packed_sequence_steps():
    y, recording = record_lstm(pack_sequence([drawn(n, 2, seed=n) for n in (3, 1)]))
    # rows: both sequences at step 0, then the long one at steps 1 and 2
    y, zero = y.data.detach(), torch.zeros(1, 3)
    states = [torch.cat([y[2:3, 3:], zero]), y[3:4, 3:], zero]
    row = row_of(recording, "hidden_l0_reverse")
    assert row["relative_error"] == rounded_apart(states)


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    torch.manual_seed(0)
    cpt.quantize_(model := nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    with cpt.precision(model, 4, 8):
        yield model


def passes(model, count=1):
    for seed in range(count):
        model(drawn(5, 4, seed=seed)).sum().backward()


def steps(model, count, accumulate=1):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(count):
        passes(model, accumulate)
        optimizer.step()


def test_record_includes_accumulated_gradients_of_step(model):
    """Record one step in every n with all passes whose gradients accumulate."""
    with cpt.diagnostics.record(model, every=3) as recording:
        steps(model, 4, accumulate=2)
    assert set(recording.table().groupby(["step", "layer", "role"]).size()) == {1}
    row = row_of(recording, "input", step=3)
    inputs = torch.cat([drawn(5, 4, seed=seed) for seed in range(2)])
    assert row["elements"] == inputs.numel()
    assert (row["low"], row["high"]) == (inputs.min(), inputs.max())


# events: a pass with gradients, an evaluation, and steps of the optimizers of layer 0, layer 1 and another model
@pytest.mark.parametrize(
    ("options", "events", "steps", "count"),
    [
        ({"every": 3}, ["pass", "pass", "0"] * 8, [0, 3, 6], 8),
        ({"every": 1}, ["pass", "0", "1", "other"] * 3, [0, 1, 2], 3),
        ({"every": 1}, ["pass", "0", "evaluation", "1"], [0], 1),
        # the first step is recorded, whatever its number, and the last although it is unfinished
        ({"every": 2, "step": 101}, ["pass", "0"] * 2 + ["pass"], [101, 103], 103),
        # more than four recorded steps are thinned out
        ({"every": 1}, ["pass", "0"] * 13, [0, 4, 8, 12], 13),
    ],
)
def test_record_counts_steps(options, events, steps, count, model, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_RECORDED_STEPS", 4)
    parts = {"0": model[0], "1": model[1], "other": nn.Linear(2, 2)}
    parts["other"].weight.grad = torch.ones(2, 2)
    optimizers = {n: torch.optim.SGD(m.parameters(), 0.1) for n, m in parts.items()}
    with cpt.diagnostics.record(model, **options) as recording:
        for event in events:
            model.train(event != "evaluation")
            if event in optimizers:
                optimizers[event].step()
            else:
                passes(model)
    assert (recording.step, recording.steps) == (count, steps)
    passes(model)
    assert recording.steps == steps


def test_record_is_idle_between_recorded_steps(model, monkeypatch):
    called = []
    monkeypatch.setattr(
        rounding_stats,
        "compute_rounding_sums",
        lambda *args: called.append(1) or torch.zeros(10, dtype=torch.float64),
    )
    with cpt.diagnostics.record(model, every=2) as recording:
        steps(model, 1)
        assert (recording.step, len(called)) == (1, 8)
        called.clear()
        steps(model, 1)
        assert not called


def test_record_separates_bits_within_step(model):
    with cpt.diagnostics.record(model, every=1) as recording:
        passes(model)
        with cpt.precision(model, 6):
            passes(model)
    table = recording.table()
    assert table[table["role"] == "input"]["bits"].tolist() == [4, 4, 6, 6]


def test_record_lists_late_gradients_as_unseen():
    cpt.quantize_(model := nn.Sequential(nn.Linear(4, 3, bias=False)))
    with cpt.diagnostics.record(model, every=1) as recording:
        with cpt.precision(model, 4, 8):
            y = model(drawn(5, 4)).sum()
        y.backward()
    assert recording.missing_roles == {"0/grad": recorder.NOT_ROUNDED}


def test_record_sees_computed_weights():
    class Masked(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight * (self.weight > 0), self.bias)

    model = cpt.quantize_(nn.Sequential(Masked(4, 3)))
    with (
        cpt.precision(model, 4, 8),
        cpt.diagnostics.record(model, every=1) as recording,
    ):
        model(drawn(5, 4)).sum().backward()
    assert recording.missing_roles == {}
    assert "computed_weight" in set(recording.table()["role"])


def test_record_handles_checkpoints_and_copies(model):
    with cpt.diagnostics.record(model, every=1) as recording:
        x = drawn(5, 4).requires_grad_()
        checkpoint(model, x, use_reentrant=False).sum().backward()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not any(p.observer for p in layer_precisions(twin).values())
            passes(twin)
    assert row_of(recording, "grad")["elements"] == 5 * 3
    assert torch.isfinite(x.grad).all()


def test_record_preserves_second_derivatives(model):
    def second(x):
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    keys = [p.noise_key.clone() for p in layer_precisions(model).values()]
    alone = second(drawn(5, 4).requires_grad_())
    for precision, key in zip(layer_precisions(model).values(), keys, strict=True):
        precision.noise_key.copy_(key)
    with cpt.diagnostics.record(model, every=1):
        assert identical(second(drawn(5, 4).requires_grad_()), alone)


# --- what it is told to -----------------------------------------------------------------------------------------------


def test_record_scalars_match_table(model):
    with cpt.diagnostics.record(model, every=2) as recording:
        steps(model, 3)
    scalars = recording.scalars()
    assert scalars == recording.scalars(2)
    assert scalars.keys() == recording.scalars(0).keys()
    assert scalars["1/input/snr_db"] == row_of(recording, "input", "1", 2)["snr_db"]
    assert "1/input/gradient_to_noise" not in scalars
    assert {name.split("/")[-1] for name in scalars} == {"level", *STATISTICS}
    refused(
        "step 1 is not recorded; recorded steps: 2 from 0 to 2", recording.scalars, 1
    )
    refused("recorded steps: none", cpt.diagnostics.record(model).scalars)


def test_record_rejects_unquantised_or_compiled_models(model):
    refused(
        "no quantised layers; call quantize_", cpt.diagnostics.record, nn.Linear(2, 2)
    )
    refused(
        "roundings of a compiled model cannot be recorded",
        cpt.diagnostics.record,
        torch.compile(model, backend="eager"),
    )


def test_record_rejects_nesting(model):
    with cpt.diagnostics.record(model, every=5) as recording:
        steps(model, 1)
        with (
            pytest.raises(ValueError, match="layer '0' is recorded already"),
            cpt.diagnostics.record(model[0:1]),
        ):
            pass
        steps(model, 5)
    assert recording.steps == [0, 5]
    with pytest.raises(KeyError), cpt.diagnostics.record(model):
        raise KeyError
    assert not any(p.observer for p in layer_precisions(model).values())
    with cpt.diagnostics.record(
        model
    ):  # after it, and after an error inside, it is free again
        pass


@pytest.mark.slow
def test_record_lists_compiled_modules_as_unseen(model):
    passes(model)
    model[0].compile(backend="eager")
    with cpt.diagnostics.record(model, every=1) as recording:
        steps(model, 2)
    assert recording.missing_roles == dict.fromkeys(
        [f"0/{role}" for role in ("input", "weight", "grad", "bias")], COMPILED
    )
    assert set(recording.table()["layer"]) == {"1"}
