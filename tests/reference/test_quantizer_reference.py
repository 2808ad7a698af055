"""Reference vectors of the authors' code: quantisers, gradients, running ranges, layers."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import dgl.nn
import numpy as np
import pytest
import torch
from helpers import quantize_gradient, to_dgl
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfAttention

from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv, SAGEConv
from cpt_core.quantization.convert import QuantConfig, quantize_
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.roles import Quantizer
from cpt_core.quantization.rounding import num_steps
from cpt_core.quantization.scheduler import precision
from cpt_extras.formats.tensor_rounding import quantize
from cpt_extras.kernels import backend
from cpt_extras.kernels.operators import range_of

GRANULARITY_OF = {
    "first_dim_rows": "per_channel",
    "whole_tensor": "per_tensor",
    "flat_all": "per_tensor",
    "batch_mean": "per_sample_mean",
    "last_dim_rows": "per_row",
    "last_dim_reduce0": "per_position",
}
VALUE_ATOL, FORWARD_ATOL, BACKWARD_ATOL = 1e-6, 2e-6, 1e-5


@pytest.fixture(params=["reference", "cpp"], autouse=True)
def each_backend(request):
    """Run all vectors with every CPU backend."""
    if request.param == "cpp":
        request.getfixturevalue("cpp_kernels")
    with backend.reference() if request.param == "reference" else nullcontext():
        yield


@pytest.fixture(scope="module")
def reference(reference_dir):
    return json.loads((reference_dir / "quantizer.json").read_text())


def cases(reference, part, *layers):
    """Return the vectors of a part of the file, optionally of some layers; fail without any."""
    found = [
        case
        for case in reference.get(part, ())
        if not layers or case["layer"] in layers
    ]
    assert found, f"the reference holds no vector of {', '.join(layers) or part}"
    return found


def tensor(values, shape=None):
    result = torch.tensor(values, dtype=torch.float32)
    return result if shape is None else result.reshape(shape)


def differs(found, expected, atol):
    expected = np.asarray(expected, dtype=np.float32)
    found = (
        found.detach().numpy().reshape(expected.shape)
    )  # ranges may differ in dimensions of size 1
    return not np.allclose(found, expected, rtol=0, atol=atol, equal_nan=True)


def test_quantize_matches_reference_vectors(reference):
    wrong = []
    for case in cases(reference, "quantize"):
        quantizer = Quantizer(GRANULARITY_OF[case["kind"]])
        x = tensor(case["input"], case["shape"])
        low, width = range_of(x, quantizer.grid)
        found = {
            "output": quantize(x, case["bits"], quantizer),
            "min": low,
            "range": width,
        }
        wrong += [
            (case["id"], k)
            for k, value in found.items()
            if differs(value, case[k], VALUE_ATOL)
        ]
    assert wrong == []


def test_quantize_gradient_matches_reference_vectors(reference):
    wrong = []
    for case in cases(reference, "quantize_grad"):
        x = torch.zeros(case["shape"], requires_grad=True)
        quantizer = Quantizer(GRANULARITY_OF[case["kind"]])
        y = quantize_gradient(x, torch.tensor(num_steps(int(case["bits"]))), quantizer)
        y.backward(tensor(case["upstream"], case["shape"]))
        if not torch.equal(y, x) or differs(x.grad, case["output"], VALUE_ATOL):
            wrong.append(case["id"])
    assert wrong == []


def test_running_range_matches_reference_vectors(reference):
    wrong = []
    for case in cases(reference, "running"):
        roles = {"input": Quantizer("per_tensor", running=True)}
        layer = LayerPrecision(roles, running_start="zero")
        for i, batch in enumerate(case["train"]):
            layer.set_bits(int(batch["bits"]), None)
            found = {"output": layer.quantize_operand("input", tensor(batch["input"]))}
            found["running_min"], found["running_range"], _ = layer.running_input
            wrong += [
                (case["id"], i, k)
                for k, v in found.items()
                if differs(v, batch[k], VALUE_ATOL)
            ]
        layer.eval()
        layer.set_bits(int(case["eval_bits"]), None)
        if differs(
            layer.quantize_operand("input", tensor(case["eval_input"])),
            case["eval_output"],
            VALUE_ATOL,
        ):
            wrong.append((case["id"], "eval"))
    assert wrong == []


# Makers of a layer: the layer, how to convert it, its call with what the reference has of the outcome, its gradients


def plain(case):
    state = {"weight": tensor(case["weight"])} | (
        {"bias": tensor(case["bias"])} if case.get("bias") else {}
    )
    out, inner, *kernel = state["weight"].shape
    if kernel:
        layer = nn.Conv2d(
            inner, out, kernel, case["stride"], case["padding"], bias="bias" in state
        )
    else:
        layer = nn.Linear(inner, out, bias="bias" in state)
    layer.load_state_dict(state)
    return (
        layer,
        QuantConfig(),
        lambda layer, x: {"y": layer(x)},
        {f"d{name[0]}": name for name in state},
    )


# where the layers come from -> their classes; all must give the reference's numbers
GRAPH_LAYERS = {
    "ours": (GraphConv, SAGEConv),
    "DGL's": (
        lambda i, o: dgl.nn.GraphConv(i, o, allow_zero_in_degree=True),
        lambda i, o: dgl.nn.SAGEConv(i, o, "mean"),
    ),
}


def graph_layer(case, origin):
    graph_conv, sage_conv = GRAPH_LAYERS[origin]
    if case["layer"] == "graphconv":
        layer = graph_conv(len(case["weight_in_out"]), len(case["bias"]))
        state = {"weight": case["weight_in_out"], "bias": case["bias"]}
        gradients = {"dw": "weight", "db": "bias"}
    else:
        layer = sage_conv(len(case["w_neigh"][0]), len(case["bias"]))
        state = {
            "fc_neigh.weight": case["w_neigh"],
            "fc_self.weight": case["w_self"],
            "fc_self.bias": case["bias"],
        }
        gradients = {
            "dw_neigh": "fc_neigh.weight",
            "dw_self": "fc_self.weight",
            "db": "fc_self.bias",
        }
    layer.load_state_dict({k: tensor(v) for k, v in state.items()})
    adjacency = tensor(case["adjacency_dst_src"])
    destination, source = adjacency.nonzero().T
    if adjacency.shape[0] == adjacency.shape[1]:
        graph = Graph.from_edges(source, destination, len(adjacency))
    else:  # a sampled block: the destinations are the first of the sources
        indptr = torch.cat([torch.zeros(1), adjacency.sum(1).cumsum(0)]).int()
        graph = Graph(indptr, source.int(), adjacency.shape[1])
    edges = to_dgl(graph) if origin == "DGL's" else graph
    config = QuantConfig(aggregation="quantized" if case["quant_agg"] else "fp")
    return layer, config, lambda layer, x: {"y": layer(edges, x)}, gradients


def lstm(case):
    weight, recurrent = tensor(case["W"]), tensor(case["U"])
    layer = nn.LSTM(weight.shape[1], recurrent.shape[1])
    state = {
        "weight_ih_l0": weight,
        "weight_hh_l0": recurrent,
        "bias_ih_l0": tensor(case["b"]),
    }
    layer.load_state_dict(
        {**state, "bias_hh_l0": torch.zeros(len(weight))}
    )  # the authors have one bias

    def call(layer, x):
        y, (_, c) = layer(x, (tensor(case["h0"]), tensor(case["c0"])))
        low, width, _ = layer.precision.running_hidden_l0
        return {"y": y, "cT": c, "U_running_min": low, "U_running_range": width}

    gradients = {"dW": "weight_ih_l0", "dU": "weight_hh_l0", "db": "bias_ih_l0"}
    return layer, QuantConfig(running_start="zero"), call, gradients


def attention(case):
    sizes = {"hidden_size": len(case["x"][0][0]), "num_attention_heads": case["heads"]}
    layer = BertSelfAttention(BertConfig(**sizes, attn_implementation="eager")).eval()
    layer.load_state_dict(
        {f"{k}.{n}": tensor(v) for k, p in case["params"].items() for n, v in p.items()}
    )
    gradients = {f"dW{name[0]}": f"{name}.weight" for name in ("query", "key", "value")}
    return layer, QuantConfig(), lambda layer, x: {"y": layer(x)[0]}, gradients


LAYERS = {
    "plain": (plain, "conv2d", "conv2d_bias", "linear"),
    **{
        f"graph, {origin}": (
            partial(graph_layer, origin=origin),
            "graphconv",
            "sageconv_mean",
        )
        for origin in GRAPH_LAYERS
    },
    "lstm": (lstm, "lstm"),
    "attention": (attention, "bert_self_attention"),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_match_reference_vectors(reference, kind):
    make, *names = LAYERS[kind]
    wrong = []
    for case in cases(reference, "layers", *names):
        layer, config, call, parameters = make(case)
        layer = quantize_(
            layer, replace(config, attention="paper").with_gradient_rounding("nearest")
        )
        x = tensor(case["x"]).requires_grad_()
        with precision(layer, case["bits"], q_grad=case["grad_bits"]):
            found = call(layer, x)
            found["y"].backward(tensor(case["upstream"]))
        gradients = {"dx": x.grad} | {
            name: layer.get_parameter(path).grad for name, path in parameters.items()
        }
        wrong += [
            (case["id"], k)
            for k, value in gradients.items()
            if differs(value, case[k], BACKWARD_ATOL)
        ]
        wrong += [
            (case["id"], k)
            for k, value in found.items()
            if differs(value, case[k], FORWARD_ATOL)
        ]
    assert wrong == []
