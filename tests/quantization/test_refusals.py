"""Models that ``quantize_`` or ``restore_`` rejects: they stay unchanged."""

import functools

import pytest
import torch
from helpers import pictures, refused, reported_operations, small
from operation_samples import bert
from quantization.test_attention import unknown_attention
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from cpt_core.quantization import convert
from cpt_core.quantization.convert import QuantConfig, precision_of, quantize_, restore_
from cpt_core.quantization.scheduler import precision
from cpt_extras.diagnostics import float32_weights
from cpt_extras.diagnostics.float32_weights import QuantizationWarning


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
        {
            "conv": nn.Conv2d(3, 4, 3),
            "mlp": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
            "own": Own(),
            "lstm": recurrent,
        }
    )


def everything(model):
    """Return all that conversion could change: modules, classes, attributes, hooks, parameters."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = {
            key: list(value) if isinstance(value, dict) else value
            for key, value in vars(module).items()
        }
        plain = {
            k: v if isinstance(v, list | int | float | str | None) else id(v)
            for k, v in inside.items()
        }
        found[name] = type(module), plain
    return found, {name: id(p) for name, p in model.named_parameters()}


def holding(value):
    """Return a model with an attribute that conversion would hide."""
    model = net()
    model["own"].precision = value
    return model


def failing_filter(module, name):
    if name == "lstm":
        raise KeyError("lstm")
    return True


ALREADY = r"converted already; call restore_\(model\) first"
NOTHING = "nothing to quantise: nothing that multiplies in "
REFUSED = {  # what -> model, arguments, and what is said
    "unknown preset": (
        net,
        ("cifr",),
        "unknown preset 'cifr'; choose from all, cifar, imagenet",
    ),
    "pattern without a match": (
        net,
        (QuantConfig(float32=("own", "head*")),),
        r"pattern 'head\*' matches no module; similar names: ",
    ),
    "pattern of a model without parts": (
        lambda: nn.Linear(4, 4),
        (QuantConfig(float32=("own",)),),
        "matches no module; similar names: none, as it has",
    ),
    "converted already": (lambda: quantize_(net()), (), ALREADY),
    "converted in part": (
        lambda: nn.Sequential(quantize_(nn.Linear(2, 2)), nn.Linear(2, 2)),
        (),
        ALREADY,
    ),
    "nothing selected": (
        net,
        (None, lambda module, name: False),
        f"{NOTHING}ModuleDict was selected by filter_fn",
    ),
    "nothing left": (
        net,
        (QuantConfig(float32=("*",)),),
        f"{NOTHING}ModuleDict was selected$",
    ),
    "nothing to convert": (nn.ReLU, (), f"^{NOTHING}ReLU was selected$"),
    "nothing but a list": (
        lambda: nn.Sequential(nn.ParameterList([torch.ones(4, 4)])),
        (),
        rf"^{NOTHING}Sequential was selected; 1 Param",
    ),
    "a filter that fails": (net, (None, failing_filter), "lstm"),
    "a name that is taken": (
        lambda: holding(2.0),
        (),
        r"Own\.precision has a name .* rename it",
    ),
    "a parameter's name that is taken": (
        lambda: holding(nn.Parameter(torch.ones(4))),
        (),
        r"Own\.precision has a name",
    ),
    "a module's name that is taken": (
        lambda: holding(nn.ReLU()),
        (),
        r"Own\.precision has a name",
    ),
    "an unknown config": (
        net,
        (3,),
        "config must be QuantConfig or a string or None, got 3",
    ),
    "attention of another kind": (
        unknown_attention,
        (),
        r"attention with 'flash_attention_2'.*attn_implementation='eager'",
    ),
    "nothing but a script": (
        lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4))),
        (),
        NOTHING,
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
@pytest.mark.filterwarnings(
    "ignore::cpt_core.QuantizationWarning", "ignore:.*torch.jit:Warning"
)
def test_quantize_rejects_model_without_changing_it(name):
    make, args, said = REFUSED[name]
    model = make()
    before = everything(model)
    refused(said, quantize_, model, *args, error=(ValueError, KeyError))
    assert everything(model) == before


@pytest.mark.parametrize(
    "stage", ["precision", "hooks", "KeyboardInterrupt", "a warning made an error"]
)
@pytest.mark.parametrize("make", [net, bert])
def test_quantize_failing_midway_restores_the_model(make, stage, monkeypatch):
    model, calls = make(), []
    before = everything(model)

    def failing(real):
        def later(*args, **kwargs):
            calls.append(args)
            if len(calls) == 3:
                raise (
                    KeyboardInterrupt
                    if stage == "KeyboardInterrupt"
                    else RuntimeError("midway")
                )
            return real(*args, **kwargs)

        return later

    if stage == "hooks":
        monkeypatch.setattr(convert, "Interception", failing(convert.Interception))
    elif stage == "a warning made an error":
        monkeypatch.setattr(float32_weights, "MIN_NOTABLE_SHARE", -1.0)
    else:
        monkeypatch.setattr(convert, "_add_precision", failing(convert._add_precision))
    with pytest.raises(
        (RuntimeError, KeyboardInterrupt, QuantizationWarning)
    ):  # warnings are errors in these tests
        quantize_(model)
    assert everything(model) == before
    monkeypatch.undo()
    assert everything(restore_(quantize_(model))) == before


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning"
)
@pytest.mark.parametrize("traced", [False, True], ids=["script", "trace"])
def test_quantize_leaves_scripted_children_unchanged(traced):
    torch.manual_seed(0)
    script = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    script = (
        torch.jit.trace(script, torch.ones(1, 4))
        if traced
        else torch.jit.script(script)
    )
    model = nn.Sequential(
        nn.Linear(4, 4), script, nn.Sequential(script, nn.Linear(4, 4))
    )
    before, y = everything(model), model(torch.ones(2, 4))
    with pytest.warns(
        QuantizationWarning, match="33% of the weights stay in float32: 1 "
    ):
        quantize_(model)
    assert None not in (precision_of(model[0]), precision_of(model[2][1]))
    assert model[1] is script
    with precision(model, 16):
        torch.testing.assert_close(model(torch.ones(2, 4)), y, atol=1e-3, rtol=0)
    assert everything(restore_(model)) == before
    assert torch.equal(model(torch.ones(2, 4)), y)


# --- what else changes layers -----------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Subclass(nn.Linear):
    pass


def put_doubled(layer):
    parametrize.register_parametrization(layer, "weight", Doubled())


def remove_parametrisation(layer):
    parametrize.remove_parametrizations(layer, "weight")


CHANGES = {
    "parametrisation": (put_doubled, remove_parametrisation),
    "weight norm": (parametrizations.weight_norm, remove_parametrisation),
    "spectral norm": (
        lambda m: parametrizations.spectral_norm(m).eval(),
        remove_parametrisation,
    ),
    "subclass": (
        lambda m: setattr(m, "__class__", Subclass),
        lambda m: setattr(m, "__class__", nn.Linear),
    ),
    "forward of the instance": (
        lambda m: setattr(m, "forward", functools.partial(type(m).forward, m)),
        lambda m: delattr(m, "forward"),
    ),
}


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize(
    "order",
    ["before quantize_", "after quantize_", "after quantize_, undone before restore_"],
)
def test_quantize_handles_layers_changed_around_conversion(change, order):
    """Quantise and restore layers that were parametrised or changed before or after quantize_."""
    put, undo = CHANGES[change]
    plain, model = small().eval(), small().eval()
    put(plain[5])
    if order == "before quantize_":
        put(model[5])
    quantize_(model)
    if order != "before quantize_":
        put(model[5])
    plain.load_state_dict(model.state_dict())
    expected = plain(pictures())
    with precision(model, "float"):
        assert torch.equal(model(pictures()), expected)
    with precision(model, 4):
        layers = [
            operation.layer
            for operation in reported_operations(model, pictures())
            if operation.precision is not None
        ]
        assert layers == ["0", "3", "5"]
        assert not torch.equal(model(pictures()), expected)
    if order.endswith("restore_"):
        undo(model[5])
        undo(plain[5])
    assert torch.equal(restore_(model)(pictures()), plain(pictures()))
    assert [type(m).__name__ for m in model.modules()] == [
        type(m).__name__ for m in plain.modules()
    ]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("layer", [0, 5])
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize(
    "before", [False, True], ids=["after quantize_", "before quantize_"]
)
def test_quantize_keeps_norms_implemented_as_hooks(norm, layer, before):
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


def test_restore_rejects_unconverted_model():
    refused("the model has no quantised layers", restore_, small())
