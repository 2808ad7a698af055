"""A pretended GPU: tensors that say they are on cuda:0 and compute on the CPU, while what a GPU would do is counted.

    with Phantom() as gpu:
        model.to("cuda:0")(x.to("cuda:0"))
    gpu.launches, gpu.waits

Launches are operations that start at least one kernel; views and allocations start none. Waits are those after which
the host knows something that the device had to compute first, or copies that are not both pinned and non-blocking, by
the line of the project that asks. Tensors of two devices in one operation are refused, as CUDA refuses them.

Not seen: kernels inside one operation (one quantised operator is one), memory, time, ``torch.compile``. Say "cuda:0":
for "cuda" C++ asks a driver.
"""

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from cpt_extras.kernels.backend import reference
from cpt_extras.kernels.operators import FAMILIES

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).parents[1]
NO_KERNEL = set(
    "view _unsafe_view reshape _reshape_alias expand permute transpose t detach alias slice select unbind squeeze "
    "unsqueeze split split_with_sizes narrow unfold as_strided diagonal chunk empty empty_like empty_strided new_empty "
    "new_empty_strided lift_fresh resize_ record_stream _local_scalar_dense is_same_size device _nnz crow_indices "
    "col_indices values sym_size sym_stride".split()
)
DATA_DEPENDENT = {
    **dict.fromkeys(
        "_local_scalar_dense equal is_nonzero".split(), "read"
    ),  # of a number
    **dict.fromkeys(
        "nonzero masked_select _unique2 unique_dim unique_consecutive bincount".split(),
        "shape",
    ),
}
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
COPIES = ("_to_copy", "copy_")


KERNELS = (
    "range",
    "round_to_grid",
    "fake_quantize",
    "track_",
)  # of Triton, a launch or two each


class MixedDevices(RuntimeError):
    """Tensors of the CPU and of the GPU in one operation."""


class PhantomTensor(torch.Tensor):
    """For Python a tensor on cuda:0; for C++ one without memory on the CPU, so that autograd needs no driver."""

    @staticmethod
    def __new__(cls, values_on_cpu, requires_grad=False):
        places = {}
        if values_on_cpu.layout is torch.strided:
            places = {
                "strides": values_on_cpu.stride(),
                "storage_offset": values_on_cpu.storage_offset(),
            }
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            values_on_cpu.size(),
            dtype=values_on_cpu.dtype,
            device="cpu",
            requires_grad=requires_grad,
            **places,
        )
        self.values_on_cpu = values_on_cpu
        return self

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def to(self, *args, **kwargs):
        is_like_tensor = args and isinstance(args[0], torch.Tensor)
        device, dtype, *_ = (
            (args[0].device, args[0].dtype)
            if is_like_tensor
            else torch._C._nn._parse_to(*args, **kwargs)
        )
        if device is None or device.type == "cuda":
            return self if dtype in (None, self.dtype) else super().to(dtype)
        if device.type == "meta":
            return torch.empty_strided(
                self.size(), self.stride(), dtype=dtype or self.dtype, device="meta"
            )
        caller = sys._getframe(1).f_code.co_filename
        if caller.endswith("clip_grad.py") or "/torch/optim/" in caller:
            return self  # these ask C++ where a tensor is
        return self.cpu() if dtype is None else self.cpu().to(dtype)

    def cpu(self, *_, **__):
        return _Down.apply(self)

    def tolist(self):
        Phantom.active.wait("read")
        return self.values_on_cpu.tolist()

    def numpy(self, **_):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first"
        )

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copy = PhantomTensor(
                self.values_on_cpu.detach().clone(), self.requires_grad
            )
            memo[id(self)] = (
                _parameter(copy, self.requires_grad)
                if getattr(self, "_is_param", False)
                else copy
            )
        return memo[id(self)]

    def __repr__(self, **_):
        return f"Phantom({self.values_on_cpu!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return CUDA
        raise RuntimeError(f"{func} of a phantom outside of its mode")


class _Down(torch.autograd.Function):
    """A copy to the host."""

    @staticmethod
    def forward(ctx, x):
        Phantom.active.wait("copy to host")
        return x.values_on_cpu.detach().clone()

    @staticmethod
    def backward(ctx, gradient):
        return PhantomTensor(gradient)


def _parameter(tensor, requires_grad):
    tensor = tensor.detach().requires_grad_(requires_grad)
    tensor._is_param = True  # isinstance(..., nn.Parameter) looks at this
    return tensor


class Phantom(TorchDispatchMode):
    """Inside this context there is a GPU, cuda:0.

    Attributes:
        launches: how often every operation was started on it.
        waits: how often the host waited for it, by reason and place, such as "read training/train.py:170".
        puts_gradients_on_gpu: whether gradients that autograd creates belong on it; False for a program on the CPU.
    """

    active = None

    def __init__(self):
        super().__init__()
        self.launches, self.waits, self.puts_gradients_on_gpu = (
            Counter(),
            Counter(),
            True,
        )

    def clear(self):
        self.launches.clear()
        self.waits.clear()

    def wait(self, reason):
        frame, outside = sys._getframe(1), None
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(f"{ROOT}/cpt_"):
                place = f"{'/'.join(Path(file).relative_to(ROOT).parts[1:])}:{frame.f_lineno}"
                break
            if outside is None and "site-packages" in file and "/torch/" not in file:
                outside = f"{file.split('site-packages/')[-1]}:{frame.f_lineno}"
            frame = frame.f_back
        else:
            place = "elsewhere"
        self.waits[f"{reason} {place}" + (f" ({outside})" if outside else "")] += 1

    def __enter__(self):
        assert Phantom.active is None
        Phantom.active = self
        self._stack = ExitStack()
        self._stack.enter_context(
            reference()
        )  # the kernels for tensors of the CPU see what these are
        for target, name, new in _patches():
            self._stack.enter_context(patch.object(target, name, new))
        self._lift = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        torch._C._set_only_lift_cpu_tensors(self._lift)
        self._stack.close()
        Phantom.active = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return CUDA
        kwargs = dict(kwargs or {})
        family, name = func._schema.name.split("::")
        if (
            family in FAMILIES and name not in KERNELS
        ):  # CUDA has no kernel of its own for it: its plain operations run
            super().__enter__()
            try:
                return func._op_dk(
                    torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs
                )
            finally:
                super().__exit__(None, None, None)
        operands = tree_flatten((args, kwargs))[0]
        phantoms = [x for x in operands if isinstance(x, PhantomTensor)]
        target_type = (
            torch.device(kwargs["device"]).type
            if kwargs.get("device") is not None
            else None
        )
        if (
            self.puts_gradients_on_gpu
            and torch._C._current_graph_task_id() != -1
            and (target_type == "cpu" or name == "zeros")
        ):
            kwargs["device"], target_type = (
                CUDA,
                "cuda",
            )  # autograd makes it where C++ says that the output is
        if not phantoms and target_type != "cuda":
            return func(*args, **kwargs)

        is_on_gpu = target_type == "cuda" or (
            bool(phantoms) and target_type is None
        )  # where the result is
        self._check(func, name, args, operands, phantoms)
        self._count(name, args, kwargs, operands, is_on_gpu)
        if target_type == "cuda":
            kwargs["device"] = torch.device("cpu")
        flat, form = tree_flatten((args, kwargs))
        plain_args, plain_kwargs = tree_unflatten(
            [x.values_on_cpu if isinstance(x, PhantomTensor) else x for x in flat], form
        )
        out = func(*plain_args, **plain_kwargs)
        if not is_on_gpu:
            return out
        if name == "copy_" and not isinstance(args[0], PhantomTensor):
            return args[0]
        changed = (
            {id(x.values_on_cpu): x for x in phantoms}
            if func._schema.is_mutable
            else {}
        )  # in place: the same object again

        def wrap(x):
            if (
                not isinstance(x, torch.Tensor)
                or isinstance(x, PhantomTensor)
                or x.is_meta
            ):
                return x
            return changed[id(x)] if id(x) in changed else PhantomTensor(x)

        return tree_map(wrap, out)

    def _check(self, func, name, args, operands, phantoms):
        plain_tensors = [
            x
            for x in operands
            if isinstance(x, torch.Tensor) and not isinstance(x, PhantomTensor)
        ]
        # CUDA takes 0-d tensors of the CPU as numbers, copies them, and copies indices that lie on the CPU
        strange = [x for x in plain_tensors if x.dim() > 0 and not x.is_meta]
        allowed = name in COPIES or (
            name in INDEXING and isinstance(args[0], PhantomTensor)
        )
        if phantoms and strange and not allowed:
            shapes = [tuple(x.shape) for x in strange]
            raise MixedDevices(
                f"Expected all tensors to be on the same device, found cuda:0 and cpu {shapes} in {func}"
            )

    def _count(self, name, args, kwargs, operands, is_on_gpu):
        if name in DATA_DEPENDENT:
            self.wait(DATA_DEPENDENT[name])
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.wait("shape")
        if name in INDEXING:
            indices = [x for x in args[1] if x is not None]
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self.wait("shape")
            if any(not isinstance(x, PhantomTensor) for x in indices):
                self.wait("copy to device")
        if name in COPIES:
            source = args[1] if name == "copy_" else args[0]
            goes_to_gpu = (
                isinstance(args[0], PhantomTensor) if name == "copy_" else is_on_gpu
            )
            if (
                isinstance(source, PhantomTensor)
                and not goes_to_gpu
                and kwargs.get("device") != torch.device("meta")
            ):
                self.wait("copy to host")
            elif not isinstance(source, PhantomTensor) and goes_to_gpu:
                non_blocking = kwargs.get(
                    "non_blocking", name == "copy_" and len(args) > 2 and args[2]
                )
                if not (non_blocking and getattr(source, "_pinned", False)):
                    self.wait("copy to device")
        if is_on_gpu and name not in NO_KERNEL:
            self.launches[name] += 1


def _patches():
    """Yield torch functions that look for a device: target, name, substitute."""
    save, generator, csr = torch.save, torch.Generator, torch.sparse_csr_tensor

    def apply(self, move, recurse=True):
        for child in self.children():
            child._apply(move)
        for key, value in self._parameters.items():
            if value is not None:
                with torch.no_grad():
                    moved = move(value)
                if isinstance(moved, PhantomTensor):
                    self._parameters[key] = _parameter(moved, value.requires_grad)
                elif moved is not value:
                    self._parameters[key] = torch.nn.Parameter(
                        moved.detach(), value.requires_grad
                    )
        self._buffers.update(
            {
                key: move(value)
                for key, value in self._buffers.items()
                if value is not None
            }
        )
        return self

    def down(
        x,
    ):  # what a file of CUDA tensors is once it is read with map_location="cpu"
        if isinstance(x, dict):
            return {key: down(value) for key, value in x.items()}
        if isinstance(x, (tuple, list)):
            return type(x)(map(down, x))
        return x.values_on_cpu.detach().clone() if isinstance(x, PhantomTensor) else x

    def save_down(content, *args, **kwargs):
        with _disable_current_modes():
            save(down(content), *args, **kwargs)

    def sparse_csr_tensor(indptr, indices, values, *size, **kwargs):
        if not isinstance(values, PhantomTensor):
            return csr(indptr, indices, values, *size, **kwargs)
        with _disable_current_modes():
            return PhantomTensor(
                csr(
                    indptr.values_on_cpu,
                    indices.values_on_cpu,
                    values.values_on_cpu,
                    *size,
                    **kwargs,
                )
            )

    def pin_memory(self):
        assert not isinstance(self, PhantomTensor), "cannot pin a tensor of the GPU"
        pinned = self.clone()
        pinned._pinned = True
        return pinned

    class Generator:
        def __new__(cls, device="cpu"):
            return generator("cpu")

    return [
        (torch.nn.Module, "_apply", apply),
        (torch.nn.RNNBase, "flatten_parameters", lambda self: None),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.Tensor, "pin_memory", pin_memory),
        (torch, "save", save_down),
        (torch, "sparse_csr_tensor", sparse_csr_tensor),
        (torch, "Generator", Generator),
    ]
