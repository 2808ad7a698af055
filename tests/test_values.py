"""Whatever is given to the public interface is taken because it is legal, or refused by a sentence that names it.

Every argument of every public callable is replaced by each of the odd values, one at a time.
"""

import contextlib
import inspect
import re
import signal
import traceback
import warnings
from operator import attrgetter

import numpy as np
import pytest
import torch
from torch import nn

import cpt_core as cpt
from cpt_core.inspecting.measured import Spent
from cpt_core.public import reference
from cpt_core.schedules.cost import relative_cost
from cpt_core.schedules.schedule import Schedule

ODD = {
    "None": lambda: None,
    "True": lambda: True,
    "-1": lambda: -1,
    "0": lambda: 0,
    "2.5": lambda: 2.5,
    "1e300": lambda: 1e300,
    "inf": lambda: float("inf"),
    "nan": lambda: float("nan"),
    "10**30": lambda: 10**30,
    "''": lambda: "",
    "'abc'": lambda: "abc",
    "b'x'": lambda: b"x",
    "[]": lambda: [],
    "[1, 'a']": lambda: [1, "a"],
    "()": lambda: (),
    "(1,)": lambda: (1,),
    "{}": lambda: {},
    "{'abc': 1}": lambda: {"abc": 1},
    "an object": object,
    "a function": lambda: lambda *given: None,
    "a class": lambda: int,
    "an array": lambda: np.array([1.0, np.nan]),
    "a tensor": lambda: torch.ones(2, 3),
    "a module": lambda: nn.Identity(),
}
SECONDS = 5  # after which a call hangs


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def converted():
    return cpt.quantize_(network())


def evaluating():
    model = converted()
    with cpt.precision(model, 8), torch.no_grad():
        model(torch.ones(2, 4))
    return model.eval()


def trained(model=None):
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(step):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return {"model": model, "train_step": train_step, "optimizer": optimizer}


def cyclic():
    return cpt.make_schedule("LR", q_min=3, q_max=8, total_steps=16, n_cycles=1)


def layered():
    return cpt.LayeredSchedule(((("0",), cyclic(), 12), (("2",), cyclic(), 6)))


def roles():
    return cpt.RoleSchedules(weight=cyclic(), activation=8, gradient="float32")


def delayed():
    return cpt.DelayedSchedule(cyclic(), 4, 32)


def measured():
    spent = {3: Spent(1.0, 2, 3.0), 8: Spent(2.0, 4, 6.0)}
    return cpt.inspecting.MeasuredCost("a machine", 8, "paper", spent, {"fc": spent})


def sensitivity():
    return cpt.choosing.Sensitivity(
        "a model", "loss", 4, 16, ((0, 8), (8, 16)), (("0",), ("2",)), (12, 6), (0, 1), (1.0, 1.1),
        ((0.1, 0.2), (0.1, 0.3)), ((0.2, 0.1), (0.3, 0.1)),
    )  # fmt: skip


def graph():
    return cpt.Graph.from_edges(torch.tensor([0, 1]), torch.tensor([2, 2]), 3)


def scheduler():
    return cpt.PrecisionScheduler(converted(), cyclic())


def recording():
    found = trained(converted())
    with cpt.precision(found["model"], 8), cpt.inspecting.record(found["model"], every=1) as recorded:
        found["train_step"](0)
    return recorded


X = (torch.ones(2, 4),)
COST = {"q_grad": 8, "q_max": 8, "cost": "traffic", "ladder": cpt.FormatLadder.affine()}
BITOPS = {"q_grad": 8, "q_max": 8, "cost": None, "ladder": None}
ALLOCATE = {"q_min": 3, "q_max": 8, "total_steps": 64, "q_grad": 8, "cost": None, "ladder": None}
TRIALS = {"stateful": (), "config": None, "progress": False, "q_max": 8, "seeds": (0,)}

# what is called -> its arguments, all of them, each legal
CALLS = {
    "Exponential": lambda: (cpt.schedules.Exponential, {"rate": 4.0}),
    "Rex": lambda: (cpt.schedules.Rex, {"d": 0.9}),
    "Warped": lambda: (cpt.schedules.Warped, {"base": "rex", "power": 2.0}),
    "CyclicSchedule": lambda: (
        cpt.CyclicSchedule,
        {"profile": cpt.schedules.Cosine(), "q_min": 3, "q_max": 8, "total_steps": 16, "n_cycles": 2,
         "triangular": True, "mirror": "vertical", "cycle_rule": "exact", "name": "mine"},
    ),
    "FunctionSchedule": lambda: (cpt.FunctionSchedule, {"function": lambda u: 3 + u, "total_steps": 16}),
    "TableSchedule": lambda: (cpt.schedules.TableSchedule, {"runs": ((3, 8), (8, 8))}),
    "StaticSchedule": lambda: (cpt.StaticSchedule, {"q_max": 8, "total_steps": 16}),
    "DeficitSchedule": lambda: (
        cpt.DeficitSchedule, {"q_low": 3, "q_high": 8, "windows": ((2, 4),), "total_steps": 16}
    ),
    "DelayedSchedule": lambda: (cpt.DelayedSchedule, {"schedule": cyclic(), "hold": 4, "level": 32}),
    "make_schedule": lambda: (
        cpt.make_schedule,
        {"name": "RR", "q_max": 8, "total_steps": 128, "q_min": 3, "n_cycles": 2, "cycle_rule": "exact",
         "profile": cpt.schedules.Rex(0.5), "delay": 0.25, "delay_at": "float32"},
    ),
    "schedule_from_dict": lambda: (cpt.schedule_from_dict, {"description": cyclic().to_dict()}),
    "RoleSchedules": lambda: (
        cpt.RoleSchedules,
        {"weight": cyclic(), "activation": cyclic(), "gradient": None, "error": "float32", "weight_gradient": 8},
    ),
    "RoleSchedules, one gradient": lambda: (
        cpt.RoleSchedules,
        {"weight": cyclic(), "activation": cyclic(), "gradient": 8, "error": None, "weight_gradient": None},
    ),
    "LayeredSchedule": lambda: (cpt.LayeredSchedule, {"parts": layered().parts}),
    "LayeredSchedule.at": lambda: (layered().at, {"step": 3}),
    "solve_schedule": lambda: (
        cpt.solve_schedule,
        {"budget": 0.7, "q_min": 3, "q_max": 8, "total_steps": 64, "n_cycles": 2, "family": "rex", "triangular": False,
         "mirror": "vertical", "delay": 0.0, "q_grad": 8, "cost": None, "ladder": None},
    ),
    "allocate": lambda: (
        cpt.choosing.allocate, {"sensitivity": sensitivity(), "budget": 0.6, "over": "both", "floor": 0.05, **ALLOCATE}
    ),
    "MeasuredCost": lambda: (cpt.inspecting.MeasuredCost, vars(measured())),
    "MeasuredCost.from_dict": lambda: (cpt.inspecting.MeasuredCost.from_dict, {"d": measured().to_dict()}),
    "MeasuredCost.seconds": lambda: (measured().seconds, {"bits": 3}),
    "MeasuredCost.other": lambda: (measured().other, {"bits": 3}),
    "MeasuredCost.relative_cost": lambda: (measured().relative_cost, {"schedule": cpt.StaticSchedule(8, 4)}),
    "Sensitivity": lambda: (cpt.choosing.Sensitivity, vars(sensitivity())),
    "Sensitivity.from_dict": lambda: (cpt.choosing.Sensitivity.from_dict, {"d": sensitivity().to_dict()}),
    "Sensitivity.response": lambda: (sensitivity().response, {"over": "time"}),
    "Sensitivity.estimates": lambda: (sensitivity().estimates, {"over": "time"}),
    "Sensitivity.even": lambda: (sensitivity().even, {"over": "time"}),
    "Sensitivity.agreement": lambda: (sensitivity().agreement, {"over": "time"}),
    "Sensitivity.places": lambda: (sensitivity().places, {"over": "time"}),
    "Sensitivity.weights": lambda: (sensitivity().weights, {"over": "time", "floor": 0.1}),
    "Sensitivity.product": lambda: (sensitivity().product, {"floor": 0.1}),
    "Sensitivity.promised": lambda: (sensitivity().promised, {"schedule": cyclic(), "floor": 0.1}),
    "Format": lambda: (
        cpt.Format,
        {"kind": "minifloat", "bits": 4, "exponent": 2, "mantissa": 1, "specials": "none", "block": 16, "scale": "e8m0",
         "partial": True, "saturate": True},
    ),
    "Format.affine": lambda: (cpt.Format.affine, {"bits": 4}),
    "Format.symmetric": lambda: (cpt.Format.symmetric, {"bits": 4}),
    "Format.log2": lambda: (cpt.Format.log2, {"bits": 4}),
    "Format.minifloat": lambda: (cpt.Format.minifloat, {"exponent": 4, "mantissa": 3, "specials": "nan"}),
    "Format.mx": lambda: (cpt.Format.mx, {"element": "e2m1", "block": 16}),
    "Format.nvfp4": lambda: (cpt.Format.nvfp4, {"block": 16}),
    "Format.of": lambda: (cpt.Format.of, {"value": "e4m3"}),
    "FormatLadder": lambda: (cpt.FormatLadder, {"formats": {3: "mxfp4", 8: "e4m3"}}),
    "FormatLadder.from_dict": lambda: (cpt.FormatLadder.from_dict, {"description": {"3": "mxfp4"}}),
    "FormatLadder.bits": lambda: (cpt.FormatLadder.affine().bits, {"level": 3}),
    "FormatLadder.priced": lambda: (cpt.FormatLadder.affine().priced, {"level": 3}),
    "FormatLadder.check": lambda: (cpt.FormatLadder.affine().check, {"levels": (3, 4)}),
    "FormatLadder.cost": lambda: (cpt.FormatLadder.affine().cost, {"name": "traffic", "gradients": 8}),
    "Graph": lambda: (
        cpt.Graph,
        {"indptr": torch.tensor([0, 1, 2]), "indices": torch.tensor([1, 0]), "num_src": 2, "backend": "csr"},
    ),
    "Graph.from_edges": lambda: (
        cpt.Graph.from_edges,
        {"source": torch.tensor([0, 1]), "destination": torch.tensor([2, 2]), "num_nodes": 3, "backend": "csr"},
    ),
    "Graph.aggregate": lambda: (graph().aggregate, {"h": torch.ones(3, 2), "reduce": "mean"}),
    "Graph.set_constant": lambda: (graph().set_constant, {"features": torch.ones(3, 2)}),
    "Graph.to": lambda: (graph().to, {"device": "cpu"}),
    "GraphConv": lambda: (
        cpt.GraphConv, {"in_feats": 2, "out_feats": 3, "norm": "left", "bias": True, "allow_zero_in_degree": True}
    ),
    "GraphConv.forward": lambda: (cpt.GraphConv(2, 3).forward, {"graph": graph(), "features": torch.ones(3, 2)}),
    "SAGEConv": lambda: (cpt.SAGEConv, {"in_feats": 2, "out_feats": 3, "bias": True}),
    "SAGEConv.forward": lambda: (cpt.SAGEConv(2, 3).forward, {"graph": graph(), "features": torch.ones(3, 2)}),
    "Quantizer": lambda: (
        cpt.quantization.Quantizer,
        {"granularity": "per_tensor", "rounding": "nearest", "running": True, "format": cpt.FORMATS["e4m3"],
         "clipping": "rms", "percentile": 99.0, "hadamard": 16},
    ),
    "Quantizer.of": lambda: (cpt.quantization.Quantizer.of, {"value": "e4m3:rounding=stochastic"}),
    "Quantizer.on": lambda: (
        cpt.quantization.Quantizer("per_row").on, {"level": cpt.quantization.Quantizer.of("e4m3")}
    ),
    "quantize": lambda: (
        cpt.quantize, {"x": torch.ones(2, 3), "bits": 4, "quantizer": "conv_input", "format": None, "seed": None}
    ),
    "quantize, a format": lambda: (
        cpt.quantize,
        {"x": torch.ones(2, 3), "bits": None, "quantizer": None, "format": "e4m3:rounding=stochastic", "seed": 0},
    ),
    "quantize_": lambda: (cpt.quantize_, {"model": network(), "config": "all", "filter_fn": lambda m, n: True}),
    "restore_": lambda: (cpt.restore_, {"model": converted()}),
    "summary": lambda: (cpt.summary, {"model": converted(), "inputs": X}),
    "QuantConfig": lambda: (cpt.QuantConfig, {**vars(cpt.QuantConfig(float32=("fc",))), "ladder": {3: "mxfp4"}}),
    "QuantConfig.with_gradient_rounding": lambda: (
        cpt.QuantConfig().with_gradient_rounding, {"rounding": "nearest"}
    ),
    "record": lambda: (cpt.inspecting.record, {"model": converted(), "every": 2, "step": 1}),
    "Recording": lambda: (cpt.inspecting.Recording, {"model": converted(), "every": 2, "step": 1}),
    "Recording.scalars": lambda: (recording().scalars, {"step": 0}),
    "Recording.write": lambda: (recording().write, {"writer": type("W", (), {"add_scalar": lambda *a: None})()}),
    "export": lambda: (cpt.export, {"model": evaluating(), "inputs": X, "bits": 8, "dynamic_shapes": None}),
    "PrecisionScheduler": lambda: (
        cpt.PrecisionScheduler,
        {
            "model": converted(), "schedule": {"*": cyclic()}, "q_grad": 8,
            "optimizer": torch.optim.SGD([torch.ones(1)]), "eval_bits": "q_max",
        },
    ),
    "AdaptiveScheduler": lambda: (
        cpt.choosing.AdaptiveScheduler,
        {"model": converted(), "levels": (3, 8), "steps_per_epoch": 2, "q_grad": 8, "share": 0.1, "decay": 0.5},
    ),
    "PrecisionScheduler.load_state_dict": lambda: (scheduler().load_state_dict, {"state": scheduler().state_dict()}),
    "precision": lambda: (cpt.precision, {"model": converted(), "bits": 4, "q_grad": 8}),
    "count_bitops": lambda: (
        cpt.count_bitops,
        {"model": converted(), "inputs": X, "schedule": cyclic(), "convention": "per_op", "q_grad": 8},
    ),
    "check": lambda: (cpt.check, {"model": converted(), "inputs": X}),
    "measure_cost": lambda: (
        cpt.inspecting.measure_cost,
        {"model": converted(), "inputs": X, "schedule": None, "bits": (8,), "q_grad": 8, "repeats": 1,
         "convention": "paper", "progress": False},
    ),
    "BitOpsLedger": lambda: (cpt.BitOpsLedger, {"model": converted()}),
    **{
        f"BitOpsLedger.{name}": lambda name=name: (
            getattr(cpt.BitOpsLedger(converted()), name), {"convention": "paper"}
        )
        for name in ("bitops", "by_layer", "by_pass", "costs", "table", "total")
    },
    "precision_range_test": lambda: (
        cpt.choosing.precision_range_test,
        {**trained(), "bits": (4,), "dwell": 4, "mode": "reset", "threshold": 0.5, **TRIALS},
    ),
    "sensitivity": lambda: (
        cpt.choosing.sensitivity,
        {**trained(), "base": 4, "windows": 1, "layers": 1, "steps": 2, "quality": lambda: 1.0,
         "estimate": False, **TRIALS},
    ),
    "try_precision": lambda: (
        cpt.choosing.try_precision,
        {**trained(), "evaluate": lambda: 1.0, "steps": 8, "minutes": 1.0, "seeds": 1, "margin": 1.0, "cycles": 1,
         "store": None, "stateful": (), "config": None, "progress": False},
    ),
}  # fmt: skip
SCHEDULES = {
    "CyclicSchedule": cyclic, "LayeredSchedule": layered, "RoleSchedules": roles, "DelayedSchedule": delayed,
}  # fmt: skip
for of, make in SCHEDULES.items():
    given = {**COST, "q_grad": None} if of == "RoleSchedules" else COST
    CALLS |= {
        f"{of}()": lambda make=make: (make(), {"step": 3}),
        f"{of}.levels": lambda make=make, q=given["q_grad"]: (make().levels, {"q_grad": q}),
        f"{of}.levels_at": lambda make=make, q=given["q_grad"]: (make().levels_at, {"step": 3, "q_grad": q}),
        f"{of}.relative_cost": lambda make=make: (make().relative_cost, COST),
        f"{of}.relative_cost in BitOps": lambda make=make: (make().relative_cost, BITOPS),
        f"{of}.noise_exposure": lambda make=make: (make().noise_exposure, {"q_max": 8}),
        f"{of}.share_at": lambda make=make: (make().share_at, {"bits": 8}),
    }
# odd value -> arguments of any callable for which it is legal; None is where it is the default, and for these
TAKEN = {
    "None": "progress Quantizer.on.level Graph.set_constant.features",
    "True": "triangular partial saturate bias allow_zero_in_degree running progress estimate",
    "-1": "seed",
    "0": "d hold delay floor step seed hadamard mantissa share decay",
    "2.5": "rate power minutes margin",
    "1e300": "rate power minutes margin",
    "10**30": "rate power block every step layers minutes margin",
    "''": "name title quality convention device MeasuredCost.device",
    "'abc'": "name title quality convention device store",
    "[]": "windows estimated levels float32 stateful",
    "()": "windows estimated levels float32 stateful",
    "(1,)": "levels bits seeds",
    "{}": "layers",
    "a class": "cost train_step quality evaluate",
    "a module": "cost train_step model",
    "a tensor": "features x",
}
THEIRS = {"dynamic_shapes"}  # handed on as it is: torch judges it
CALLED = {"inputs", "filter_fn", "quality", "evaluate"}  # what calls the model or the value itself may fail there
RESULTS = {"Backend", "BitOpsPlan", "Check", "Cost", "Operands", "PrecisionRange", "Tried"}  # made by the library


class HangError(BaseException):
    """A call took longer than ``SECONDS``."""


@contextlib.contextmanager
def guarded():
    def stop(*_):
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def call(function, arguments):
    """Call, and use what comes of it once."""
    found = function(**arguments)
    if isinstance(found, Schedule):
        found.bits()
    if hasattr(found, "__enter__"):
        with found:
            pass
    return found


def verdict(name, argument, odd):
    """Return "taken", "refused", or what is unclear."""
    function, arguments = CALLS[name]()
    value = ODD[odd]()
    try:
        with guarded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(function, {**arguments, argument: value})
    except HangError:
        return "hangs"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__, limit=-1)[0]
        ours = "cpt_core" in frame.filename and frame.line.startswith("raise")
        named = re.search(rf"\b{argument}\b", str(error)) or any(w in str(error) for w in (repr(value), kind(value)))
        if (isinstance(error, (ValueError, TypeError)) and ours and named) or argument in CALLED:
            return "refused"
        return f"{type(error).__name__}: {error}"
    return "taken"


def kind(value):
    """What is said of a value that takes too long to write."""
    return type(value).__name__ if isinstance(value, (np.ndarray, torch.Tensor, nn.Module)) else repr(value)


def legal(name, argument, odd):
    default = inspect.signature(CALLS[name]()[0]).parameters[argument].default
    taken = TAKEN.get(odd, "").split()
    return argument in taken or f"{name}.{argument}" in taken or (odd == "None" and default is None)


def test_every_public_callable_is_called_with_all_its_arguments():
    called = {re.split(r"\W", name)[0] for name in CALLS}
    names = {path.split(".")[-1]: attrgetter(path)(cpt) for path in reference("cpt_core")}
    public = {name for name, value in names.items() if callable(value) and not name.endswith("Warning")}
    bare = {name for name in public if not inspect.signature(names[name]).parameters}
    assert public - bare - RESULTS == called
    for name, make in CALLS.items():
        function, arguments = make()
        expected = inspect.signature(function).parameters.values()
        assert {p.name for p in expected if p.kind is not p.VAR_KEYWORD} == set(arguments), name


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:one seed")
def test_legal_values_are_taken_and_odd_ones_refused_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function, arguments = CALLS[name]()
    call(function, arguments)
    found = {(a, odd): verdict(name, a, odd) for a in arguments if a not in THEIRS for odd in ODD}
    wrong = {at: said for at, said in found.items() if said != "refused" and not (said == "taken" and legal(name, *at))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: cpt.count_bitops(converted(), X, cyclic(), q_grad=33), "q_grad must be an integer from 1 to 32"),
        (lambda: cyclic().relative_cost(q_max=33), "q_max must be an integer from 1 to 32"),
        (lambda: cpt.StaticSchedule(8, 10**8 + 1), "total_steps must be .* at most 100000000"),
        (lambda: cpt.make_schedule("LR", q_min=3, q_max=8, total_steps=10**9), "total_steps must be .* at most"),
        (lambda: cpt.Format("affine", 4, saturate="no"), "saturate must be True or False, got 'no'"),
        (lambda: cpt.QuantConfig(float32="fc"), r"float32 must be tuple\[str, ...\], got 'fc'"),
        (lambda: cpt.QuantConfig(float32=("fc", 1)), r"float32 must be tuple\[str, ...\], got \('fc', 1\)"),
        (lambda: relative_cost([3, 40], 8), r"bits must lie between 1 and 32, got \[3, 40\]"),
        (lambda: relative_cost([3, 8], 8, cost=lambda bits: None), "cost must return what a step costs, one number"),
        (lambda: cpt.schedules.TableSchedule(((3, 5), (8, 10**9))), "total_steps must be .* at most"),
    ],
)
def test_beyond_the_ends_of_a_range(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("macs", {"macs": (12,)}),
        ("windows", {"windows": ((0, 8), (9, 16))}),
        ("windows", {"windows": ((0, 16), (16, 16))}),
        ("windows", {"steps": 20}),
        ("reference", {"seeds": (0,)}),
        ("reference", {"seeds": (), "reference": (), "in_windows": (), "in_groups": ()}),
        ("reference", {"reference": (1.0,)}),
        ("in_windows", {"in_windows": ((0.1, 0.2),)}),
        ("in_groups", {"in_groups": ((0.2, 0.1, 0.3), (0.3, 0.1, 0.3))}),
        ("estimated", {"estimated": ((1.0, 2.0),)}),
    ],
)
def test_a_sensitivity_whose_parts_do_not_belong_together(named, changes):
    with pytest.raises(ValueError, match=f"^{named} must"):
        cpt.choosing.Sensitivity(**vars(sensitivity()) | changes)
