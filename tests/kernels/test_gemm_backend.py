"""Float32 matmuls in the library that suits the processor, equal in every backend, with gradients."""

import pytest
import torch
from helpers import OnRing
from kernels.test_lstm_kernels import STEPS, check, run
from torch import nn

import cpt_core as cpt
from cpt_core.graphs.layers import GraphConv
from cpt_extras import cpu_info
from cpt_extras.kernels import gemm_backend, operators

CPU_INFO = """\
vendor_id\t: {}
model name\t: A
flags\t\t: fpu {}

vendor_id\t: Other
flags\t: avx2 avx512f
"""
needs_onednn = pytest.mark.skipif(
    not gemm_backend.has_onednn_matmul(), reason="torch has no matmul of oneDNN here"
)


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
def use_processor(tmp_path, monkeypatch):
    """Return a function that simulates a processor, and what torch was built with."""

    def use(vendor, flags, *, has_onednn=True, has_mkl=True):
        (tmp_path / "cpuinfo").write_text(CPU_INFO.format(vendor, flags))
        monkeypatch.setattr(cpu_info, "CPU_INFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
        monkeypatch.setattr(gemm_backend, "has_onednn_matmul", lambda: has_onednn)

    return use


def count_onednn_matmuls(call):
    """Return how many matmuls of oneDNN run in a call, and its result."""
    with torch.autograd.profiler.profile() as profile:
        result = call()
    names = [event.name for event in profile.function_events]
    return names.count("mkldnn::_linear_pointwise"), result


@pytest.mark.parametrize(
    ("vendor", "flags", "instructions", "library"),
    [
        ("GenuineIntel", "avx2 avx512f", "AVX512", "torch"),
        ("GenuineIntel", "avx2", "AVX2", "torch"),
        ("AuthenticAMD", "avx2", "AVX2", "torch"),
        ("AuthenticAMD", "avx2 avx512f", "AVX512", "onednn"),
        ("AuthenticAMD", "sse2", "", "torch"),
        ("HygonGenuine", "avx2 avx512f", "AVX512", "torch"),
    ],
)
def test_gemm_backend_follows_processor(
    use_processor, vendor, flags, instructions, library
):
    use_processor(vendor, flags)
    expected = (vendor, instructions) if instructions else ()
    assert cpu_info.processor() == expected
    assert gemm_backend.choose_library()[0] == library
    use_processor(vendor, flags, has_onednn=False)
    chosen, reason = gemm_backend.choose_library()
    assert chosen == "torch"
    assert ("this torch has no product of oneDNN" in reason) == (library == "onednn")
    use_processor(vendor, flags, has_mkl=False)  # the table compares with MKL
    assert gemm_backend.choose_library()[0] == "torch"


def test_gemm_backend_defaults_to_torch(tmp_path, monkeypatch):
    """Use torch on an unknown processor."""
    monkeypatch.setattr(cpu_info, "CPU_INFO", tmp_path / "none")
    assert cpu_info.processor() == ()
    assert gemm_backend.choose_library()[0] == "torch"


def test_gemm_backend_can_be_forced(use_processor):
    use_processor("AuthenticAMD", "avx512f")
    for name in ("torch", "onednn"):
        assert gemm_backend.choose_library(name) == (name, f"CPT_PRODUCTS={name}")
    use_processor("AuthenticAMD", "avx512f", has_onednn=False)
    message = "CPT_PRODUCTS=onednn asks for oneDNN's products, but this torch has none"
    with pytest.raises(RuntimeError, match=message):
        gemm_backend.choose_library("onednn")


@pytest.mark.parametrize("name", ["torch", pytest.param("onednn", marks=needs_onednn)])
def test_gemm_backend_is_reported_and_used(undecided, monkeypatch, name):
    monkeypatch.setenv("CPT_PRODUCTS", name)
    report = f"products on a CPU: {name} (CPT_PRODUCTS={name})"
    assert report in str(cpt.backend())
    ones = torch.ones(128, 128)
    count, _ = count_onednn_matmuls(lambda: operators.linear(ones, ones))
    assert count == (name == "onednn")


@pytest.mark.parametrize(("rows", "is_large"), [(127, False), (128, True)])
def test_gemm_backend_leaves_small_matmuls_to_torch(
    onednn, monkeypatch, rows, is_large
):
    monkeypatch.setattr(gemm_backend, "MIN_ONEDNN_MACS", 1 << 21)
    x, weight = torch.ones(rows, 128), torch.ones(128, 128)
    assert gemm_backend.uses_onednn(x, weight) == is_large
    assert not gemm_backend.uses_onednn(x.to("meta"), weight.to("meta"))


# --- matmuls of oneDNN ----------------------------------------------------------------------------


@needs_onednn
@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)], ids=str)
def test_linear_saves_tensors_like_torch(onednn, needs):
    x, weight = torch.randn(5, 4), torch.randn(3, 4)
    operands = [t.requires_grad_(n) for t, n in zip((x, weight), needs, strict=True)]

    def saved_sizes(linear):
        sizes = []
        inner = [t * 1 if t.requires_grad else t for t in operands]
        hooks = lambda t: sizes.append(t.numel()), lambda _: None
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            linear(*inner, None)
        return sorted(sizes)

    count, sizes = count_onednn_matmuls(lambda: saved_sizes(operators.linear))
    assert count == 1
    assert sizes == saved_sizes(nn.functional.linear) != []


@needs_onednn
@pytest.mark.parametrize("shape", [(5, 4), (4,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_gradients_match_torch(onednn, shape, bias):
    torch.manual_seed(0)
    operands = [torch.randn(shape), torch.randn(3, 4), torch.randn(3)][: 2 + bias]

    def differentiate_twice(linear, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in operands]
        y = linear(*leaves)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        total = sum(g.sin().sum() for g in first)
        return [y, *first], torch.autograd.grad(total, leaves)

    count, (first, second) = count_onednn_matmuls(
        lambda: differentiate_twice(operators.linear, torch.float32)
    )
    assert count == 9  # one, its two gradients, and the two gradients of each
    assert all(t.is_contiguous() for t in first)
    exact = differentiate_twice(nn.functional.linear, torch.double)
    tolerance = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close((first, second), exact, **tolerance)
    in_float64 = lambda: differentiate_twice(operators.linear, torch.double)  # noqa: E731
    assert count_onednn_matmuls(in_float64)[0] == 0


LAYERS = {
    "linear": (lambda: nn.Linear(12, 8), (6, 12)),
    "LSTM": (lambda: nn.LSTM(12, 8, bidirectional=True), (5, 3, 12)),
    "graph": (lambda: OnRing(GraphConv(12, 8)), (6, 12)),
}


def train_step(name, is_compiled=False):
    """Return the output and the gradients of one quantised layer."""
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = cpt.quantize_(make())
    x = torch.randn(shape, requires_grad=True)
    with cpt.precision(layer, 5, q_grad=32):
        y = (torch.compile(layer) if is_compiled else layer)(x)
        y = y[0] if isinstance(y, tuple) else y
        y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@needs_onednn
@pytest.mark.parametrize("name", LAYERS)
def test_gemm_backends_agree_for_layers(onednn, name):
    count, results = count_onednn_matmuls(lambda: train_step(name))
    assert count >= 3
    gemm_backend.use("torch")
    count, expected = count_onednn_matmuls(lambda: train_step(name))
    assert count == 0
    assert [t.stride() for t in results] == [t.stride() for t in expected]
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)


@needs_onednn
@pytest.mark.slow
def test_compiled_matmuls_match_eager(onednn):
    torch.compiler.reset()
    *results, bias_grad = train_step("linear", is_compiled=True)
    *expected, expected_bias_grad = train_step("linear")
    assert all(map(torch.equal, results, expected))
    # a sum, which Inductor orders otherwise
    torch.testing.assert_close(bias_grad, expected_bias_grad)
    torch.compiler.reset()


NOT_QUANTISED = {"levels": None, "grad_levels": None, "key": None}


@needs_onednn
@pytest.mark.parametrize("steps", ["one step", "equal", "packed", "none"])
@pytest.mark.parametrize(
    ("width", "options"),
    [(5, {}), (16, {"bias": False}), (37, {"reverse": True}), (16, NOT_QUANTISED)],
)
def test_lstm_is_bit_identical_with_onednn(onednn, cpp_kernels, steps, width, options):
    results = [
        count_onednn_matmuls(lambda ops=ops: run(ops, STEPS[steps], width, options))
        for ops in (torch.ops.cpt, torch.ops.cpt_reference)
    ]
    (count, found), (plain_count, expected) = results
    assert count == plain_count
    assert (count > 0) == (steps != "none")
    check(found, expected)


@needs_onednn
@pytest.mark.parametrize(("width", "expected"), [(15, 0), (16, 3)])
def test_lstm_leaves_small_matmuls_to_torch(
    onednn, cpp_kernels, monkeypatch, width, expected
):
    # every matmul of a step with 3 sequences of 16 features is as large
    monkeypatch.setattr(gemm_backend, "MIN_ONEDNN_MACS", 3 * 16 * 4 * 16)
    gemm_backend.use("onednn")
    for ops in (torch.ops.cpt, torch.ops.cpt_reference):
        step = lambda ops=ops: run(ops, STEPS["one step"], width, {})  # noqa: E731
        assert count_onednn_matmuls(step)[0] == expected


@needs_onednn
@pytest.mark.parametrize("name", ["linear", "LSTM"])
def test_check_counts_onednn_matmuls_like_torch(onednn, name):
    model, reports = cpt.quantize_(LAYERS[name][0]()), []
    for library in ("onednn", "torch"):
        gemm_backend.use(library)
        report = cpt.check(model, (torch.randn(6, 12),))
        fields = [(o.layer, o.backward, o.macs, o.quantized) for o in report.operations]
        reports.append((report.ok, sorted(fields)))
    assert reports[0] == reports[1]
