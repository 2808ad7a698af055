"""Fast kernels for rounding and quantised layers: C++ on CPUs, Triton on GPUs, both equal to plain torch.

The problem: in plain torch, rounding a tensor takes several passes over it, each an operation of its own; a small
network spends its step in them.

The design: ``operators`` registers ``torch.ops.cpt.*``, one node each for autograd, compilers and CUDA graphs, and
replaces the rounding functions of the core. ``backend`` builds the C++ when it is first needed, chooses, and says why.
``layers`` runs a linear layer or convolution in training as one operator, ``lstm`` and ``graph`` do so for a direction
of an LSTM and a graph convolution; ``constant_features`` sums features that never change once. ``gemm_backend`` picks
the library of float32 matrix products.

Every kernel gives the bits of its plain implementation, which ``backend.reference()`` selects, rounding noise included:
noise is a hash of key and position, so it does not depend on threads or devices. Without this package the core computes
the same up to the order of float32 sums, but for the gradients of an LSTM, which it rounds with other noise.

The trade-offs: a compiler is needed once; without one, plain torch runs, and ``cpt.backend()`` says so.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the list of public names
    from cpt_extras.kernels.backend import Backend as Backend
else:
    from cpt_core.lazy_imports import attach

    __all__, __getattr__, __dir__ = attach(__name__)
