"""Detection of invariances that hold in float32 and break under quantisation.

What breaks an invariance here is a layer of the tests that rounds on too wide a range while it is quantised: the grids
of the library have no part in it.
"""

import contextlib
import copy
import io
import random
import re
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import FunctionModule, identical
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.op_interception import OP_HANDLERS
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.diagnostics import invariances as questions
from cpt_extras.diagnostics.check import check
from cpt_extras.diagnostics.exact_sums import ExactSums
from cpt_extras.diagnostics.input_changes import find_masks, new_contents
from cpt_extras.diagnostics.invariances import Invariance
from cpt_extras.formats.ladder import FormatLadder


class Rounds(nn.Module):
    """Linear layer that, while quantised, rounds its input on one range over ``dims``."""

    def __init__(self, dims=(), when=lambda x: True):
        super().__init__()
        self.dims, self.when, self.layer = dims, when, nn.Linear(4, 4)

    def forward(self, x):
        if (
            self.dims
            and self.layer.precision.active_bits.has_quantized_roles
            and self.when(x)
        ):
            step = x.detach().abs().amax(self.dims, keepdim=True) / 3
            x = x + ((x.detach() / step).round() * step - x.detach())
        return self.layer(x)


def answers_of(model, *inputs):
    """Return the answers of ``check`` by the name of the invariance."""
    torch.manual_seed(0)
    found = {
        answer.name: answer for answer in check(quantize_(model), inputs).invariances
    }
    assert found
    return found


def model_around(rounds, before=lambda x: x):
    """Return a model of three layers, the middle one of which may round on too wide a range."""
    model = nn.ModuleDict(
        {"first": nn.Linear(4, 4), "odd": rounds, "last": nn.Linear(4, 4)}
    )
    return FunctionModule(
        lambda m, x, *more: m.parts["last"](
            m.parts["odd"](before(m.parts["first"](x), *more))
        ),
        parts=model,
    )


def masked_mean(x, mask):
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def neighbours(x):
    """Add the values of neighbouring nodes on a line."""
    return (
        x
        + nn.functional.pad(x, (0, 0, 1, 0))[:-1]
        + nn.functional.pad(x, (0, 0, 0, 1))[1:]
    )


def cumulated(x):
    return x.cumsum(1)


def is_recomputed(x):
    return torch._C._current_graph_task_id() != -1


def is_strided(x):
    return not x.is_contiguous()


TOKENS = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1.0] * 6, [1.0] * 4 + [0.0] * 2, [1.0] * 3 + [0.0] * 3])
# name of a question -> models that keep what it asks for, or break it: a maker, what breaks it, and the inputs
CASES = {
    questions.OTHER_SAMPLES: (model_around, {"dims": (0,)}, (TOKENS[:, 0],)),
    questions.ONE_SAMPLE: (model_around, {"dims": (0,)}, (TOKENS[:, 0],)),
    questions.LATER_POSITIONS: (
        partial(model_around, before=cumulated),
        {"dims": (1,)},
        (TOKENS,),
    ),
    questions.PREFIX_ALONE: (
        partial(model_around, before=cumulated),
        {"dims": (1,)},
        (TOKENS,),
    ),
    questions.OUT_OF_REACH: (
        partial(model_around, before=neighbours),
        {"dims": (0,)},
        (TOKENS[0],),
    ),
    questions.CHECKPOINTING: (
        model_around,
        {"dims": (1,), "when": is_recomputed},
        (TOKENS[:, 0],),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_invariance_check_names_breaking_layer(name):
    make, broken, inputs = CASES[name]
    right = answers_of(make(Rounds()), *inputs)
    assert (right[name].status, right[name].moved, right[name].layer) == (
        "holds",
        0,
        None,
    )
    assert {answer.status for answer in right.values()} == {"holds", "not applicable"}
    wrong = answers_of(make(Rounds(**broken)), *inputs)[name]
    assert (wrong.status, wrong.layer) == ("broken", "parts.odd")
    assert 1e-3 < wrong.moved < 2


def pooled(dims):
    model = nn.ModuleDict({"odd": Rounds(dims), "last": nn.Linear(4, 4)})
    return FunctionModule(
        lambda m, x, mask: m.parts["last"](masked_mean(m.parts["odd"](x), mask)),
        parts=model,
    )


def per_token(dims):
    return FunctionModule(
        lambda m, x, mask: m.odd(x) + masked_mean(m.odd(x), mask)[:, None],
        odd=Rounds(dims),
    )


@pytest.mark.parametrize(
    "read",
    [lambda m: m, lambda m: m.bool(), lambda m: m.long(), lambda m: m[:, None, None]],
    ids=["float", "bool", "integer", "(B, 1, 1, T)"],
)
@pytest.mark.parametrize("make", [pooled, per_token])
def test_invariance_check_accepts_mask_types(make, read):
    def model(dims):
        inner = make(dims)
        return FunctionModule(
            lambda m, x, mask: m.inner(x, mask.reshape(3, 6).float()), inner=inner
        )

    assert (
        answers_of(model(()), TOKENS, read(MASK))[questions.MASKED_POSITIONS].status
        == "holds"
    )
    wrong = answers_of(model((1,)), TOKENS, read(MASK))[questions.MASKED_POSITIONS]
    assert wrong.status == "broken"
    assert wrong.layer.endswith("odd")


def test_invariance_check_reads_inverted_masks():
    model = FunctionModule(
        lambda m, x, ignored: m.odd(x).masked_fill(ignored[..., None], 0).sum(1),
        odd=Rounds((1,)),
    )
    assert (
        answers_of(model, TOKENS, MASK == 0)[questions.MASKED_POSITIONS].status
        == "broken"
    )
    ignoring = FunctionModule(
        lambda m, x, mask: m.odd(x).sum(1), odd=Rounds((1,))
    )  # float32 reads what the mask leaves out
    assert (
        answers_of(ignoring, TOKENS, MASK)[questions.MASKED_POSITIONS].status
        == "not applicable"
    )


class Decoder(nn.Module):
    """Sum of all tokens read so far, with a cache like the decoders of transformers."""

    def __init__(self, is_odd):
        super().__init__()
        self.embedding, self.odd, self.is_odd = (
            nn.Embedding(7, 4),
            Rounds((0, 1, 2)),
            is_odd,
        )

    def forward(self, ids, attention_mask=None, past_key_values=None, use_cache=False):
        h = self.embedding(ids).cumsum(1)
        if past_key_values is not None:
            h = h + past_key_values
        self.odd.when = lambda x: self.is_odd and past_key_values is not None
        return {
            "logits": self.odd(h),
            "past_key_values": h[:, -1:] if use_cache else None,
        }


def test_invariance_check_compares_cached_decoding():
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 1, 2, 3, 3, 0]])
    assert answers_of(Decoder(False), ids)[questions.CACHED_DECODING].status == "holds"
    found = answers_of(Decoder(True), ids, torch.ones(2, 6))
    assert (
        found[questions.CACHED_DECODING].status,
        found[questions.CACHED_DECODING].layer,
    ) == (
        "broken",
        "odd",
    )
    assert found[questions.PREFIX_ALONE].status == "holds"
    without = answers_of(model_around(Rounds(), cumulated), TOKENS)[
        questions.CACHED_DECODING
    ]
    assert (without.status, "past_key_values" in without.note) == (
        "not applicable",
        True,
    )


def test_invariance_check_reports_failing_checkpoint():
    def forward(m, x):
        is_odd = m.layer.precision.active_bits.has_quantized_roles and is_recomputed(x)
        return m.layer(x.sin() if is_odd else x)

    found = answers_of(
        FunctionModule(forward, layer=nn.Linear(4, 4)),
        TOKENS[:, 0].clone().requires_grad_(),
    )
    assert found[questions.CHECKPOINTING].status == "broken"
    assert "the quantised model raises: torch.utils.checkpoint" in str(
        found[questions.CHECKPOINTING]
    )


def test_invariance_check_varies_input_layout():
    wrong = answers_of(
        nn.Sequential(Rounds((1,), is_strided), nn.Linear(4, 4)), TOKENS[:, 0]
    )[questions.MEMORY_LAYOUT]
    assert (wrong.status, wrong.layer) == ("broken", "0")
    right = answers_of(nn.Sequential(Rounds(), nn.Linear(4, 4)), TOKENS[:, 0])[
        questions.MEMORY_LAYOUT
    ]
    assert right.status == "holds"


@pytest.mark.parametrize("by_strides", [True, False])
def test_invariance_check_varies_operand_layout(by_strides):
    def handler(mode, function, a, b):
        is_rounded = mode.running.stack[
            -1
        ].interception.precision.active_bits.has_quantized_roles
        return function(
            a, b.round() if is_rounded and by_strides and b.stride(-1) != 1 else b
        )

    model = FunctionModule(
        lambda m, x: m.mix(m.layer(x)),
        layer=nn.Linear(4, 4),
        mix=FunctionModule(lambda m, h: torch.mm(h, h.sin().T)),
    )
    with patch.dict(OP_HANDLERS, {torch.mm: handler}):
        found = answers_of(model, TOKENS[0])[questions.MEMORY_LAYOUT]
    assert (found.status, found.layer) == (
        ("broken", "mix") if by_strides else ("holds", None)
    )


# --- what is not applicable, and no false alarms ----------------------------------------------------------------------


def test_invariance_check_requires_float32_invariance():
    """Skip invariances that the float32 model does not have."""
    mixed = model_around(Rounds((0, 1)), lambda x: x - x.mean((0, 1), keepdim=True))
    results = answers_of(mixed, TOKENS)
    tested_names = {
        name for name, answer in results.items() if answer.status != "not applicable"
    }
    assert tested_names == {questions.CHECKPOINTING, questions.MEMORY_LAYOUT}


def test_invariance_check_ignores_outputs_equal_by_chance():
    """Ignore outputs behind a ReLU that are zero before and after a change that reaches them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU())
    mixing = FunctionModule(lambda m, x: m.net(x + x.mean(0)), net=model)
    for size in (
        4,
        64,
    ):  # also where a dimension of the output is as long as one of the input
        assert (
            answers_of(copy.deepcopy(mixing), torch.randn(size, 4))[
                questions.OTHER_SAMPLES
            ].status
            == "not applicable"
        )


def test_invariance_check_tries_several_input_values():
    """Detect samples that interact only if one is larger than any of the inputs."""
    model = FunctionModule(
        lambda m, x: m.odd(x) + torch.relu(x.abs().max() - 1.01), odd=Rounds((0,))
    )
    assert (
        answers_of(model, TOKENS[:, 0].clamp(-1, 1))[questions.OTHER_SAMPLES].status
        == "not applicable"
    )


def test_invariance_check_ignores_constant_outputs():
    def forward(m, x):
        is_quantized = m.odd.layer.precision.active_bits.has_quantized_roles
        return torch.cat(
            [m.layer(x), torch.relu(m.odd(x) - (0 if is_quantized else 1e3))], 1
        )

    model = FunctionModule(forward, odd=Rounds((0,)), layer=nn.Linear(4, 4))
    assert answers_of(model, TOKENS[:, 0])[questions.OTHER_SAMPLES].status == "holds"


def test_invariance_check_skips_single_samples():
    """Skip a single sample, and batch sizes that the model refuses."""
    assert (
        answers_of(nn.Linear(4, 4), TOKENS[:1, 0])[questions.OTHER_SAMPLES].status
        == "not applicable"
    )

    def forward(m, x):
        if len(x) != 3:
            raise ValueError("three samples, please")
        return m.layer(x)

    found = answers_of(FunctionModule(forward, layer=nn.Linear(4, 4)), TOKENS[:, 0])[
        questions.ONE_SAMPLE
    ]
    assert (found.status, "three samples, please" in found.note) == (
        "not applicable",
        True,
    )


@pytest.mark.parametrize("kind", ["attribute", "generator"])
def test_invariance_check_stops_for_random_models(kind):
    generator = torch.Generator().manual_seed(0)

    def forward(m, x):
        m.passes += 1
        noise = torch.randn(4, generator=generator) if kind == "generator" else m.passes
        return m.layer(x) + noise

    found = answers_of(
        FunctionModule(forward, layer=nn.Linear(4, 4), passes=0), TOKENS[:, 0]
    )
    assert {name: answer.status for name, answer in found.items()} == {
        questions.REPEATED_PASS: "not applicable"
    }


def test_invariance_check_detects_unrepeatable_quantised_passes():
    calls = []
    model = model_around(Rounds((1,), lambda x: calls.append(1) or len(calls) % 2))
    found = answers_of(model, TOKENS[:, 0])
    assert {name: (a.status, a.layer) for name, a in found.items()} == {
        questions.REPEATED_PASS: ("broken", "parts.odd")
    }


def test_invariance_check_restores_random_state_and_buffers():
    def forward(m, x):
        m.seen += 1
        return m.layer(x) + torch.rand(4) + random.random() + np.random.rand() + m.seen  # noqa: NPY002

    model = FunctionModule(forward, layer=nn.Linear(4, 4))
    model.register_buffer("seen", torch.zeros(1))
    assert answers_of(model, TOKENS[:, 0])[questions.OTHER_SAMPLES].status == "holds"
    assert model.seen == 0


def test_invariance_check_skips_training_only_models():
    def forward(m, x):
        assert m.training, "only for training"
        return m.layer(x)

    found = check(
        quantize_(FunctionModule(forward, layer=nn.Linear(4, 4))), (TOKENS[:, 0],)
    )
    assert [(a.status, "only for training" in a.note) for a in found.invariances] == [
        ("not applicable", True)
    ]
    assert found.ok


# --- which inputs are changed -----------------------------------------------------------------------------------------


def test_invariance_check_tries_every_input_axis():
    """Try the second input, time before the batch, and tensors inside dictionaries."""
    model = FunctionModule(
        lambda m, a, given: m.odd(given["x"][0].cumsum(0)) + a, odd=Rounds((0,))
    )
    found = answers_of(model, torch.zeros(4), {"x": [TOKENS.transpose(0, 1)]})
    assert found[questions.OTHER_SAMPLES].status == "holds"
    assert (
        found[questions.LATER_POSITIONS].status,
        found[questions.LATER_POSITIONS].note,
    ) == (
        "broken",
        "input 2, dimension 0",
    )


def test_invariance_check_accepts_packed_sequences():
    def forward(m, packed):
        return m.odd(pad_packed_sequence(packed)[0]).sum(0)

    packed = pack_sequence([TOKENS[0, :4], TOKENS[1, :3]])
    found = answers_of(FunctionModule(forward, odd=Rounds((0,))), packed)
    assert found[questions.CHECKPOINTING].status == "holds"
    rows = answers_of(
        FunctionModule(lambda m, packed: m.odd(packed.data), odd=Rounds((0,))), packed
    )
    assert rows[questions.OTHER_SAMPLES].status == "broken"


def test_new_contents_are_valid_and_changed():
    ids = torch.tensor([[3, 5, 9, 11], [5, 3, 9, 9]])
    for content in new_contents(ids):
        assert set(content.flatten().tolist()) <= {3, 5, 9, 11}
        assert (content != ids).all()
    assert (
        new_contents(torch.tensor([3, 3]))
        == new_contents(torch.tensor([True, False]))
        == []
    )
    coins = (TOKENS > 0).float()
    assert [c.unique().tolist() for c in new_contents(coins)] == [[0.0, 1.0]]
    shuffled, drawn = new_contents(TOKENS)
    assert torch.equal(shuffled.flatten().sort()[0], TOKENS.flatten().sort()[0])
    assert drawn.std() > 2 * TOKENS.std()


def test_find_masks_requires_two_values():
    additive = torch.where(MASK == 0, -torch.inf, 0.0)
    for mask in (MASK, MASK.bool(), additive, MASK.T, MASK[:, None, None]):
        assert list(find_masks([TOKENS, mask])) == [1]
    for other in (MASK[:, :5], torch.ones(3, 6), MASK * 2 + MASK.roll(1, 0)):
        assert list(find_masks([TOKENS, other])) == []
    assert list(find_masks([MASK])) == []  # fair coins are data


# --- running ranges, and the state of the caller ----------------------------------------------------------------------


@pytest.mark.parametrize("start", ["corrected", "zero"])
def test_invariance_check_fills_empty_ranges(start):
    model = quantize_(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        QuantConfig(running_start=start),
    )
    x = torch.randn(5, 4)
    found = check(model, (x,))
    assert found.filled == ("0", "1")
    assert found.ok, str(found)
    assert "2 layers had no running ranges yet" in str(found)
    assert all(
        float(running[2]) == 0
        for m in model
        for running in m.precision.ranges().values()
    )
    with precision(model, 8):
        for _ in range(3):
            model(x)
    found = check(model, (x,))
    assert (found.filled, found.ok, "running ranges" in str(found)) == ((), True, False)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_invariance_check_leaves_model_unchanged(training, fails):
    torch.manual_seed(0)
    parts = {
        "norm": nn.BatchNorm1d(4),
        "drop": nn.Dropout(),
        "odd": Rounds((0,)),
        "rnn": nn.LSTM(4, 4),
    }

    def forward(m, x):
        if fails and len(x) == 1:
            raise KeyError("one sample")
        y = m.odd(m.drop(m.norm(x)))
        return y, m.rnn(y[None])

    model = quantize_(FunctionModule(forward, **parts))
    scheduler = PrecisionScheduler(model, StaticSchedule(5, 8), eval_bits=6)
    x = torch.randn(3, 4, requires_grad=True)
    model(torch.randn(3, 4))[0].sum().backward()
    model.train(training)
    model.norm.eval()
    model(x)  # layers notice their mode when they run
    layers = [m.precision for m in model.modules() if hasattr(m, "precision")]

    def state():
        tensors = [
            *model.parameters(),
            *(p.grad for p in model.parameters() if p.grad is not None),
            *model.buffers(),
            x,
        ]
        tensors += [
            t for p in layers for t in (*p.ranges().values(), p.noise_key, p.num_steps)
        ]
        modes = [m.training for m in model.modules()] + [
            (p.training, p.calibrated, p.is_fixed, p.zeros_unchecked) for p in layers
        ]
        active = [
            (p.active_levels, p.execution, p.grids, p.owning_scheduler, p.quantizers)
            for p in layers
        ]
        hooks = [
            (len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()
        ]
        return copy.deepcopy(tensors), (
            modes,
            active,
            hooks,
            random.getstate(),
            scheduler.get_last_bits(),
        )

    before, others = state()
    numbers = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    found = {answer.name: answer.status for answer in check(model, (x,)).invariances}
    assert found[questions.OTHER_SAMPLES] == "broken"
    assert found[questions.ONE_SAMPLE] == ("not applicable" if fails else "broken")
    after, others_now = state()
    assert identical(after, before)
    assert others_now == others
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert np.array_equal(np.random.get_state()[1], numbers[1])  # noqa: NPY002
    assert x.grad is None


def test_invariance_check_uses_existing_ladder_level():
    ladder = (
        FormatLadder.minifloats()
        if hasattr(FormatLadder, "minifloats")
        else FormatLadder({6: "e3m2", 8: "e4m3"})
    )
    for odd in (True, False):
        model = quantize_(
            model_around(Rounds((0,) if odd else ())), QuantConfig(ladder=ladder)
        )
        found = check(model, (TOKENS[:, 0],))
        assert found.ok is not odd
        assert {
            m.precision.grids.to_dict() != {}
            for m in model.modules()
            if hasattr(m, "precision")
        } == {True}


# --- the printout -----------------------------------------------------------------------------------------------------


def test_check_fails_with_broken_invariance():
    model = quantize_(model_around(Rounds((0,))))
    found = check(model, (TOKENS[:, 0],))
    assert (found.ok, [answer.name for answer in found.broken]) == (
        False,
        [questions.OTHER_SAMPLES, questions.ONE_SAMPLE],
    )
    lines = str(found).splitlines()
    assert any(
        line.startswith("another sample changed")
        and line.endswith("first in parts.odd (input 1, dimension 0)")
        for line in lines
    )
    assert (
        sum(
            "not applicable: later positions changed; a prefix alone" in line
            for line in lines
        )
        == 1
    )
    without = check(model, (TOKENS[:, 0],), invariances=False)
    assert (without.ok, without.invariances, without.operations) == (
        True,
        (),
        found.operations,
    )
    assert "another sample" not in str(without)


def test_invariances_page_matches_printed_output():
    page = (Path(__file__).parents[2] / "docs/invariances.md").read_text("utf-8")
    names = {"__name__": "__main__"}
    for code, shown in re.findall(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.S
    ):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert re.sub(r"by [\d.]+", "", printed.getvalue()) == re.sub(
            r"by [\d.]+", "", shown
        )
        assert shown.count("BROKEN") > 0


def test_invariances_page_lists_every_question():
    page = (Path(__file__).parents[2] / "docs/invariances.md").read_text("utf-8")
    asked = {
        answer.name
        for answer in check(quantize_(nn.Linear(4, 4)), (TOKENS[:, 0],)).invariances
    }
    assert (
        set(re.findall(r"^\| ([^|]+?) \|", page, re.M)) - {"question", "---"} == asked
    )
    assert len(asked) == 9


def test_invariance_text_names_layer_and_change():
    assert str(Invariance("a", "holds")) == "holds"
    assert str(Invariance("a", "broken", 0.25, "", "at 1")) == (
        "BROKEN: moves by 0.25 of the largest output, first in (model) (at 1)"
    )


def test_exact_sums_are_independent_of_rows():
    torch.manual_seed(0)
    layer, x = nn.Linear(301, 257), torch.randn(67, 301)
    with torch.no_grad():
        plain = [torch.cat([layer(row) for row in x.split(n)]) for n in (1, 67)]
        with ExactSums():
            exact = [torch.cat([layer(row) for row in x.split(n)]) for n in (1, 67)]
    assert torch.equal(*exact)
    assert exact[0].dtype == torch.float32
    assert not torch.equal(*plain)
    assert torch.allclose(exact[0], plain[0], atol=1e-5)


@pytest.mark.skipif(
    not hasattr(torch, "_grouped_mm"), reason="this torch multiplies no groups"
)
def test_exact_sums_match_grouped_matmul():
    """Match the grouped matmul of mixtures of experts, whose groups depend on all tokens."""
    torch.manual_seed(0)
    x, experts = torch.randn(9, 96), torch.randn(3, 96, 8)
    ends = torch.tensor([2, 2, 9], dtype=torch.int32)
    with torch.no_grad(), ExactSums():
        found = torch._grouped_mm(x, experts, offs=ends)
        assert torch.equal(
            found[4:5],
            torch._grouped_mm(x[4:5], experts, offs=ends.clamp(0, 1) * (ends > 2)),
        )
    wanted = torch.cat([x[:2] @ experts[0], x[2:] @ experts[2]])
    assert (found.dtype, torch.allclose(found, wanted, atol=1e-4)) == (
        torch.float32,
        True,
    )
