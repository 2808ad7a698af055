"""Natural language inference.  Paper: section 4.4, figure 7.

- XNLI with multilingual BERT: 2 epochs of 6,136 steps of 64 pairs, AdamW, q_min 5.
- The ten schedules and static precision, 2 cycles, q_max 6 and 8, three seeds, each at three learning rates of which
  validation data chooses: 198 runs.

Differs: section 4.4 of the paper calls ETH once a schedule of large savings; it is one of small savings (section 3.2).

The metric is test accuracy. Embedded stand-in: synthetic sentence pairs, with a small BERT from scratch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cpt_core.validation import check_choice
from cpt_lab.experiments.schema import ACCURACY, Changes, Dataset, Experiment, Recipe

NUM_LABELS = 3  # entailment, neutral and contradiction, in all data


@dataclass(frozen=True)
class EntailmentRecipe(Recipe):
    """Natural language inference with BERT, AdamW and a learning rate that falls linearly.

    Attributes:
        final_lr: learning rate at the end as a share of ``lr``.
        language: of the training and the validation text.
        test_languages: the test sets; "accuracy" is that of the first, the others are named after their language.
        length: tokens of a pair; longer pairs are cut, the longer sentence first.
        padding: "max" pads every pair to ``length``, "longest" to the longest pair of its batch. In float32 this
            changes no result; at low precision ranges then see fewer padding tokens.
        checkpoint: name or folder of a pretrained BERT; "" trains a small one from scratch.
        hidden: width of the small BERT; the inner layers are four times as wide.
        layers: encoder layers of the small BERT; ``heads`` the attention heads of each.
        dropout: of the small BERT, on hidden states and attention.
        vocabulary: largest number of word pieces of the small BERT, which are learned from the training text.
        learning_rates: those of which ``lr`` is one, when it is to be chosen on validation data; () for none.
        train_pairs, valid_pairs, test_pairs: how many are used; None means all.
    """

    final_lr: float = 0.1
    language: str = "de"
    test_languages: tuple[str, ...] = ("de",)
    length: int = 128
    padding: str = "max"
    checkpoint: str = ""
    hidden: int = 128
    layers: int = 2
    heads: int = 2
    dropout: float = 0.1
    vocabulary: int = 8_000
    learning_rates: tuple[float, ...] = ()
    train_pairs: int | None = None
    valid_pairs: int | None = None
    test_pairs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("padding", self.padding, ("max", "longest"))
        if not self.test_languages:
            raise ValueError("test_languages must name at least one language")


# Differs: the language is German, as in the authors' script (the paper names none); gradients are clipped to a norm of
# 1, the default of the trainer that the authors use.
XNLI = EntailmentRecipe(
    task="entailment",
    dataset="xnli",
    model="bert",
    quantized="all",
    steps=2 * 6136,
    batch=64,
    lr=1e-5,
    q_min=5,
    n_cycles=2,  # paper 4.4: 2 epochs of 392,702 pairs
    weight_decay=0.0,
    clip=1.0,
    checkpoint="bert-base-multilingual-cased",
    learning_rates=(5e-6, 1e-5, 5e-5),
)

PAIRS_DEMO = replace(
    XNLI,
    model="bert_small",
    steps=150,
    batch=32,
    lr=1e-3,
    q_min=2,
    n_cycles=4,
    length=48,
    padding="longest",
    checkpoint="",
    dropout=0.0,
    learning_rates=(),
    train_pairs=10_000,
    valid_pairs=1_000,
    test_pairs=1_000,
)

TEMPLATES = replace(
    PAIRS_DEMO,
    dataset="templates",
    language="en",
    test_languages=("en",),
    length=24,
    vocabulary=500,
    train_pairs=None,
    valid_pairs=None,
    test_pairs=None,
)

AUTHORS_XNLI: Changes = {
    "": dict(
        final_lr=0.0,
        lr=1e-5,
        learning_rates=(),
        eval_bits="current",
        cycle_rule="floor_plus_one",
        running_start="zero",
    ),
}


def number_of_labels(recipe: Mapping[str, Any]) -> int:
    """Return the number of labels of sentence pairs, which is that of every data set."""
    return NUM_LABELS


EXPERIMENT = Experiment(
    recipe=EntailmentRecipe,
    task="cpt_lab.tasks.entailment:EntailmentTask",
    metrics=(ACCURACY,),
    artefact="figure_7",
    outputs=number_of_labels,
    user_data_like="own-pairs",
    card="own-pairs.md",
    needs="train and test as .csv, .json or .parquet",
    layouts=(
        "XNLI-1.0/xnli.test.tsv XNLI-MT-1.0*/multinli/multinli.train.*.tsv",
        "*/train-*.parquet */test-*.parquet",
        "train.[cjp]*|train.tsv test.[cjp]*|test.tsv",
        "train-*.parquet test-*.parquet",
    ),
    extra="text",
    download="cpt_lab.data.entailment:download",
    weights=(XNLI.checkpoint,),
    datasets=(
        Dataset(
            "templates",
            "synthetic sentence pairs",
            embedded="stand for nothing in the paper",
            recipes={
                "smoke": (
                    replace(
                        TEMPLATES,
                        steps=40,
                        n_cycles=2,
                        valid_pairs=300,
                        test_pairs=300,
                        seeds=(0,),
                    ),
                ),
                "demo": (TEMPLATES,),
            },
            sizes={"classes": NUM_LABELS},
        ),
        Dataset(
            "xnli",
            "XNLI",
            recipes={"paper": (XNLI,)},
            like="own-pairs",
            authors=AUTHORS_XNLI,
            folders=("xnli",),
            designs={"cycles": "section_4.4"},
            sizes={"classes": NUM_LABELS},
        ),
        Dataset(
            "own-pairs",
            recipes={
                "smoke": (
                    replace(
                        PAIRS_DEMO,
                        steps=16,
                        n_cycles=2,
                        train_pairs=500,
                        valid_pairs=100,
                        test_pairs=100,
                        seeds=(0,),
                    ),
                ),
                "demo": (PAIRS_DEMO,),
                "paper": (XNLI,),
            },
        ),
    ),
)
