"""Connections to other libraries: transformers, Lightning, DGL, PyTorch Geometric, torch.distributed, torch.fx.

Import the one you need; nothing here imports another library by itself, and each but ``pyg`` is tested with the real
one.

- ``hf`` and ``lightning`` are callbacks that step a schedule with the trainer and resume it from its checkpoints.
  Both let the schedule follow the optimizer (``following``), so gradient accumulation and skipped steps count right.
- ``dgl`` converts DGL's own graph convolutions; ``pyg`` takes the graphs of PyTorch Geometric.
- ``distributed`` makes processes agree on ranges, so that they round as one process with the whole batch would.
- ``hosts`` is what every conversion asks: which libraries a model uses, and what it would do to them.
- ``graph_modules`` keeps copies of ``torch.fx`` modules converted.
- ``wrapped_names`` lets a scheduler's state fit a model that DDP, FSDP or ``torch.compile`` wraps; ``processes`` gives
  every process rounding noise of its own.
"""
