"""Data-parallel training: rounding noise per process, ranges broadcast by DDP, and an error for sharded weights."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import distributed, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel

from cpt_core.quantization.convert import all_precisions
from cpt_core.quantization.op_interception import HOOK

KEY_BITS = 51  # of the keys that ``quantize_`` makes
MAX_PROCESSES = 2 ** (63 - KEY_BITS)  # with noise of their own


def key_offset() -> int:
    """Return the offset of the noise keys of this process, 0 in the first process.

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


def share_ranges_of_active() -> None:
    """Broadcast the ranges of the first process in every pass of the model that DDP runs now."""
    parallel = DistributedDataParallel._active_ddp_module
    if parallel is not None and parallel not in _sharing:
        _sharing.add(parallel)
        _share_ranges(parallel, ())
        parallel.register_forward_pre_hook(_share_ranges)


@torch._disable_dynamo  # torch.compiler.disable would import the compiler here
def _share_ranges(parallel: Any, args: Any) -> None:
    """Forward pre-hook: broadcast running ranges when buffers are broadcast, which they are not."""
    if (
        not (parallel.require_forward_param_sync and parallel.forward_sync_buffers)
        or parallel._join_config.enable
    ):
        return
    ranges = [
        x for p in all_precisions(parallel.module).values() for x in p.ranges().values()
    ]
    if not ranges:
        return
    with (
        torch.no_grad(),
        torch.autograd._unsafe_preserve_version_counter(tuple(ranges)),
    ):
        parallel._distributed_broadcast_coalesced(
            ranges, parallel.broadcast_bucket_size, 0
        )


_sharing: WeakSet[Any] = WeakSet()  # DDP models whose ranges are broadcast


def check_unsharded(model: Any, first: str) -> None:
    """Raise ValueError for a model with sharded parameters; ``first`` is the step to do before sharding."""
    for name, parameter in model.named_parameters():
        if hasattr(
            parameter, "device_mesh"
        ):  # a DTensor, asked without importing torch.distributed
            raise ValueError(
                f"parameter {name!r} is sharded already, by fully_shard or tensor parallelism; {first} before "
                "fully_shard(model). Quantised layers need whole weights when they run: fully_shard gathers them, "
                "tensor parallelism (parallelize_module) does not and cannot be used with them"
            )
