"""Result of a sensitivity analysis: the quality lost by one bit less, by place.  Beyond the paper.

``Sensitivity`` holds the measurements of ``search.sensitivity``; its methods turn them into responses and weights for
``search.allocate``, a table and a figure. The model behind it: the quality lost to low precision is a sum over steps t
and layers l,

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
from numpy.typing import NDArray
from scipy import stats

from cpt_core.schedules.profiles import Array
from cpt_core.schedules.schedule import Schedule
from cpt_core.text_repr import show_text
from cpt_core.validation import (
    MAX_BITS,
    check_choice,
    check_int,
    check_types,
    short_repr,
)
from cpt_extras.files import nan_to_none
from cpt_extras.former_names import FormerName
from cpt_extras.optional_libraries import import_optional
from cpt_extras.search.layered import LayeredSchedule
from cpt_extras.search.role_schedules import RoleSchedules

OVER = ("time", "layers", "both")
PLACE_KINDS = ("time", "layers", "roles")  # for which one bit less was measured
ROLES = (
    "weight",
    "activation",
    "gradient",
)  # the last stands for both backward matmuls
FLOOR = 0.05  # smallest response of a place, relative to its uniform response


@dataclass(frozen=True)
class Sensitivity:
    """Quality lost by one bit less in a window, a group of layers or a role. ``print`` it for a table.

    Attributes:
        title: name of the model.
        quality: name of what was measured: a metric, or "loss"; lost quality is positive when worse.
        base: bits of the training that the others are compared with; they have one less in one place.
        steps: optimizer steps of a training.
        windows: pairs (start, stop) of steps, half-open, one after the other.
        groups: names of the layers of every group.
        macs: forward multiply-accumulates of every group in one step.
        seeds: repetitions.
        reference: quality at ``base`` bits throughout, by seed; a loss keeps its sign.
        in_windows: quality lost by one bit less in a window, [seed][window]; NaN where training diverged.
        in_groups: quality lost by one bit less in a group of layers throughout, [seed][group].
        estimated: the estimate without further runs, [window][group], in units of its own; () where none was made.
        in_roles: quality lost by one bit less in weights, activations or gradients throughout, [seed][role], where
            the gradients of the training it is compared with have ``base`` bits, too; () where it was not measured.
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

    even = FormerName("even", "uniform_response")
    promised = FormerName("promised", "predicted_quality_loss")

    def __post_init__(self) -> None:
        check_types(type(self), vars(self), parts=True)
        check_int("base", self.base, 2, MAX_BITS)
        edges = [0, *(stop for _, stop in self.windows)]
        covers_all_steps = sorted(set(edges)) == edges and edges[-1] == self.steps
        spans = list(itertools.pairwise(edges))
        if not covers_all_steps or list(self.windows) != spans:
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
        if self.estimated:
            shapes["estimated"] = (windows, groups)
        if self.in_roles:
            shapes["in_roles"] = (seeds, len(ROLES))
        for name, shape in shapes.items():
            values = np.array(getattr(self, name), dtype=object)
            if 0 in shape or np.shape(values) != shape:
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
        if check_choice("over", over, PLACE_KINDS) == "time":
            window_steps = np.diff(np.array(self.windows), axis=1).T
            return np.array(self.in_windows) / (window_steps * self.added)
        if over == "roles" and not self.in_roles:
            raise ValueError(
                "one bit less in a role was not measured; ask for it: sensitivity(..., roles=True)"
            )
        quality_lost = self.in_groups if over == "layers" else self.in_roles
        return np.array(quality_lost) / (self.steps * self.added)

    def estimates(self, over: str) -> Array:
        """Return mean, low and high (95 %, Student's t over seeds) of the response of every place, (3, places)."""
        responses = self.response(over)
        seeds, places = responses.shape
        mean = responses.mean(0)
        ci_halfwidth = np.full(places, np.nan)
        if seeds > 1:
            t = stats.t.ppf(0.975, seeds - 1)
            ci_halfwidth = t * responses.std(0, ddof=1) / np.sqrt(seeds)
        return np.stack([mean, mean - ci_halfwidth, mean + ci_halfwidth])

    def uniform_response(self, over: str) -> Array:
        """Return the responses if all work were equally sensitive: their sum, shared out by time or by MACs."""
        mean = self.response(over).mean(0)
        work = (
            np.array(self.macs, dtype=float) if over == "layers" else np.ones(len(mean))
        )
        is_finite = np.isfinite(mean)  # a place where training diverged has no response
        if not is_finite.any():
            return work * np.nan
        return work * mean[is_finite].sum() / work[is_finite].sum()

    def weights(self, over: str, floor: float = FLOOR) -> Array:
        """Return the responses as ``allocate`` uses them, all positive: (windows,), (groups,) or (roles,).

        A measured response is noisy, and the best of noisy numbers promises too much. So each is shrunk towards its
        ``uniform_response``, the more the larger its standard error is relative to the spread of all (empirical
        Bayes); values below ``floor`` times the uniform response are raised to that. Where training diverged, the
        largest ratio of all is taken. With one seed nothing is known of the noise, and nothing is shrunk.

        Raises:
            ValueError: when a bit less costs nothing in all places together, or training diverged in every one: then
                there is nothing to allocate by. For a ``floor`` that is no share.
        """
        if isinstance(floor, bool) or not isinstance(floor, Real):
            raise ValueError(f"floor must lie between 0 and 1, got {floor!r}")
        if not 0 <= floor <= 1:
            raise ValueError(f"floor must lie between 0 and 1, got {floor!r}")

        responses, uniform = self.response(over), self.uniform_response(over)
        mean = responses.mean(0)
        diverged = ~np.isfinite(mean)
        if diverged.all():
            raise ValueError(
                f"training diverged with one bit less than {self.base} in every place over {over}, {self.title}: "
                "nothing can be allocated by it; measure at a higher base"
            )
        if not uniform.sum() > 0:
            raise ValueError(
                f"one bit less than {self.base} costs no {self.quality} over {over}, {self.title}: "
                "nothing can be allocated by it; measure at a lower base, with more seeds, or keep a static precision"
            )

        seeds = len(responses)
        if seeds > 1:
            error_variance = responses.var(0, ddof=1) / seeds
            excess = (mean - uniform) ** 2 - error_variance
            true_variance = max(0.0, float(np.mean(excess[~diverged])))
            reliability = np.zeros(len(mean))
            if true_variance:
                reliability = true_variance / (true_variance + error_variance)
            mean = uniform + reliability * (mean - uniform)
        weights = np.maximum(mean, floor * uniform)
        largest_ratio = (weights / uniform)[~diverged].max()
        return np.where(diverged, largest_ratio * uniform, weights)

    def product(self, floor: float = FLOOR) -> Array:
        """Return the weights of every window and group, (windows, groups), as a product of both."""
        time = self.weights("time", floor)
        return time[:, None] / time.mean() * self.weights("layers", floor)[None, :]

    def predicted_quality_loss(self, schedule: Schedule, floor: float = FLOOR) -> float:
        """Return the quality that a schedule of this length loses by the model: sum w(t, l) * 4**-q(t, l)."""
        check_types(self.predicted_quality_loss, locals())
        if schedule.total_steps != self.steps:
            raise ValueError(
                f"the schedule has {schedule.total_steps} steps, the sensitivity {self.steps}"
            )
        if isinstance(schedule, RoleSchedules):
            return self._predicted_role_loss(schedule, floor)

        bits = self._bits_by_group(schedule)
        window_starts = [start for start, _ in self.windows]
        noise = np.add.reduceat(4.0**-bits, window_starts, axis=1)
        return float((self.product(floor) * noise.T).sum())

    def _predicted_role_loss(self, schedule: RoleSchedules, floor: float) -> float:
        """Return the predicted loss of separate schedules per role."""
        activation, weight, error, gradient = schedule.levels()
        if (error != gradient).any():
            raise ValueError(
                "both gradients were measured together, and this schedule has bits for each"
            )
        noise = (4.0 ** -np.stack([weight, activation, gradient])).sum(1)
        return float(self.weights("roles", floor) @ noise)

    def _bits_by_group(self, schedule: Schedule) -> NDArray[np.int64]:
        """Return the bits of every group and step, (groups, steps)."""
        if not isinstance(schedule, LayeredSchedule):
            return np.tile(schedule.bits(), (len(self.groups), 1))

        if any(isinstance(s, RoleSchedules) for _, s, _ in schedule.parts):
            raise ValueError(
                "what layers and roles lose together is not known; give one schedule of all layers"
            )
        if tuple(names for names, _, _ in schedule.parts) != self.groups:
            raise ValueError(
                f"the schedule has other groups of layers than {self.groups}"
            )
        return schedule.by_group()

    def agreement(self, over: str) -> float:
        """Return Spearman's rank correlation of the measured with the estimated responses; NaN without an estimate.

        Over layers both are taken per MAC, as groups with more work respond more. Over roles there is no estimate.
        """
        mean = self.estimates(over)[0]
        if not self.estimated or over == "roles" or len(mean) < 2:
            return float("nan")
        estimated = self._mean_estimate(over)
        work = np.ones(len(mean)) if over == "time" else np.array(self.macs)
        return float(stats.spearmanr(mean / work, estimated / work).statistic)

    def _mean_estimate(self, over: str) -> Array:
        """Return the mean estimate of every window, or of every group."""
        return np.array(self.estimated).mean(1 if over == "time" else 0)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON; a NaN becomes None."""
        return nan_to_none(asdict(self))

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Sensitivity:
        """Rebuild a sensitivity from the dict of ``to_dict``; further keys are ignored."""
        check_types(cls.from_dict, locals())
        d = {"in_roles": (), **d}  # former releases measured no roles
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in d]
        if missing:
            raise ValueError(
                f"d must be what to_dict() returned, and lacks {', '.join(missing)}; got {short_repr(d)}"
            )
        values = {
            name: _to_tuples(d[name], none_is_nan="in_" in name) for name in names
        }
        return cls(**values)

    _repr_pretty_ = show_text

    def __str__(self) -> str:
        n = len(self.seeds)
        seeds = f"{n} seeds" if n > 1 else f"{n} seed"
        lines = [
            f"quality lost ({self.quality}) by {self.base - 1} instead of {self.base} bits in one place, "
            f"{self.steps} steps, {seeds}",
            f"{'place':<24} {'lost':>9} {'w: mean [95 %]':>32} {'w used':>10}",
        ]
        for over in self._lost_by_place_kind:
            lines += self._table_rows(over)
            has_agreement = self.estimated and over != "roles"
            if has_agreement and len(self.places(over)) > 1:
                lines.append(
                    f"  rank correlation with the estimate over {over}: {self.agreement(over):+.2f}"
                )
        return "\n".join(lines)

    def _table_rows(self, over: str) -> list[str]:
        """Return a line of text for every place."""
        quality_lost = np.mean(self._lost_by_place_kind[over], axis=0)
        mean, low, high = self.estimates(over)
        uniform = self.uniform_response(over)
        weights = np.full(len(mean), np.nan)
        if uniform.sum() > 0:
            weights = self.weights(over)

        rows = []
        for i, place in enumerate(self.places(over)):
            interval = f"{mean[i]:.4g} [{low[i]:.4g}, {high[i]:.4g}]"
            row = (
                f"{place:<24} {quality_lost[i]:9.4g} {interval:>32} {weights[i]:10.4g}"
            )
            if weights[i] <= FLOOR * uniform[i] * (1 + 1e-9):
                row += " floor"
            if np.isnan(mean[i]):
                row += " diverged"
            rows.append(row)
        return rows

    @property
    def _lost_by_place_kind(self) -> dict[str, tuple[tuple[float, ...], ...]]:
        """Measured quality losses, [seed][place], over time, layers and, where measured, roles."""
        measurements = {
            "time": self.in_windows,
            "layers": self.in_groups,
            "roles": self.in_roles,
        }
        return {over: losses for over, losses in measurements.items() if losses}

    def places(self, over: str) -> list[str]:
        """Return the names of the windows, groups or roles."""
        if check_choice("over", over, PLACE_KINDS) == "time":
            return [f"steps {start} to {stop - 1}" for start, stop in self.windows]
        if over == "roles":
            return list(ROLES)
        return [g[0] if len(g) == 1 else f"{g[0]} .. {g[-1]}" for g in self.groups]

    def figure(self) -> Any:
        """Draw the responses relative to uniform ones, over time, layers and roles: a matplotlib figure."""
        figures = import_optional("cpt_extras.figures", "lab")
        place_kinds = list(self._lost_by_place_kind)
        n = len(place_kinds)
        with figures.subplots(1, n, figsize=(4.5 * n, 3.2)) as (figure, (axes,)):
            for ax, over in zip(axes, place_kinds, strict=True):
                self._draw_responses(ax, over)
            axes[0].legend(fontsize=8)
            title = (
                f"{self._headline}\n"
                f"{self.title}: {self.quality} lost by {self.base - 1} instead of {self.base} bits"
            )
            figure.suptitle(title, fontsize=9, parse_math=False)
        return figure

    def _draw_responses(self, ax: Any, over: str) -> None:
        """Draw measured, used and estimated responses, relative to uniform ones."""
        uniform = self.uniform_response(over)
        mean, low, high = self.estimates(over) / abs(uniform)
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
        if uniform.sum() > 0:
            ax.plot(
                x,
                self.weights(over) / uniform,
                "D",
                color="#D55E00",
                markersize=4,
                label="used by allocate",
            )
        if self.estimated and over != "roles":
            estimated = self._mean_estimate(over)
            shares = estimated / estimated.sum() / (uniform / uniform.sum())
            ax.plot(x, shares, "x", color="#0072B2", label="estimated from gradients")
        ax.set_xticks(x, self.places(over), rotation=30, ha="right", fontsize=8)
        ax.set_ylabel("quality lost per bit removed,\nrelative to the mean", fontsize=8)

    @property
    def _headline(self) -> str:
        """The finding over layers in a few words."""
        uniform = abs(self.uniform_response("layers"))
        mean, low, _ = self.estimates("layers") / uniform
        worst = int(np.argmax(mean))
        place = self.places("layers")[worst]
        if not np.isfinite(mean[worst]):
            return f"Training diverges with a bit less in {place}"
        if low[worst] > 1:
            return f"A bit less costs most in {place}"
        return "No layer stands out"


def _to_tuples(value: Any, none_is_nan: bool) -> Any:
    """Return nested lists as tuples, with NaN for None where ``none_is_nan``."""
    if isinstance(value, (list, tuple)):
        return tuple(_to_tuples(item, none_is_nan) for item in value)
    return float("nan") if value is None and none_is_nan else value
