"""``restore_`` after something else has changed the converted layers: refused before anything is touched, or right."""

import pytest
import torch
from helpers import pictures, small
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from cpt_core.quantization.convert import quantize_, restore_
from cpt_core.quantization.layers import QuantLinear
from cpt_core.quantization.scheduler import precision


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
    with pytest.raises(ValueError, match=f"layer '5' was made a {kind} after quantize_; undo that first"):
        restore_(model)
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
    with pytest.raises(ValueError, match="the model has no quantised layers"):
        restore_(small())
