"""Everything beyond the method of the paper: number formats, fast kernels, int8, diagnostics, search, integrations.

The problem: ``cpt_core`` must stay small enough to be read in an afternoon, and must give the paper's numbers. Faster
kernels, further formats and help for other libraries are larger than the method itself.

The design: the core works alone, in plain torch. It names this package in one file, ``cpt_core/extensions.py``, and
imports a part only when a model or a configuration needs it. A part registers itself at one of the core's extension
points when it is imported (docs/how-it-works.md).

- ``kernels``: C++ and Triton kernels with the bits of plain torch, faster.
- ``int8``: execution on 8-bit integers, and export.
- ``formats``: number formats, ladders of them, and prices of a training step.
- ``operations``: handlers of further torch functions, and of unusual ways to run a model.
- ``integrations``: transformers, Lightning, DGL, PyTorch Geometric, torch.distributed, torch.fx.
- ``diagnostics``: what ran quantised, what rounding did, and warnings.
- ``search``: schedules and bits for a budget.
- ``cpu_info``, ``figures``, ``files``, ``optional_libraries``, ``progress``, ``validation``: shared helpers.

The trade-offs: importing a part changes what the core does, so that every part must give the numbers of the plain path,
or say where it differs. Public names are those of ``cpt_core``, such as ``cpt_core.search.allocate``.
"""
