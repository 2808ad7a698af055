"""Evaluation at a stated precision, and the numbers of a finished run."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

from cpt_core.bitops.plan import count_bitops
from cpt_core.bitops.trace import CONVENTIONS
from cpt_core.checks import nulled
from cpt_core.quantization.scheduler import precision
from cpt_core.schedules.layered import LayeredSchedule
from cpt_lab.training.checkpoint import State
from cpt_lab.training.session import Session


def evaluate(session: Session, step: int, policy: str) -> dict[str, Any]:
    """Evaluate both splits after ``step`` steps at one precision ("q_max" or "current"); the row says which.

    ``bits`` of a layered schedule are the highest of any layer. A metric that is not finite is None, and
    ``not_finite`` then names it, or the weights that are not: an evaluation may be blind to them.
    """
    spec, last = session.spec, min(step, session.spec.recipe.steps) - 1
    bits = spec.q_max if policy == "q_max" else spec.schedule(last)
    by_layer = policy != "q_max" and isinstance(spec.schedule, LayeredSchedule) and spec.schedule.at(last)
    session.model.eval()
    with precision(session.model, bits=by_layer or bits), session.arithmetic():
        found = session.task.evaluate(session.forward)
    lost = _not_finite(session.model)
    row = {"step": step, "precision": policy, "bits": bits, **nulled(found, lost)}
    return {**row, "not_finite": lost} if lost else row


def _not_finite(model: nn.Module) -> list[str]:
    """Name the weights, and what else is kept of a training, that hold NaN or infinity."""
    kept = model.state_dict().items()
    return [name for name, x in kept if x.is_floating_point() and not bool(x.isfinite().all())]


def assess(session: Session, state: State, policy: str) -> dict[str, Any]:
    """Return an evaluation of now; where anything of it is not finite, the run has diverged."""
    found = evaluate(session, state.step, policy)
    if lost := found.get("not_finite"):
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        state.diverge(f"the evaluation at {policy}: {', '.join(lost[:3])}{more}")
    return found


def metrics_of(session: Session, state: State) -> list[dict[str, Any]]:
    """Final numbers at q_max and at the current bits, and the test number at the best evaluation.

    None of a run that has diverged, which may be seen only now.
    """
    if state.status != "ok":
        return []
    rows = []
    last = state.history["evaluations"][-1]
    finals = {last["precision"]: last}
    other = "current" if last["precision"] == "q_max" else "q_max"
    finals[other] = assess(session, state, other)
    if state.status != "ok":
        return []
    for policy in ("q_max", "current"):
        for split in ("valid", "test"):
            for name, value in finals[policy].get(split, {}).items():
                rows.append(_metric(name, split, "final", finals[policy], value))
    # chosen on held-out data; without any, on the test set, and then it is called so
    split = "valid" if "valid" in last else "test"
    metric = session.metric
    best = max(state.history["evaluations"], key=lambda e: metric.better * e[split][metric.name])
    rows.append(_metric(metric.name, "test", f"best_{split}", best, best["test"][metric.name]))
    return rows


def _metric(name: str, split: str, when: str, evaluation: dict[str, Any], value: float) -> dict[str, Any]:
    where = {column: evaluation[column] for column in ("step", "precision", "bits")}
    return {"name": name, "split": split, "when": when, **where, "value": value}


def bitops_of(session: Session) -> dict[str, float]:
    """BitOps of the whole run, from the first batches of the task."""
    task, model, spec = session.task, session.model, session.spec
    model.train()
    batches = list(itertools.islice(task.batches(0), task.cost_batches))

    plans = [count_bitops(model, task.inputs(b), spec.schedule, q_grad=spec.q_grad) for b in batches]
    return {name: sum(plan.by_convention[name] for plan in plans) / len(plans) for name in CONVENTIONS}
