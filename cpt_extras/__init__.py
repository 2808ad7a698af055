"""Everything beyond the method: number formats, fast kernels, int8 matmuls, diagnostics, search, integrations.

``cpt_core`` holds the method of the paper.  What is here makes it faster, measures it, chooses bits for a task or
connects it to other libraries.  The public names are those of ``cpt_core``, such as ``cpt_core.search.allocate``.
"""
