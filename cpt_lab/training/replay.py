"""The forward and backward pass of a step on a CPU, recorded once as torch's operations and replayed for many runs.

Runs of one recipe and seed differ in their bits alone, which lie in tensors. So one recording serves all of them: the
operations, without modules, autograd and schedule around them. What does not depend on a run, such as the dropout of
a step, is computed once for all. A run's own operations are those that it would do alone, on tensors of its own, in the
same order: its numbers are the same, bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from cpt_core.quantization.convert import precision_of
from cpt_core.quantization.scheduler import precision
from cpt_lab.training.session import Session

# operations that ask of their first operand the shape alone
SHAPED = (
    "empty_like",
    "full_like",
    "new_empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "zeros_like",
)
# what does nothing without autograd, and what Python calls in less time
QUICK: dict[str, Any] = {
    "aten.alias.default": None,
    "aten.detach.default": None,
    "aten.t.default": Tensor.t,
    "aten.view.default": Tensor.view,
    "aten.transpose.int": Tensor.transpose,
}


class CannotReplay(Exception):
    """A step depends on more than the tensors of its run, or leaves more."""


class Done(NamedTuple):
    """What a pass leaves: the loss, (0-d), what the next step needs, and a gradient for every parameter."""

    loss: Tensor
    carry: Any
    gradients: Sequence[Tensor | None]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a batch, or of what a step hands on."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def tensors_of(session: Session) -> dict[str, Tensor]:
    """Return the tensors that a run has of its own: parameters, buffers, and what its precisions hold."""
    holders = dict(session.model.named_modules())
    for name, module in list(holders.items()):
        layer_precision = precision_of(module)
        if (
            layer_precision is not None
        ):  # that of a layer without weights is no child of it
            holders.setdefault(f"{name}.precision".lstrip("."), layer_precision)
    found: dict[str, Tensor] = {}
    for name, holder in holders.items():
        for held in (vars(holder), holder._parameters, holder._buffers):
            found |= {
                f"{name}.{key}": value
                for key, value in held.items()
                if isinstance(value, Tensor)
            }
    return found


class Replay:
    """A recorded pass.

    Args:
        session: a run that has done a step already; afterwards it is as before.
        batch: of the step that is recorded.

    Raises:
        CannotReplay: when torch does not see all that the step does, or when runs would disturb one another.
    """

    def __init__(self, session: Session, batch: Any) -> None:
        leaves, structure = tree_flatten((batch, session.carry))
        places: list[
            int
        ] = []  # of gradients that autograd keeps as their parameters lie in memory

        def step(*tensors: Tensor) -> list[Any]:
            given = iter(tensors)
            rebuilt = [
                next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves
            ]
            with session.arithmetic():
                loss, carry = session.task.loss(
                    session.model, *tree_unflatten(rebuilt, structure)
                )
            gradients = torch.autograd.grad(loss, session.trained, allow_unused=True)
            pairs = enumerate(zip(gradients, session.trained, strict=True))
            places.extend(
                i for i, (g, p) in pairs if g is not None and g.stride() != p.stride()
            )
            carried, self._carry = tree_flatten(carry)
            return [loss.detach(), *carried, *gradients]

        shapes = TracingContext(
            FakeTensorMode(allow_fallback_kernels=True)
        )  # else torch makes one for every tensor
        with _unchanged(session), tracing(shapes):
            recorded = make_fx(step)(*tensors_in(leaves))
        self._copied = places
        self._shared, self._own, self._reads = _functions(
            recorded, tensors_of(session), len(tensors_in(batch))
        )
        self._check(session, batch)

    def shared(self, batch: list[Tensor]) -> Sequence[Any]:
        """Do what is the same for all runs of a step, whose batch has these tensors."""
        with torch.inference_mode():
            return self._shared(*batch)

    def of(self, session: Session) -> Callable[[list[Tensor], Sequence[Any]], Done]:
        """Return the pass of a run: a function of the batch's tensors and of what ``shared`` returned for them."""
        mine, count = tensors_of(session), self._carry.num_leaves
        reads = [mine[name] for name in self._reads]

        def replayed(batch: list[Tensor], shared: Sequence[Any]) -> Done:
            with torch.inference_mode():
                loss, *rest = self._own(
                    *batch, *tensors_in(session.carry), *reads, *shared
                )
            gradients = rest[count:]
            for i in self._copied:
                gradients[i] = torch.empty_like(session.trained[i]).copy_(gradients[i])
            carry = [
                leaf.clone() if isinstance(leaf, Tensor) else leaf
                for leaf in rest[:count]
            ]
            return Done(loss, tree_unflatten(carry, self._carry), gradients)

        return replayed

    def _check(self, session: Session, batch: Any) -> None:
        """Raise CannotReplay unless the recording does what the step does, at other bits and weights than it was made.

        Some libraries compute unseen by torch, and what Python has read of a tensor is a constant of the recording.
        """
        kind, level = (
            session.kind(),
            5 if session.scheduler.get_last_bits()[0] != 5 else 6,
        )

        def left(work: Callable[[], Iterable[Any]]) -> list[Any]:
            with _unchanged(session), torch.no_grad():
                for parameter in session.trained:
                    parameter.mul_(1.01)
                with precision(session.model, level, level):
                    with torch.enable_grad():
                        done = None if session.kind() != kind else work()
                if (
                    done is None
                ):  # other levels are another recording's: at those in force, then
                    with torch.enable_grad():
                        done = work()
                loss, carry, gradients = done
                found = [
                    loss,
                    *tree_flatten(carry)[0],
                    *gradients,
                    *tensors_of(session).values(),
                ]
                return [
                    x.clone() if isinstance(x, Tensor) else x
                    for x in (*found, torch.get_rng_state())
                ]

        def passed() -> Done:
            with session.arithmetic():
                loss, carry = session.task.loss(session.model, batch, session.carry)
            loss.backward()
            return Done(loss, carry, [p.grad for p in session.trained])

        given = tensors_in(batch)
        pairs = zip(
            left(passed),
            left(lambda: self.of(session)(given, self.shared(given))),
            strict=True,
        )
        if not all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs
        ):
            raise CannotReplay(
                "what torch has recorded of a step is not all that the step does"
            )


@contextmanager
def _unchanged(session: Session) -> Iterator[None]:
    """Put a run back as it was before a ``with`` block."""
    mine, random = tensors_of(session), torch.get_rng_state()
    before = {name: value.detach().clone() for name, value in mine.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in mine.items():
                value.copy_(before[name])
        torch.set_rng_state(random)
        session.optimizer.zero_grad(set_to_none=True)


def _functions(
    recorded: fx.GraphModule, mine: Mapping[str, Tensor], of_batch: int
) -> tuple[Callable[..., Any], Callable[..., Any], list[str]]:
    """Return what is done for all runs, what is done for each, and the names of the tensors that the latter reads."""
    _ask_for_shapes_alone(recorded)
    nodes = list(recorded.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    constants = {
        node: getattr(recorded, node.target) for node in nodes if node.op == "get_attr"
    }
    reads = _names(constants, mine)
    own = _own(nodes, {*given[of_batch:], *reads})
    for node in nodes:
        if written := [
            n
            for n in _written(node)
            if n in given[:of_batch] or (n in constants and n not in reads)
        ]:
            raise CannotReplay(
                f"{node.target} writes to {written[0]}, which all runs read"
            )
        if node in own and torch.Tag.nondeterministic_seeded in getattr(
            node.target, "tags", ()
        ):
            raise CannotReplay(f"{node.target} draws random numbers for every run")
    calls = [node for node in nodes if node.op == "call_function"]
    each, returned = [node for node in calls if node in own], nodes[-1].args[0]
    read = {n for node in (*each, nodes[-1]) for n in node.all_input_nodes}
    common = [node for node in calls if node not in own]
    shared = [node for node in common if node in read]
    plain = {node: value for node, value in constants.items() if node not in reads}
    first = _function(given[:of_batch], common, shared, plain)
    return (
        first,
        _function([*given, *reads, *shared], each, returned, plain),
        list(reads.values()),
    )


def _ask_for_shapes_alone(recorded: fx.GraphModule) -> None:
    """Let operations that ask for a shape read no operand, so that they depend on no run."""
    for node in list(recorded.graph.nodes):
        if (
            isinstance(node.target, OpOverload)
            and node.target._schema.name.partition("::")[2] in SHAPED
        ):
            of, name = node.args[0].meta["val"], f"shape_of_{node.name}"
            recorded.register_buffer(
                name,
                torch.empty_strided(
                    of.shape, of.stride(), dtype=of.dtype, device="meta"
                ),
            )
            with recorded.graph.inserting_before(node):
                node.args = (recorded.graph.get_attr(name), *node.args[1:])
            node.kwargs = {**node.kwargs, "device": of.device}


def _names(
    constants: Mapping[fx.Node, Tensor], mine: Mapping[str, Tensor]
) -> dict[fx.Node, str]:
    """Return the constants that are a run's own, by name."""
    names = {value.data_ptr(): name for name, value in mine.items() if value.numel()}
    storages = {
        value.untyped_storage().data_ptr() for value in mine.values() if value.numel()
    }
    found = {}
    for node, value in constants.items():
        if (
            not value.is_meta
            and value.numel()
            and value.untyped_storage().data_ptr() in storages
        ):
            name = names.get(value.data_ptr(), "")
            if not name or (mine[name].shape, mine[name].stride()) != (
                value.shape,
                value.stride(),
            ):
                raise CannotReplay(
                    f"a layer keeps a part of {name or 'a tensor'}, of shape {tuple(value.shape)}"
                )
            found[node] = name
    return found


def _own(nodes: list[fx.Node], start: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on a run: what reads something of its own, and what that writes to."""
    own, before = set(start), -1
    while len(own) > before:
        before = len(own)
        for node in nodes:
            if node.op == "call_function" and (
                node in own or own & set(node.all_input_nodes)
            ):
                own |= {node, *_written(node)}
    return own


def _aliases(node: fx.Node) -> list[tuple[fx.Node, bool]]:
    """Return the arguments of a call whose memory it writes to (True), or whose memory its result may share."""
    if not isinstance(node.target, OpOverload):
        return []
    arguments = node.target._schema.arguments
    values = [*zip(arguments, node.args, strict=False)]
    values += [(a, node.kwargs[a.name]) for a in arguments if a.name in node.kwargs]
    return [
        (x, a.alias_info.is_write)
        for a, x in values
        if a.alias_info is not None and isinstance(x, fx.Node)
    ]


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory a call writes to, each as it was made."""
    found = []
    for made, writes in _aliases(node):
        if writes:
            while aliases := _aliases(made):
                made = aliases[0][0]
            found.append(made)
    return found


def _function(
    given: Sequence[fx.Node],
    calls: list[fx.Node],
    returned: Sequence[Any],
    constants: Mapping[fx.Node, Tensor],
) -> Callable[..., Any]:
    """Write a Python function of nodes: calls, one after the other; values go when nothing reads them any more."""
    held: dict[str, Any] = {
        f"c{i}": value for i, value in enumerate(constants.values())
    }
    words = {node: f"c{i}" for i, node in enumerate(constants)}
    words |= {node: f"v{i}" for i, node in enumerate([*given, *calls])}

    def word(value: Any) -> str:
        if isinstance(value, fx.Node):
            return words[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(word, value))}]"
        held[name := f"k{len(held)}"] = value
        return name

    kept = {value for value in returned if isinstance(value, fx.Node)}
    last = {
        read: node
        for node in calls
        for read in node.all_input_nodes
        if read not in kept
    }
    lines = [f"def function({', '.join(words[node] for node in given)}):"]
    for node in calls:
        quick = QUICK.get(str(node.target), node.target)
        arguments = [word(x) for x in node.args] + [
            f"{name}={word(x)}" for name, x in node.kwargs.items()
        ]
        done = (
            arguments[0]
            if quick is None
            else f"{word(getattr(quick, '_op', quick))}({', '.join(arguments)})"
        )
        lines.append(f"{words[node]} = {done}")
        if gone := [
            words[n]
            for n in node.all_input_nodes
            if last.get(n) is node and n not in constants
        ]:
            lines.append(f"del {', '.join(gone)}")
    exec("\n    ".join([*lines, f"return {word(returned)}"]), held)
    return held["function"]
