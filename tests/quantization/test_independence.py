"""Independence of positions: other tokens, samples, nodes and layouts change no output."""

import math

import pytest
import torch
from helpers import FunctionModule
from torch import nn
from torch.nn import functional as F

import cpt_core as cpt

TOKENS, FEATURES, CUT, VISIBLE = 12, 6, 7, 9


def module(function, *weight):
    """Return a module that runs a function of itself, with ``w`` and ``mixing``."""
    return FunctionModule(
        function,
        w=nn.Parameter(torch.randn(weight or (1, 1)) * 0.4),
        mixing=nn.Buffer(torch.randn(20, 20)),
    )


def converted(function):
    torch.manual_seed(0)
    return cpt.quantize_(nn.Sequential(module(function)))[0]


def causal_mask(x):
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def masked_softmax(scores, x):
    return scores.masked_fill(~causal_mask(x), -math.inf).softmax(-1)


def positive(x):
    return F.elu(x) + 1


def decay(x):
    places = torch.arange(x.shape[1])
    return (0.9 ** (places[:, None] - places[None])).tril()


def lower_part(matrix, x):
    return matrix[: x.shape[1], : x.shape[1]].tril()


def heads(m, x):
    parts = [masked_softmax(h @ h.mT, x) @ h for h in x.split(3, -1)]
    return torch.cat(parts, -1)


def values_first(m, x):
    """Multiply transposed values by transposed probabilities, as image models do."""
    keys = x.mT
    return torch.bmm(keys, masked_softmax(torch.bmm(x, keys), x).mT).mT


def chunk_state(m, x):
    """Compute a chunk of linear attention from a state and the chunk."""
    q, k = positive(x), positive(x)
    state = torch.arange(FEATURES).expand(len(x), FEATURES, FEATURES) / 9 - 0.3
    return q @ state + (q @ k.mT * causal_mask(x)) @ x


def heads_of_convolutions(m, x):
    """Attend with convolution outputs, features first, as SqueezeBERT does."""
    keys = F.conv1d(x.mT, m.w).view(len(x), 2, 3, -1)
    scores = keys.permute(0, 1, 3, 2) @ keys
    return (masked_softmax(scores, x) @ x[:, None]).mean(1)


def two_attentions(m, x):
    """Compute differential attention with as many features as tokens of the prefix."""
    wide = F.pad(x, (0, CUT - FEATURES), value=0.5)
    first = masked_softmax(wide @ wide.mT, x)
    return (first - 0.5 * masked_softmax((0.7 * wide) @ wide.mT, x)) @ x


def einsum_attention(m, x, equation="bqd,bkd->bqk", keys=None):
    scores = torch.einsum(equation, x, x if keys is None else keys)
    return torch.einsum("bqk,bkd->bqd", masked_softmax(scores, x), x)


def multi_head_attention(m, x):
    mask = ~causal_mask(x)
    return m.layer(x, x, x, attn_mask=mask, need_weights=False)[0]


def causal_picture(m, x):
    picture = F.pad(x.mT[..., None], (0, 0, 2, 0))
    return F.conv2d(picture, m.w)[..., 0].mT


def added_scores(m, x):
    nothing = torch.full_like(x[:, :1, :1], math.nan)  # which ``beta`` leaves out
    scores = torch.baddbmm(nothing, x, x.mT, beta=0)
    return torch.bmm(masked_softmax(scores, x), x)


SQUARE = (FEATURES, FEATURES)
CAUSAL = {  # name -> function, shape of its weight
    "two attentions": (two_attentions,),
    "heads of convolutions": (heads_of_convolutions, *SQUARE, 1),
    "matmul": (lambda m, x: masked_softmax(x @ x.mT, x) @ x,),
    "keys copied": (lambda m, x: masked_softmax(x @ x.mT.contiguous(), x) @ x,),
    "values transposed in memory": (
        lambda m, x: masked_softmax(x @ x.mT, x) @ x.mT.contiguous().mT,
    ),
    "sdpa": (lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True),),
    "sdpa with mask": (
        lambda m, x: F.scaled_dot_product_attention(x, x, x, causal_mask(x)),
    ),
    "baddbmm": (added_scores,),
    "einsum": (einsum_attention,),
    "einsum of keys by feature": (
        lambda m, x: einsum_attention(m, x, "bqd,bdk->bqk", x.mT),
    ),
    "head after head": (heads,),
    "values first": (values_first,),
    "linear attention": (
        lambda m, x: ((positive(x) @ positive(x).mT) * causal_mask(x)) @ x,
    ),
    "retention": (lambda m, x: (x @ x.mT * decay(x)) @ x,),
    "sigmoid attention": (lambda m, x: (torch.sigmoid(x @ x.mT) * causal_mask(x)) @ x,),
    "state of a chunk": (chunk_state,),
    "einsum of four": (
        lambda m, x: torch.einsum(
            "bln,bsn,ls,bsp->blp", x, x, causal_mask(x).float(), x
        ),
    ),
    "mixing weight": (lambda m, x: lower_part(m.w, x) @ x, 20, 20),
    "mixing buffer": (lambda m, x: lower_part(m.mixing, x) @ x,),
    "weight times tokens": (lambda m, x: (m.w @ x.mT).mT, *SQUARE),
    "weight times tokens by einsum": (
        lambda m, x: torch.einsum("od,btd->bto", m.w, x),
        *SQUARE,
    ),
    "weight times tokens by bmm": (
        lambda m, x: torch.bmm(m.w.expand(len(x), *SQUARE), x.mT).mT,
        *SQUARE,
    ),
    "convolution": (lambda m, x: F.conv1d(F.pad(x.mT, (2, 0)), m.w).mT, *SQUARE, 3),
    "depthwise convolution": (
        lambda m, x: F.conv1d(F.pad(x.mT, (2, 0)), m.w, groups=6).mT,
        6,
        1,
        3,
    ),
    "causal picture": (causal_picture, *SQUARE, 3, 1),
}
LAYERS = {
    "lstm": lambda: nn.LSTM(FEATURES, FEATURES, batch_first=True),
    "gru": lambda: nn.GRU(FEATURES, FEATURES, batch_first=True),
    "multi-head attention": lambda: FunctionModule(
        multi_head_attention, layer=nn.MultiheadAttention(FEATURES, 2, batch_first=True)
    ),
}


def output(model, x, bits=4):
    with torch.no_grad(), cpt.precision(model, bits):
        y = model(x)
    return y[0] if isinstance(y, tuple) else y


@pytest.fixture(params=[*CAUSAL, *LAYERS])
def causal(request):
    """Return a causal model with running ranges, in evaluation mode."""
    torch.manual_seed(0)
    name = request.param
    inner = LAYERS[name]() if name in LAYERS else module(*CAUSAL[name])
    model = cpt.quantize_(nn.Sequential(inner))
    with cpt.precision(model, 4):
        for _ in range(3):
            model(torch.randn(3, TOKENS, FEATURES))
    return model.eval()


def assert_close(actual, expected):
    tolerance = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def test_causal_model_ignores_later_tokens(causal):
    x = torch.randn(2, TOKENS, FEATURES)
    changed = torch.cat([x[:, :CUT], 3 * torch.randn(2, TOKENS - CUT, FEATURES)], 1)
    for bits in ("float", 4, 8):
        y, z = output(causal, x, bits), output(causal, changed, bits)
        assert torch.equal(y[:, :CUT], z[:, :CUT])
        assert not torch.equal(y, z)


def test_causal_model_prefix_equals_full_sequence(causal):
    x = torch.randn(2, TOKENS, FEATURES)
    for bits in (4, 8):
        y = output(causal, x, bits)
        assert_close(output(causal, x[:, :CUT], bits), y[:, :CUT])


def test_causal_model_sample_equals_its_batch(causal):
    if isinstance(causal[0], nn.LSTM):
        pytest.skip("float32 noise decides where a hidden state between steps goes")
    x = torch.randn(4, TOKENS, FEATURES) * torch.logspace(-1, 1, 4)[:, None, None]
    y = output(causal, x)
    for i in range(4):
        assert_close(output(causal, x[i : i + 1])[0], y[i])


def test_causal_model_is_independent_of_layout(causal):
    x = torch.randn(2, TOKENS, FEATURES)
    y = output(causal, x)
    tokens_last = x.mT.contiguous().mT
    batch_last = x.transpose(0, 1).contiguous().transpose(0, 1)
    expanded = x.expand(3, -1, -1, -1)[1]
    for copied in (tokens_last, batch_last, expanded):
        assert_close(output(causal, copied), y)


# --- masked tokens ------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_attention_with_cache_equals_full_pass(bits):
    q, k, v = torch.randn(3, 1, 2, TOKENS, 16)
    mask = causal_mask(q[0])
    model = converted(None)
    with cpt.precision(model, bits), torch.no_grad():
        model.function = lambda m, x: F.scaled_dot_product_attention(*x, attn_mask=mask)
        expected = model((q, k, v))
        model.function = lambda m, x: F.scaled_dot_product_attention(*x)
        for t in range(TOKENS):
            cached = k[..., : t + 1, :], v[..., : t + 1, :]
            y = model((q[..., t : t + 1, :], *cached))[..., 0, :]
            torch.testing.assert_close(y, expected[..., t, :], rtol=0, atol=1e-5)


def test_attention_ignores_left_padding():
    x = torch.randn(1, TOKENS, FEATURES)
    padded = torch.cat([9 * torch.randn(1, 4, FEATURES), x], 1)
    mask = causal_mask(padded)
    mask[:, :4] = False
    model = converted(lambda m, x: masked_softmax(x @ x.mT, x) @ x)
    with cpt.precision(model, 4), torch.no_grad():
        expected = model(x)
        model.function = lambda m, x: (
            (x @ x.mT).masked_fill(~mask, -1e9).softmax(-1) @ x
        )
        torch.testing.assert_close(model(padded)[:, 4:], expected, rtol=0, atol=1e-5)


def attend(scores, values):
    """Attend to the tokens that are visible."""
    hidden = torch.arange(TOKENS) >= VISIBLE
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ values


CROSS = {  # queries x times keys y of another number of tokens
    "keys copied": lambda x, y: attend(x @ y.mT.contiguous(), y),
    "keys scaled and copied": lambda x, y: attend(
        x @ (y.transpose(1, 2) * 0.5).clone(), y
    ),
    "keys joined": lambda x, y: attend(
        x @ torch.cat([y.mT[..., :5], y.mT[..., 5:]], -1), y
    ),
    "keys permuted": lambda x, y: attend(
        torch.einsum("bqd,bdk->bqk", x, y.permute(0, 2, 1).contiguous()), y
    ),
    "keys of heads": lambda x, y: attend(
        torch.matmul(x[:, None], y[:, None].transpose(2, 3))[:, 0], y
    ),
}


@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize("queries", [1, 5, FEATURES])
def test_attention_ignores_masked_tokens(name, queries):
    """Cover as many queries as features, where shapes are ambiguous."""
    model = converted(lambda m, inputs: CROSS[name](*inputs))
    x, y = torch.randn(2, queries, FEATURES), torch.randn(2, TOKENS, FEATURES)
    changed = y.clone()
    changed[:, VISIBLE:] *= 9
    with cpt.precision(model, 4), torch.no_grad():
        assert torch.equal(model((x, y)), model((x, changed)))


def pooled(m, inputs):
    x, keep = inputs
    return (keep / keep.sum(-1, keepdim=True))[:, None] @ x


def state(m, inputs):
    x, keep = inputs
    keys = (positive(x) * keep[..., None]).mT
    return positive(x)[:, :1] @ (keys @ x)


def state_by_einsum(m, inputs):
    x, keep = inputs
    return torch.einsum("btd,bte->bde", positive(x), x * keep[..., None])


@pytest.mark.parametrize("function", [pooled, state, state_by_einsum])
def test_token_sum_ignores_masked_tokens(function):
    model = converted(function)
    x = torch.randn(2, TOKENS, FEATURES)
    keep = (torch.arange(TOKENS) < VISIBLE).float().expand(2, -1)
    changed = x.clone()
    changed[:, VISIBLE:] *= 9
    for bits in ("float", 4):
        with cpt.precision(model, bits), torch.no_grad():
            assert torch.equal(model((x, keep)), model((changed, keep)))


@pytest.mark.parametrize(
    "matrix", ["adjacency", "laplacian", "laplacian in columns", "block"]
)
def test_adjacency_matmul_ignores_nodes_without_edge(matrix):
    """Cover a dense Laplacian, as in ChebNet, and a rectangular block of nodes."""
    torch.manual_seed(0)
    adjacency = (torch.rand(9, 9) < 0.4).float().fill_diagonal_(1)
    laplacian = torch.diag(adjacency.sum(1)) - adjacency
    matrix = {
        "adjacency": adjacency,
        "laplacian": laplacian,
        "laplacian in columns": laplacian.mT.contiguous().mT,
        "block": adjacency[:4],
    }[matrix]
    model = converted(lambda m, inputs: inputs[0] @ inputs[1])
    h = torch.randn(9, 5)
    changed = h.clone()
    changed[4] = 5 * torch.randn(5)
    with cpt.precision(model, 4), torch.no_grad():
        is_moved = (model((matrix, h)) != model((matrix, changed))).any(1)
    assert torch.equal(is_moved, matrix[:, 4] != 0)
