"""C++ kernels for tensors on a CPU, with the bits of the plain backend; ``kernels.backend`` builds and loads them."""
