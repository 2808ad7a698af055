"""Products caught where they happen: what a module multiplies in its own forward, whatever its class.

A converted module runs its own forward, unchanged, under a mode that sees every function of torch that is called in it
(``torch.overrides.TorchFunctionMode``). A product gets quantised operands and a quantised gradient:

    y = f(q(a), q(b))        dy -> q(dy)

What an operand is decides its role. A weight is a parameter, a view of one, or what stands where a function of torch
has its weight: it has a range per output. What meets a weight is an input; two operands neither of which is a weight
are those of attention. Both have a range per vector as it lies in memory, such as a token, and no running range: so no
token is rounded on a range that knows later ones. The modules of ``PER_FEATURE`` are the authors' exception.

>>> import torch
>>> class Twice(torch.nn.Module):
...     def forward(self, x):
...         return x @ x.transpose(-1, -2)
>>> from cpt_core.quantization.convert import quantize_
>>> from cpt_core.quantization.scheduler import precision
>>> x = torch.tensor([[0.0, 0.2, 1.0]])
>>> with precision(quantize_(Twice()), 1) as model:
...     model(x).tolist()
[[1.0]]

Before torch 2.12 compilers do not follow such a mode: these modules run uncompiled there.

In float32, by name: a sum over one element of operands that need no gradient and are no weights (the angles of rotary
positions are such products, and no sums); operands that are sparse or no floating numbers; and what is told where to
write (``out=``).

Differs: the paper and its code quantise the layers of their own models; nothing there says what other products do.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial, wraps
from string import ascii_letters
from traceback import walk_stack
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from cpt_core.checks import library
from cpt_core.formats.quantizer import Quantizer
from cpt_core.kernels import operators, traced
from cpt_core.quantization import coverage, recurrences
from cpt_core.quantization.layers import TRACED, Changed, QuantizedLayer, in_float32, on_codes, unseen

if TYPE_CHECKING:
    from cpt_core.quantization.convert import QuantConfig

Rule = Callable[..., Any]
NEITHER = (False, False)

# self-attention of transformers whose keys have a range per head and feature, over all tokens, as in the paper's BERT
PER_FEATURE = (
    "BertSelfAttention RobertaSelfAttention XLMRobertaSelfAttention CamembertSelfAttention ElectraSelfAttention "
    "DistilBertSelfAttention AlbertAttention ViTAttention"
).split()


class Products(TorchFunctionMode):
    """Quantises the products that run while it is on, in the precision of one module.

    ``own``: shape of the module's weight, which alone meets inputs with a running range; None where there are none.
    ``per_feature``: whether keys have a range per feature.
    """

    report: Callable[[Tensor, Tensor, Tensor], None] | None = None  # called with operands and result of those on codes
    watched: Callable[[], AbstractContextManager[Any]] = nullcontext  # around what runs, by whoever watches the module

    def __init__(self, precision: Any, own: tuple[int, ...] | None, per_feature: bool) -> None:
        super().__init__()
        self.precision, self.own, self.per_feature = precision, own, per_feature
        # whether a product of the module is running, and one on codes, whose parts are no products to count
        self.multiplying = self.on_codes = False
        self.outside: Any = None  # hooks on saved tensors, and whether gradients were on, where the forward began
        self.given: tuple[Tensor, ...] = ()  # tensors in the place of parameters, as functional_call puts them there
        self.needed: set[tuple[str, int, int]] = set()  # places in programs where an operand needed a gradient

    def __getstate__(self) -> dict[str, Any]:
        """Leave whoever watches out of copies."""
        return {name: value for name, value in vars(self).items() if name not in ("report", "watched")}

    def around(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, of which products are caught."""
        if torch.compiler.is_compiling():
            with self:
                return function(*args, **kwargs)
        before, self.outside = self.outside, _surroundings()
        self.multiplying = self.on_codes = False  # whatever another thread has left behind
        try:
            with self.watched(), self:
                return function(*args, **kwargs)
        finally:
            self.outside = before

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("out", self) is None:  # torch's functions that are written in Python say so
            kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        if function in INSIDE:
            with self:
                return INSIDE[function](*args, **kwargs)
        if function in RULES and "out" not in kwargs:
            if kwargs:
                args, kwargs = in_order(function, args, kwargs)
            if len(args) > 3 and hasattr(args[3], "_materialize"):  # torch's own masks are tensors without numbers
                args = (*args[:3], args[3]._materialize(args[0].device), *args[4:])
            with unseen():
                if _has_a_grid(args) and not only_scales(function, args, self.constant):
                    return self._multiplied(RULES[function][0], function, args, kwargs)
        return function(*args, **kwargs)

    def _multiplied(self, rule: Rule, function: Any, args: Any, kwargs: Any) -> Any:
        self.precision.require_bits()
        if not self.precision.now.active:
            rule = lambda _, function, *args, **kwargs: function(*args, **kwargs)  # noqa: E731
        if torch.compiler.is_compiling():
            return rule(self, function, *args, **kwargs)
        if (now := _surroundings()) != self.outside:
            library("cpt_core.integrations.checkpointing:catch_again", "")(self, now[0])
        before, self.multiplying = self.multiplying, True
        try:
            return rule(self, function, *args, **kwargs)
        finally:
            self.multiplying = before

    def constant(self, *operands: Tensor) -> bool:
        """Whether operands are constant; with gradients off, those that were not with gradients on are not."""
        alike = constant(*operands, given=self.given)
        if torch.compiler.is_compiling():
            return alike
        torchs = (__name__, "torch.functional")
        frame = next(f for f, _ in walk_stack(sys._getframe(1)) if f.f_globals.get("__name__") not in torchs)
        place = frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti
        if torch.is_grad_enabled() and not alike:
            self.needed.add(place)
        return alike and place not in self.needed

    def input(self, x: Tensor, weight: Tensor, kind: str = "linear") -> Tensor:
        """Return what meets a weight, rounded."""
        own = self.own is None or self.own == tuple(weight.shape)
        return self.precision.operand(f"{kind}_input" if own else "query", x)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x (..., K) times weight (N, K) transposed, plus bias."""
        p = self.precision
        bias = None if bias is None else p.operand("bias", bias)
        rounded = self.input(x, weight), p.operand("linear_weight", weight)
        return p.multiplied(operators.linear, *rounded, bias, role="linear_grad")

    def by_output(self, weight: Tensor) -> Tensor:
        """Return a weight (..., K, N), rounded with a range per column."""
        return self.precision.operand("linear_weight", weight.mT).mT


def _has_a_grid(args: Any) -> bool:
    """Whether operands are what can be rounded."""
    listed = (x for part in args for x in (part if isinstance(part, (list, tuple)) else (part,)))
    tensors = [x for x in listed if isinstance(x, Tensor)]
    plain = all(x.layout == torch.strided and not x.is_complex() for x in tensors)
    return plain and len(tensors) > 0 and tensors[0].is_floating_point()


def is_weight(x: Tensor, given: tuple[Tensor, ...] = ()) -> bool:
    """Whether a tensor is a parameter, or in the place of one, or a view of one."""
    return any(isinstance(y, nn.Parameter) or any(y is g for g in given) for y in (x, x._base))


def constant(*operands: Tensor, given: tuple[Tensor, ...] = ()) -> bool:
    """Whether no operand needs a gradient or is a weight."""
    return not any(x.requires_grad or is_weight(x, given) for x in operands)


def only_scales(function: Any, args: Any, constant: Callable[..., bool] = constant) -> bool:
    """Whether a product is a sum over one element of what is constant: a scaling."""
    if function not in PAIRS:
        return False
    a, b = args[:2]
    return a.dim() > 0 and a.shape[-1] == 1 and constant(a, b)


def _surroundings() -> tuple[Any, bool]:
    return torch._C._autograd._top_saved_tensors_default_hooks(True), torch.is_grad_enabled()


# --- rules: products, function, its arguments -> its result -----------------------------------------------------------


def _linear(c: Products, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return in_float32(c.precision, input, c.linear, input, weight, bias)


def _conv(c: Products, function: Any, input: Tensor, weight: Tensor, bias: Any = None, *rest: Any, **more: Any) -> Any:
    p, transposed = c.precision, function in TRANSPOSED

    def multiplied(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        b = None if b is None else p.operand("bias", b)
        x = c.input(x, w, "conv")
        w = p.operand("conv_weight", w.transpose(0, 1)).transpose(0, 1) if transposed else p.operand("conv_weight", w)
        convolve = lambda x, w, b: function(x, w, b, *rest, **more)  # noqa: E731
        return p.multiplied(convolve, x, w, b, role="conv_grad")

    alone = input.dim() < weight.dim()
    y = in_float32(p, input, multiplied, input.unsqueeze(0) if alone else input, weight, bias)
    return y.squeeze(0) if alone else y


def _matmul(c: Products, function: Any, a: Tensor, b: Tensor) -> Tensor:
    weights = is_weight(a, c.given), is_weight(b, c.given)
    return in_float32(c.precision, a, lambda a, b: _pair(c, traced.matmul, weights, a, b), a, b)


def _added(c: Products, function: Any, input: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Of ``beta input + alpha a @ b``; an ``input`` that is a parameter is a bias."""
    weights = is_weight(a, c.given), is_weight(b, c.given)

    def scaled(factor: Any, x: Tensor) -> Tensor:
        return x if factor == 1 else factor * x

    def biased(input: Tensor, a: Tensor, b: Tensor) -> Tensor:
        bias = c.precision.operand("bias", input)
        return _pair(c, lambda a, b, bias: scaled(beta, bias) + scaled(alpha, traced.matmul(a, b)), weights, a, b, bias)

    def summed(input: Tensor, a: Tensor, b: Tensor) -> Tensor:
        product = scaled(alpha, _pair(c, traced.matmul, weights, a, b))
        return product if beta == 0 else scaled(beta, input) + product  # torch does not read an input times 0

    return in_float32(c.precision, a, biased if is_weight(input, c.given) and beta != 0 else summed, input, a, b)


def _pair(
    c: Products, multiply: Callable[..., Tensor], weights: tuple[bool, bool], a: Tensor, b: Tensor, *bias: Tensor,
    roles: tuple[str, ...] = (),
) -> Tensor:  # fmt: skip
    """Multiply a (..., M, K) and b (..., K, N), either of them perhaps a vector; ``weights`` says which is a weight."""
    p = c.precision
    if weights[1] and b.dim() > 1:
        return p.multiplied(multiply, c.input(a, b.mT), c.by_output(b), *bias, role="linear_grad")
    if weights[0] and a.dim() > 1:  # what is an input comes first
        turned = lambda b, a, *bias: multiply(a, b, *bias)  # noqa: E731
        return p.multiplied(turned, c.input(b, a), p.operand("linear_weight", a), *bias, role="linear_grad")
    if not roles:
        lies_turned = b.dim() > 1 and b.stride(-1) != 1 and b.stride(-2) == 1
        roles = ("query", "key") if lies_turned else ("probabilities", "value")
    if outer := a.dim() > 1 < b.dim() and a.shape[-1] == 1:  # vectors lie across the sum
        a, roles = a.mT, ("probabilities", "value")
    by_token = roles[1] == "key" and not c.per_feature
    if p.execution == "integer" and not (outer or by_token) and not bias and a.dim() > 1 < b.dim() and p.on_codes(a):
        c.on_codes = True
        try:
            y = on_codes("matmul", p, roles, a, b)
        finally:
            c.on_codes = False
        if c.report is not None:
            c.report(a, b, y)
        return y
    second = p.operand("key", b.mT, -1).mT if by_token else p.operand(roles[1], b)
    first = p.operand(roles[0], a)
    return p.multiplied(multiply, first.mT if outer else first, second, *bias)


def _attention(
    c: Products, function: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention with both of its products quantised; scaling, mask, softmax and dropout stay in float32.

    scores = q(Q) q(K')     P = dropout(softmax(scores * scale + mask))     context = q(P) q(V)
    """
    if is_causal and attn_mask is not None:
        raise RuntimeError("attention takes a mask or is_causal=True, not both")

    def multiplied(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        scores = _pair(c, traced.matmul, NEITHER, query, key.transpose(-2, -1), roles=("query", "key"))
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        probabilities = functional.dropout(torch.ops.aten._safe_softmax(scores, -1), dropout_p, True)
        return _pair(c, traced.matmul, NEITHER, probabilities, value, roles=("probabilities", "value"))

    return in_float32(c.precision, query, multiplied, query, key, value, attn_mask)


def _bilinear(c: Products, function: Any, first: Tensor, second: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    p = c.precision

    def multiplied(x: Tensor, y: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        b = None if b is None else p.operand("bias", b)
        w = p.operand("linear_weight", w.flatten(1)).view_as(w)
        x, y = (p.operand("linear_input", v) for v in (x, y))
        return p.multiplied(lambda x, w, y, b: function(x, y, w, b), x, w, y, b, role="linear_grad")

    return in_float32(p, first, multiplied, first, second, weight, bias)


def _grouped(c: Products, function: Any, a: Tensor, b: Tensor, *rest: Any, **more: Any) -> Tensor:
    """Of experts: rows (M, K), each multiplied by that one of the weights (E, K, N) that is its own."""
    p = c.precision

    def groups(a: Tensor, b: Tensor) -> Tensor:
        return _by_expert(a, b, *rest, **more) if a.is_cuda else function(a, b, *rest, **more)

    def multiplied(a: Tensor, b: Tensor) -> Tensor:
        return p.multiplied(groups, c.input(a, b), c.by_output(b), role="linear_grad")

    return in_float32(p, a, multiplied, a, b)


def _by_expert(a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, **more: Any) -> Tensor:
    """Compute ``grouped_mm`` one expert after the other: on CUDA torch has it for bfloat16 alone."""
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    y = torch.cat([rows @ weight for rows, weight in zip(a[: sum(sizes)].split(sizes), b, strict=True)])
    return y if bias is None else y + bias.repeat_interleave(offs.diff(prepend=offs.new_zeros(1)), 0)


def _einsum(c: Products, function: Any, equation: Any, *operands: Any) -> Tensor:
    """Of several operands those on the left are multiplied first."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) < 2:
        return function(equation, *operands)
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms, tensors = left.split(","), list(operands)
    if not arrow:
        single = sorted(x for x in set(left) if x.isalpha() and left.count(x) == 1)
        result = ("..." if "..." in left else "") + "".join(single)
    if "..." in left and "..." not in result:  # summed over: dimensions with letters, as the others
        free = "".join(x for x in ascii_letters if x not in left)
        terms = [t.replace("...", free[: x.dim() + 3 - len(t)][::-1]) for t, x in zip(terms, tensors, strict=True)]
    while len(terms) > 1:
        wanted = set("".join([*terms[2:], result]))
        both = terms[0] + terms[1]
        kept = ("..." if "..." in both else "") + "".join(dict.fromkeys(x for x in both if x.isalpha() and x in wanted))
        product = _contracted(c, function, (terms[0], terms[1]), kept if terms[2:] else result, *tensors[:2])
        terms, tensors = [kept if terms[2:] else result, *terms[2:]], [product, *tensors[2:]]
    return tensors[0]


def _contracted(c: Products, function: Any, terms: tuple[str, str], result: str, a: Tensor, b: Tensor) -> Tensor:
    p, equation = c.precision, f"{terms[0]},{terms[1]}->{result}"
    summed = [x for x in dict.fromkeys(terms[0] + terms[1]) if x.isalpha() and x not in result]
    weights = is_weight(a, c.given), is_weight(b, c.given)
    places = [(x, i) for term, x in zip(terms, (a, b), strict=True) for i in _places(term, x, summed)]
    if not summed or (all(x.shape[i] == 1 for x, i in places) and c.constant(a, b)):  # element by element, as a * b
        return function(equation, a, b)

    def multiplied(a: Tensor, b: Tensor) -> Tensor:
        rounded = []
        for x, term, weight, role in zip((a, b), terms, weights, ("query", "value"), strict=True):
            dims = _places(term, x, summed)
            if any(weights) and dims:  # as in a linear layer: a range over all that is summed
                order = [i for i in range(x.dim()) if i not in dims] + dims
                turned = x.permute(order)
                flat = p.operand("linear_weight" if weight else "linear_input", turned.flatten(x.dim() - len(dims)))
                rounded.append(flat.view(turned.shape).permute(sorted(range(x.dim()), key=order.__getitem__)))
            else:
                along = dims[-1] - x.dim() if dims else -1
                rounded.append(p.operand("linear_input" if any(weights) else role, x, along))
        grad = "linear_grad" if any(weights) else "grad"
        if weights != (True, False):  # the error product's operand comes first
            return p.multiplied(lambda a, b: traced.einsum(equation, a, b), *rounded, role=grad)
        return p.multiplied(lambda b, a: traced.einsum(equation, a, b), *rounded[::-1], role=grad)

    return in_float32(p, a, multiplied, a, b)


def _places(term: str, x: Tensor, letters: list[str]) -> list[int]:
    """Return the dimensions of an operand of ``einsum`` that have these letters, in their order."""
    before = term.partition(".")[0]
    places = {letter: i if letter in before else i - len(term) + x.dim() for i, letter in enumerate(term)}
    return [places[letter] for letter in letters if letter in term]


def _tensordot(c: Products, function: Any, a: Tensor, b: Tensor, dims: Any = 2, **more: Any) -> Tensor:
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    of_a, of_b = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    of_a, of_b = [i % a.dim() for i in of_a], [i % b.dim() for i in of_b]
    left, right = list(ascii_letters[: a.dim()]), list(ascii_letters[a.dim() : a.dim() + b.dim()])
    for i, j in zip(of_a, of_b, strict=True):
        right[j] = left[i]
    result = [x for i, x in enumerate(left) if i not in of_a] + [x for j, x in enumerate(right) if j not in of_b]
    return _einsum(c, torch.einsum, f"{''.join(left)},{''.join(right)}->{''.join(result)}", a, b)


def _chained(c: Products, function: Any, *matrices: Any) -> Tensor:
    """From the left to the right."""
    first, *others = matrices[0] if isinstance(matrices[0], (list, tuple)) else matrices
    for other in others:
        first = _matmul(c, torch.matmul, first, other)
    return first


def _recurrence(form: Rule, kind: str) -> Rule:
    def rule(c: Products, function: Any, x: Tensor, *given: Any) -> Any:
        run = partial(form, kind, c.linear)
        return in_float32(c.precision, x, run, x, *(tuple(g) if isinstance(g, list) else g for g in given))

    return rule


def _named(*names: str) -> list[Any]:
    """Return the functions of torch with these names, wherever it has them."""
    places = (torch, functional, Tensor, torch.linalg, torch._C._nn, torch._C._sparse, torch.ops.aten)  # type: ignore[attr-defined]
    found = [getattr(place, name) for name in names for place in places if hasattr(place, name)]
    overloads = "default", "padding", "input", "data"  # of the operators that graphs are made of
    return found + [getattr(f, name) for f in found for name in overloads if hasattr(f, name)]


PAIRS = dict.fromkeys(_named("matmul", "mm", "bmm", "mv", "dot", "vdot", "__matmul__"))
TRANSPOSED = dict.fromkeys(_named("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))


def _table() -> dict[str, tuple[Rule, str]]:
    """Return the name of a product -> its rule, and the names of its operands in their order."""
    like_linear, cell = "input weight bias", "input hx w_ih w_hh b_ih b_hh"
    return {
        "linear": (_linear, like_linear),
        **{f"conv{way}{n}d": (_conv, like_linear) for way in ("", "_transpose") for n in (1, 2, 3)},
        **dict.fromkeys(("matmul", "vdot", "__matmul__"), (_matmul, "input other")),
        **dict.fromkeys(("mm", "bmm"), (_matmul, "input mat2")),
        "mv": (_matmul, "input vec"),
        "dot": (_matmul, "input tensor"),
        "__rmatmul__": (lambda c, function, b, a: _matmul(c, torch.matmul, a, b), "input other"),
        "inner": (lambda c, function, a, b: _tensordot(c, function, a, b, ([-1], [-1])), "input other"),
        "addmm": (_added, "input mat1 mat2"),
        "baddbmm": (_added, "input batch1 batch2"),
        "addmv": (_added, "input mat vec"),
        "scaled_dot_product_attention": (_attention, "query key value attn_mask"),
        "bilinear": (_bilinear, "input1 input2 weight bias"),
        **dict.fromkeys(("grouped_mm", "_grouped_mm"), (_grouped, "mat_a mat_b")),
        "einsum": (_einsum, "equation"),
        "tensordot": (_tensordot, "a b"),
        **dict.fromkeys(("chain_matmul", "multi_dot"), (_chained, "tensors")),
        **{kind: (_recurrence(recurrences.unrolled, kind), "input hx") for kind in recurrences.STEPS},
        **{f"{kind}_cell": (_recurrence(recurrences.cell, kind), cell) for kind in recurrences.STEPS},
    }


def in_order(function: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a product, with operands that were given by name in their places."""
    args, kwargs, names = tuple(args), dict(kwargs), RULES[function][1]
    while len(args) < len(names) and names[len(args)] in kwargs:
        args = (*args, kwargs.pop(names[len(args)]))
    return args, kwargs


def factors(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the first two operands that a product multiplies."""
    ordered = in_order(function, args, kwargs)[0] if function in RULES else args
    return ordered[1:3] if function.__name__.startswith(("add", "badd")) else ordered[:2]


def _seen_inside(function: Any) -> Callable[..., Any]:
    """Return a function of torch that is written in Python, without its question whether a mode wants it whole."""
    asking = "has_torch_function", "has_torch_function_variadic"
    own = function.__globals__ | dict.fromkeys(asking, lambda *_: False)
    inside = FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    inside.__kwdefaults__ = function.__kwdefaults__
    return lambda *args, options=None, **kwargs: inside(*args, **kwargs)  # cross entropy's hide products to save memory


RULES = {function: (rule, names.split()) for name, (rule, names) in _table().items() for function in _named(name)}
OPERATORS = {"transformers::grouped_mm_fallback": (_grouped, "input weight")}  # of libraries that may not be imported
UNRULED = frozenset(_named(*coverage.UNRULED))  # products that no rule quantises
INSIDE = {f: _seen_inside(f) for f in _named("multi_head_attention_forward", "linear_cross_entropy")}


def learn_operators() -> None:
    """Take in the rules of those operators of libraries that are there by now."""
    for name, (rule, operands) in OPERATORS.items():
        library, _, operator = name.partition("::")
        packet = getattr(getattr(torch.ops, library), operator, None)
        for function in () if packet is None else (packet, packet.default):
            RULES[function] = rule, operands.split()


class QuantOperations(QuantizedLayer):
    """A module of any class that multiplies in its own forward, with all products of it quantised."""

    KIND = "attention"
    CATCHES = True
    SPLITS = True
    SUMS: ClassVar = {"key": -2, "value": -2, "conv_input": 1, "conv_weight": 1, "conv_grad": 1}
    catching: Products

    @classmethod
    def from_float(cls, module: Any, config: QuantConfig, key: int = 0) -> Any:
        """Convert in place."""
        super().from_float(module, config, key)
        learn_operators()
        weight = vars(module)["_parameters"].get("weight") if _keeps_ranges(cls.FLOAT) else None
        own = None if weight is None else tuple(weight.shape)
        module.precision.must_be_there = False
        module.catching = Products(module.precision, own, cls.by_feature(module))
        return module

    @classmethod
    def roles(cls, module: nn.Module, config: QuantConfig) -> dict[str, Quantizer]:
        """Return the quantisers of layers for what meets a weight, those of attention for the others."""
        of_weights = ("linear_", "conv_", "bias")
        found = {role: q for role, q in config.quantizers.items() if role.startswith(of_weights)}
        found |= super().roles(module, config)
        if not _keeps_ranges(cls.FLOAT):  # there may be several products, and how many is not known
            for role, own in (("linear_input", "per_row"), ("conv_input", "per_channel")):
                if found[role].running:
                    found[role] = replace(found[role], granularity=own, running=False)
        return found

    @staticmethod
    def run(forward: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a module's own forward."""
        catching = module.catching
        if torch.compiler.is_compiling():
            return catching.around(forward, module, *args, **kwargs)
        held = (p for m in module.modules() for p in m._parameters.values())  # also of others, as tied weights are
        given = (p for p in held if p is not None and not isinstance(p, nn.Parameter))
        try:
            catching.given = tuple(given)
            return catching.around(forward, module, *args, **kwargs)
        finally:
            catching.given = ()

    @staticmethod
    def by_feature(module: nn.Module) -> bool:
        """Whether the keys of a module have a range per feature: an encoder's attention, as the paper's BERT has it."""
        causal = getattr(module, "is_decoder", False) or getattr(module, "is_causal", False)
        return getattr(module, "FLOAT", type(module)).__name__ in PER_FEATURE and not causal

    @classmethod
    def check(cls, module: Any) -> None:
        """Refuse fused kinds of attention of transformers that no mode can look into, and names that are taken."""
        super().check(module)
        kind = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if kind not in (None, "eager", "sdpa"):
            raise ValueError(
                f"the model computes attention with {kind!r}, which cannot be quantised; load it with "
                f"attn_implementation='eager' (or 'sdpa')"
            )

    def to_float(self) -> None:
        """Undo ``from_float``, in place."""
        del self.catching
        super().to_float()


class InFloat32(Changed):
    """A module that was left out, inside one whose products are caught."""

    @staticmethod
    def run(forward: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a module's own forward, of which nothing is caught."""
        with unseen():
            return forward(module, *args, **kwargs)


def _keeps_ranges(kind: type[nn.Module]) -> bool:
    """Whether a class is one of torch's layers with one product, whose inputs have a running range."""
    return issubclass(kind, (nn.Linear, _ConvNd))


def _made(base: type[QuantOperations] | type[InFloat32], kind: type[nn.Module]) -> type[Any]:
    """Return the class of modules that had the class ``kind``: they run its forward inside the ``run`` of a base."""
    run = base.run if TRACED else torch.compiler.disable(base.run)

    @wraps(kind.forward)  # with its signature, which others read
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(kind.forward, self, *args, **kwargs)

    def again(self: Any, protocol: Any) -> Any:  # the class is made where a copy or a stored model comes to
        return _empty, (base, kind), self.__getstate__()

    def copied(self: Any, memo: dict[int, Any]) -> Any:  # a graph's own copy is made of the graph alone
        memo[id(self)] = new = _empty(base, kind)
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    about = {"FLOAT": kind, "forward": forward, "__module__": __name__, "__doc__": kind.__doc__, "__reduce_ex__": again}
    if issubclass(kind, GraphModule):
        about |= {"__deepcopy__": copied, "recompile": _refuse}
    return type(f"Quant{kind.__name__}" if base is QuantOperations else kind.__name__, (base, kind), about)


def _refuse(self: Any) -> None:
    raise ValueError("restore_ this model before its graph is compiled again, and quantize_ it afterwards")


def _empty(*of: Any) -> Any:
    return object.__new__(made(*of))  # a graph's own __new__ makes a class for every graph


made: Any = cache(_made)
