"""BitOps of executed steps: the ledger against the plan and against operand values."""

import copy
from functools import partial

import pytest
import torch
from helpers import FunctionModule, Standardised, refused
from operation_samples import after_layer, encoder, parent_of_weights, random, sequences
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import cpt_core as cpt
from bench.zoo import BITS, on_grid
from cpt_core.bitops.conventions import CONVENTIONS
from cpt_core.models import MODELS as PAPER_MODELS
from cpt_core.models.mobilenet import InvertedResidual
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.formats.ladder import FormatLadder
from cpt_extras.search.custom_schedules import FunctionSchedule
from cpt_extras.search.role_schedules import RoleSchedules

pytestmark = pytest.mark.filterwarnings("ignore::cpt_core.QuantizationWarning")

# --- the values of operands ---------------------------------------------------------


class Video(nn.Conv3d):
    """Subclass without a forward method, as in the video models of torchvision."""


def linear_layers():
    sizes = [(40, 30), (30, 20), (20, 12)]
    first, second, third = (nn.Linear(*size) for size in sizes)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)


def nfnet_layers():
    first, last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)
    return nn.Sequential(first, nn.ReLU(), Standardised(8, 8, 3), nn.ReLU(), last)


def attention_function():
    attend = FunctionModule(lambda _, x: (x @ x.mT).softmax(-1) @ x)
    first, last = nn.Linear(40, 64), nn.Linear(64, 9)
    return nn.Sequential(first, nn.Unflatten(1, (8, 8)), attend, nn.Flatten(), last)


ROWS = random((24, 40))
EXECUTED = {  # name -> model, inputs, layers that its user leaves in float32
    "all quantised": (linear_layers, ROWS, ()),
    "excluded layers": (linear_layers, ROWS, ("0", "4")),
    "NFNet": (nfnet_layers, random((4, 3, 8, 8)), ()),
    "r3d": (
        lambda: nn.Sequential(Video(2, 6, 3, padding=1), nn.ReLU(), nn.Conv3d(6, 5, 3)),
        random((3, 2, 5, 6, 6)),
        (),
    ),
    "GPT-2": (
        lambda: nn.Sequential(Conv1D(60, 40), nn.ReLU(), nn.Linear(60, 20)),
        ROWS,
        (),
    ),
    "function": (attention_function, ROWS, ()),
}


class OperandWatcher(TorchDispatchMode):
    """Mode that prices matmuls by the values of operands: on a grid, or float32."""

    def __init__(self):
        super().__init__()
        self.bitops = self.at_32_bits = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for macs, *operands in self.matmuls(str(func), args, output):
            bits = [BITS if on_grid(x) is True else 32 for x in operands]
            self.bitops += macs * bits[0] * bits[1] / 32**2
            self.at_32_bits += macs
        return output

    @staticmethod
    def matmuls(name, args, output):
        """Return (MACs, first operand, second operand) of every matmul of a call."""
        if name.startswith(("aten.mm.", "aten.bmm.", "aten.addmm.")):
            a, b = args[-2:]
            return [(a.numel() * b.shape[-1], a, b)]
        if name.startswith("aten.convolution."):
            return [(output[:, :1].numel() * args[1].numel(), *args[:2])]
        if name.startswith("aten.convolution_backward."):
            gradient, x, weight, is_needed = *args[:3], args[-1]
            macs = gradient[:, :1].numel() * weight.numel()
            operands = zip((weight, x), is_needed, strict=False)
            return [(macs, gradient, other) for other, needed in operands if needed]
        return []


@pytest.mark.parametrize("name", EXECUTED)
def test_ledger_total_matches_operand_values(name):
    make, inputs, excluded = EXECUTED[name]
    torch.manual_seed(0)
    model, (x,), schedule = make(), inputs(), StaticSchedule(BITS, 1)
    cpt.quantize_(model, cpt.QuantConfig(float32=excluded))
    cpt.PrecisionScheduler(model, schedule)
    with OperandWatcher() as watcher:
        model(x).square().sum().backward()
    with cpt.BitOpsLedger(model) as ledger:
        model(x).square().sum().backward()

    plan = cpt.count_bitops(model, (x,), schedule)
    assert plan.total == ledger.total() == watcher.bitops
    assert plan.relative_to_float32 == watcher.bitops / watcher.at_32_bits
    at_32_bits = cpt.count_bitops(model, (x,)).total
    assert plan.at_32_bits == at_32_bits == watcher.at_32_bits
    assert plan.float32 == ledger.float32
    for convention in CONVENTIONS:
        total = cpt.count_bitops(model, (x,), schedule, convention=convention).total
        assert plan.by_convention[convention] == total
    line = "all matmuls and convolutions run quantised"
    if excluded:
        share = f"{sum(plan.float32.values()):.1%}"
        line = f"{share} of the forward MACs of matmuls and convolutions run in float32"
    assert line in str(plan)
    assert bool(plan.float32) == bool(excluded)
    assert (plan.by_convention["paper"] < plan.total / 5) == bool(excluded)


# --- plan and ledger ----------------------------------------------------------------

RISING = FunctionSchedule(lambda u: 3 + 5 * u, total_steps=3)
PER_LAYER = {"0": StaticSchedule(4, 3), "*": StaticSchedule(8, 3)}
TRAINED = {  # one network of every kind: model, shape of inputs, preset, schedule
    "mlp": (lambda: PAPER_MODELS["mlp6"](1, 8, 10), (4, 1, 8, 8), "cifar", RISING),
    "depthwise block": (
        lambda: nn.Sequential(InvertedResidual(4, 8, 6, 1)),
        (2, 4, 6, 6),
        "all",
        RISING,
    ),
    "a schedule per layer": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)),
        (5, 4),
        "all",
        PER_LAYER,
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_plan_equals_ledger(name):
    """Exclude evaluations, which are not training."""
    make, shape, preset, schedule = TRAINED[name]
    model, x = cpt.quantize_(make(), preset), torch.randn(shape)
    scheduler = cpt.PrecisionScheduler(model, schedule)
    with cpt.BitOpsLedger(model) as ledger:
        for _ in range(3):
            model.train()
            model(x).sum().backward()
            scheduler.step()
            model.eval()
            with torch.no_grad():
                model(x)
    model.train()
    for convention in CONVENTIONS:
        plan = cpt.count_bitops(model, (x,), schedule, convention=convention)
        assert ledger.total(convention) == plan.total
        assert ledger.by_layer(convention) == plan.by_layer
        assert ledger.by_pass(convention) == plan.by_pass
        costs = pytest.approx(plan.costs)
        assert ledger.costs(convention) == costs
        totals = ledger.table(convention).loc["total"].tolist()
        assert totals == pytest.approx(list(plan.costs.values()))
        assert min(plan.costs.values()) > 0


def role_levels(activation, weight, gradient):
    levels = {"activation": activation, "weight": weight, "gradient": gradient}
    return RoleSchedules(**{r: StaticSchedule(level, 1) for r, level in levels.items()})


FLOAT32_LEVELS = {  # schedule -> bits that run, of all four roles
    "23": (StaticSchedule(23, 1), (23, 23, 23, 23)),
    "24": (StaticSchedule(24, 1), (32, 32, 32, 32)),
    "31": (StaticSchedule(31, 1), (32, 32, 32, 32)),
    "32": (StaticSchedule(32, 1), (32, 32, 32, 32)),
    "weights": (role_levels(8, 24, 6), (8, 32, 6, 6)),
    "activations": (role_levels(24, 8, 6), (32, 8, 6, 6)),
    "gradients": (role_levels(8, 8, 24), (8, 8, 32, 32)),
}
LADDERS = {"none": None, "affine": FormatLadder.affine()}


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("name", FLOAT32_LEVELS)
def test_levels_that_run_in_float32_cost_32_bits(name, ladder):
    """Compare the plan and the ledger with the operands; "paper" prices the level."""
    schedule, (activation, weight, error, weight_gradient) = FLOAT32_LEVELS[name]
    config = cpt.QuantConfig(ladder=LADDERS[ladder])
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 3)), config)
    x = torch.randn(5, 4, requires_grad=True)
    cpt.PrecisionScheduler(model, schedule)
    with cpt.BitOpsLedger(model) as ledger:
        model(x).sum().backward()
    plan = cpt.count_bitops(model, (x,), schedule)
    assert plan.bitops == ledger.bitops()
    assert plan.bitops["0"] == {
        "forward": 60 * activation * weight,
        "error": 60 * error * weight,
        "weight": 60 * weight_gradient * activation,
    }
    assert plan.costs == pytest.approx(ledger.costs())
    is_quantized = max(activation, weight) < 32
    assert plan.float32 == ledger.float32 == ({} if is_quantized else {"0": 1.0})
    assert ("run in float32: layer 0" in str(plan)) == (not is_quantized)
    paper = cpt.count_bitops(model, (x,), schedule, convention="paper")
    assert paper.bitops == ledger.bitops("paper")
    assert paper.float32 == plan.float32
    levels = [int(level[0]) for level in schedule.levels()]
    assert paper.bitops["0"]["forward"] == 60 * levels[0] * levels[1]


GRADIENTS = {  # name -> function of a layer, a vector and data; MACs of every pass
    "data": (lambda layer, w, x: x @ w, {"forward": 80, "weight": 80}),
    # the matrix has the gradient dy w', which sums nothing
    "vector": (lambda layer, w, x: layer(x) @ w, {"forward": 80, "weight": 80}),
    "frozen vector": (lambda layer, w, x: layer(x) @ w.detach(), {"forward": 80}),
    "matrix": (
        lambda layer, w, x: layer(x)[0] @ w[:, None],
        {"forward": 40, "error": 40, "weight": 40},
    ),
    "frozen matrix": (
        lambda layer, w, x: layer(x)[0] @ w[:, None].detach(),
        {"forward": 40, "error": 40},
    ),
    "dot": (lambda layer, w, x: layer(x)[0, 0].dot(w), {"forward": 8}),
    "detached": (lambda layer, w, x: layer(x).detach() @ w.detach(), {"forward": 80}),
    "no_grad": (
        lambda layer, w, x: torch.no_grad()(torch.matmul)(layer(x), w),
        {"forward": 80},
    ),
    "attention": (
        lambda layer, w, x: F.scaled_dot_product_attention(x, layer(x), x),
        {"forward": 800, "error": 400, "weight": 400},
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_ledger_prices_only_executed_gradients(name):
    function, passes = GRADIENTS[name]
    model = FunctionModule(
        lambda m, x: function(m.layer, m.weight, x) + 0 * m.layer(x).sum(),
        layer=nn.Linear(8, 8),
        weight=nn.Parameter(torch.randn(8)),
    )
    (x,) = sequences()
    with cpt.BitOpsLedger(model) as ledger:
        model(x).sum().backward()
    plan = cpt.count_bitops(model, (x,), convention="per_op")
    for bitops in (ledger.bitops("per_op"), plan.bitops):
        macs = {name: bits / 32**2 for name, bits in bitops["(matmuls)"].items()}
        assert macs == passes


# --- the ledger ---------------------------------------------------------------------


def test_ledger_counts_every_backward_pass():
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    with cpt.precision(model, bits=4, q_grad=8), cpt.BitOpsLedger(model) as ledger:
        y = model(torch.ones(2, 4))
        assert sum(ledger.by_pass("per_op").values()) == 2 * 18 * 16 / 1024
        for num_passes, loss in ((1, y.sum()), (2, y.square().sum())):
            loss.backward(retain_graph=True)
            assert ledger.by_pass("per_op") == {
                "forward": 2 * 18 * 16 / 1024,
                "error": num_passes * 2 * 6 * 32 / 1024,
                "weight": num_passes * 2 * 18 * 32 / 1024,
            }
    total = ledger.total()
    with cpt.precision(model, bits=4, q_grad=8):
        model(torch.ones(2, 4)).sum().backward()
    assert ledger.total() == total > 0


def test_ledger_prices_float32_layers_at_active_bits():
    """Price float32 layers at the bits of the model, which change between passes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cpt.quantize_(model, cpt.QuantConfig(float32=("1",)))
    with cpt.BitOpsLedger(model) as ledger, torch.no_grad():
        for bits, total in ((4, 4**2), (8, 4**2 + 8**2), (4, 2 * 4**2 + 8**2)):
            with cpt.precision(model, bits):
                model(torch.ones(1, 4))
            assert ledger.bitops("paper")["1"]["forward"] == 16 * total


@pytest.mark.parametrize("bits", [None, 4])
def test_ledger_counts_gradient_through_last_state(bits):
    lstm = cpt.quantize_(nn.LSTM(5, 4))
    lstm.precision.set_bits(bits, bits)
    losses = [
        lambda y, h, c: y.sum(),
        lambda y, h, c: h.sum(),
        lambda y, h, c: y.sum() + h.sum() + c.sum(),
    ]
    totals = set()
    for loss in losses:
        with cpt.BitOpsLedger(lstm) as ledger:
            y, (h, c) = lstm(torch.randn(7, 3, 5))
            loss(y, h, c).backward()
        totals.add(ledger.total("per_op"))
    assert len(totals) == 1
    assert totals != {0}


def test_ledger_leaves_training_unchanged():
    def results(is_counted):
        torch.manual_seed(0)
        conv = nn.Conv1d(5, 5, 3, padding=1)
        norm = nn.utils.parametrizations.spectral_norm(conv)
        model = nn.Sequential(norm, encoder())
        ledger = cpt.BitOpsLedger(model)
        if is_counted:
            with ledger:
                model(*sequences()).square().sum().backward()
            assert ledger.total("per_op") > 0
        else:
            model(*sequences()).square().sum().backward()
        hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
        assert not any(map(any, hooks))
        return [*model.state_dict().values(), *(p.grad for p in model.parameters())]

    pairs = zip(results(False), results(True), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_ledger_counts_recomputed_matmuls(use_reentrant):
    recompute = partial(checkpoint, use_reentrant=use_reentrant)
    unpriced, passes = [], []
    for run in (lambda block, x: block(x), recompute):
        model = FunctionModule(
            lambda m, x, run=run: run(m.block, m.first(x)),
            first=nn.Linear(8, 8),
            block=parent_of_weights(),
        )
        with cpt.BitOpsLedger(model) as ledger:
            model(*sequences()).sum().backward()
        unpriced.append(ledger.unpriced["block (matmuls)"])
        passes.append(ledger.by_pass("per_op"))
    assert unpriced[1] == 2 * unpriced[0]
    for name in ("error", "weight"):
        assert passes[0][name] == passes[1][name]


def test_ledger_survives_failing_forward():
    def fail(module, inputs):
        if isinstance(module, nn.Linear):
            raise RuntimeError("no Linear")

    model = after_layer(lambda x, w: x @ w, 8, 3)
    x = torch.randn(5, 8)
    with cpt.BitOpsLedger(model) as ledger:
        message = "shapes cannot be multiplied"
        refused(message, model, torch.randn(5, 7), error=RuntimeError)
        # such hooks run before those of a module
        handle = register_module_forward_pre_hook(fail)
        refused("no Linear", model, x, error=RuntimeError)
        handle.remove()
        model(x).sum().backward()
        torch.randn(5, 8) @ torch.randn(8, 3)  # not in the model
    assert ledger.unpriced == {"(matmuls)": 5 * 8 * 3}


def test_ledger_counts_steps_of_its_model_only():
    """Count a ``check`` inside a ledger as a step, but not a copy or a plan."""
    model, (x,) = cpt.quantize_(nn.Sequential(parent_of_weights())), sequences()
    with cpt.precision(model, 8), cpt.BitOpsLedger(model) as ledger:
        model(x).sum().backward()
        total, average = ledger.total(), copy.deepcopy(model)
        with cpt.precision(average, 8):
            average(x).sum().backward()
        plan = cpt.count_bitops(model, (x,), convention="paper")
        assert ledger.total() == total
        assert plan.unpriced == ledger.unpriced
        cpt.check(model, (x,))
    assert ledger.total() > total


def test_ledger_reports_compiled_modules():
    model = parent_of_weights()
    assert cpt.BitOpsLedger(model).compiled_modules == ()
    whole = torch.compile(model, backend="eager")
    assert cpt.BitOpsLedger(whole).compiled_modules == ("",)
    model.out.compile(backend="eager")
    assert cpt.BitOpsLedger(model).compiled_modules == ("out",)


@pytest.mark.parametrize("kind", ["attention", "encoder"])
def test_ledger_prices_fused_attention_by_parts(kind):
    """Price torch's fast path of evaluation like its training."""
    if kind == "attention":
        attention = nn.MultiheadAttention(8, 2, batch_first=True)
        part = FunctionModule(lambda m, x: m.inner(x, x, x)[0], inner=attention)
    else:
        part = encoder()
    model = FunctionModule(
        lambda m, x: m.head(m.part(x)),
        part=part.requires_grad_(False),
        head=nn.Linear(8, 3),
    )
    (x,), totals = sequences(), []
    for is_training in (True, False):
        model.part.train(is_training)
        with cpt.BitOpsLedger(model) as ledger:
            model(x).sum().backward()
        totals.append(ledger.total("per_op"))
    plan = cpt.count_bitops(model, (x,), convention="per_op")
    assert totals == [plan.total] * 2
