"""Triton kernels for tensors on a GPU, with the bits of the plain backend; ``kernels.backend`` loads them."""
