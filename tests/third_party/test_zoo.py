"""Models of other libraries: a sample of ``bench.zoo``, and its watcher."""

import pytest
import torch

import cpt_core as cpt
from bench.zoo import LOOPS, Watcher, on_grid, try_model
from bench.zoo_models import MODELS

pytestmark = pytest.mark.weekly

SOME = [("torch", name) for name in MODELS["torch"]]
SOME += [("torchvision", "squeezenet1_1")]
SOME += [
    ("transformers", f"{name}Model")
    for name in (
        "Bert",
        "DebertaV2",
        "GPT2",
        "Llama",
        "Mixtral",
        "Mamba",
        "T5",
        "Whisper",
        "Swin",
    )
]
NAMED = {  # in float32 by name: the products of parametrisations
    "spectral_norm": {"inner.parametrizations.weight.0: mv"},
    "orthogonal": {"inner.parametrizations.weight.0: mm"},
}


@pytest.mark.parametrize(("library", "name"), SOME)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
def test_zoo_model_listed_as_quantized_runs_quantized(library, name):
    row = try_model(library, name, MODELS[library][name], loops=False)
    assert row["finite"]
    assert row["silent"] == row["unknown"] == []
    assert row["macs"] == row["macs of check"] > 0
    assert row["float32"].keys() == NAMED.get(name, set())
    assert row["undecided"] < 0.35, "the watcher could tell little"


def test_zoo_model_works_in_typical_loops():
    assert try_model("torch", "LSTMCell", MODELS["torch"]["LSTMCell"])[
        "loops"
    ] == dict.fromkeys(LOOPS, True)


def test_zoo_watcher_sees_float32_layers():
    model, inputs = MODELS["torch"]["Conv2d, Linear"]()
    model = cpt.quantize_(model, cpt.QuantConfig(float32=("2",)))
    with cpt.precision(model, 2, 2), Watcher(model) as watcher:
        model(*inputs)
    assert {key[::2]: macs for key, macs in watcher.macs.items()} == {
        ("0", True): 15552,
        ("2", False): 5184,
    }


def test_zoo_watcher_recognises_grid_values():
    x = torch.randn(40, 20)
    grid = cpt.quantize(x, 2)
    assert on_grid(grid) is True
    assert on_grid(cpt.quantize(x, 3)) is False
    assert on_grid(x[:6]) is None
    assert on_grid(x[:, :1]) is None
