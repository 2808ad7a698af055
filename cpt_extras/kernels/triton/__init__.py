"""The operators in Triton, for tensors on a GPU: the numbers of the plain backend, faster.  ``backend.py`` opens it."""
