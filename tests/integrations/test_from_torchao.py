"""Configurations of torchao: what means the same here is converted, the rest is refused with what differs.

The classes below have the names and fields of torchao's; where torchao is installed its own are read, too, and its own
rounding is compared with ours.
"""

from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

from cpt_core.formats.format import FORMATS, Format
from cpt_core.formats.quantizer import Quantizer
from cpt_core.integrations.torchao import Meaning, from_torchao, meaning_of
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.scheduler import precision

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E2M1 = type("dtype", (), {"__str__": lambda _: "torch.float4_e2m1fn_x2"})()  # torch has it since 2.8


class ScalingType(Enum):
    DYNAMIC, DISABLED = "dynamic", "disabled"


class ScalingGranularity(Enum):
    TENSORWISE, AXISWISE = "tensorwise", "axiswise"


class ScaleCalculationMode(Enum):
    FLOOR, RCEIL = "floor", "rceil"


@dataclass(frozen=True)
class PerTensor:
    pass


@dataclass(frozen=True)
class PerRow:
    dim: int = -1


@dataclass(frozen=True)
class PerGroup:
    group_size: int


@dataclass(frozen=True)
class CastConfig:
    target_dtype: Any = E4M3
    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE


def config(name, **defaults):
    return make_dataclass(name, [(k, Any, field(default=v)) for k, v in defaults.items()], frozen=True)


Float8LinearConfig = config(
    "Float8LinearConfig",
    **{f"cast_config_{k}": CastConfig() for k in ("input", "input_for_grad_weight", "weight", "weight_for_grad_input")},
    **{f"cast_config_grad_output{k}": CastConfig(E5M2) for k in ("", "_for_grad_weight")},
    emulate=False,
    round_scales_to_power_of_2=False,
)
Float8Fake = config("Float8FakeQuantizeConfig", dtype=E4M3, granularity=PerRow(), hp_value_lb=None, hp_value_ub=None)
Float8Dynamic = config(
    "Float8DynamicActivationFloat8WeightConfig",
    activation_dtype=E4M3,
    weight_dtype=E4M3,
    granularity=None,
    packing_format=None,
    activation_value_lb=None,
    set_inductor_config=True,
    version=2,
)
MXFake = config("MXFakeQuantizeConfig", dtype=E4M3, block_size=32, scaling_mode=ScaleCalculationMode.RCEIL)
MXDynamic = config(
    "MXDynamicActivationMXWeightConfig",
    activation_dtype=E4M3,
    weight_dtype=E4M3,
    block_size=32,
    scaling_mode=ScaleCalculationMode.RCEIL,
)
Float8WeightOnly = config("Float8WeightOnlyConfig", weight_dtype=E4M3, granularity=PerRow(), version=2)
NVFP4WeightOnly = config("NVFP4WeightOnlyConfig", use_dynamic_per_tensor_scale=True)
NVFP4Fake = config("NVFP4FakeQuantizeConfig", use_per_tensor_scale=True, use_triton_kernel=False)
NVFP4Dynamic = config("NVFP4DynamicActivationNVFP4WeightConfig", use_dynamic_per_tensor_scale=True, step=None)
QATConfig = config("QATConfig", base_config=None, activation_config=None, weight_config=None, step="prepare")
Intx = config("IntxFakeQuantizeConfig", dtype=torch.int8, granularity=PerRow())
AXISWISE = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
DISABLED = CastConfig(scaling_type=ScalingType.DISABLED)
FLOOR = {"scaling_mode": ScaleCalculationMode.FLOOR}
ROWS = ("per_row", "per_row")

E4, E5, NVFP4 = FORMATS["e4m3"], FORMATS["e5m2"], Format.nvfp4(partial=True)
MXFP8, MX16 = Format.mx("e4m3", partial=True), Format.mx("e5m2", block=16, partial=True)
SAME = [
    (Float8LinearConfig(), Meaning(E4, E4, E5)),
    (Float8LinearConfig(emulate=True), Meaning(E4, E4, E5)),
    (Float8LinearConfig(cast_config_input=CastConfig(E5M2), cast_config_input_for_grad_weight=CastConfig(E5M2)),
     Meaning(E5, E4, E5)),
    (Float8Fake(), Meaning(E4, E4, granularities=ROWS)),
    (Float8Fake(E5M2, PerTensor()), Meaning(E5, E5)),
    (Float8Dynamic(), Meaning(E4, E4)),
    (Float8Dynamic(E4M3, E5M2, [PerRow(), PerRow()], set_inductor_config=False), Meaning(E4, E5, granularities=ROWS)),
    (Float8WeightOnly(), Meaning(None, E4, granularities=ROWS)),
    (MXFake(**FLOOR), Meaning(MXFP8, MXFP8)),
    (MXFake(E2M1, **FLOOR), Meaning(Format.mx("e2m1", partial=True), Format.mx("e2m1", partial=True))),
    (MXDynamic(E4M3, E5M2, block_size=16, **FLOOR), Meaning(Format.mx("e4m3", block=16, partial=True), MX16)),
    (NVFP4Fake(), Meaning(NVFP4, NVFP4)),
    (NVFP4Dynamic(), Meaning(NVFP4, NVFP4)),
    (NVFP4WeightOnly(), Meaning(None, NVFP4)),
    (QATConfig(Float8Dynamic()), Meaning(E4, E4)),
    (QATConfig(None, Float8Fake(E4M3, PerTensor()), Float8Fake(E5M2)),
     Meaning(E4, E5, granularities=("per_tensor", "per_row"))),
    (QATConfig(None, Float8Fake(), NVFP4Fake()), Meaning(E4, NVFP4, granularities=("per_row", "per_tensor"))),
    (QATConfig(weight_config=NVFP4Fake()), Meaning(None, NVFP4)),
    (QATConfig(activation_config=Float8Fake()), Meaning(E4, None, granularities=("per_row", "per_tensor"))),
]  # fmt: skip
OTHER = [
    (Float8LinearConfig(cast_config_weight=AXISWISE), "weight is scaled axiswise: every product rounds"),
    (Float8LinearConfig(cast_config_grad_output_for_grad_weight=DISABLED), "grad_output stays in high precision"),
    (Float8LinearConfig(round_scales_to_power_of_2=True), "scales are powers of two"),
    (Float8Fake(torch.float8_e4m3fnuz), "dtype is torch.float8_e4m3fnuz: formats here are torch.float8_e4m3fn, "),
    (Float8Fake(granularity=PerGroup(128)), r"scales are PerGroup\(group_size=128\)"),
    (Float8Fake(granularity=PerRow(0)), r"scales are PerRow\(dim=0\)"),
    (Float8Fake(hp_value_ub=1.0), "hp_value_ub=1.0 has no counterpart"),
    (Float8Dynamic(version=1), "version=1 has no counterpart"),
    (Float8Dynamic(packing_format=Enum("P", {"SPARSE": "sparse"}).SPARSE), "packing_format=.* has no counterpart"),
    (MXFake(), "scaling_mode is 'rceil': here the scale of a block is rounded down"),
    (NVFP4Fake(use_per_tensor_scale=False), "use_per_tensor_scale is off"),
    (NVFP4Dynamic(use_dynamic_per_tensor_scale=False), "use_dynamic_per_tensor_scale is off"),
    (QATConfig(Float8Dynamic(), step="convert"), "step 'convert' makes a model for inference"),
    (QATConfig(), "neither how activations nor how weights"),
    (QATConfig(MXFake()), "MXFakeQuantizeConfig means something else"),
    (Intx(), r"zero points of asymmetric ones are whole numbers.*the step amax / \(2\*\*\(q - 1\) - 1/2\)"),
    (config("Int8MixedPrecisionTrainingConfig", output=True)(), "every product rounds its operands anew"),
    (config("SomethingNew")(), "unknown configuration of torchao 'SomethingNew'"),
    (3, "takes a configuration of torchao, got 3"),
    (Float8LinearConfig, "takes a configuration of torchao, got <class"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "meaning"), SAME)
def test_what_means_the_same(given, meaning):
    assert meaning_of(given) == meaning


@pytest.mark.parametrize(("given", "why"), OTHER)
def test_what_means_something_else_is_refused_with_the_difference(given, why):
    with pytest.raises(ValueError, match=why):
        meaning_of(given)


def test_a_field_that_torchao_adds_is_not_passed_over():
    added = [("rotate", bool, field(default=False))]
    newer = make_dataclass("Float8FakeQuantizeConfig", added, bases=(Float8Fake,), frozen=True)
    assert meaning_of(newer()) == meaning_of(Float8Fake())
    with pytest.raises(ValueError, match="rotate=True has no counterpart"):
        meaning_of(newer(rotate=True))


def test_a_schedule_stands_at_the_bits_of_the_weights():
    found = from_torchao(Float8LinearConfig())
    ladders = {role: ladder.to_dict() for role, ladder in found.ladder._asdict().items()}
    assert ladders["weight"] == ladders["activation"] == {"8": "e4m3", "16": "bf16", "32": "float32"}
    assert ladders["error"] == ladders["weight_gradient"] == {"8": "e5m2", "16": "bf16", "32": "float32"}
    assert {found.quantizers[f"linear_{role}"] for role in ("input", "weight", "grad")} == {Quantizer("per_tensor")}
    assert found.quantizers["conv_input"] == QuantConfig().quantizers["conv_input"]

    found = from_torchao(QATConfig(None, Float8Fake(), NVFP4Fake()))
    assert found.ladder.weight.levels[0] == 4
    assert str(found.ladder.activation[4]) == "e4m3"
    assert {str(found.ladder.error[level]) for level in found.ladder.weight.levels} == {"float32"}


@pytest.mark.parametrize("given", [Float8LinearConfig(), NVFP4Fake(), MXFake(**FLOOR), NVFP4WeightOnly()])
def test_a_converted_model_runs_on_every_level(given):
    """With a bias whose length blocks do not divide; level 32 is float32 itself."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)), torch.randn(8, 64)
    plain = model(x)
    found = from_torchao(given)
    quantize_(model, found)
    apart = []
    for level in found.ladder.weight.levels:
        with precision(model, level):
            y = model(x)
            y.sum().backward()
        apart.append(float((y - plain).detach().abs().max()))
    assert apart[0] > apart[1] > apart[2] == 0
    assert all(p.grad.isfinite().all() for p in model.parameters())
