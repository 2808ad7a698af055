"""Detection of invariances that hold in float32 and break under quantisation.

Where an invariance is broken here, a layer of the tests rounds on too wide a range while it is quantised. The library's
own quantisers break none.
"""

import contextlib
import copy
import io
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers import FunctionModule
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.op_interception import OP_HANDLERS
from cpt_core.quantization.scheduler import precision
from cpt_extras.diagnostics.check import check
from cpt_extras.diagnostics.exact_sums import ExactSums
from cpt_extras.diagnostics.input_changes import find_masks
from cpt_extras.diagnostics.invariances import (
    CACHED_DECODING,
    CHECKPOINTING,
    LATER_POSITIONS,
    MASKED_POSITIONS,
    MEMORY_LAYOUT,
    ON_AFFINE_GRIDS,
    ONE_SAMPLE,
    OTHER_SAMPLES,
    OUT_OF_REACH,
    PREFIX_ALONE,
    REPEATED_PASS,
    Invariance,
)
from cpt_extras.formats.ladder import FormatLadder
from cpt_extras.formats.recipes import recipes

PAGE = Path(__file__).parents[2] / "docs/invariances.md"
TOKENS = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))
SAMPLES = TOKENS[:, 0]
IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 1, 2, 3, 3, 0]])
MASK = torch.tensor([[1.0] * 6, [1.0] * 4 + [0.0] * 2, [1.0] * 3 + [0.0] * 3])
PACKED = pack_sequence([TOKENS[0, :4], TOKENS[1, :3]])


def is_recomputed(x):
    return torch._C._current_graph_task_id() != -1


def is_strided(x):
    return not x.is_contiguous()


class Rounds(nn.Module):
    """Linear layer that, while quantised, rounds its input on one range over ``dims``."""

    def __init__(self, dims=(), when=lambda x: True):
        super().__init__()
        self.dims, self.when, self.layer = dims, when, nn.Linear(4, 4)

    @property
    def is_quantized(self):
        return self.layer.precision.active_bits.has_quantized_roles

    def forward(self, x):
        if self.dims and self.is_quantized and self.when(x):
            step = x.detach().abs().amax(self.dims, keepdim=True) / 3
            x = x + ((x.detach() / step).round() * step - x.detach())
        return self.layer(x)


def invariances_of(model, *inputs):
    """Return the results of ``check`` by the name of the invariance."""
    torch.manual_seed(0)
    model = quantize_(copy.deepcopy(model))
    return {result.name: result for result in check(model, inputs).invariances}


def around(odd, mix=lambda x: x):
    """Return a model of three layers, which mixes tokens before the second one."""
    return FunctionModule(
        lambda m, x: m.last(m.odd(mix(m.first(x)))),
        first=nn.Linear(4, 4),
        odd=odd,
        last=nn.Linear(4, 4),
    )


def accumulating(odd):
    return around(odd, lambda x: x.cumsum(1))


def convolving(odd):
    """Return a model that adds the values of neighbouring nodes on a line."""

    def add_neighbours(x):
        left = nn.functional.pad(x, (0, 0, 1, 0))[:-1]
        return x + left + nn.functional.pad(x, (0, 0, 0, 1))[1:]

    return around(odd, add_neighbours)


def masked_mean(x, mask):
    mask = mask.reshape(3, 6).float()
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def pooling(odd):
    return FunctionModule(lambda m, x, mask: masked_mean(m.odd(x), mask), odd=odd)


def adding_mean(odd):
    def forward(m, x, mask):
        return m.odd(x) + masked_mean(m.odd(x), mask)[:, None]

    return FunctionModule(forward, odd=odd)


def inverted_mask(odd):
    return FunctionModule(
        lambda m, x, ignored: m.odd(x).masked_fill(ignored[..., None], 0).sum(1),
        odd=odd,
    )


class Decoder(nn.Module):
    """Sum of all tokens read so far, with a cache like the decoders of transformers."""

    def __init__(self, odd):
        super().__init__()
        self.embedding, self.odd = nn.Embedding(7, 4), odd

    def forward(self, ids, attention_mask=None, past_key_values=None, use_cache=False):
        h = self.embedding(ids).cumsum(1)
        if past_key_values is not None:
            h = h + past_key_values
        self.odd.when = lambda x: past_key_values is not None
        cache = h[:, -1:] if use_cache else None
        return {"logits": self.odd(h), "past_key_values": cache}


class Break(NamedTuple):
    """A model whose layer ``odd`` breaks one invariance if it rounds as given."""

    invariance: str
    model: Callable[[nn.Module], nn.Module]
    rounding: tuple[Any, ...]
    inputs: tuple[Any, ...]


BREAKS = {
    "other samples": Break(OTHER_SAMPLES, around, ((0,),), (SAMPLES,)),
    "one sample": Break(ONE_SAMPLE, around, ((0,),), (SAMPLES,)),
    "later positions": Break(LATER_POSITIONS, accumulating, ((1,),), (TOKENS,)),
    "prefix": Break(PREFIX_ALONE, accumulating, ((1,),), (TOKENS,)),
    "out of reach": Break(OUT_OF_REACH, convolving, ((0,),), (TOKENS[0],)),
    "checkpoint": Break(CHECKPOINTING, around, ((1,), is_recomputed), (SAMPLES,)),
    "input layout": Break(
        MEMORY_LAYOUT,
        lambda odd: FunctionModule(lambda m, x: m.odd(x), odd=odd),
        ((1,), is_strided),
        (SAMPLES,),
    ),
    "cache": Break(CACHED_DECODING, Decoder, ((0, 1, 2),), (IDS,)),
    "cache and mask": Break(
        CACHED_DECODING, Decoder, ((0, 1, 2),), (IDS, torch.ones(2, 6))
    ),
    "mask of two outputs": Break(
        MASKED_POSITIONS, adding_mean, ((1,),), (TOKENS, MASK)
    ),
    "inverted mask": Break(
        MASKED_POSITIONS, inverted_mask, ((1,),), (TOKENS, MASK == 0)
    ),
    "packed rows": Break(
        OTHER_SAMPLES,
        lambda odd: FunctionModule(lambda m, packed: m.odd(packed.data), odd=odd),
        ((0,),),
        (PACKED,),
    ),
}
for mask in (MASK, MASK.bool(), MASK.long(), MASK[:, None, None]):
    BREAKS[f"{mask.dtype} mask of {mask.dim()} dimensions"] = Break(
        MASKED_POSITIONS, pooling, ((1,),), (TOKENS, mask)
    )


@pytest.mark.parametrize("case", BREAKS)
def test_invariance_check_names_breaking_layer(case):
    name, model, rounding, inputs = BREAKS[case]
    right = invariances_of(model(Rounds()), *inputs)
    assert right[name] == Invariance(name, "holds")
    assert {result.status for result in right.values()} == {"holds", "not applicable"}
    wrong = invariances_of(model(Rounds(*rounding)), *inputs)[name]
    assert (wrong.status, wrong.layer) == ("broken", "odd")
    assert 1e-3 < wrong.moved < 2


@pytest.mark.parametrize("case", ["cache and mask", "packed rows"])
def test_invariance_check_takes_keyword_arguments(case):
    name, model, rounding, inputs = BREAKS[case]
    names = ("ids", "attention_mask") if model is Decoder else ("packed",)
    options = {"use_cache": False} if model is Decoder else {}
    converted = quantize_(model(Rounds(*rounding)))
    expected = check(converted, inputs).invariances
    assert next(r for r in expected if r.name == name).status == "broken"
    named = dict(zip(names, inputs, strict=True))
    assert check(converted, {**named, **options}).invariances == expected


@pytest.mark.parametrize("by_strides", [True, False])
def test_invariance_check_varies_operand_layout(by_strides):
    def handler(mode, function, a, b):
        bits = mode.running.stack[-1].interception.precision.active_bits
        if bits.has_quantized_roles and by_strides and b.stride(-1) != 1:
            b = b.round()
        return function(a, b)

    model = FunctionModule(
        lambda m, x: m.mix(m.layer(x)),
        layer=nn.Linear(4, 4),
        mix=FunctionModule(lambda m, h: torch.mm(h, h.sin().T)),
    )
    with patch.dict(OP_HANDLERS, {torch.mm: handler}):
        result = invariances_of(model, TOKENS[0])[MEMORY_LAYOUT]
    expected = ("broken", "mix") if by_strides else ("holds", None)
    assert (result.status, result.layer) == expected


# --- float32 models that have an invariance, or do not have it --------------------------------------------------------


def with_layer(forward, **parts):
    return FunctionModule(forward, layer=nn.Linear(4, 4), **parts)


def mixing_relu(m, x):
    """Return outputs that may be zero by chance before and after a change."""
    return torch.relu(m.wide(x + x.mean(0)))


def constant_in_float32(m, x):
    shift = 0 if m.odd.is_quantized else 1e3
    return torch.cat([m.layer(x), torch.relu(m.odd(x) - shift)], 1)


def three_samples_only(m, x):
    if len(x) != 3:
        raise ValueError("three samples, please")
    return m.layer(x)


def training_only(m, x):
    if not m.training:
        raise ValueError("only for training")
    return m.layer(x)


def other_pass_by_pass(m, x):
    m.passes += 1
    return m.layer(x) + m.passes


def noise_of_own_generator(m, x):
    if not hasattr(m, "generator"):
        m.generator = torch.Generator().manual_seed(0)
    return m.layer(x) + torch.randn(4, generator=m.generator)


def noise_of_global_generators(m, x):
    m.mean += 1
    noise = torch.rand(4) + random.random() + np.random.rand()  # noqa: NPY002
    return m.layer(x) + noise + m.mean


def random_path(m, x):
    for layer in m.layers:
        x = layer(x) if random.random() < 0.5 else x
    return m.layer(x)


def with_buffer(forward):
    model = with_layer(forward)
    model.register_buffer("mean", torch.zeros(1))
    return model


def recomputing_another(m, x):
    is_quantized = m.layer.precision.active_bits.has_quantized_roles
    return m.layer(x.sin() if is_quantized and is_recomputed(x) else x)


class Case(NamedTuple):
    invariance: str
    model: nn.Module
    inputs: tuple[Any, ...] = (SAMPLES,)
    text: str = "holds"


CASES = {
    "outputs are equal by chance": Case(
        OTHER_SAMPLES,
        FunctionModule(mixing_relu, wide=nn.Linear(4, 64)),
        (torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),),
        "not applicable",
    ),
    "output is as long as input": Case(
        OTHER_SAMPLES,
        FunctionModule(mixing_relu, wide=nn.Linear(4, 64)),
        (torch.randn(64, 4, generator=torch.Generator().manual_seed(0)),),
        "not applicable",
    ),
    "samples interact if one is large": Case(
        OTHER_SAMPLES,
        FunctionModule(
            lambda m, x: m.odd(x) + torch.relu(x.abs().max() - 1.01), odd=Rounds((0,))
        ),
        (SAMPLES.clamp(-1, 1),),
        "not applicable",
    ),
    "outputs never move": Case(
        OTHER_SAMPLES, with_layer(constant_in_float32, odd=Rounds((0,)))
    ),
    "single sample": Case(
        OTHER_SAMPLES, nn.Linear(4, 4), (SAMPLES[:1],), "not applicable"
    ),
    "batch size is fixed": Case(
        ONE_SAMPLE,
        with_layer(three_samples_only),
        text="not applicable (the model refuses such inputs: three samples, please)",
    ),
    "mask is ignored": Case(
        MASKED_POSITIONS,
        FunctionModule(lambda m, x, mask: m.odd(x).sum(1), odd=Rounds((1,))),
        (TOKENS, MASK),
        "not applicable",
    ),
    "no cache": Case(
        CACHED_DECODING,
        accumulating(Rounds()),
        (TOKENS,),
        "not applicable (forward takes no past_key_values and use_cache)",
    ),
    "prefix of a broken decoder": Case(
        PREFIX_ALONE, Decoder(Rounds((0, 1, 2))), (IDS,)
    ),
    "recomputation raises": Case(
        CHECKPOINTING,
        with_layer(recomputing_another),
        (SAMPLES.clone().requires_grad_(),),
        "BROKEN: the quantised model raises: torch.utils.checkpoint",
    ),
    "time before batch, in a dictionary": Case(
        LATER_POSITIONS,
        FunctionModule(
            lambda m, a, nested: m.odd(nested["x"][0].cumsum(0)) + a, odd=Rounds((0,))
        ),
        (torch.zeros(4), {"x": [TOKENS.transpose(0, 1)]}),
        "first in odd (input 2, dimension 0)",
    ),
    "packed sequence": Case(
        CHECKPOINTING,
        FunctionModule(
            lambda m, packed: m.odd(pad_packed_sequence(packed)[0]).sum(0),
            odd=Rounds((0,)),
        ),
        (PACKED,),
    ),
    "random path": Case(
        OTHER_SAMPLES,
        with_layer(random_path, layers=nn.ModuleList([nn.Linear(4, 4)] * 4)),
    ),
    "random numbers and buffers": Case(
        OTHER_SAMPLES, with_buffer(noise_of_global_generators)
    ),
    # models of which only the first invariance can be tested
    "training only": Case(
        REPEATED_PASS,
        with_layer(training_only),
        text="not applicable (the model cannot be evaluated: only for training)",
    ),
    "attribute changes": Case(
        REPEATED_PASS, with_layer(other_pass_by_pass, passes=0), text="not applicable"
    ),
    "generator of its own": Case(
        REPEATED_PASS, with_layer(noise_of_own_generator), text="not applicable"
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_invariance_check_result(case):
    name, model, inputs, text = CASES[case]
    results = invariances_of(model, *inputs)
    assert text in str(results[name])
    assert (len(results) == 1) == (name == REPEATED_PASS)


def test_invariance_check_detects_unrepeatable_quantised_passes():
    calls = []
    odd = Rounds((1,), lambda x: calls.append(1) or len(calls) % 2)
    (result,) = invariances_of(around(odd), SAMPLES).values()
    assert (result.name, result.status) == (REPEATED_PASS, "broken")
    assert result.layer == "odd"


def test_find_masks_requires_two_values():
    additive = torch.where(MASK == 0, -torch.inf, 0.0)
    for mask in (MASK, MASK.bool(), additive, MASK.T, MASK[:, None, None]):
        assert list(find_masks([TOKENS, mask])) == [1]
    for other in (MASK[:, :5], torch.ones(3, 6), MASK * 2 + MASK.roll(1, 0)):
        assert list(find_masks([TOKENS, other])) == []
    assert list(find_masks([MASK])) == []  # fair coins are data


# --- formats, running ranges, and the printout ------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["corrected", "zero"])
def test_invariance_check_fills_empty_ranges(start):
    config = QuantConfig(running_start=start)
    model = quantize_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config)
    x = torch.randn(5, 4)
    result = check(model, (x,))
    assert (result.ok, result.filled) == (True, ("0", "1"))
    assert "2 layers had no running ranges yet" in str(result)
    ranges = [running for m in model for running in m.precision.ranges().values()]
    assert all(float(running[2]) == 0 for running in ranges)
    with precision(model, 8):
        for _ in range(3):
            model(x)
    result = check(model, (x,))
    assert (result.ok, result.filled) == (True, ())
    assert "running ranges" not in str(result)


@pytest.mark.parametrize("dims", [(0,), ()])
def test_invariance_check_uses_existing_ladder_level(dims):
    config = QuantConfig(ladder=FormatLadder({6: "e3m2", 8: "e4m3"}))
    model = quantize_(around(Rounds(dims)), config)
    assert check(model, (SAMPLES,)).ok == (not dims)
    assert all(
        m.precision.grids.to_dict() for m in model.modules() if hasattr(m, "precision")
    )


BLOCKS_OF_4 = "mx(e2m1,4)"
UNFIT_LADDERS = {
    "blocks longer than features": FormatLadder({4: "mxfp4"}),
    "gradients at another level": {
        "activation": FormatLadder({4: BLOCKS_OF_4}),
        "weight": FormatLadder({4: BLOCKS_OF_4}),
        "gradient": FormatLadder({8: BLOCKS_OF_4}),
    },
}


@pytest.mark.parametrize("dims", [(0,), ()])
@pytest.mark.parametrize("ladder", UNFIT_LADDERS)
def test_invariance_check_notes_grids_of_unfit_ladder(ladder, dims):
    """No level fits all layers, so that the tests run on the paper's grids."""
    config = QuantConfig(ladder=UNFIT_LADDERS[ladder])
    result = check(quantize_(around(Rounds(dims)), config), (SAMPLES,))
    assert result.ok == (not dims)
    tested = [r for r in result.invariances if r.status != "not applicable"]
    assert all(ON_AFFINE_GRIDS in r.note for r in tested)
    assert f"holds ({ON_AFFINE_GRIDS})" in str(result)
    assert all("dimension" in r.note for r in result.broken if r.name == OTHER_SAMPLES)


def test_invariance_check_notes_no_fitting_ladder():
    config = QuantConfig(ladder=FormatLadder({4: BLOCKS_OF_4}))
    result = check(quantize_(around(Rounds()), config), (SAMPLES,))
    assert result.ok
    assert ON_AFFINE_GRIDS not in str(result)


def multiply_scores(m, x):
    return (m.query(x) @ m.key(x).mT).tril() @ x


def attend(m, x):
    q, k = m.query(x), m.key(x)
    return nn.functional.scaled_dot_product_attention(q, k, x, is_causal=True)


def causal_attention(forward):
    return FunctionModule(forward, query=nn.Linear(32, 32), key=nn.Linear(32, 32))


def long_tokens(length):
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("forward", [multiply_scores, attend])
@pytest.mark.parametrize(
    ("format", "length"),
    [("mxfp4", 32), ("mxfp8_e4m3", 32), ("mxint8", 64), ("mx(e2m1,32):partial=1", 40)],
)
def test_check_reports_blocks_over_tokens(format, length, forward):
    """Blocks of attention's values lie along the sum, so that they span tokens: docs/invariances.md names a remedy."""
    torch.manual_seed(0)
    config = QuantConfig(ladder={4: format})
    tokens = long_tokens(length)
    result = check(quantize_(causal_attention(forward), config), (tokens,))
    broken = {r.name: r.layer for r in result.broken}
    assert broken.pop(LATER_POSITIONS) == ""
    assert broken.keys() <= {PREFIX_ALONE}
    assert ("partial" in format) == (PREFIX_ALONE in {r.name for r in result.broken})
    paper = check(quantize_(causal_attention(forward)), (tokens,))
    assert paper.ok

    def is_linear(module, name):
        return isinstance(module, nn.Linear)

    linear_only = quantize_(causal_attention(forward), config, filter_fn=is_linear)
    assert check(linear_only, (tokens,)).ok


def test_check_of_recipe_keeps_attention_causal():
    torch.manual_seed(0)
    model = recipes["mxfp4"].quantize_(causal_attention(multiply_scores))
    result = check(model, (long_tokens(32),))
    assert result.ok
    assert result.quantized_share > 0
    later = [r for r in result.invariances if r.name == LATER_POSITIONS]
    assert later == [Invariance(LATER_POSITIONS, "holds")]


def test_check_fails_with_broken_invariance(golden):
    torch.manual_seed(0)
    model = quantize_(around(Rounds((0,))))
    result = check(model, (SAMPLES,))
    assert not result.ok
    assert [broken.name for broken in result.broken] == [OTHER_SAMPLES, ONE_SAMPLE]
    golden("check/invariances.txt", re.sub(r"by [\d.]+", "by N", f"{result}\n"))
    without = check(model, (SAMPLES,), invariances=False)
    assert (without.ok, without.invariances) == (True, ())
    assert without.operations == result.operations


@pytest.mark.slow
def test_invariances_page_matches_printed_output():
    page = PAGE.read_text("utf-8")
    names = {"__name__": "__main__"}
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.S)
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        numbers = re.compile(r"by [\d.]+")
        assert numbers.sub("", printed.getvalue()) == numbers.sub("", shown)
        assert "BROKEN" in shown


def test_invariances_page_lists_every_question():
    listed = set(re.findall(r"^\| ([^|]+?) \|", PAGE.read_text("utf-8"), re.M))
    assert listed - {"question", "---"} == set(invariances_of(nn.Linear(4, 4), SAMPLES))


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
        result = torch._grouped_mm(x, experts, offs=ends)
        one_row = torch._grouped_mm(x[4:5], experts, offs=ends.clamp(0, 1) * (ends > 2))
    assert torch.equal(result[4:5], one_row)
    expected = torch.cat([x[:2] @ experts[0], x[2:] @ experts[2]])
    assert result.dtype == torch.float32
    assert torch.allclose(result, expected, atol=1e-4)


def test_invariances_ignore_noise_of_ladders():
    forward = FormatLadder({4: "nvfp4"})
    noisy = FormatLadder({4: "nvfp4:rounding=stochastic"})
    ladders = {"activation": forward, "weight": forward, "gradient": noisy}
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))
    model = quantize_(layers, QuantConfig(ladder=ladders))
    with precision(model, 4, q_grad=4):
        found = check(model, (torch.randn(5, 10, 32),))
        assert model[0].precision.quantizers["grad"].rounding == "stochastic"
    assert "BROKEN" not in str(found)
