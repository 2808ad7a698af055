"""How few bits a training needs, whether a schedule helps, what it costs: how it is found, and the answer.  No torch.

Trainings that start alike are compared by seed: float32 and static precisions; then, at the fewest bits that are good
enough, two schedules of the same cost, and fewer bits for gradients. Seeds are added until all that the answer rests
on is clear, or the time is over. Beyond the paper.
"""

import itertools
import math
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from cpt_core.schedules.schedule import (
    MAX_STEPS,
    Schedule,
    ShortCycleWarning,
    StaticSchedule,
)
from cpt_core.validation import check_int, check_types
from cpt_extras.optional_libraries import import_optional
from cpt_extras.progress import progress_bar
from cpt_extras.search.solver import solve_schedule
from cpt_extras.validation import check_float

FULL, FLOAT32 = "float32", 32  # bits at which rounding is the identity
WIDTHS = (8, 6, 5, 4, 3, 2)  # static precisions
SHAPES = {
    "CR": "cosine",
    "RR": "rex",
}  # schedules of the paper, bent to the cost of static precision
GRADIENTS = (6, 5, 4)
FEWEST, MOST_SEEDS = 3, 1000  # seeds before anything is called clear, and at most


class Arm(NamedTuple):
    """A way to train: what it is called, its bits, and the arm that it is compared with."""

    name: str
    kind: str  # "static", "schedule" or "gradients"
    bits: int  # static ones, or those whose cost a schedule has
    schedule: Schedule
    q_grad: int
    against: str

    @property
    def shape(self) -> str:
        """A schedule's name without its cost."""
        return self.name.partition(" ")[0]

    @property
    def cost(self) -> float:
        """Bit operations relative to static precision at the most bits, gradients too."""
        return self.schedule.relative_cost(self.q_grad, WIDTHS[0])


class Result(NamedTuple):
    """What a training reached, larger is better, NaN if it diverged; and the seconds that it took."""

    value: float
    seconds: float


Run = Callable[
    [Sequence[Arm], int], Mapping[str, Result]
]  # arms and a seed -> results by name of an arm


@dataclass(frozen=True)
class Difference:
    """What an arm reaches minus what another does, one value a seed, and the ``margin``: too little to matter.

    A value is minus infinity where the arm has diverged, and infinity where the other alone has.
    """

    arm: Arm
    values: tuple[float, ...]
    margin: float
    unit: str = ""

    @property
    def mean(self) -> float:
        """Over seeds, NaN where none is there; of infinite ones, minus infinity counts first."""
        if not self.values:
            return math.nan
        ends = [end for end in (-math.inf, math.inf) if end in self.values]
        return ends[0] if ends else float(np.mean(self.values))

    def half(self, level: float = 0.05) -> float:
        """Return half the width of the interval of Student's t; infinity for one seed."""
        n = len(self.values)
        return (
            float(stats.t.ppf(1 - level / 2, n - 1) * stats.sem(self.values))
            if n > 1
            else math.inf
        )

    @property
    def word(self) -> str:
        """ "as good as" (the 90 % interval lies within the margin), "better than", "worse than" (95 %), "unclear"."""
        if math.isinf(self.mean):
            return "worse than" if self.mean < 0 else "better than"
        if len(self.values) < FEWEST:
            return "unclear"
        if abs(self.mean) + self.half(0.1) < self.margin:
            return "as good as"
        return (
            "unclear"
            if abs(self.mean) <= self.half()
            else "better than"
            if self.mean > 0
            else "worse than"
        )

    @property
    def needed(self) -> int:
        """About how many seeds would tell a difference as large as the margin; ``MOST_SEEDS`` stands for more."""
        spread = (
            float(np.std(self.values, ddof=1)) / self.margin
            if len(self.values) > 1
            else math.inf
        )
        seeds = np.arange(FEWEST, MOST_SEEDS)
        enough = seeds[stats.t.ppf(0.975, seeds - 1) * spread < np.sqrt(seeds)]
        return int(enough[0]) if enough.size else MOST_SEEDS

    def __str__(self) -> str:
        """Return the mean with its 95 % interval, such as "-0.21 [-0.52, +0.10] points"."""
        if math.isinf(self.mean):
            return "diverged" if self.mean < 0 else "the other diverged"
        n = len(self.values)
        mean, low, high = (
            round(x, 9) + 0.0
            for x in (self.mean, self.mean - self.half(), self.mean + self.half())
        )
        ends = (
            f"[{low:+.2g}, {high:+.2g}]"
            if n >= FEWEST
            else f"({n} seeds)"
            if n > 1
            else "(one seed)"
        )
        return f"{mean:+.2g} {ends} {self.unit}".strip()


@dataclass(frozen=True)
class PrecisionSearchResult:
    """The answer: ``print`` it, draw its ``figure()``, paste its ``lines()``.

    Attributes:
        title: what was trained.
        arms: all that could be tried, by name.
        results: of those that were, by name and seed.
        margin: what is too little to matter, in units of the results.
        unit: of the results, such as "points".
        of: what is measured, such as "accuracy".
        guessed: what the best guess reaches that knows no input.
        out_of_time: whether the time was over, or Ctrl-C came, before all was clear.
        conversion: the line that quantises the model.
    """

    title: str
    arms: Mapping[str, Arm]
    results: Mapping[str, Mapping[int, Result]]
    margin: float
    unit: str = ""
    out_of_time: bool = False
    conversion: str = "cpt.quantize_(model)"
    of: str = ""
    guessed: float = -math.inf

    def difference(self, name: str, other: str = "") -> Difference:
        """Return what an arm reaches minus what another does, by the seeds of both; ``other`` is its ``against``."""
        mine, its = (
            self.results.get(n, {}) for n in (name, other or self.arms[name].against)
        )  # float32: with none
        pairs = (
            (mine[seed].value, its[seed].value) for seed in sorted(set(mine) & set(its))
        )
        ends = {(True, False): -math.inf, (False, True): math.inf}
        values = (ends.get((math.isnan(a), math.isnan(b)), a - b) for a, b in pairs)
        return Difference(
            self.arms[name],
            tuple(v for v in values if not math.isnan(v)),
            self.margin,
            self.unit,
        )

    def _of(self, kind: str, bits: int | None = None) -> list[Difference]:
        """What was tried of a kind, against what it is compared with."""
        names = [
            a.name
            for a in self.arms.values()
            if a.kind == kind and bits in (None, a.bits)
        ]
        return [d for d in map(self.difference, names) if d.values]

    @property
    def bits(self) -> int:
        """The fewest bits that lose no more than the margin against float32, in the mean."""
        return min(
            (d.arm.bits for d in self._of("static") if d.mean >= -self.margin),
            default=WIDTHS[0],
        )

    @property
    def rival(self) -> int:
        """Bits of the static precision whose cost the schedules have: ``bits``, where there is a schedule of it."""
        return min(max(self.bits, WIDTHS[-2]), WIDTHS[1])

    @property
    def q_grad(self) -> int:
        """The fewest gradient bits that lose no more than the margin at ``bits``, in the mean."""
        found = (
            d.arm.q_grad
            for d in self._of("gradients", self.bits)
            if d.mean >= -self.margin
        )
        return min(found, default=WIDTHS[0])

    @property
    def rests_on(self) -> list[Difference]:
        """The comparisons that the answer rests on, run or not."""
        below = max((w for w in WIDTHS if w < self.bits), default=0)
        wanted = {
            ("static", self.bits),
            ("static", below),
            ("schedule", self.rival),
            ("gradients", self.bits),
        }
        return [
            self.difference(a.name)
            for a in self.arms.values()
            if (a.kind, a.bits) in wanted
        ]

    @property
    def unclear(self) -> list[Difference]:
        """Those of them that more seeds would have to tell."""
        return [d for d in self.rests_on if d.word == "unclear"]

    def sentences(self) -> dict[str, str]:
        """Return the answer in words: a sentence or two on bits, schedules, gradients, time, and what is not clear."""
        statics = {d.arm.bits: d for d in self._of("static")}
        every = [r for of_arm in self.results.values() for r in of_arm.values()]
        if not statics:
            takes = (
                f" A training takes {every[0].seconds:.0f} s; a first answer needs a dozen."
                if every
                else ""
            )
            said = "Nothing can be said: it was stopped before float32 and one precision were trained."
            return {"Bits": said + takes}
        if len({r.value for r in every}) == 1:
            return {
                "Bits": f"All {len(every)} trainings reached {self._reached}: nothing tells precisions apart."
            }
        if np.mean([r.value for r in self.results[FULL].values()]) <= self.guessed:
            said = f"Nothing can be said: in float32 it reaches {self._reached}, no more than guessing"
            return {"Bits": f"{said} ({self.guessed:.4g})."}
        bits, first, static = self.bits, statics[self.bits], f"{self.rival} bits"
        schedules = self._of("schedule", self.rival)
        about = (
            "perhaps as good as" if first.mean >= -self.margin else "perhaps worse than"
        )
        slightly = "slightly " * (
            first.word == "worse than" and first.mean >= -self.margin
        )
        told = about if first.word == "unclear" else f"{slightly}{first.word}"
        reached = f", which reaches {self._reached}" * (self.unit != "%")
        said = f"With {bits} bits it is {told} in float32{reached} ({first})."
        if lower := [d for b, d in statics.items() if b < bits][:1]:
            worse = lower[0].word.replace("unclear", "perhaps worse than")
            said += f" With {lower[0].arm.name} it is {worse} float32 ({lower[0]})."
        found = {"Bits": said}
        if self.out_of_time and not schedules:
            found["Schedule"] = "Not compared yet."
        if schedules:
            better = " and ".join(
                d.arm.shape for d in schedules if d.word == "better than"
            )
            lose = all(d.word == "worse than" for d in schedules)
            neither = (
                "schedules are clearly worse"
                if lose
                else "no schedule is clearly better"
            )
            verdict = f"{better} is clearly better" if better else neither
            effects = "; ".join(f"{d.arm.shape} {d}" for d in schedules)
            nearest = ", the nearest that schedules have," * (self.rival != bits)
            found["Schedule"] = (
                f"At the cost of {static}{nearest} {verdict} than {static} throughout. With bits that rise in cycles, "
                f"by a cosine (CR) or late (RR): {effects}."
            )
        if none := [
            shape for shape in SHAPES if f"{shape} at {self.rival}" not in self.arms
        ]:
            told = f"Not tried: {' and '.join(none)}, of which so few steps have none of exactly the cost of {static}."
            found["Schedule"] = " ".join(
                [*filter(None, [found.get("Schedule", "")]), told]
            )
        best = next(
            (d for d in self._of("gradients", bits) if d.arm.q_grad == self.q_grad),
            None,
        )
        fewer = self._of("gradients", bits)
        perhaps = "perhaps " * any(
            d.word == "unclear" for d in ([best] if best else fewer)
        )
        each = "; ".join(f"{d.arm.q_grad} bits: {d}" for d in fewer)
        keep = f"{perhaps}keep {WIDTHS[0]}, as fewer lost more ({each})"
        may = f"may {perhaps}have {self.q_grad} ({best})" if best else keep
        if fewer:
            found["Gradients"] = (
                f"With {bits} bits for weights and activations, gradients {may}."
            )
        lowered = (
            f", with {self.q_grad}-bit gradients {best.arm.cost:.2f}" if best else ""
        )
        found["Cost"] = (
            f"{bits} bits, with gradients of {WIDTHS[0]}, do {first.arm.cost:.2f} of the bit operations of {WIDTHS[0]} "
            f"bits{lowered}."
        )
        ratio = self._seconds(first.arm.name) / self._seconds(first.arm.against)
        takes = (
            f": a training takes {ratio:.1f} times float32's"
            if ratio >= 1
            else "; these were too short to time"
        )
        found["Time"] = f"None is saved, as low precision is simulated{takes}."
        if self.unclear:
            names = "; ".join(
                f"{d.arm.name} against {d.arm.against}" for d in self.unclear
            )
            seeds = max(
                (d.needed for d in self.unclear if len(d.values) >= FEWEST), default=0
            )
            count = (
                f"takes about {seeds} seeds"
                if seeds < MOST_SEEDS
                else "takes more than these seeds can say"
            )
            count = count if seeds else f"takes {FEWEST} seeds or more"
            found["Not clear"] = f"{names}. To tell {self._little} apart {count}."
        return found

    def _seconds(self, name: str) -> float:
        return float(np.median([r.seconds for r in self.results[name].values()]))

    @property
    def finding(self) -> str:
        """The answer in a few words."""
        if len(told := self.sentences()) == 1:
            return told["Bits"].partition(":")[2].strip().capitalize().rstrip(".")
        schedules = self._of("schedule", self.rival)
        helps = any(d.word == "better than" for d in schedules)
        than = f" than {self.rival} bits" * (self.rival != self.bits)
        verdict = f"{'a' if helps else 'no'} schedule is clearly better{than}"
        tried = [
            d for d in self._of("gradients", self.bits) if d.arm.q_grad == self.q_grad
        ]
        perhaps = "perhaps " * any(d.word == "unclear" for d in tried)
        gradients = (
            f", {perhaps}{self.q_grad} for gradients"
            if self._of("gradients", self.bits)
            else ""
        )
        first = self.difference(f"{self.bits} bits")
        are = "are perhaps" if first.word == "unclear" else "are"
        enough = first.mean >= -self.margin
        bits = (
            f"{self.bits} bits {are} enough{gradients}"
            if enough
            else f"Even {self.bits} bits {are} not enough"
        )
        return f"{bits}; {verdict if schedules else 'schedules were not compared'}"

    def lines(self) -> str:
        """Return the lines that train like this, with gradient bits that cost nothing; "" when nothing can be said."""
        if len(self.sentences()) == 1:
            return ""
        sure = [
            d.arm.q_grad
            for d in self._of("gradients", self.bits)
            if d.word in ("as good as", "better than")
        ]
        return (
            f"{self.conversion}\n"
            f'schedule = cpt.make_schedule("STATIC", q_max={self.bits}, total_steps=total_steps)\n'
            f"precision = cpt.PrecisionScheduler(model, schedule, q_grad={min(sure, default=WIDTHS[0])})\n"
            "precision.step()  # in your loop, after every optimizer.step()"
        )

    def __str__(self) -> str:
        counts = [len(of_arm) for of_arm in self.results.values()]
        runs, seeds, least = sum(counts), max(counts, default=0), min(counts, default=0)
        over = (
            "; stopped before all was clear" * self.out_of_time
            + "; nothing is clear with so few" * (seeds < FEWEST)
        )
        told = [f"{f'{name}:':<11}{said}" for name, said in self.sentences().items()]
        of = f"{f'{least} to ' * (least < seeds)}{seeds} seed{'s' * (seeds != 1)}"
        said = f"{runs} training{'s' * (runs != 1)}, {of}{over}"
        return "\n".join(
            [
                f"{self.title}: {said}; plus is better, {self._little} is too little to matter",
                *told,
            ]
        )

    @property
    def _little(self) -> str:
        """The margin in words."""
        unit = self.unit.removesuffix("s") if self.margin == 1 else self.unit
        return f"{self.margin:.2g} {unit}{f' of {self.of}' * bool(self.of)}".strip()

    @property
    def _reached(self) -> str:
        """What float32 reaches, in the mean."""
        full = float(np.mean([r.value for r in self.results[FULL].values()]))
        return f"{full:.4g} {'%' if self.unit == 'points' else self.unit}".strip()

    def figure(self) -> Any:
        """Draw quality against cost, as differences to float32: a matplotlib figure."""
        described = import_optional("cpt_extras.figures", "lab")
        with described.subplots(figsize=(4.8, 4)) as (figure, ((ax,),)):
            ax.axhspan(
                -self.margin,
                self.margin,
                color="#dddddd",
                linewidth=0,
                label="too little to matter",
            )
            ax.axhline(0, color="#888888", linewidth=0.8)
            for kind, bits, label, fmt, color, above in (
                ("static", None, "static bits", "o-", "#222222", 5),
                ("schedule", self.rival, "schedules", "D", "#0072B2", -10),
                (
                    "gradients",
                    self.bits,
                    f"{self.bits} bits, gradients at …",
                    "s",
                    "#D55E00",
                    5,
                ),
            ):
                found = [
                    self.difference(d.arm.name, FULL) for d in self._of(kind, bits)
                ]
                shown = [d for d in found if d.values and math.isfinite(d.mean)]
                aside = 0.012 * (
                    kind == "schedule"
                )  # where their static precision would hide them
                x, y = (
                    [d.arm.cost + aside * (i + 1) for i, d in enumerate(shown)],
                    [d.mean for d in shown],
                )
                half = [d.half() if len(d.values) >= FEWEST else 0.0 for d in shown]
                ax.errorbar(
                    x,
                    y,
                    half,
                    fmt=fmt,
                    color=color,
                    markersize=4,
                    capsize=2,
                    linewidth=1,
                    label=label,
                )
                for d, a, b in zip(shown, x, y, strict=True):
                    text = {
                        "static": d.arm.name,
                        "schedule": d.arm.shape,
                        "gradients": str(d.arm.q_grad),
                    }[kind]
                    ax.annotate(
                        text,
                        (a, b),
                        (4, above),
                        textcoords="offset points",
                        fontsize=9,
                        color=color,
                    )
            of = f" ({self.unit})" if self.unit else ""
            ax.set(
                xlabel=f"bit operations, {WIDTHS[0]} bits = 1",
                ylabel=f"difference to float32{of}, bars: 95 %",
            )
            ax.set_title(textwrap.fill(self.finding, 56), fontsize=10, loc="left")
            ax.margins(x=0.12)
            ax.legend(fontsize=9, loc="lower right")
        return figure


def _arms(steps: int, cycles: int) -> Iterator[Arm]:
    top = WIDTHS[0]
    yield Arm(FULL, "static", FLOAT32, StaticSchedule(FLOAT32, steps), FLOAT32, "")
    for b in WIDTHS:
        yield Arm(f"{b} bits", "static", b, StaticSchedule(b, steps), top, FULL)
        for g in GRADIENTS:
            yield Arm(
                f"{b} bits, gradients {g}",
                "gradients",
                b,
                StaticSchedule(b, steps),
                g,
                f"{b} bits",
            )
    for (b, below), (shape, family) in itertools.product(
        itertools.pairwise(WIDTHS[1:]), SHAPES.items()
    ):
        with warnings.catch_warnings(action="ignore", category=ShortCycleWarning):
            budget = StaticSchedule(b, steps).relative_cost(top, top)
            try:
                schedule = solve_schedule(budget, below, top, steps, cycles, family)
            except (
                ValueError
            ):  # so few steps have none of this cost; the answer says so
                continue
        yield Arm(f"{shape} at {b}", "schedule", b, schedule, top, f"{b} bits")


def run_precision_search(
    run: Run,
    title: str,
    steps: int,
    *,
    cycles: int = 4,
    margin: float | None = None,
    unit: str = "",
    minutes: float = 10,
    seeds: int = 10,
    at_once: int = 1,
    progress: bool | None = None,
) -> PrecisionSearchResult:
    """Return the answer from the trainings that ``run(arms, seed)`` does, at most ``at_once`` of them a call.

    Ctrl-C ends them early: the answer is that of what was trained.

    The other arguments are those of ``try_precision``; ``cycles`` is how many a schedule has.
    """
    check_types(run_precision_search, {"margin": margin, "progress": progress})
    seeds, cycles = (
        check_int("seeds", seeds, 1, MOST_SEEDS),
        check_int("cycles", cycles, 1, MAX_STEPS // 8),
    )
    steps = check_int("steps", steps, 8 * cycles, MAX_STEPS)  # a cycle of fewer is none
    for name, value in (
        ("minutes", minutes),
        ("margin", 1.0 if margin is None else margin),
    ):
        if (
            isinstance(value, (bool, str))
            or not 0 < check_float(f"{name} must be more than 0", value) < math.inf
        ):
            raise ValueError(f"{name} must be a number of more than 0, got {value!r}")
    arms = {a.name: a for a in _arms(steps, cycles)}
    results: dict[str, dict[int, Result]] = {}
    ends, longest = time.monotonic() + 60 * minutes, 0.0

    def now(over: bool = False) -> PrecisionSearchResult:
        reached = [r.value for r in results.get(FULL, {}).values()]
        much = margin or 0.01 * abs(float(np.mean(reached or [1.0]))) or 1.0
        return PrecisionSearchResult(title, arms, results, much, unit, over)

    def train(names: Sequence[str], last: int) -> bool:
        """Train what seeds up to the last one lack; return whether there was time."""
        nonlocal longest
        todo = [
            (seed, n)
            for seed in range(last + 1)
            for n in dict.fromkeys(names)
            if seed not in results.get(n, {})
        ]
        for seed, group in itertools.groupby(todo, key=lambda pair: pair[0]):
            of_seed = [arms[n] for _, n in group]
            for start in range(0, len(of_seed), at_once):
                part, began = of_seed[start : start + at_once], time.monotonic()
                if began + longest > ends:
                    return False
                bar.set_postfix_str(
                    f"{part[0].name}, seed {seed}; {max(0, ends - began) / 60:.0f} min left at most"
                )
                for name, result in run(part, seed).items():
                    results.setdefault(name, {})[seed] = result
                if any(
                    not math.isfinite(r.value) for r in results.get(FULL, {}).values()
                ):
                    raise ValueError(
                        "in float32 training diverges, or its evaluation gives no finite number"
                    )
                longest = max(longest, time.monotonic() - began)
                bar.update(len(part))
        return True

    in_time = True
    try:
        with progress_bar("trying", unit=" trainings", progress=progress) as bar:
            for seed in range(seeds):
                if seed < FEWEST:
                    in_time = train(
                        [a.name for a in arms.values() if a.kind == "static"], seed
                    )
                    in_time = in_time and train(
                        [d.arm.name for d in now().rests_on], seed
                    )
                else:
                    in_time = train(
                        [n for d in now().unclear for n in (d.arm.against, d.arm.name)],
                        seed,
                    )
                if not in_time or (seed + 1 >= FEWEST and not now().unclear):
                    break
    except KeyboardInterrupt:
        if not results:
            raise
        in_time = False
    return now(over=not in_time)
