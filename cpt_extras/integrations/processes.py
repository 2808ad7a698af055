"""Several processes that train one model: every one has rounding noise of its own, and whole weights."""

from __future__ import annotations

from typing import Any

from torch import distributed, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from cpt_core.quantization.op_interception import HOOK

KEY_BITS = 51  # of the keys that ``quantize_`` makes
MAX_PROCESSES = 2 ** (63 - KEY_BITS)  # with noise of their own


def key_offset() -> int:
    """Return how far the keys of this process are behind those of the first one of its group.

    ``quantize_`` makes keys below 2**51, so that those of two processes never meet; there is room for 4,096.
    """
    return distributed.get_rank() % MAX_PROCESSES << KEY_BITS


def _refuse_sharded_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    """Raise ValueError where tensor parallelism replaces a parameter of a quantised layer; a hook of torch."""
    if hasattr(parameter, "device_mesh") and hasattr(module, HOOK):
        raise ValueError(
            f"parameter {name!r} of layer {getattr(module, HOOK).name!r} is to be sharded by tensor parallelism "
            "(parallelize_module), which cannot be used with quantised layers: use fully_shard or "
            "DistributedDataParallel, or call restore_(model) first"
        )


register_module_parameter_registration_hook(_refuse_sharded_parameter)


def check_unsharded(model: Any, first: str) -> None:
    """Raise ValueError for a model whose parameters are spread over processes; ``first`` is what comes before that."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):  # a DTensor, asked without importing torch.distributed
            raise ValueError(
                f"parameter {name!r} is sharded already, by fully_shard or tensor parallelism; {first} before "
                "fully_shard(model). Quantised layers need whole weights when they run: fully_shard gathers them, "
                "tensor parallelism (parallelize_module) does not and cannot be used with them"
            )
