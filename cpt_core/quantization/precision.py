"""The precision of one quantised layer: bits in force, running ranges, noise, and what they do to tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, distributed, nn

from cpt_core import extensions
from cpt_core.quantization import fake_quantize
from cpt_core.quantization.active_bits import AFFINE_GRIDS, ActiveBits, AffineGrids
from cpt_core.quantization.fake_quantize import advances_key_in_backward, check_floating
from cpt_core.quantization.roles import Quantizer, level_field
from cpt_core.quantization.rounding import Range
from cpt_core.schedules.schedule import RoleLevels
from cpt_core.validation import check_bits

EXECUTION_MODES = ("simulated", "integer", "auto")
RUNNING_STARTS = ("corrected", "zero")
HALF = (
    torch.float16,
    torch.bfloat16,
)  # 11 and 8 significant bits: a grid of 8 bits does not survive them

# attribute of a layer in a whole-model pickle of release 0.3.0 -> its name today
FORMER_ATTRIBUTES = {
    "now": "active_bits",
    "driver": "owning_scheduler",
    "levels": "num_steps",
    "weight_levels": "weight_num_steps",
    "grad_levels": "grad_num_steps",
    "weight_grad_levels": "weight_grad_num_steps",
    "corrected": "has_bias_correction",
    "called": "has_run",
    "unseen": "awaits_first_gradient",
    "fixed": "is_fixed",
    "given_warnings": "issued_warnings",
    "zeros_unknown": "zeros_unchecked",
    "ranges_unknown": "ranges_unchecked",
}


class LayerPrecision(nn.Module):
    """Bits, running ranges and rounding noise of one quantised layer: all that conversion adds to a module.

    Attributes:
        now: what is in force: the levels of all roles, and what follows from them.
        levels: 0-d float32, steps of the affine grid of activations; ``weight_levels``, ``grad_levels`` (of the error
            product) and ``weight_grad_levels`` are those of the other roles. A change of bits fills them in place and
            recompiles nothing. No buffers: what averages or broadcasts buffers would change the grid behind the bits.
        noise_key: of the stochastic rounding, 0-d int64; counts on with every gradient. No buffer either: every process
            of a group has its own.
        running_ROLE: (3,), running minimum, running width, and the weight both have gathered; see ``stored_range``.
        calibrated: whether the running ranges are known to be filled.

    Args:
        quantizers: the quantiser of every role of the layer, such as "input", "weight", "bias", "grad".
        key: start of this layer's rounding noise; different in every layer.
        running_start: "corrected" divides a running range by the weight it has gathered, so that the first
            evaluations are right; "zero" is the authors' rule, which starts at 0 and does not.

    Running ranges and the key of the noise are not in the ``state_dict``. Copies keep bits that ``precision`` or
    ``set_bits`` gave, not those of a scheduler.

    Differs: running ranges are bias-corrected by default.
    """

    noise_key: Tensor
    observer: Callable[..., None] | None = (
        None  # of the roundings of a recorded step, see ``record``
    )
    name = ""  # of the layer in the model that was converted, for messages
    execution = "simulated"  # see ``QuantConfig``
    grids: AffineGrids = AFFINE_GRIDS  # what a level is; number formats put theirs here
    highest: RoleLevels | None = None  # of the schedule that drives the layer
    owning_scheduler: Any = None  # the scheduler that set the levels in force, None for levels set otherwise
    is_fixed = False  # inside a ``precision`` block, where schedulers wait
    recomputes = (
        False  # in the backward pass, in the state that it had in the forward pass
    )
    has_run = False  # whether the layer has multiplied
    ranges_unchecked = True  # nobody has looked whether running ranges are filled, since the mode last changed
    has_loaded = False  # weights came from a state_dict after the model was converted
    issued_warnings: set[str] | None = (
        None  # shared by the layers of a model; None where nothing is to be said
    )
    zeros_unchecked = True  # nobody has looked whether the weight holds exact zeros, since the mode last changed
    awaits_first_gradient = True  # no gradient of a training has come yet
    num_bit_changes = 0  # of the bits of all layers: what is cached of many layers is valid as long as it stays
    has_weights = True  # of a layer of torch; others are listed, and in checkpoints, once they have multiplied
    int8_operands = int8_gradient = (
        False  # whether they fit at the active bits, see ``int8.execution``
    )

    @torch.inference_mode(False)  # what is made here is written to elsewhere
    def __init__(
        self,
        quantizers: Mapping[str, Quantizer],
        key: int = 0,
        running_start: str = "corrected",
        kind: str = "",
    ) -> None:
        """Start without a precision: using the layer before one is set is an error."""
        super().__init__()
        self.has_bias_correction, self.key, self.kind = (
            running_start == "corrected",
            key,
            kind,
        )
        self._roles = tuple(quantizers.items())
        self._running = tuple(
            f"running_{role}" for role, quantizer in self._roles if quantizer.running
        )
        self._reset_training_state()
        self._weight_roles = frozenset(
            role for role in quantizers if level_field(role) == "weight"
        )
        (
            self.num_steps,
            self.weight_num_steps,
            self.grad_num_steps,
            self.weight_grad_num_steps,
        ) = _zeros("cpu")
        self.active_bits: ActiveBits = self.grids.resolve(None, self._roles)

    # --- what is in force ---------------------------------------------------------------------------------------------

    @property
    def active_levels(self) -> RoleLevels | None:
        """The level of every role, None as long as nobody has set any; assign what it was to put that back."""
        return self.active_bits.levels

    @active_levels.setter
    def active_levels(self, value: RoleLevels | None) -> None:
        self.active_bits = self.grids.resolve(value, self._roles)
        LayerPrecision.num_bit_changes += 1
        if self.execution != "simulated":
            extensions.load("int8").note_active_bits(self)
        self._fill()

    def _fill(self) -> None:
        tensors = (
            self.num_steps,
            self.weight_num_steps,
            self.grad_num_steps,
            self.weight_grad_num_steps,
        )
        for tensor, steps in zip(tensors, self.active_bits.steps, strict=True):
            if steps is not None:
                fake_quantize.fill_steps(tensor, steps)

    @property
    def quantizers(self) -> Mapping[str, Quantizer]:
        """The quantiser of every role, with the format in force."""
        return self.active_bits.quantizers

    @property
    def bits(self) -> int | None:
        """Level of activations; None for float32, or when none is set."""
        return self.active_levels.activation if self.active_levels else None

    @property
    def q_grad(self) -> int | None:
        """Level of gradients; None for float32, or when none is set."""
        return self.active_levels.error if self.active_levels else None

    def set_bits(self, bits: int | None, q_grad: int | None) -> None:
        """Set forward and gradient levels, each 1..32 or None for float32; see ``set_levels``."""
        self.set_levels(RoleLevels(bits, bits, q_grad, q_grad))

    def set_levels(self, levels: RoleLevels, driver: Any = None) -> None:
        """Set the level of every role, 1..32 or None for float32; ValueError for what a layer cannot take."""
        if self.recomputes and driver is not None:
            return
        self._sync_key_offset()
        if levels != self.active_levels:
            names = ("bits", "bits of weights", "q_grad", "q_grad of weights")
            checked = [
                None if q is None else check_bits(name, q)
                for name, q in zip(names, levels, strict=True)
            ]
            if not self.active_bits.is_set:
                fake_quantize.load_kernels()  # here, before anything is traced
            self.check_levels(RoleLevels(*checked))
            self.active_levels = RoleLevels(*checked)
        if driver is not self.owning_scheduler:  # modules are slow to assign to
            self.owning_scheduler = driver

    def train(self, mode: bool = True) -> Self:
        """Change the mode as every module does; the scheduler may have other bits for evaluation."""
        if self.recomputes:
            return self
        super().train(mode)
        self.zeros_unchecked = self.ranges_unchecked = True
        if not mode and self.has_bias_correction:
            self.calibrated = all(
                not running.is_meta and float(running[2]) > 0
                for running in self.ranges().values()
            )
        if self.owning_scheduler is not None:
            self.owning_scheduler._on_mode_change(self)
        return self

    def check_levels(self, levels: RoleLevels) -> None:
        """Raise ValueError for levels that this layer cannot take."""
        where = f"layer {self.name!r}" if self.name else "this layer"
        self.grids.check(levels, where)
        active = self.grids.resolve(levels, self._roles)
        if active.splits_gradient:
            extensions.load("split_gradients").check(self.kind, active.formats, where)

    def num_steps_for(self, role: str) -> Tensor:
        """Return the number of steps of the affine grid of an operand's role."""
        return self.weight_num_steps if role in self._weight_roles else self.num_steps

    @property
    def is_listed(self) -> bool:
        """Whether the layer multiplies, as far as is known."""
        return self.has_weights or self.has_run

    def require_bits(self) -> None:
        """Raise RuntimeError as long as nobody has set a precision, and in ``torch.func``; every layer asks first."""
        if (
            not self.active_bits.is_set and self.highest is not None
        ):  # only copies know a schedule and have no bits
            raise RuntimeError(
                "this quantised layer is in a copy of a model whose bits a PrecisionScheduler sets, which does not "
                'drive copies: run the copy in `with cpt.precision(copy, "q_max"):` (or other bits), or make it a '
                "PrecisionScheduler of its own"
            )
        if not self.active_bits.is_set:
            raise RuntimeError(
                "this quantised layer has no precision yet: make a PrecisionScheduler(model, schedule), "
                "or use `with precision(model, bits=8):`"
            )
        if (
            torch.compiler.is_compiling()
        ):  # asked first: compiled code is not guarded on the others
            self.has_run = True
            return
        if not self.has_run:
            self.has_run = True
        if (
            torch._C._functorch.peek_interpreter_stack() is not None
            and self.active_bits.has_quantized_roles
        ):
            raise RuntimeError(
                "torch.func (grad, jvp, vmap) cannot transform quantised layers: take loss.backward() or "
                "torch.autograd.grad; torch.func.functional_call works"
            )

    def layer_role(self, role: str) -> str:
        """Return the name that a role of ``QUANTIZERS`` has in this layer: its own have no prefix."""
        own = role.removeprefix(f"{self.kind}_")
        return own if own in self.active_bits.quantizers else role

    def quantized(
        self,
        compute: Callable[..., Tensor],
        operands: tuple[Tensor, Tensor, Tensor | None],
        roles: tuple[str | None, str | None],
        gradient: str,
        along: tuple[int | None, int | None] = (None, None),
    ) -> Tensor:
        """Return ``compute(*operands)``, rounded, whose gradient is rounded; see ``QuantizedOpsMode.run``."""
        first, second, bias = operands
        rounded_bias = None if bias is None else self.round_operand("bias", bias, None)
        if roles[0] is not None:
            first = self.round_operand(self.layer_role(roles[0]), first, along[0])
        if roles[1] is not None:
            second = self.round_operand(self.layer_role(roles[1]), second, along[1])
        return self.matmul_with_quantized_grad(
            compute, first, second, rounded_bias, role=self.layer_role(gradient)
        )

    def quantize_operand(
        self, role: str, x: Tensor, along: int | None = None
    ) -> Tensor:
        """Return an operand, quantised with the straight-through estimator; ``along``: see ``QuantizedOpsMode.run``."""
        self.require_bits()
        check_floating(x)
        if self.zeros_unchecked:
            self.warn_of_exact_zeros(role, x)
        return self.round_operand(role, x, along)

    def warn_of_exact_zeros(self, role: str | None, x: Tensor) -> None:
        """Warn once of a weight with exact zeros that its grid does not have."""
        if (
            role is not None
            and self.layer_role(role) == "weight"
            and not torch.compiler.is_compiling()
        ):
            self.zeros_unchecked = False
            if not self.quantizers["weight"].zero_point:
                extensions.services("exact_zeros").warn_of_exact_zeros(self, x)

    def round_operand(self, role: str, x: Tensor, along: int | None) -> Tensor:
        """Return an operand, rounded; of a layer that has bits."""
        if x.dtype in HALF and self.active_bits.has_quantized_roles:
            x = x.float()
        is_quantized = (
            self.active_bits.weight
            if role in self._weight_roles
            else self.active_bits.activation
        )
        if not is_quantized or x.numel() == 0:
            return x
        self.follow(x)
        return self.grids.apply(self, role, x, along, self._rounded)

    def _rounded(self, role: str, x: Tensor) -> Tensor:
        quantizer, levels = self.active_bits.quantizers[role], self.num_steps_for(role)
        if quantizer.running and not self.training:
            low, width = self.eval_range(role, x)
            return fake_quantize.operators.round_in_range(
                x, low, width, levels, quantizer.grid, clip=True
            )
        if self.is_observed:
            self.observe(role, x)
        y, low, width = fake_quantize.operators.fake_quantize(x, levels, quantizer.grid)
        if quantizer.running:
            self.track(role, low, width)
        return y

    def matmul_with_quantized_grad(
        self, multiply: Callable[..., Tensor], *operands: Any, role: str = "grad"
    ) -> Tensor:
        """Return ``multiply(*operands)``, linear in what ``operand`` returned, whose gradient is quantised."""
        if self.active_bits.splits_gradient and torch.is_grad_enabled():
            return _with_split_gradient(self, role, multiply, *operands)
        return self.gradient(role, multiply(*operands))

    def gradient(self, role: str, y: Tensor) -> Tensor:
        """Return the layer's output; the gradient that comes back through it is quantised."""
        if not self.active_bits.gradient or not y.requires_grad:
            return y
        return self.grids.apply(self, role, y, None, self._with_rounded_gradient)

    def _with_rounded_gradient(self, role: str, y: Tensor) -> Tensor:
        quantizer = self.active_bits.quantizers[role]
        key = self.next_noise_key() if quantizer.rounding == "stochastic" else None
        y = fake_quantize.operators.quantize_gradient(
            y, self.grad_num_steps, quantizer.grid, key
        )
        if self.is_observed:  # when the gradient comes, and is not yet rounded
            y.register_hook(partial(self.observe, role))
        if (
            not torch.compiler.is_compiling()
            and self.awaits_first_gradient
            and self.training
            and not self.is_fixed
        ):
            y.register_hook(self._check_first)
        return y

    def _check_first(self, gradient: Tensor) -> None:
        """Tensor hook of the first gradient of a training."""
        self.awaits_first_gradient = False
        extensions.services("small_gradients").warn_of_small_gradient(self, gradient)

    @property
    def is_observed(self) -> bool:
        """Whether someone looks at what is rounded now; in this order: compiled code is not guarded on it."""
        return (
            not torch.compiler.is_compiling()
            and self.observer is not None
            and self.training
        )

    def observe(self, role: str, x: Tensor, rows: Sequence[int] = ()) -> None:
        """Show a tensor that is about to be rounded, if ``observed``; ``rows``: of parts with ranges of their own."""
        if self.observer is not None:
            self.observer(role, x, rows)

    def next_noise_key(self, count: int = 1) -> Tensor:
        """Return the key of the noise of the next ``count`` gradients, see ``advances_key_in_backward``."""
        key = self.noise_key
        if not advances_key_in_backward():
            self.noise_key = key + count
        return key

    # --- what training leaves in a layer: running ranges, and the key of its noise ------------------------------------

    def eval_range(self, role: str, x: Tensor) -> Range:
        """Return the stored range of an operand, in evaluation; its own range as long as the stored one is empty.

        That is decided on the device where it is not known since ``train(False)``, as in an average of models.
        """
        low, width, weight = self.stored_range(role)
        if self.calibrated:
            return low, width
        self.warn_of_empty_range(role, weight)
        own_low, own_width = fake_quantize.operators.range(
            x.detach(), self.quantizers[role].grid
        )
        return torch.where(weight > 0, low, own_low), torch.where(
            weight > 0, width, own_width
        )

    def ranges(self) -> dict[str, Tensor]:
        """Return the running ranges by their names, ``running_ROLE``."""
        return {name: getattr(self, name) for name in self._running}

    def range_tensor(self, role: str) -> Tensor:
        """Return the tensor of a running range, (3,), which training fills in place."""
        running: Tensor = getattr(self, f"running_{role}")
        return running

    def warn_of_empty_range(self, role: str, weight: Tensor) -> None:
        """Warn once per model of evaluation on running ranges that have gathered no weight."""
        if (
            not torch.compiler.is_compiling()
            and self.ranges_unchecked
            and self.issued_warnings is not None
        ):
            self.ranges_unchecked = False
            extensions.services("empty_ranges").warn_of_empty_range(self, role, weight)

    def stored_range(self, role: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return minimum and width of the running range of a role, and the weight that both have gathered."""
        minimum, width, weight = self.range_tensor(role).unbind()
        return (
            (minimum / weight, width / weight, weight)
            if self.has_bias_correction
            else (minimum, width, weight)
        )

    def track(self, role: str, minimum: Tensor, width: Tensor) -> None:
        """Let a running range follow the range of one call, see ``rounding.track``; recomputed calls change none."""
        if not is_recomputing():
            fake_quantize.operators.track_(self.range_tensor(role), minimum, width)

    def get_running(self) -> dict[str, Tensor]:
        """Return copies of what training changes besides the bits, for a checkpoint: the same in every process."""
        ranges = {name: running.clone() for name, running in self.ranges().items()}
        return {"noise_key": self.noise_key - self._offset, **ranges}

    def set_running(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``get_running`` returned."""
        for name, value in state.items():
            if self.noise_key.is_meta:  # where copies are lost
                self._move(value.device)
            getattr(self, name).copy_(value)
        self.has_loaded = False
        if "noise_key" in state:
            self._offset = 0
            self._sync_key_offset()
        self.train(self.training)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.has_loaded = True

    def _sync_key_offset(self) -> None:
        """Let the key be that of this process, also when a group of processes has been made since the layer was."""
        offset = 0
        if distributed.is_available() and distributed.is_initialized():
            offset = extensions.services("processes").key_offset() or 0
        if offset != self._offset:
            self.noise_key.add_(offset - self._offset)
            self._offset = offset

    def _reset_training_state(self) -> None:
        self.noise_key, self._offset = (
            torch.tensor(self.key, dtype=torch.int64, device="cpu"),
            0,
        )
        for name in self._running:
            setattr(self, name, torch.zeros(3, dtype=torch.float32, device="cpu"))
        self.calibrated = not self.has_bias_correction

    # --- where it is, and copies of it --------------------------------------------------------------------------------

    def follow(self, x: Tensor) -> None:
        """Be where ``x`` is, also when something other than ``to`` moved the model there, such as FSDP."""
        if self.num_steps.device != x.device and not x.is_meta:
            self._move(x.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # follow the model to another device but stay in float32 when it is cast to half precision
        self._move(fn(self.num_steps.new_empty(0)).device)
        return self

    @torch.inference_mode(
        False
    )  # what is made in a forward pass is written to elsewhere
    def _move(self, device: torch.device) -> None:
        if (
            self.noise_key.is_meta
        ):  # there are no numbers on meta, and to_empty brings none
            self._reset_training_state()
        self.noise_key = self.noise_key.to(device)
        for name, running in self.ranges().items():
            setattr(self, name, running.to(device))
        if device != self.num_steps.device:
            (
                self.num_steps,
                self.weight_num_steps,
                self.grad_num_steps,
                self.weight_grad_num_steps,
            ) = _zeros(device)
            self._fill()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the scheduler out of a copy."""
        return {
            **vars(self),
            "owning_scheduler": self.owning_scheduler is not None,
            "is_fixed": False,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Forget levels that a scheduler set; find the kernels in the process that a stored layer comes to."""
        super().__setstate__(
            {FORMER_ATTRIBUTES.get(name, name): value for name, value in state.items()}
        )
        if "_running" not in vars(
            self
        ):  # stored by a release whose running ranges were buffers
            self._running = tuple(self._buffers)
            vars(self).update(self._buffers)
            self._buffers.clear()
            self._non_persistent_buffers_set.clear()
        extensions.load_optional(self.kind)
        if self.execution != "simulated":
            extensions.load("int8")
        driven, self.owning_scheduler = self.owning_scheduler, None
        if driven:
            self.active_levels = None
        if self.active_bits.is_set:
            fake_quantize.load_kernels()

    def __prepare_scriptable__(self) -> None:
        """Refuse ``torch.jit.script``, which asks every module of a model."""
        raise RuntimeError(
            "torch.jit.script cannot compile a model that quantize_ converted: use torch.compile, torch.export or "
            "cpt.export, or call restore_(model) first"
        )

    def extra_repr(self) -> str:
        """Show the active bits, how operations are executed, and what rounds."""
        if not self.active_bits.is_set:
            return f"bits=not set, execution={self.execution}"
        execution = self.execution
        if execution != "simulated" and self.active_bits.has_quantized_roles:
            execution = extensions.load("int8").describe_execution(self)
        kernels = fake_quantize.operators.name_on(self.num_steps.device)
        return f"{self.grids.describe(self.active_bits)}, execution={execution}, kernels={kernels}"


@torch.compiler.disable
def _with_split_gradient(*arguments: Any) -> Tensor:
    return extensions.load("split_gradients").matmul_with_split_gradient(*arguments)


def is_recomputing() -> bool:
    """Return whether a backward pass runs a forward pass again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def in_float32(
    precision: LayerPrecision | None,
    x: Tensor,
    compute: Callable[..., Any],
    *inputs: Any,
) -> Any:
    """Return ``compute(*inputs)``, in float32 where a plain layer would answer ``x`` in half precision.

    That is under autocast, or in a model of that type, where bfloat16 would leave 17 of the 256 values of an 8-bit grid
    between 10 and 11. The result is rounded to what the plain layer would return; the gradient is quantised before it
    is rounded, too.
    """
    if precision is None or not precision.active_bits.has_quantized_roles:
        return compute(*inputs)
    kind, half = x.device.type, x.dtype if x.dtype in HALF else None
    if x.dtype == torch.float32 and not x.is_meta and torch.is_autocast_enabled(kind):
        half = torch.get_autocast_dtype(kind)
    if half is None:
        return compute(*inputs)
    with torch.autocast(kind, enabled=False):
        found = compute(*map(_as_float32, inputs))
    return (
        tuple(y.to(half) for y in found) if isinstance(found, tuple) else found.to(half)
    )


def _as_float32(value: Any) -> Any:
    if isinstance(value, tuple):  # features of sources and destinations
        return tuple(map(_as_float32, value))
    return (
        value.float()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
    )


def _zeros(device: torch.device | str) -> list[Tensor]:
    return [torch.zeros((), dtype=torch.float32, device=device) for _ in range(4)]
