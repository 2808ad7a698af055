"""Models sharded over processes: supported orders of calls, and errors that name the right order."""

import copy
import weakref

import pytest
import torch
from helpers import refused
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import cpt_core as cpt
from cpt_core.quantization.precision import LayerPrecision


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """Provide a device mesh of a single process."""
    place = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def whole(model, mesh):
    return fully_shard(model, mesh=mesh)


def layer_by_layer(model, mesh):
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_parallel(model, mesh):
    return parallelize_module(
        model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )


X = torch.randn(3, 8)
ASKED = {
    "check": (lambda m: cpt.check(m, (X,)), "check it before fully_shard"),
    "count": (
        lambda m: cpt.count_bitops(m, (X,)),
        "count and check before fully_shard",
    ),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("shard", [whole, layer_by_layer])
def test_sharded_model_is_rejected_by_check(mesh, shard, asked):
    """Ask to call check and count_bitops before fully_shard."""
    ask, said = ASKED[asked]
    model = shard(cpt.quantize_(net()), mesh)
    refused(f"parameter '0.weight' is sharded already, .*; {said}", ask, model)


@pytest.mark.parametrize("shard", [whole, layer_by_layer, in_parallel])
def test_sharded_model_is_rejected_by_quantize(mesh, shard):
    model = shard(net(), mesh)
    refused(
        r"sharded already, .*; call quantize_\(model\) before fully_shard\(model\)",
        cpt.quantize_,
        model,
    )
    assert not any(isinstance(m, LayerPrecision) for m in model.modules())
    refused(
        r"count and check before .* tensor parallelism .* cannot be used",
        cpt.count_bitops,
        model,
        (X,),
    )


@pytest.mark.parametrize("shard", [whole, layer_by_layer])
def test_sharded_after_conversion_trains_as_unsharded(mesh, shard):
    """Train and count as unsharded if quantize_ is called before fully_shard."""
    plain = cpt.quantize_(net())
    sharded = shard(copy.deepcopy(plain), mesh)
    found = []
    for model in (plain, sharded):
        with cpt.precision(model, 4, 4), cpt.BitOpsLedger(model) as ledger:
            loss = model(X).square().sum()
            loss.backward()
        gradients = [
            p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for p in model.parameters()
        ]
        found.append((loss, gradients, ledger.bitops()))
    (loss, gradients, bitops), (other, others, counted) = found
    assert torch.equal(loss, other)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    assert bitops == counted


class Saved:
    """Wrapper of a tensor that autograd saves for the backward pass."""

    def __init__(self, x):
        self.x = x


def test_sharded_weights_are_saved_only_without_checkpointing(
    mesh,
):
    """Free quantised weights after the backward pass, or at once in checkpointed blocks."""
    gradients = {}
    for checkpointed in (False, True):
        model, kept = layer_by_layer(cpt.quantize_(net()), mesh), []

        def keep(x, kept=kept):
            saved = Saved(x)
            kept.append((weakref.ref(saved), tuple(x.shape)))
            return saved

        out = X.clone().requires_grad_()
        with cpt.precision(model, 4, 4):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved.x):
                for layer in model:
                    out = (
                        checkpoint(layer, out, use_reentrant=False)
                        if checkpointed
                        else layer(out)
                    )
            weights = [
                shape
                for alive, shape in kept
                if alive() is not None and shape in ((8, 8), (8, 4))
            ]
            assert len(weights) == (0 if checkpointed else 2)
            out.square().sum().backward()
        assert not any(alive() is not None for alive, _ in kept)
        gradients[checkpointed] = [p.grad.full_tensor() for p in model.parameters()]
    assert all(torch.equal(*both) for both in zip(*gradients.values(), strict=True))
