"""Time of float32 matmuls in oneDNN relative to MKL, which torch calls: ``python -m bench.gemm_shapes``.

Forward GEMM (y = x w'), dgrad (dx = dy w) and wgrad (dw = dy' x) of the shapes of ``bench.step_ratio``, interleaved
in one process, one thread: ratios of medians, those of minima in brackets. The last line, the geometric mean, is what
``cpt_extras.kernels.gemm_backend.ONEDNN_TIME_RATIOS`` stores for a kind of processor. Matmuls below its
``MIN_ONEDNN_MACS`` are shown and left out.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable

import torch

from bench.step_ratio import measure, ratio
from cpt_extras.cpu_info import cpu, processor
from cpt_extras.kernels import gemm_backend

SHAPES = {  # M rows, K of a sum, N columns
    "LSTM 800, a step": (20, 800, 3200),
    "LSTM 800, its input": (700, 800, 3200),
    "LSTM 200, a step": (20, 200, 800),
    "LSTM 200, its input": (700, 200, 800),
    "linear 768": (2048, 768, 768),
    "BERT, feed-forward": (2048, 768, 3072),
    "BERT, and back": (2048, 3072, 768),
    "small BERT": (1024, 128, 128),
    "graph convolution": (16384, 128, 512),
    "tiny, 64-32-10": (16, 64, 32),
}
PASSES = ("forward", "dgrad", "wgrad")
ROUNDS = 25


def timed(
    multiply: Callable[..., torch.Tensor], *operands: torch.Tensor
) -> Callable[[], float]:
    """Return a function that runs a matmul and returns its seconds."""

    def run() -> float:
        start = time.perf_counter()
        multiply(*operands)
        return time.perf_counter() - start

    return run


def matmul_onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x (M, K) times weight (N, K) transposed, computed by oneDNN."""
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        x, weight, None, "none", [], ""
    )
    return output


def main() -> None:
    """Print the ratios of every shape, and their mean."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, {cpu()['cpu']}")
    print(f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if not (gemm_backend.has_onednn_matmul() and torch.backends.mkl.is_available()):
        raise SystemExit(
            "gemm_shapes needs a torch with MKL and with mkldnn::_linear_pointwise"
        )
    print(
        f"{'oneDNN to MKL: median (minimum)':<32}"
        + "".join(f"{name:>16}" for name in PASSES)
        + "   MKL, forward"
    )
    table_ratios = []
    for name, (M, K, N) in SHAPES.items():
        x, weight, d_y = torch.randn(M, K), torch.randn(N, K), torch.randn(M, N)
        operands = {
            "forward": (x, weight),
            "dgrad": (d_y, weight.t()),
            "wgrad": (d_y.t(), x.t()),
        }
        libraries = {"onednn": matmul_onednn, "mkl": torch.nn.functional.linear}
        variants = {
            (gemm, lib): timed(f, *operands[gemm])
            for gemm in PASSES
            for lib, f in libraries.items()
        }
        times = measure(variants, ROUNDS)
        cells = [ratio(times[gemm, "onednn"], times[gemm, "mkl"]) for gemm in PASSES]
        rate = 2e-9 * M * K * N / min(times["forward", "mkl"])
        print(
            f"{name:<32}"
            + "".join(f"{cell:>16}" for cell in cells)
            + f"   {rate:.0f} GFLOPS",
            flush=True,
        )
        if M * K * N >= gemm_backend.MIN_ONEDNN_MACS:
            table_ratios += [
                statistics.median(times[w, "onednn"])
                / statistics.median(times[w, "mkl"])
                for w in PASSES
            ]
    mean = math.exp(statistics.mean(map(math.log, table_ratios)))
    print(
        f"{processor()}: {mean:.2f},  # now {gemm_backend.ONEDNN_TIME_RATIOS.get(processor(), 'nothing')}"
    )


if __name__ == "__main__":
    main()
