"""The operators in C++, for tensors on a CPU: the numbers of the plain backend, faster.  ``backend.py`` opens it."""
