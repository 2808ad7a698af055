"""``summary`` of models with inputs, and its agreement with ``check``, ``count_bitops`` and the ledger."""

import warnings

import pytest
import torch
from helpers import FunctionModule
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.convert import weights_of
from cpt_core.quantization.fallback_reasons import FallbackReason

X = torch.randn(3, 5, 8)


def attention():
    """Return a model with a layer, and matmuls in a child and in the model."""

    def forward(m, x):
        h = m.head(x)
        return m.attend(h, h) @ h

    attend = FunctionModule(lambda m, q, k: getattr(torch, "matmul")(q, k.mT))  # noqa: B009
    return FunctionModule(forward, head=nn.Linear(8, 6), attend=attend)


def recurrent():
    return FunctionModule(
        lambda m, x: m.head(m.norm(m.rnn(x)[0])),
        rnn=nn.LSTM(8, 6),
        norm=nn.LayerNorm(6),
        head=nn.Linear(6, 4),
    )


def convolutional():
    return FunctionModule(
        lambda m, x: m.head(m.norm(m.conv(x)).mean(-1)),
        conv=nn.Conv1d(5, 4, 3),
        norm=nn.BatchNorm1d(4),
        head=nn.Linear(4, 3),
    )


def graph():
    edges = cpt.Graph.from_edges(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), 3)
    return FunctionModule(
        lambda m, x: m.head(m.conv(edges, x[:, 0])),
        conv=cpt.GraphConv(8, 6),
        head=nn.Linear(6, 4),
    )


@pytest.mark.parametrize("make", [attention, recurrent, convolutional, graph])
def test_summary_report(make, golden):
    """Show shares of MACs and reasons; normalisation, gates and aggregation have none."""
    model = cpt.quantize_(make(), cpt.QuantConfig(float32=("head",)))
    texts = [str(cpt.summary(model, inputs)) for inputs in (None, (X,))]
    texts.append(f"unconverted:\n{cpt.summary(make(), (X,))}\n")
    golden(f"summary/{make.__name__}.txt", "\n\n".join(texts))


@pytest.mark.parametrize(
    ("make", "float32"),
    [
        (attention, ()),
        (attention, ("head",)),
        (attention, ("attend",)),
        (attention, ("attend", "head")),
        (recurrent, ("head",)),
        (convolutional, ("head",)),
        (graph, ("head",)),
    ],
)
def test_summary_agrees_with_counts(make, float32):
    """Count the float32 shares that check, count_bitops and the ledger count."""
    model = cpt.quantize_(make(), cpt.QuantConfig(float32=float32))
    checked = cpt.check(model, (X,), invariances=False)
    with cpt.BitOpsLedger(model) as ledger, cpt.precision(model, 4):
        model(X)
    total = sum(e.macs for e in checked.operations if not e.backward)
    shares = {e.layer: e.macs / total for e in checked.float32}
    assert set(shares) == set(float32)
    counted = cpt.count_bitops(model, (X,), cpt.StaticSchedule(4, 1))
    for found in (
        cpt.summary(model, (X,)).float32_shares,
        counted.float32,
        ledger.float32,
    ):
        assert {k.removesuffix(" (matmuls)"): v for k, v in found.items()} == shares
    assert checked.quantized_share == pytest.approx(1 - sum(shares.values()), abs=1e-12)


def single_channel():
    """Return a model with a convolution over one channel in its own forward."""

    def forward(m, x):
        return m.head(torch.nn.functional.conv1d(x[:, :1], m.weight))

    weight = nn.Parameter(torch.randn(4, 1, 3))
    return FunctionModule(forward, weight=weight, head=nn.Linear(6, 3))


def test_summary_names_layers_without_quantized_matmul():
    """A sum over one element runs in float32, so that a module with no other matmul is not called quantised."""
    model = cpt.quantize_(single_channel())
    report = cpt.summary(model, (X,))
    reason = FallbackReason.NO_QUANTIZED_MATMUL.describe()
    assert [(row.name, row.reason) for row in report.float32] == [("", reason)]
    assert [row.name for row in report.quantized] == ["head"]
    checked = cpt.check(model, (X,), invariances=False)
    assert {e.layer for e in checked.float32} == {""}


# --- operations that are not intercepted --------------------------------------------

NOT_INTERCEPTED = {  # function of an input (4, 8) and a weight (32, 8)
    "cdist": torch.cdist,
    "convolution": lambda x, w: torch.convolution(
        x[..., None], w[..., None], None, [1], [0], [1], False, [0], 1
    ),
    "conv_tbc": lambda x, w: torch.conv_tbc(
        x[None], w.view(2, 8, 16), torch.zeros(16), 1
    ),
    "addbmm": lambda x, w: torch.addbmm(torch.zeros(1), x[None], w.mT[None]),
    "addmm_": lambda x, w: torch.zeros(4, 32).addmm_(x, w.mT),
    "sparse": lambda x, w: torch.sparse.mm(w.to_sparse(), x.mT).mT,
    "addr": lambda x, w: torch.addr(torch.zeros(4, 256), x[:, 0], w.flatten()),
}


def not_intercepted(name, is_child=True):
    """Return a model of a linear layer and a function that is not intercepted."""
    weight = nn.Parameter(torch.randn(32, 8))
    linear, function = nn.Linear(8, 8), NOT_INTERCEPTED[name]
    if is_child:
        inner = FunctionModule(lambda m, x: function(x, m.w), w=weight)
        return cpt.quantize_(nn.Sequential(linear, inner))
    model = FunctionModule(
        lambda m, x: function(m.linear(x), m.w), w=weight, linear=linear
    )
    return cpt.quantize_(model)


@pytest.mark.parametrize("is_child", [True, False])
@pytest.mark.parametrize("name", NOT_INTERCEPTED)
def test_reports_count_operations_not_intercepted(name, is_child):
    """Compare the share with ``check``, and do not say that all is quantised."""
    model, x = not_intercepted(name, is_child), torch.randn(4, 8)
    schedule = cpt.StaticSchedule(3, 9)
    plan, report = cpt.count_bitops(model, (x,), schedule), cpt.summary(model, (x,))
    layer = "1" if is_child else ""
    assert plan.not_intercepted == report.not_intercepted
    executed = cpt.check(model, (x,), invariances=False)
    share = sum(e.macs for e in executed.float32) / executed.forward.total
    # torch's counter knows neither addr nor addbmm
    if share:
        assert plan.not_intercepted.shares == {layer: share}
        assert f"{share:.1%} of all forward MACs are not intercepted" in str(plan)
    else:
        assert plan.not_intercepted.silent_layers == (layer,)
    for text in (str(plan), str(report)):
        assert "all matmuls and convolutions" not in text
        assert "all intercepted matmuls and convolutions run quantised" in text


@pytest.mark.parametrize("name", NOT_INTERCEPTED)
@pytest.mark.parametrize("is_child", [True, False])
def test_silent_layer_warning_after_first_pass(name, is_child):
    """Warn once, by the scheduler or by a precision block."""
    model, x = not_intercepted(name, is_child), torch.randn(4, 8)
    scheduler = cpt.PrecisionScheduler(model, cpt.StaticSchedule(3, 9))
    model(x)
    layer = "1" if is_child else r"\(model\)"
    text = f"80% of the weights .* intercepted in {layer}"
    with pytest.warns(cpt.QuantizationWarning, match=text):
        scheduler.step()
    for _ in range(3):
        model(x)
        scheduler.step()

    model = not_intercepted(name, is_child)
    with pytest.warns(cpt.QuantizationWarning, match=text):
        with cpt.precision(model, 4):
            model(x)


def shared_weights():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    return nn.Sequential(first, second)


def shared_with_unused_layer():
    used, unused = nn.Linear(8, 8), nn.Linear(8, 8)
    unused.weight = used.weight
    return FunctionModule(lambda m, x: m.used(x), used=used, unused=unused)


def weight_of_child():
    """Return a model that multiplies by the weight of a child, which does not run."""
    child = nn.Linear(8, 8)
    return FunctionModule(lambda m, x: x @ m.child.weight, child=child)


def lists_of_weights():
    weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])
    return FunctionModule(lambda m, x: x @ m.ws[0] @ m.ws[1], ws=weights)


def embedding():
    head = nn.Linear(8, 3)
    return FunctionModule(
        lambda m, x: m.head(m.table(x[:, 0].long())),
        head=head,
        table=nn.Embedding(50, 8),
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "make",
    [
        shared_weights,
        shared_with_unused_layer,
        weight_of_child,
        lists_of_weights,
        embedding,
    ],
)
def test_silent_layers_spare_layers_with_operations(make):
    model, x = cpt.quantize_(make()), torch.rand(4, 8)
    scheduler = cpt.PrecisionScheduler(model, cpt.StaticSchedule(3, 9))
    for _ in range(2):
        model(x)
        scheduler.step()
    assert not cpt.summary(model, (x,)).not_intercepted
    assert "all matmuls and convolutions run quantised" in str(
        cpt.count_bitops(model, (x,), cpt.StaticSchedule(3, 9))
    )


class Distances(nn.Linear):
    def forward(self, x):
        return torch.cdist(x, self.weight)


def own(*shape):
    return FunctionModule(lambda m, x: x, w=nn.Parameter(torch.ones(shape)))


WEIGHTS = {  # module -> shapes of its weights
    "linear": (lambda: nn.Linear(64, 1), [(1, 64)]),
    "linear, one input": (lambda: nn.Linear(1, 64), [(64, 1)]),
    "conv2d": (lambda: nn.Conv2d(3, 1, 5), [(1, 3, 5, 5)]),
    "conv1d": (lambda: nn.Conv1d(3, 1, 5), [(1, 3, 5)]),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(1, 3, 5), [(1, 3, 5)]),
    "bilinear": (lambda: nn.Bilinear(3, 4, 1), [(1, 3, 4)]),
    "rnn": (lambda: nn.RNN(3, 1), [(1, 3), (1, 1)]),
    "scale": (lambda: own(1, 64), []),
    "layer scale": (lambda: own(64, 1, 1), [(64, 1, 1)]),
    "token": (lambda: own(1, 1, 64), []),
    "position": (lambda: own(1, 9, 64), []),
    "position of pixels": (lambda: own(1, 64, 7, 7), []),
    "response": (lambda: own(1, 1, 1, 64), []),
    "embedding": (lambda: nn.Embedding(1, 64), []),
    "norm": (lambda: nn.LayerNorm(64), []),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_lists_layers_with_one_output(name):
    make, shapes = WEIGHTS[name]
    assert [tuple(weight.shape) for weight in weights_of(make())] == shapes


@pytest.mark.parametrize(("width", "share"), [(2, 33), (4, 20), (16, None)])
def test_silent_layer_with_one_output_warns_by_share(width, share):
    """Give no warning of weights that are a tenth of the model's or less."""
    distances = Distances(8, 1, bias=False)
    model = cpt.quantize_(nn.Sequential(nn.Linear(width, 8), distances))
    with warnings.catch_warnings(record=True, action="always") as caught:
        with cpt.precision(model, 4):
            model(torch.randn(4, width))
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (share is not None)
    for text in messages:
        assert text.startswith(f"{share}% of the weights were not quantised")
    report = cpt.summary(model, (torch.randn(4, width),))
    assert report.not_intercepted.shares.keys() == {"1"}


@pytest.mark.parametrize("outputs", [1, 2])
def test_summary_lists_unused_layer_of_any_size(outputs):
    head, unused = nn.Linear(8, 8), nn.Linear(8, outputs)
    model = FunctionModule(lambda m, x: m.head(x), head=head, unused=unused)
    report = cpt.summary(cpt.quantize_(model), (X,))
    assert report.not_intercepted.silent_layers == ("unused",)


@pytest.mark.filterwarnings("error")
def test_layer_that_does_not_run_gives_no_warning():
    """List an unused layer, which may be used in training alone."""
    model = FunctionModule(
        lambda m, x: m.used(x), used=nn.Linear(8, 8), unused=nn.Linear(8, 8)
    )
    cpt.quantize_(model)
    with cpt.precision(model, 4):
        model(torch.randn(4, 8))
    report = cpt.summary(model, (torch.randn(4, 8),))
    assert report.not_intercepted.silent_layers == ("unused",)
    assert "no matmul or convolution was intercepted in unused" in str(report)
