"""Conversion of a model to quantised training, in place, and back: ``quantize_``, ``restore_``.

``QuantConfig`` says what is quantised and how.  ``quantize_`` gives every selected module a ``LayerPrecision`` and
registers hooks on all modules in which matmuls may run; no module or parameter is replaced.

>>> model = quantize_(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)), QuantConfig(float32=("1",)))
>>> list(layer_precisions(model))
['0']
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from cpt_core import extensions
from cpt_core.quantization import op_handlers
from cpt_core.quantization.fake_quantize import INT64
from cpt_core.quantization.fallback_reasons import FallbackReason
from cpt_core.quantization.op_interception import (
    HOOK,
    Interception,
    enter_module,
    excluded_children,
    interception_mode_class,
    leave_module,
)
from cpt_core.quantization.precision import (
    EXECUTION_MODES,
    RUNNING_STARTS,
    LayerPrecision,
)
from cpt_core.quantization.roles import QUANTIZERS, ROUNDINGS, Quantizer, find_quantizer
from cpt_core.validation import check_choice, check_int, check_types

GRAPH_LIBRARIES = {"cpt_core.graphs.layers", "dgl.nn"}
AGGREGATION_MODES = ("fp", "quantized")
ATTENTIONS = ("per_token", "paper")
# kinds of layers that keep the authors' grids
PAPER_LAYERS = ("linear", "conv", "lstm", "graph")


@dataclass(frozen=True)
class QuantConfig:
    """Configuration of quantisation: layers, quantisers per role, execution, number formats.

    Args:
        float32: patterns of module names, such as ``*.downsample.0``, that stay in float32 with all their children; a
            pattern that matches no module is an error.
        quantizers: the quantiser of every role, see ``QUANTIZERS``.
        running_start: "corrected" or the authors' "zero", see ``LayerPrecision``.
        seed: seed of the noise of stochastic rounding.
        aggregation: sums over neighbours in graph convolutions: "fp" (FP-Agg, float32) or "quantized" (Q-Agg).
        execution: "simulated", in float32; "integer", in int8 where a matmul has an integer form; or "auto", in int8
            where the processor is faster with it. See ``cpt_extras.int8.executors``.
        ladder: meaning of the levels of schedules: a ``FormatLadder``, level -> format, or role -> ladder, see
            ``cpt_extras.formats.ladder_rounding.ladders_of``; None: level q is the affine grid of q bits.
        attention: ranges in the self-attention of an encoder such as BERT. "per_token": every operand has a range
            per token, with a zero point, so that padding, masks and caches change no other token. "paper": the
            authors' grids, whose keys have a range per feature over all tokens.
    """

    float32: tuple[str, ...] = ()
    quantizers: Mapping[str, Quantizer] = field(
        default_factory=lambda: dict(QUANTIZERS), hash=False
    )
    running_start: str = "corrected"
    seed: int = 0
    aggregation: str = "fp"
    execution: str = "simulated"
    ladder: Any = field(default=None, hash=False)
    attention: str = "per_token"

    def __post_init__(self) -> None:
        check_types(type(self), {**vars(self), "ladder": None}, parts=True)
        check_choice("aggregation", self.aggregation, AGGREGATION_MODES)
        check_choice("attention", self.attention, ATTENTIONS)
        check_choice("running_start", self.running_start, RUNNING_STARTS)
        check_int("seed", self.seed, *INT64)
        check_choice("execution", self.execution, EXECUTION_MODES)
        wrong_roles = sorted(set(self.quantizers) ^ set(QUANTIZERS))
        if wrong_roles:
            raise ValueError(
                f"quantizers: missing or unknown roles {', '.join(wrong_roles)}; give all of {', '.join(QUANTIZERS)}"
            )
        for quantizer in self.quantizers.values():
            find_quantizer(quantizer)
        if self.ladder is not None:
            object.__setattr__(
                self, "ladder", extensions.load("formats").ladders_of(self.ladder)
            )

    def with_shared_steps(self) -> QuantConfig:
        """Return a copy with one range per tensor wherever the authors have one per row, channel or position.

        All matmuls of linear layers and (graph) convolutions, and the sums of Q-Agg, then have an integer form.
        """
        return replace(
            self,
            quantizers={
                role: replace(quantizer, granularity="per_tensor")
                for role, quantizer in self.quantizers.items()
            },
        )

    def with_zero_points(self) -> QuantConfig:
        """Return a copy with 0 on every grid, also in the paper's layers, as pruned weights need."""
        return replace(
            self,
            quantizers={
                role: replace(quantizer, zero_point=True)
                for role, quantizer in self.quantizers.items()
            },
        )

    def with_gradient_rounding(self, rounding: str) -> QuantConfig:
        """Return a copy with gradients rounded "nearest" (for tests) or "stochastic"."""
        check_choice("rounding", rounding, ROUNDINGS)
        gradient_quantizers = {
            role: replace(quantizer, rounding=rounding)
            for role, quantizer in self.quantizers.items()
            if role.endswith("_grad")
        }
        return replace(self, quantizers={**self.quantizers, **gradient_quantizers})


# Which layers stay in float32 is not in the paper; these are the authors' choices per experiment.
# Differs: the paper names no layers in float32. CIFAR keeps the classifier there, ImageNet also the stem and shortcuts.
QUANT_PRESETS: dict[str, QuantConfig] = {
    "all": QuantConfig(),
    "cifar": QuantConfig(float32=("fc",)),
    "imagenet": QuantConfig(float32=("conv1", "*.downsample.0", "fc")),
    "bert": QuantConfig(attention="paper"),
}


def quantize_(
    model: nn.Module,
    config: QuantConfig | str | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Make every matmul and convolution of ``model`` trainable at low precision, in place; return ``model``.

    Parameters stay the same objects, so an optimizer made before stays valid; ``state_dict`` keys stay the same, so a
    float32 checkpoint loads with ``strict=True`` and the other way round. The layers have no precision until a
    ``PrecisionScheduler`` or ``precision(...)`` sets one. Another model that shares modules with this one, such as a
    teacher, is quantised with it: ``copy.deepcopy`` it first.

    Args:
        model: any module. Its matmuls and convolutions are intercepted wherever they run, see ``op_interception``.
        config: a ``QuantConfig``, the name of a preset ("all", "cifar", "imagenet", "bert"), or None for "all".
        filter_fn: ``filter_fn(module, name) -> bool``; False keeps that module in float32.

    Raises:
        ValueError: for an unknown preset, a pattern that matches nothing, fused attention that cannot be quantised,
            lazy modules that have not run, modules and parameters that already quantise, parameters that are
            sharded already, or when nothing would be converted. After any error, also a warning turned into one, the
            model is unchanged.

    Warns:
        QuantizationWarning: when more than a tenth of the weights stay in float32 without a pattern for them.
    """
    check_types(quantize_, locals())
    if not isinstance(config, QuantConfig):
        config = QUANT_PRESETS[
            check_choice("preset", "all" if config is None else config, QUANT_PRESETS)
        ]
    extensions.services("processes").check_unsharded(model, "call quantize_(model)")
    if is_converted(model):
        raise ValueError("the model is converted already; call restore_(model) first")
    hosts = extensions.services("hosts")
    hosts.load_libraries(model)
    parts = layer_parts(model)
    excluded = _excluded(model, config.float32, parts)
    selected: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name in parts or not (is_convertible(module) or is_uninitialized(module)):
            continue
        if name not in excluded and (filter_fn is None or filter_fn(module, name)):
            selected[name] = module
        else:
            excluded.add(name)
    if not selected:
        reason = "" if filter_fn is None else " by filter_fn"
        float32_modules = hosts.list_float32_modules(model, excluded) or ""
        raise ValueError(
            f"nothing to quantise: no module of {type(model).__name__} that runs a matmul was selected{reason}"
            f"{float32_modules}"
        )
    hosts.check_modules(selected)
    try:
        _convert(model, selected, config, filter_fn)
        hosts.after_conversion(model, excluded)
    except BaseException:
        _undo(model)
        raise
    return model


class ModelMode(interception_mode_class()):  # type: ignore[misc]
    """Function mode of a converted model, defined here so that unpickling a model registers all handlers.

    Attributes:
        float32: patterns of the modules that stay in float32, see ``QuantConfig``.
        filter_fn: argument of ``quantize_``; None in copies.
        issued_warnings: kinds of warnings already issued, shared by the layers of the model.
    """

    def __init__(self, float32: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.float32 = float32
        self.filter_fn: Callable[[nn.Module, str], bool] | None = None
        self.issued_warnings: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a new mode for copies and pickles."""
        return type(self), (self.float32,)

    def excludes(self, module: nn.Module, name: str) -> bool:
        """Return whether the user excluded a module, or one around it, from quantisation when converting."""
        for place in _with_parents(name):
            if any(fnmatchcase(place, pattern) for pattern in self.float32):
                return True
        # parts of a layer are never selected by themselves
        is_part = isinstance(
            module, (nn.ParameterList, nn.ParameterDict, ParametrizationList)
        )
        if self.filter_fn is None or is_part:
            return False
        try:
            return not self.filter_fn(module, name)
        except LookupError:  # a table of names, which lacks the new ones
            return False

    def record_of_excluded(self, module: nn.Module, name: str) -> Interception | None:
        """Return a record without precision for an excluded module that holds weights, or None."""
        if not holds_weights(module) or not self.excludes(module, name):
            return None
        return Interception(self, name, None, op_handlers.module_kind(module), False)


def _convert(
    model: nn.Module,
    selected: Mapping[str, nn.Module],
    config: QuantConfig,
    filter_fn: Callable[[nn.Module, str], bool] | None,
) -> None:
    """Add a precision to the selected modules, and hooks to all modules that may run matmuls."""
    # torch layers come first, so that their noise keys do not depend on the other modules
    order = sorted(selected, key=lambda name: _noise_key_group(selected[name]))
    generator = torch.Generator().manual_seed(config.seed)
    seeds = torch.randint(
        0, 2**31, (len(order),), generator=generator, device="cpu"
    ).tolist()
    keys = dict(zip(order, seeds, strict=True))
    mode = ModelMode(config.float32)
    mode.filter_fn = filter_fn
    if config.execution != "simulated":
        extensions.load("int8")
    for name, module in list(model.named_modules()):
        precision = None
        graph_layer = _graph_layer(module)
        kind = op_handlers.module_kind(module) if graph_layer is None else "graph"
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and kind != "lstm":
            extensions.load("operations")
        if name in selected:
            extensions.load_optional(kind)
            if graph_layer is not None:
                graph_layer.replace_forward(module)
            precision = _add_precision(module, kind, config, keys[name] << 20)
            precision.name = name
            precision.issued_warnings = mode.issued_warnings
        # a mode that is off between the children of a container would lose marks
        is_sequential = isinstance(module, nn.Sequential)
        if name in selected or is_sequential or _may_multiply(module):
            is_paper_attention = (
                config.attention == "paper" and op_handlers.is_paper_attention(module)
            )
            vars(module)[HOOK] = Interception(
                mode, name, precision, kind, is_paper_attention
            )
        if hasattr(module, HOOK) and (is_sequential or has_own_forward(module)):
            add_hooks(module)


def add_hooks(module: nn.Module) -> None:
    """Register the hooks that intercept the operations of ``module``; it has an ``Interception`` already."""
    module.register_forward_pre_hook(enter_module)
    module.register_forward_hook(leave_module, prepend=True, always_call=True)


def _graph_layer(module: nn.Module, is_convertible: bool = True) -> Any:
    """Return the ``GraphLayer`` of a graph convolution; None for other modules.

    With ``is_convertible``, also None for a graph convolution that cannot be converted.
    """
    if not sys.modules.keys() & GRAPH_LIBRARIES:  # no graph convolution can exist
        return None
    from cpt_core.quantization import (
        graph_handlers,  # imported late: few models need it
    )

    return graph_handlers.graph_layer_of(module, is_convertible)


def _add_precision(
    module: nn.Module, kind: str, config: QuantConfig, key: int
) -> LayerPrecision:
    is_paper_layer = kind in PAPER_LAYERS or (
        config.attention == "paper" and op_handlers.is_paper_attention(module)
    )
    roles = _roles(kind, config, is_paper_layer, holds_weights(module))
    if kind == "lstm":
        from cpt_core.quantization import lstm  # imported late: few models need it

        roles = lstm.lstm_roles(module, roles)
    precision = LayerPrecision(roles, key, config.running_start, kind)
    precision.to(next((p.device for p in module.parameters()), None))
    precision.execution = config.execution
    if config.ladder is not None:
        precision.grids = extensions.load("formats").grids_for_module(
            config.ladder, module, kind
        )
    precision.always_runs_matmul = (
        isinstance(module, LAYERS_OF_TORCH) or kind == "graph"
    )
    precision.holds_weights = bool(weights_of(module))
    precision.train(module.training)
    attach_precision(module, precision)
    return precision


def attach_precision(module: nn.Module, precision: LayerPrecision) -> None:
    """Set ``module.precision``, as a child module if ``module`` holds weights and is no container."""
    if holds_weights(module) and not isinstance(module, CONTAINERS):
        module.precision = precision
    else:
        # a container would run a child, so this is a plain attribute
        vars(module)["precision"] = precision


def _roles(
    kind: str, config: QuantConfig, is_paper_layer: bool, has_weights: bool
) -> dict[str, Quantizer]:
    """Return role -> quantiser of a layer of some kind.

    Roles of its kind lose their prefix, "linear_input" is "input" in a linear layer. Operations of other kinds in it
    have a zero point and no running range but a range per vector, or per position of a convolution. An exception is
    the input of a weight that a module computes, see ``op_handlers.weight_op_roles``.
    """
    prefix = f"{kind}_"
    roles = {
        role.removeprefix(prefix): quantizer
        for role, quantizer in config.quantizers.items()
        if role.startswith(prefix)
    }
    roles["bias"] = config.quantizers["bias"]
    if kind == "graph":
        if config.aggregation != "quantized":
            del roles["aggregation"]
        return roles
    if not is_paper_layer:
        roles = {
            role: replace(quantizer, zero_point=True)
            for role, quantizer in roles.items()
        }
        running_quantizer = Quantizer("per_tensor", running=True, zero_point=True)
        roles["untracked_input"] = running_quantizer
        if has_weights:
            roles["masked_input"] = running_quantizer
    if kind in (
        "linear",
        "conv",
    ):  # for weights computed in forward, such as masked ones
        roles["computed_weight"] = replace(
            roles["weight"], running=False, zero_point=True
        )
    for role, quantizer in config.quantizers.items():
        is_other_kind = not role.startswith(prefix)
        if is_other_kind and role.startswith(("linear_", "conv_", "attention_")):
            granularity = "per_row" if quantizer.running else quantizer.granularity
            roles[role] = replace(
                quantizer, granularity=granularity, running=False, zero_point=True
            )
    return roles


# files of torch.nn.modules whose modules run elementwise operations at most
ELEMENTWISE_MODULES = frozenset(
    "activation batchnorm channelshuffle container dropout flatten fold instancenorm loss normalization padding "
    "pixelshuffle pooling sparse upsampling".split()
)
# torch modules that always run a matmul or convolution; for others this is known once they have run
LAYERS_OF_TORCH = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)


# modules that run, count and index their children; a subclass may hold weights of its own
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _may_multiply(module: nn.Module) -> bool:
    """Return whether the forward of ``module``, apart from its children, may run a matmul."""
    if isinstance(module, (torch.jit.ScriptModule, LayerPrecision)):
        return False
    package, _, name = type(module).__module__.rpartition(".")
    if isinstance(module, nn.MultiheadAttention):
        return True
    is_elementwise = package == "torch.nn.modules" and name in ELEMENTWISE_MODULES
    return not is_elementwise and not isinstance(module, nn.Identity)


def is_convertible(module: nn.Module) -> bool:
    """Return whether ``quantize_`` can convert a module, unless it is part of a larger layer."""
    if (
        not _may_multiply(module)
        or is_uninitialized(module)
        or isinstance(module, ParametrizationList)
    ):
        return False
    if _graph_layer(module, is_convertible=False) is not None:
        return _graph_layer(module) is not None
    return holds_weights(module) or has_own_forward(module)


def is_uninitialized(module: nn.Module) -> bool:
    """Return whether a module is lazy and its parameters have no shapes yet."""
    return (
        isinstance(module, LazyModuleMixin)
        and _may_multiply(module)
        and module.has_uninitialized_params()
    )


def has_own_forward(module: nn.Module) -> bool:
    """Return whether ``module`` overrides the forward of ``nn.Module`` and ``nn.Sequential``."""
    return "forward" in vars(module) or type(module).forward not in (
        nn.Module.forward,
        nn.Sequential.forward,
    )


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return the weights that a module itself holds.

    Weights are tensors of two or more dimensions, except embeddings and, outside of layers of torch, tensors such as
    (1, C) and (1, T, C), which are added to tokens or scale them.
    """
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return []
    is_layer = isinstance(module, LAYERS_OF_TORCH)
    weights: list[Tensor] = []
    for parameter in module._parameters.values():
        if parameter is None or is_lazy(parameter):
            continue
        is_added = parameter.dim() > 1 and len(parameter) == 1 and not is_layer
        if parameter.dim() > 1 and not is_added:
            weights.append(parameter)
    return weights


def layer_weights(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return layer -> its weights and those of its parts, for the converted layers that hold any."""
    parts, modules = layer_parts(model), dict(model.named_modules())
    weights: dict[str, list[Tensor]] = {}
    for name, module in modules.items():
        layer_name = parts[name] if name in parts else name
        own_weights = weights_of(module)
        if own_weights and precision_of(modules[layer_name]) is not None:
            weights.setdefault(layer_name, []).extend(own_weights)
    return weights


def layer_parts(model: nn.Module) -> dict[str, str]:
    """Return part -> layer for modules that belong to a layer.

    Parts are children of graph convolutions, lists of parameters and parametrisations.
    """
    parts: dict[str, str] = {}
    for name, module in model.named_modules():
        layer = _graph_layer(module)
        if layer is not None and layer.has_parts:
            parts |= {
                f"{name}.{part}".lstrip("."): name
                for part, _ in module.named_modules()
                if part
            }
        if isinstance(module, (nn.ParameterList, nn.ParameterDict)) and name:
            parent = name.rpartition(".")[0]
            parts[name] = parts.get(parent, parent)
        if isinstance(module, ParametrizationList):
            owner = name.rpartition(".parametrizations")[0]
            parts |= {
                f"{name}.{part}".rstrip("."): owner
                for part, _ in module.named_modules()
            }
    return parts


def holds_weights(module: nn.Module) -> bool:
    """Return whether a module holds weights of a matmul or convolution."""
    # these have a weight even where it is computed and no parameter
    if isinstance(module, LAYERS_OF_TORCH) or _graph_layer(module) is not None:
        return True
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not _may_multiply(module):
        return False
    parameters = module._parameters.values()
    return any(p is not None and p.dim() > 1 for p in parameters)


def _noise_key_group(module: nn.Module) -> int:
    """Return the position in the order of noise keys: 0 torch layers, 1 other weights, 2 all others."""
    layers = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d
    has_own_handler = (
        _graph_layer(module) is not None or op_handlers.module_kind(module) == "lstm"
    )
    if (
        type(module) in layers
        or has_own_handler
        or op_handlers.is_paper_attention(module)
    ):
        return 0
    return 1 if holds_weights(module) else 2


def float32_reason(module: nn.Module) -> str:
    """Return why a module with parameters, which has no precision, is not quantised."""
    if is_convertible(module):
        return FallbackReason.NOT_SELECTED.describe()
    if is_uninitialized(module):
        return FallbackReason.UNINITIALIZED.describe()
    layer = _graph_layer(module, is_convertible=False)
    graph_reason = layer.float32_reason(module) if layer is not None else ""
    return graph_reason or FallbackReason.NO_MATMUL.describe()


def _excluded(
    model: nn.Module, patterns: tuple[str, ...], parts: Mapping[str, str]
) -> set[str]:
    """Return the names of the modules that match ``patterns``, and of their children.

    Raises:
        ValueError: for a pattern that matches nothing, or only part of a layer.
    """
    names = dict.fromkeys(name for name, _ in model.named_modules() if name)
    matched: set[str] = set()
    for pattern in patterns:
        if pattern in names:
            matches = [pattern]
        else:
            matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            similar_names = (
                get_close_matches(pattern, names, n=3, cutoff=0.3)
                or list(names)[:3]
                or ["none, as it has no parts"]
            )
            raise ValueError(
                f"float32 pattern {pattern!r} matches no module; similar names: {', '.join(similar_names)}"
            )
        # a layer is quantised as a whole, so that a part of it cannot stay in float32
        if all(name in parts for name in matches):
            raise ValueError(
                f"float32 pattern {pattern!r} matches part of {parts[matches[0]] or 'the model'!r}; name it"
            )
        matched.update(matches)
    return {name for name in names if not matched.isdisjoint(_with_parents(name))}


def _with_parents(name: str) -> list[str]:
    """Return the names of a module's parents, and its name: "a", "a.b" for "a.b"."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def restore_(model: nn.Module) -> nn.Module:
    """Undo ``quantize_``: remove hooks and precisions, keep parameters; ValueError for an unconverted model."""
    check_types(restore_, locals())
    if not is_converted(model):
        raise ValueError("the model has no quantised layers")
    _undo(model)
    return model


def _undo(model: nn.Module) -> None:
    extensions.services("hosts").before_restoration(model)
    for module in list(model.modules()):
        vars(module).pop(HOOK, None)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            interception_keys = [
                key
                for key, hook in hooks.items()
                if hook in (enter_module, leave_module)
            ]
            for key in interception_keys:
                hooks.pop(key)
                module._forward_hooks_always_called.pop(key, None)
        graph_layer = _graph_layer(module)
        if graph_layer is not None:
            graph_layer.restore_forward(module)
        if precision_of(module) is not None:
            del module.precision


def is_converted(model: nn.Module) -> bool:
    """Return whether ``quantize_`` has converted a model, or a part of it."""
    return any(hasattr(module, HOOK) for module in model.modules())


def warn_of_added_modules(model: nn.Module) -> None:
    """Warn once of layers and ``torch.fx`` graphs that were added to a converted model and run in float32.

    Added modules that the conversion would have left in float32, such as a new head under a name in
    ``QuantConfig.float32``, stay in float32 without a warning: they get the hooks that they would have had.
    """
    _hook_excluded_modules(model)
    for module in model.modules():
        if HOOK in vars(module):
            continue
        if "_graph" in vars(module) or holds_weights(module):
            extensions.services("added_modules").warn_of_added_modules(model)
            return


def _hook_excluded_modules(model: nn.Module) -> None:
    """Add the hooks of float32 modules to those that were added after the conversion and that it excludes."""
    for module in list(model.modules()):
        interception = vars(module).get(HOOK)
        if interception is None:
            continue
        for child, record in excluded_children(module, interception):
            vars(child)[HOOK] = record
            if has_own_forward(child):
                add_hooks(child)


def warn_of_silent_layers(
    model: nn.Module, precisions: Mapping[str, LayerPrecision]
) -> None:
    """Warn once of converted layers that hold weights and have run without an intercepted operation."""
    for precision in precisions.values():
        if precision.is_silent and not precision.has_run:
            extensions.services("silent_layers").warn_of_silent_layers(model)
            return


def precision_of(module: nn.Module) -> LayerPrecision | None:
    """Return the precision of a converted module; None for any other module."""
    precision = getattr(module, "precision", None)
    return precision if isinstance(precision, LayerPrecision) else None


def layer_precisions(model: nn.Module) -> dict[str, LayerPrecision]:
    """Return the precision of every quantised layer by the layer's name; ValueError when there is none.

    Modules without weights are included once they have run a matmul.
    """
    return {name: p for name, p in all_precisions(model).items() if p.is_listed}


def all_precisions(model: nn.Module) -> dict[str, LayerPrecision]:
    """Return the precision of every converted module by its name; ValueError when there is none."""
    check_types(layer_precisions, {"model": model})
    precisions = {}
    for name, module in model.named_modules():
        precision = precision_of(module)
        if precision is not None:
            precisions[name] = precision
    if not precisions:
        raise ValueError(
            "the model has no quantised layers; call quantize_(model) first"
        )
    return precisions
