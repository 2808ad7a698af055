"""A graph object without a GPU: it records operations with the tensors they touch, and does exactly these again.

As a CUDA graph it knows tensors by their place and Python numbers by the value they had; a number that the host reads
cannot be recorded. Recording changes nothing.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = (
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "item",
)  # of a number, by the host


def tensors(*values):
    return [
        t
        for t in tree_leaves(values)
        if isinstance(t, torch.Tensor) and t.layout == torch.strided
    ]


class Tape(TorchDispatchMode):
    """What happens inside the block."""

    def __init__(self):
        super().__init__()
        self.calls, self.outputs_by_storage, self.contents_before = [], {}, {}

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        if call.overloadpacket.__name__ in HOST_READS:
            raise RuntimeError(
                f"{call} reads a number on the host: not permitted when a stream is capturing"
            )
        for t in tensors(args, kwargs):
            place = t.untyped_storage()
            if (
                place._cdata not in self.outputs_by_storage
                and place._cdata not in self.contents_before
            ):
                self.contents_before[place._cdata] = (place, place.clone())
        out = call(*args, **(kwargs or {}))
        for t in tensors(out):
            if t.untyped_storage()._cdata not in self.contents_before:
                self.outputs_by_storage[t.untyped_storage()._cdata] = t
        self.calls.append((call, args, kwargs or {}, out))
        return out

    def undo(self):
        """Put back what the operations have changed."""
        for place, content in self.contents_before.values():
            place.copy_(content)

    def replay(self):
        """Do the operations again, on the same tensors."""
        with torch._C._AutoDispatchBelowAutograd():
            for call, args, kwargs, out in self.calls:
                new = call(*args, **kwargs)
                for old, fresh in zip(tensors(out), tensors(new), strict=True):
                    if old.untyped_storage()._cdata != fresh.untyped_storage()._cdata:
                        old.copy_(fresh)


class TapeRecorder:
    """The ``CudaRecorder`` of ``training.cuda_graphs`` for the CPU."""

    def __init__(self):
        self.tapes = []

    def warm_up(self, work):
        return work()

    def record(self, work):
        random = torch.get_rng_state()
        tape = Tape()
        try:
            with tape:
                result = work()
        finally:
            tape.undo()
            torch.set_rng_state(random)
        self.tapes.append(tape)
        return tape.replay, result
