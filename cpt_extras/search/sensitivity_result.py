"""What a bit less costs, and where: the answer of ``search.sensitivity``, with its evidence.  Beyond the paper.

The model behind it: the quality lost to low precision is a sum over steps t and layers l,

    loss = sum w(t, l) * 4**-q(t, l)

as the variance of rounding at q bits goes with 4**-q. w is the response: quality lost per unit of added 4**-q, per
step. It is measured in windows of time and in groups of layers, and taken to be their product.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Real
from typing import Any

import numpy as np
from scipy import stats

from cpt_core.schedules.profiles import Array
from cpt_core.schedules.schedule import Schedule
from cpt_core.validation import (
    MAX_BITS,
    check_choice,
    check_int,
    check_types,
    short_repr,
)
from cpt_extras.files import nan_to_none
from cpt_extras.optional_libraries import import_optional
from cpt_extras.search.layered import LayeredSchedule
from cpt_extras.search.role_schedules import RoleSchedules

OVER = ("time", "layers", "both")
PLACES = ("time", "layers", "roles")  # where one bit less was measured
ROLES = (
    "weight",
    "activation",
    "gradient",
)  # of the last, both backward products have the same bits
FLOOR = 0.05  # smallest response of a place, as a share of what it had if all work were alike


@dataclass(frozen=True)
class Sensitivity:
    """Where a bit less costs quality. ``print`` it for a table.

    Attributes:
        title: what was trained.
        quality: what was measured: a metric, or "loss"; lost is positive when worse.
        base: bits of the training that the others are compared with; they have one less in one place.
        steps: optimizer steps of a training.
        windows: pairs (start, stop) of steps, half-open, one after the other.
        groups: names of the layers of every group.
        macs: forward multiply-accumulates of every group in one step.
        seeds: repetitions.
        reference: quality at ``base`` bits throughout, by seed; as it is printed, not turned.
        in_windows: quality lost by one bit less in a window, [seed][window]; NaN where training diverged.
        in_groups: the same by one bit less in a group of layers throughout, [seed][group].
        estimated: the estimate without further runs, [window][group], in units of its own; () where none was made.
        in_roles: the same as ``in_groups`` by one bit less in weights, activations or gradients throughout,
            [seed][role], where the gradients of the training it is compared with have ``base`` bits, too; () where it
            was not measured.
    """

    title: str
    quality: str
    base: int
    steps: int
    windows: tuple[tuple[int, int], ...]
    groups: tuple[tuple[str, ...], ...]
    macs: tuple[int, ...]
    seeds: tuple[int, ...]
    reference: tuple[float, ...]
    in_windows: tuple[tuple[float, ...], ...]
    in_groups: tuple[tuple[float, ...], ...]
    estimated: tuple[tuple[float, ...], ...] = ()
    in_roles: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        check_types(type(self), vars(self), parts=True)
        check_int("base", self.base, 2, MAX_BITS)
        edges = [0, *(stop for _, stop in self.windows)]
        ends = sorted(set(edges)) == edges and edges[-1] == self.steps
        if not ends or list(self.windows) != list(itertools.pairwise(edges)):
            raise ValueError(
                f"windows must be pairs (start, stop) from 0 to steps = {self.steps}, got {self.windows!r}"
            )
        seeds, windows, groups = len(self.seeds), len(self.windows), len(self.groups)
        shapes = {
            "reference": (seeds,),
            "macs": (groups,),
            "in_windows": (seeds, windows),
            "in_groups": (seeds, groups),
        }
        shapes |= {"estimated": (windows, groups)} if self.estimated else {}
        shapes |= {"in_roles": (seeds, len(ROLES))} if self.in_roles else {}
        for name, shape in shapes.items():
            if (
                0 in shape
                or np.shape(np.array(getattr(self, name), dtype=object)) != shape
            ):
                raise ValueError(
                    f"{name} must have the shape {shape} of seeds, windows or groups, got {getattr(self, name)!r}"
                )

    @property
    def added(self) -> float:
        """The noise, 4**-q, that one bit less adds to a step."""
        return 4.0 ** -(self.base - 1) - 4.0**-self.base

    def response(self, over: str) -> Array:
        """Return w of every place, by seed: quality lost per step and unit of 4**-q, (seeds, windows, groups or roles).

        ``over`` is "time", "layers" or "roles".
        """
        if check_choice("over", over, PLACES) == "time":
            return np.array(self.in_windows) / (
                np.diff(np.array(self.windows), axis=1).T * self.added
            )
        if over == "roles" and not self.in_roles:
            raise ValueError(
                "one bit less in a role was not measured; ask for it: sensitivity(..., roles=True)"
            )
        return np.array(self.in_groups if over == "layers" else self.in_roles) / (
            self.steps * self.added
        )

    def estimates(self, over: str) -> Array:
        """Return mean, low and high (95 %, Student's t over seeds) of the response of every place, (3, places)."""
        w = self.response(over)
        half = np.full(w.shape[1], np.nan)
        if len(w) > 1:
            half = stats.t.ppf(0.975, len(w) - 1) * w.std(0, ddof=1) / np.sqrt(len(w))
        return np.stack([w.mean(0), w.mean(0) - half, w.mean(0) + half])

    def even(self, over: str) -> Array:
        """Return what the responses would be if all work were alike: their sum, shared out by time or by MACs."""
        mean = self.response(over).mean(0)
        share = (
            np.array(self.macs, dtype=float) if over == "layers" else np.ones(len(mean))
        )
        known = np.isfinite(mean)  # a place where training diverged has no response
        return (
            share * mean[known].sum() / share[known].sum()
            if known.any()
            else share * np.nan
        )

    def weights(self, over: str, floor: float = FLOOR) -> Array:
        """Return the responses as ``allocate`` uses them, all positive: (windows,) or (groups,).

        A measured response is noisy, and the best of noisy numbers promises too much. So each is moved towards what it
        would be if all work were alike, the more the larger its standard error is beside the spread of all
        (empirical Bayes); what then lies below ``floor`` times that value, or below 0, is set to it. Where training
        diverged, the largest of all is taken. With one seed nothing is known of the noise, and nothing is moved.

        Raises:
            ValueError: when a bit less costs nothing in all places together, or training diverged in every one: then
                there is nothing to allocate by. For a ``floor`` that is no share.
        """
        w, even = self.response(over), self.even(over)
        mean = w.mean(0)
        diverged = ~np.isfinite(mean)
        if (
            isinstance(floor, bool)
            or not isinstance(floor, Real)
            or not 0 <= floor <= 1
        ):
            raise ValueError(f"floor must lie between 0 and 1, got {floor!r}")
        if diverged.all():
            raise ValueError(
                f"training diverged with one bit less than {self.base} in every place over {over}, {self.title}: "
                "nothing can be allocated by it; measure at a higher base"
            )
        if not even.sum() > 0:
            raise ValueError(
                f"one bit less than {self.base} costs no {self.quality} over {over}, {self.title}: "
                "nothing can be allocated by it; measure at a lower base, with more seeds, or keep a static precision"
            )
        if len(w) > 1:
            error = w.var(0, ddof=1) / len(w)
            spread = max(0.0, float(np.mean(((mean - even) ** 2 - error)[~diverged])))
            kept = spread / (spread + error) if spread else np.zeros(len(mean))
            mean = even + kept * (mean - even)
        found = np.maximum(mean, floor * even)
        return np.where(diverged, (found / even)[~diverged].max() * even, found)

    def product(self, floor: float = FLOOR) -> Array:
        """Return the weights of every window and group, (windows, groups): those of the groups times those of time."""
        time = self.weights("time", floor)
        return time[:, None] / time.mean() * self.weights("layers", floor)[None, :]

    def promised(self, schedule: Schedule, floor: float = FLOOR) -> float:
        """Return the quality that a schedule of this length loses by the model: sum w(t, l) * 4**-q(t, l)."""
        check_types(self.promised, locals())
        if schedule.total_steps != self.steps:
            raise ValueError(
                f"the schedule has {schedule.total_steps} steps, the sensitivity {self.steps}"
            )
        if isinstance(schedule, RoleSchedules):
            activation, weight, error, gradient = schedule.levels()
            if (error != gradient).any():
                raise ValueError(
                    "both gradients were measured together, and this schedule has bits for each"
                )
            noise = (4.0 ** -np.stack([weight, activation, gradient])).sum(1)
            return float(self.weights("roles", floor) @ noise)
        if isinstance(schedule, LayeredSchedule):
            if any(isinstance(s, RoleSchedules) for _, s, _ in schedule.parts):
                raise ValueError(
                    "what layers and roles lose together is not known; give one schedule of all layers"
                )
            bits = schedule.by_group()
            if tuple(names for names, _, _ in schedule.parts) != self.groups:
                raise ValueError(
                    f"the schedule has other groups of layers than {self.groups}"
                )
        else:
            bits = np.tile(schedule.bits(), (len(self.groups), 1))
        noise = np.add.reduceat(
            4.0**-bits, [start for start, _ in self.windows], axis=1
        )
        return float((self.product(floor) * noise.T).sum())

    def agreement(self, over: str) -> float:
        """Return Spearman's rank correlation of the measured with the estimated responses; NaN without an estimate.

        By layers both are taken per MAC: groups of more work answer more whatever is asked of them. There is none by
        roles.
        """
        mean = self.estimates(over)[0]
        if not self.estimated or over == "roles" or len(mean) < 2:
            return float("nan")
        estimated = np.array(self.estimated).mean(1 if over == "time" else 0)
        per = np.ones(len(mean)) if over == "time" else np.array(self.macs)
        return float(stats.spearmanr(mean / per, estimated / per).statistic)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON; a NaN becomes None."""
        return nan_to_none(asdict(self))

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Sensitivity:
        """Rebuild what ``to_dict`` gave; other keys are left aside."""
        check_types(cls.from_dict, locals())
        d = {"in_roles": (), **d}  # what was written before roles were measured
        if missing := [f.name for f in fields(cls) if f.name not in d]:
            raise ValueError(
                f"d must be what to_dict() returned, and lacks {', '.join(missing)}; got {short_repr(d)}"
            )
        return cls(**{f.name: _tupled(d[f.name], "in_" in f.name) for f in fields(cls)})

    def __str__(self) -> str:
        n = len(self.seeds)
        lines = [
            f"quality lost ({self.quality}) by {self.base - 1} instead of {self.base} bits in one place, "
            f"{self.steps} steps, {n} seed{'s' * (n > 1)}",
            f"{'place':<24} {'lost':>9} {'w: mean [95 %]':>32} {'w used':>10}",
        ]
        for over, lost in self._measured.items():
            (mean, low, high), even = self.estimates(over), self.even(over)
            used = self.weights(over) if even.sum() > 0 else np.full(len(mean), np.nan)
            for i, place in enumerate(self.places(over)):
                said = " floor" if used[i] <= FLOOR * even[i] * (1 + 1e-9) else ""
                said += " diverged" if np.isnan(mean[i]) else ""
                w = f"{mean[i]:.4g} [{low[i]:.4g}, {high[i]:.4g}]"
                lines.append(
                    f"{place:<24} {np.mean(lost, axis=0)[i]:9.4g} {w:>32} {used[i]:10.4g}{said}"
                )
            if self.estimated and over != "roles" and len(mean) > 1:
                lines.append(
                    f"  rank correlation with the estimate over {over}: {self.agreement(over):+.2f}"
                )
        return "\n".join(lines)

    @property
    def _measured(self) -> dict[str, tuple[tuple[float, ...], ...]]:
        found = zip(
            PLACES, (self.in_windows, self.in_groups, self.in_roles), strict=True
        )
        return {over: lost for over, lost in found if lost}

    def places(self, over: str) -> list[str]:
        """Return the names of the windows, groups or roles."""
        if check_choice("over", over, PLACES) == "time":
            return [f"steps {a} to {b - 1}" for a, b in self.windows]
        if over == "roles":
            return list(ROLES)
        return [g[0] if len(g) == 1 else f"{g[0]} .. {g[-1]}" for g in self.groups]

    def figure(self) -> Any:
        """Draw responses over time, layers (per MAC) and roles, relative to work that is alike: a matplotlib figure."""
        described, parts = import_optional("cpt_extras.figures", "lab"), self._measured
        with described.subplots(1, len(parts), figsize=(4.5 * len(parts), 3.2)) as (
            figure,
            (axes,),
        ):
            for ax, over in zip(axes, parts, strict=True):
                even = self.even(over)
                mean, low, high = self.estimates(over) / abs(even)
                x = np.arange(len(mean))
                ax.axhline(1, color="#888888", linewidth=0.8, label="all alike")
                ax.errorbar(
                    x,
                    mean,
                    [mean - low, high - mean],
                    fmt="o",
                    color="#222222",
                    capsize=3,
                    label="measured",
                )
                if even.sum() > 0:
                    ax.plot(
                        x,
                        self.weights(over) / even,
                        "D",
                        color="#D55E00",
                        markersize=4,
                        label="used by allocate",
                    )
                if self.estimated and over != "roles":
                    estimated = np.array(self.estimated).mean(
                        1 if over == "time" else 0
                    )
                    shares = estimated / estimated.sum() / (even / even.sum())
                    ax.plot(
                        x,
                        shares,
                        "x",
                        color="#0072B2",
                        label="estimated from gradients",
                    )
                ax.set_xticks(x, self.places(over), rotation=30, ha="right", fontsize=8)
                ax.set_ylabel("response w, 1: as if all were alike", fontsize=8)
            axes[0].legend(fontsize=8)
            mean, low, _ = self.estimates("layers") / abs(self.even("layers"))
            worst, found = int(np.argmax(mean)), "No layer stands out"
            place = self.places("layers")[worst]
            if not np.isfinite(mean[worst]):
                found = f"Training diverges with a bit less in {place}"
            elif low[worst] > 1:
                found = f"A bit less costs most in {place}"
            said = f"{found}\n{self.title}: {self.quality} lost by {self.base - 1} instead of {self.base} bits"
            figure.suptitle(said, fontsize=9, parse_math=False)
        return figure


def _tupled(value: Any, missing: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_tupled(v, missing) for v in value)
    return float("nan") if value is None and missing else value
