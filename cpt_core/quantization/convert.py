"""Make any model trainable at low precision, in place: ``quantize_``, ``restore_``.

>>> model = quantize_(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)), QuantConfig(float32=("1",)))
>>> list(layer_precisions(model))
['0']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from cpt_core.checks import choose, declared, unsharded, whole
from cpt_core.formats.format import Format
from cpt_core.formats.ladder import FormatLadder
from cpt_core.formats.quantizer import ROUNDINGS, Quantizer
from cpt_core.quantization import coverage
from cpt_core.quantization.fake_quantize import INT64
from cpt_core.quantization.in_force import ladders_of
from cpt_core.quantization.layers import Changed, QuantizedLayer
from cpt_core.quantization.precision import EXECUTIONS, LayerPrecision
from cpt_core.quantization.quantizers import QUANTIZERS, quantizer_of
from cpt_core.quantization.running import RUNNING_STARTS

FilterFn = Callable[[nn.Module, str], bool]
AGGREGATIONS = ("fp", "quantized")
Ladder_ = FormatLadder | Mapping[int, Format | Quantizer | str]
Ladder = Ladder_ | Mapping[str, Ladder_] | None


@dataclass(frozen=True)
class QuantConfig:
    """What is quantised and how.

    Args:
        float32: patterns (as for file names, ``*.downsample.0``) of the names of modules that stay in float32, with
            all that they contain; a pattern that matches no module is an error.
        quantizers: the quantiser of every role, see ``QUANTIZERS``.
        running_start: "corrected" or the authors' "zero", see ``LayerPrecision``.
        seed: of the noise of stochastic rounding.
        aggregation: sums over neighbours in graph convolutions: "fp" (FP-Agg, float32) or "quantized" (Q-Agg).
        execution: "simulated", in float32; "integer", on codes of 8 bits where a product has an integer form, as
            ``summary`` shows; or "auto", "integer" on CPUs with instructions for such products, but not for
            attention's, which it does not make faster, and "simulated" elsewhere. "integer" runs on all devices, on
            GPUs and some CPUs slower than float32: a warning says so. More than 8 bits, and float64, are simulated.
        ladder: what the levels of schedules are: a ``FormatLadder``, or level -> format; None is the paper's, where
            level q is the affine grid of q bits. For roles apart role -> ladder, the roles "activation", "weight" and
            "gradient", or instead of that "error" and "weight_gradient"; kept as ``Levels`` of ladders. Formats other
            than affine grids are simulated.
    """

    float32: tuple[str, ...] = ()
    quantizers: Mapping[str, Quantizer] = field(default_factory=lambda: dict(QUANTIZERS), hash=False)
    running_start: str = "corrected"
    seed: int = 0
    aggregation: str = "fp"
    execution: str = "simulated"
    ladder: Ladder = field(default=None, hash=False)

    def __post_init__(self) -> None:
        declared(type(self), {**vars(self), "ladder": None}, parts=True)
        choose("aggregation", self.aggregation, AGGREGATIONS)
        choose("running_start", self.running_start, RUNNING_STARTS)
        whole("seed", self.seed, *INT64)
        choose("execution", self.execution, EXECUTIONS)
        if odd := sorted(set(self.quantizers) ^ set(QUANTIZERS)):
            raise ValueError(
                f"quantizers: missing or unknown roles {', '.join(odd)}; give all of {', '.join(QUANTIZERS)}"
            )
        for quantizer in self.quantizers.values():
            quantizer_of(quantizer)
        object.__setattr__(self, "ladder", ladders_of(self.ladder))

    def with_shared_steps(self) -> QuantConfig:
        """Return a copy with one range per tensor wherever the authors have one per row, channel or position.

        With it all three products of a linear layer, convolution or graph convolution have an integer form, and so have
        the sums over neighbours of Q-Agg, see ``execution``.
        """
        return replace(self, quantizers={k: replace(q, granularity="per_tensor") for k, q in self.quantizers.items()})

    def with_gradient_rounding(self, rounding: str) -> QuantConfig:
        """Return a copy whose gradient quantisers round "nearest" (as tests need) or "stochastic"."""
        choose("rounding", rounding, ROUNDINGS)
        changed = {k: replace(q, rounding=rounding) for k, q in self.quantizers.items() if k.endswith("_grad")}
        return replace(self, quantizers={**self.quantizers, **changed})


# Which layers stay in float32 is not in the paper; these are the authors' choices per experiment.
# Differs: the paper names no layers in float32. CIFAR keeps the classifier there, ImageNet also the stem and shortcuts.
PRESETS: dict[str, QuantConfig] = {
    "all": QuantConfig(),
    "cifar": QuantConfig(float32=("fc",)),
    "imagenet": QuantConfig(float32=("conv1", "*.downsample.0", "fc")),
}


def quantize_(
    model: nn.Module, config: QuantConfig | str | None = None, filter_fn: FilterFn | None = None
) -> nn.Module:
    """Make every product of ``model`` trainable at low precision, in place.

    Parameters stay the same objects, so an optimizer made before stays valid; ``state_dict`` keys stay the same, so a
    float32 checkpoint loads with ``strict=True`` and the other way round. The layers have no precision until a
    ``PrecisionScheduler`` or ``precision(...)`` sets one.

    Args:
        model: any module. ``nn.Conv1d/2d/3d``, ``nn.Linear``, ``nn.LSTM`` and graph convolutions (see ``FORMS``) have
            quantised forms of their own. Every other module whose forward multiplies, attention or whatever it is, runs
            that forward with its products quantised, see ``operations``.
        config: a ``QuantConfig``, the name of a preset ("all", "cifar", "imagenet"), or None for "all".
        filter_fn: ``filter_fn(module, name) -> bool``; False keeps that module in float32.

    Returns:
        The model itself.

    Raises:
        ValueError: for an unknown preset, a pattern that matches nothing, fused attention that cannot be quantised, a
            layer with a ``forward`` of its instance, parameters that are sharded already, or when nothing would be
            converted. After any error the model is what it was, also where a warning is made an error.

    Warns:
        QuantizationWarning: when more than a tenth of the weights stay in float32 unasked, and after the first forward
            pass where products ran that nothing caught.
    """
    declared(quantize_, locals())
    if not isinstance(config, QuantConfig):
        config = PRESETS[choose("preset", "all" if config is None else config, PRESETS)]
    unsharded(model, "call quantize_(model)")
    if any(isinstance(m, LayerPrecision) for m in model.modules()):
        raise ValueError("the model is converted already; call restore_(model) first")
    asked = _left_in_float32(model, config.float32)
    chosen = {}
    for name, module in coverage.convertible(model):
        if name not in asked and (filter_fn is None or filter_fn(module, name)):
            chosen[name] = module
        else:
            asked.add(name)
    if not chosen:
        by = "" if filter_fn is None else " by filter_fn"
        others = "".join(f"; {count} {what}" for what, count in coverage.in_float32(model, asked)[1].items())
        raise ValueError(
            f"nothing to quantise: nothing that multiplies in {type(model).__name__} was selected{by}{others}"
        )
    forms: dict[str, Any] = {name: coverage.form_of(module) for name, module in chosen.items()}
    for name, module in chosen.items():  # before the first is changed
        forms[name].check(module)
        if "forward" in vars(module):
            raise ValueError(
                f"layer {name!r} has a forward of its own, put on this one object (accelerate's hooks do so), which "
                "would run instead of the quantised one; call quantize_ before that, or leave the layer in float32"
            )
    own = {n: m for n, m in model.named_modules() if n not in asked and not type(m).__module__.startswith("torch.nn.")}
    unseen = [name for name, module in own.items() if coverage.names_a_product(module, coverage.UNSEEN)]
    try:
        # the noise of layers with a form of their own does not depend on what else there is to convert
        last = [name for name, form in forms.items() if form.CATCHES and not form.by_feature(chosen[name])]
        for index, name in enumerate([*(n for n in chosen if n not in set(last)), *last]):
            module = chosen[name]
            forms[name].from_float(module, config, _key(config.seed, index))
            module.precision.name = name  # type: ignore[union-attr]
        _leave_out(model)
        coverage.FirstPass(model, asked, unseen)
        coverage.warn_of_float32(model, asked)
    except BaseException:
        _undo(model)
        raise
    return model


def _left_in_float32(model: nn.Module, patterns: tuple[str, ...]) -> set[str]:
    """Return the names of the modules that patterns name, with all that they contain; ValueError for a useless one."""
    names, parts = [name for name, _ in model.named_modules() if name], coverage.parts_of_wholes(model)
    asked: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            near = get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3] or ["none, as it has no parts"]
            raise ValueError(f"float32 pattern {pattern!r} matches no module; similar names: {', '.join(near)}")
        if all(name in parts for name in hits):  # a part of a layer that is quantised as a whole cannot stay behind
            raise ValueError(f"float32 pattern {pattern!r} matches part of {parts[hits[0]] or 'the model'!r}; name it")
        asked |= {name for name in names if any(name == hit or name.startswith(f"{hit}.") for hit in hits)}
    return asked


def restore_(model: nn.Module) -> nn.Module:
    """Undo ``quantize_``: the original classes again, the same parameters.

    Raises:
        ValueError: when nothing is converted, or something has changed the class of a converted layer since, as a
            parametrisation does; the model is unchanged then.
    """
    declared(restore_, locals())
    converted = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    if not converted:
        raise ValueError("the model has no quantised layers")
    for name, layer in converted.items():
        if "FLOAT" not in vars(type(layer)):  # quantize_ did not make it
            raise ValueError(
                f"layer {name!r} was made a {type(layer).__name__} after quantize_; undo that first "
                "(a parametrisation with torch.nn.utils.parametrize.remove_parametrizations)"
            )
    _undo(model)
    return model


def _undo(model: nn.Module) -> None:
    for module in list(model.modules()):
        coverage.forget_first_pass(module)
        if isinstance(module, Changed):
            module.to_float()


def _leave_out(model: nn.Module) -> None:
    """Let what stays in float32, inside a module whose products are caught, keep its own to itself."""
    outer = [name for name, m in model.named_modules() if isinstance(m, QuantizedLayer) and m.CATCHES]
    if not outer:
        return
    from cpt_core.quantization.operations import InFloat32, made

    for name, module in list(model.named_modules()):
        inside = any(name.startswith(f"{o}.") or (o == "" and name) for o in outer)
        if inside and not isinstance(module, QuantizedLayer):
            if isinstance(module, ParametrizationList) or coverage.form_of(module) is not None:
                module.__class__ = made(InFloat32, type(module))


def layer_precisions(model: nn.Module) -> dict[str, LayerPrecision]:
    """Return the precision of every quantised layer by the layer's name; ValueError when there is none.

    Without modules that turned out to multiply nothing in their own forward, see ``operations``.
    """
    return {name: p for name, p in all_precisions(model).items() if p.listed}


def all_precisions(model: nn.Module) -> dict[str, LayerPrecision]:
    """Return the same of every module that was converted."""
    declared(layer_precisions, {"model": model})
    found = {n: m.precision for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    if not found:
        raise ValueError("the model has no quantised layers; call quantize_(model) first")
    return found


def _key(seed: int, index: int) -> int:
    generator = torch.Generator().manual_seed(seed)
    return int(torch.randint(0, 2**31, (index + 1,), generator=generator, device="cpu")[index]) << 20
