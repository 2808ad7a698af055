"""Models of ``bench.gpu``, on random data in the paper's sizes, and the variants of their training step.

Two variants are baselines of the fused kernels. "plain torch captured" runs the quantisers of the library in its plain
backend instead of Triton, captured as a CUDA graph, so that kernel launches cost it nothing either. "per operation" has
the formulas written as one torch operation after the other, with fresh noise for every gradient, and is not captured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu.stages import LeftOutError
from cpt_core.graphs.layers import GraphConv
from cpt_core.quantization.convert import restore_
from cpt_extras.kernels.backend import reference
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.schema import Recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.session import Session

KINDS = (
    "float32",
    "float32 captured",
    "float32 TF32",
    "float32 captured TF32",
    "quantised",
    "quantised captured",
    "quantised TF32",
    "quantised captured TF32",
    "quantised integer captured",
    "quantised integer shared steps captured",
    "plain torch captured",
    "per operation",
)
DRY_BERT = {"padding": "max", "hidden": 16, "layers": 1, "batch": 4, "train_pairs": 200}


def _paper(dataset: str, model: str, **changes: Any) -> Recipe:
    source_model = changes.pop("like", model)
    return replace(recipe("paper", dataset, source_model), model=model, **changes)


# name -> recipe at full size, recipe of the rehearsal; all with random data of these shapes
MODELS: dict[str, tuple[Callable[[], Recipe], Callable[[], Recipe]]] = {
    "ResNet-20": (
        lambda: _paper("cifar10", "resnet20", like="resnet74"),
        lambda: recipe("smoke", "digits", "resnet8_w8"),
    ),
    "ResNet-74": (
        lambda: _paper("cifar10", "resnet74"),
        lambda: replace(recipe("smoke", "digits", "resnet8_w8"), batch=8),
    ),
    "ResNet-18, ImageNet size": (
        lambda: _paper("imagenet", "resnet18"),
        lambda: replace(recipe("smoke", "digits", "resnet8_w8"), batch=4, flip=True),
    ),
    "mBERT": (
        lambda: _paper("xnli", "bert", batch=32, padding="max"),
        lambda: replace(recipe("smoke", "templates"), **DRY_BERT),
    ),
    "PTB LSTM": (
        lambda: _paper("ptb", "lstm"),
        lambda: replace(recipe("smoke", "pydoc"), length=8, hidden=8, embedding=8),
    ),
    "Arxiv GCN": (
        lambda: _paper("ogbn-arxiv", "gcn"),
        lambda: replace(recipe("smoke", "digits-graph", "gcn"), hidden=8),
    ),
}


def session_of(name: str, kind: str, device: str, dry: bool) -> Session:
    """Return the session of a model for one variant of its step.

    Raises:
        LeftOutError: if the model has no such variant.
    """
    execution = "integer" if "integer" in kind else "simulated"
    r = replace(
        MODELS[name][dry](),
        tf32="TF32" in kind,
        execution=execution,
        shared_steps="shared steps" in kind,
    )
    spec = run_spec(r, "CR", q_max=8, seed=0, scale="smoke" if dry else "paper")
    with environment(CPT_CAPTURE="1" if "captured" in kind else "0"):
        session = Session(load_task_class(spec), spec, device, stand_in=not dry)
    if "captured" in kind and session.capture is None:
        raise LeftOutError(f"steps are not captured: {session.uncaptured_reason}")
    if kind.startswith("float32") or kind == "per operation":
        restore_(session.model)
    if kind == "per operation":
        take_apart(session.model)
    return session


def baseline_of(kind: str) -> str:
    """Return the float32 variant that is captured, and uses TF32, if a variant is and does.

    >>> baseline_of("quantised integer captured")
    'float32 captured'
    """
    shared_words = [word for word in ("captured", "TF32") if word in kind.split()]
    return " ".join(["float32", *shared_words])


def is_quantised(kind: str) -> bool:
    """Return whether steps of this kind run the quantisers of the library."""
    return kind.startswith(("quantised", "plain torch"))


def backend_context(kind: str) -> AbstractContextManager[None]:
    """Return a context with the plain backend for "plain torch", and with the active backend otherwise."""
    return reference() if kind.startswith("plain torch") else nullcontext()


@contextmanager
def environment(**values: str) -> Any:
    """Set environment variables inside the block."""
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


# --- one operation at a time ----------------------------------------------------------------------

BITS, Q_GRAD = 5, 8


def round_plainly(
    x: Tensor, dims: tuple[int, ...], bits: int, noise: bool = False
) -> Tensor:
    """Round to 2**bits values between minimum and maximum over ``dims``."""
    n = 2.0**bits - 1
    low = x.amin(dims, keepdim=True)
    high = x.amax(dims, keepdim=True)
    scale = torch.clamp((high - low) / n, min=1e-8)
    k = (x - low) / scale
    if noise:
        k = k + (torch.rand_like(k) - 0.5)
    return torch.round(torch.clamp(k, 0.0, n)) * scale + low


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...], bits: int) -> Tensor:
        return round_plainly(x, dims, bits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _Behind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, dims: tuple[int, ...]) -> Tensor:
        ctx.dims = dims
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return round_plainly(gradient, ctx.dims, Q_GRAD, noise=True), None


def _all(x: Tensor) -> tuple[int, ...]:
    return tuple(range(x.dim()))


def _operand(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return _Through.apply(x, dims, BITS)


def _tracked(module: nn.Module, x: Tensor) -> Tensor:
    """Quantise the input of a layer, and update the layer's running range."""
    low = x.detach().min()
    module.running_low = 0.9 * module.running_low + 0.1 * low
    module.running_width = 0.9 * module.running_width + 0.1 * (x.detach().max() - low)
    return _operand(x, _all(x))


def _biased(module: nn.Module) -> Tensor | None:
    return None if module.bias is None else _operand(module.bias, (-1,))


class PlainConv2d(nn.Conv2d):
    """A quantised convolution."""

    def forward(self, x: Tensor) -> Tensor:
        y = self._conv_forward(
            _tracked(self, x), _operand(self.weight, (1, 2, 3)), _biased(self)
        )
        return _Behind.apply(y, _all(y))


class PlainLinear(nn.Linear):
    """A quantised linear layer with one gradient range per position."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(
            _tracked(self, x), _operand(self.weight, (-1,)), _biased(self)
        )
        return _Behind.apply(y, (0, -1))


class PlainLSTM(nn.LSTM):
    """A quantised LSTM of one layer, computed step by step."""

    def forward(self, x: Tensor, state: Any = None) -> Any:
        h, c = (
            (s[0] for s in state)
            if state
            else (x.new_zeros(x.shape[1], self.hidden_size) for _ in range(2))
        )
        out = []
        for step in x.unbind(0):
            w, u = (
                _operand(self.weight_ih_l0, (-1,)),
                _operand(self.weight_hh_l0, (-1,)),
            )
            a = nn.functional.linear(
                _tracked(self, step), w, _operand(self.bias_ih_l0, (-1,))
            )
            b = nn.functional.linear(_tracked(self, h), u)
            i, f, g, o = (_Behind.apply(a, (-1,)) + _Behind.apply(b, (-1,))).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            out.append(h)
        return torch.stack(out), (h[None], c[None])


class PlainGraphConv(GraphConv):
    """A quantised graph convolution that sums in float32, normalised by the degrees of both ends."""

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        out, into = (
            d.clamp_min(1).rsqrt().unsqueeze(1)
            for d in (graph.out_degrees, graph.in_degrees)
        )
        h = x * out
        if self._in_feats <= self._out_feats:
            h = graph.aggregate(h)
        h = _operand(h, (-1,)) @ _operand(self.weight, (-1,))
        h = _Behind.apply(h, _all(h))
        if self._in_feats > self._out_feats:
            h = graph.aggregate(h)
        h = _operand(h * into, (-1,)) + _biased(self)
        return _Behind.apply(h, _all(h))


PLAIN = {
    nn.Conv2d: PlainConv2d,
    nn.Linear: PlainLinear,
    nn.LSTM: PlainLSTM,
    GraphConv: PlainGraphConv,
}


def take_apart(model: nn.Module) -> int:
    """Give the layers of a float32 model the plain quantisers, in place; return the number of layers.

    Decoders stay as they are.
    """
    count = 0
    for module in model.modules():
        if type(module) in PLAIN:
            device = next(module.parameters()).device
            module.running_low = module.running_width = torch.zeros((), device=device)
            module.__class__ = PLAIN[type(module)]
            count += 1
    if not count:
        raise LeftOutError("no layer of this model has a plain quantiser")
    return count
