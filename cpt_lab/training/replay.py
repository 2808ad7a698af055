"""The forward and backward pass of a step on a CPU, recorded once as torch's operations and replayed for many runs.

Runs of one recipe and seed differ in their bits alone, which lie in tensors. So one recording serves all of them: the
operations, without modules, autograd and schedule around them. What does not depend on a run, such as the dropout of
a step, is computed once for all. A run's own operations are those that it would do alone, on tensors of its own, in the
same order: its numbers are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from cpt_lab.training.session import Session

# operations that ask of their operands the shape alone
SHAPED = ("empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
# what Python calls in less time, to the same result
QUICK: dict[str, Any] = {
    "aten.alias.default": None,
    "aten.detach.default": None,
    "aten.t.default": Tensor.t,
    "aten.view.default": Tensor.view,
    "aten.transpose.int": Tensor.transpose,
    "aten.unsqueeze.default": Tensor.unsqueeze,
}


class CannotReplay(Exception):
    """A step depends on more than the tensors of its run."""


class Done(NamedTuple):
    """What a replayed pass leaves: the loss, (0-d), what the next step needs, and a gradient for every parameter."""

    loss: Tensor
    carry: Any
    gradients: Sequence[Tensor | None]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a batch, or of what a step hands on."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def tensors_of(session: Session) -> dict[str, Tensor]:
    """Return the tensors that a run has of its own: parameters, buffers, and what its precisions hold."""
    found: dict[str, Tensor] = {}
    for name, module in session.model.named_modules():
        for held in (vars(module), module._parameters, module._buffers):
            found |= {f"{name}.{key}": value for key, value in held.items() if isinstance(value, Tensor)}
    return found


@contextmanager
def unchanged(session: Session) -> Iterator[None]:
    """Put a run back as it was before a ``with`` block."""
    mine, random, carry = tensors_of(session), torch.get_rng_state(), session.carry
    before = {name: value.detach().clone() for name, value in mine.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in mine.items():
                value.copy_(before[name])
        torch.set_rng_state(random)
        session.carry = carry
        session.optimizer.zero_grad(set_to_none=True)


class Replay:
    """A recorded pass.

    Args:
        session: a run that has done a step already; afterwards it is as before.
        batch: of the step that is recorded.

    Raises:
        CannotReplay: when something does not show among torch's operations, or writes to what all runs share.
    """

    def __init__(self, session: Session, batch: Any) -> None:
        leaves, self._given = tree_flatten((batch, session.carry))
        mine = tensors_of(session)
        trained = session.trained
        laid_out: list[bool] = []

        def step(*tensors: Tensor) -> list[Any]:
            given = iter(tensors)
            rebuilt = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            with session.arithmetic():
                loss, carry = session.task.loss(session.model, *tree_unflatten(rebuilt, self._given))
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            # autograd keeps a gradient as its parameter lies in memory
            laid_out[:] = [g is None or g.stride() == p.stride() for g, p in zip(gradients, trained, strict=True)]
            carried, self._carry = tree_flatten(carry)
            return [loss.detach(), *carried, *gradients]

        with unchanged(session):
            recorded = make_fx(step)(*tensors_in(leaves))
        self._copied = [place for place, fits in enumerate(laid_out) if not fits]
        of_batch = len(tensors_in(batch))
        self._shared, self._own, self._reads = _functions(recorded, mine, of_batch)
        self._check(session, batch)

    def of(self, session: Session) -> Callable[[list[Tensor], Sequence[Any]], Done]:
        """Return the pass of a run: a function of the batch's tensors and of what ``shared`` returned for them."""
        mine = tensors_of(session)
        reads = [mine[name] for name in self._reads]
        trained = session.trained

        def replayed(batch: list[Tensor], shared: Sequence[Any]) -> Done:
            carried = tensors_in(session.carry)
            with torch.inference_mode():
                loss, *rest = self._own(*batch, *carried, *reads, *shared)
            count = self._carry.num_leaves
            gradients = rest[count:]
            for place in self._copied:
                gradients[place] = torch.empty_like(trained[place]).copy_(gradients[place])
            carry = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in rest[:count]]
            return Done(loss, tree_unflatten(carry, self._carry), gradients)

        return replayed

    def _check(self, session: Session, batch: Any) -> None:
        """Raise CannotReplay unless the recording does what the step does: some libraries compute unseen by torch."""

        def left(loss: Tensor, carry: Any, gradients: Iterable[Tensor | None]) -> list[Any]:
            found = [loss, *tree_flatten(carry)[0], *gradients, *tensors_of(session).values(), torch.get_rng_state()]
            return [x.clone() if isinstance(x, Tensor) else x for x in found]

        with unchanged(session), session.arithmetic():
            loss, carry = session.task.loss(session.model, batch, session.carry)
            loss.backward()
            expected = left(loss, carry, [p.grad for p in session.trained])
        with unchanged(session):
            given = tensors_in(batch)
            found = left(*self.of(session)(given, self.shared(given)))
        same = (torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(expected, found, strict=True))
        if not all(same):
            raise CannotReplay("what torch recorded of a step is not all that the step does")

    def shared(self, batch: list[Tensor]) -> Sequence[Any]:
        """Do what is the same for all runs of a step."""
        with torch.inference_mode():
            return self._shared(*batch)


def _functions(
    recorded: fx.GraphModule, mine: Mapping[str, Tensor], of_batch: int
) -> tuple[Callable[..., Any], Callable[..., Any], list[str]]:
    """Return what is done for all runs, what is done for each, and the names of the tensors that the latter reads."""
    _free_of_operands(recorded)
    names = {value.data_ptr(): name for name, value in mine.items() if value.numel()}
    storages = {value.untyped_storage().data_ptr() for value in mine.values() if value.numel()}
    nodes = list(recorded.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    constants = {node: getattr(recorded, node.target) for node in nodes if node.op == "get_attr"}
    reads: dict[fx.Node, str] = {}
    for node, value in constants.items():
        if value.numel() and value.untyped_storage().data_ptr() in storages:
            name = names.get(value.data_ptr(), "")
            if not name or (mine[name].shape, mine[name].stride()) != (value.shape, value.stride()):
                raise CannotReplay(f"a part of {name or 'a tensor'} of shape {tuple(value.shape)} is kept")
            reads[node] = name
    own = _own(nodes, {*given[of_batch:], *reads})
    if odd := [node for node in own if node in constants and node not in reads]:
        raise CannotReplay(f"a step writes to a tensor of shape {tuple(constants[odd[0]].shape)} that runs share")
    last = nodes[-1]
    mixed = [n for n in nodes if n not in own and n in _read_by(n_ for n_ in nodes if n_ in own or n_ is last)]
    shared = [n for n in mixed if n.op == "call_function"]
    plain = {node: value for node, value in constants.items() if node not in reads}
    calls = [node for node in nodes if node.op == "call_function"]
    batch = given[:of_batch]
    first = _function(batch, [n for n in calls if n not in own], shared, plain)
    then = _function([*given, *reads, *shared], [n for n in calls if n in own], last.args[0], plain)
    return first, then, list(reads.values())


def _free_of_operands(recorded: fx.GraphModule) -> None:
    """Let operations that ask for a shape alone read no operand, so that they depend on no run."""
    for node in list(recorded.graph.nodes):
        if isinstance(node.target, OpOverload) and node.target._schema.name.partition("::")[2] in SHAPED:
            of = node.args[0].meta["val"]
            setattr(
                recorded,
                name := f"shape_of_{node.name}",
                torch.empty_strided(of.shape, of.stride(), dtype=of.dtype, device="meta"),
            )
            with recorded.graph.inserting_before(node):
                node.args = (recorded.graph.get_attr(name), *node.args[1:])
            node.kwargs = {**node.kwargs, "device": of.device}


def _read_by(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {read for node in nodes for read in node.all_input_nodes}


def _own(nodes: list[fx.Node], start: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on a run: what reads something of its own, and what that writes to."""
    own, before = set(start), -1
    while len(own) > before:
        before = len(own)
        for node in nodes:
            if node.op == "call_function" and (node in own or own & set(node.all_input_nodes)):
                own.add(node)
                own |= {_made(value) for value, alias in _aliases(node) if alias.is_write}
    return own


def _aliases(node: fx.Node) -> list[tuple[fx.Node, Any]]:
    """Return the arguments of a call whose memory its result shares, or that it writes to."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    arguments = [*zip(node.target._schema.arguments, node.args, strict=False)]
    arguments += [(a, node.kwargs[a.name]) for a in node.target._schema.arguments if a.name in node.kwargs]
    return [(value, a.alias_info) for a, value in arguments if a.alias_info is not None and isinstance(value, fx.Node)]


def _made(node: fx.Node) -> fx.Node:
    """Return the node whose memory this one is a view of."""
    while aliases := _aliases(node):
        node = aliases[0][0]
    return node


def _function(
    given: Sequence[fx.Node], calls: list[fx.Node], returned: Any, constants: Mapping[fx.Node, Tensor]
) -> Callable[..., Any]:
    """Write a Python function of nodes: calls, one after the other; values go when nothing reads them any more."""
    held: dict[str, Any] = {f"c{i}": value for i, value in enumerate(constants.values())}
    words = {node: f"c{i}" for i, node in enumerate(constants)}
    words |= {node: f"v{i}" for i, node in enumerate([*given, *calls])}

    def word(value: Any) -> str:
        if isinstance(value, fx.Node):
            return words[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(word, value))}]"
        name = f"k{len(held)}"
        held[name] = value
        return name

    last: dict[fx.Node, fx.Node] = {read: node for node in calls for read in node.all_input_nodes}
    kept = set(_nodes_in(returned))
    lines = [f"def function({', '.join(words[node] for node in given)}):"]
    for i, node in enumerate(calls):
        quick = QUICK.get(str(node.target), node.target)
        arguments = [word(x) for x in node.args] + [f"{name}={word(x)}" for name, x in node.kwargs.items()]
        if quick is None:
            lines.append(f"{words[node]} = {arguments[0]}")
        else:
            held[f"f{i}"] = getattr(quick, "_op", quick)
            lines.append(f"{words[node]} = f{i}({', '.join(arguments)})")
        gone = [words[n] for n in node.all_input_nodes if last[n] is node and n not in kept and n not in constants]
        if gone:
            lines.append(f"del {', '.join(gone)}")
    lines.append(f"return {word(returned)}")
    exec("\n    ".join(lines), held)
    return held["function"]


def _nodes_in(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    return [node for part in value for node in _nodes_in(part)] if isinstance(value, (list, tuple)) else []
