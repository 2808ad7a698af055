"""First losses of a tiny run of every task, and roundings of fixed tensors: ``python -m bench.pinned_losses``.

The command writes ``tests/compatibility/losses.json``, and a test compares today's code with it. Three things pin the
numerics, the first two on any processor:

- roundings: fixed tensors, rounded with a fixed noise key to every kind of grid, bit for bit;
- noise keys of all layers after the steps of a run, which say where its noise began and how much was drawn;
- losses, bit for bit on the machine and with the libraries of the file. On others sums have another order, and single
  values round to the other side: only the first loss is compared there, up to ``FIRST_LOSS``.

Measured with the instructions AVX-512, AVX2 and SSE4 of one processor: the first losses agree up to 2e-7, that of the
entailment up to 0.2 %. Later losses differ by up to 0.5 % (images), 8 % (graphs), 1 % (text) and more (detection),
about as much as other noise makes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpt_core.numerics import NUMERICS
from cpt_core.quantization.rounding import RANGE_FUNCTIONS, ZERO_POINT, num_steps
from cpt_core.schedules.schedule import ShortCycleWarning
from cpt_extras.kernels import backend, gemm_backend, operators
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import RunSpec, run_spec
from cpt_lab.provenance import machine, version
from cpt_lab.tasks.base import load_task_class
from cpt_lab.training.train import train

FILE = Path(__file__).parents[1] / "tests" / "compatibility" / "losses.json"
STEPS = 16  # of the 20 that every run has
FIRST_LOSS = 0.01  # relative difference of the first loss on another machine
LIBRARIES = ("torch", "torchvision", "transformers", "numpy")
RUNS = (
    ("image_mlp", "CR"),
    ("image_mlp", "static 4"),
    ("image_resnet", "CR"),
    ("graph_gcn", "CR"),
    ("graph_gcn", "static 4"),
    ("language_lstm", "CR"),
    ("language_lstm", "static 4"),
    ("entailment_bert", "static 8"),
    ("detection_retinanet", "CR"),
)
HINT = "if this change is meant, raise NUMERICS in cpt_core/numerics.py and run `python -m bench.pinned_losses`"


class Pinned(NamedTuple):
    """The pinned numbers of a run."""

    losses: list[float]
    noise_keys: str  # digest of the noise keys of all layers after the last step


class _FinishedError(Exception):
    """Raised to end a run after enough steps."""


def tiny_spec(name: str, arm: str) -> RunSpec:
    """Return a run of a few steps on embedded data, by its name in ``RUNS``."""
    dataset, model, changes = {
        "image_mlp": ("digits", "mlp6", {}),
        "image_resnet": ("digits", "resnet8_w8", {"batch": 8}),
        "graph_gcn": ("digits-graph", None, {}),
        "language_lstm": ("pydoc", None, {"train_tokens": 4000}),
        "entailment_bert": (
            "templates",
            None,
            {"train_pairs": 64, "valid_pairs": 16, "test_pairs": 16},
        ),
        "detection_retinanet": (
            "digit-scenes",
            None,
            {"train_images": 8, "test_images": 4},
        ),
    }[name]
    settings: dict[str, Any] = {
        "n_cycles": 2,
        "evaluate_every": 0,
        "steps": 20,
        **changes,
    }
    with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
        return run_spec(
            replace(recipe("smoke", dataset, model), **settings),
            arm,
            q_max=8,
            seed=0,
            scale="smoke",
        )


def pin_run(spec: RunSpec) -> Pinned:
    """Train the first steps of a run."""
    losses: list[float] = []
    keys: list[int] = []

    def note(step: int, model: torch.nn.Module, loss: float) -> None:
        losses.append(loss)
        if len(losses) == STEPS:
            keys.extend(int(layer.precision.noise_key) for layer in _converted(model))
            raise _FinishedError

    try:
        train(load_task_class(spec), spec, on_step=note)
    except _FinishedError:
        return Pinned(losses, _digest(json.dumps(keys).encode()))
    raise RuntimeError(f"the run ended after {len(losses)} steps")


def _converted(model: torch.nn.Module) -> Iterator[Any]:
    from cpt_core.quantization.convert import layer_precisions
    from cpt_core.quantization.op_interception import HOOK

    for name in layer_precisions(model):
        yield getattr(model.get_submodule(name), HOOK)


def pin_roundings() -> dict[str, str]:
    """Return digests of fixed tensors, rounded to every kind of grid to nearest and stochastically."""
    count = torch.arange(3 * 40 * 14, dtype=torch.int64)
    x = ((count * 40_503) % 65_536 - 30_000).float().view(3, 40, 14) / 4096
    key = torch.tensor(1_234_567_890_123, dtype=torch.int64)
    digests = {}
    for granularity in RANGE_FUNCTIONS:
        for zero in ("", ZERO_POINT):
            for bits in (2, 5, 8):
                for rounding, noise_key in (("nearest", None), ("stochastic", key)):
                    steps = torch.tensor(num_steps(bits))
                    rounded = operators.active.fake_quantize(
                        x, steps, granularity + zero, noise_key
                    )[0]
                    digests[f"{granularity}{zero}, {bits} bits, {rounding}"] = _digest(
                        _bytes(rounded)
                    )
    return digests


def _bytes(x: Tensor) -> bytes:
    return (x + 0.0).contiguous().numpy().tobytes()  # 0 has one sign


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def find_changes(
    pinned: Pinned, stored_run: dict[str, Any], same_machine: bool
) -> list[str]:
    """Return the differences from a stored run: noise keys and first loss; on its own machine, all losses."""
    changes = []
    if pinned.noise_keys != stored_run["noise_keys"]:
        changes.append("the noise keys of its layers changed")
    pairs = list(zip(pinned.losses, stored_run["losses"], strict=True))
    if same_machine:
        changes += [
            f"loss {i} is {loss!r}, it was {old_loss!r}"
            for i, (loss, old_loss) in enumerate(pairs, 1)
            if loss != old_loss
        ][:3]
    elif abs(pairs[0][0] / pairs[0][1] - 1) > FIRST_LOSS:
        changes.append(
            f"the first loss is {pairs[0][0]!r}, it was {pairs[0][1]!r} on another machine"
        )
    return changes


def describe_machine() -> dict[str, Any]:
    """Return the processor and versions that must agree for bit-equal losses."""
    processor = {
        name: value
        for name, value in machine().items()
        if name not in ("threads", "switches")
    }
    return {**processor, **{name: version(name) for name in LIBRARIES}}


@contextmanager
def computing_with(kernels: str) -> Iterator[None]:
    """Compute with "reference" or "cpp" kernels, float32 products in torch, on one thread."""
    active = backend.backend()
    if kernels == "cpp" and active.cpu != "cpp":
        raise RuntimeError("there are no C++ kernels here")
    library, threads = gemm_backend.active, torch.get_num_threads()
    torch.set_num_threads(1)
    gemm_backend.use("torch")
    try:
        if kernels == "reference":
            with backend.reference():
                yield
        else:
            yield
    finally:
        gemm_backend.use(library)
        torch.set_num_threads(threads)


def main() -> int:
    """Write the file; refuse if the numbers changed on the same machine but ``NUMERICS`` did not."""
    with computing_with("reference"):
        runs = {
            f"{name} {arm}": pin_run(tiny_spec(name, arm))._asdict()
            for name, arm in RUNS
        }
        content = {
            "numerics": NUMERICS,
            "machine": describe_machine(),
            "roundings": pin_roundings(),
            "runs": runs,
        }
    if FILE.exists():
        old_content = json.loads(FILE.read_text(encoding="utf-8"))
        if (
            old_content["numerics"] == NUMERICS
            and old_content["machine"] == content["machine"]
            and old_content != content
        ):
            print(
                f"the numbers changed, and NUMERICS is still {NUMERICS}: raise it in cpt_core/numerics.py first"
            )
            return 1
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"written to {FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
