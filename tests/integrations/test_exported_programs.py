"""Models exported for inference: int8 weights, run by torch alone, with equal outputs."""

import copy
import operator
import sys
from typing import Any, NamedTuple

import pytest
import torch
from helpers import Standardised, identical, pictures, refused, run_command, small
from torch import nn
from torch.nn import functional

import cpt_core as cpt
from cpt_core.numerics import NUMERICS
from cpt_core.quantization.convert import layer_precisions

pytestmark = pytest.mark.slow


def numbers(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return (3 * torch.randn(shape, generator=generator),)


def words(n):
    return torch.arange(6 * n).view(n, 6) % 20, torch.ones(n, 6, dtype=torch.int64)


def perceptron(dtype=torch.float32):
    layers = nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5, bias=False)
    return nn.Sequential(*layers).to(dtype)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def decoder():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=20,
        bos_token_id=0,
        eos_token_id=1,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
    )
    return transformers.LlamaForCausalLM(config)


# --- models of which a weight is not an int8 operand of its own layer -----------------------------


class Bypassing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 4), nn.Linear(4, 3)

    def forward(self, x):
        return functional.linear(self.first(x), self.second.weight)


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


def parametrised():
    model = nn.Sequential(nn.Linear(12, 4))
    nn.utils.parametrizations.weight_norm(model[0])
    return model


def with_hook():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(12, 4)))


def convolving(layer):
    return lambda: nn.Sequential(layer(3, 4, 3), nn.ReLU())


class Case(NamedTuple):
    """A model, inputs that it is trained and exported on, and others that it is compared on.

    ``codes`` are the names of the parameters that must be int8 codes; None leaves that open. ``close`` allows for
    gates or sums of another kernel.
    """

    build: Any
    example: tuple
    inputs: tuple
    bits: int = 8
    config: Any = None
    codes: set | None = None
    close: bool = False


SHARED = cpt.QuantConfig().with_shared_steps().quantizers
PER_SAMPLE = cpt.quantization.Quantizer("per_sample_mean")
RUNNING = cpt.quantization.Quantizer("per_tensor", running=True)
OWN_RANGE = {"quantizers": cpt.quantization.QUANTIZERS | {"conv_input": PER_SAMPLE}}
RUNNING_WEIGHTS = {"quantizers": SHARED | {"linear_weight": RUNNING}}
ROWS, OTHER_ROWS = numbers(4, 12), numbers(5, 12)
PICTURES, LARGER = (pictures(),), (2 * pictures(1, n=6),)
BFLOAT16 = (ROWS[0].bfloat16(),)

# run in a process that has torch alone
PROGRAMS = {
    "perceptron": Case(perceptron, numbers(2, 12), numbers(7, 12)),
    "convolutions": Case(small, PICTURES, (pictures(1, n=5),), 3),
    "recurrent": Case(Recurrent, numbers(2, 4, 6), numbers(2, 4, 6), close=True),
    "decoder": Case(decoder, words(2), words(5), 4),
}
CASES = {
    "authors' ranges": Case(small, PICTURES, LARGER, 4, {"running_start": "zero"}),
    "its own range": Case(small, PICTURES, LARGER, 4, OWN_RANGE),
    "running ranges of weights": Case(small, PICTURES, LARGER, 4, RUNNING_WEIGHTS),
    "layers in float32": Case(small, PICTURES, LARGER, 4, {"float32": ("3",)}),
    "int8": Case(small, PICTURES, LARGER, 8, {"execution": "integer"}, close=True),
    "bfloat16": Case(lambda: perceptron(torch.bfloat16), BFLOAT16, (3 * BFLOAT16[0],)),
    "wide": Case(
        lambda: nn.Sequential(nn.Linear(70_000, 2)),
        numbers(2, 70_000),
        numbers(9, 70_000),
    ),
    "bypassing": Case(
        Bypassing, ROWS, OTHER_ROWS, codes={"first.weight", "first.bias"}
    ),
    "no layer of torch": Case(Multiplying, ROWS, OTHER_ROWS, codes=set()),
    "attention of torch": Case(Attending, ROWS, OTHER_ROWS, codes=set()),
    "parametrised": Case(parametrised, ROWS, OTHER_ROWS, codes=set()),
    "with a hook": Case(with_hook, ROWS, OTHER_ROWS, codes=set()),
    "transposed": Case(
        convolving(nn.ConvTranspose2d), numbers(4, 3, 8, 8), numbers(4, 3, 8, 8)
    ),
    "standardised": Case(
        convolving(Standardised), numbers(4, 3, 8, 8), numbers(4, 3, 8, 8)
    ),
}


def trained(case):
    """Return a converted model with filled running ranges, in evaluation."""
    torch.manual_seed(0)
    model = cpt.quantize_(case.build(), cpt.QuantConfig(**case.config or {}))
    with cpt.precision(model, 8), torch.no_grad():
        for _ in range(3):
            model(*case.example)
    return model.eval()


def evaluated(model, inputs, bits=8):
    with cpt.precision(model, bits), torch.no_grad():
        return model(*inputs)


def run(program, inputs):
    with torch.no_grad():
        return program.module()(*inputs)


ALONE = """
import sys
for name in ("cpt_core", "cpt_extras", "transformers"):
    sys.modules[name] = None  # importing one is an error
import torch
for name, inputs in torch.load("inputs.pt").items():
    torch.save(torch.export.load(f"{name}.pt2").module()(*inputs), f"{name}.pt")
"""


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """Export models; return the programs, and outputs in a process without this package beside those expected."""
    folder, programs, expected = tmp_path_factory.mktemp("programs"), {}, {}
    for name, case in PROGRAMS.items():
        model = trained(case)
        programs[name] = cpt.export(model, case.example, case.bits)
        torch.export.save(programs[name], folder / f"{name}.pt2")
        expected[name] = evaluated(model, case.inputs, case.bits)
    inputs = {name: case.inputs for name, case in PROGRAMS.items()}
    torch.save(inputs, folder / "inputs.pt")
    run_command(sys.executable, "-c", ALONE, cwd=folder)
    outputs = {name: torch.load(folder / f"{name}.pt") for name in PROGRAMS}
    return programs, outputs, expected


def assert_equal(case, y, expected):
    assert y.unique().numel() > 1
    if case.close:
        assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)
    else:
        assert identical([y], [expected])


@pytest.mark.parametrize("name", PROGRAMS)
def test_exported_program_matches_model_in_torch(name, alone):
    """Run programs in a process without this package, and get the outputs of the model."""
    _, outputs, expected = (results[name] for results in alone)
    if name == "decoder":  # which leaves its cache behind, here it has one
        assert expected.past_key_values is not None
        assert type(outputs) is dict
        assert "past_key_values" not in outputs
        outputs, expected = outputs["logits"], expected.logits
    assert_equal(PROGRAMS[name], outputs, expected)


@pytest.mark.filterwarnings(
    "ignore:`torch.nn.utils.weight_norm` is deprecated", "ignore:The tensor attribute"
)
@pytest.mark.parametrize("name", CASES)
def test_exported_program_equals_model(name):
    """Round weights in every call if their layer does not use them unchanged in its matmul."""
    case = CASES[name]
    model = trained(case)
    program = cpt.export(model, case.example, case.bits)
    assert_equal(
        case, run(program, case.inputs), evaluated(model, case.inputs, case.bits)
    )
    names = {
        k.removesuffix(".codes") for k in program.state_dict if k.endswith(".codes")
    }
    assert case.codes is None or names == case.codes
    assert int(program.state_dict["cpt_numerics"]) == NUMERICS


def test_exported_program_stores_int8_weights(tmp_path):
    def build():
        return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))

    model = trained(Case(build, numbers(4, 512), ()))
    program = cpt.export(model, numbers(2, 512))
    files = tmp_path / "program.pt2", tmp_path / "weights.pt"
    torch.export.save(program, files[0])
    torch.save(model.state_dict(), files[1])
    assert files[0].stat().st_size < 0.3 * files[1].stat().st_size
    names = {f"{layer}.{p}.codes" for layer in (0, 2) for p in ("weight", "bias")}
    assert names <= program.state_dict.keys()
    constants = [c for c in program.constants.values() if isinstance(c, torch.Tensor)]
    tensors = [*program.state_dict.values(), *constants]
    assert {x.dtype for x in tensors if x.numel() > 512} == {torch.int8}
    text = program.graph_module.print_readable(print_output=False)
    assert str(tmp_path.parent) not in text


def test_exported_program_contains_only_torch_operations(alone):
    program = alone[0]["convolutions"]
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert {op.namespace for op in called - {operator.getitem}} == {"aten"}
    assert torch.ops.aten.conv2d.default in called
    assert not any("stack_trace" in node.meta for node in program.graph.nodes)


PERCEPTRON = Case(perceptron, ROWS, OTHER_ROWS)


def test_export_accepts_layers_parametrised_after_training():
    model = trained(PERCEPTRON)
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    program = cpt.export(model.eval(), ROWS)
    assert torch.equal(run(program, OTHER_ROWS), evaluated(model, OTHER_ROWS))


def test_export_takes_bits_per_layer_or_schedule():
    model, x = trained(PERCEPTRON), numbers(6, 12)
    by_layer = {"0": 3, "*": 7}
    program = cpt.export(model, x, by_layer)
    assert torch.equal(run(program, x), evaluated(model, x, by_layer))

    def schedule_to(q_max):
        settings = {"q_min": 2, "q_max": q_max, "total_steps": 8, "n_cycles": 1}
        cpt.PrecisionScheduler(model, cpt.make_schedule("CR", **settings))

    schedule_to(5)
    assert torch.equal(run(cpt.export(model, x, "q_max"), x), evaluated(model, x, 5))
    schedule_to(12)
    message = "layer '0' would have 12 bits; codes of a byte hold 8"
    refused(message, cpt.export, model, x, "q_max")


def test_export_takes_keyword_arguments():
    case = PROGRAMS["decoder"]
    model, (tokens, mask) = trained(case), case.example
    program = cpt.export(model, {"attention_mask": mask, "input_ids": tokens}, 4)
    tokens, mask = case.inputs
    with torch.no_grad():
        outputs = program.module()(attention_mask=mask, input_ids=tokens)
    expected = run(cpt.export(model, case.example, 4), case.inputs)
    assert torch.equal(outputs["logits"], expected["logits"])


def test_export_leaves_model_unchanged():
    """Leave the model unchanged, and fix the sizes that `dynamic_shapes` does not name."""
    model, x = trained(PERCEPTRON), numbers(6, 12)
    other, before = copy.deepcopy(model), evaluated(model, x)
    program = cpt.export(model, x, dynamic_shapes=({},))
    assert identical(model.state_dict().values(), other.state_dict().values())
    assert [p.active_levels for p in layer_precisions(model).values()] == [None, None]
    assert torch.equal(evaluated(model, x), before)
    fixed = RuntimeError, AssertionError
    refused("6", program.module(), *numbers(5, 12), error=fixed)
    for m in (model, other):
        m.train()
        with cpt.precision(m, 4, q_grad=8):
            m(*x).square().sum().backward()
    gradients = [[p.grad for p in m.parameters()] for m in (model, other)]
    assert identical(*gradients)


def test_export_rejects_unsupported_bits():
    message = "bits, if not 'q_max', .* a whole number of at least 1 and at most 8"
    model = trained(PERCEPTRON)
    for bits in (0, 9, 24, 2.5, "float", "8", None, {"0": 8, "*": 16}):
        refused(message, cpt.export, model, ROWS, bits)


def test_export_rejects_unsupported_models():
    unconverted = perceptron().eval()
    training = cpt.quantize_(perceptron())
    untrained = cpt.quantize_(perceptron()).eval()
    partly_training = trained(PERCEPTRON)
    partly_training[2].train()
    double = (ROWS[0].double(),)
    doubled = trained(Case(lambda: perceptron(torch.float64), double, ()))
    graphs = cpt.quantize_(nn.ModuleList([cpt.GraphConv(4, 2)])).eval()
    for model, x, message in (
        (unconverted, ROWS, "no quantised layers; call quantize_"),
        (training, ROWS, r"in training mode, .* only evaluates: call model.eval\(\)"),
        (untrained, ROWS, "layer '0' has no running range of its input yet"),
        (partly_training, ROWS, "2 is in training mode"),
        (graphs, (), "layer '0' is a GraphConv, and a program takes no graphs"),
        (doubled, double, r"'0' computes in float64, .* float32: call model.float\(\)"),
    ):
        refused(message, cpt.export, model, x)
    for layer in (nn.ConvTranspose2d, Standardised):
        untrained = cpt.quantize_(convolving(layer)()).eval()
        x = numbers(4, 3, 8, 8)
        refused("has no running range of its", cpt.export, untrained, x)
