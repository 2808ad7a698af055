"""A graph object without a GPU: it records operations with the tensors they touch, and does exactly these again.

As a CUDA graph it knows tensors by their place and Python numbers by the value they had; a number that the host reads
cannot be recorded. Recording changes nothing.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = "_local_scalar_dense", "nonzero", "equal", "item"


def strided_tensors(*values):
    tensors = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    return [t for t in tensors if t.layout == torch.strided]


def place(tensor):
    """Return the memory of a tensor, by a number."""
    return tensor.untyped_storage()._cdata


class Tape(TorchDispatchMode):
    """Operations that run inside the block, and the contents of memory before them."""

    def __init__(self):
        super().__init__()
        self.calls, self.created, self.contents_before = [], {}, {}

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if call.overloadpacket.__name__ in HOST_READS:
            raise RuntimeError(
                f"{call} reads a number on the host: not permitted when a stream is capturing"
            )
        for t in strided_tensors(args, kwargs):
            if place(t) not in self.created and place(t) not in self.contents_before:
                storage = t.untyped_storage()
                self.contents_before[place(t)] = storage, storage.clone()
        out = call(*args, **kwargs)
        for t in strided_tensors(out):
            if place(t) not in self.contents_before:
                self.created[place(t)] = t
        self.calls.append((call, args, kwargs, out))
        return out

    def undo(self):
        """Put back what the operations have changed."""
        for storage, content in self.contents_before.values():
            storage.copy_(content)

    def replay(self):
        """Do the operations again, on the same tensors."""
        with torch._C._AutoDispatchBelowAutograd():
            for call, args, kwargs, out in self.calls:
                again = strided_tensors(call(*args, **kwargs))
                for old, new in zip(strided_tensors(out), again, strict=True):
                    if place(old) != place(new):
                        old.copy_(new)


class TapeRecorder:
    """The ``CudaRecorder`` of ``training.cuda_graphs`` for the CPU."""

    def __init__(self):
        self.tapes = []

    def warm_up(self, work):
        return work()

    def record(self, work):
        random_state, tape = torch.get_rng_state(), Tape()
        try:
            with tape:
                result = work()
        finally:
            tape.undo()
            torch.set_rng_state(random_state)
        self.tapes.append(tape)
        return tape.replay, result
