"""Parts of a task of the paper: recipes, data sets, metrics, deficits.  Needs no torch.

A task declares all of it in a file of its own, which ends in its ``EXPERIMENT``; ``recipes.EXPERIMENTS`` lists them.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cpt_core.schedules.schedule import CYCLE_RULES
from cpt_core.validation import check_choice, check_int, check_types, suggest_names
from cpt_extras.formats.ladder import LADDERS, FormatLadder, MatmulLadders
from cpt_extras.formats.recipes import Recipe as LowBitRecipe
from cpt_extras.formats.recipes import recipes

SCALES = ("smoke", "demo", "background", "paper")
PRESETS = ("ours", "authors")
EXECUTIONS = ("simulated", "integer")
DECAYS = (
    "recipe",
    "constant",
    "step",
    "cosine",
)  # of the learning rate in critical-period experiments

# Of fields that recipes had not from the start: their default is left out of specs, which keep their keys; so it stays.
LATER = {"later": True}
# rules of the learning rate of every task that is repeated in each cycle: half a cosine down, or up
CYCLIC_RULES = ("cyclic_falling", "cyclic_rising")
OPTIMIZERS = ("sgd", "adamw")
# names of the bits at which models are evaluated: q_max, and those of the last step
EIGHT_BITS, CURRENT_BITS = "8 bits", "their own bits"
RECIPE_LADDER = "recipe "  # begins names of ladders that are those of ``cpt.recipes``


_RECIPE_LADDERS = tuple(f"{RECIPE_LADDER}{name}" for name in recipes)


@dataclass(frozen=True)
class Recipe:
    """All that defines a training run besides the schedule and the seed; what every task has.

    Attributes:
        task: a key of ``EXPERIMENTS``.
        dataset: a named data set, or files of the user's own.
        model: the name of a model.
        quantized: which layers are quantised, a key of ``quantization.convert.QUANT_PRESETS``.
        steps: optimizer steps.
        batch: samples per step; the last batch of an epoch may be smaller.
        lr: learning rate at the start.
        q_min: lowest bits of the schedules; ``n_cycles`` their number of cycles.
        weight_decay: of the optimizer, on all parameters.
        clip: largest total norm of the gradient, or None.
        evaluate_every: steps between evaluations; the end is always evaluated.
        running_start: rule of the running ranges, see ``LayerPrecision``.
        cycle_rule: see ``CyclicSchedule``.
        eval_bits: "q_max" or "current": bits of every evaluation but the last, which is done at both.
        autocast: "bfloat16" computes under autocast: what passes between layers is rounded, quantised matmuls run in
            float32 as before. "" is off.
        tf32: float32 products may take TF32's 11 bits, on GPUs that have it; cuDNN's convolutions too, which else do
            so in torch. Dequantised operands are then rounded once more.
        channels_last: pictures are stored with their channels last, which changes the speed of convolutions and the
            last digits of their results.
        execution: "simulated", products in float32; or "integer", on codes, where they have an integer form. No "auto":
            a run has to say what it did.
        shared_steps: one range per tensor instead of one per row, channel or position, see ``QuantConfig``.
        ladder: what the levels of the schedule are, a key of ``formats.ladder.LADDERS``; "affine" is the paper's, where
            level q is q bits. "recipe nvfp4", or another of ``cpt.recipes``, quantises linear layers by that recipe;
            then ``quantized`` and ``running_start`` have no effect.
        wide_share: share of the linear layers, the last ones, that a recipe of ``cpt.recipes`` leaves in bfloat16. The
            very last one stays there in any case, so 0 keeps fewer than nvfp4 by itself does. BitOps count these
            layers; ``RunSpec.relative_cost`` does not.
        seeds: seeds of a full grid at this scale; no part of a single run.

    The paper has float32 only: nothing of the arithmetic is changed in its settings.
    """

    task: str
    dataset: str
    model: str
    quantized: str
    steps: int
    batch: int
    lr: float
    q_min: int
    n_cycles: int = 8
    weight_decay: float = 1e-4
    clip: float | None = None
    evaluate_every: int = 0
    running_start: str = "corrected"
    cycle_rule: str = "exact"
    eval_bits: str = "q_max"
    autocast: str = field(default="", metadata=LATER)
    tf32: bool = field(default=False, metadata=LATER)
    channels_last: bool = field(default=False, metadata=LATER)
    execution: str = field(default="simulated", metadata=LATER)
    shared_steps: bool = field(default=False, metadata=LATER)
    ladder: str = field(default="affine", metadata=LATER)
    wide_share: float = field(default=0.0, metadata=LATER)
    seeds: tuple[int, ...] = field(default=(0, 1, 2), compare=False)

    def __post_init__(self) -> None:
        if self.autocast not in ("", "bfloat16"):
            raise ValueError(
                f"autocast must be 'bfloat16', or '' for none, got {self.autocast!r}"
            )
        check_choice("execution", self.execution, EXECUTIONS)
        check_choice("ladder", self.ladder, (*LADDERS, *_RECIPE_LADDERS))
        if self.ladder in LADDERS:
            if self.wide_share:
                raise ValueError(
                    f"wide_share belongs to ladders of cpt.recipes, such as 'recipe nvfp4', got ladder {self.ladder!r}"
                )
        elif self.execution != "simulated" or self.shared_steps:
            raise ValueError(
                f"ladder {self.ladder!r}: recipes of cpt.recipes have no execution='integer' and no shared_steps"
            )
        check_choice("cycle_rule", self.cycle_rule, CYCLE_RULES)
        check_choice("eval_bits", self.eval_bits, ("q_max", "current"))
        check_types(type(self), vars(self))
        check_int("steps", self.steps, 1)
        check_int(
            "batch", self.batch, 0 if self.task == "graph" else 1
        )  # 0: the whole graph
        if not 0 <= self.wide_share <= 1:
            raise ValueError(
                f"wide_share must be a share from 0 to 1, got {self.wide_share!r}"
            )
        for name in ("lr", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} must be a number of at least 0, got {getattr(self, name)!r}"
                )

    @property
    def formats(self) -> FormatLadder | MatmulLadders:
        """The formats of the levels of a schedule."""
        if self.low_bit_recipe:
            return self.low_bit_recipe.ladders
        return LADDERS[self.ladder]

    @property
    def low_bit_recipe(self) -> LowBitRecipe | None:
        """The recipe of ``cpt.recipes`` that quantises the model; None for a ladder without a recipe."""
        if self.ladder in LADDERS:
            return None
        return recipes[self.ladder.removeprefix(RECIPE_LADDER)]

    def decay_fields(self, decay: str) -> dict[str, Any]:
        """Return the fields that give this recipe another decay of its learning rate, one of ``DECAYS``.

        Raises:
            ValueError: for a decay that recipes of this task do not have; it names those that they have.
        """
        check_choice("decay", decay, DECAYS)
        if decay == "recipe":
            return {}
        raise ValueError(
            f"decay: expected 'recipe', the only one of task {self.task!r}, got {decay!r}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, the part of a spec that its key is made of."""
        values = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "seeds" and not (f.metadata == LATER and value == f.default):
                values[f.name] = list(value) if isinstance(value, tuple) else value
        return values


@dataclass(frozen=True)
class Deficits:
    """Settings of the critical-period experiments: training at ``q_min`` bits for a while, elsewhere at q_max."""

    # fields of the recipe that differ from those of section 4; ``steps`` is the training after a deficit
    changes: dict[str, Any]
    lengths: tuple[int, ...]  # low steps at the start of training, which make it longer
    # (start, stop) of low steps within a training of ``window_steps``; all windows have one length
    windows: tuple[tuple[int, int], ...]
    window_steps: int  # see ``windows``
    # the milestones of the learning rate count from the end of a deficit at the start, not from step 0
    lr_after: bool = False
    unit: int = 1  # steps that count as one in the names of arms, ``suffix`` what is written behind them
    suffix: str = ""

    @property
    def starts(self) -> tuple[int, ...]:
        """The first steps of the windows."""
        return tuple(start for start, _ in self.windows)

    @property
    def window(self) -> int:
        """The steps of a window; 0 where there is none."""
        lengths = [stop - start for start, stop in self.windows]
        return lengths[0] if lengths else 0


@dataclass(frozen=True)
class Metric:
    """A number that tells how good a model is, and how it is printed."""

    name: str  # in rows, such as "accuracy"; after an underscore stands a further test set, as in "accuracy_es"
    label: str  # for axes
    unit: str = ""  # for tables
    factor: float = 1.0  # from stored to printed numbers
    better: int = 1  # +1 when a larger value is better, -1 when a smaller one is
    digits: int = 1  # behind the point in tables
    # what a run counts that diverged, stored: that of a model that has learned nothing, by the number of its outputs
    # (classes or words; infinite where it is not known). None where there is no such value
    worst: Callable[[float], float] | None = None

    def text(self, values: Iterable[float]) -> list[str]:
        """Return stored values as they are printed, "–" for NaN."""
        return [f"{self.factor * v:.{self.digits}f}" if v == v else "–" for v in values]


ACCURACY = Metric(
    "accuracy", "test accuracy (%)", "%", 100.0, worst=lambda classes: 1 / classes
)  # chance
LOSS = Metric(
    "loss", "test loss in nats (axis turned: up is better)", better=-1, digits=3
)  # every task has it

Changes = Mapping[
    str, Mapping[str, Any]
]  # model, or "" for all models -> fields of its recipe -> values


@dataclass(frozen=True)
class Dataset:
    """A data set with all that is known of it; without a title, recipes that other data takes, such as "own-graph"."""

    name: str  # of the data set, as ``dataset`` of a recipe
    title: str = ""  # for figures and lists of grids
    # of data that comes with the installed packages: what it is good for. All other data can be downloaded
    embedded: str = ""
    # scale -> its recipes; the first model is taken when none is named
    recipes: Mapping[str, tuple[Recipe, ...]] = field(default_factory=dict)
    like: str = ""  # the data set whose recipes it takes at scales at which it has none; "" for none
    # what the authors' scripts do where they differ from the paper's text
    authors: Changes = field(default_factory=dict)
    # scale -> model -> settings of its critical-period experiments
    deficits: Mapping[str, Mapping[str, Deficits]] = field(default_factory=dict)
    # what its first model is run with besides quality against cost: a key of ``grids.GRID_DESIGNS`` -> artefact
    designs: Mapping[str, str] = field(default_factory=dict)
    # of random data in its place, for plans: counts by name, which its data module reads
    sizes: Mapping[str, int] = field(default_factory=dict)
    folders: tuple[
        str, ...
    ] = ()  # below the data folder, one of which it is read from; () for embedded data

    @property
    def description(self) -> str:
        """Title, with the embedded stand-in if there is one."""
        return (
            f"{self.title}, embedded: {self.embedded}" if self.embedded else self.title
        )


@dataclass(frozen=True)
class Experiment:
    """A task of the paper, declared once."""

    recipe: type[Recipe]  # the class of its recipes
    task: str  # the class that trains it, "module:class", imported when it is asked for
    metrics: tuple[Metric, ...]  # the main one first
    artefact: str  # of the paper, which shows quality against cost, such as "figure_3"
    datasets: tuple[Dataset, ...]
    user_data_like: str = ""  # the data set whose recipes the user's own data takes; "" where it cannot be used
    large_user_data_like: str = (
        ""  # the same for folders at paper scale, where it differs
    )
    # what the user's own data may look like: patterns of names in a folder or archive, all of which it holds; "|"
    # stands between those of which one is enough
    layouts: tuple[str, ...] = ()
    needs: str = ""  # the same in words
    card: str = ""  # the page of ``data/cards`` on data of one's own
    extra: str = ""  # of the installation, with the libraries that this task, or some of its data, needs
    download: str = ""  # the function that gets its data, "module:function", called with (name, language)
    weights: tuple[str, ...] = ()  # pretrained models that this function gets too
    # of a model, classes or words, from its recipe in JSON form; None takes the classes of the data set
    outputs: Callable[[Mapping[str, Any]], float] | None = None
    # number of classes of the files below the data folder with which studies and stand-ins are run
    classes_by_folder: Mapping[str, int] = field(default_factory=dict)

    @property
    def metric(self) -> Metric:
        """The main metric."""
        return self.metrics[0]

    @property
    def named_datasets(self) -> dict[str, Dataset]:
        """The data sets by name, without those that are recipes alone."""
        return {d.name: d for d in self.datasets if d.title}

    def worst(self, metric: Metric, recipe: Mapping[str, Any]) -> float:
        """Return what a run of this recipe, in JSON form, counts that diverged; NaN where nothing is stated.

        Chance accuracy, or 0 for the user's own images and graphs, whose number of classes a recipe does not hold; the
        perplexity of a model to which all words are alike; no mAP.
        """
        if metric.worst is None:
            return math.nan
        if self.outputs is not None:
            return metric.worst(self.outputs(recipe))
        name = recipe["dataset"]
        if name in self.named_datasets:
            num_classes = self.named_datasets[name].sizes.get("classes", math.inf)
        else:
            num_classes = self.classes_by_folder.get(name, math.inf)
        return metric.worst(num_classes)

    def family(self, scale: str, dataset: str) -> Dataset | None:
        """Return the data set whose recipes are used at a scale; None if there are none."""
        if is_own(dataset):
            large = (
                self.large_user_data_like and scale == "paper" and ".npz" not in dataset
            )
            names: tuple[str, ...] = (
                self.large_user_data_like if large else self.user_data_like,
            )
        else:
            names = (
                (dataset, self.named_datasets[dataset].like)
                if dataset in self.named_datasets
                else ()
            )
        return next(
            (
                d
                for name in names
                for d in self.datasets
                if d.name == name and scale in d.recipes
            ),
            None,
        )

    def check_dataset(self, dataset: str) -> None:
        """Raise ValueError unless ``dataset`` is one of this task or the user's own."""
        if dataset not in self.named_datasets and not is_own(dataset):
            names = suggest_names(dataset, list(self.named_datasets))
            raise ValueError(
                f"unknown dataset {dataset!r}; {names}, or files of your own"
            )


def is_own(dataset: str) -> bool:
    """Return whether ``dataset`` names files of the user, not a known data set."""
    return (
        "/" in dataset or "\\" in dataset or dataset.endswith((".npz", ".txt", ".pt"))
    )
