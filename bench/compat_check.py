"""A small check of the installed library, for any environment; prints one line per part and fails if one does.

python bench/compat_check.py
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable

import torch

import cpt_core as cpt


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
    return x, (x.sum(1) > 0).long()


def stepper(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[int], torch.Tensor]:
    def step(number: int) -> torch.Tensor:
        x, y = batch(number)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def schedules() -> None:
    costs = {
        name: cpt.make_schedule(
            name, q_min=3, q_max=8, total_steps=64_000
        ).relative_cost()
        for name in cpt.SUITE
    }
    assert len(costs) == 10
    assert costs["RR"] < costs["CR"] < 1


def solver() -> None:
    assert (
        abs(
            cpt.solve_schedule(
                0.6, q_min=3, q_max=8, total_steps=64_000
            ).relative_cost()
            - 0.6
        )
        < 0.01
    )


def training() -> None:
    model = network()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    step = stepper(cpt.quantize_(model), torch.optim.SGD(model.parameters(), lr=0.5))
    assert model.state_dict().keys() == plain.keys()
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=80, n_cycles=4)
    precision = cpt.PrecisionScheduler(model, schedule)
    losses = []
    for number in range(80):
        losses.append(float(step(number)))
        precision.step()
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    copy = cpt.PrecisionScheduler(cpt.quantize_(network()), schedule)
    copy.load_state_dict(precision.state_dict())
    with cpt.precision(model.eval(), bits=8):
        model(batch(0)[0])
    cpt.restore_(model)


def recurrent_and_graph() -> None:
    lstm = cpt.quantize_(torch.nn.LSTM(4, 8))
    with cpt.precision(lstm, bits=4):
        lstm(torch.randn(5, 2, 4))[0].sum().backward()
    graph = cpt.Graph.from_edges(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), 3)
    layer = cpt.quantize_(torch.nn.ModuleList([cpt.GraphConv(4, 2)]))
    with cpt.precision(layer, bits=4):
        layer[0](graph, torch.randn(3, 4)).sum().backward()


def attention() -> None:
    torch.manual_seed(0)
    config = cpt.QuantConfig().with_gradient_rounding("nearest")
    model, x = (
        cpt.quantize_(torch.nn.MultiheadAttention(8, 2, batch_first=True), config),
        torch.randn(2, 5, 8),
    )
    with cpt.precision(model, bits=4):
        eager, compiled = (
            model(x, x, x)[0],
            torch.compile(model, backend="aot_eager")(x, x, x)[0],
        )
        eager.sum().backward()
    assert torch.allclose(eager, compiled, atol=1e-5)
    assert cpt.check(model, (x, x, x)).quantized_share == 1
    recurrent = cpt.quantize_(torch.nn.GRU(8, 4, bidirectional=True))
    with cpt.precision(recurrent, bits=4):
        recurrent(x)[0].sum().backward()
    assert cpt.check(recurrent, (x,)).quantized_share == 1


def codes() -> None:
    x, gradients = batch(0)[0], []
    for execution in ("simulated", "integer"):
        torch.manual_seed(0)
        config = (
            cpt.QuantConfig(execution=execution)
            .with_shared_steps()
            .with_gradient_rounding("nearest")
        )
        model = cpt.quantize_(torch.nn.Sequential(torch.nn.Linear(16, 1)), config)
        with cpt.precision(model, bits=8):
            model(x).square().mean().backward()
            model(x[:1]).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(*gradients, atol=1e-4)


def exported() -> None:
    model, x = cpt.quantize_(network()), batch(0)[0]
    with cpt.precision(model, bits=8):
        model(x)
        expected = model.eval()(x[:5])
    with tempfile.TemporaryDirectory() as folder:
        torch.export.save(cpt.export(model, (x,)), f"{folder}/model.pt2")
        assert torch.equal(
            torch.export.load(f"{folder}/model.pt2").module()(x[:5]), expected
        )


def operations() -> None:
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=80, n_cycles=4)
    assert cpt.count_bitops(cpt.quantize_(network()), (batch(0)[0],), schedule)


def range_test() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    result = cpt.search.precision_range_test(
        model, stepper(model, optimizer), optimizer, q_max=8, bits=(2, 4), dwell=20
    )
    assert "8" in str(result)


def digits() -> None:
    command = [
        sys.executable,
        "-m",
        "cpt_lab",
        "run",
        "digits/mlp6",
        "--scale",
        "smoke",
        "--arms",
        "CR",
    ]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr.strip().splitlines()[-1]


PARTS = (
    schedules,
    solver,
    training,
    recurrent_and_graph,
    attention,
    codes,
    exported,
    operations,
    range_test,
    digits,
)


def main() -> int:
    warnings.simplefilter("ignore")
    print(
        f"python {platform.python_version()} torch {torch.__version__} cpt_core {cpt.__file__}"
    )
    failed = 0
    for part in PARTS:
        try:
            part()
            print(f"ok {part.__name__}")
        except Exception:
            failed += 1
            print(
                f"failed {part.__name__}: {traceback.format_exc().strip().splitlines()[-1]}"
            )
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
