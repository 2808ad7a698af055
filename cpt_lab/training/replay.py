"""Recording of the forward and backward pass of a step on a CPU, replayed for many runs.

Runs of one recipe and seed differ only in their bits, and bits lie in tensors. One recording of torch's operations,
without modules, autograd and schedule around them, thus serves all runs. Operations that do not depend on a run, such
as the dropout of a step, are executed once for all (``Replay.run_shared``); all others are executed for every run on
its own tensors, in the order in which the run alone would execute them (``Replay.pass_of``). The numbers of a run are
therefore the same, bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

# Operations that use only the shape of their first operand.
SHAPE_ONLY_OPS = (
    "empty_like",
    "full_like",
    "new_empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones_like",
    "zeros_like",
)
# Replacements of operations: None where they do nothing without autograd, else a function that Python calls faster.
FAST_CALLS: dict[str, Any] = {
    "aten.alias.default": None,
    "aten.detach.default": None,
    "aten.t.default": Tensor.t,
    "aten.view.default": Tensor.view,
    "aten.transpose.int": Tensor.transpose,
}


class ReplayError(Exception):
    """Error of a step that depends on more than the tensors of its run, or changes more."""


class PassResult(NamedTuple):
    """Loss of a pass (0-d), the state that the next step needs, and a gradient for every parameter."""

    loss: Tensor
    carry: Any
    gradients: Sequence[Tensor | None]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a batch, or of the state that a step carries to the next."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def session_tensors(session: Session) -> dict[str, Tensor]:
    """Return the tensors that belong to a run alone: parameters, buffers, and the tensors of layer precisions."""
    holders = dict(session.model.named_modules())
    for name, module in list(holders.items()):
        layer_precision = precision_of(module)
        # The precision of a layer without weights is no child module of the layer.
        if layer_precision is not None:
            holders.setdefault(f"{name}.precision".lstrip("."), layer_precision)

    tensors: dict[str, Tensor] = {}
    for name, holder in holders.items():
        for attributes in (vars(holder), holder._parameters, holder._buffers):
            for key, value in attributes.items():
                if isinstance(value, Tensor):
                    tensors[f"{name}.{key}"] = value
    return tensors


class Replay:
    """A recorded forward and backward pass.

    Args:
        session: a run that has executed a step already; it is left unchanged.
        batch: batch of the step that is recorded.

    Raises:
        ReplayError: when torch does not see all that the step does, or when runs would disturb one another.
    """

    def __init__(self, session: Session, batch: Any) -> None:
        leaves, structure = tree_flatten((batch, session.carry))
        # Indices of gradients whose strides differ from their parameters': autograd stores them like the parameters.
        copied_gradients: list[int] = []

        def step(*tensors: Tensor) -> list[Any]:
            inputs = iter(tensors)
            rebuilt = [
                next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves
            ]
            with session.arithmetic():
                loss, carry = session.task.loss(
                    session.model, *tree_unflatten(rebuilt, structure)
                )
            gradients = torch.autograd.grad(loss, session.trained, allow_unused=True)
            for index, (gradient, parameter) in enumerate(
                zip(gradients, session.trained, strict=True)
            ):
                if gradient is not None and gradient.stride() != parameter.stride():
                    copied_gradients.append(index)
            carried, self._carry_structure = tree_flatten(carry)
            return [loss.detach(), *carried, *gradients]

        # Without a context torch makes a FakeTensorMode for every tensor.
        context = TracingContext(FakeTensorMode(allow_fallback_kernels=True))
        with _restored(session), tracing(context):
            recorded = make_fx(step)(*tensors_in(leaves))
        self._copied_gradients = copied_gradients
        self._functions = _split_functions(
            recorded, session_tensors(session), len(tensors_in(batch))
        )
        self._check(session, batch)

    def run_shared(self, batch: list[Tensor]) -> Sequence[Any]:
        """Execute the part of a step that does not depend on a run, for the tensors of its batch."""
        with torch.inference_mode():
            return self._functions.shared(*batch)

    def pass_of(
        self, session: Session
    ) -> Callable[[list[Tensor], Sequence[Any]], PassResult]:
        """Return the pass of a run: a function of the batch's tensors and of the result of ``run_shared``."""
        tensors = session_tensors(session)
        run_tensors = [tensors[name] for name in self._functions.tensor_names]
        num_carried = self._carry_structure.num_leaves

        def replayed(batch: list[Tensor], shared_values: Sequence[Any]) -> PassResult:
            with torch.inference_mode():
                loss, *rest = self._functions.per_run(
                    *batch, *tensors_in(session.carry), *run_tensors, *shared_values
                )
            gradients = rest[num_carried:]
            for i in self._copied_gradients:
                gradients[i] = torch.empty_like(session.trained[i]).copy_(gradients[i])
            carry = [
                leaf.clone() if isinstance(leaf, Tensor) else leaf
                for leaf in rest[:num_carried]
            ]
            return PassResult(
                loss, tree_unflatten(carry, self._carry_structure), gradients
            )

        return replayed

    def _check(self, session: Session, batch: Any) -> None:
        """Raise ReplayError unless the recording does what the step does, at other bits and weights than it was made.

        Some libraries compute unseen by torch, and a number that Python has read from a tensor is a constant of the
        recording.
        """

        def eager_pass() -> PassResult:
            with session.arithmetic():
                loss, carry = session.task.loss(session.model, batch, session.carry)
            loss.backward()
            return PassResult(loss, carry, [p.grad for p in session.trained])

        def replayed_pass() -> PassResult:
            return self.pass_of(session)(batch_tensors, self.run_shared(batch_tensors))

        batch_tensors = tensors_in(batch)
        expected = _values_after(session, eager_pass)
        replayed = _values_after(session, replayed_pass)
        for a, b in zip(expected, replayed, strict=True):
            is_equal = torch.equal(a, b) if isinstance(a, Tensor) else a == b
            if not is_equal:
                raise ReplayError(
                    "what torch has recorded of a step is not all that the step does"
                )


def _values_after(session: Session, run_pass: Callable[[], PassResult]) -> list[Any]:
    """Return all values that a pass computes or changes, at changed weights and bits; the session is restored.

    The bits stay as they are where changed bits need another recording.
    """
    step_key = session.step_key()
    bits = 5 if session.scheduler.get_last_bits()[0] != 5 else 6
    with _restored(session), torch.no_grad():
        for parameter in session.trained:
            parameter.mul_(1.01)
        pass_result = None
        with precision(session.model, bits, bits), torch.enable_grad():
            if session.step_key() == step_key:
                pass_result = run_pass()
        if pass_result is None:
            with torch.enable_grad():
                pass_result = run_pass()

        loss, carry, gradients = pass_result
        values = [
            loss,
            *tree_flatten(carry)[0],
            *gradients,
            *session_tensors(session).values(),
            torch.get_rng_state(),
        ]
        return [
            value.clone() if isinstance(value, Tensor) else value for value in values
        ]


@contextmanager
def _restored(session: Session) -> Iterator[None]:
    """Restore the tensors, gradients and random numbers of a run after a ``with`` block."""
    tensors, rng_state = session_tensors(session), torch.get_rng_state()
    before = {name: value.detach().clone() for name, value in tensors.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in tensors.items():
                value.copy_(before[name])
        torch.set_rng_state(rng_state)
        session.optimizer.zero_grad(set_to_none=True)


class _SplitFunctions(NamedTuple):
    """The two functions of a recording.

    ``shared(*batch)`` returns the values that do not depend on a run; ``per_run(*batch, *carry, *tensors, *values)``
    returns loss, carry and gradients, where ``tensor_names`` names the tensors of the run that it reads.
    """

    shared: Callable[..., Any]
    per_run: Callable[..., Any]
    tensor_names: list[str]


def _split_functions(
    recorded: fx.GraphModule, run_tensors: Mapping[str, Tensor], num_batch_tensors: int
) -> _SplitFunctions:
    """Split a recording into a function that serves all runs and a function for every run.

    Args:
        recorded: graph whose inputs are the tensors of the batch, then those of the carried state.
        run_tensors: tensors of the recorded run, by name.
        num_batch_tensors: number of tensors in the batch.
    """
    _drop_shape_only_inputs(recorded)
    nodes = list(recorded.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    batch_inputs, carry_inputs = inputs[:num_batch_tensors], inputs[num_batch_tensors:]
    constants = {
        node: getattr(recorded, node.target) for node in nodes if node.op == "get_attr"
    }
    names_by_node = _names_of_constants(constants, run_tensors)
    shared_constants = {
        node: value for node, value in constants.items() if node not in names_by_node
    }
    run_dependent = _run_dependent_nodes(nodes, {*carry_inputs, *names_by_node})
    _check_side_effects(nodes, {*batch_inputs, *shared_constants}, run_dependent)

    calls = [node for node in nodes if node.op == "call_function"]
    run_calls = [node for node in calls if node in run_dependent]
    shared_calls = [node for node in calls if node not in run_dependent]
    output = nodes[-1]
    read_nodes = {n for node in (*run_calls, output) for n in node.all_input_nodes}
    shared_values = [node for node in shared_calls if node in read_nodes]
    return _SplitFunctions(
        _compile_nodes(batch_inputs, shared_calls, shared_values, shared_constants),
        _compile_nodes(
            [*inputs, *names_by_node, *shared_values],
            run_calls,
            output.args[0],
            shared_constants,
        ),
        list(names_by_node.values()),
    )


def _check_side_effects(
    nodes: list[fx.Node], shared_inputs: set[fx.Node], run_dependent: set[fx.Node]
) -> None:
    """Raise ReplayError for writes to inputs that all runs read, and for random numbers drawn for every run."""
    for node in nodes:
        written_inputs = [n for n in _written_nodes(node) if n in shared_inputs]
        if written_inputs:
            raise ReplayError(
                f"{node.target} writes to {written_inputs[0]}, which all runs read"
            )
        tags = getattr(node.target, "tags", ())
        if node in run_dependent and torch.Tag.nondeterministic_seeded in tags:
            raise ReplayError(f"{node.target} draws random numbers for every run")


def _drop_shape_only_inputs(recorded: fx.GraphModule) -> None:
    """Replace operands of which an operation uses only the shape by empty ones, which depend on no run."""
    for node in list(recorded.graph.nodes):
        is_op = isinstance(node.target, OpOverload)
        if (
            not is_op
            or node.target._schema.name.partition("::")[2] not in SHAPE_ONLY_OPS
        ):
            continue
        operand = node.args[0].meta["val"]
        name = f"shape_of_{node.name}"
        empty = torch.empty_strided(
            operand.shape, operand.stride(), dtype=operand.dtype, device="meta"
        )
        recorded.register_buffer(name, empty)
        with recorded.graph.inserting_before(node):
            node.args = (recorded.graph.get_attr(name), *node.args[1:])
        node.kwargs = {**node.kwargs, "device": operand.device}


def _names_of_constants(
    constants: Mapping[fx.Node, Tensor], run_tensors: Mapping[str, Tensor]
) -> dict[fx.Node, str]:
    """Return the names of the constants that are tensors of the run.

    Raises:
        ReplayError: for a constant that is a part of a tensor of the run.
    """
    names_by_pointer = {}
    storages = set()
    for name, value in run_tensors.items():
        if value.numel():
            names_by_pointer[value.data_ptr()] = name
            storages.add(value.untyped_storage().data_ptr())

    names_by_node = {}
    for node, value in constants.items():
        if value.is_meta or not value.numel():
            continue
        if value.untyped_storage().data_ptr() not in storages:
            continue
        name = names_by_pointer.get(value.data_ptr(), "")
        layout = (value.shape, value.stride())
        if not name or (run_tensors[name].shape, run_tensors[name].stride()) != layout:
            raise ReplayError(
                f"a layer keeps a part of {name or 'a tensor'}, of shape {tuple(value.shape)}"
            )
        names_by_node[node] = name
    return names_by_node


def _run_dependent_nodes(nodes: list[fx.Node], start: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on a run: calls that read one of them, and the nodes that such a call writes to.

    Args:
        nodes: all nodes of the graph.
        start: inputs and constants that differ between runs.
    """
    dependent = set(start)
    size_before = -1
    while len(dependent) > size_before:
        size_before = len(dependent)
        for node in nodes:
            reads_dependent = node in dependent or dependent & set(node.all_input_nodes)
            if node.op == "call_function" and reads_dependent:
                dependent |= {node, *_written_nodes(node)}
    return dependent


def _aliases(node: fx.Node) -> list[tuple[fx.Node, bool]]:
    """Return the arguments that may share memory with a call's result, each with True if the call writes to it."""
    if not isinstance(node.target, OpOverload):
        return []
    arguments = node.target._schema.arguments
    values = [*zip(arguments, node.args, strict=False)]
    values += [(a, node.kwargs[a.name]) for a in arguments if a.name in node.kwargs]
    return [
        (value, argument.alias_info.is_write)
        for argument, value in values
        if argument.alias_info is not None and isinstance(value, fx.Node)
    ]


def _written_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that own the memory to which a call writes."""
    owners = []
    for argument, writes in _aliases(node):
        if writes:
            owner = argument
            while aliases := _aliases(owner):
                owner = aliases[0][0]
            owners.append(owner)
    return owners


def _compile_nodes(
    inputs: Sequence[fx.Node],
    calls: list[fx.Node],
    outputs: Sequence[Any],
    constants: Mapping[fx.Node, Tensor],
) -> Callable[..., Any]:
    """Return a Python function of ``inputs`` that executes ``calls`` in order and returns ``outputs``.

    A value is deleted after the last call that reads it, to free its memory.
    """
    source = _FunctionSource(constants, [*inputs, *calls])
    variables = source.variables
    last_reader = _last_readers(calls, outputs)

    lines = [f"def function({', '.join(variables[node] for node in inputs)}):"]
    for node in calls:
        lines.append(f"{variables[node]} = {source.call_expression(node)}")
        finished = [
            variables[n]
            for n in node.all_input_nodes
            if last_reader.get(n) is node and n not in constants
        ]
        if finished:
            lines.append(f"del {', '.join(finished)}")
    lines.append(f"return {source.expression(outputs)}")
    exec("\n    ".join(lines), source.namespace)
    return source.namespace["function"]


class _FunctionSource:
    """Python expressions for nodes and constants of a graph.

    Attributes:
        namespace: values that expressions name.
        variables: variable of every node.
    """

    def __init__(
        self, constants: Mapping[fx.Node, Tensor], nodes: list[fx.Node]
    ) -> None:
        self.namespace: dict[str, Any] = {
            f"c{i}": value for i, value in enumerate(constants.values())
        }
        self.variables = {node: f"c{i}" for i, node in enumerate(constants)}
        self.variables |= {node: f"v{i}" for i, node in enumerate(nodes)}

    def expression(self, value: Any) -> str:
        """Return the expression of a node, of a list of values, or of a new constant."""
        if isinstance(value, fx.Node):
            return self.variables[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self.expression, value))}]"
        name = f"k{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def call_expression(self, node: fx.Node) -> str:
        """Return the expression of a call."""
        function = FAST_CALLS.get(str(node.target), node.target)
        arguments = [self.expression(x) for x in node.args]
        arguments += [f"{name}={self.expression(x)}" for name, x in node.kwargs.items()]
        if function is None:
            return arguments[0]
        return f"{self.expression(getattr(function, '_op', function))}({', '.join(arguments)})"


def _last_readers(
    calls: list[fx.Node], outputs: Sequence[Any]
) -> dict[fx.Node, fx.Node]:
    """Return the last call that reads each node, except for nodes that are returned."""
    output_nodes = {value for value in outputs if isinstance(value, fx.Node)}
    last_reader = {}
    for node in calls:
        for operand in node.all_input_nodes:
            if operand not in output_nodes:
                last_reader[operand] = node
    return last_reader
