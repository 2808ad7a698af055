"""Connections to other libraries: transformers, Lightning, DGL, PyTorch Geometric, torch.distributed, torch.fx.

The problem: a trainer steps the optimizer, wraps the model, writes checkpoints and averages gradients in places that a
user's three lines do not reach. A schedule must count optimizer steps there, resume from checkpoints, and round alike
in all processes.

The design: one module per library; import the one you need. Nothing here imports another library by itself, and each
module but ``pyg`` is tested with the real library.

- ``hf`` and ``lightning``: callbacks that step a schedule with the trainer and resume it from its checkpoints;
  ``trainer_precision`` is the scheduler that both use.
- ``optimizer_hooks``: a scheduler that follows an optimizer through hooks, so that gradient accumulation and skipped
  steps count right, and its state travels in the optimizer's.
- ``dgl``: DGL's own graph convolutions; ``pyg``: the graphs of PyTorch Geometric.
- ``distributed``: ``synced_ranges``, with which N processes round as one process with the whole batch does.
- ``data_parallel``: what quantised layers need under DDP: rounding noise per process, broadcast running ranges, and an
  error for sharded weights.
- ``conversion_hooks``: checks and warnings that ``quantize_`` runs on models of other libraries.
- ``graph_modules``: copies of ``torch.fx`` modules stay converted.
- ``wrapped_names``: the state of a scheduler fits a model that DDP, FSDP or ``torch.compile`` wraps.

The trade-offs: hooks of other libraries are private in places, so that a new release of one may need a change here; the
tests run the real libraries to find out. Tensor parallelism is refused, since layers need whole weights.
"""
