"""Precision of one quantised layer: its active bits, running ranges and noise, and the rounding of its operands.

``LayerPrecision`` is the module that ``quantize_`` adds to a layer.  A handler of a torch function passes it the
operands; ``quantize_operand`` rounds one to the grid of its role, and ``matmul_with_quantized_grad`` runs the matmul
so that the output gradient is rounded before the backward GEMMs.  ``set_levels`` fills 0-d tensors
in place, which recompiles nothing.  ``in_float32`` runs a computation in float32 under autocast.
"""

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
# 11 and 8 significant bits: too few to hold the values of an 8-bit grid
HALF = (torch.float16, torch.bfloat16)

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
    "has_weights": "always_runs_matmul",
    "zeros_unknown": "zeros_unchecked",
    "ranges_unknown": "ranges_unchecked",
}


class LayerPrecision(nn.Module):
    """Bits, running ranges and rounding noise of one quantised layer: all state that conversion adds to a module.

    Attributes:
        active_bits: the levels of all roles and the grids that follow from them.
        num_steps: 0-d float32, steps of the affine grid of activations, 2**bits - 1.
        weight_num_steps: steps of the grid of weights.
        grad_num_steps: steps of the grid of output gradients, for the input gradient (dgrad) if the two differ.
        weight_grad_num_steps: steps of the grid of output gradients for the weight gradient (wgrad).
        noise_key: key of the stochastic rounding, 0-d int64; increases with every rounded gradient.
        running_ROLE: (3,), running minimum, running width, and the weight both have gathered; see ``stored_range``.
        filled_roles: roles whose running ranges are known to be filled in evaluation, see ``has_filled_range``.

    A change of bits fills the ``num_steps`` tensors in place and recompiles nothing. They are no buffers, because code
    that averages or broadcasts buffers would change the grid without changing the bits. ``noise_key`` is no buffer
    either, since every process of a group has its own.

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
    # callback that receives every tensor before it is rounded, see ``diagnostics.record``
    observer: Callable[..., None] | None = None
    # name of the layer in the converted model, for messages
    name = ""
    # one of EXECUTION_MODES, see ``QuantConfig``
    execution = "simulated"
    # meaning of a level; number formats assign a subclass
    grids: AffineGrids = AFFINE_GRIDS
    # levels at ``q_max`` of the layer's schedule
    highest: RoleLevels | None = None
    # scheduler that set the active levels; None if they were set in another way
    owning_scheduler: Any = None
    # whether the layer is inside a ``precision`` block, where schedulers do not change its bits
    is_fixed = False
    # scheduler that last asked for other bits inside of the block, and sets them after it
    pending_scheduler: Any = None
    # whether a backward pass recomputes the forward pass, in the state of that pass
    recomputes = False
    # whether the layer has run a matmul
    has_run = False
    # whether a forward of the layer has returned, at quantised bits, before the layer ran a matmul
    is_silent = False
    # whether running ranges may be empty; checked once after every change of mode
    ranges_unchecked = True
    # whether weights were loaded from a state_dict after the conversion
    has_loaded = False
    # whether a scheduler drives the layer and has taken no step yet, so that nothing can have filled its ranges
    is_untrained = False
    # kinds of warnings already issued, shared by the layers of a model; None turns warnings off
    issued_warnings: set[str] | None = None
    # whether the weight may hold exact zeros; checked once after every change of mode
    zeros_unchecked = True
    # whether no gradient of a training has arrived yet
    awaits_first_gradient = True
    # number of changes of bits in all layers; results cached for many layers are valid while it stays the same
    num_bit_changes = 0
    # whether every layer of its class runs a matmul; others are listed, and in checkpoints, once they have run one
    always_runs_matmul = True
    # whether the layer holds parameters that may be weights of a matmul
    holds_weights = False
    # error of a layer without bits that matches no pattern of the last schedule, or ""
    unmatched = ""
    filled_roles: frozenset[str] = frozenset()
    # whether operands and gradient fit into int8 at the active bits, see ``int8.execution``
    int8_operands = int8_gradient = False

    @torch.inference_mode(
        False
    )  # the tensors made here are written to outside of inference mode
    def __init__(
        self,
        quantizers: Mapping[str, Quantizer],
        key: int = 0,
        running_start: str = "corrected",
        kind: str = "",
    ) -> None:
        """Create a layer without bits, which must be set before it is used."""
        super().__init__()
        self.has_bias_correction = running_start == "corrected"
        self.key = key
        self.kind = kind
        self._roles = tuple(quantizers.items())
        self._running = tuple(
            f"running_{role}" for role, quantizer in self._roles if quantizer.running
        )
        self._reset_training_state()
        self._weight_roles = frozenset(
            role for role in quantizers if level_field(role) == "weight"
        )
        self._make_num_steps("cpu")
        self.active_bits: ActiveBits = self.grids.resolve(None, self._roles)

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeError: a module that holds weights runs all of its children, also this one."""
        raise RuntimeError(
            f"layer {self.name!r} holds weights and runs all of its children(), among which quantize_ put its "
            "precision: put those that it runs into an nn.ModuleList, and iterate over that"
        )

    # --- active bits ---

    @property
    def active_levels(self) -> RoleLevels | None:
        """Levels of all roles; None until they are set. Assigning a former value restores it."""
        return self.active_bits.levels

    @active_levels.setter
    def active_levels(self, value: RoleLevels | None) -> None:
        self.active_bits = self.grids.resolve(value, self._roles)
        LayerPrecision.num_bit_changes += 1
        if self.execution != "simulated":
            extensions.load("int8").note_active_bits(self)
        self._fill_num_steps()

    def _num_steps_tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            self.num_steps,
            self.weight_num_steps,
            self.grad_num_steps,
            self.weight_grad_num_steps,
        )

    def _make_num_steps(self, device: torch.device | str) -> None:
        """Create the tensors of grid steps on a device."""
        (
            self.num_steps,
            self.weight_num_steps,
            self.grad_num_steps,
            self.weight_grad_num_steps,
        ) = [torch.zeros((), dtype=torch.float32, device=device) for _ in range(4)]

    def _fill_num_steps(self) -> None:
        """Write the steps of the active bits into the tensors of grid steps."""
        tensors = self._num_steps_tensors()
        for tensor, steps in zip(tensors, self.active_bits.steps, strict=True):
            if steps is not None:
                fake_quantize.fill_steps(tensor, steps)

    @property
    def quantizers(self) -> Mapping[str, Quantizer]:
        """Quantiser of every role, with the active number format."""
        return self.active_bits.quantizers

    @property
    def bits(self) -> int | None:
        """Level of activations; None for float32 and before it is set."""
        return self.active_levels.activation if self.active_levels else None

    @property
    def q_grad(self) -> int | None:
        """Level of gradients; None for float32 and before it is set."""
        return self.active_levels.error if self.active_levels else None

    def set_bits(self, bits: int | None, q_grad: int | None) -> None:
        """Set forward and gradient levels, each 1..32 or None for float32; see ``set_levels``."""
        self.set_levels(RoleLevels(bits, bits, q_grad, q_grad))

    def set_levels(self, levels: RoleLevels, scheduler: Any = None) -> None:
        """Set the level of every role.

        Args:
            levels: 1..32, or None for float32, per role.
            scheduler: the scheduler that sets them, which then owns the layer; None for the user.

        Raises:
            ValueError: for levels that this layer does not support.
        """
        if self.recomputes and scheduler is not None:
            return
        self._sync_key_offset()
        if levels != self.active_levels:
            names = ("bits", "bits of weights", "q_grad", "q_grad of weights")
            checked = [
                None if q is None else check_bits(name, q)
                for name, q in zip(names, levels, strict=True)
            ]
            if not self.active_bits.is_set:
                fake_quantize.load_kernels()  # before any code is traced
            self.check_levels(RoleLevels(*checked))
            self.active_levels = RoleLevels(*checked)
        # nn.Module.__setattr__ is slow
        if scheduler is not self.owning_scheduler:
            self.owning_scheduler = scheduler

    def set_untrained(self, is_untrained: bool) -> None:
        """Set whether the training of the layer has yet to begin; its ranges are checked again when it has begun."""
        # nn.Module.__setattr__ is slow
        if is_untrained != self.is_untrained:
            self.is_untrained = is_untrained
            self.ranges_unchecked = True

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; the owning scheduler may set other bits for evaluation."""
        if self.recomputes:
            return self
        super().train(mode)
        self.zeros_unchecked = self.ranges_unchecked = True
        if not mode and self.has_bias_correction:
            self.filled_roles = self._find_filled_roles()
        if self.owning_scheduler is not None:
            self.owning_scheduler._on_mode_change(self)
        return self

    def _find_filled_roles(self) -> frozenset[str]:
        """Return the roles with a filled running range.

        Few layers have an untracked input. Its range is not read, because reading waits for the device, and compiled
        code cannot do it.
        """
        roles = []
        for name, running in self.ranges().items():
            role = name.removeprefix("running_")
            is_readable = role != "untracked_input" and not running.is_meta
            if is_readable and float(running[2]) > 0:
                roles.append(role)
        return frozenset(roles)

    def has_filled_range(self, role: str) -> bool:
        """Return whether the running range of a role is known to be filled; one without bias correction always is."""
        return not self.has_bias_correction or role in self.filled_roles

    def check_levels(self, levels: RoleLevels) -> None:
        """Raise ValueError for levels that this layer does not support."""
        where = f"layer {self.name!r}" if self.name else "this layer"
        self.grids.check(levels, where)
        active = self.grids.resolve(levels, self._roles)
        if active.splits_gradient:
            extensions.load("split_gradients").check(self.kind, active.formats, where)

    def quantizes_activations(self, levels: RoleLevels) -> bool:
        """Return whether activations are quantised at these levels."""
        return self.grids.resolve(levels, self._roles).activation

    def num_steps_for(self, role: str) -> Tensor:
        """Return the tensor of grid steps of an operand's role."""
        return self.weight_num_steps if role in self._weight_roles else self.num_steps

    @property
    def is_listed(self) -> bool:
        """True if the layer runs a matmul or has run one: such layers appear in summaries and checkpoints."""
        return self.always_runs_matmul or self.has_run

    def require_bits(self) -> None:
        """Raise RuntimeError if no bits are set, or inside a transform of ``torch.func``."""
        # only copies know a schedule and have no bits
        if not self.active_bits.is_set and self.highest is not None:
            raise RuntimeError(
                "this quantised layer is in a copy of a model whose bits a PrecisionScheduler sets, which does not "
                'drive copies: run the copy in `with cpt.precision(copy, "q_max"):` (or other bits), or make it a '
                "PrecisionScheduler of its own"
            )
        if not self.active_bits.is_set and self.unmatched:
            raise RuntimeError(self.unmatched)
        if not self.active_bits.is_set:
            raise RuntimeError(
                "this quantised layer has no precision yet: make a PrecisionScheduler(model, schedule), "
                "or use `with precision(model, bits=8):`"
            )
        # this condition comes first, so that compiled code has no guard on the others
        if torch.compiler.is_compiling():
            self.has_run = True
            return
        if not self.has_run:
            self.has_run = True
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if is_transformed and self.active_bits.has_quantized_roles:
            raise RuntimeError(
                "torch.func (grad, jvp, vmap) cannot transform quantised layers: take loss.backward() or "
                "torch.autograd.grad; torch.func.functional_call works"
            )

    def layer_role(self, role: str) -> str:
        """Return the name of a role of ``QUANTIZERS`` in this layer, where roles of its kind have no prefix."""
        short_name = role.removeprefix(f"{self.kind}_")
        return short_name if short_name in self.active_bits.quantizers else role

    def quantized(
        self,
        compute: Callable[..., Tensor],
        operands: tuple[Tensor, Tensor, Tensor | None],
        roles: tuple[str | None, str | None],
        gradient: str,
        along: tuple[int | None, int | None] = (None, None),
    ) -> Tensor:
        """Return ``compute`` of rounded operands, with a rounded output gradient.

        Args:
            compute: ``compute(first, second, bias)``, linear in each operand.
            operands: first operand, second operand, bias or None.
            roles: roles of the first and second operand, keys of ``QUANTIZERS``; None for one that is not rounded.
            gradient: role of the output gradient.
            along: dimension of the first and second operand over which the operation sums; None for the role's own.
        """
        return self.grids.multiply(self, compute, operands, roles, gradient, along)

    def quantize_operand(
        self, role: str, x: Tensor, along: int | None = None
    ) -> Tensor:
        """Return an operand, quantised with the straight-through estimator.

        Args:
            role: role of the operand in this layer.
            x: dense floating-point tensor.
            along: dimension over which the operation sums; None for the role's own.
        """
        self.require_bits()
        check_floating(x)
        if self.zeros_unchecked:
            self.warn_of_exact_zeros(role, x)
        return self.round_operand(role, x, along)

    def warn_of_exact_zeros(self, role: str | None, x: Tensor) -> None:
        """Warn once if a weight has exact zeros that its grid cannot represent."""
        if (
            role is not None
            and self.layer_role(role) == "weight"
            and not torch.compiler.is_compiling()
        ):
            self.zeros_unchecked = False
            if not self.quantizers["weight"].zero_point:
                extensions.services("exact_zeros").warn_of_exact_zeros(self, x)

    def round_operand(self, role: str, x: Tensor, along: int | None) -> Tensor:
        """Return a rounded operand, without checks that bits are set."""
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
        return self.grids.apply(self, role, x, along, self._round)

    def _round(self, role: str, x: Tensor) -> Tensor:
        quantizer = self.active_bits.quantizers[role]
        num_steps = self.num_steps_for(role)
        if quantizer.running and not self.training:
            low, width = self.eval_range(role, x)
            return fake_quantize.operators.round_in_range(
                x, low, width, num_steps, quantizer.grid, clip=True
            )
        if self.is_observed:
            self.observe(role, x)
        y, low, width = fake_quantize.operators.fake_quantize(
            x, num_steps, quantizer.grid
        )
        if quantizer.running:
            self.track(role, low, width)
        return y

    def matmul_with_quantized_grad(
        self, multiply: Callable[..., Tensor], *operands: Any, role: str = "grad"
    ) -> Tensor:
        """Return ``multiply(*operands)`` with a quantised output gradient; operands are already quantised."""
        if self.active_bits.splits_gradient and torch.is_grad_enabled():
            return _with_split_gradient(self, role, multiply, *operands)
        return self.gradient(role, multiply(*operands))

    def gradient(self, role: str, y: Tensor) -> Tensor:
        """Return ``y``; the gradient that flows back through it is quantised."""
        if not self.active_bits.gradient or not y.requires_grad:
            return y
        return self.grids.apply(self, role, y, None, self._with_rounded_gradient)

    def _with_rounded_gradient(self, role: str, y: Tensor) -> Tensor:
        quantizer = self.active_bits.quantizers[role]
        key = self.next_noise_key() if quantizer.rounding == "stochastic" else None
        y = fake_quantize.operators.quantize_gradient(
            y, self.grad_num_steps, quantizer.grid, key
        )
        # the hook runs when the gradient arrives, before it is rounded
        if self.is_observed:
            y.register_hook(partial(self.observe, role))
        if (
            not torch.compiler.is_compiling()
            and self.awaits_first_gradient
            and self.training
            and not self.is_fixed
        ):
            y.register_hook(self._check_first_gradient)
        return y

    def _check_first_gradient(self, gradient: Tensor) -> None:
        """Warn if the first gradient of a training is too small for its grid (tensor hook)."""
        self.awaits_first_gradient = False
        extensions.services("small_gradients").warn_of_small_gradient(self, gradient)

    @property
    def is_observed(self) -> bool:
        """True if ``observer`` receives the tensors that are rounded."""
        # this order keeps guards on the observer out of compiled code
        return (
            not torch.compiler.is_compiling()
            and self.observer is not None
            and self.training
        )

    def observe(self, role: str, x: Tensor, rows: Sequence[int] = ()) -> None:
        """Pass a tensor that is about to be rounded to the observer.

        Args:
            role: role of the tensor in this layer.
            x: the tensor.
            rows: numbers of rows of its parts, if these have separate ranges.
        """
        if self.observer is not None:
            self.observer(role, x, rows)

    def next_noise_key(self, count: int = 1) -> Tensor:
        """Return the noise key of the next ``count`` gradients, see ``advances_key_in_backward``."""
        key = self.noise_key
        if not advances_key_in_backward():
            self.noise_key = key + count
        return key

    # --- state of training: running ranges and the key of the noise ---

    def eval_range(self, role: str, x: Tensor) -> Range:
        """Return the stored range of an operand for evaluation, or the range of ``x`` if none is stored.

        Where ``train(False)`` could not tell, as in an average of models, this is decided on the device.
        """
        low, width, weight = self.stored_range(role)
        if self.has_filled_range(role):
            return low, width
        self.warn_of_empty_range(role, weight)
        current_low, current_width = fake_quantize.operators.range(
            x.detach(), self.quantizers[role].grid
        )
        is_stored = weight > 0
        return (
            torch.where(is_stored, low, current_low),
            torch.where(is_stored, width, current_width),
        )

    def ranges(self) -> dict[str, Tensor]:
        """Return name -> running range, with names ``running_ROLE``."""
        return {name: getattr(self, name) for name in self._running}

    def range_tensor(self, role: str) -> Tensor:
        """Return the running range of a role, (3,), which training updates in place."""
        running: Tensor = getattr(self, f"running_{role}")
        return running

    def warn_of_empty_range(self, role: str, weight: Tensor) -> None:
        """Warn once per model if evaluation uses running ranges that are empty."""
        if (
            not torch.compiler.is_compiling()
            and self.ranges_unchecked
            and self.issued_warnings is not None
        ):
            self.ranges_unchecked = False
            extensions.services("empty_ranges").warn_of_empty_range(self, role, weight)

    def stored_range(self, role: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return minimum and width of the running range of a role, and their accumulated weight."""
        minimum, width, weight = self.range_tensor(role).unbind()
        if self.has_bias_correction:
            return minimum / weight, width / weight, weight
        return minimum, width, weight

    def track(self, role: str, minimum: Tensor, width: Tensor) -> None:
        """Update a running range with the range of one call, unless a backward pass recomputes it."""
        if not is_recomputing():
            fake_quantize.operators.track_(self.range_tensor(role), minimum, width)

    def get_running(self) -> dict[str, Tensor]:
        """Return copies of running ranges and noise key for a checkpoint, equal in all processes."""
        ranges = {name: running.clone() for name, running in self.ranges().items()}
        return {"noise_key": self.noise_key - self._offset, **ranges}

    def set_running(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``get_running`` returned."""
        for name, value in state.items():
            if self.noise_key.is_meta:  # a copy into a meta tensor would be lost
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
        """Offset the noise key by the rank of this process; the process group may be younger than the layer."""
        offset = 0
        if distributed.is_available() and distributed.is_initialized():
            offset = extensions.services("processes").key_offset() or 0
        if offset != self._offset:
            self.noise_key.add_(offset - self._offset)
            self._offset = offset

    def _reset_training_state(self) -> None:
        self.noise_key = torch.tensor(self.key, dtype=torch.int64, device="cpu")
        self._offset = 0
        for name in self._running:
            setattr(self, name, torch.zeros(3, dtype=torch.float32, device="cpu"))
        self.filled_roles = frozenset()

    # --- device, copies and pickles ---

    def follow(self, x: Tensor) -> None:
        """Move this state to the device of ``x``; FSDP and others move a model without ``to``."""
        if self.num_steps.device != x.device and not x.is_meta:
            self._move(x.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # move to the model's device, but stay in float32 when it is cast to half precision
        self._move(fn(self.num_steps.new_empty(0)).device)
        return self

    @torch.inference_mode(False)  # the tensors are written to outside of inference mode
    def _move(self, device: torch.device) -> None:
        # a meta tensor has no values, and to_empty gives it none
        if self.noise_key.is_meta:
            self._reset_training_state()
        self.noise_key = self.noise_key.to(device)
        for name, running in self.ranges().items():
            setattr(self, name, running.to(device))
        if device != self.num_steps.device:
            self._make_num_steps(device)
            self._fill_num_steps()

    def __getstate__(self) -> dict[str, Any]:
        """Exclude schedulers from copies and pickles."""
        return {
            **vars(self),
            "owning_scheduler": self.owning_scheduler is not None,
            "pending_scheduler": None,
            "is_fixed": False,
            "is_untrained": False,  # no scheduler is going to train the copy
            "ranges_unchecked": True,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or pickle, without levels that a scheduler had set."""
        super().__setstate__(
            {FORMER_ATTRIBUTES.get(name, name): value for name, value in state.items()}
        )
        # stored by a release whose running ranges were buffers
        if "_running" not in vars(self):
            self._running = tuple(self._buffers)
            vars(self).update(self._buffers)
            self._buffers.clear()
            self._non_persistent_buffers_set.clear()
        extensions.load_optional(self.kind)
        if self.execution != "simulated":
            extensions.load("int8")
        had_scheduler, self.owning_scheduler = self.owning_scheduler, None
        if had_scheduler:
            self.active_levels = None
        if self.active_bits.is_set:
            fake_quantize.load_kernels()

    def __prepare_scriptable__(self) -> None:
        """Raise RuntimeError: ``torch.jit.script`` is not supported."""
        raise RuntimeError(
            "torch.jit.script cannot compile a model that quantize_ converted: use torch.compile, torch.export or "
            "cpt.export, or call restore_(model) first"
        )

    def extra_repr(self) -> str:
        """Return the active bits, the execution mode and the kernels in use."""
        if not self.active_bits.is_set:
            return f"bits=not set, execution={self.execution}"
        execution = self.execution
        if execution != "simulated" and self.active_bits.has_quantized_roles:
            execution = extensions.load("int8").describe_execution(self)
        kernels = fake_quantize.operators.name_on(self.num_steps.device)
        return f"{self.grids.describe(self.active_bits)}, execution={execution}, kernels={kernels}"


@torch._disable_dynamo  # torch.compiler.disable would import the compiler here
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
    cast: Callable[[Any, torch.dtype], Any] | None = None,
) -> Any:
    """Return ``compute(*inputs)``, run in float32 where a float module would run in half precision.

    That is under autocast, or in a half-precision model: of the 256 values of an 8-bit grid between 10 and 11, bfloat16
    can represent 17. The result is cast to the dtype that the float module would return; the gradient is quantised
    before it is cast. ``cast(outputs, half dtype)`` does so for functions that return float32 under autocast.
    """
    if precision is None or not precision.active_bits.has_quantized_roles:
        return compute(*inputs)
    device_type = x.device.type
    half_dtype = x.dtype if x.dtype in HALF else None
    if (
        x.dtype == torch.float32
        and not x.is_meta
        and torch.is_autocast_enabled(device_type)
    ):
        half_dtype = torch.get_autocast_dtype(device_type)
    if half_dtype is None:
        return compute(*inputs)

    with torch.autocast(device_type, enabled=False):
        outputs = compute(*map(_as_float32, inputs))
    if cast is not None:
        return cast(outputs, half_dtype)
    if isinstance(outputs, tuple):
        return tuple(y.to(half_dtype) for y in outputs)
    return outputs.to(half_dtype)


def _as_float32(value: Any) -> Any:
    if isinstance(value, tuple):  # features of sources and destinations of a graph
        return tuple(map(_as_float32, value))
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    return value
