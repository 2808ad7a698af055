"""Public arguments: legal values are accepted, and all others are rejected by an error that names the argument.

Every argument of every public callable is replaced by each of the odd values, one at a time.
"""

import inspect
import re
import signal
import traceback
import warnings
from functools import partial
from operator import attrgetter

import numpy as np
import pytest
import torch
from torch import nn

import cpt_core as cpt
from book.public_names import reference
from cpt_core.schedules.cost import relative_cost
from cpt_core.schedules.schedule import Schedule

WRITTEN = (
    "None",
    "True",
    "-1",
    "0",
    "2.5",
    "1e300",
    "10**30",
    "''",
    "'abc'",
    "b'x'",
    "[]",
    "[1, 'a']",
    "()",
    "(1,)",
    "{}",
    "{'abc': 1}",
)
ODD = {text: partial(eval, text) for text in WRITTEN} | {
    "inf": lambda: float("inf"),
    "nan": lambda: float("nan"),
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


def sensitivity():
    return cpt.search.Sensitivity(
        "a model",
        "loss",
        4,
        16,
        ((0, 8), (8, 16)),
        (("0",), ("2",)),
        (12, 6),
        (0, 1),
        (1.0, 1.1),
        ((0.1, 0.2), (0.1, 0.3)),
        ((0.2, 0.1), (0.3, 0.1)),
    )


def graph():
    return cpt.Graph.from_edges(torch.tensor([0, 1]), torch.tensor([2, 2]), 3)


def scheduler():
    return cpt.PrecisionScheduler(converted(), cyclic())


def recording():
    found = trained(converted())
    with (
        cpt.precision(found["model"], 8),
        cpt.diagnostics.record(found["model"], every=1) as recorded,
    ):
        found["train_step"](0)
    return recorded


# argument -> a legal value, whatever takes it
VALUES = {
    "aggregation": "fp",
    "allow_zero_in_degree": True,
    "base": 4,
    "bias": True,
    "bits": 4,
    "block": 16,
    "budget": 0.7,
    "config": None,
    "convention": "paper",
    "cost": None,
    "cycle_rule": "exact",
    "cycles": 1,
    "d": 0.9,
    "delay": 0.25,
    "details": True,
    "device": "cpu",
    "dwell": 4,
    "dynamic_shapes": None,
    "element": "e2m1",
    "error": "float32",
    "estimate": False,
    "eval_bits": "q_max",
    "every": 2,
    "execution": "simulated",
    "exponent": 4,
    "family": "rex",
    "float32": ("fc",),
    "floor": 0.1,
    "format": None,
    "formats": {3: "mxfp4", 8: "e4m3"},
    "gradient": None,
    "gradients": 8,
    "granularity": "per_tensor",
    "hadamard": 16,
    "hold": 4,
    "in_feats": 2,
    "invariances": True,
    "kind": "minifloat",
    "ladder": None,
    "layers": 1,
    "level": 3,
    "levels": (3, 8),
    "mantissa": 3,
    "margin": 1.0,
    "minutes": 1.0,
    "mirror": "vertical",
    "mode": "reset",
    "n_cycles": 2,
    "name": "traffic",
    "norm": "left",
    "num_nodes": 3,
    "num_src": 2,
    "out_feats": 3,
    "over": "time",
    "partial": True,
    "rows": 1,
    "power": 2.0,
    "profile": cpt.schedules.Rex(0.5),
    "progress": False,
    "q_grad": 8,
    "q_high": 8,
    "q_low": 3,
    "q_max": 8,
    "q_min": 3,
    "quantizer": "conv_input",
    "quantizers": cpt.quantization.QUANTIZERS,
    "rate": 4.0,
    "reduce": "mean",
    "roles": False,
    "rounding": "nearest",
    "running": True,
    "running_start": "corrected",
    "runs": ((3, 8), (8, 8)),
    "saturate": True,
    "scale": "e8m0",
    "seed": 0,
    "seeds": (0,),
    "specials": "nan",
    "stateful": (),
    "step": 3,
    "steps": 8,
    "store": None,
    "threshold": 0.5,
    "total_steps": 128,
    "triangular": False,
    "value": "e4m3",
    "weight_gradient": 8,
    "windows": ((2, 4),),
    "argument": "progress",
    "attention": "paper",
    "zero_point": True,
}
# the same of what is made anew for every call
MADE = {
    "activation": cyclic,
    "destination": lambda: torch.tensor([2, 2]),
    "evaluate": lambda: lambda: 1.0,
    "features": lambda: torch.ones(3, 2),
    "filter_fn": lambda: lambda module, name: True,
    "function": lambda: lambda u: 3 + u,
    "graph": graph,
    "h": lambda: torch.ones(3, 2),
    "indices": lambda: torch.tensor([1, 0]),
    "indptr": lambda: torch.tensor([0, 1, 2]),
    "inputs": lambda: (torch.ones(2, 4),),
    "model": converted,
    "optimizer": lambda: torch.optim.SGD([torch.ones(1)]),
    "parts": lambda: layered().parts,
    "quality": lambda: lambda: 1.0,
    "schedule": cyclic,
    "sensitivity": sensitivity,
    "source": lambda: torch.tensor([0, 1]),
    "weight": cyclic,
    "x": lambda: torch.ones(2, 3),
}
SCHEDULES = {
    "CyclicSchedule": (cyclic, ""),
    "DelayedSchedule": (delayed, ""),
    "LayeredSchedule": (layered, "at"),
    "RoleSchedules": (roles, ""),
}
# class -> one of it, and the methods that are called
METHODS = {
    "BitOpsLedger": (
        lambda: cpt.BitOpsLedger(converted()),
        "bitops by_layer by_pass costs table total",
    ),
    "Format": (None, "affine symmetric log2 minifloat mx nvfp4 of"),
    "FormatLadder": (cpt.FormatLadder.affine, "from_dict bits priced check cost"),
    "Graph": (graph, "from_edges aggregate set_constant to"),
    "GraphConv": (lambda: cpt.GraphConv(2, 3), "forward"),
    "PrecisionScheduler": (scheduler, "load_state_dict"),
    "QuantConfig": (cpt.QuantConfig, "with_gradient_rounding"),
    "Recording": (recording, "scalars"),
    "SAGEConv": (lambda: cpt.SAGEConv(2, 3), "forward"),
    "Sensitivity": (
        sensitivity,
        "from_dict response estimates uniform_response agreement places weights product predicted_quality_loss",
    ),
    **{
        of: (
            make,
            f"__call__ levels levels_at relative_cost noise_exposure share_at {more}",
        )
        for of, (make, more) in SCHEDULES.items()
    },
}
# callable -> what is legal there alone; with a comma, another way to call it
OWN = {
    "copy_ranges": lambda: {"source": converted(), "target": converted()},
    "CyclicSchedule": lambda: {"name": "mine", "triangular": True},
    "DelayedSchedule": lambda: {"level": 32},
    "Format": lambda: {"bits": 4, "exponent": 2, "mantissa": 1, "specials": "none"},
    "FormatLadder.from_dict": lambda: {"description": {"3": "mxfp4"}},
    "FormatLadder.check": lambda: {"levels": (3, 4)},
    "PrecisionScheduler": lambda: {"schedule": {"*": cyclic()}},
    "PrecisionScheduler.load_state_dict": lambda: {"state": scheduler().state_dict()},
    "QuantConfig": lambda: {"ladder": {3: "mxfp4"}},
    "Recording.scalars": lambda: {"step": 0},
    "RoleSchedules, one gradient": lambda: {
        "gradient": 8,
        "error": None,
        "weight_gradient": None,
    },
    **dict.fromkeys(
        ("RoleSchedules.levels", "RoleSchedules.levels_at"), lambda: {"q_grad": None}
    ),
    "Sensitivity": lambda: vars(sensitivity()),
    "Sensitivity.from_dict": lambda: {"d": sensitivity().to_dict()},
    "allocate": lambda: {"budget": 0.6, "over": "both"},
    "export": lambda: {"model": evaluating()},
    "make_schedule": lambda: {"name": "RR"},
    "precision_range_test": lambda: {**trained(), "bits": (4,)},
    "quantize, a format": lambda: {
        "bits": None,
        "quantizer": None,
        "format": "e4m3:rounding=stochastic",
    },
    "quantize": lambda: {"seed": None},
    "quantize_": lambda: {"model": network(), "config": "all"},
    **{
        f"{of}.relative_cost, on a ladder": lambda: {
            "cost": "traffic",
            "ladder": cpt.FormatLadder.affine(),
        }
        for of in SCHEDULES
    },
    "schedule_from_dict": lambda: {"description": cyclic().to_dict()},
    "sensitivity": lambda: {**trained(), "windows": 1, "steps": 2},
    "try_precision": lambda: {
        **trained(),
        "train_step": lambda step: torch.ones(()),
        "seeds": 1,
    },
    "Warped": lambda: {"base": "rex"},
}
RESULTS = {
    "Backend",
    "BitOpsPlan",
    "Check",
    "Cost",
    "Operands",
    "PrecisionRange",
    "PrecisionSearchResult",
}  # made by the library
PUBLIC = {path.split(".")[-1]: attrgetter(path)(cpt) for path in reference("cpt_core")}
CALLABLE = [
    name
    for name, value in PUBLIC.items()
    if callable(value)
    and not name.endswith("Warning")
    and name not in RESULTS
    and inspect.signature(value).parameters
]
CALLS = [
    *dict.fromkeys(
        [
            *CALLABLE,
            *(f"{of}.{m}" for of, (_, names) in METHODS.items() for m in names.split()),
            *OWN,
        ]
    )
]


def prepared(name):
    """Return a callable, and a legal value for each of its arguments."""
    of, _, method = name.partition(",")[0].partition(".")
    function = PUBLIC[of]
    if method:
        bound = inspect.ismethod(getattr(function, method))  # a class method
        function = getattr(function if bound else METHODS[of][0](), method)
    parameters = inspect.signature(function).parameters.values()
    names = [
        p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    own = OWN.get(name, dict)()
    made = {n: MADE[n]() for n in names if n in MADE and n not in own}
    assert own.keys() <= set(names)
    legal = VALUES | made | own
    return function, {n: legal[n] for n in names}


# odd value -> arguments of any callable for which it is legal; None is where it is the default, and for these
TAKEN = {
    "None": "progress Graph.set_constant.features",
    "True": "triangular partial saturate bias allow_zero_in_degree running progress estimate roles details invariances "
    "zero_point",
    "-1": "seed",
    "0": "d hold delay floor step seed hadamard mantissa",
    "2.5": "rate power minutes margin",
    "1e300": "rate power minutes margin",
    "10**30": "rate power block every step layers minutes margin",
    "''": "name title quality convention device",
    "'abc'": "name title quality convention device store",
    "[]": "windows estimated in_roles levels float32 stateful",
    "()": "windows estimated in_roles levels float32 stateful",
    "(1,)": "levels bits seeds",
    "{}": "layers",
    "a class": "cost train_step quality evaluate",
    "a module": "cost train_step model",
    "a tensor": "features x",
}
THEIRS = {"dynamic_shapes"}  # handed on as it is: torch judges it
CALLED = {
    "inputs",
    "filter_fn",
    "quality",
    "evaluate",
}  # what calls the model or the value itself may fail there


class HangError(BaseException):
    """Raised if a call takes longer than ``SECONDS``."""


def hangs(*_):
    raise HangError


def call(function, arguments):
    """Call a function, and use its result once."""
    found = function(**arguments)
    if isinstance(found, Schedule):
        found.bits()
    if hasattr(found, "__enter__"):
        with found:
            pass
    return found


def verdict(name, argument, odd):
    """Return "taken", "refused", or what is unclear."""
    function, arguments = prepared(name)
    value = ODD[odd]()
    try:
        signal.alarm(SECONDS)
        with warnings.catch_warnings(action="ignore"):
            call(function, {**arguments, argument: value})
    except HangError:
        return "hangs"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__, limit=-1)[0]
        ours = re.search("cpt_(core|extras)", frame.filename) and frame.line.startswith(
            "raise"
        )
        named = re.search(rf"\b{argument}\b", str(error)) or any(
            w in str(error) for w in (repr(value), kind(value))
        )
        if (
            isinstance(error, (ValueError, TypeError)) and ours and named
        ) or argument in CALLED:
            return "refused"
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return "taken"


def kind(value):
    """Return the description of a value that takes too long to print."""
    return (
        type(value).__name__
        if isinstance(value, (np.ndarray, torch.Tensor, nn.Module))
        else repr(value)
    )


def legal(name, argument, odd):
    default = inspect.signature(prepared(name)[0]).parameters[argument].default
    taken = TAKEN.get(odd, "").split()
    return (
        argument in taken
        or f"{name}.{argument}" in taken
        or (odd == "None" and default is None)
    )


SLOW = ("export", "precision_range_test", "sensitivity", "try_precision")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in CALLS
    ],
)
@pytest.mark.filterwarnings("ignore:one seed")
def test_public_callables_reject_odd_values_by_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGALRM, hangs)
    function, arguments = prepared(name)
    call(function, arguments)
    found = {
        (a, odd): verdict(name, a, odd)
        for a in arguments
        if a not in THEIRS
        for odd in ODD
    }
    wrong = {
        at: said
        for at, said in found.items()
        if said != "refused" and not (said == "taken" and legal(name, *at))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (
            lambda: cpt.count_bitops(
                converted(), (torch.ones(2, 4),), cyclic(), q_grad=33
            ),
            "q_grad must be an integer from 1 to 32",
        ),
        (
            lambda: cyclic().relative_cost(q_max=33),
            "q_max must be an integer from 1 to 32",
        ),
        (
            lambda: cpt.StaticSchedule(8, 10**8 + 1),
            "total_steps must be .* at most 100000000",
        ),
        (
            lambda: cpt.make_schedule("LR", q_min=3, q_max=8, total_steps=10**9),
            "total_steps must be .* at most",
        ),
        (
            lambda: cpt.Format("affine", 4, saturate="no"),
            "saturate must be True or False, got 'no'",
        ),
        (
            lambda: cpt.QuantConfig(float32="fc"),
            r"float32 must be tuple\[str, ...\], got 'fc'",
        ),
        (
            lambda: cpt.QuantConfig(float32=("fc", 1)),
            r"float32 must be tuple\[str, ...\], got \('fc', 1\)",
        ),
        (
            lambda: relative_cost([3, 40], 8),
            r"bits must lie between 1 and 32, got \[3, 40\]",
        ),
        (
            lambda: relative_cost([3, 8], 8, cost=lambda bits: None),
            "cost must return what a step costs, one number",
        ),
        (
            lambda: cpt.schedules.TableSchedule(((3, 5), (8, 10**9))),
            "total_steps must be .* at most",
        ),
    ],
)
def test_public_callables_reject_values_out_of_range(refused, message):
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
        (
            "reference",
            {"seeds": (), "reference": (), "in_windows": (), "in_groups": ()},
        ),
        ("reference", {"reference": (1.0,)}),
        ("in_windows", {"in_windows": ((0.1, 0.2),)}),
        ("in_groups", {"in_groups": ((0.2, 0.1, 0.3), (0.3, 0.1, 0.3))}),
        ("estimated", {"estimated": ((1.0, 2.0),)}),
    ],
)
def test_sensitivity_rejects_inconsistent_fields(named, changes):
    with pytest.raises(ValueError, match=f"^{named} must"):
        cpt.search.Sensitivity(**vars(sensitivity()) | changes)
