"""Time of a simulated low-precision training step relative to the float32 step: ``python -m bench.step_ratio``.

Both variants run interleaved in one process, one thread, and the ratio of the medians is printed: these ratios are
comparable between machines, the milliseconds are not.  A step is forward, backward and SGD; q cycles from 3 to 8 and
gradients have 8 bits, rounded stochastically.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel

from cpt_core.data.graphs import bidirected
from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv
from cpt_core.models import MODELS
from cpt_core.models.mobilenet import InvertedResidual
from cpt_core.models.retinanet import retinanet
from cpt_core.quantization.convert import QuantConfig, layer_precisions, quantize_


def linear_block() -> nn.Module:
    """Two 768-wide linear layers with GELU."""
    return nn.Sequential(nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 768))


class Outputs(nn.Module):
    """The outputs of an LSTM, without its state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def readme() -> nn.Module:
    """The network of the README's examples."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


SMALL_BERT = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}


class Encoder(nn.Module):
    """One layer of BERT-base, or what is given."""

    def __init__(self, **given: int) -> None:
        super().__init__()
        config = BertConfig(**{"num_hidden_layers": 1, "vocab_size": 2, **given})
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bert(inputs_embeds=x).last_hidden_state


class Detector(nn.Module):
    """RetinaNet, its class logits and box offsets in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.model = retinanet("retinanet", 20)
        for layer in (self.model.head.classification_head.cls_logits, self.model.head.regression_head.bbox_reg):
            nn.init.normal_(layer.weight, std=0.01)  # zero at first: no gradient would come through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.model(x)
        return torch.cat([outputs.logits, outputs.offsets], dim=2)


def arxiv() -> tuple[Graph, torch.Tensor]:
    """A random graph of OGBN-Arxiv's size, popular nodes and all, and features that need a gradient."""
    nodes, edges = 169_343, 1_166_243
    source, destination = (torch.rand(2, edges, dtype=torch.float64) ** 2 * nodes).long().numpy()
    return bidirected(source, destination, nodes, self_loops=True), torch.randn(nodes, 128, requires_grad=True)


def random(*shape: int) -> Callable[[], tuple[torch.Tensor]]:
    """Random input of a shape."""
    return lambda: (torch.randn(shape),)


# name -> (model, its inputs, rounds, quantised variants)
Case = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], int, dict[str, QuantConfig]]
PLAIN = {"simulated": QuantConfig()}
BOTH = {"FP-Agg": QuantConfig(), "Q-Agg": QuantConfig(aggregation="quantized")}
CASES: dict[str, Case] = {
    "ResNet-20, batch 128": (lambda: MODELS["resnet20"](3, 32, 10), random(128, 3, 32, 32), 7, PLAIN),
    "ResNet-18, batch 8, 112 pixels": (lambda: MODELS["resnet18"](3, 112, 1000), random(8, 3, 112, 112), 9, PLAIN),
    "ResNet-74, batch 32": (lambda: MODELS["resnet74"](3, 32, 10), random(32, 3, 32, 32), 7, PLAIN),
    "MobileNet-V2 block, 64x32x16x16": (lambda: InvertedResidual(32, 32, 6, 1), random(64, 32, 16, 16), 25, PLAIN),
    "RetinaNet, batch 4, 320 pixels": (Detector, random(4, 3, 320, 320), 5, PLAIN),
    "linear block 768, 2048 rows": (linear_block, random(2048, 768), 15, PLAIN),
    "LSTM 800, 35 steps, batch 20": (lambda: Outputs(800), random(35, 20, 800), 9, PLAIN),
    "LSTM 200, 35 steps, batch 20": (lambda: Outputs(200), random(35, 20, 200), 25, PLAIN),
    "BERT layer 768, 128 tokens, batch 16": (Encoder, random(16, 128, 768), 7, PLAIN),
    "small BERT, 2 x 128, 64 tokens, batch 16": (lambda: Encoder(**SMALL_BERT), random(16, 64, 128), 25, PLAIN),
    "README's network, batch 16": (readme, random(16, 64), 200, PLAIN),
    "GCN layer 128 -> 512, arxiv size": (lambda: GraphConv(128, 512), arxiv, 7, BOTH),
}


def stepper(model: nn.Module, inputs: tuple[Any, ...], config: QuantConfig | None) -> Callable[[], float]:
    """Return a function that runs one training step and returns its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    layers = list(layer_precisions(quantize_(model, config)).values()) if config else []
    bits = cycle(range(3, 9))

    def step() -> float:
        start = time.perf_counter()
        q = next(bits)
        for layer in layers:
            layer.set_bits(q, 8)
        model(*inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="part of a case's name")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    tuned = "MALLOC_MMAP_THRESHOLD_" in os.environ
    print(f"torch {torch.__version__}, 1 thread, allocator thresholds {'set' if tuned else 'NOT set (see Makefile)'}")
    for name, (make, inputs_of, rounds, configs) in CASES.items():
        if only not in name:
            continue
        torch.manual_seed(0)
        inputs = inputs_of()
        variants = {"float32": stepper(make(), inputs, None)}
        variants |= {key: stepper(make(), inputs, config) for key, config in configs.items()}
        times: dict[str, list[float]] = {key: [] for key in variants}
        for i in range(rounds + 1):
            for key, step in variants.items():
                seconds = step()
                if i:  # the first round warms up
                    times[key].append(seconds)
        medians = {key: statistics.median(t) for key, t in times.items()}
        for key in configs:
            ratio = medians[key] / medians["float32"]
            told = f"{name}, {key}" if len(configs) > 1 else name
            print(f"{told:<41} {ratio:5.2f}x   float32 {medians['float32'] * 1e3:7.1f} ms, {rounds} rounds", flush=True)


if __name__ == "__main__":
    main()
