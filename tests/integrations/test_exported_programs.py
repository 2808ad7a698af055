"""Models exported for inference: int8 weights, run by torch alone, with equal outputs."""

import copy
import operator
import sys

import pytest
import torch
from helpers import Standardised, identical, pictures, refused, run_command, small
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions

pytestmark = pytest.mark.slow


def filled(model, *inputs, **config):
    """Convert a model, fill its running ranges and switch to evaluation."""
    torch.manual_seed(0)
    cpt.quantize_(model, cpt.QuantConfig(**config))
    with cpt.precision(model, 8), torch.no_grad():
        for _ in range(3):
            model(*inputs)
    return model.eval()


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def perceptron():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5, bias=False))


def decoder():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=20,
            bos_token_id=0,
            eos_token_id=1,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
        )
    )


def words(n):
    return torch.arange(6 * n).view(n, 6) % 20, torch.ones(n, 6, dtype=torch.int64)


def numbers(*shape):
    return (
        3 * torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))),
    )


# what makes the model, an example, other inputs, bits
MODELS = {
    "perceptron": (perceptron, numbers(2, 12), numbers(7, 12), 8),
    "convolutions": (small, (pictures(),), (pictures(1, n=5),), 3),
    "recurrent": (Language, numbers(2, 4, 6), numbers(2, 4, 6), 8),
    "decoder": (decoder, words(2), words(5), 4),
}
ALONE = """
import sys
for name in ("cpt_core", "cpt_extras", "transformers"):
    sys.modules[name] = None  # importing one is an error
import torch
for name, inputs in torch.load("inputs.pt").items():
    torch.save(torch.export.load(f"{name}.pt2").module()(*inputs), f"{name}.pt")
"""


def evaluated(model, inputs, bits):
    with cpt.precision(model, bits), torch.no_grad():
        return model(*inputs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Export models, and return the programs and the outputs with and without this package."""
    folder, programs, expected, inputs = tmp_path_factory.mktemp("programs"), {}, {}, {}
    for name, (make, example, others, bits) in MODELS.items():
        torch.manual_seed(1)
        model = filled(make(), *example)
        programs[name] = cpt.export(model, example, bits)
        torch.export.save(programs[name], folder / f"{name}.pt2")
        expected[name], inputs[name] = evaluated(model, others, bits), others
    torch.save(inputs, folder / "inputs.pt")
    run_command(sys.executable, "-c", ALONE, cwd=folder)
    return programs, {
        name: (torch.load(folder / f"{name}.pt"), expected[name]) for name in MODELS
    }


@pytest.mark.parametrize("name", MODELS)
def test_exported_program_matches_model_in_torch(name, alone):
    """Run programs in a process without this package, and get the outputs of the model."""
    found, expected = alone[1][name]
    if name == "decoder":  # which leaves its cache behind, here it has one
        assert expected.past_key_values is not None
        assert type(found) is dict
        assert "past_key_values" not in found
        found, expected = found["logits"], expected.logits
    assert found.unique().numel() > 1
    if name == "recurrent":  # whose gates have a kernel of their own
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(found, expected)


def test_exported_program_stores_int8_weights(tmp_path):
    model = filled(
        nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)),
        *numbers(4, 512),
    )
    program = cpt.export(model, numbers(2, 512))
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    sizes = [(tmp_path / name).stat().st_size for name in ("program.pt2", "weights.pt")]
    assert sizes[0] < 0.3 * sizes[1]
    assert {
        f"{layer}.{name}.codes" for layer in (0, 2) for name in ("weight", "bias")
    } <= program.state_dict.keys()
    held = [
        *program.state_dict.values(),
        *(c for c in program.constants.values() if isinstance(c, torch.Tensor)),
    ]
    assert {x.dtype for x in held if x.numel() > 512} == {torch.int8}
    assert str(tmp_path.parent) not in program.graph_module.print_readable(
        print_output=False
    )


def test_exported_program_contains_only_torch_operations(alone):
    program = alone[0]["convolutions"]
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert {op.namespace for op in called - {operator.getitem}} == {"aten"}
    assert torch.ops.aten.conv2d.default in called
    assert not any("stack_trace" in node.meta for node in program.graph.nodes)


def test_exported_program_accepts_larger_batches():
    model = filled(nn.Sequential(nn.Linear(70_000, 2)), *numbers(2, 70_000))
    program, x = cpt.export(model, numbers(2, 70_000)), numbers(9, 70_000)
    assert torch.equal(program.module()(*x), evaluated(model, x, 8))


SHARED = cpt.QuantConfig().with_shared_steps().quantizers
CONFIGS = {
    "authors' running ranges": {"running_start": "zero"},
    "its own range": {
        "quantizers": cpt.quantization.QUANTIZERS
        | {"conv_input": cpt.quantization.Quantizer("per_sample_mean")}
    },
    "weights with running ranges": {
        "quantizers": SHARED
        | {"linear_weight": cpt.quantization.Quantizer("per_tensor", running=True)}
    },
    "layers in float32": {"float32": ("3",)},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_export_supports_every_configuration(name):
    model = filled(small(), pictures(), **CONFIGS[name])
    program = cpt.export(model, (pictures(),), 4)
    assert torch.equal(
        program.module()(2 * pictures(1, n=6)),
        evaluated(model, (2 * pictures(1, n=6),), 4),
    )


def test_export_preserves_bfloat16():
    x = numbers(4, 12)[0].bfloat16()
    model = filled(perceptron().bfloat16(), x)
    found = cpt.export(model, (x,)).module()(3 * x)
    assert (found.dtype, identical([found], [evaluated(model, (3 * x,), 8)])) == (
        torch.bfloat16,
        True,
    )


def test_export_matches_int8_up_to_rounding():
    model = filled(small(), pictures(), execution="integer")
    x = pictures(1)
    assert torch.allclose(
        cpt.export(model, (x,)).module()(x),
        evaluated(model, (x,), 8),
        rtol=1e-5,
        atol=1e-5,
    )


def test_export_takes_bits_per_layer_or_schedule():
    model, x = filled(perceptron(), *numbers(4, 12)), numbers(6, 12)
    by_layer = {"0": 3, "*": 7}
    assert torch.equal(
        cpt.export(model, x, by_layer).module()(*x), evaluated(model, x, by_layer)
    )
    cpt.PrecisionScheduler(
        model, cpt.make_schedule("CR", q_min=2, q_max=5, total_steps=8, n_cycles=1)
    )
    assert torch.equal(
        cpt.export(model, x, "q_max").module()(*x), evaluated(model, x, 5)
    )
    cpt.PrecisionScheduler(
        model, cpt.make_schedule("CR", q_min=2, q_max=12, total_steps=8, n_cycles=1)
    )
    refused(
        "layer '0' would have 12 bits; codes of a byte hold 8",
        cpt.export,
        model,
        x,
        "q_max",
    )


def test_export_leaves_model_unchanged():
    """Leave the model unchanged, and fix the sizes that `dynamic_shapes` does not name."""
    model, x = filled(perceptron(), *numbers(4, 12)), numbers(6, 12)
    other, before = copy.deepcopy(model), evaluated(model, x, 8)
    program = cpt.export(model, x, dynamic_shapes=({},))
    assert identical(model.state_dict().values(), other.state_dict().values())
    assert [p.active_levels for p in layer_precisions(model).values()] == [None, None]
    assert torch.equal(evaluated(model, x, 8), before)
    with pytest.raises(
        (RuntimeError, AssertionError), match="6"
    ):  # the sizes of the example alone
        program.module()(*numbers(5, 12))
    for m in (model, other):
        m.train()
        with cpt.precision(m, 4, q_grad=8):
            m(*x).square().sum().backward()
    assert identical(
        [p.grad for p in model.parameters()], [p.grad for p in other.parameters()]
    )


def test_export_rejects_unsupported_bits():
    said = "bits, if not 'q_max', are codes of a byte and must be a whole number of at least 1 and at most 8"
    model = filled(perceptron(), *numbers(4, 12))
    for bits in (0, 9, 24, 2.5, "float", "8", None, {"0": 8, "*": 16}):
        refused(said, cpt.export, model, numbers(2, 12), bits)


def test_export_rejects_unsupported_models():
    x = numbers(2, 12)
    refused("no quantised layers; call quantize_", cpt.export, perceptron().eval(), x)
    model = cpt.quantize_(perceptron())
    refused(
        r"in training mode, a program only evaluates: call model.eval\(\)",
        cpt.export,
        model,
        x,
    )
    refused(
        "layer '0' has no running range of its input yet", cpt.export, model.eval(), x
    )
    model = filled(perceptron(), *x)
    model[2].train()
    refused("2 is in training mode", cpt.export, model, x)
    graphs = cpt.quantize_(nn.ModuleList([cpt.GraphConv(4, 2)])).eval()
    refused(
        "layer '0' is a GraphConv, and a program takes no graphs",
        cpt.export,
        graphs,
        (),
    )
    x = (x[0].double(),)
    doubled = filled(perceptron().double(), *x)
    refused(
        r"layer '0' computes in float64, a program in float32: call model.float\(\)",
        cpt.export,
        doubled,
        x,
    )


class Bypassing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 4), nn.Linear(4, 3)

    def forward(self, x):
        return nn.functional.linear(self.first(x), self.second.weight)


class Multiplying(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 5))

    def forward(self, x):
        return x @ self.weight


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x[None], x[None], x[None], need_weights=False)[0]


def parametrized():
    model = nn.Sequential(nn.Linear(12, 4))
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def weight_normed():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(12, 4)))


# what makes the model -> names of the parameters that it has as codes
KEEPING_WEIGHTS = {
    "used by the parent": (Bypassing, {"first.weight", "first.bias"}),
    "no layer of torch": (Multiplying, set()),
    "attention of torch": (Attending, set()),
    "parametrised": (parametrized, set()),
    "with a hook": (weight_normed, set()),
}


@pytest.mark.filterwarnings(
    "ignore:`torch.nn.utils.weight_norm` is deprecated", "ignore:The tensor attribute"
)
@pytest.mark.parametrize("name", KEEPING_WEIGHTS)
def test_export_keeps_weights_in_float32(name):
    """Round weights in every call if their layer does not use them unchanged in its matmul."""
    make, names = KEEPING_WEIGHTS[name]
    model = filled(make(), *numbers(4, 12))
    program = cpt.export(model, numbers(2, 12))
    codes = {
        key.removesuffix(".codes")
        for key in program.state_dict
        if key.endswith(".codes")
    }
    assert codes == names
    assert torch.equal(
        program.module()(*numbers(5, 12)), evaluated(model, numbers(5, 12), 8)
    )


def test_export_accepts_parametrised_layers():
    model = filled(perceptron(), *numbers(4, 12))
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    model.eval()
    program = cpt.export(model, numbers(2, 12))
    assert torch.equal(
        program.module()(*numbers(5, 12)), evaluated(model, numbers(5, 12), 8)
    )


@pytest.mark.parametrize("layer", [nn.ConvTranspose2d, Standardised])
def test_export_requires_running_range_of_intercepted_layer(layer):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = cpt.quantize_(nn.Sequential(layer(3, 4, 3), nn.ReLU()))
    refused("has no running range of its", cpt.export, model.eval(), (x,), 8)
    model = filled(nn.Sequential(layer(3, 4, 3), nn.ReLU()), x)
    with torch.no_grad():
        assert torch.equal(
            cpt.export(model, (x,), 8).module()(x), evaluated(model, (x,), 8)
        )
