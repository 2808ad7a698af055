"""docs/coming-from.md: names of cpt_core and of installed libraries exist, and formats called equal are equal."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

import cpt_core as cpt
from cpt_core.quantization.roles import Quantizer
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.formats.format import FORMATS, Format

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(
    encoding="utf-8"
)
OURS = {"cpt": cpt, "FORMATS": FORMATS, "Format": Format, "Quantizer": Quantizer}
MODULES = {
    "torchao": (
        "torchao.float8 torchao.quantization torchao.quantization.qat torchao.prototype.qat "
        "torchao.prototype.mx_formats torchao.prototype.mx_formats.config torchao.prototype.quantized_training "
        "torchao.prototype.moe_training.config"
    ),
    "Brevitas": "brevitas.quant brevitas.quant.shifted_scaled_int brevitas.quant.float_quant_ocp "
    "brevitas.quant.mx_quant_ocp",
    "QPyTorch": "qtorch",
    "Transformer Engine": "transformer_engine.common.recipe",
    "microxcaling": "mx.formats mx.specs",
}


def rows():
    """Return section, foreign name, cpt names and differences of every table row."""
    for section in PAGE.split("\n## ")[1:]:
        for line in section.splitlines():
            if line.startswith("| `"):
                theirs, ours, differs = (
                    cell.strip() for cell in line.strip("|").split(" |")
                )
                yield (
                    section.splitlines()[0],
                    theirs.strip("`"),
                    re.findall("`(.+?)`", ours),
                    differs,
                )


ROWS = list(rows())


def theirs(section, name):
    """Return the value of a foreign name, if its library is installed."""
    names = {"torch": torch}
    for module in MODULES[section].split():
        names |= vars(pytest.importorskip(module))
    return eval(name, names)


def test_coming_from_has_table_per_library():
    assert {section for section, *_ in ROWS} == set(MODULES)
    assert len(ROWS) > 40


def test_coming_from_cpt_names_exist():
    in_tables = {name for *_, ours, _ in ROWS for name in ours}
    assert all(
        isinstance(eval(name, dict(OURS)), (Format, Quantizer)) for name in in_tables
    )
    in_text = set(re.findall(r"`((?:cpt|FORMATS|Format|Quantizer)\b[^`]*)`", PAGE)) - {
        "Format.HYBRID"
    }  # theirs
    assert all(eval(name, {**OURS, "x": torch.ones(4)}) is not None for name in in_text)


@pytest.mark.parametrize(("section", "name"), [row[:2] for row in ROWS])
def test_coming_from_foreign_names_exist(section, name):
    theirs(section, name)


def rounded_by_torchao(config, x):
    name = type(config).__name__
    if name == "Float8LinearConfig":
        training = resolve_name("torchao.float8.float8_training_tensor")
        cast = resolve_name(
            "torchao.float8.float8_scaling_utils:hp_tensor_to_float8_dynamic"
        )
        dtype, role = (
            config.cast_config_weight.target_dtype,
            training.GemmInputRole.WEIGHT,
        )
        return cast(
            x, dtype, training.LinearMMConfig(), gemm_input_role=role
        ).to_original_precision()
    if name.startswith("MX"):
        dtype = getattr(config, "dtype", None) or config.weight_dtype
        to_mx = resolve_name("torchao.prototype.mx_formats.mx_tensor:MXTensor.to_mx")
        return to_mx(x, dtype, config.block_size, config.scaling_mode).dequantize(
            torch.float32
        )
    if name.startswith("NVFP4"):
        blocks = resolve_name("torchao.prototype.mx_formats.nvfp4_tensor")
        scale = blocks.per_tensor_amax_to_scale(x.abs().max())
        return blocks.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(
            torch.float32
        )
    return resolve_name(
        "torchao.quantization.qat.fake_quantizer:FakeQuantizerBase.from_config"
    )(config)(x)


def rounded_by_brevitas(quantizer, x):
    layer = resolve_name("brevitas.nn:QuantLinear")(
        x.shape[1], x.shape[0], bias=False, weight_quant=quantizer
    )
    layer.weight.data.copy_(x)
    return layer.quant_weight().value.detach()


def rounded_by_microxcaling(element, x):
    specs = resolve_name("mx.specs:MxSpecs")()
    specs["block_size"] = 32
    return resolve_name("mx.mx_ops:quantize_mx_op")(
        x, specs, elem_format=element, axes=[-1], round="even"
    )


ROUNDED = {
    "torchao": rounded_by_torchao,
    "Brevitas": rounded_by_brevitas,
    "microxcaling": rounded_by_microxcaling,
}
EQUAL = [
    (s, n, o, int(found[1] or 0))
    for s, n, o, d in ROWS
    if (found := re.match(r"(?:equal|to (\d) ulp)", d))
]
assert {section for section, *_ in EQUAL} == set(ROUNDED)


@pytest.mark.parametrize(("section", "name", "ours", "ulp"), EQUAL)
def test_coming_from_equal_formats_round_equally(section, name, ours, ulp):
    """Round weight-like numbers and, except for NVFP4, many midpoints of the grid."""
    value = theirs(section, name)
    form, quantizer = (
        *(eval(each, dict(OURS)) for each in ours),
        Quantizer("per_tensor"),
    )[:2]
    if isinstance(quantizer, Format):  # that of gradients
        quantizer = Quantizer("per_tensor")
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for given in (
        x,
        x * 0.02,
        *([] if form.scale == "e4m3" else [(x * 16).round() / 16]),
    ):
        expected = ROUNDED[section](value, given)
        found = cpt.quantize(given, format=form, quantizer=quantizer)
        assert found.unique().numel() > 6
        apart = (found.view(torch.int32) - expected.contiguous().view(torch.int32))[
            found != expected
        ].abs()
        assert not apart.numel() or apart.max() <= ulp


MXFP8 = (
    "MXFakeQuantizeConfig(torch.float8_e4m3fn, scaling_mode=ScaleCalculationMode.FLOOR)"
)
STRAIGHT_THROUGH = "QATConfig(activation_config={0}, weight_config={0})"
WRITTEN = {"cpt": cpt}  # the page's lines for Float8LinearConfig put config into it
exec(re.search("```python\n(.*?)```", PAGE, re.DOTALL)[1], WRITTEN)


def formats(activation, gradient="float32"):
    """Return the page's configuration with given formats at level 8."""
    at_8 = {"activation": activation, "weight": activation, "gradient": gradient}
    ladder = {
        role: cpt.FormatLadder({8: name, 16: "bf16", 32: "float32"})
        for role, name in at_8.items()
    }
    return replace(WRITTEN["config"], ladder=ladder)


def test_coming_from_config_sets_float8_levels():
    assert WRITTEN["config"] == formats("e4m3", "e5m2")
    assert WRITTEN["config"].quantizers["linear_weight"] == Quantizer("per_tensor")


@pytest.mark.parametrize(
    ("name", "converted", "gradients"),
    [
        ("Float8LinearConfig(emulate=True)", WRITTEN["config"], True),
        (STRAIGHT_THROUGH.format(MXFP8), formats("mxfp8_e4m3"), True),
        (
            STRAIGHT_THROUGH.format(
                "Float8FakeQuantizeConfig(granularity=PerTensor())"
            ),
            formats("e4m3"),
            False,
        ),
    ],
)
def test_coming_from_layers_equal_torchao(name, converted, gradients):
    """Match torchao forward and, except for its float8 fake quantisation, backward."""
    config = theirs("torchao", name)
    torch.manual_seed(0)
    ours = torch.nn.Sequential(
        torch.nn.Linear(64, 96, bias=False),
        torch.nn.ReLU(),
        torch.nn.Linear(96, 32, bias=False),
    )
    other = copy.deepcopy(ours)
    if "LinearConfig" in name:
        theirs("torchao", "convert_to_float8_training")(other, config=config)
    else:
        theirs("torchao", "quantize_")(other, config)
    cpt.PrecisionScheduler(cpt.quantize_(ours, converted), StaticSchedule(8, 1))

    x, gradient = torch.randn(48, 64), torch.randn(48, 32)
    found, expected = [], []
    for model, results in ((ours, found), (other, expected)):
        given = x.clone().requires_grad_()
        y = model(given)
        y.backward(gradient)
        results += [y, given.grad, model[0].weight.grad, model[2].weight.grad]
    for a, b in zip(found[: 4 if gradients else 1], expected, strict=False):
        assert torch.linalg.norm(a - b) <= 1e-6 * torch.linalg.norm(b)
