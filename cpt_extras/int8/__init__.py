"""Integer execution: matmuls of quantised layers on 8-bit integers, and export.  Beyond the paper.

The problem: fake quantisation rounds to at most 8 bits and multiplies in float32. Processors multiply int8 x int8 into
int32 faster, and an exported model should hold a byte per weight.

The design: ``execution`` decides which operations of a layer can run on integers at its active bits; ``register`` puts
their executors into the core's ``OP_EXECUTORS``. ``quantized_tensor`` holds integers with their grid. ``matmul`` has
the algebra: an affine grid x = low + step * n makes a product of integers and three sums; ``layers``, ``convolution``,
``lstm`` and ``graph_layers`` use it, forward and backward. ``fallback`` tells why an operation is simulated.

The trade-offs: sums of integers are exact and those of float32 are not, so results differ from simulation in the last
bits. Ranges per row or channel along the summed dimension have no integer form: those operations are simulated.
docs/int8.md has measured times: wide layers gain, ResNets do not.
"""
