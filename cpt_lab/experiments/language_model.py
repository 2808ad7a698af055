"""Language modelling.  Paper: section 4.4, figure 7.

- Penn Treebank with an LSTM of 800: 40 epochs of 1,328 steps of 20 columns of 35 words, SGD, q_min 5.
- The ten schedules and static precision, 2 cycles, q_max 6 and 8, three seeds: 66 runs.

Differs: section 4.1 of the paper has 8 cycles everywhere, section 4.4 has 2 on Penn Treebank and XNLI: so have we.

The metric is test perplexity. Embedded stand-in: characters of Python's reference text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cpt_core.validation import check_choice
from cpt_lab.experiments.schema import (
    CYCLIC_RULES,
    LATER,
    OPTIMIZERS,
    Changes,
    Dataset,
    Experiment,
    Metric,
    Recipe,
)


@dataclass(frozen=True)
class LanguageModelRecipe(Recipe):
    """Language modelling with an LSTM, or a transformer (model "llama"). ``batch`` is the number of columns of text.

    Attributes:
        length: words of a batch in every column.
        embedding: width of the embeddings of the LSTM.
        hidden: width of the LSTM or transformer, ``layers`` the number of its layers.
        dropout: on the LSTM's output, and on the embeddings unless ``drop_embedding`` is False. A transformer has none.
        lr_rule: "plateau" divides the rate by ``lr_division`` after every evaluation whose validation loss is not the
            best so far, "cosine" lowers it to ``final_lr`` times ``lr``, "step" is times 0.1 at 80 and 90 %, "constant"
            leaves it, "wsd" is warm-up, stable, decay. In every cycle "cyclic_falling" lowers it to 0,
            "cyclic_rising" raises it from 0.
        unit: "words" or "characters".
        vocabulary: how many of the most frequent words are known; None means all of the training text.
        train_tokens, valid_tokens, test_tokens: how many are used from the start of each text; None means all.
        evaluation_batch: columns in evaluation.
        optimizer: "sgd" or "adamw".
    """

    length: int = 35
    embedding: int = 800
    hidden: int = 800
    layers: int = 1
    dropout: float = 0.5
    drop_embedding: bool = True
    lr_rule: str = "plateau"
    lr_division: float = 5.0
    final_lr: float = 0.05
    unit: str = "words"
    vocabulary: int | None = None
    train_tokens: int | None = None
    valid_tokens: int | None = None
    test_tokens: int | None = None
    evaluation_batch: int = 10
    optimizer: str = field(default="sgd", metadata=LATER)

    def __post_init__(self) -> None:
        super().__post_init__()
        rules = ("plateau", "cosine", "step", "constant", "wsd", *CYCLIC_RULES)
        check_choice("lr_rule", self.lr_rule, rules)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("model", self.model, ("lstm", "llama"))
        check_choice("unit", self.unit, ("words", "characters"))
        if self.lr_rule == "plateau" and not self.evaluate_every:
            raise ValueError(
                "lr_rule 'plateau' needs evaluations: give evaluate_every, or lr_rule='cosine'"
            )

    def decay_fields(self, decay: str) -> dict[str, Any]:
        """Return the fields of a decay: "step" is times 0.1 at 80 and 90 % of the steps."""
        return (
            {"lr_rule": decay}
            if decay in ("constant", "step", "cosine")
            else super().decay_fields(decay)
        )


PTB = LanguageModelRecipe(
    task="language_model",
    dataset="ptb",
    model="lstm",
    quantized="all",
    steps=40 * 1328,
    batch=20,
    lr=20.0,
    q_min=5,
    n_cycles=2,
    weight_decay=0.0,
    clip=0.25,  # paper 4.4
    evaluate_every=1328,
)

# 2,000 words of Penn Treebank, or characters: low precision shows in seconds.
PTB_DEMO = replace(
    PTB,
    steps=120,
    q_min=2,
    embedding=64,
    hidden=128,
    dropout=0.0,
    lr_rule="cosine",
    vocabulary=2_000,
    train_tokens=100_000,
    valid_tokens=10_000,
    test_tokens=12_500,
    evaluate_every=0,
    seeds=(0, 1, 2),
)

PYDOC = replace(
    PTB_DEMO,
    dataset="pydoc",
    steps=160,
    unit="characters",
    vocabulary=None,
    train_tokens=None,
    valid_tokens=None,
    test_tokens=None,
)

AUTHORS_PTB: Changes = {
    "": dict(
        n_cycles=8,
        lr_division=4.0,
        eval_bits="current",
        running_start="zero",
        cycle_rule="floor_plus_one",
    ),
}

PERPLEXITY = Metric(
    "perplexity",
    "test perplexity (axis turned: up is better)",
    better=-1,
    worst=lambda words: words,  # of a model to which all words are alike
)


def known_words(recipe: Mapping[str, Any]) -> int:
    """Return how many words or characters a recipe's text has about, where it does not say so itself."""
    return recipe.get("vocabulary") or (
        100 if recipe.get("unit") == "characters" else 10_000
    )


EXPERIMENT = Experiment(
    recipe=LanguageModelRecipe,
    task="cpt_lab.tasks.language_model:LanguageModelTask",
    artefact="figure_7",
    metrics=(PERPLEXITY,),
    outputs=known_words,
    user_data_like="ptb",
    card="own-text.md",
    layouts=(
        "*train.txt *val*.txt|*dev.txt *test.txt",
        "*train.tokens *val*.tokens|*dev.tokens *test.tokens",
        "*train.raw *val*.raw|*dev.raw *test.raw",
        "*.txt !*.[!t]*",
    ),
    needs="one my-text.txt, or train.txt, valid.txt and test.txt",
    download="cpt_lab.data.text:download",
    datasets=(
        Dataset(
            "pydoc",
            "characters of Python's reference text",
            embedded="stands for nothing in the paper",
            recipes={
                "smoke": (
                    replace(
                        PYDOC,
                        steps=30,
                        embedding=32,
                        hidden=64,
                        valid_tokens=2_000,
                        test_tokens=4_000,
                        seeds=(0,),
                    ),
                ),
                "demo": (PYDOC,),
            },
        ),
        Dataset(
            "ptb",
            "Penn Treebank",
            folders=("ptb",),
            recipes={
                "smoke": (
                    replace(
                        PTB_DEMO,
                        steps=30,
                        train_tokens=20_000,
                        vocabulary=500,
                        valid_tokens=2_000,
                        test_tokens=4_000,
                        seeds=(0,),
                    ),
                ),
                "demo": (PTB_DEMO,),
                "paper": (PTB,),
            },
            authors=AUTHORS_PTB,
        ),
    ),
)
