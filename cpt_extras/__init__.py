"""Everything beyond the method: number formats, fast kernels, int8, diagnostics, search, integrations.

``cpt_core`` holds the method of the paper and names this package in one file, ``cpt_core/extensions.py``. A part of
this package registers itself at one of the core's four extension points when it is imported (docs/how-it-works.md).
Its public names are those of ``cpt_core``, such as ``cpt_core.search.allocate``.
"""
