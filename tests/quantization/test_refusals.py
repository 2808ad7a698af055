"""A model that ``quantize_`` or ``restore_`` refuses is the model that it was."""

import functools

import pytest
import torch
from cpt_core.quantization.operations import QuantOperations
from helpers import pictures, refused, small
from quantization.test_attention import bert, unknown_attention
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from cpt_core.quantization import convert
from cpt_core.quantization.convert import QuantConfig, QuantizationWarning, quantize_, restore_
from cpt_core.quantization.layers import QuantConv2d, QuantizedLayer, QuantLinear
from cpt_core.quantization.lstm import QuantLSTM
from cpt_core.quantization.scheduler import precision


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(8, 4))

    def forward(self, x):
        return x


def net():
    torch.manual_seed(0)
    recurrent = nn.LSTM(4, 4)
    recurrent.flatten_parameters()
    return nn.ModuleDict(
        {"conv": nn.Conv2d(3, 4, 3), "mlp": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "own": Own(),
         "lstm": recurrent}
    )  # fmt: skip


def everything(model):
    """Return all that conversion could leave behind: modules, classes, attributes, hooks, parameters."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = {key: list(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        plain = {k: v if isinstance(v, list | int | float | str | None) else id(v) for k, v in inside.items()}
        found[name] = type(module), plain
    return found, {name: id(p) for name, p in model.named_parameters()}


def hiding(name):
    """A model with a layer that has a forward of its own."""
    model = net()
    layer = model.get_submodule(name)
    layer.forward = functools.partial(type(layer).forward, layer)
    return model


def failing_filter(module, name):
    if name == "lstm":
        raise KeyError("lstm")
    return True


ALREADY = r"converted already; call restore_\(model\) first"
NOTHING = "nothing to quantise: nothing that multiplies in "
REFUSED = {  # what -> model, arguments, and what is said
    "unknown preset": (net, ("cifr",), "unknown preset 'cifr'; choose from all, cifar, imagenet"),
    "pattern without a match": (
        net, (QuantConfig(float32=("own", "head*")),), r"pattern 'head\*' matches no module; similar names: ",
    ),
    "pattern of a model without parts": (
        lambda: nn.Linear(4, 4), (QuantConfig(float32=("own",)),), "matches no module; similar names: none, as it has",
    ),
    "converted already": (lambda: quantize_(net()), (), ALREADY),
    "converted in part": (lambda: nn.Sequential(quantize_(nn.Linear(2, 2)), nn.Linear(2, 2)), (), ALREADY),
    "nothing selected": (net, (None, lambda module, name: False), f"{NOTHING}ModuleDict was selected by filter_fn"),
    "nothing left": (net, (QuantConfig(float32=("*",)),), f"{NOTHING}ModuleDict was selected$"),
    "nothing to convert": (nn.ReLU, (), f"^{NOTHING}ReLU was selected$"),
    "nothing known to multiply": (
        lambda: nn.Sequential(Own()), (), rf"^{NOTHING}Sequential was selected; 1 Own \(its forward names no product\)",
    ),
    "a filter that fails": (net, (None, failing_filter), "lstm"),
    "a forward of its own": (lambda: hiding("lstm"), (), "layer 'lstm' has a forward of its own"),
    "a forward of its own, inside": (lambda: hiding("mlp.2"), (), "layer 'mlp.2' has a forward of its own"),
    "an unknown config": (net, (3,), "config must be QuantConfig or a string or None, got 3"),
    "attention of another kind": (
        unknown_attention, (), r"attention with 'flash_attention_2'.*attn_implementation='eager'",
    ),
    "nothing but a script": (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4))), (), NOTHING),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.filterwarnings("ignore::cpt_core.QuantizationWarning", "ignore:.*torch.jit:Warning")
def test_a_refused_model_is_what_it_was(name):
    make, args, said = REFUSED[name]
    model = make()
    before = everything(model)
    refused(said, quantize_, model, *args, error=(ValueError, KeyError))
    assert everything(model) == before


KINDS = {"conv": QuantConv2d, "linear": QuantLinear, "lstm": QuantLSTM, "attention": QuantOperations}


@pytest.mark.parametrize("stage", [*KINDS, "hooks", "KeyboardInterrupt", "a warning made an error"])
def test_what_fails_midway_leaves_the_model_as_it_was(stage, monkeypatch):
    model = bert() if stage == "attention" else net()
    before = everything(model)

    def fails(*args, **kwargs):
        raise KeyboardInterrupt if stage == "KeyboardInterrupt" else RuntimeError("midway")

    calls, real = [], QuantizedLayer.lengths

    def later(cls, module):
        calls.append(module)
        return real(module) if len(calls) < 2 else fails()

    if stage in KINDS:
        monkeypatch.setattr(KINDS[stage], "lengths", classmethod(later))
    elif stage == "hooks":
        monkeypatch.setattr(convert.coverage, "FirstPass", fails)
    elif stage == "KeyboardInterrupt":
        monkeypatch.setattr(QuantLSTM, "lengths", fails)
    if stage in ("conv", "lstm"):
        calls.append(None)  # there is one of each
    with pytest.raises((RuntimeError, KeyboardInterrupt, QuantizationWarning)):  # warnings are errors in these tests
        quantize_(model)
    assert everything(model) == before
    monkeypatch.undo()
    config = QuantConfig(float32=("own",)) if stage != "attention" else None
    assert everything(restore_(quantize_(model, config))) == before


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("traced", [False, True], ids=["script", "trace"])
def test_a_script_inside_stays_as_it_is(traced):
    torch.manual_seed(0)
    script = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    script = torch.jit.trace(script, torch.ones(1, 4)) if traced else torch.jit.script(script)
    model = nn.Sequential(nn.Linear(4, 4), script, nn.Sequential(script, nn.Linear(4, 4)))
    before, y = everything(model), model(torch.ones(2, 4))
    with pytest.warns(QuantizationWarning, match="33% of the weights stay in float32: 1 "):
        quantize_(model)
    assert [type(model[0]), type(model[2][1]), model[1] is script] == [QuantLinear, QuantLinear, True]
    with precision(model, 16):
        torch.testing.assert_close(model(torch.ones(2, 4)), y, atol=1e-3, rtol=0)
    assert everything(restore_(model)) == before
    assert torch.equal(model(torch.ones(2, 4)), y)


# --- restore_, after something else has changed the converted layers ------------------------------


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Subclass(QuantLinear):
    pass


def removed(layer):
    parametrize.remove_parametrizations(layer, "weight")


def made_a(kind):
    return lambda layer: setattr(layer, "__class__", kind)


CHANGES = {
    "parametrisation": (lambda m: parametrize.register_parametrization(m, "weight", Doubled()), removed),
    "weight norm": (parametrizations.weight_norm, removed),
    "spectral norm": (lambda m: parametrizations.spectral_norm(m).eval(), removed),
    "subclass": (made_a(Subclass), made_a(QuantLinear)),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_what_quantize_did_not_make_is_refused_until_it_is_undone(change):
    model = quantize_(small()).eval()
    put, undo = CHANGES[change]
    put(model[5])  # not the first one: nothing may have happened to that
    kinds = [type(m) for m in model.modules()]
    with precision(model, 4):
        expected = model(pictures())
    kind = type(model[5]).__name__
    refused(f"layer '5' was made a {kind} after quantize_; undo that first", restore_, model)
    assert [type(m) for m in model.modules()] == kinds
    with precision(model, 4):
        assert torch.equal(model(pictures()), expected)
    with precision(model, "float"):
        expected = model(pictures())
    undo(model[5])
    assert [type(m) for m in restore_(model).modules()] == [type(m) for m in small().modules()]
    torch.testing.assert_close(model(pictures()), expected)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("layer", [0, 5])
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("before", [False, True], ids=["after quantize_", "before quantize_"])
def test_norms_that_are_hooks_stay(norm, layer, before):
    plain, model = small().eval(), small().eval()
    norm(plain[layer])
    if before:
        norm(model[layer])
    quantize_(model)
    if not before:
        norm(model[layer])
    plain.load_state_dict(model.state_dict())
    expected = plain(pictures())
    with precision(model, 3):
        assert not torch.allclose(model(pictures()), expected, atol=1e-2)
        model(pictures()).sum().backward()
    with precision(model, "float"):
        assert torch.equal(model(pictures()), expected)
    names = {name for name, p in model.named_parameters() if p.grad is not None}
    assert names == {name for name, _ in plain.named_parameters()}
    assert torch.equal(restore_(model)(pictures()), expected)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


def test_a_model_that_is_not_converted_cannot_be_restored():
    refused("the model has no quantised layers", restore_, small())
