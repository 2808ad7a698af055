"""Time of a low-precision training step relative to the float32 step: ``python -m bench.step_ratio``.

Simulated, for every backend of the quantised operator: plain torch, C++, and the whole model through ``torch.compile``;
in int8, ``QuantConfig(execution="integer")``, with the authors' steps and with shared ones. For comparison: unquantised
bfloat16 autocast, and, if torchao is installed (nothing here needs it), its int8 training and its fake quantisation of
linear layers, for models with linear layers only. All variants run interleaved in one process, one thread, and ratios
of medians are printed, with those of minima in brackets: they are comparable between machines, the milliseconds are
not. A step is forward, backward and SGD; q cycles from 3 to 8 and gradients have 8 bits, rounded stochastically.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel

from cpt_core.graphs.graph import Graph
from cpt_core.graphs.layers import GraphConv
from cpt_core.models import MODELS
from cpt_core.models.mobilenet import InvertedResidual
from cpt_core.quantization.convert import QuantConfig, all_precisions, quantize_
from cpt_extras.kernels.backend import backend, reference
from cpt_lab.data.graphs import to_bidirected
from cpt_lab.tasks.retinanet import retinanet


def linear_block() -> nn.Module:
    """Return two 768-wide linear layers with GELU."""
    return nn.Sequential(nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 768))


class Outputs(nn.Module):
    """An LSTM that returns its outputs without its state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def convolutions() -> nn.Module:
    """Return two 3 x 3 convolutions of 64 channels with ReLU."""
    return nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1)
    )


def tiny() -> nn.Module:
    """Return the network of docs/training-loop.md."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


SMALL_BERT = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}


class Encoder(nn.Module):
    """One layer of BERT-base, or an encoder of given sizes."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        config = BertConfig(**{"num_hidden_layers": 1, "vocab_size": 2, **sizes})
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bert(inputs_embeds=x).last_hidden_state


class Detector(nn.Module):
    """RetinaNet with class logits and box offsets in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.model = retinanet("retinanet", 20)
        for layer in (
            self.model.head.classification_head.cls_logits,
            self.model.head.regression_head.bbox_reg,
        ):
            nn.init.normal_(
                layer.weight, std=0.01
            )  # zero at first: no gradient would come through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.model(x)
        return torch.cat([outputs.logits, outputs.offsets], dim=2)


def arxiv() -> tuple[Graph, torch.Tensor]:
    """Return a random graph of OGBN-Arxiv's size, with popular nodes, and features that require a gradient."""
    nodes, edges = 169_343, 1_166_243
    source, destination = (
        (torch.rand(2, edges, dtype=torch.float64) ** 2 * nodes).long().numpy()
    )
    return to_bidirected(source, destination, nodes, self_loops=True), torch.randn(
        nodes, 128, requires_grad=True
    )


def random(*shape: int) -> Callable[[], tuple[torch.Tensor]]:
    """Return a function that makes a random input of a shape."""
    return lambda: (torch.randn(shape),)


@dataclass(frozen=True)
class Case:
    """A model whose training step is timed.

    Attributes:
        make: returns the float32 model.
        inputs: returns the inputs of the model.
        rounds: number of timed rounds of all variants.
        configs: quantisation configs by name.
        compiled: whether ``torch.compile`` is timed as well; deep networks take minutes to compile.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    rounds: int
    configs: dict[str, QuantConfig] = field(default_factory=lambda: {"": QuantConfig()})
    compiled: bool = False


INT8 = "integer", "shared steps"
AUTOCAST, TORCHAO = "bf16 autocast", ("torchao int8", "torchao QAT")
AGGREGATIONS = {"FP-Agg": QuantConfig(), "Q-Agg": QuantConfig(aggregation="quantized")}
CASES = {
    "ResNet-20, batch 128": Case(
        lambda: MODELS["resnet20"](3, 32, 10), random(128, 3, 32, 32), 7
    ),
    "ResNet-20, batch 128, channels last": Case(
        lambda: MODELS["resnet20"](3, 32, 10).to(memory_format=torch.channels_last),
        lambda: (
            torch.randn(128, 3, 32, 32).contiguous(memory_format=torch.channels_last),
        ),
        7,
    ),
    "ResNet-18, batch 8, 112 pixels": Case(
        lambda: MODELS["resnet18"](3, 112, 1000), random(8, 3, 112, 112), 9
    ),
    "ResNet-74, batch 32": Case(
        lambda: MODELS["resnet74"](3, 32, 10), random(32, 3, 32, 32), 7
    ),
    "MobileNet-V2 block, 64x32x16x16": Case(
        lambda: InvertedResidual(32, 32, 6, 1),
        random(64, 32, 16, 16),
        25,
        compiled=True,
    ),
    "RetinaNet, batch 4, 320 pixels": Case(Detector, random(4, 3, 320, 320), 5),
    "convolutions 32x64x32x32": Case(convolutions, random(32, 64, 32, 32), 9),
    "linear block 768, 2048 rows": Case(
        linear_block, random(2048, 768), 15, compiled=True
    ),
    "LSTM 800, 35 steps, batch 20": Case(lambda: Outputs(800), random(35, 20, 800), 9),
    "LSTM 200, 35 steps, batch 20": Case(lambda: Outputs(200), random(35, 20, 200), 25),
    "BERT layer 768, 128 tokens, batch 16": Case(
        Encoder, random(16, 128, 768), 7, compiled=True
    ),
    "multilingual BERT's encoder, 128 tokens, batch 8": Case(
        lambda: Encoder(num_hidden_layers=12), random(8, 128, 768), 3
    ),
    "small BERT, 2 x 128, 64 tokens, batch 16": Case(
        lambda: Encoder(**SMALL_BERT), random(16, 64, 128), 25
    ),
    "tiny, 64-32-10, batch 16": Case(tiny, random(16, 64), 200),
    "GCN layer 128 -> 512, arxiv size": Case(
        lambda: GraphConv(128, 512), arxiv, 7, AGGREGATIONS
    ),
}


def stepper(
    model: nn.Module,
    inputs: tuple[Any, ...],
    config: QuantConfig | None = None,
    variant: str = "",
) -> Callable[[], float]:
    """Return a function that runs one training step and returns its seconds.

    Args:
        model: the float32 model.
        inputs: its inputs.
        config: quantisation config; None for float32.
        variant: name of a column, such as "compiled".
    """
    if config and variant in INT8:
        config = replace(config, execution="integer")
        config = config.with_shared_steps() if variant == INT8[1] else config
    if variant in TORCHAO:
        with_torchao(model, variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    layers = list(all_precisions(quantize_(model, config)).values()) if config else []
    forward = torch.compile(model) if variant == "compiled" else model
    bits = cycle(range(3, 9))

    def step() -> float:
        with reference() if variant == "reference" else nullcontext():
            rounds = (
                torch.autocast("cpu", torch.bfloat16)
                if variant == AUTOCAST
                else nullcontext()
            )
            start = time.perf_counter()
            q = next(bits)
            for layer in layers:
                layer.set_bits(q, 8)
            with rounds:
                y = forward(*inputs)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - start

    return step


def with_torchao(model: nn.Module, variant: str) -> None:
    """Convert the linear layers of a model with torchao: to int8 training, or to fake quantisation at 8 bits."""
    from torchao import quantization as ao

    if variant == TORCHAO[0]:
        from torchao.prototype.quantized_training import int8_mixed_precision_training

        ao.quantize_(model, int8_mixed_precision_training())
        return
    from torchao.quantization import qat

    tokens = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    channels = qat.IntxFakeQuantizeConfig(torch.int8, "per_channel")
    ao.quantize_(
        model,
        qat.QATConfig(activation_config=tokens, weight_config=channels, step="prepare"),
    )


def comparable_variants(model: nn.Module) -> list[str]:
    """Return the variants of other libraries that support a model: torchao converts linear layers only."""
    layers = [
        m
        for m in model.modules()
        if isinstance(m, (nn.Linear, nn.LSTM, nn.Conv2d, GraphConv))
    ]
    is_linear = importlib.util.find_spec("torchao") is not None and all(
        isinstance(m, nn.Linear) for m in layers
    )
    # torch's own LSTM ends with an error in bfloat16 where the processor has no AVX-512
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported() or not any(
        isinstance(m, nn.LSTM) for m in layers
    )
    return [*([AUTOCAST] if has_bfloat16 else ()), *(TORCHAO if is_linear else ())]


def measure(
    variants: Mapping[Any, Callable[[], float]], rounds: int
) -> dict[Any, list[float]]:
    """Return the seconds of every variant in every round, after a warm-up round."""
    times: dict[Any, list[float]] = {key: [] for key in variants}
    for i in range(rounds + 1):
        for key, step in variants.items():
            seconds = step()
            if i:
                times[key].append(seconds)
    return times


def ratio(times: list[float], base: list[float]) -> str:
    """Return the ratio of medians, followed by the ratio of minima in brackets."""
    return f"{statistics.median(times) / statistics.median(base):.2f} ({min(times) / min(base):.2f})"


def main() -> None:
    """Print one line per case and configuration."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument(
        "--fast",
        action="store_true",
        help="leave out torch.compile, which takes minutes",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)

    is_tuned = "MALLOC_MMAP_THRESHOLD_" in os.environ
    thresholds = "set" if is_tuned else "NOT set (see Makefile)"
    print(f"torch {torch.__version__}, 1 thread, allocator thresholds {thresholds}")
    load = os.getloadavg()[0]
    print(f"load of the machine {load:.1f} on {os.cpu_count()} cores\n{backend()}")

    backends = ["reference"]
    if backend().cpu != "reference":
        backends.append(backend().cpu)
    columns = [*backends, "compiled", *INT8, AUTOCAST]
    if importlib.util.find_spec("torchao"):
        columns += TORCHAO
    head = "".join(f"{column:>15}" for column in columns)
    print(f"{'times a float32 step: median (minimum)':<49}{head}")

    for name, case in CASES.items():
        if options.only not in name:
            continue
        times = time_case(case, backends, with_compiled=not options.fast)
        float32 = times["float32", ""]
        median_ms, min_ms = statistics.median(float32) * 1e3, min(float32) * 1e3
        for config_name in case.configs:
            title = f"{name}, {config_name}" if config_name else name
            cells = []
            for column in columns:
                seconds = times.get((config_name, column), times.get(("", column)))
                cells.append(ratio(seconds, float32) if seconds else "-")
            line = "".join(f"{cell:>15}" for cell in cells)
            print(
                f"{title:<49}{line}   float32 {median_ms:.1f} ({min_ms:.1f}) ms",
                flush=True,
            )


def time_case(
    case: Case, backends: list[str], with_compiled: bool
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds of every step of a case, by (name of the config, variant)."""
    torch.manual_seed(0)
    inputs = case.inputs()
    steps = {("float32", ""): stepper(case.make(), inputs)}
    compiled = ["compiled"] if case.compiled and with_compiled else []
    for config_name, config in case.configs.items():
        for variant in (*backends, *compiled, *INT8):
            step = stepper(case.make(), inputs, config, variant)
            steps[config_name, variant] = step
    for variant in comparable_variants(case.make()):
        steps["", variant] = stepper(case.make(), inputs, None, variant)
    return measure(steps, case.rounds)


if __name__ == "__main__":
    main()
