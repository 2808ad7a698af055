"""A simulated GPU: tensors that say they are on cuda:0 and compute on the CPU, while what a GPU would do is counted.

    with Phantom() as gpu:
        model.to("cuda:0")(x.to("cuda:0"))
    gpu.launches, gpu.waits

Launches are operations that start at least one kernel; views and allocations start none. Waits are those after which
the host knows something that the device had to compute first, or copies that are not both pinned and non-blocking, by
the line of the project that asks. Tensors of two devices in one operation are refused, as CUDA refuses them.

Not counted: kernels inside one operation (one quantised operator is one), memory, time, ``torch.compile``. Say
"cuda:0": for "cuda" C++ asks a driver.
"""

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

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
VALUE_READS = "_local_scalar_dense", "equal", "is_nonzero"
SHAPE_READS = set(
    "nonzero masked_select _unique2 unique_dim unique_consecutive bincount".split()
)
INDEXING = "index", "index_put", "index_put_", "_index_put_impl_"
COPIES = "_to_copy", "copy_"
# of Triton, a launch or two each; CUDA runs the plain operations of the other quantised operators
KERNELS = "range", "round_to_grid", "fake_quantize", "track_"


class MixedDevices(RuntimeError):
    """Tensors of the CPU and of the GPU in one operation."""


class PhantomTensor(torch.Tensor):
    """For Python a tensor on cuda:0; for C++ one without memory on the CPU, so that autograd needs no driver."""

    @staticmethod
    def __new__(cls, values_on_cpu, requires_grad=False):
        options = {"dtype": values_on_cpu.dtype, "requires_grad": requires_grad}
        if values_on_cpu.layout is torch.strided:
            options["strides"] = values_on_cpu.stride()
            options["storage_offset"] = values_on_cpu.storage_offset()
        make = torch.Tensor._make_wrapper_subclass
        self = make(cls, values_on_cpu.size(), device="cpu", **options)
        self.values_on_cpu = values_on_cpu
        return self

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def to(self, *args, **kwargs):
        if args and isinstance(args[0], torch.Tensor):
            device, dtype = args[0].device, args[0].dtype
        else:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device.type == "cuda":
            return self if dtype in (None, self.dtype) else super().to(dtype)
        dtype = dtype or self.dtype
        if device.type == "meta":
            layout = self.size(), self.stride()
            return torch.empty_strided(*layout, dtype=dtype, device="meta")
        caller = sys._getframe(1).f_code.co_filename
        if caller.endswith("clip_grad.py") or "/torch/optim/" in caller:
            return self  # these ask C++ where a tensor is
        return self.cpu().to(dtype)

    def cpu(self, *_, **__):
        return _ToHost.apply(self)

    def tolist(self):
        Phantom.active.wait("read")
        return self.values_on_cpu.tolist()

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            values = self.values_on_cpu.detach().clone()
            copy = PhantomTensor(values, self.requires_grad)
            if getattr(self, "_is_param", False):
                copy = _as_parameter(copy, self.requires_grad)
            memo[id(self)] = copy
        return memo[id(self)]

    def __repr__(self, **_):
        return f"Phantom({self.values_on_cpu!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return CUDA
        raise RuntimeError(f"{func} of a phantom outside of its mode")


class _ToHost(torch.autograd.Function):
    """A copy to the host."""

    @staticmethod
    def forward(ctx, x):
        Phantom.active.wait("copy to host")
        return x.values_on_cpu.detach().clone()

    @staticmethod
    def backward(ctx, gradient):
        return PhantomTensor(gradient)


def _as_parameter(tensor, requires_grad):
    tensor = tensor.detach().requires_grad_(requires_grad)
    tensor._is_param = True  # isinstance(..., nn.Parameter) looks at this
    return tensor


def _is_phantom(x):
    return isinstance(x, PhantomTensor)


def _on_cpu(x):
    return x.values_on_cpu if _is_phantom(x) else x


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
        self.launches, self.waits = Counter(), Counter()
        self.puts_gradients_on_gpu = True

    def clear(self):
        self.launches.clear()
        self.waits.clear()

    def wait(self, reason):
        """Count a wait by the line of the project that caused it, and by that of another library."""
        frame, library_line = sys._getframe(1), ""
        place = "elsewhere"
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(f"{ROOT}/cpt_"):
                module = Path(*Path(file).relative_to(ROOT).parts[1:])
                place = f"{module}:{frame.f_lineno}"
                break
            if not library_line and "site-packages" in file and "/torch/" not in file:
                library_line = f" ({file.split('site-packages/')[-1]}:{frame.f_lineno})"
            frame = frame.f_back
        self.waits[f"{reason} {place}{library_line}"] += 1

    def __enter__(self):
        assert Phantom.active is None
        Phantom.active = self
        self._stack = ExitStack()
        # C++ kernels would find out that the tensors are on the CPU
        self._stack.enter_context(reference())
        for target, name, substitute in _patches():
            self._stack.enter_context(patch.object(target, name, substitute))
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
        if family in FAMILIES and name not in KERNELS:
            return self._decompose(func, args, kwargs)
        operands = tree_leaves((args, kwargs))
        phantoms = [x for x in operands if _is_phantom(x)]
        target = kwargs.get("device")
        target = None if target is None else torch.device(target).type
        if self._makes_gradient() and (target == "cpu" or name == "zeros"):
            target = "cuda"  # autograd makes it where C++ says that the output is
        if not phantoms and target != "cuda":
            return func(*args, **kwargs)

        is_on_gpu = target == "cuda" or (bool(phantoms) and target is None)
        self._check_devices(func, name, args, operands)
        self._count(name, args, kwargs, is_on_gpu)
        if target == "cuda":
            kwargs["device"] = torch.device("cpu")
        out = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
        if not is_on_gpu:
            return out
        if name == "copy_" and not _is_phantom(args[0]):
            return args[0]
        # an operation in place returns the same object again
        is_mutable = func._schema.is_mutable
        changed = {id(x.values_on_cpu): x for x in phantoms if is_mutable}

        def wrap(x):
            if not isinstance(x, torch.Tensor) or _is_phantom(x) or x.is_meta:
                return x
            return changed[id(x)] if id(x) in changed else PhantomTensor(x)

        return tree_map(wrap, out)

    def _decompose(self, func, args, kwargs):
        key = torch._C.DispatchKey.CompositeExplicitAutograd
        super().__enter__()
        try:
            return func._op_dk(key, *args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _makes_gradient(self):
        is_backward = torch._C._current_graph_task_id() != -1
        return self.puts_gradients_on_gpu and is_backward

    def _check_devices(self, func, name, args, operands):
        # CUDA takes 0-d tensors of the CPU as numbers, copies them, and copies indices that lie on the CPU
        tensors = [x for x in operands if isinstance(x, torch.Tensor)]
        strange = [
            tuple(x.shape)
            for x in tensors
            if not _is_phantom(x) and x.dim() > 0 and not x.is_meta
        ]
        takes_both = name in COPIES or (name in INDEXING and _is_phantom(args[0]))
        if strange and not takes_both and any(map(_is_phantom, tensors)):
            raise MixedDevices(
                f"Expected all tensors to be on the same device, found cuda:0 and cpu {strange} in {func}"
            )

    def _count(self, name, args, kwargs, is_on_gpu):
        if name in VALUE_READS:
            self.wait("read")
        is_repeat = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in SHAPE_READS or is_repeat:
            self.wait("shape")
        if name in INDEXING:
            indices = [x for x in args[1] if x is not None]
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self.wait("shape")
            if not all(map(_is_phantom, indices)):
                self.wait("copy to device")
        if name in COPIES:
            self._count_copy(name, args, kwargs, is_on_gpu)
        if is_on_gpu and name not in NO_KERNEL:
            self.launches[name] += 1

    def _count_copy(self, name, args, kwargs, is_on_gpu):
        is_in_place = name == "copy_"
        source = args[1] if is_in_place else args[0]
        goes_to_gpu = _is_phantom(args[0]) if is_in_place else is_on_gpu
        if _is_phantom(source):
            if not goes_to_gpu and kwargs.get("device") != torch.device("meta"):
                self.wait("copy to host")
        elif goes_to_gpu:
            default = is_in_place and len(args) > 2 and args[2]
            is_pinned = getattr(source, "_pinned", False)
            if not (kwargs.get("non_blocking", default) and is_pinned):
                self.wait("copy to device")


def _apply(module, move, recurse=True):
    """Move a module as ``nn.Module._apply`` does, with parameters that are phantoms."""
    for child in module.children():
        child._apply(move)
    for key, value in module._parameters.items():
        if value is None:
            continue
        with torch.no_grad():
            moved = move(value)
        if _is_phantom(moved):
            module._parameters[key] = _as_parameter(moved, value.requires_grad)
        elif moved is not value:
            parameter = torch.nn.Parameter(moved.detach(), value.requires_grad)
            module._parameters[key] = parameter
    for key, value in module._buffers.items():
        if value is not None:
            module._buffers[key] = move(value)
    return module


def _pin_memory(tensor):
    assert not _is_phantom(tensor), "cannot pin a tensor of the GPU"
    pinned = tensor.clone()
    pinned._pinned = True
    return pinned


def _loaded_on_cpu(content):
    """Return what a file of CUDA tensors contains when it is read with map_location="cpu"."""
    if isinstance(content, dict):
        return {key: _loaded_on_cpu(value) for key, value in content.items()}
    if isinstance(content, (tuple, list)):
        return type(content)(map(_loaded_on_cpu, content))
    return _on_cpu(content).detach().clone() if _is_phantom(content) else content


def _patches():
    """Return torch functions that look for a device: target, name, substitute."""
    save, make_generator, make_csr = (
        torch.save,
        torch.Generator,
        torch.sparse_csr_tensor,
    )

    def save_on_cpu(content, *args, **kwargs):
        with _disable_current_modes():
            save(_loaded_on_cpu(content), *args, **kwargs)

    def sparse_csr_tensor(indptr, indices, values, *size, **kwargs):
        parts = indptr, indices, values
        if not _is_phantom(values):
            return make_csr(*parts, *size, **kwargs)
        with _disable_current_modes():
            return PhantomTensor(make_csr(*map(_on_cpu, parts), *size, **kwargs))

    class Generator:
        def __new__(cls, device="cpu"):
            return make_generator("cpu")

    return [
        (torch.nn.Module, "_apply", _apply),
        (torch.nn.RNNBase, "flatten_parameters", lambda self: None),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.Tensor, "pin_memory", _pin_memory),
        (torch, "save", save_on_cpu),
        (torch, "sparse_csr_tensor", sparse_csr_tensor),
        (torch, "Generator", Generator),
    ]
