"""Natural language inference with BERT: XNLI, your own sentence pairs, and synthetic ones.  Paper: section 4.4."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from cpt_extras.optional_libraries import import_optional
from cpt_lab.data.entailment import (
    CHECKPOINTS,
    PAIR_LABELS,
    EntailmentData,
    load_entailment,
)
from cpt_lab.data.files import DataNotFoundError, own_path
from cpt_lab.data.loading import load_once, to_device
from cpt_lab.data.random_streams import batch_keys, seeded_generator
from cpt_lab.data.report import DataReport, empty_report, pluralize
from cpt_lab.experiments.entailment import EntailmentRecipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import command
from cpt_lab.tasks.base import (
    LearningRate,
    Metrics,
    accuracy_and_loss,
    linear,
    make_optimizer,
)

log = logging.getLogger(__name__)
EVALUATION_PAIRS = 250
ENCODING_BATCH = 10_000  # pairs; the tokenizer's own objects take far more memory than the numbers kept of them
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")

# word pieces (B, L) int64, what is added to attention scores (B, 1, 1, L), which sentence (B, L) int64, labels (B,)
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _EncodedData:
    """Encoded splits, the test sets by language, and the number of word pieces of the tokenizer.

    Pairs as numbers: (n, length) int32 word pieces, (n, length) uint8 sentence, (n,) int64 lengths and labels.
    """

    train: TensorDataset
    valid: TensorDataset
    test: dict[str, TensorDataset]
    vocabulary: int
    title: str
    checksum: str
    report: DataReport = field(
        default_factory=empty_report
    )  # what was read, left out and changed


class EntailmentTask:
    """AdamW with a linearly falling learning rate, cross entropy, accuracy.

    The model is ``transformers``' BERT for classification: a pretrained one from a folder on this machine, or a small
    one from scratch with word pieces learned from its own training text. Of a checkpoint all is taken; a classifier
    for another number of labels, or none, is replaced by a new one.

    Paper: section 4.4.
    Differs: validation and test accuracy are both reported; the authors' script reports the validation split.
    """

    def __init__(
        self, spec: RunSpec, device: torch.device, stand_in: bool = False
    ) -> None:
        self.recipe, self.seed, self.device = (
            cast(EntailmentRecipe, spec.recipe),
            spec.seed,
            device,
        )
        limits = ("train_pairs", "valid_pairs", "test_pairs")
        made_from = (
            "language",
            "test_languages",
            "length",
            "checkpoint",
            "vocabulary",
            *limits,
        )
        self.data = (
            _random_data(self.recipe)
            if stand_in
            else load_once(load_encoded, self.recipe, *made_from)
        )
        self.pretrained = bool(self.recipe.checkpoint) and not stand_in
        kind = (
            self.recipe.checkpoint or "small BERT from scratch, WordPiece of its own,"
        )
        self.title = f"{kind} on {self.data.title}"
        self.cost_batches = (
            8 if self.recipe.padding == "longest" else 1
        )  # batches differ in length
        self.fixed_shape = self.recipe.padding == "max"

    def model(self) -> nn.Module:
        """Return BERT with a classifier of three labels; attention written out, so that it can be quantised."""
        r, transformers = self.recipe, import_optional("transformers", "text")
        build = transformers.BertForSequenceClassification
        given: dict[str, Any] = {
            "num_labels": len(PAIR_LABELS),
            "attn_implementation": "eager",
        }
        if self.pretrained:
            with _QuietTransformers():  # it would list the classifier as new
                given |= dict(ignore_mismatched_sizes=True, local_files_only=True)
                return build.from_pretrained(
                    checkpoint_folder(r.checkpoint), **given
                ).to(self.device)
        small = (
            {}
            if r.checkpoint
            else dict(
                hidden_size=r.hidden,
                num_hidden_layers=r.layers,
                num_attention_heads=r.heads,
                intermediate_size=4 * r.hidden,
                max_position_embeddings=r.length,
                initializer_range=r.hidden
                ** -0.5,  # BERT's 0.02 is too small at this width: slow to learn
                hidden_dropout_prob=r.dropout,
                attention_probs_dropout_prob=r.dropout,
            )
        )
        return build(
            transformers.BertConfig(vocab_size=self.data.vocabulary, **given, **small)
        ).to(self.device)

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield training batches from step ``start`` on, without end; the last one of an epoch may be smaller."""
        for keys in batch_keys(
            len(self.data.train), self.recipe.batch, self.seed, start
        ):
            yield self._batch(
                self.data.train, torch.tensor([number for _, number in keys])
            )

    def shared_batches(
        self, start: int, share: Callable[[Tensor], Tensor]
    ) -> Iterator[Batch]:
        """Yield a process's part of every batch, as wide as the whole one."""
        return (cast(Batch, tuple(map(share, batch))) for batch in self.batches(start))

    def _batch(self, part: TensorDataset, rows: Tensor) -> Batch:
        pieces, sentence, lengths, labels = part[rows]
        width = (
            self.recipe.length if self.recipe.padding == "max" else int(lengths.max())
        )
        # the form that BERT gives the mask itself: counting operations works on shapes alone, and cannot convert it
        hidden = torch.arange(width) >= lengths[:, None]
        mask = torch.zeros(len(rows), 1, 1, width).masked_fill_(
            hidden[:, None, None], torch.finfo(torch.float32).min
        )
        parts = pieces[:, :width].long(), mask, sentence[:, :width].long(), labels
        return cast(Batch, tuple(to_device(t, self.device) for t in parts))

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the model is called with: word pieces, mask, which sentence each belongs to."""
        return batch[:3]

    def loss(self, model: nn.Module, batch: Batch, carry: None) -> tuple[Tensor, None]:
        """Return the mean cross entropy."""
        return nn.functional.cross_entropy(
            model(*self.inputs(batch)).logits, batch[-1]
        ), None

    def evaluate(self, model: nn.Module) -> dict[str, Metrics]:
        """Return accuracy (share of pairs, 0..1) and mean cross entropy of both splits.

        "test" is the first test language; the others add their accuracy as "accuracy_es".
        """
        (_, first), *others = self.data.test.items()
        further = {
            f"accuracy_{language}": self._measure(model, part)["accuracy"]
            for language, part in others
        }
        return {
            "valid": self._measure(model, self.data.valid),
            "test": {**self._measure(model, first), **further},
        }

    def _measure(self, model: nn.Module, part: TensorDataset) -> Metrics:
        batches = (
            self._batch(part, rows)
            for rows in torch.arange(len(part)).split(EVALUATION_PAIRS)
        )
        answers = ((model(*self.inputs(batch)).logits, batch[-1]) for batch in batches)
        return accuracy_and_loss(answers, len(part))

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LearningRate]:
        """Return AdamW and the learning rate: a line from ``lr`` to ``final_lr`` times that."""
        r = self.recipe
        return make_optimizer(torch.optim.AdamW, model.parameters(), r), linear(
            r.lr, r.final_lr, r.steps
        )


def checkpoint_folder(name: str) -> Path:
    """Return the folder of a pretrained BERT: a name looked up in the data folder, or a path.

    Raises:
        DataNotFoundError: when it is not there; nothing is downloaded.
        ValueError: when it holds no model, or another one than BERT.
    """
    folder = own_path(name)
    if not folder.is_dir():
        hint = (
            f"; get it with: {command(f'download {name}')}"
            if name in CHECKPOINTS
            else ""
        )
        raise DataNotFoundError(f"there is no pretrained model in {folder}{hint}")
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no pretrained model: it has no config.json")
    kind = import_optional("transformers", "text").PretrainedConfig.get_config_dict(
        folder, local_files_only=True
    )[0]
    if kind.get("model_type") != "bert":
        raise ValueError(
            f"{folder} holds a model of type {kind.get('model_type')!r}; only 'bert' can be used"
        )
    return folder


class _QuietTransformers:
    """No reports and progress bars of ``transformers`` inside this context."""

    def __enter__(self) -> None:
        self.logging = import_optional("transformers", "text").utils.logging
        self.level, self.bars = (
            self.logging.get_verbosity(),
            self.logging.is_progress_bar_enabled(),
        )
        self.logging.set_verbosity_error()
        self.logging.disable_progress_bar()

    def __exit__(self, *exception: object) -> None:
        self.logging.set_verbosity(self.level)
        if self.bars:
            self.logging.enable_progress_bar()


def _tokenizer(recipe: EntailmentRecipe, data: EntailmentData) -> Any:
    """Return the checkpoint's tokenizer, or word pieces learned from the training text alone."""
    tokenizers = import_optional("tokenizers", "text")
    if recipe.checkpoint:
        folder = checkpoint_folder(recipe.checkpoint)
        auto = import_optional("transformers", "text").AutoTokenizer
        return auto.from_pretrained(folder, local_files_only=True).backend_tokenizer
    text = [*data.train["premise"], *data.train["hypothesis"]]
    normalizer, words = (
        tokenizers.normalizers.BertNormalizer(),
        tokenizers.pre_tokenizers.BertPreTokenizer(),
    )

    def tokenizer(vocabulary: dict[str, int]) -> Any:
        made = tokenizers.Tokenizer(
            tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]")
        )
        made.normalizer, made.pre_tokenizer = normalizer, words
        made.add_special_tokens(list(SPECIAL_TOKENS))
        return made

    # The trainer numbers the letters inside words in the order of a table that every process orders anew, and breaks
    # ties by these numbers. Named beforehand they have their numbers, and one text gives the same pieces everywhere.
    starts = (
        words.pre_tokenize_str(normalizer.normalize_str("a" + letter))
        for letter in set().union(*text)
    )
    inside = sorted({letter for found in starts for letter in found[0][0][1:]})
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[*SPECIAL_TOKENS, *(f"##{x}" for x in inside)],
        show_progress=False,
    )
    learning = tokenizer({})
    learning.train_from_iterator(text, trainer)
    made = tokenizer(
        learning.get_vocab()
    )  # anew: to this one "##a" in a text is no special token
    made.post_processor = tokenizers.processors.BertProcessing(
        *((token, made.token_to_id(token)) for token in ("[SEP]", "[CLS]"))
    )
    return made


def _encode(
    tokenizer: Any, pairs: pd.DataFrame, length: int, name: str, report: DataReport
) -> TensorDataset:
    """Encode a split once; pairs longer than ``length`` are cut and counted in the report, as unknown pieces are."""
    tokenizer.enable_truncation(length, strategy="longest_first")
    tokenizer.enable_padding(length=length, pad_id=tokenizer.token_to_id("[PAD]") or 0)
    both = list(zip(pairs["premise"], pairs["hypothesis"], strict=True))
    pieces = torch.empty(len(both), length, dtype=torch.int32)
    sentence, lengths = (
        torch.empty(len(both), length, dtype=torch.uint8),
        torch.empty(len(both), dtype=torch.int64),
    )
    cut = 0
    for start in range(0, len(both), ENCODING_BATCH):
        here = slice(start, start + ENCODING_BATCH)
        found = tokenizer.encode_batch(both[here])
        pieces[here] = torch.tensor([e.ids for e in found])
        sentence[here] = torch.tensor([e.type_ids for e in found])
        lengths[here] = torch.tensor([e.attention_mask for e in found]).sum(1)
        cut += sum(bool(e.overflowing) for e in found)
    if cut:
        log.info(
            "%s: %d of %d pairs are longer than %d word pieces and were cut",
            name,
            cut,
            len(both),
            length,
        )
        report.add(
            "left out",
            f"{name}: word pieces of {cut:,} of {len(both):,} pairs behind the first {length}",
        )
    if unknown := int((pieces == tokenizer.token_to_id("[UNK]")).sum()):
        report.add(
            "changed",
            f"{name}: {pluralize(unknown, 'word')} without word pieces became [UNK]",
        )
    return TensorDataset(
        pieces, sentence, lengths, torch.tensor(pairs["label"].tolist())
    )


def load_encoded(recipe: EntailmentRecipe) -> _EncodedData:
    """Load the data of a recipe and encode it."""
    data = load_entailment(recipe)
    tokenizer = _tokenizer(recipe, data)
    parts = {
        "train": data.train,
        "valid": data.valid,
        **{f"test {k}": pairs for k, pairs in data.test.items()},
    }
    train, valid, *test = (
        _encode(tokenizer, pairs, recipe.length, name, data.report)
        for name, pairs in parts.items()
    )
    tests = dict(zip(data.test, test, strict=True))
    return _EncodedData(
        train,
        valid,
        tests,
        tokenizer.get_vocab_size(),
        data.title,
        data.checksum,
        data.report,
    )


def _random_data(recipe: EntailmentRecipe) -> _EncodedData:
    """Return random word pieces in the shapes of a recipe, to measure times and count operations without data."""
    vocabulary = (
        119_547 if recipe.checkpoint else recipe.vocabulary
    )  # that of multilingual BERT
    n, random = 2 * recipe.batch, seeded_generator(0)
    pieces = torch.randint(
        len(SPECIAL_TOKENS), vocabulary, (n, recipe.length), generator=random
    ).int()
    sentence = (
        (torch.arange(recipe.length) >= recipe.length // 2)
        .expand(n, -1)
        .to(torch.uint8)
    )
    lengths = torch.randint(
        recipe.length // 2, recipe.length + 1, (n,), generator=random
    )
    labels = torch.randint(0, len(PAIR_LABELS), (n,), generator=random)
    part = TensorDataset(pieces, sentence, lengths, labels)
    test = dict.fromkeys(recipe.test_languages, part)
    return _EncodedData(
        part, part, test, vocabulary, f"random word pieces for {recipe.dataset}", ""
    )
