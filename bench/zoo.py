"""Checks of models of other libraries, with stored results: ``python -m bench.zoo``, about 25 minutes.

Every model is converted and watched while it runs: the watcher inspects the operands of every matmul that torch
executes, at 2 bits, and does not use ``cpt_core``'s own bookkeeping. An operand is on a grid when the whole of it, or
every slice of some dimension, or every run of some length along a dimension holds at most four values, and zero (one
dimension of an operand may be several of the tensor that was rounded, which were flattened); operands of
fewer than 32 numbers, or without a slice of more than six, can fail that by chance and are left out of the shares. The
multiply-accumulates of a matmul are counted from shapes.

Then the model is used in the ways of ``LOOPS``. ``--only WORD`` selects models by name or library. Rows go to
``data/results/zoo.json``, where rows of other models, and of missing libraries, stay as they are; for a missing library
the command prints how to install it.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cpt_core as cpt
from bench.zoo_models import MODELS, Inputs, Make
from cpt_core.bitops.counting import tensors_in
from cpt_core.quantization.convert import is_converted
from cpt_extras.diagnostics.check import CHECK_BITS
from cpt_extras.files import write_text
from cpt_extras.kernels.operators import MATMUL_OPERATORS
from cpt_lab.paths import results_dir
from cpt_lab.provenance import source

FILE = "zoo.json"
PACKAGES = {
    "torch_geometric": "torch-geometric",
    "open_clip": "open_clip_torch",
    "x_transformers": "x-transformers",
}
SECONDS = 300  # of one model
BITS, VALUES = 2, 4  # values of a grid of two bits
MIN_SLICE, MIN_OPERAND = (
    7,
    32,
)  # a slice, and an operand, of fewer numbers than that tell nothing
NEAREST = cpt.QuantConfig().with_gradient_rounding("nearest")
OPERANDS = {  # operation -> the places of its operands
    **dict.fromkeys(
        (
            "mm",
            "bmm",
            "mv",
            "dot",
            "vdot",
            "convolution",
            "linear",
            "_linear_pointwise",
            "_grouped_mm",
        ),
        (0, 1),
    ),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), (1, 2)),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "_trilinear": (0, 1, 2),
}
FUSED = (
    "mkldnn_rnn_layer",
    "_transformer_encoder_layer_fwd",
    "_native_multi_head_attention",
    "deform_conv2d",
)


def count_macs(name: str, args: Any, out: Tensor) -> int:
    """Return the multiply-accumulates of a matmul or convolution, from its shapes."""
    a, b = (args[i] for i in OPERANDS[name][:2])
    if name == "convolution":
        is_transposed = args[6]
        image = a if is_transposed else out
        return image.numel() // image.shape[1] * b.numel()
    if name.startswith("_scaled"):
        return a.numel() * b.shape[-2] + out.numel() * b.shape[-2]
    if name == "_trilinear":
        # nn.Bilinear multiplies every pair of inputs for every output, and sums over the second input.
        return b.numel() * (a.numel() // a.shape[-1]) + out.numel() * args[2].shape[-1]
    if name == "_grouped_mm":
        return a.numel() * b.shape[-1]
    if name in ("linear", "_linear_pointwise"):
        return out.numel() * a.shape[-1]
    return a.numel() * (b.shape[-1] if b.dim() > 1 else 1)


def on_grid(x: Tensor, image: bool = False, kernel: bool = False) -> bool | None:
    """Return whether an operand has few enough distinct numbers; None if its slices are too short to tell.

    A slice is a row or a column; for an ``image`` the whole operand, for a ``kernel`` a channel.
    """
    x = x.detach().float()
    for numbers in _possible_ranges(x):
        if numbers.shape[1] < MIN_SLICE:
            continue
        zero = torch.zeros(len(numbers), 1)
        ordered = torch.cat([numbers, zero], 1).sort(1).values
        num_changes = (ordered.diff(dim=1) != 0).sum(1)
        if int(num_changes.max()) <= VALUES:
            return True

    slice_sizes: tuple[int, ...] = tuple(x.shape[-2:])
    if image:
        slice_sizes = (x.numel(),)
    elif kernel:
        slice_sizes = (x[0].numel(), x[:, 0].numel())
    is_large = x.numel() >= MIN_OPERAND and min(slice_sizes) >= MIN_SLICE
    return False if is_large else None


def _possible_ranges(x: Tensor) -> Iterator[Tensor]:
    """Yield an operand as matrices whose rows may each have had one range: all of it, runs, and slices."""
    yield x.reshape(1, -1)
    for dim, size in enumerate(x.shape):
        divisors = (n for n in range(MIN_SLICE, size) if size % n == 0)
        run = next(divisors, max(1, size))
        yield x.movedim(dim, -1).reshape(-1, run)
    for dim in range(x.dim()):
        yield x.movedim(dim, 0).reshape(x.shape[dim], -1)


class Watcher(TorchDispatchMode):
    """Mode that inspects the matmuls of a forward pass, or only counts them.

    Attributes:
        macs: (module, matmul, on a grid) -> multiply-accumulates.
        unknown: fused operations whose operands cannot be inspected.
    """

    def __init__(self, model: nn.Module, looks: bool = True) -> None:
        super().__init__()
        self.looks = looks
        self.macs: Counter[tuple[str, str, bool | None]] = Counter()
        self.unknown: set[str] = set()
        self.path: list[str] = []
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                module.register_forward_pre_hook(
                    lambda *_, name=name: self.path.append(name)
                )
                module.register_forward_hook(self._leave_module, always_call=True)

    def _leave_module(self, *_: Any) -> None:
        self.path.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain_operator = MATMUL_OPERATORS.get(func._schema.name)
        if plain_operator is not None:  # its matmuls are then seen one by one
            with self:
                return plain_operator(*args, **(kwargs or {}))

        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2].removesuffix("_")
        if name in FUSED:
            self.unknown.add(name)
        if name not in OPERANDS:
            return out

        operands = [args[i] for i in OPERANDS[name]]
        if all(_is_dense_float(x) for x in operands):
            module = self.path[-1] if self.path else ""
            result = out[0] if isinstance(out, tuple) else out
            key = module, name, self._all_on_grid(name, operands)
            self.macs[key] += count_macs(name, args, result)
        return out

    def _all_on_grid(self, name: str, operands: list[Tensor]) -> bool | None:
        """Return whether all operands of a matmul are on a grid; None if some cannot be told."""
        if not self.looks:
            return True
        is_convolution = name == "convolution"
        answers = [
            on_grid(x, is_convolution and i == 0, is_convolution and i == 1)
            for i, x in enumerate(operands)
        ]
        if False in answers:
            return False
        return None if None in answers else True


def _is_dense_float(x: Tensor) -> bool:
    return bool(x.numel() and x.is_floating_point() and x.layout == torch.strided)


def total_loss(outputs: Any) -> Tensor:
    """Return the sum of all outputs of a model, as a loss."""
    parts = [y for y in tensors_in(outputs) if y.requires_grad]
    return torch.stack([y.double().mean() for y in parts]).sum()


def loss_and_gradients(
    model: nn.Module, call: Callable[..., Any], inputs: Inputs
) -> list[Tensor]:
    """Return the loss and the gradients of all parameters."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = total_loss(call(*inputs))
    loss.backward()
    return [
        loss.detach(),
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]


def equal(first: list[Tensor], second: list[Tensor], slack: float = 0.0) -> bool:
    """Return whether two lists of tensors are equal; NaN equals NaN.

    ``slack`` is the allowed norm of a difference, relative to the larger tensor.
    """
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if torch.equal(a.nan_to_num(), b.nan_to_num()):
            continue
        larger_norm = float(torch.stack([a.norm(), b.norm()]).max())
        if not float((a - b).norm()) <= slack * larger_norm:
            return False
    return True


# --- uses of a model: each takes a converted model, its original and inputs, and returns whether the result was right


def at_four_bits(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which a converted model runs at 4 bits."""
    return cpt.precision(model, 4, 8) if is_converted(model) else nullcontext()


def deepcopy_is_equal(model: nn.Module, plain: nn.Module, inputs: Inputs) -> bool:
    """Return whether a deep copy computes what the model does."""
    with at_four_bits(model):
        twin = copy.deepcopy(model)
        return equal(
            loss_and_gradients(model, model, inputs),
            loss_and_gradients(twin, twin, inputs),
        )


def restored_is_equal(model: nn.Module, plain: nn.Module, inputs: Inputs) -> bool:
    """Return whether ``restore_`` restores the original."""
    cpt.restore_(model)
    return equal(
        loss_and_gradients(plain, plain, inputs),
        loss_and_gradients(model, model, inputs),
    )


def compiled_is_equal(model: nn.Module, plain: nn.Module, inputs: Inputs) -> bool:
    """Return whether a compiled model equals the eager one, up to the differences of compilation itself."""
    torch._dynamo.reset()
    with at_four_bits(model):
        twin = copy.deepcopy(model)
        run = torch.compile(twin, backend="aot_eager")
        return equal(
            loss_and_gradients(model, model, inputs),
            loss_and_gradients(twin, run, inputs),
            1e-3,
        )


def checkpointed_is_equal(model: nn.Module, plain: nn.Module, inputs: Inputs) -> bool:
    """Return whether activation checkpointing leaves the gradients unchanged."""
    with at_four_bits(model):
        twin = copy.deepcopy(model)
        run = partial(checkpoint, twin, use_reentrant=False)
        return equal(
            loss_and_gradients(model, model, inputs),
            loss_and_gradients(twin, run, inputs),
        )


def accumulation_adds_up(model: nn.Module, plain: nn.Module, inputs: Inputs) -> bool:
    """Return whether two backward passes add up their gradients."""
    with at_four_bits(model):
        twin = copy.deepcopy(model)
        _, *once = loss_and_gradients(model, model, inputs)
        for _ in range(2):
            torch.manual_seed(1)
            total_loss(twin(*inputs)).backward()
        twice = [p.grad for p in twin.parameters() if p.grad is not None]
    return equal([2 * g for g in once], twice, 1e-5)


def resumed_is_equal(model: nn.Module, plain: nn.Module, inputs: Inputs) -> bool:
    """Return whether a saved and loaded training continues unchanged."""
    other = cpt.quantize_(copy.deepcopy(plain), NEAREST)
    first, second = (train_steps(m, inputs, 1)[1] for m in (model, other))
    other.load_state_dict(model.state_dict())
    second.load_state_dict(first.state_dict())
    return equal(
        loss_and_gradients(model, model, inputs),
        loss_and_gradients(other, other, inputs),
    )


def average_needs_bits(model: nn.Module, plain: nn.Module, inputs: Inputs) -> bool:
    """Return whether a moving average refuses to run without bits, and runs with ``precision``."""
    cpt.PrecisionScheduler(
        model, cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=8, n_cycles=1)
    )
    average = AveragedModel(model)
    twin = copy.deepcopy(model)
    try:
        average(*inputs)
    except RuntimeError as refusal:
        with cpt.precision(average, 8, 8), cpt.precision(twin, 8, 8):
            is_equal = equal(
                loss_and_gradients(twin, twin, inputs),
                loss_and_gradients(average.module, average.module, inputs),
            )
        return is_equal and "copy" in str(refusal)
    return False


LOOPS: dict[str, Callable[[nn.Module, nn.Module, Inputs], bool]] = {
    "deepcopy": deepcopy_is_equal,
    "restore_": restored_is_equal,
    "compile": compiled_is_equal,
    "checkpointing": checkpointed_is_equal,
    "accumulation": accumulation_adds_up,
    "resume": resumed_is_equal,
    "EMA": average_needs_bits,
}
# Uses that a float32 model supports as well.
FLOAT32_LOOPS = (
    deepcopy_is_equal,
    compiled_is_equal,
    checkpointed_is_equal,
    accumulation_adds_up,
)


def train_steps(model: nn.Module, inputs: Inputs, steps: int) -> tuple[bool, Any]:
    """Train some steps; return whether all stayed finite, and the scheduler."""
    scheduler = cpt.PrecisionScheduler(
        model,
        cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=8 * steps, n_cycles=1),
    )
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4
    )
    finite = True
    for _ in range(steps):
        finite = finite and all(
            bool(g.isfinite().all()) for g in loss_and_gradients(model, model, inputs)
        )
        optimizer.step()
        scheduler.step()
    return finite, scheduler


def watch_forward(
    model: nn.Module, inputs: Inputs, bits: int, looks: bool = True
) -> Watcher:
    """Return a watcher after a forward pass at some bits, with fixed random numbers."""
    model = copy.deepcopy(model)
    watcher = Watcher(model, looks)
    torch.manual_seed(1)
    with cpt.precision(model, bits, bits), watcher:
        model(*inputs)
    return watcher


def try_model(
    library: str, name: str, make: Make, loops: bool = True
) -> dict[str, Any]:
    """Try one model; return its row."""
    row: dict[str, Any] = {"library": library, "model": name, "outcome": "whole"}
    torch.manual_seed(0)
    plain, inputs = make()
    plain.train(library != "torch_geometric")
    _switch_off_dropout(plain)

    with warnings.catch_warnings(
        record=True, action="always", category=cpt.QuantizationWarning
    ) as caught_warnings:
        try:
            model = cpt.quantize_(copy.deepcopy(plain), NEAREST)
        except ValueError as refusal:
            return {**row, "outcome": "refused", "said": str(refusal)}
        watcher = watch_forward(model, inputs, BITS)
        torch.manual_seed(1)
        checked = cpt.check(model, inputs, invariances=False)
        row["finite"] = train_steps(copy.deepcopy(model), inputs, 3)[0]
        # The number of proposals of a detector depends on the bits, so MACs are counted at the bits of check.
        counter = watch_forward(model, inputs, CHECK_BITS, looks=False)

    messages = {
        str(warning.message)
        for warning in caught_warnings
        if warning.category is cpt.QuantizationWarning
    }
    decided_macs = {key: n for key, n in watcher.macs.items() if key[2] is not None}
    undecided_macs = sum(n for key, n in watcher.macs.items() if key[2] is None)
    float32_macs = {key: n for key, n in decided_macs.items() if not key[2]}
    float32_layers = {module for module, _, _ in float32_macs}
    silent_layers = float32_layers - {part.layer for part in checked.float32}

    row |= {
        "macs": sum(counter.macs.values()),
        "macs of check": sum(p.macs for p in checked.operations if not p.backward),
        "share": 1 - sum(float32_macs.values()) / max(1, sum(decided_macs.values())),
        "undecided": undecided_macs / max(1, sum(watcher.macs.values())),
        "float32": {
            f"{module or '(model)'}: {matmul}": n
            for (module, matmul, _), n in float32_macs.items()
        },
        "silent": sorted(silent_layers),
        "unknown": sorted(watcher.unknown),
        "said": " ".join(sorted(messages)),
    }
    if silent_layers:
        row["outcome"] = "silent"
    elif float32_macs:
        row["outcome"] = "in part"
    row["loops"] = dict.fromkeys(LOOPS)
    if loops:
        row["loops"] = _try_loops(model, plain, inputs)
    return row


def _switch_off_dropout(model: nn.Module) -> None:
    """Set all dropout to 0: its noise would hide the differences that are compared."""
    for module in model.modules():
        for name in ("p", "drop_prob", "attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _try_loops(
    model: nn.Module, plain: nn.Module, inputs: Inputs
) -> dict[str, bool | str | None]:
    """Return the result of every use of a model; None where the float32 model fails, too."""
    results: dict[str, bool | str | None] = {}
    for name, loop in LOOPS.items():
        results[name] = _run_loop(loop, model, plain, inputs)
        if results[name] is True or loop not in FLOAT32_LOOPS:
            continue
        if _run_loop(loop, plain, plain, inputs) is not True:
            results[name] = None
    return results


def _run_loop(
    loop: Callable[..., bool], model: nn.Module, plain: nn.Module, inputs: Inputs
) -> bool | str:
    """Return the result of one use of a model, or its error as text."""
    try:
        return loop(copy.deepcopy(model), copy.deepcopy(plain), inputs)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"[:200]


def _try_and_send(library: str, name: str, sender: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        row = try_model(library, name, MODELS[library][name])
    except Exception as problem:
        row = {
            "library": library,
            "model": name,
            "outcome": "crashed",
            "said": f"{type(problem).__name__}: {problem}",
        }
    sender.send({**row, "version": version(PACKAGES.get(library, library))})


def try_in_process(library: str, name: str) -> dict[str, Any]:
    """Try a model in a separate process, so that a crash ends nothing else; return its row."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(False)
    process = context.Process(target=_try_and_send, args=(library, name, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(SECONDS):
            return {key: _short(value) for key, value in receiver.recv().items()}
        failure = f"it took more than {SECONDS} seconds"
    except EOFError:
        failure = "its process died"
    finally:
        process.kill()
    return {"library": library, "model": name, "outcome": "crashed", "said": failure}


def _short(value: Any) -> Any:
    return (
        float(f"{value:.4g}")
        if isinstance(value, float) and math.isfinite(value)
        else value
    )


def main() -> None:
    """Try the selected models and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", default="", help="a part of the names of models or libraries"
    )
    parser.add_argument("--out", type=Path, default=results_dir() / FILE)
    parser.add_argument("-j", "--jobs", type=int, default=2)
    options = parser.parse_args()
    missing = [
        library for library in MODELS if importlib.util.find_spec(library) is None
    ]
    if missing:
        print(
            "missing: pip install "
            + " ".join(PACKAGES.get(m, m) for m in missing).replace("_", "-")
        )
    selected = [
        (library, name)
        for library, models in MODELS.items()
        for name in models
        if library not in missing
        and options.only.lower() in f"{library} {name}".lower()
    ]
    head = {"command": "python -m bench.zoo", **source()}
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda which: try_in_process(*which), selected):
            rows.append(row)
            print(
                f"{row['library']:<28} {row['model']:<32} {row['outcome']:<8} {row.get('share', math.nan):.3f} "
                f"{row.get('said', '')[:90]}",
                flush=True,
            )
    print(dict(Counter(row["outcome"] for row in rows)))
    rows = merge_rows(options.out, [{**row, "commit": head["commit"]} for row in rows])
    write_text(options.out, json.dumps({**head, "models": rows}, indent=1) + "\n")


def merge_rows(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return new rows and the stored ones of other models, in the order of ``MODELS``.

    Rows of older files have the commit of the file.
    """
    rows_by_model = {}
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        for row in content["models"]:
            key = row["library"], row["model"]
            rows_by_model[key] = {"commit": content["commit"], **row}
    rows_by_model |= {(row["library"], row["model"]): row for row in rows}
    names = [(library, name) for library, models in MODELS.items() for name in models]
    return [rows_by_model[name] for name in names if name in rows_by_model]


if __name__ == "__main__":
    main()
