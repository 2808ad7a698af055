"""What a call of a layer costs: its multiply-accumulates (MACs) and elementwise operations, by class of layer.

Also what it reads and writes: elements of the first operand, of the weights, and of the result. Each is moved once: a
convolution reads its image once, not once per window; a recurrent layer its weights, not once per step of a sequence.
What no product reads, such as a bias, is not counted.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from cpt_core.bitops.watch import tensors_in
from cpt_core.graphs.layers import MatrixNorm
from cpt_core.quantization.layers import module_kind, own_form

Elements = tuple[int, int, int]


def conv_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of a convolution: outputs times kernel elements times input channels per group (biases are free)."""
    return y.numel() * math.prod(module.kernel_size) * (module.in_channels // module.groups)


def linear_macs(module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of a linear layer: outputs times inputs of one output (the bias is free)."""
    return y.numel() * int(module.in_features)  # type: ignore[arg-type]


def recurrent_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """MACs of the first input product of an LSTM, GRU or RNN: every row meets every weight."""
    return rows_of(y) * recurrent_elements(module, y, y)[0][1]


def lstm_gate_operations(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """Elementwise operations of the gates and cells of an LSTM.

    The authors add 15.2 million by hand for 35 steps of 20 sequences, 800 wide: 27 per unit and step, and 5 per unit
    and sequence that their rounded numbers have besides.
    """
    return units_of(module) * (27 * rows_of(y) + 5 * sequences_of(module, inputs[0])[0])


def sequences_of(module: Any, x: Any) -> tuple[int, int]:
    """Return how many sequences start in the first step of a recurrent layer, and how many end in the last one."""
    if isinstance(x, PackedSequence):
        return int(x.batch_sizes[0]), int(x.batch_sizes[-1])
    return (x.shape[0 if module.batch_first else 1] if x.dim() == 3 else 1,) * 2


def started_macs(module: Any, inputs: tuple[Any, ...]) -> int:
    """MACs with hidden states that a layer starts from and that need no gradient: only fused LSTMs compute one."""
    x, *given = inputs
    fused = not getattr(module, "CATCHES", isinstance(x, PackedSequence))  # what is caught is unrolled
    if (module.mode == "LSTM" and not module.proj_size and fused) or any(t.requires_grad for t in tensors_in(given)):
        return 0
    starts = sum(sequences_of(module, x)[: 1 + module.bidirectional])  # backwards, the first step is the last
    return starts * module.num_layers * module.weight_hh_l0.numel()


def rows_of(y: Tensor) -> int:
    """Return how many vectors of the last dimension a tensor holds."""
    return y.numel() // y.shape[-1]


def units_of(module: Any) -> int:
    """Return the hidden units of an LSTM, GRU or RNN, over all its layers and directions."""
    return module.num_layers * (2 if module.bidirectional else 1) * module.hidden_size


def norm_macs(module: Any, inputs: tuple[Any, ...], y: Tensor) -> int:
    """Elementwise operations of a normalisation: 5 per element, 4 without affine, 2 or 1 with fixed statistics."""
    fixed = not module.training and getattr(module, "running_mean", None) is not None
    return y.numel() * ((2 if module.affine else 1) if fixed else (5 if module.affine else 4))


def graph_form(module: nn.Module) -> Any:
    """Return the quantised form that a graph convolution has, or would have; None for other modules."""
    forms = map(own_form, module_kind(module).__mro__)
    form = next((form for form in forms if form is not None and form.KIND == "graph"), None)
    return None if form is None or form.why_not(module) else form


MACS: dict[type[nn.Module], Callable[[Any, tuple[Any, ...], Tensor], int]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), conv_macs),
    nn.Linear: linear_macs,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), norm_macs),
    # 4 elementwise operations per element, as the counters of the authors have it
    **dict.fromkeys((nn.LayerNorm, MatrixNorm), lambda module, inputs, y: 4 * y.numel()),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), recurrent_macs),
}

# Layers that the authors' counters do not know; their products are in float32, like those of plain functions.
PLAIN: tuple[type[nn.Module], ...] = (nn.GRU, nn.RNN)
GATES_OF = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}

# What a layer does besides its own product, each priced by itself.
PARTS = AGGREGATION, GATES, UPSAMPLING, PRODUCTS = "aggregation", "gates", "upsampling", "products"


def part_of(name: str, part: str) -> str:
    """Return what a part of a layer is called: "NAME (aggregation)"."""
    return f"{name} ({part})".lstrip()


def pyramid_kinds() -> set[type[nn.Module]]:
    """Return torchvision's feature pyramid, if the program uses it."""
    module = sys.modules.get("torchvision.ops.feature_pyramid_network")
    return {module.FeaturePyramidNetwork} if module is not None else set()


def recurrent_elements(module: Any, x: Tensor, y: Tensor) -> tuple[Elements, Elements]:
    """Elements of the first input product of an LSTM, GRU or RNN, and of those behind it together.

    These are the products with hidden states, the input products of higher layers, and an LSTM's projections.
    """
    units = units_of(module) // module.num_layers  # of a layer, over its directions
    rows, gates, above = rows_of(y), GATES_OF[module.mode], module.num_layers - 1
    first = gates * units * module.input_size
    state = module.proj_size or module.hidden_size
    inner = gates * (units_of(module) * state + units * above * y.shape[-1]) + units_of(module) * module.proj_size
    read = units_of(module) // module.hidden_size * state + above * y.shape[-1]  # y: what the layers hand on
    written = gates * units * (module.num_layers + above)
    if module.proj_size:
        read += units_of(module)
        written += module.num_layers * y.shape[-1]
    return (x.numel(), first, rows * gates * units), (rows * read, inner, rows * written)


def upsampled_elements(module: Any, y: Mapping[str, Tensor]) -> Elements:
    """Elements of a feature pyramid's copies: each level of its inputs' is read to make the one below it."""
    sizes = [level.numel() for level in list(y.values())[: len(module.inner_blocks)]]
    return sum(sizes[1:]), 0, sum(sizes[:-1])
