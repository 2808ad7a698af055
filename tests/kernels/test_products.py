"""Float32 matmuls in the library that suits the processor, equal in every backend, with gradients."""

import pytest
import torch
from helpers import OnRing
from torch import nn

import cpt_core as cpt
from cpt_core.graphs.layers import GraphConv
from cpt_extras import cpu_info as processors
from cpt_extras.kernels import gemm_backend, operators

ONEDNN = pytest.mark.skipif(
    not gemm_backend.has_onednn_matmul(), reason="torch has no product of oneDNN here"
)
CPU_INFO = "vendor_id\t: {}\nmodel name\t: A\nflags\t\t: fpu {}\n\nvendor_id\t: Other\nflags\t: avx2 avx512f\n"


@pytest.fixture
def onednn(monkeypatch):
    """Compute all matmuls in oneDNN, however small."""
    cpt.backend()
    monkeypatch.setattr(gemm_backend, "MIN_ONEDNN_MACS", 1)
    before = gemm_backend.active
    gemm_backend.use("onednn")
    yield
    monkeypatch.undo()
    gemm_backend.use(before)


@pytest.fixture
def processor(tmp_path, monkeypatch):
    """Simulate a processor by its vendor and features."""

    def pretend(maker, *flags):
        (tmp_path / "cpuinfo").write_text(CPU_INFO.format(maker, " ".join(flags)))
        monkeypatch.setattr(processors, "CPU_INFO", tmp_path / "cpuinfo")
        return processors.processor()

    return pretend


@pytest.mark.parametrize(
    ("maker", "flags", "widest", "library"),
    [
        ("GenuineIntel", ("avx2", "avx512f"), "AVX512", "torch"),
        ("GenuineIntel", ("avx2",), "AVX2", "torch"),
        ("AuthenticAMD", ("avx2",), "AVX2", "torch"),
        ("AuthenticAMD", ("avx2", "avx512f"), "AVX512", "onednn"),
        ("AuthenticAMD", ("sse2",), "", "torch"),
        ("HygonGenuine", ("avx2", "avx512f"), "AVX512", "torch"),
    ],
)
def test_gemm_backend_follows_processor(
    processor, monkeypatch, maker, flags, widest, library
):
    assert processor(maker, *flags) == ((maker, widest) if widest else ())
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(gemm_backend, "has_onednn_matmul", lambda: True)
    assert gemm_backend.choose_library()[0] == library
    monkeypatch.setattr(gemm_backend, "has_onednn_matmul", lambda: False)
    found, why = gemm_backend.choose_library()
    assert found == "torch"
    assert ("this torch has no product of oneDNN" in why) == (library == "onednn")
    monkeypatch.setattr(gemm_backend, "has_onednn_matmul", lambda: True)
    monkeypatch.setattr(
        torch.backends.mkl, "is_available", lambda: False
    )  # the table compares with MKL
    assert gemm_backend.choose_library()[0] == "torch"


def test_gemm_backend_defaults_to_torch(tmp_path, monkeypatch):
    """Use torch on an unknown processor."""
    monkeypatch.setattr(processors, "CPU_INFO", tmp_path / "none")
    assert processors.processor() == ()
    assert gemm_backend.choose_library()[0] == "torch"


def test_gemm_backend_can_be_forced(processor, monkeypatch):
    processor("AuthenticAMD", "avx512f")
    assert gemm_backend.choose_library("torch") == ("torch", "CPT_PRODUCTS=torch")
    monkeypatch.setattr(gemm_backend, "has_onednn_matmul", lambda: True)
    assert gemm_backend.choose_library("onednn") == ("onednn", "CPT_PRODUCTS=onednn")
    monkeypatch.setattr(gemm_backend, "has_onednn_matmul", lambda: False)
    with pytest.raises(
        RuntimeError,
        match="CPT_PRODUCTS=onednn asks for oneDNN's products, but this torch has none",
    ):
        gemm_backend.choose_library("onednn")


@pytest.mark.parametrize("library", ["torch", pytest.param("onednn", marks=ONEDNN)])
def test_gemm_backend_is_reported_and_used(undecided, monkeypatch, library):
    monkeypatch.setenv("CPT_PRODUCTS", library)
    assert f"products on a CPU: {library} (CPT_PRODUCTS={library})" in str(
        cpt.backend()
    )
    calls, _ = uses_onednn(
        lambda: operators.linear(torch.ones(128, 128), torch.ones(128, 128))
    )
    assert calls == (library == "onednn")


# --- what oneDNN computes -----------------------------------------------------------------------------------------


def uses_onednn(run):
    """How many products of oneDNN's run, and what comes out."""
    with torch.autograd.profiler.profile() as profile:
        found = run()
    return sum(
        event.name == "mkldnn::_linear_pointwise" for event in profile.function_events
    ), found


@ONEDNN
@pytest.mark.parametrize(
    "trained", [(True, False), (False, True), (True, True)], ids=str
)
def test_linear_saves_tensors_like_torch(onednn, trained):
    x, w = (
        torch.randn(n, 4, requires_grad=t) for n, t in zip((5, 3), trained, strict=True)
    )

    def kept(function):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel()), lambda _: None
        ):
            function(x * 1 if trained[0] else x, w * 1 if trained[1] else w, None)
        return sorted(sizes)

    assert (
        uses_onednn(lambda: kept(operators.linear))[1]
        == kept(torch.nn.functional.linear)
        != []
    )


@ONEDNN
@pytest.mark.parametrize("shape", [(5, 4), (4,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_gradients_match_torch(onednn, shape, bias):
    torch.manual_seed(0)
    x, w = torch.randn(shape, dtype=torch.double), torch.randn(3, 4, dtype=torch.double)
    b = torch.randn(3, dtype=torch.double) if bias else None

    def run(function, dtype):
        given = [t.to(dtype).requires_grad_() for t in (x, w, b) if t is not None]
        y = function(*given)
        first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
        return [
            y,
            *first,
            *torch.autograd.grad(sum(g.sin().sum() for g in first), given),
        ]

    calls, found = uses_onednn(lambda: run(operators.linear, torch.float32))
    assert (
        calls == 9
    )  # the product, its two backward ones, and two of each of these three
    assert all(t.is_contiguous() for t in found[: len(found) // 2 + 1])
    exact = run(nn.functional.linear, torch.double)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4, check_dtype=False)
    assert (
        uses_onednn(lambda: run(operators.linear, torch.double))[0] == 0
    )  # of float32 alone


@pytest.mark.parametrize(("rows", "library"), [(127, False), (128, True)])
def test_gemm_backend_leaves_small_matmuls_to_torch(onednn, monkeypatch, rows, library):
    monkeypatch.setattr(gemm_backend, "MIN_ONEDNN_MACS", 1 << 21)
    assert (
        gemm_backend.uses_onednn(torch.ones(rows, 128), torch.ones(128, 128)) == library
    )
    assert not gemm_backend.uses_onednn(
        torch.ones(rows, 128, device="meta"), torch.ones(128, 128, device="meta")
    )


LAYERS = {
    "linear": lambda: (nn.Linear(12, 8), torch.randn(6, 12)),
    "LSTM": lambda: (nn.LSTM(12, 8, bidirectional=True), torch.randn(5, 3, 12)),
    "graph": lambda: (OnRing(GraphConv(12, 8)), torch.randn(6, 12)),
}


def step(name, compiled=False):
    """Return the output and the gradients of one quantised layer."""
    torch.manual_seed(0)
    layer, x = LAYERS[name]()
    x.requires_grad_()
    layer = cpt.quantize_(layer)
    with cpt.precision(layer, 5, q_grad=32):
        y = (torch.compile(layer) if compiled else layer)(x)
        y = y[0] if isinstance(y, tuple) else y
        y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@ONEDNN
@pytest.mark.parametrize("name", LAYERS)
def test_gemm_backends_agree_for_layers(onednn, name):
    calls, found = uses_onednn(lambda: step(name))
    assert calls >= 3
    gemm_backend.use("torch")
    calls, expected = uses_onednn(lambda: step(name))
    assert calls == 0
    for a, b in zip(found, expected, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@ONEDNN
def test_compiled_matmuls_match_eager(onednn):
    torch.compiler.reset()
    try:
        *found, of_bias = step("linear", compiled=True)
        *expected, eager = step("linear")
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        torch.testing.assert_close(
            of_bias, eager
        )  # a sum, which Inductor orders otherwise
    finally:
        torch.compiler.reset()


@ONEDNN
@pytest.mark.parametrize("steps", ["one step", "equal", "packed", "none"])
@pytest.mark.parametrize(
    ("width", "options"),
    [
        (5, {}),
        (16, {"bias": False}),
        (37, {"reverse": True}),
        (16, {"levels": None, "grad_levels": None, "key": None}),
    ],
)
def test_lstm_is_bit_identical_with_onednn(onednn, cpp_kernels, steps, width, options):
    from kernels.test_lstm_kernels import STEPS, check, run

    ways = torch.ops.cpt, torch.ops.cpt_reference
    (calls, found), (plain, expected) = (
        uses_onednn(lambda o=ops: run(o, STEPS[steps], width, options)) for ops in ways
    )
    assert calls == plain
    assert (calls > 0) == (steps != "none")
    check(found, expected)


@ONEDNN
@pytest.mark.parametrize(("width", "library"), [(15, False), (16, True)])
def test_lstm_leaves_small_matmuls_to_torch(
    onednn, cpp_kernels, monkeypatch, width, library
):
    from kernels.test_lstm_kernels import STEPS, run

    monkeypatch.setattr(
        gemm_backend, "MIN_ONEDNN_MACS", 3 * 16 * 4 * 16
    )  # every product of a step with 3 sequences is as large
    gemm_backend.use("onednn")
    for ops in (torch.ops.cpt, torch.ops.cpt_reference):
        calls, _ = uses_onednn(lambda o=ops: run(o, STEPS["one step"], width, {}))
        assert calls == (3 if library else 0)


@ONEDNN
@pytest.mark.parametrize("name", ["linear", "LSTM"])
def test_check_counts_onednn_matmuls_like_torch(onednn, name):
    model, counted = cpt.quantize_(LAYERS[name]()[0]), []
    for library in ("onednn", "torch"):
        gemm_backend.use(library)
        found = cpt.check(model, (torch.randn(6, 12),))
        counted.append(
            (
                found.ok,
                sorted(
                    (p.layer, p.backward, p.macs, p.quantized) for p in found.operations
                ),
            )
        )
    assert counted[0] == counted[1]
