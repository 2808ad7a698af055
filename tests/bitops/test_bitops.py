import pytest
import torch
import torchvision
from torch import nn

from cpt_core.bitops.ledger import BitOpsLedger
from cpt_core.bitops.plan import count_bitops
from cpt_core.bitops.trace import CONVENTIONS, trace
from cpt_core.models import MODELS
from cpt_core.models.mobilenet import InvertedResidual
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.make import make_schedule
from cpt_core.schedules.schedule import FunctionSchedule

# row of flops.csv -> (model, side of the images, classes)
REFERENCE = {
    "cifar10_resnet74": ("resnet74", 32, 10),
    "cifar10_mobilenetv2": ("mobilenetv2", 32, 10),
    "imagenet_resnet18": ("resnet18", 224, 1000),
}
KINDS = {"conv": "Conv2d", "batch_norm": "BatchNorm2d", "linear": "Linear"}


@pytest.mark.parametrize("name", REFERENCE)
def test_forward_macs_equal_the_reference(name, reference_macs):
    row = reference_macs.get(name)
    if row is None:
        pytest.skip(f"{name} is not in this reference")
    model, size, classes = REFERENCE[name]
    with torch.device("meta"):
        calls, _ = trace(MODELS[model](3, size, classes), (torch.empty(int(row["batch"]), 3, size, size),))
    assert sum(c.macs for c in calls) == int(row["forward_count"])
    for part in row["breakdown"].split(";"):
        kind, count = part.split("=")
        assert sum(c.macs for c in calls if c.kind == KINDS[kind]) == int(count)


# one of every kind of product: plain, grouped and depthwise convolutions, linear layers, attention in windows and whole
PUBLISHED = "alexnet resnext50_32x4d shufflenet_v2_x1_0 swin_t vit_b_16".split()


@pytest.mark.parametrize("name", PUBLISHED)
def test_macs_that_torchvision_publishes(name):
    with torch.device("meta"):
        model, images = torchvision.models.get_model(name).eval(), torch.rand(1, 3, 224, 224)
    counted = sum(call.macs for call in trace(model, (images,))[0] if "Norm" not in call.kind)
    published = torchvision.models.get_model_weights(name).DEFAULT.meta
    assert round(counted / 1e9, 3) == published["_ops"]


def test_conventions_by_hand():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    quantize_(model, QuantConfig(float32=("2",)))
    schedule = make_schedule("LR", q_min=3, q_max=8, total_steps=10, n_cycles=1)
    q = schedule.bits()
    x = torch.empty(5, 4)
    paper = count_bitops(model, (x,), schedule, convention="paper")
    assert paper.total == sum((60 + 30) * int(b * b + 2 * b * 8) for b in q) / 1024
    per_op = count_bitops(model, (x,), schedule, convention="per_op")
    # the first layer needs no error product; the second stays in float32
    assert per_op.total == sum(60 * int(b * b + b * 8) + 3 * 30 * 1024 for b in q) / 1024
    assert per_op.by_layer.keys() == {"0", "2"}
    assert sum(per_op.by_layer.values()) == pytest.approx(per_op.total)
    assert sum(per_op.by_pass.values()) == pytest.approx(per_op.total)
    assert per_op.uncounted == {"relu": 15}
    assert "relu (15 elements)" in str(per_op)


def test_gradient_bits_of_your_own():
    model = quantize_(nn.Sequential(nn.Linear(4, 3)))
    schedule = make_schedule("STATIC", q_max=6, total_steps=2)
    plan = count_bitops(model, (torch.empty(1, 4),), schedule, q_grad=8)
    # forward and weight gradient; the input needs none. The paper's convention prices all three
    assert plan.total == 2 * 12 * (36 + 48) / 1024
    assert plan.by_convention["paper"] == 2 * 12 * (36 + 2 * 48) / 1024


RISING = FunctionSchedule(lambda u: 3 + 5 * u, total_steps=3)
PER_LAYER = {name: make_schedule("STATIC", q_max=q, total_steps=3) for name, q in (("0", 4), ("*", 8))}
# one network of every kind: deeper ones repeat its blocks
MODELS_TO_TRAIN = {
    "mlp": (lambda: MODELS["mlp6"](1, 8, 10), (4, 1, 8, 8), "cifar", RISING),
    "resnet8": (lambda: MODELS["resnet8_w8"](3, 8, 10), (2, 3, 8, 8), "cifar", RISING),
    "depthwise block": (lambda: nn.Sequential(InvertedResidual(4, 8, 6, 1)), (2, 4, 6, 6), "all", RISING),
    "a schedule per layer": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), (5, 4), "all", PER_LAYER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS_TO_TRAIN)
def test_plan_equals_ledger(name):
    make, shape, preset, schedule = MODELS_TO_TRAIN[name]
    model = quantize_(make(), preset)
    scheduler = PrecisionScheduler(model, schedule)
    x = torch.randn(shape)
    with BitOpsLedger(model) as ledger:
        for _ in range(3):
            model.train()
            model(x).sum().backward()
            scheduler.step()
            model.eval()
            with torch.no_grad():
                model(x)  # evaluation is not training: it must not count
    for convention in CONVENTIONS:
        plan = count_bitops(model.train(), (x,), schedule, convention=convention)
        assert ledger.total(convention) == plan.total
        assert ledger.by_layer(convention) == plan.by_layer
        assert ledger.by_pass(convention) == plan.by_pass
        assert ledger.costs(convention) == pytest.approx(plan.costs)
        assert ledger.table(convention).loc["total"].tolist() == pytest.approx(list(plan.costs.values()))
        assert min(plan.costs.values()) > 0


def test_ledger_sees_what_does_not_run():
    model = quantize_(nn.Sequential(nn.Linear(4, 3)))
    x = torch.randn(2, 4)
    with precision(model, bits=4, q_grad=8), BitOpsLedger(model) as ledger:
        model(x)  # no backward pass
        assert ledger.by_pass("per_op") == {"forward": 24 * 16 / 1024, "error": 0, "weight": 0}
        model(x).sum().backward()
        assert ledger.by_pass("per_op") == {"forward": 48 * 16 / 1024, "error": 0, "weight": 24 * 32 / 1024}
    model_is_unwatched = ledger.total()
    with precision(model, bits=4):
        model(x).sum().backward()
    assert ledger.total() == model_is_unwatched


def test_a_model_without_products_is_refused():
    with pytest.raises(ValueError, match="nothing to count in Sequential"):
        count_bitops(nn.Sequential(nn.ReLU()), (torch.empty(1, 4),))


@pytest.mark.parametrize(("affine", "training", "fixed"), [(True, 5, 2), (False, 4, 1)])
def test_fixed_statistics_and_no_affine_cost_less(affine, training, fixed):
    norm = nn.Sequential(nn.BatchNorm2d(2, affine=affine), nn.Conv2d(2, 1, 1))  # something must be trained
    x = torch.empty(1, 2, 3, 3)
    assert count_bitops(norm, (x,)).macs["0"] == training * 18
    assert count_bitops(norm.eval(), (x,)).macs["0"] == fixed * 18
