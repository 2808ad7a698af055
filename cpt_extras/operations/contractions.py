"""Handlers of torch functions that multiply and are not in the paper's models: addmm, einsum, bilinear, experts.

``quantize_`` loads this module, see ``cpt_core.extensions``; it registers a handler for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_letters
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cpt_core.quantization import fake_quantize
from cpt_core.quantization.feature_axes import TensorMark, mark_of, set_mark
from cpt_core.quantization.op_handlers import (
    ARRANGEMENTS,
    functions_named,
    has_role,
    in_full_precision,
    input_role,
    matmul,
    multiply,
    parameter_input_role,
    register_handler,
    run_convolution,
    run_matmul,
    weight_op_roles,
)
from cpt_core.quantization.op_interception import (
    COMPOSITE_OPS,
    Interception,
    QuantizedOpsMode,
)
from cpt_core.quantization.precision import in_float32
from cpt_extras.operations.autocast_matmul import einsum as torch_einsum

# --- sums with a matmul, transposed convolutions ----------------------------------------------------------------------


def added_matmul(
    mode: QuantizedOpsMode,
    function: Any,
    input: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> Tensor:
    """Quantise ``beta input + alpha first @ second``; an ``input`` that is a parameter is a bias."""

    def scaled(factor: Any, x: Tensor) -> Tensor:
        return x if factor == 1 else factor * x

    def compute(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        product = scaled(alpha, fake_quantize.operators.matmul(a, b))
        return product if bias is None else scaled(beta, bias) + product

    if mode.is_weight(input) and beta != 0:
        return run_matmul(mode, compute, first, second, input)
    matmul_output = run_matmul(mode, multiply, first, second)
    product = scaled(alpha, matmul_output)
    # torch does not read an input times 0
    if beta != 0:
        # autocast gives the matmul, but not the input, its half dtype
        product = (scaled(beta, input) + product).to(product.dtype)
    set_mark(product, mark_of(matmul_output))
    return product


def transposed_convolution(
    mode: QuantizedOpsMode,
    function: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *rest: Any,
    **more: Any,
) -> Tensor:
    """Quantise a transposed convolution, with a range per output channel of the weight."""
    # after stride, padding and output_padding
    groups = rest[3] if len(rest) > 3 else more.get("groups", 1)

    def swap_channels(w: Tensor) -> Tensor:
        """Return a weight (C, O / groups, ...) as (O, C / groups, ...), and such a one as the first."""
        return w.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)

    def compute(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return function(x, swap_channels(w), b, *rest, **more)

    def macs(x: Tensor, w: Tensor, y: Tensor) -> int:
        return x.numel() * weight[0].numel()

    operands = input, weight, bias
    return run_convolution(
        mode,
        function,
        compute,
        operands,
        macs,
        options=(rest, more),
        arrange_weight=swap_channels,
    )


# --- bilinear maps, experts, chains -----------------------------------------------------------------------------------


def bilinear(
    mode: QuantizedOpsMode,
    function: Any,
    first: Tensor,
    second: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Quantise ``F.bilinear``: both inputs have a range per row, the weight one per output."""
    layer = mode.find_layer(weight)
    _check_no_rotation(layer, "attention_query")

    def run(x: Tensor, y: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        second = (
            layer.precision.quantize_operand(
                layer.precision.layer_role("attention_query"), y
            )
            if layer.precision is not None
            else y
        )
        compute = lambda x, w, b: function(x, second, w.view_as(weight), b)  # noqa: E731
        roles = "attention_query", "linear_weight"
        return mode.run(
            layer,
            "bilinear",
            compute,
            (x, w.flatten(1), b),
            roles,
            _bilinear_macs,
            "linear_grad",
        )

    def cast(y: Tensor, half_dtype: torch.dtype) -> Tensor:
        # autocast does not change the dtype of this function
        return y.to(first.dtype)

    operands = first, second, weight, bias
    return in_float32(layer.precision, first, run, *operands, cast=cast)


def _check_no_rotation(layer: Interception, role: str) -> None:
    """Raise ValueError if the active format of a role of ``layer`` has a Hadamard rotation.

    A rotation cancels only in a sum over one dimension that both operands have.
    """
    if layer.precision is None:
        return
    quantizer = layer.precision.quantizers[layer.precision.layer_role(role)]
    size = getattr(quantizer, "hadamard", 0)
    if size:
        raise ValueError(
            f"layer {layer.name!r}: a bilinear map sums over both of its inputs, so that it cannot have a Hadamard "
            f"rotation (got {size}); give its ladder formats without one, or leave the layer in float32"
        )


def _bilinear_macs(input: Tensor, weight: Tensor, output: Tensor) -> int:
    """Return the MACs of t = x A and of y = t z."""
    rows = input.numel() // input.shape[-1]
    features_of_second = weight.shape[1] // input.shape[-1]
    return rows * weight.numel() + rows * weight.shape[0] * features_of_second


def grouped_matmul(
    mode: QuantizedOpsMode,
    function: Any,
    first: Tensor,
    second: Tensor,
    *rest: Any,
    **more: Any,
) -> Tensor:
    """Quantise a matmul of experts: rows (M, K), each times that one of the weights (E, K, N) that is its own."""
    layer = mode.find_layer(second)

    def compute(a: Tensor, bt: Tensor, bias: Tensor | None) -> Tensor:
        return (
            _grouped_matmul_by_expert(a, bt.mT, *rest, **more)
            if a.is_cuda
            else function(a, bt.mT, *rest, **more)
        )

    def macs(a: Tensor, bt: Tensor, y: Tensor) -> int:
        return (
            a.shape[-2] * bt.numel() if a.dim() > bt.dim() else a.numel() * bt.shape[-2]
        )

    def run(a: Tensor, b: Tensor) -> Tensor:
        roles = input_role(layer, "linear"), "linear_weight"
        return mode.run(
            layer, "grouped_mm", compute, (a, b.mT, None), roles, macs, "linear_grad"
        )

    return in_float32(layer.precision, first, run, first, second)


def _grouped_matmul_by_expert(
    a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, **more: Any
) -> Tensor:
    """Compute ``grouped_mm`` one expert at a time, since torch on CUDA supports it for bfloat16 only."""
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    parts = a[: sum(sizes)].split(sizes)
    y = torch.cat([rows @ weight for rows, weight in zip(parts, b, strict=True)])
    return (
        y
        if bias is None
        else y + bias.repeat_interleave(offs.diff(prepend=offs.new_zeros(1)), 0)
    )


def chained_matmul(mode: QuantizedOpsMode, function: Any, *matrices: Any) -> Tensor:
    """Quantise a chain of matmuls, computed from left to right."""
    if isinstance(matrices[0], (list, tuple)):
        matrices = tuple(matrices[0])
    product = matrices[0]
    for matrix in matrices[1:]:
        product = matmul(mode, torch.matmul, product, matrix)
    return product


def right_matmul(
    mode: QuantizedOpsMode, function: Any, second: Tensor, first: Tensor
) -> Tensor:
    """Quantise ``Tensor.__rmatmul__``."""
    return matmul(mode, torch.matmul, first, second)


# --- sums over any dimensions -----------------------------------------------------------------------------------------


def einsum(
    mode: QuantizedOpsMode, function: Any, equation: Any, *operands: Any
) -> Tensor:
    """Quantise ``torch.einsum``; several operands are contracted from left to right."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        return function(equation, *operands)
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms, tensors = inputs.split(","), list(operands)
    if not arrow:
        single = sorted(x for x in set(inputs) if x.isalpha() and inputs.count(x) == 1)
        result = ("..." if "..." in inputs else "") + "".join(single)
    # an ellipsis that is summed_letters over gets letters, like other summed_letters dimensions
    if "..." in inputs and "..." not in result:
        free = "".join(x for x in ascii_letters if x not in inputs)
        terms = [
            t.replace("...", free[: x.dim() + 3 - len(t)][::-1])
            for t, x in zip(terms, tensors, strict=True)
        ]
    if len(operands) == 1:
        # operators of graphs take a list of tensors
        y = torch.einsum(equation, *operands)
        letter = _feature_letter(terms[0], mark_of(tensors[0]).dim)
        set_mark(y, TensorMark(_letter_dim(result, letter)))
        return y
    while len(terms) > 1:
        needed_later = set("".join([*terms[2:], result]))
        pair = terms[0] + terms[1]
        letters = dict.fromkeys(x for x in pair if x.isalpha() and x in needed_later)
        intermediate = ("..." if "..." in pair else "") + "".join(letters)
        pair_result = intermediate if terms[2:] else result
        contracted = _contract(
            mode, (terms[0], terms[1]), pair_result, tensors[0], tensors[1]
        )
        terms, tensors = [pair_result, *terms[2:]], [contracted, *tensors[2:]]
    return tensors[0]


def _contract(
    mode: QuantizedOpsMode,
    terms: tuple[str, str],
    result: str,
    a: Tensor,
    b: Tensor,
) -> Tensor:
    """Compute an einsum of two operands with quantised operands, as the matmul that it is, see ``run_matmul``."""
    equation = f"{terms[0]},{terms[1]}->{result}"
    summed_letters = [
        x for x in dict.fromkeys(terms[0] + terms[1]) if x.isalpha() and x not in result
    ]
    if not any(
        x in terms[0] and x in terms[1] for x in summed_letters
    ):  # element by element, as a * b
        return _multiply_elements(mode, terms, result, a, b)
    weights = mode.is_weight(a), mode.is_weight(b)
    sizes = _letter_sizes(terms[0], a), _letter_sizes(terms[1], b)
    layer = _layer_of_contraction(mode, weights, a, b)
    marks = mark_of(a), mark_of(b)
    is_single = all(_common_size(sizes, letter) == 1 for letter in summed_letters)
    weights_tokens = marks[0].weights_tokens or marks[1].weights_tokens
    is_scaling = is_single and not weights_tokens and layer.kind != "linear"
    letters = (
        _feature_letter(terms[0], marks[0].dim),
        _feature_letter(terms[1], marks[1].dim),
    )
    sums = (
        _sums_letter(letters[0], terms, summed_letters, 0),
        _sums_letter(letters[1], terms, summed_letters, 1),
    )
    roles = _parameter_roles(mode, layer, weights, terms, (a, b), summed_letters)
    if not any(weights):
        is_scaling |= None in sums and not has_role(layer, "untracked_input")
        # a computed weight may be masked, so that some inputs must not influence an output
        if marks[1].is_computed_weight and sums[0]:
            roles = weight_op_roles(mode, layer, "linear", b)
            weights = False, True
        elif marks[0].is_computed_weight and sums[1]:
            roles = weight_op_roles(mode, layer, "linear", a)
            weights = True, False
        else:
            is_scaling |= _has_single_feature(letters, sums, sizes)
    if is_scaling:
        layer = in_full_precision(layer)
    plan = _plan_contraction(layer, letters, sums, summed_letters, weights, roles)

    def run(a: Tensor, b: Tensor) -> Tensor:
        tensors = {0: a, 1: b}
        first, second = (
            _ArrangedOperand(
                tensors[i], _letter_dims(terms[i], tensors[i], plan.ranged[i])
            )
            for i in plan.order
        )

        def compute(x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
            restored = dict(
                zip(plan.order, (first.restore(x), second.restore(y)), strict=True)
            )
            return torch_einsum(equation, restored[0], restored[1])

        def macs(x: Tensor, y: Tensor, output: Tensor) -> int:
            return _count_macs(sizes, summed_letters)

        along = tuple(
            operand.position(_letter_dims(terms[i], tensors[i], summed_letters))
            for i, operand in zip(plan.order, (first, second), strict=True)
        )
        operands = first.tensor, second.tensor, None
        return mode.run(
            layer,
            "einsum",
            compute,
            operands,
            plan.roles,
            macs,
            plan.gradient,
            along=along,  # type: ignore[arg-type]
        )

    y = in_float32(layer.precision, a, run, a, b)
    letter = _output_letter(letters, sums, weights, terms, result)
    is_score = sums == (True, True) and not any(weights)
    are_weights = [
        weight or mark.is_computed_weight
        for weight, mark in zip(weights, marks, strict=True)
    ]
    set_mark(y, TensorMark(_letter_dim(result, letter), is_score, all(are_weights)))
    return y


def _multiply_elements(
    mode: QuantizedOpsMode,
    terms: tuple[str, str],
    result: str,
    a: Tensor,
    b: Tensor,
) -> Tensor:
    """Compute an einsum that sums over nothing; an outer product has its features in the last dimension."""
    y = torch.einsum(f"{terms[0]},{terms[1]}->{result}", a, b)
    first = _feature_letter(terms[0], mark_of(a).dim)
    second = _feature_letter(terms[1], mark_of(b).dim)
    if first == second:
        set_mark(y, TensorMark(_letter_dim(result, first)))
    return y


def _layer_of_contraction(
    mode: QuantizedOpsMode, weights: tuple[bool, bool], a: Tensor, b: Tensor
) -> Interception:
    """Return the layer that holds the weight of a contraction; the running module where neither operand is one."""
    if weights[1]:
        return mode.find_layer(b)
    return mode.find_layer(a) if weights[0] else mode.running.stack[-1].interception


def _parameter_roles(
    mode: QuantizedOpsMode,
    layer: Interception,
    weights: tuple[bool, bool],
    terms: tuple[str, str],
    tensors: tuple[Tensor, Tensor],
    summed_letters: list[str],
) -> tuple[str, str] | None:
    """Return the roles of input and weight of an einsum over one dimension of a parameter; None for any other."""
    if weights not in ((True, False), (False, True)):
        return None
    index = weights.index(True)
    summed_dims = _letter_dims(terms[index], tensors[index], summed_letters)
    if len(summed_dims) != 1:
        return None
    role = parameter_input_role(mode, layer, tensors[index], summed_dims[0])
    return role, "linear_weight"


class _Contraction(NamedTuple):
    """Roles and ranges of the operands of an einsum.

    Attributes:
        order: indices of the operands; the first one gets the input gradient.
        ranged: letters over which each operand shares a range.
        roles: of the operands, in their order.
        gradient: role of the output's gradient.
    """

    order: tuple[int, int]
    ranged: tuple[list[str], list[str]]
    roles: tuple[str, str]
    gradient: str


def _plan_contraction(
    layer: Interception,
    letters: tuple[str, str],
    sums: tuple[bool | None, bool | None],
    summed_letters: list[str],
    weights: tuple[bool, bool],
    roles: tuple[str, str] | None,
) -> _Contraction:
    """Return the roles of both operands and their ranges, see ``run_matmul``.

    Args:
        layer: that computes the einsum.
        letters: letter of the features of each operand, or "".
        sums: whether the features of each operand are summed over; None if they are not tracked.
        summed_letters: letters that are summed over.
        weights: whether each operand is a weight.
        roles: roles of input and weight; None for those of a parameter.
    """
    if any(weights):
        order = (1, 0) if weights == (True, False) else (0, 1)
        if roles is None:
            roles = (
                ("linear_weight", "linear_weight")
                if all(weights)
                else (input_role(layer, "linear"), "linear_weight")
            )
        return _Contraction(
            order, (summed_letters, summed_letters), roles, "linear_grad"
        )
    arrangement = ARRANGEMENTS[sums[0] is not False, sums[1] is not False]
    order = (1, 0) if arrangement.is_swapped else (0, 1)
    ranged = (
        [letters[0]] if sums[0] is False else summed_letters,
        [letters[1]] if sums[1] is False else summed_letters,
    )
    first, second = (
        "untracked_input" if sums[i] is None else role
        for i, role in zip(order, arrangement.roles, strict=True)
    )
    return _Contraction(order, ranged, (first, second), "attention_grad")


def _has_single_feature(
    letters: tuple[str, str],
    sums: tuple[bool | None, bool | None],
    sizes: tuple[dict[Any, int], dict[Any, int]],
) -> bool:
    """Return whether the features of an operand are kept and only one, so that its ranges are of one number."""
    kept = [
        size[letter]
        for letter, is_summed, size in zip(letters, sums, sizes, strict=True)
        if is_summed is False
    ]
    return 1 in kept


def _sums_letter(
    letter: str, terms: tuple[str, str], summed_letters: list[str], index: int
) -> bool | None:
    """Return whether the features of an operand are summed over; None if both operands keep them, or it is unknown."""
    if letter in summed_letters:
        return True
    is_free = letter != "" and letter not in terms[1 - index]
    return False if is_free else None


def _output_letter(
    letters: tuple[str, str],
    sums: tuple[bool | None, bool | None],
    weights: tuple[bool, bool],
    terms: tuple[str, str],
    result: str,
) -> str:
    """Return the letter of the features of the result of an einsum; "" if it is not known."""
    if weights in ((True, False), (False, True)):
        index = weights.index(True)
        activation = letters[1 - index]
        if sums[1 - index] is not True:
            return activation
        outputs = [x for x in result if x in terms[index] and x not in terms[1 - index]]
        return outputs[-1] if outputs else result[-1:]
    if sums == (False, False):
        num_free = [
            sum(x.isalpha() and x not in terms[1 - i] for x in terms[i]) for i in (0, 1)
        ]
        # a second free letter may stand for tokens, as in the dispatch of experts
        return letters[1] if num_free == [1, 1] else ""
    if sums == (True, False):
        return letters[1]
    if sums == (False, True):
        return letters[0]
    return result[-1:] if sums[0] else ""


def _letter_dim(result: str, letter: str) -> int | None:
    """Return the dimension of a letter of the result of an einsum, counted from the end; None if it is not known."""
    letters = result.rpartition(".")[2]
    if letter and letter in letters:
        return letters.index(letter) - len(letters)
    return None if result else -1


def _feature_letter(term: str, dim: int | None) -> str:
    """Return the letter of the feature dimension ``dim`` of an operand; "" if it is unknown, or in an ellipsis."""
    letters = term.rpartition(".")[2]
    return letters[dim] if dim is not None and -dim <= len(letters) else ""


class _ArrangedOperand:
    """An operand of an einsum, permuted so that its last dimension holds the elements that share a range."""

    def __init__(self, x: Tensor, dims: list[int]) -> None:
        outer_dims = [i for i in range(x.dim()) if i not in dims]
        self.order = outer_dims + dims
        self.num_outer = len(outer_dims)
        self.tensor = x.permute(self.order)
        self.shape = self.tensor.shape
        if dims:
            self.tensor = self.tensor.flatten(self.num_outer)
        else:
            self.tensor = self.tensor.unsqueeze(-1)

    def restore(self, x: Tensor) -> Tensor:
        """Return the rounded operand in the shape of the equation."""
        inverse = sorted(range(len(self.shape)), key=self.order.__getitem__)
        return x.reshape(self.shape).permute(inverse)

    def position(self, dims: list[int]) -> int:
        """Return the position of the summed_letters dimensions in the permuted operand, counted from its end."""
        places = [self.order.index(dim) for dim in dims]
        return min(places[-1], self.num_outer) - self.tensor.dim() if places else -1


def _letter_dims(term: str, x: Tensor, letters: list[str]) -> list[int]:
    """Return the dimensions of an operand of ``einsum`` that have these letters, in their order."""
    before = term.partition(".")[0]
    places = {
        letter: i if letter in before else i - len(term) + x.dim()
        for i, letter in enumerate(term)
    }
    return [places[letter] for letter in letters if letter in term]


def _letter_sizes(term: str, x: Tensor) -> dict[Any, int]:
    """Return the size of every letter of an operand; dimensions in an ellipsis have negative numbers as letters."""
    before, dots, after = term.partition("...")
    sizes: dict[Any, int] = dict(zip(before, x.shape, strict=False))
    behind = x.shape[len(before) :] if dots else ()
    num_hidden = len(behind) - len(after)
    sizes |= dict(zip(after, behind[num_hidden:], strict=True))
    for i, size in enumerate(behind[:num_hidden]):
        sizes[i - num_hidden] = size
    return sizes


def _common_size(sizes: tuple[dict[Any, int], dict[Any, int]], letter: Any) -> int:
    """Return the size of a letter in an einsum of two operands, to which a size of 1 is expanded."""
    return max(sizes[0].get(letter, 1), sizes[1].get(letter, 1))


def _count_macs(
    sizes: tuple[dict[Any, int], dict[Any, int]], summed_letters: list[str]
) -> int:
    """Return the multiply-accumulates of an einsum of two operands.

    torch sums a letter before it multiplies where one operand lacks the letter or has the size 1.

    Args:
        sizes: of the letters of each operand.
        summed_letters: letters that are summed over.
    """
    macs = 1
    for letter in sizes[0] | sizes[1]:
        has_size_1 = 1 in (sizes[0].get(letter, 1), sizes[1].get(letter, 1))
        if not (has_size_1 and letter in summed_letters):
            macs *= _common_size(sizes, letter)
    return macs


def tensordot(
    mode: QuantizedOpsMode,
    function: Any,
    a: Tensor,
    b: Tensor,
    dims: Any = 2,
    **more: Any,
) -> Tensor:
    """Quantise ``torch.tensordot``, rewritten as an einsum."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        dims = range(-dims, 0), range(dims)
    summed_a = [i % a.dim() for i in dims[0]]
    summed_b = [j % b.dim() for j in dims[1]]

    # a letter for every dimension; summed_letters dimensions share theirs
    letters_a = list(ascii_letters[: a.dim()])
    letters_b = list(ascii_letters[a.dim() : a.dim() + b.dim()])
    for i, j in zip(summed_a, summed_b, strict=True):
        letters_b[j] = letters_a[i]

    result = [x for i, x in enumerate(letters_a) if i not in summed_a]
    result += [x for j, x in enumerate(letters_b) if j not in summed_b]
    equation = f"{''.join(letters_a)},{''.join(letters_b)}->{''.join(result)}"
    return einsum(mode, torch.einsum, equation, a, b)


def inner(mode: QuantizedOpsMode, function: Any, a: Tensor, b: Tensor) -> Tensor | None:
    """Quantise ``torch.inner``; None for a product with a number, which is not a matmul."""
    if a.dim() == 0 or b.dim() == 0:
        return None
    return tensordot(mode, torch.tensordot, a, b, ([-1], [-1]))


# --- the table --------------------------------------------------------------------------------------------------------


CONTRACTION_HANDLERS: dict[
    str, tuple[Callable[..., Any], str]
] = {  # function -> handler, and the names of its operands
    "addmm": (added_matmul, "input mat1 mat2"),
    "baddbmm": (added_matmul, "input batch1 batch2"),
    "addmv": (added_matmul, "input mat vec"),
    **{
        f"conv_transpose{n}d": (transposed_convolution, "input weight bias")
        for n in (1, 2, 3)
    },
    "bilinear": (bilinear, "input1 input2 weight bias"),
    **dict.fromkeys(("grouped_mm", "_grouped_mm"), (grouped_matmul, "mat_a mat_b")),
    **dict.fromkeys(("chain_matmul", "multi_dot"), (chained_matmul, "tensors")),
    "einsum": (einsum, "equation"),
    "tensordot": (tensordot, "a b"),
    "inner": (inner, "input other"),
    "__rmatmul__": (right_matmul, "input other"),
    "mv": (matmul, "input vec"),
    "dot": (matmul, "input tensor"),
    "vdot": (matmul, "input other"),
}
for _name, (_handler, _operands) in CONTRACTION_HANDLERS.items():
    register_handler(functions_named(_name), _handler, _operands)


def register_library_operators() -> None:
    """Register the operators of libraries that have been imported by now."""
    library = getattr(torch.ops, "transformers")  # noqa: B009 - made on first use
    packet = getattr(library, "grouped_mm_fallback", None)
    if packet is not None:
        register_handler([packet, packet.default], grouped_matmul, "input weight")


# --- functions that call others that multiply -------------------------------------------------------------------------


def with_inner_functions_visible(function: Any) -> Callable[..., Any]:
    """Return a Python function of torch whose inner calls reach the mode, instead of the function as a whole."""
    questions = "has_torch_function", "has_torch_function_variadic"
    namespace = function.__globals__ | dict.fromkeys(questions, lambda *_: False)
    inner = FunctionType(
        function.__code__,
        namespace,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    inner.__kwdefaults__ = function.__kwdefaults__
    return lambda mode, *args, **kwargs: inner(*args, **kwargs)


def _linear_cross_entropy(function: Any) -> Callable[..., Any]:
    visible = with_inner_functions_visible(function)

    def composite(
        mode: QuantizedOpsMode, *args: Any, options: Any = None, **kwargs: Any
    ) -> Any:
        return visible(
            mode, *args, **kwargs
        )  # the options hide its matmul to save memory

    return composite


COMPOSITE_OPS[functional.multi_head_attention_forward] = with_inner_functions_visible(
    functional.multi_head_attention_forward
)
for _function in functions_named("linear_cross_entropy"):  # of newer torch
    COMPOSITE_OPS[_function] = _linear_cross_entropy(_function)
