"""Int8 execution of quantised layers, and export of trained models.  Beyond the paper.

The problem: fake quantisation rounds to at most 8 bits and multiplies in float32. Processors multiply int8 x int8 into
int32 faster, and an exported model should hold a byte per weight.

The design: a layer keeps its grids, bits and schedule; only the arithmetic changes.

- ``quantized_tensor``: int8 codes of a tensor with the grid that they lie on.
- ``matmul``: the algebra. With an affine grid x = s (k - z) + r, a matmul is one of integers, int8 x int8 -> int32, and
  three sums over rows and columns, which scale it back to float32.
- ``layers``, ``convolution``, ``lstm`` and ``graph_layers``: that algebra in autograd functions, forward and backward.
- ``execution``: whether a layer runs in int8 at its active bits and on its device.
- ``executors``: registers all of them in the core's ``OP_EXECUTORS``; an executor that returns None falls back to
  simulation.
- ``fallback``: the reason for every matmul that is simulated, as ``summary`` prints it (docs/fallbacks.md).
- ``export``: a trained model as a ``torch.export`` program that stores a byte per weight.

The trade-offs: integer sums are exact and float32 sums are not, so that results differ from simulation in the last
bits. Where ranges differ along the summed dimension, per row or channel, a matmul has no integer form and is simulated;
``QuantConfig.with_shared_steps()`` avoids that at some cost in accuracy. Gradients of gradients are not supported.
docs/int8.md has measured times: wide layers gain, ResNets do not.
"""
