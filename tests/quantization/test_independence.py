"""Independence of positions: unrelated tokens, samples, nodes and memory layouts change no output."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cpt_core as cpt

TOKENS, FEATURES, CUT = 12, 6, 7


def causal_mask(x):
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def masked_softmax(scores, x):
    return scores.masked_fill(~causal_mask(x), -math.inf).softmax(-1)


class Function(nn.Module):
    """Module with a weight and a given function as its forward."""

    def __init__(self, function, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape or (1, 1)) * 0.4)
        self.register_buffer("mixing", torch.randn(20, 20))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def positive(x):
    return F.elu(x) + 1


def decay(x):
    places = torch.arange(x.shape[1])
    return (0.9 ** (places[:, None] - places[None])).tril()


def mixing(x, matrix):
    return matrix[: x.shape[1], : x.shape[1]].tril()


def heads(m, x):
    return torch.cat([masked_softmax(h @ h.mT, x) @ h for h in x.split(3, -1)], -1)


def values_first(m, x):
    """Multiply transposed values by transposed probabilities, as image models do."""
    keys = x.mT
    return torch.bmm(keys, masked_softmax(torch.bmm(x, keys), x).mT).mT


def chunk_state(m, x):
    """Compute a chunk of linear attention from the state of earlier tokens and the chunk."""
    q, k, v = positive(x), positive(x), x
    before = torch.zeros(len(x), FEATURES, FEATURES) + torch.arange(FEATURES) / 9 - 0.3
    return q @ before + (q @ k.mT * causal_mask(x)) @ v


def heads_of_convolutions(m, x):
    """Attend with convolution outputs, features first, as SqueezeBERT does."""
    features = F.conv1d(x.mT, m.weight)
    keys = features.view(len(x), 2, 3, -1)
    scores = keys.permute(0, 1, 3, 2) @ keys
    return (
        scores.masked_fill(~causal_mask(x), -math.inf).softmax(-1) @ x[:, None]
    ).mean(1)


def two_attentions(m, x):
    """Compute differential attention with as many features as prefix tokens, so that shapes are ambiguous."""
    wide = F.pad(x, (0, CUT - FEATURES), value=0.5)
    first = masked_softmax(wide @ wide.mT, x)
    return (first - 0.5 * masked_softmax((0.7 * wide) @ wide.mT, x)) @ x


CAUSAL = {
    "two attentions": Function(two_attentions),
    "heads of convolutions": Function(heads_of_convolutions, 6, 6, 1),
    "eager": Function(lambda m, x: masked_softmax(x @ x.mT, x) @ x),
    "keys copied": Function(lambda m, x: masked_softmax(x @ x.mT.contiguous(), x) @ x),
    "values turned in memory": Function(
        lambda m, x: masked_softmax(x @ x.mT, x) @ x.mT.contiguous().mT
    ),
    "sdpa": Function(
        lambda m, x: F.scaled_dot_product_attention(x, x, x, is_causal=True)
    ),
    "baddbmm": Function(
        lambda m, x: torch.bmm(
            masked_softmax(torch.baddbmm(x[:, :1, :1], x, x.mT, beta=0), x), x
        )
    ),
    "einsum": Function(
        lambda m, x: torch.einsum(
            "bqk,bkd->bqd", masked_softmax(torch.einsum("bqd,bkd->bqk", x, x), x), x
        )
    ),
    "einsum of keys by feature": Function(
        lambda m, x: torch.einsum(
            "bqk,bkd->bqd", masked_softmax(torch.einsum("bqd,bdk->bqk", x, x.mT), x), x
        )
    ),
    "head after head": Function(heads),
    "values first": Function(values_first),
    "linear attention": Function(
        lambda m, x: ((positive(x) @ positive(x).mT) * causal_mask(x)) @ x
    ),
    "retention": Function(lambda m, x: (x @ x.mT * decay(x)) @ x),
    "sigmoid attention": Function(
        lambda m, x: (torch.sigmoid(x @ x.mT) * causal_mask(x)) @ x
    ),
    "state of a chunk": Function(chunk_state),
    "einsum of four": Function(
        lambda m, x: torch.einsum(
            "bln,bsn,ls,bsp->blp", x, x, causal_mask(x).float(), x
        )
    ),
    "mixing weight": Function(lambda m, x: mixing(x, m.weight) @ x, 20, 20),
    "mixing buffer": Function(lambda m, x: mixing(x, m.mixing) @ x),
    "weight times tokens": Function(
        lambda m, x: (m.weight @ x.mT).mT, FEATURES, FEATURES
    ),
    "weight times tokens by einsum": Function(
        lambda m, x: torch.einsum("od,btd->bto", m.weight, x), 6, 6
    ),
    "weight times tokens by bmm": Function(
        lambda m, x: torch.bmm(m.weight.expand(len(x), 6, 6), x.mT).mT, 6, 6
    ),
    "convolution": Function(
        lambda m, x: F.conv1d(F.pad(x.mT, (2, 0)), m.weight).mT, 6, 6, 3
    ),
    "depthwise convolution": Function(
        lambda m, x: F.conv1d(F.pad(x.mT, (2, 0)), m.weight, groups=6).mT, 6, 1, 3
    ),
    "causal picture": Function(
        lambda m, x: (
            F.conv2d(F.pad(x.mT[..., None], (0, 0, 2, 0)), m.weight)[..., 0].mT
        ),
        6,
        6,
        3,
        1,
    ),
    "lstm": nn.LSTM(FEATURES, FEATURES, batch_first=True),
    "gru": nn.GRU(FEATURES, FEATURES, batch_first=True),
}


def trained(module, bits=4):
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(module))
    with cpt.precision(model, bits):
        for _ in range(3):
            model(torch.randn(3, TOKENS, FEATURES))
    return model.eval()


def output(model, x, bits=4):
    with torch.no_grad(), cpt.precision(model, bits):
        y = model(x)
    return y[0] if isinstance(y, tuple) else y


@pytest.fixture(params=CAUSAL)
def causal(request):
    model = trained(CAUSAL[request.param])
    yield model
    cpt.restore_(model)


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
        torch.testing.assert_close(
            output(causal, x[:, :CUT], bits),
            y[:, :CUT],
            rtol=0,
            atol=1e-5 * float(y.abs().max()),
        )


def test_causal_model_sample_equals_its_batch(causal):
    if isinstance(causal[0], nn.LSTM):
        pytest.skip(
            "a hidden state at the edge of two steps is rounded by the noise of float32"
        )
    x = torch.randn(4, TOKENS, FEATURES) * torch.logspace(-1, 1, 4)[:, None, None]
    y = output(causal, x)
    for i in range(4):
        alone = output(causal, x[i : i + 1])[0]
        torch.testing.assert_close(
            alone, y[i], rtol=0, atol=1e-5 * float(y[i].abs().max())
        )


def test_causal_model_is_independent_of_memory_layout(causal):
    x = torch.randn(2, TOKENS, FEATURES)
    y = output(causal, x)
    for other in (
        x.mT.contiguous().mT,
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.expand(3, -1, -1, -1)[1],
    ):
        torch.testing.assert_close(
            output(causal, other), y, rtol=0, atol=1e-5 * float(y.abs().max())
        )


def test_adjacency_matmul_ignores_nodes_without_edge():
    """Cover a dense Laplacian, as in ChebNet, and an adjacency passed with the features."""
    torch.manual_seed(0)
    adjacency = (torch.rand(9, 9) < 0.3).float().fill_diagonal_(1)
    laplacian = torch.diag(adjacency.sum(1)) - adjacency

    class Graph(nn.Module):
        def forward(self, matrix, h):
            return matrix @ h

    model = cpt.quantize_(nn.Sequential(Graph()))[0]
    h = torch.randn(9, 5)
    for matrix in (adjacency, laplacian, laplacian.mT.contiguous().mT):
        changed = h.clone()
        changed[4] = 5 * torch.randn(5)
        with cpt.precision(model, 4), torch.no_grad():
            moved = (model(matrix, h) != model(matrix, changed)).any(1)
        assert torch.equal(moved, matrix[:, 4] != 0)


@pytest.mark.parametrize("bits", [4, 8])
def test_attention_with_cache_equals_full_pass(bits):
    model = cpt.quantize_(nn.Sequential(Function(lambda m, x: x)))[0]
    q, k, v = torch.randn(3, 1, 2, TOKENS, 16)
    full = causal_mask(q[0])
    with cpt.precision(model, bits), torch.no_grad():
        model.function = lambda m, x: F.scaled_dot_product_attention(*x, attn_mask=full)
        whole = model((q, k, v))
        model.function = lambda m, x: F.scaled_dot_product_attention(*x)
        for t in range(TOKENS):
            step = model((q[..., t : t + 1, :], k[..., : t + 1, :], v[..., : t + 1, :]))
            torch.testing.assert_close(
                step[..., 0, :], whole[..., t, :], rtol=0, atol=1e-5
            )


def test_attention_ignores_left_padding():
    model = cpt.quantize_(
        nn.Sequential(Function(lambda m, x: masked_softmax(x @ x.mT, x) @ x))
    )[0]
    x = torch.randn(1, TOKENS, FEATURES)
    padded = torch.cat([9 * torch.randn(1, 4, FEATURES), x], 1)
    mask = causal_mask(padded)
    mask[:, :4] = False

    def attend(m, x):
        return (x @ x.mT).masked_fill(~mask, -1e9).softmax(-1) @ x

    with cpt.precision(model, 4), torch.no_grad():
        y = model(x)
        model.function = attend
        torch.testing.assert_close(model(padded)[:, 4:], y, rtol=0, atol=1e-5)


def attended(scores):
    """Return probabilities of tokens, the last three of which are masked."""
    return scores.masked_fill(torch.arange(TOKENS) >= 9, -math.inf).softmax(-1)


CROSS = {  # queries times keys of another number of tokens
    "keys copied": lambda x, y: attended(x @ y.mT.contiguous()) @ y,
    "keys scaled and copied": lambda x, y: (
        attended(x @ (y.transpose(1, 2) * 0.5).clone()) @ y
    ),
    "keys joined": lambda x, y: (
        attended(x @ torch.cat([y.mT[..., :5], y.mT[..., 5:]], -1)) @ y
    ),
    "keys permuted": lambda x, y: (
        attended(torch.einsum("bqd,bdk->bqk", x, y.permute(0, 2, 1).contiguous())) @ y
    ),
    "keys of heads": lambda x, y: (
        attended(torch.matmul(x[:, None], y[:, None].transpose(2, 3)))[:, 0] @ y
    ),
}


@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize("queries", [1, 5, FEATURES])
def test_attention_ignores_masked_tokens(name, queries):
    """Mask the last three tokens; also with as many queries as features."""
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(Function(lambda m, x: x)))[0]
    x, y = torch.randn(2, queries, FEATURES), torch.randn(2, TOKENS, FEATURES)
    changed = y.clone()
    changed[:, 9:] *= 9

    model.function = lambda m, inputs: CROSS[name](*inputs)
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
    values = x * keep[..., None]
    return torch.einsum("btd,bte->bde", positive(x), values)


@pytest.mark.parametrize("function", [pooled, state, state_by_einsum])
def test_masked_token_sum_ignores_masked_tokens(function):
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(Function(function)))[0]
    x, keep = (
        torch.randn(2, TOKENS, FEATURES),
        (torch.arange(TOKENS) < 9).float().expand(2, -1),
    )
    changed = x.clone()
    changed[:, 9:] *= 9
    for bits in ("float", 4):
        with cpt.precision(model, bits), torch.no_grad():
            assert torch.equal(model((x, keep)), model((changed, keep)))


def test_adjacency_matmul_ignores_nodes_outside_block():
    """Use a rectangular adjacency, as for a batch of nodes and their neighbours."""
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(Function(lambda m, x: x[0] @ x[1])))[0]
    adjacency, h = (torch.rand(4, 9) < 0.4).float(), torch.randn(9, 5)
    changed = h.clone()
    changed[3] = 5 * torch.randn(5)
    with cpt.precision(model, 4), torch.no_grad():
        moved = (model((adjacency, h)) != model((adjacency, changed))).any(1)
    assert torch.equal(moved, adjacency[:, 3] != 0)
