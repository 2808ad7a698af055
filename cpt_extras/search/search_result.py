"""Result of a precision search: the fewest good bits, whether a schedule helps, what it costs.  Beyond the paper.

It contains the arms of a search (``Arm``: one way to train), the ``Result`` of a training, the ``Difference`` between
two arms over seeds, and the ``PrecisionSearchResult`` that puts them into words, a figure and code to paste. The arms
are trained by ``search_loop``. This module needs no torch.
"""

import math
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from cpt_core.schedules.schedule import Schedule
from cpt_core.text_repr import show_text
from cpt_extras.former_names import FormerName
from cpt_extras.optional_libraries import import_optional

FLOAT32_ARM = "float32"
STATIC_BITS = (8, 6, 5, 4, 3, 2)  # of the arms with static precision, falling
SCHEDULE_FAMILIES = {  # schedules of the paper, bent to the cost of static precision
    "CR": "cosine",
    "RR": "rex",
}
MIN_SEEDS = 3  # no difference is called clear with fewer seeds
MAX_SEEDS = 1000
POWER = 0.8  # of the test for which ``seeds_needed`` counts seeds


class Arm(NamedTuple):
    """A way to train: its name, its bits, and the arm that it is compared with.

    Attributes:
        name: such as "4 bits", "CR at 4", "4 bits, gradients 5".
        kind: "static", "schedule" or "gradients".
        bits: bits of static precision; for a schedule those of the static precision that costs as much.
        schedule: of the bits of weights and activations.
        q_grad: gradient bits.
        baseline: name of the arm that this one is compared with; "" for float32.
    """

    name: str
    kind: str
    bits: int
    schedule: Schedule
    q_grad: int
    baseline: str

    @property
    def against(self) -> Any:
        """Former name of ``baseline``."""
        warnings.warn("Arm.against is now baseline", DeprecationWarning, stacklevel=2)
        return self.baseline

    @property
    def shape(self) -> str:
        """Name of a schedule without its cost."""
        return self.name.partition(" ")[0]

    @property
    def cost(self) -> float:
        """Bit operations relative to static precision at the most bits, gradients too."""
        return self.schedule.relative_cost(self.q_grad, STATIC_BITS[0])


class Result(NamedTuple):
    """Result of one training: its quality and its duration.

    Attributes:
        value: quality after the training, larger is better; NaN if the training diverged.
        seconds: duration of the training.
    """

    value: float
    seconds: float


@dataclass(frozen=True)
class Difference:
    """Differences of quality between two arms, one value a seed.

    A value is minus infinity where the arm has diverged, and infinity where the other alone has.

    Attributes:
        arm: the first arm, from which the second one is subtracted.
        values: the differences, ordered by seed.
        margin: largest difference that is too small to matter.
        unit: of the values, such as "points".
    """

    arm: Arm
    values: tuple[float, ...]
    margin: float
    unit: str = ""

    word = FormerName("word", "verdict")
    half = FormerName("half", "ci_halfwidth")
    needed = FormerName("needed", "seeds_needed")

    @property
    def mean(self) -> float:
        """Mean over seeds; NaN without seeds; minus infinity or infinity where a value is infinite, in this order."""
        if not self.values:
            return math.nan
        for end in (-math.inf, math.inf):
            if end in self.values:
                return end
        return float(np.mean(self.values))

    def ci_halfwidth(self, level: float = 0.05) -> float:
        """Return half the width of Student's confidence interval at a significance ``level``; infinity for one seed."""
        n = len(self.values)
        if n < 2:
            return math.inf
        return float(stats.t.ppf(1 - level / 2, n - 1) * stats.sem(self.values))

    @property
    def verdict(self) -> str:
        """The comparison in words: "as good as", "better than", "worse than" or "unclear".

        "as good as" needs a 90 % interval within the margin (a test of equivalence at 5 %), "better than" and "worse
        than" a 95 % interval on one side of zero.
        """
        if math.isinf(self.mean):
            return "worse than" if self.mean < 0 else "better than"
        if len(self.values) < MIN_SEEDS:
            return "unclear"
        if abs(self.mean) + self.ci_halfwidth(0.1) < self.margin:
            return "as good as"
        if abs(self.mean) <= self.ci_halfwidth():
            return "unclear"
        return "better than" if self.mean > 0 else "worse than"

    @property
    def seeds_needed(self) -> int:
        """Estimated number of seeds, at most ``MAX_SEEDS``, that detect a difference of the margin with 80 % power."""
        if len(self.values) < 2:
            return MAX_SEEDS

        relative_std = float(np.std(self.values, ddof=1)) / self.margin
        seeds = np.arange(MIN_SEEDS, MAX_SEEDS)
        quantiles = stats.t.ppf(0.975, seeds - 1) + stats.t.ppf(POWER, seeds - 1)
        enough = seeds[quantiles * relative_std < np.sqrt(seeds)]
        return int(enough[0]) if enough.size else MAX_SEEDS

    _repr_pretty_ = show_text

    def __str__(self) -> str:
        """Return the mean with its 95 % interval, such as "-0.21 [-0.52, +0.10] points"."""
        if math.isinf(self.mean):
            return "diverged" if self.mean < 0 else "the other diverged"

        n = len(self.values)
        mean = _without_negative_zero(self.mean)
        low = _without_negative_zero(self.mean - self.ci_halfwidth())
        high = _without_negative_zero(self.mean + self.ci_halfwidth())
        if n >= MIN_SEEDS:
            interval = f"[{low:+.2g}, {high:+.2g}]"
        elif n > 1:
            interval = f"({n} seeds)"
        else:
            interval = "(one seed)"
        return f"{mean:+.2g} {interval} {self.unit}".strip()


def _without_negative_zero(number: float) -> float:
    """Round a number to nine digits, so that what is left of the arithmetic prints as +0."""
    return round(number, 9) + 0.0


def _value_difference(value: float, baseline: float) -> float:
    """Return the difference of two qualities: infinite where one is NaN (diverged), NaN where both are."""
    if math.isnan(value) and not math.isnan(baseline):
        return -math.inf
    if math.isnan(baseline) and not math.isnan(value):
        return math.inf
    return value - baseline


@dataclass(frozen=True)
class PrecisionSearchResult:
    """The answer of a precision search: ``print`` it, draw its ``figure()``, paste its ``code()``.

    Attributes:
        title: name of the model and data.
        arms: every arm that the search could train, by name.
        results: results of the arms that were trained, by name and seed.
        margin: largest difference that is too small to matter, in units of the results.
        unit: of the results, such as "points".
        out_of_time: whether the time was over, or Ctrl-C came, before all was clear.
        conversion: the line of code that quantises the model.
        metric: name of the quality that is measured, such as "accuracy".
        chance_level: quality of the best guess that knows no input.
    """

    title: str
    arms: Mapping[str, Arm]
    results: Mapping[str, Mapping[int, Result]]
    margin: float
    unit: str = ""
    out_of_time: bool = False
    conversion: str = "cpt.quantize_(model)"
    metric: str = ""
    chance_level: float = -math.inf

    of = FormerName("of", "metric")
    guessed = FormerName("guessed", "chance_level")
    rival = FormerName("rival", "matched_bits")
    rests_on = FormerName("rests_on", "deciding_comparisons")
    finding = FormerName("finding", "headline")
    lines = FormerName("lines", "code")

    def difference(self, name: str, other: str = "") -> Difference:
        """Return the differences of quality between an arm and an ``other``, by default its baseline."""
        arm = self.arms[name]
        arm_results = self.results.get(name, {})
        baseline_results = self.results.get(other or arm.baseline, {})

        differences = [
            _value_difference(arm_results[seed].value, baseline_results[seed].value)
            for seed in sorted(arm_results.keys() & baseline_results.keys())
        ]
        values = tuple(value for value in differences if not math.isnan(value))
        return Difference(arm, values, self.margin, self.unit)

    def _comparisons(self, kind: str, bits: int | None = None) -> list[Difference]:
        """List the trained arms of a kind, and of certain bits unless None, against their baselines."""
        arms = [arm for arm in self.arms.values() if arm.kind == kind]
        if bits is not None:
            arms = [arm for arm in arms if arm.bits == bits]
        differences = [self.difference(arm.name) for arm in arms]
        return [d for d in differences if d.values]

    @property
    def bits(self) -> int:
        """The fewest bits that lose no more than the margin against float32, in the mean."""
        good_bits = [
            d.arm.bits for d in self._comparisons("static") if d.mean >= -self.margin
        ]
        return min(good_bits, default=STATIC_BITS[0])

    @property
    def matched_bits(self) -> int:
        """Bits of the static precision that costs as much as the schedules: ``bits``, where schedules can cost that."""
        return min(max(self.bits, STATIC_BITS[-2]), STATIC_BITS[1])

    @property
    def q_grad(self) -> int:
        """The fewest gradient bits that lose no more than the margin at ``bits``, in the mean."""
        good_bits = [
            d.arm.q_grad
            for d in self._comparisons("gradients", self.bits)
            if d.mean >= -self.margin
        ]
        return min(good_bits, default=STATIC_BITS[0])

    @property
    def deciding_comparisons(self) -> list[Difference]:
        """The comparisons on which the answer rests, trained or not."""
        next_lower_bits = max((b for b in STATIC_BITS if b < self.bits), default=0)
        deciding = {
            ("static", self.bits),
            ("static", next_lower_bits),
            ("schedule", self.matched_bits),
            ("gradients", self.bits),
        }
        return [
            self.difference(arm.name)
            for arm in self.arms.values()
            if (arm.kind, arm.bits) in deciding
        ]

    @property
    def unclear(self) -> list[Difference]:
        """The deciding comparisons that more seeds would have to settle."""
        return [d for d in self.deciding_comparisons if d.verdict == "unclear"]

    def sentences(self) -> dict[str, str]:
        """Return the answer in words, by subject: bits, schedules, gradients, cost, time, and what is not clear."""
        if no_answer := self._no_answer_sentence():
            return {"Bits": no_answer}

        by_subject = {
            "Bits": self._bits_sentence(),
            "Schedule": self._schedule_sentence(),
            "Gradients": self._gradients_sentence(),
            "Cost": self._cost_sentence(),
            "Time": self._time_sentence(),
            "Not clear": self._unclear_sentence(),
        }
        return {subject: text for subject, text in by_subject.items() if text}

    def _no_answer_sentence(self) -> str:
        """Return the reason why these results allow no answer; "" when they do."""
        results = [r for by_seed in self.results.values() for r in by_seed.values()]
        if not self._comparisons("static"):
            text = "Nothing can be said: it was stopped before float32 and one precision were trained."
            if results:
                text += f" A training takes {results[0].seconds:.0f} s; a first answer needs a dozen."
            return text
        if len({r.value for r in results}) == 1:
            return f"All {len(results)} trainings reached {self._float32_text}: nothing tells precisions apart."
        float32_values = [r.value for r in self.results[FLOAT32_ARM].values()]
        if np.mean(float32_values) <= self.chance_level:
            return (
                f"Nothing can be said: in float32 it reaches {self._float32_text}, no more than guessing "
                f"({self.chance_level:.4g})."
            )
        return ""

    def _bits_sentence(self) -> str:
        statics = {d.arm.bits: d for d in self._comparisons("static")}
        static = statics[self.bits]
        good_enough = static.mean >= -self.margin
        if static.verdict == "unclear":
            verdict = "perhaps as good as" if good_enough else "perhaps worse than"
        elif static.verdict == "worse than" and good_enough:
            verdict = "slightly worse than"
        else:
            verdict = static.verdict

        float32 = "" if self.unit == "%" else f", which reaches {self._float32_text}"
        text = f"With {self.bits} bits it is {verdict} in float32{float32} ({static})."
        lower = [d for bits, d in statics.items() if bits < self.bits]
        if lower:
            next_lower = lower[0]
            verdict = next_lower.verdict.replace("unclear", "perhaps worse than")
            text += (
                f" With {next_lower.arm.name} it is {verdict} float32 ({next_lower})."
            )
        return text

    def _schedule_sentence(self) -> str:
        schedules = self._comparisons("schedule", self.matched_bits)
        untried = [
            shape
            for shape in SCHEDULE_FAMILIES
            if f"{shape} at {self.matched_bits}" not in self.arms
        ]

        texts = []
        if self.out_of_time and not schedules:
            texts.append("Not compared yet.")
        if schedules:
            texts.append(self._schedule_comparison(schedules))
        if untried:
            texts.append(
                f"Not tried: {' and '.join(untried)}, of which so few steps have none of exactly the cost of "
                f"{self.matched_bits} bits."
            )
        return " ".join(texts)

    def _schedule_comparison(self, schedules: list[Difference]) -> str:
        """Compare schedules with static precision of equal cost, in two sentences."""
        better = [d.arm.shape for d in schedules if d.verdict == "better than"]
        if better:
            verb = "is" if len(better) == 1 else "are"
            verdict = f"{' and '.join(better)} {verb} clearly better"
        elif all(d.verdict == "worse than" for d in schedules):
            verdict = "schedules are clearly worse"
        else:
            verdict = "no schedule is clearly better"

        static = f"{self.matched_bits} bits"
        nearest = (
            ""
            if self.matched_bits == self.bits
            else ", the nearest that schedules have,"
        )
        effects = "; ".join(f"{d.arm.shape} {d}" for d in schedules)
        return (
            f"At the cost of {static}{nearest} {verdict} than {static} throughout. With bits that rise in cycles, "
            f"by a cosine (CR) or late (RR): {effects}."
        )

    @property
    def _best_gradients(self) -> Difference | None:
        """Comparison of the static gradient bits, None where gradients keep the most bits."""
        for comparison in self._comparisons("gradients", self.bits):
            if comparison.arm.q_grad == self.q_grad:
                return comparison
        return None

    def _gradients_sentence(self) -> str:
        comparisons = self._comparisons("gradients", self.bits)
        if not comparisons:
            return ""

        best = self._best_gradients
        decisive = [best] if best else comparisons
        perhaps = "perhaps " if any(d.verdict == "unclear" for d in decisive) else ""
        if best:
            advice = f"may {perhaps}have {self.q_grad} ({best})"
        else:
            losses = "; ".join(f"{d.arm.q_grad} bits: {d}" for d in comparisons)
            advice = f"{perhaps}keep {STATIC_BITS[0]}, as fewer lost more ({losses})"
        return f"With {self.bits} bits for weights and activations, gradients {advice}."

    def _cost_sentence(self) -> str:
        top = STATIC_BITS[0]
        static = self.arms[f"{self.bits} bits"]
        text = f"{self.bits} bits, with gradients of {top}, do {static.cost:.2f} of the bit operations of {top} bits"
        best = self._best_gradients
        if best:
            text += f", with {self.q_grad}-bit gradients {best.arm.cost:.2f}"
        return f"{text}."

    def _time_sentence(self) -> str:
        static = self.arms[f"{self.bits} bits"]
        ratio = self._median_seconds(static.name) / self._median_seconds(
            static.baseline
        )
        if ratio >= 1:
            duration = f": a training takes {ratio:.1f} times float32's"
        else:
            duration = "; these were too short to time"
        return f"None is saved, as low precision is simulated{duration}."

    def _unclear_sentence(self) -> str:
        unclear = self.unclear
        if not unclear:
            return ""

        names = "; ".join(f"{d.arm.name} against {d.arm.baseline}" for d in unclear)
        seeds = [d.seeds_needed for d in unclear if len(d.values) >= MIN_SEEDS]
        if not seeds:
            effort = f"takes {MIN_SEEDS} seeds or more"
        elif max(seeds) < MAX_SEEDS:
            effort = f"takes about {max(seeds)} seeds"
        else:
            effort = "takes more than these seeds can say"
        return f"{names}. To tell {self._margin_text} apart {effort}."

    def _median_seconds(self, name: str) -> float:
        return float(np.median([r.seconds for r in self.results[name].values()]))

    @property
    def headline(self) -> str:
        """The answer in a few words."""
        no_answer = self._no_answer_sentence()
        if no_answer:
            return no_answer.partition(":")[2].strip().capitalize().rstrip(".")

        return f"{self._bits_headline()}; {self._schedule_headline()}"

    def _bits_headline(self) -> str:
        static = self.difference(f"{self.bits} bits")
        are = "are perhaps" if static.verdict == "unclear" else "are"
        if static.mean < -self.margin:
            return f"Even {self.bits} bits {are} not enough"
        if not self._comparisons("gradients", self.bits):
            return f"{self.bits} bits {are} enough"

        best = self._best_gradients
        perhaps = "perhaps " if best and best.verdict == "unclear" else ""
        return f"{self.bits} bits {are} enough, {perhaps}{self.q_grad} for gradients"

    def _schedule_headline(self) -> str:
        schedules = self._comparisons("schedule", self.matched_bits)
        if not schedules:
            return "schedules were not compared"

        helps = any(d.verdict == "better than" for d in schedules)
        text = f"{'a' if helps else 'no'} schedule is clearly better"
        if self.matched_bits != self.bits:
            text += f" than {self.matched_bits} bits"
        return text

    def code(self) -> str:
        """Return code that trains with these bits, and gradient bits that surely cost nothing; "" without an answer."""
        if self._no_answer_sentence():
            return ""

        safe_gradient_bits = [
            d.arm.q_grad
            for d in self._comparisons("gradients", self.bits)
            if d.verdict in ("as good as", "better than")
        ]
        q_grad = min(safe_gradient_bits, default=STATIC_BITS[0])
        return (
            f"{self.conversion}\n"
            f'schedule = cpt.make_schedule("STATIC", q_max={self.bits}, total_steps=total_steps)\n'
            f"precision = cpt.PrecisionScheduler(model, schedule, q_grad={q_grad})\n"
            "precision.step()  # in your loop, after every optimizer.step()"
        )

    _repr_pretty_ = show_text

    def __str__(self) -> str:
        sentences = [
            f"{f'{subject}:':<11}{text}" for subject, text in self.sentences().items()
        ]
        first_line = f"{self.title}: {self._effort_text}; plus is better, {self._margin_text} is too little to matter"
        return "\n".join([first_line, *sentences])

    @property
    def _effort_text(self) -> str:
        """Numbers of trainings and seeds in words, with what limits the answer."""
        seed_counts = [len(by_seed) for by_seed in self.results.values()]
        trainings = sum(seed_counts)
        min_seeds, max_seeds = min(seed_counts, default=0), max(seed_counts, default=0)

        text = f"{trainings} training" if trainings == 1 else f"{trainings} trainings"
        text += (
            f", {min_seeds} to {max_seeds}"
            if min_seeds < max_seeds
            else f", {max_seeds}"
        )
        text += " seed" if max_seeds == 1 else " seeds"
        if self.out_of_time:
            text += "; stopped before all was clear"
        if max_seeds < MIN_SEEDS:
            text += "; nothing is clear with so few"
        return text

    @property
    def _margin_text(self) -> str:
        """The margin with its unit, such as "1 point of accuracy"."""
        unit = self.unit.removesuffix("s") if self.margin == 1 else self.unit
        metric = f" of {self.metric}" if self.metric else ""
        return f"{self.margin:.2g} {unit}{metric}".strip()

    @property
    def _float32_text(self) -> str:
        """Mean quality in float32, with its unit."""
        mean = float(np.mean([r.value for r in self.results[FLOAT32_ARM].values()]))
        return f"{mean:.4g} {'%' if self.unit == 'points' else self.unit}".strip()

    def figure(self) -> Any:
        """Draw quality against cost, as differences to float32: a matplotlib figure."""
        figures = import_optional("cpt_extras.figures", "lab")
        with figures.subplots(figsize=(4.8, 4)) as (figure, ((ax,),)):
            ax.axhspan(
                -self.margin,
                self.margin,
                color="#dddddd",
                linewidth=0,
                label="too little to matter",
            )
            ax.axhline(0, color="#888888", linewidth=0.8)
            for series in (
                _Series("static", None, "static bits", "o-", "#222222", "below"),
                _Series(
                    "schedule", self.matched_bits, "schedules", "D", "#0072B2", "above"
                ),
                _Series(
                    "gradients",
                    self.bits,
                    f"{self.bits} bits, gradients at …",
                    "s",
                    "#D55E00",
                    "above",
                ),
            ):
                self._draw(ax, series)
            unit = f" ({self.unit})" if self.unit else ""
            ax.set(
                xlabel=f"bit operations, {STATIC_BITS[0]} bits = 1",
                ylabel=f"difference to float32{unit}, bars: 95 %",
            )
            ax.set_title(textwrap.fill(self.headline, 56), fontsize=10, loc="left")
            ax.margins(x=0.12, y=0.1)
            ax.legend(fontsize=9, loc="lower right")
        return figure

    def _draw(self, ax: Any, series: "_Series") -> None:
        """Draw the arms of a series with error bars and labels."""
        names = [d.arm.name for d in self._comparisons(series.kind, series.bits)]
        to_float32 = [self.difference(name, FLOAT32_ARM) for name in names]
        finite = [d for d in to_float32 if d.values and math.isfinite(d.mean)]

        # schedules are moved aside, as their static precision would hide them
        aside = 0.012 if series.kind == "schedule" else 0.0
        costs = [d.arm.cost + aside * (i + 1) for i, d in enumerate(finite)]
        means = [d.mean for d in finite]
        halfwidths = [
            d.ci_halfwidth() if len(d.values) >= MIN_SEEDS else 0.0 for d in finite
        ]
        ax.errorbar(
            costs,
            means,
            halfwidths,
            fmt=series.fmt,
            color=series.color,
            markersize=4,
            capsize=2,
            linewidth=1,
            label=series.label,
        )
        for i, (difference, cost) in enumerate(zip(finite, costs, strict=True)):
            arm = difference.arm
            is_above = series.text_place == "above"
            # schedules of almost one cost stand beside each other
            x_offset = 14 * i if series.kind == "schedule" else 0
            text_by_kind = {
                "static": arm.name,
                "schedule": arm.shape,
                "gradients": str(arm.q_grad),
            }
            ax.annotate(
                text_by_kind[arm.kind],
                (cost, means[i] + (halfwidths[i] if is_above else -halfwidths[i])),
                (x_offset, 3 if is_above else -3),
                textcoords="offset points",
                ha="center",
                va="bottom" if is_above else "top",
                fontsize=9,
                color=series.color,
            )


class _Series(NamedTuple):
    """Arms that a figure draws alike.

    Attributes:
        kind: of the arms, see ``Arm``.
        bits: of the arms; None for all.
        label: in the legend.
        fmt: matplotlib's format of the markers.
        color: of markers and texts.
        text_place: of the texts: "below" or "above" the error bars.
    """

    kind: str
    bits: int | None
    label: str
    fmt: str
    color: str
    text_place: str
