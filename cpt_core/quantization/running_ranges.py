"""What training leaves in a quantised layer besides its parameters: running ranges, and the key of its noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, distributed, nn

from cpt_core.quantization import fake_quantize
from cpt_core.quantization.roles import Quantizer
from cpt_core.quantization.rounding import Range

RUNNING_STARTS = ("corrected", "zero")
KEY_BITS = 51  # of the keys that ``quantize_`` makes
MAX_PROCESSES = 2 ** (63 - KEY_BITS)  # with noise of their own


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
            self.noise_key.add_(offset - self._offset)
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
        """Return the range on which evaluation rounds an operand whose running range is kept.

        It is the stored one; where that is not known to be filled since ``train(False)``, as in an average of models
        (``AveragedModel``), the range at hand takes its place as long as it is empty. Decided on the device.
        """
        low, width, weight = self.stored_range(role)
        if self.calibrated:
            return low, width
        own_low, own_width = fake_quantize.operators.range(x.detach(), self.quantizers[role].grid)
        return torch.where(weight > 0, low, own_low), torch.where(weight > 0, width, own_width)

    def stored_range(self, role: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return minimum and width of the running range of a role, and the weight that both have gathered."""
        minimum, width, weight = self.get_buffer(f"running_{role}").unbind()
        return (minimum / weight, width / weight, weight) if self.corrected else (minimum, width, weight)

    def track(self, role: str, minimum: Tensor, width: Tensor) -> None:
        """Let a running range follow the range of one call, see ``rounding.track``; a second forward pass changes none.

        Activation checkpointing runs one inside a backward pass. (Not seen where a module is compiled by itself and
        then checkpointed; a compiled model may checkpoint its parts.)
        """
        if not is_recomputing():
            fake_quantize.operators.track_(self.get_buffer(f"running_{role}"), minimum, width)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; on the way to evaluation see whether the running ranges have been filled."""
        super().train(mode)
        if not mode and self.corrected:
            self.calibrated = all(not running.is_meta and float(running[2]) > 0 for running in self.buffers())
        return self

    def get_running(self) -> dict[str, Tensor]:
        """Return copies of what training changes besides the bits, for a checkpoint: the same in every process."""
        ranges = {name: running.clone() for name, running in self.named_buffers()}
        return {"noise_key": self.noise_key - self._offset, **ranges}

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


def is_recomputing() -> bool:
    """Return whether a backward pass runs a forward pass again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def process_offset() -> int:
    """Return how far the keys of this process are behind those of the first one of its group: 0 where it is alone.

    ``quantize_`` makes keys below 2**51, so that those of two processes never meet; there is room for 4,096.
    """
    alone = not (distributed.is_available() and distributed.is_initialized())
    return 0 if alone else distributed.get_rank() % MAX_PROCESSES << KEY_BITS
