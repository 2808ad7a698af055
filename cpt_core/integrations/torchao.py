"""What a configuration of torchao means here: ``from_torchao``.  Beyond the paper.

Configurations are told by the names of their classes and fields, so torchao is not needed. Only what means the same is
converted; for the rest the error says what differs. Facts are those of torchao 0.18.

| Float8LinearConfig, tensorwise | e4m3 forward, e5m2 gradients, a scale per tensor |
| Float8FakeQuantizeConfig, Float8DynamicActivationFloat8WeightConfig | e4m3 or e5m2, a scale per tensor or row |
| MXFakeQuantizeConfig, MXDynamicActivationMXWeightConfig | MXFP8 or MXFP4 forward, with ScaleCalculationMode.FLOOR |
| NVFP4FakeQuantizeConfig, NVFP4DynamicActivationNVFP4WeightConfig | NVFP4 forward, with a scale per tensor |
| Float8WeightOnlyConfig, NVFP4WeightOnlyConfig | the same of weights alone |
| QATConfig | what its base_config, or its other configurations, mean |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from cpt_core.checks import choose
from cpt_core.formats.format import FORMATS, Format
from cpt_core.formats.ladder import FormatLadder
from cpt_core.formats.quantizer import Quantizer
from cpt_core.quantization.convert import QuantConfig
from cpt_core.quantization.quantizers import QUANTIZERS

FLOAT32 = FORMATS["float32"]
ELEMENTS = {
    "torch.float8_e4m3fn": FORMATS["e4m3"],
    "torch.float8_e5m2": FORMATS["e5m2"],
    "torch.float4_e2m1fn_x2": FORMATS["e2m1"],
}
GRANULARITIES = {"PerTensor": "per_tensor", "PerRow": "per_row", "PerToken": "per_row"}
# fields that choose kernels, layouts in memory or accumulators: they do not change which numbers there are
WITHOUT_EFFECT = (
    "emulate enable_fsdp_float8_all_gather force_recompute_fp8_weight_in_bwd gemm_config_grad_input "
    "gemm_config_grad_weight gemm_config_output kernel_preference mm_config pad_inner_dim set_inductor_config "
    "use_swizzled_scales use_triton_kernel"
).split()


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What a configuration says of a linear layer; None is float32.

    Attributes:
        activation: format of the input.
        weight: format of the weight.
        gradient: format of the output's gradient, with one scale per tensor.
        granularities: of input and weight.
    """

    activation: Format | None
    weight: Format | None
    gradient: Format | None = None
    granularities: tuple[str, str] = ("per_tensor", "per_tensor")

    @property
    def level(self) -> int:
        """Where a schedule has to stand: the bits of weights, or of inputs where weights are left alone."""
        return next(format.bits for format in (self.weight, self.activation) if format)

    def ladder(self, format: Format | None) -> FormatLadder:
        """Return the ladder of a role: its format at ``level``, above it bfloat16 and float32."""
        wide = {16: FORMATS["bf16"] if format else FLOAT32, 32: FLOAT32}
        return FormatLadder({self.level: format or FLOAT32, **wide})


def from_torchao(config: Any) -> QuantConfig:
    """Return the configuration that rounds what a configuration of torchao rounds, to the same numbers.

    The lowest level of its ladders, ``ladder.weight.levels[0]``, has torchao's formats, and is the number of bits of
    weights: a schedule that stands there trains as torchao does. Levels 16 and 32 are bfloat16 and float32, for
    schedules that go there; ``FormatLadder`` puts others between.

    torchao trains linear layers alone so: ``quantize_(model, config, lambda m, _: type(m) is torch.nn.Linear)`` does,
    too. The roles of other layers keep their quantisers.

    Args:
        config: one of the configurations at the head of this module.

    Raises:
        ValueError: for a configuration that means something else; it names what differs.

    Differs: biases and their gradients are rounded here, never there. A gradient passes a rounding unchanged, where
        torchao's also goes through the scale, and that of its float8 fake quantisation through a cast to float8 without
        a scale, in which small ones become 0; zeros alone are 0 here and NaN there. Blocks of NVFP4 far below the
        tensor's largest number have scales below 2**-6 here, not there.
    """
    meaning = meaning_of(config)
    inputs, weights = meaning.granularities
    linear = {
        "linear_input": Quantizer(inputs),
        "linear_weight": Quantizer(weights),
        "linear_grad": Quantizer("per_tensor"),
    }
    ladder = {role: meaning.ladder(getattr(meaning, role)) for role in ("activation", "weight", "gradient")}
    return QuantConfig(quantizers={**QUANTIZERS, **linear}, ladder=ladder)


def meaning_of(config: Any) -> Meaning:
    """Return what a configuration of torchao says; ValueError where it is another thing than any of ours."""
    name = type(config).__name__
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ValueError(f"from_torchao takes a configuration of torchao, got {config!r}")
    if name in REFUSED:
        _refuse(config, REFUSED[name])
    read = _Reading(config)
    meaning = READERS[choose("configuration of torchao", name, READERS)](read)
    read.check()
    return meaning


class _Reading:
    """A configuration being read: what of it differs, and which fields nobody has asked for."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.differences: list[str] = []
        self.unread = {f.name: f.default for f in dataclasses.fields(config) if f.name not in WITHOUT_EFFECT}

    def __getitem__(self, name: str) -> Any:
        self.unread.pop(name, None)
        return getattr(self.config, name)

    def element(self, name: str) -> Format:
        """Return the format of a field that holds a type of torch."""
        return self.format_of(name, self[name])

    def format_of(self, name: str, dtype: Any) -> Format:
        """Return the format of a type of torch."""
        if str(dtype) not in ELEMENTS:
            self.differences.append(f"{name} is {dtype}: formats here are {', '.join(ELEMENTS)}")
        return ELEMENTS.get(str(dtype), FLOAT32)

    def granularity(self, value: Any) -> str:
        """Return the granularity that a ``Granularity`` is."""
        name = type(value).__name__
        if name not in GRANULARITIES or getattr(value, "dim", -1) != -1:
            self.differences.append(f"scales are {value!r}: here a scale is that of a tensor or of a row")
        return GRANULARITIES.get(name, "per_tensor")

    def check(self) -> None:
        """Raise ValueError when something differs, or a field is left that has not its default."""
        for name, default in self.unread.items():
            if (value := getattr(self.config, name)) != default:
                self.differences.append(f"{name}={value!r} has no counterpart")
        if self.differences:
            _refuse(self.config, *self.differences)


def _refuse(config: Any, *why: str) -> NoReturn:
    raise ValueError(
        f"torchao's {type(config).__name__} means something else than any configuration here: "
        + "; ".join(dict.fromkeys(why))
    )


def _float8_training(read: _Reading) -> Meaning:
    found: dict[str, Format] = {}
    for operand, other in (("input", "grad_weight"), ("weight", "grad_input"), ("grad_output", "grad_weight")):
        name = f"cast_config_{operand}"
        for cast in (read[name], read[f"{name}_for_{other}"]):
            if cast.scaling_type.value != "dynamic":
                read.differences.append(f"{operand} stays in high precision in a product: here it is rounded for all")
            elif cast.scaling_granularity.value != "tensorwise":
                read.differences.append(f"{operand} is scaled axiswise: {ANEW}")
        found[operand] = read.format_of(operand, cast.target_dtype)
    if read["round_scales_to_power_of_2"]:
        read.differences.append("scales are powers of two: here the scale of a range is amax / largest")
    return Meaning(found["input"], found["weight"], found["grad_output"])


def _float8_fake(read: _Reading) -> Meaning:
    element, granularity = read.element("dtype"), read.granularity(read["granularity"])
    return Meaning(element, element, granularities=(granularity, granularity))


def _float8_dynamic(read: _Reading) -> Meaning:
    asked = read["granularity"]
    pair = asked if isinstance(asked, (list, tuple)) else (asked, asked)
    inputs, weights = ("per_tensor" if g is None else read.granularity(g) for g in pair)
    if getattr(packing := read["packing_format"], "value", "plain") != "plain":
        read.differences.append(f"packing_format={packing!r} has no counterpart")
    elements = read.element("activation_dtype"), read.element("weight_dtype")
    return Meaning(*elements, granularities=(inputs, weights))


def _float8_weights(read: _Reading) -> Meaning:
    granularity = read.granularity(read["granularity"])
    return Meaning(None, read.element("weight_dtype"), granularities=(granularity, granularity))


def _mx(read: _Reading) -> Meaning:
    if (mode := read["scaling_mode"].value) != "floor":
        read.differences.append(
            f"scaling_mode is {mode!r}: here the scale of a block is rounded down, as OCP's specification has it "
            "(ScaleCalculationMode.FLOOR)"
        )
    names = ("dtype", "dtype") if hasattr(read.config, "dtype") else ("activation_dtype", "weight_dtype")
    (inputs, weights), block = map(read.element, names), read["block_size"]
    read.check()
    options: dict[str, Any] = {"block": block, "partial": True}  # partial: biases are blocks, too
    return Meaning(Format.mx(inputs, **options), Format.mx(weights, **options))


def _nvfp4(read: _Reading) -> Meaning:
    name = "use_per_tensor_scale" if hasattr(read.config, "use_per_tensor_scale") else "use_dynamic_per_tensor_scale"
    if not read[name]:
        read.differences.append(f"{name} is off: here e4m3 scales of blocks are relative to a float32 scale per tensor")
    format = Format.nvfp4(partial=True)
    return Meaning(None if "WeightOnly" in type(read.config).__name__ else format, format)


def _qat(read: _Reading) -> Meaning:
    if (step := str(getattr(read["step"], "value", read["step"]))) != "prepare":
        _refuse(read.config, f"step {step!r} makes a model for inference; give step='prepare'")
    base, *apart = (read[name] for name in ("base_config", "activation_config", "weight_config"))
    if base is not None:
        return meaning_of(base)
    if apart == [None, None]:
        _refuse(read.config, "it says neither how activations nor how weights are rounded")
    inputs, weights = (Meaning(None, None) if config is None else meaning_of(config) for config in apart)
    granularities = inputs.granularities[0], weights.granularities[1]
    return Meaning(inputs.activation, weights.weight, granularities=granularities)


GROUPS = "groups of a row share a scale: here a row does, or a tensor"
ANEW = "every product rounds its operands anew, along its own sum; here an operand is rounded once"
INTEGERS = (
    "its grids of integers are others: zero points of asymmetric ones are whole numbers, where an affine grid here "
    "begins at the minimum; symmetric ones have the step amax / (2**(q - 1) - 1/2), here amax / (2**(q - 1) - 1), or "
    "use the code -2**(q - 1), too"
)
REFUSED: Mapping[str, str] = {
    "Int8MixedPrecisionTrainingConfig": ANEW,
    "MXFP8TrainingOpConfig": ANEW,
    "Float8TrainingOpConfig": "it is for grouped products; of linear layers give the Float8LinearConfig",
    "Int4WeightOnlyConfig": GROUPS,
    "Int4WeightFakeQuantizeConfig": GROUPS,
    "Float8DynamicActivationInt4WeightConfig": GROUPS,
    "Int8StaticActivationInt8WeightConfig": "the scale of activations is given: here it follows them",
    "FqnToConfig": "it has a configuration per layer: convert each by itself",
    "IntxFakeQuantizeConfig": INTEGERS,
    "IntxWeightOnlyConfig": INTEGERS,
    "Int8WeightOnlyConfig": INTEGERS,
    "Int8DynamicActivationInt8WeightConfig": INTEGERS,
    "Int8DynamicActivationIntxWeightConfig": INTEGERS,
}
READERS: Mapping[str, Callable[[_Reading], Meaning]] = {
    "Float8LinearConfig": _float8_training,
    "Float8FakeQuantizeConfig": _float8_fake,
    "Float8DynamicActivationFloat8WeightConfig": _float8_dynamic,
    "Float8WeightOnlyConfig": _float8_weights,
    "MXFakeQuantizeConfig": _mx,
    "MXDynamicActivationMXWeightConfig": _mx,
    "NVFP4FakeQuantizeConfig": _nvfp4,
    "NVFP4DynamicActivationNVFP4WeightConfig": _nvfp4,
    "NVFP4WeightOnlyConfig": _nvfp4,
    "QATConfig": _qat,
}
