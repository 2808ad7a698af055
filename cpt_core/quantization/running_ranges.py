"""What training leaves in a quantised layer besides its parameters: running ranges, and the key of its noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, distributed, nn

from cpt_core.quantization import fake_quantize
from cpt_core.quantization.roles import Quantizer
from cpt_core.quantization.rounding import RUNNING_DECAY, Range, clips

RUNNING_STARTS = ("corrected", "zero")
KEY_BITS = 51  # of the keys that ``quantize_`` makes


class RunningState(nn.Module):
    """What training leaves in a ``LayerPrecision``, and the range that a tensor is given where a running one is kept.

    Attributes:
        noise_key: of the stochastic rounding, 0-d int64; counts on with every gradient. No buffer, which would be
            broadcast: every process of a group has its own, ``process_offset`` behind that of the first.
        running_ROLE: (3,), running minimum, running width, and the weight both have gathered.
        corrected: whether the first two are divided by the third.
        calibrated: whether the running ranges are known to be filled.

    Arguments as those of ``LayerPrecision``.
    """

    noise_key: Tensor
    _offset: int

    def __init__(self, quantizers: Mapping[str, Quantizer], key: int, running_start: str) -> None:
        super().__init__()
        self.corrected, self.key = running_start == "corrected", key
        for role, quantizer in quantizers.items():
            if quantizer.running:
                self.register_buffer(f"running_{role}", None, persistent=False)
        self._start()

    @property
    def quantizers(self) -> Mapping[str, Quantizer]:
        """The quantiser of every role, with the format in force."""
        raise NotImplementedError

    def keep_apart(self) -> None:
        """Let the key be that of this process, also when a group of processes has been made since the layer was."""
        if (offset := process_offset()) != self._offset:
            self.noise_key.add_(_wrapped(offset - self._offset))
            self._offset = offset

    def _start(self) -> None:
        """Be as before any training."""
        self.noise_key, self._offset = torch.tensor(self.key, dtype=torch.int64, device="cpu"), 0
        self._buffers.update({name: torch.zeros(3, dtype=torch.float32, device="cpu") for name in self._buffers})
        self.calibrated = not self.corrected

    @torch.inference_mode(False)  # what is made in a forward pass is written to elsewhere
    def _move(self, device: torch.device) -> None:
        if self.noise_key.is_meta:  # there are no numbers on meta, and to_empty brings none
            self._start()
        self.noise_key = self.noise_key.to(device)
        self._buffers.update({name: buffer.to(device) for name, buffer in self.named_buffers()})

    def evaluated(self, role: str, x: Tensor) -> Range:
        """Return the range on which evaluation rounds an operand whose running range is kept."""
        return self.running_range(role) or self.or_running(
            role, *fake_quantize.range_of(x.detach(), self.quantizers[role].grid)
        )

    def running_range(self, role: str) -> Range | None:
        """Return the stored range of a role where it is used: in evaluation, once training has filled it."""
        return self._stored(role)[:2] if self.calibrated and self._uses_stored(role) else None

    def or_running(self, role: str, minimum: Tensor, width: Tensor) -> Range:
        """Return the range at hand, or in evaluation the stored one where it has been filled since ``train(False)``.

        An average of models (``AveragedModel``) gets its running ranges like that. Decided on the device.
        """
        if not self._uses_stored(role):
            return minimum, width
        low, wide, weight = self._stored(role)
        return torch.where(weight > 0, low, minimum), torch.where(weight > 0, wide, width)

    def stored_range(self, role: str) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return minimum, width and weight for an operator that decides as ``running_range`` and ``or_running`` do.

        All None: every tensor has a range of its own. Weight None: the stored range counts; else where it is above 0.
        """
        if not self._uses_stored(role):
            return None, None, None
        low, wide, weight = self._stored(role)
        return low, wide, None if self.calibrated else weight

    def clips(self, role: str) -> bool:
        """Whether values can lie outside the range of their role."""
        quantizer = self.quantizers[role]
        return clips(quantizer.granularity, quantizer.rounding == "stochastic") or self._uses_stored(role)

    def _uses_stored(self, role: str) -> bool:
        return self.quantizers[role].running and not self.training

    def _stored(self, role: str) -> tuple[Tensor, Tensor, Tensor]:
        minimum, width, weight = self.get_buffer(f"running_{role}").unbind()
        return (minimum / weight, width / weight, weight) if self.corrected else (minimum, width, weight)

    def track(self, role: str, minimum: Tensor, width: Tensor) -> None:
        """Let a running range follow the range of one call (0-d), or those of several calls one after the other (T,).

        running = 0.9 running + 0.1 current, see ``rounding.track``; a call that is not finite leaves it alone,
        and so does a forward pass inside a backward pass: activation checkpointing runs it a second time. (Not seen
        where a module is compiled by itself and then checkpointed; a compiled model may checkpoint its parts.)
        """
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return
        running = self.get_buffer(f"running_{role}")
        if minimum.dim() == 0:
            fake_quantize.operators.track_(running, minimum, width)
            return
        now = torch.stack([minimum, width, torch.ones_like(width)])
        counts = now.isfinite().all(0)
        later = counts.flip(0).cumsum(0).flip(0) - counts.int()  # calls that count and come after this one
        shares = torch.where(counts, (1 - RUNNING_DECAY) * RUNNING_DECAY**later, 0.0)
        running.mul_(RUNNING_DECAY ** counts.sum()).add_((torch.where(counts, now, 0.0) * shares).sum(1))

    def train(self, mode: bool = True) -> Self:
        """Set the mode; on the way to evaluation see whether the running ranges have been filled."""
        super().train(mode)
        if not mode and self.corrected:
            self.calibrated = all(not running.is_meta and float(running[2]) > 0 for running in self.buffers())
        return self

    def get_running(self) -> dict[str, Tensor]:
        """Return copies of what training changes besides the bits, for a checkpoint: the same in every process."""
        ranges = {name: running.clone() for name, running in self.named_buffers()}
        return {"noise_key": self.noise_key - _wrapped(self._offset), **ranges}

    def set_running(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``get_running`` returned."""
        for name, value in state.items():
            if self.noise_key.is_meta:  # where copies are lost
                self._move(value.device)
            (self.noise_key if name == "noise_key" else self.get_buffer(name)).copy_(value)
        if "noise_key" in state:
            self._offset = 0
            self.keep_apart()
        self.train(self.training)


def process_offset() -> int:
    """Return how far the keys of this process are behind those of the first one of its group: 0 where it is alone.

    ``quantize_`` makes keys below 2**51, so that those of two processes never meet.
    """
    alone = not (distributed.is_available() and distributed.is_initialized())
    return 0 if alone else distributed.get_rank() << KEY_BITS


def _wrapped(offset: int) -> int:
    """Return the int64 that is added to a key."""
    return (offset + 2**63) % 2**64 - 2**63
