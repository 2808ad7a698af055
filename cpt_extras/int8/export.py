"""Export of a trained model for inference, as a program of torch operations that stores quantised weights as int8.

>>> from cpt_core.quantization.convert import quantize_
>>> model = quantize_(nn.Sequential(nn.Linear(4, 3)))
>>> with precision(model, 8):
...     _ = model(torch.randn(16, 4))  # training fills the running ranges
>>> program = export(model.eval(), (torch.zeros(2, 4),))
>>> program.module()(torch.ones(5, 4)).shape
torch.Size([5, 3])

A quantised weight w is int8 codes k, a step s and a minimum m for each of its ranges: w = (k + 2**(bits - 1)) s + m.

A copy of the model is traced while its operations are intercepted as ever. In it, layers of torch hold ``Codes`` under
the names of their parameters, and turn them into values when they are called.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cpt_core.numerics import NUMERICS
from cpt_core.quantization.convert import all_precisions, layer_precisions
from cpt_core.quantization.op_interception import HOOK, Operation, QuantizedOpsMode
from cpt_core.quantization.precision import LayerPrecision
from cpt_core.quantization.scheduler import precision
from cpt_core.validation import (
    ForwardInputs,
    check_inputs,
    check_int,
    run_forward,
)
from cpt_extras.formats.format import FLOAT32_BITS
from cpt_extras.int8.execution import CODE_BITS
from cpt_extras.int8.layers import encode_operand
from cpt_extras.int8.quantized_tensor import QuantizedTensor
from cpt_extras.kernels import gemm_backend, lstm, operators

NUMERICS_BUFFER = "cpt_numerics"  # of a program: no operation reads it


class Codes(nn.Module):
    """A quantised parameter of an exported model, in the place of the float parameter.

    Attributes:
        codes: int8, in the shape of the parameter.
        scale: the step of the grid, float32, broadcastable to the codes.
        low: its minimum, likewise.
    """

    codes: Tensor
    scale: Tensor
    low: Tensor

    def __init__(self, x: QuantizedTensor) -> None:
        super().__init__()
        self.offset = float(x.code_offset)
        for name in ("codes", "scale", "low"):
            self.register_buffer(name, getattr(x, name))

    def forward(self) -> Tensor:
        """Return the values in float32, also for half types, with the bits of the simulation."""
        return (self.codes.float() + self.offset) * self.scale + self.low


def export(
    model: nn.Module,
    inputs: ForwardInputs,
    bits: int | str | Mapping[str, int] = 8,
    *,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """Return ``model``, as it evaluates at ``bits``, as a program of torch's own operations.

    ``torch.export.save(program, "model.pt2")`` writes it, ``torch.export.load("model.pt2").module()`` runs it where
    this package is not installed. Weights and biases of quantised ``nn.Linear``, ``nn.LSTM`` and ``nn.Conv1d`` to
    ``nn.Conv3d`` are int8 codes, a quarter of float32 (fewer bits take a byte, too) beside some 30 kB of text per
    layer; every call turns them into float32: this saves memory, not time. Other modules, and layers whose weights
    another module multiplies by, keep weights in float32, which every call rounds. Inputs are rounded on the running
    ranges of training, or on their own range where the layer has none. Layers in float32 stay as they are, and so does
    ``model``.

    The numbers are those of ``with precision(model, bits): model(...)`` on the CPU, bit for bit, of layers whose
    ``execution`` is "simulated"; an LSTM's up to the rounding of its gates, and products on codes ("integer") up to
    the rounding of their float32 sums.

    The buffer "cpt_numerics" of a program is the version of the numerics that made it, see ``cpt_core.numerics``:
    ``int(torch.export.load("model.pt2").state_dict["cpt_numerics"])``. A program computes the same in every release.

    Args:
        model: converted by ``quantize_``, trained, in evaluation mode.
        inputs: the arguments of its forward in a tuple, or keyword arguments in a mapping; an example of two or more
            where the batch is to be free.
        bits: 1 to 8, "q_max" of the schedules, or a mapping from patterns of layer names, see ``precision``; levels
            where a layer has ladders.
        dynamic_shapes: which sizes are free, as ``torch.export.export`` takes it; None frees the first of every tensor
            where the model allows that. An LSTM keeps the sizes of the example.

    Returns:
        The program. An output that is a mapping, as those of transformers are, becomes a plain dict. A decoder of
        transformers keeps no keys and values of earlier calls there (``use_cache=False``): each call sees all tokens.

    Raises:
        ValueError: for a model that is not converted, is in training mode or has running ranges that nothing has
            filled; for other bits, or weights in another format than an affine one; for graph convolutions, whose
            graphs a program does not take; for layers in float64.
    """
    inputs = check_inputs(inputs)
    _check(model, bits)
    with precision(model, bits, q_grad="float"):
        for name, layer in layer_precisions(model).items():
            _check_format(name, layer)
        deployed = copy.deepcopy(model)  # which keeps these bits
    with torch.no_grad():
        for module in deployed.modules():
            if getattr(
                getattr(module, "config", None), "use_cache", False
            ):  # transformers' decoders; this is a copy
                module.config.use_cache = False  # type: ignore[union-attr]
        for layer in all_precisions(deployed).values():
            layer.execution = "simulated"
        used_elsewhere = _layers_used_elsewhere(deployed, inputs)
        for name, layer in layer_precisions(deployed).items():
            module = deployed.get_submodule(name)
            if layer not in used_elsewhere and _can_hold_codes(module):
                _encode_parameters_(module, layer)
        deployed.register_buffer(NUMERICS_BUFFER, torch.tensor(NUMERICS))
        # a program that returns a class of transformers could not be loaded without it
        deployed.register_forward_hook(
            lambda module, args, y: dict(y) if isinstance(y, Mapping) else y
        )
        if dynamic_shapes is None:
            first = {0: torch.export.Dim.AUTO}
            dynamic_shapes = tree_map(
                lambda x: first if isinstance(x, Tensor) and x.dim() else None, inputs
            )
        with _in_torch_operations():
            args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, None)
            program = torch.export.export(
                deployed, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
            )
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            part.graph.eliminate_dead_code()  # torch 2.6 cannot read some of it
            for node in part.graph.nodes:
                node.meta.pop(
                    "stack_trace", None
                )  # a third of a program's text, and the paths of this machine
            part.recompile()
    return program


def _check(model: nn.Module, bits: int | str | Mapping[str, int]) -> None:
    for value in bits.values() if isinstance(bits, Mapping) else (bits,):
        if not isinstance(value, str) or value != "q_max":
            check_int(
                "bits, if not 'q_max', are codes of a byte and", value, 1, CODE_BITS
            )
    layers = layer_precisions(model)
    for name, module in model.named_modules():
        if module.training:
            raise ValueError(
                f"{name or 'the model'} is in training mode, a program only evaluates: call model.eval()"
            )
    for name, layer in layers.items():
        module = model.get_submodule(name)
        kind = getattr(module, HOOK).kind
        if kind == "graph":
            raise ValueError(
                f"layer {name!r} is a {type(module).__name__}, and a program takes no graphs"
            )
        if any(
            p.dtype == torch.float64
            for p in module._parameters.values()
            if p is not None
        ):
            raise ValueError(
                f"layer {name!r} computes in float64, a program in float32: call model.float()"
            )
        running = [
            role for role, quantizer in layer.quantizers.items() if quantizer.running
        ]
        empty = [role for role in running if not layer.range_tensor(role)[2] > 0]
        is_ready = (
            kind == "attention"
        )  # it has ranges of its own for all but masked weights
        if empty and not is_ready:
            raise ValueError(
                f"layer {name!r} has no running range of its {empty[0]} yet, on which evaluation rounds: train the "
                "model first, or run it on a few batches in training mode"
            )


def _check_format(name: str, layer: LayerPrecision) -> None:
    """Raise ValueError for a format of weights that codes of a byte do not hold."""
    bits = (
        FLOAT32_BITS
        if layer.active_bits.formats.weight is None
        else layer.active_bits.formats.weight
    )
    if not isinstance(bits, int):
        format = layer.active_bits.requested.weight  # type: ignore[attr-defined]  # the layer has a ladder
        raise ValueError(
            f"layer {name!r} would have weights in {format}, and a program holds codes of the paper's grids alone; "
            "evaluate the model itself, or give its weights a ladder of affine formats"
        )
    if bits > CODE_BITS:
        raise ValueError(
            f"layer {name!r} would have {bits} bits; codes of a byte hold {CODE_BITS}"
        )


def _layers_used_elsewhere(
    model: nn.Module, inputs: ForwardInputs
) -> set[LayerPrecision]:
    """Run a model, and return the layers whose weights are used by another module."""
    used_elsewhere: set[LayerPrecision] = set()
    modes = {
        getattr(module, HOOK).mode
        for module in model.modules()
        if hasattr(module, HOOK)
    }

    def note(mode: QuantizedOpsMode, operation: Operation, output: Any) -> None:
        running = mode.running.stack[-1].interception.precision
        if operation.precision is not None and operation.precision is not running:
            used_elsewhere.add(operation.precision)

    for mode in modes:
        mode.on_operation = partial(note, mode)
    try:
        run_forward(model, inputs)
    finally:
        for mode in modes:
            mode.on_operation = None
    return used_elsewhere


def _can_hold_codes(module: nn.Module) -> bool:
    """Return whether every parameter of a module is an operand itself, so that it can be stored as codes."""
    if isinstance(module, nn.LSTM):
        return all(
            p.dtype == torch.float32 for p in module.parameters(recurse=False)
        )  # it compares types with x
    layers = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return type(module) in layers and "weight" in names and names <= {"weight", "bias"}


def _encode_parameters_(module: nn.Module, layer: LayerPrecision) -> None:
    """Put ``Codes`` in the place of the parameters of a layer, which holds their values while it runs."""
    names = []
    for name, parameter in list(module.named_parameters(recurse=False)):
        role = name.partition("_")[0]  # "weight" of weight_ih_l0
        codes = Codes(encode_operand(layer, role, parameter.detach().float()))
        delattr(module, name)
        setattr(module, name, codes)
        names.append(name)
    del layer.noise_key
    round_operand = layer.round_operand

    def round_data(role: str, x: Tensor, along: int | None) -> Tensor:
        return (
            x
            if role in ("weight", "computed_weight", "bias")
            else round_operand(role, x, along)
        )

    vars(layer)["round_operand"] = round_data
    module.register_forward_pre_hook(partial(_decode_parameters, names))
    module.register_forward_hook(partial(_forget_values, names))


def _decode_parameters(names: list[str], module: nn.Module, args: Any) -> None:
    """Forward pre-hook: give a layer the values of its codes, which hide these."""
    for name in names:
        vars(module)[name] = module.get_submodule(name)()
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [
            getattr(module, name) for name in module._flat_weights_names
        ]


def _forget_values(names: list[str], module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook: undo ``_decode_parameters``."""
    for name in names:
        del vars(module)[name]
    if isinstance(module, nn.RNNBase):
        module._flat_weights = []


@contextmanager
def _in_torch_operations() -> Iterator[None]:
    """Make quantised layers call plain torch operations, the only ones that a program may contain."""
    plain = SimpleNamespace(**operators.PLAIN)
    plain.lstm_forward = partial(lstm.forward, plain)
    before, operators.active = operators.active, plain
    library = gemm_backend.active
    gemm_backend.use("torch")
    try:
        yield
    finally:
        operators.active = before
        gemm_backend.use(library)
