"""What ``torch.func`` can do with quantised layers, and what it is told it cannot."""

import pytest
import torch
from torch import nn
from torch.func import grad, jvp, vjp, vmap

import cpt_core as cpt

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script. is deprecated", "ignore:There is a performance drop because"
)
LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "convolution": (lambda: nn.Conv2d(4, 3, 2), (5, 4, 3, 3)),
    "lstm": (lambda: nn.LSTM(4, 3), (5, 2, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 1, 8, batch_first=True), (2, 3, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("what", "transform"),
    [
        ("grad", lambda f, x: grad(f)(x)),
        ("grad", lambda f, x: vjp(f, x)),
        ("grad", lambda f, x: grad(lambda x: vmap(f)(x[None]).sum())(x)),
        ("jvp", lambda f, x: jvp(f, (x,), (x,))),
    ],
    ids=["grad", "vjp", "grad of vmap", "jvp"],
)
def test_differentiating_is_refused_with_the_way_out(name, what, transform):
    make, shape = LAYERS[name]
    model = cpt.quantize_(nn.ModuleDict({"layer": make()}))["layer"]
    with (
        cpt.precision(model, 4, 8),
        pytest.raises(RuntimeError, match=rf"torch.func \({what}\) cannot .*loss.backward"),
    ):
        transform(lambda x: (y[0] if isinstance(y := model(x), tuple) else y).sum(), torch.randn(shape))
    if name == "linear":
        with cpt.precision(model, "float"):
            transform(lambda x: model(x).sum(), torch.randn(shape))


def test_vmap_runs_in_evaluation_alone():
    model, x = cpt.quantize_(nn.Sequential(nn.Linear(4, 3))), torch.randn(6, 5, 4)
    with cpt.precision(model, 4):
        with pytest.raises(RuntimeError, match="vmap cannot train quantised layers"):
            vmap(model)(x)
        model(x)
        model.eval()
        # products of other shapes may be summed in another order
        torch.testing.assert_close(vmap(model)(x), torch.stack([model(row) for row in x]), rtol=1e-6, atol=1e-6)
