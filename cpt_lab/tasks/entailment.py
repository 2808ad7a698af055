"""Natural language inference with BERT: XNLI, the user's own sentence pairs, and synthetic ones.  Paper: section 4.4.

``EntailmentTask`` trains and evaluates; ``load_encoded`` reads the sentence pairs and turns them into word pieces.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

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
# Pairs that are encoded at a time: the tokenizer's objects take far more memory than the numbers made of them.
ENCODING_BATCH = 10_000
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


class Batch(NamedTuple):
    """Encoded sentence pairs.

    Attributes:
        pieces: word pieces, (B, L) int64.
        mask: summand of attention scores, (B, 1, 1, L) float32: 0, or the smallest number where there is padding.
        sentences: number of the sentence of every piece, (B, L) int64.
        labels: (B,) int64.
    """

    pieces: Tensor
    mask: Tensor
    sentences: Tensor
    labels: Tensor


@dataclass(frozen=True)
class _EncodedData:
    """Encoded splits, with the test sets by language.

    A split holds word pieces (n, length) int32, numbers of sentences (n, length) uint8, and lengths and labels (n,)
    int64. ``vocabulary`` is the number of word pieces of the tokenizer, ``report`` says what was read, left out and
    changed.
    """

    train: TensorDataset
    valid: TensorDataset
    test: dict[str, TensorDataset]
    vocabulary: int
    title: str
    checksum: str
    report: DataReport = field(default_factory=empty_report)


class EntailmentTask:
    """AdamW with a linearly falling learning rate, cross entropy, accuracy.

    The model is ``transformers``' BERT for classification: a pretrained one from a folder on this machine, or a small
    one from scratch with word pieces learned from its own training text. All weights of a checkpoint are used, except a
    classifier for another number of labels, which is replaced by a new one.

    Paper: section 4.4.
    Differs: validation and test accuracy are both reported; the authors' script reports the validation split.
    """

    def __init__(
        self, spec: RunSpec, device: torch.device, stand_in: bool = False
    ) -> None:
        self.recipe = cast(EntailmentRecipe, spec.recipe)
        self.seed, self.device = spec.seed, device
        fields = (
            "language",
            "test_languages",
            "length",
            "checkpoint",
            "vocabulary",
            "train_pairs",
            "valid_pairs",
            "test_pairs",
        )
        self.data = (
            _random_data(self.recipe)
            if stand_in
            else load_once(load_encoded, self.recipe, *fields)
        )
        self.pretrained = bool(self.recipe.checkpoint) and not stand_in
        model_title = (
            self.recipe.checkpoint or "small BERT from scratch, WordPiece of its own,"
        )
        self.title = f"{model_title} on {self.data.title}"
        self.cost_batches = (
            8 if self.recipe.padding == "longest" else 1
        )  # batches differ in length
        self.fixed_shape = self.recipe.padding == "max"

    def build_model(self) -> nn.Module:
        """Build BERT with a classifier of three labels; its attention is eager, so that it can be quantised."""
        r, transformers = self.recipe, import_optional("transformers", "text")
        bert_class = transformers.BertForSequenceClassification
        options: dict[str, Any] = {
            "num_labels": len(PAIR_LABELS),
            "attn_implementation": "eager",
        }
        if self.pretrained:
            with _QuietTransformers():  # it would list the classifier as new
                options |= dict(ignore_mismatched_sizes=True, local_files_only=True)
                model = bert_class.from_pretrained(
                    checkpoint_folder(r.checkpoint), **options
                )
            return model.to(self.device)

        if not r.checkpoint:
            options |= dict(
                hidden_size=r.hidden,
                num_hidden_layers=r.layers,
                num_attention_heads=r.heads,
                intermediate_size=4 * r.hidden,
                max_position_embeddings=r.length,
                initializer_range=r.hidden
                ** -0.5,  # with BERT's 0.02 so narrow a model learns slowly
                hidden_dropout_prob=r.dropout,
                attention_probs_dropout_prob=r.dropout,
            )
        config = transformers.BertConfig(vocab_size=self.data.vocabulary, **options)
        return bert_class(config).to(self.device)

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield training batches from step ``start`` on, without end; the last one of an epoch may be smaller."""
        for keys in batch_keys(
            len(self.data.train), self.recipe.batch, self.seed, start
        ):
            rows = torch.tensor([index for _, index in keys])
            yield self._batch(self.data.train, rows)

    def shared_batches(
        self, start: int, share: Callable[[Tensor], Tensor]
    ) -> Iterator[Batch]:
        """Yield this process's part of every batch, as wide as the whole one."""
        return (Batch(*map(share, batch)) for batch in self.batches(start))

    def _batch(self, split: TensorDataset, rows: Tensor) -> Batch:
        pieces, sentences, lengths, labels = split[rows]
        if self.recipe.padding == "max":
            width = self.recipe.length
        else:
            width = int(lengths.max())

        # BERT itself would convert a mask of 0 and 1 to this form, which fails while operations are counted on meta
        # tensors.
        is_padding = torch.arange(width) >= lengths[:, None]
        mask = torch.zeros(len(rows), 1, 1, width)
        mask.masked_fill_(is_padding[:, None, None], torch.finfo(torch.float32).min)

        parts = (pieces[:, :width].long(), mask, sentences[:, :width].long(), labels)
        return Batch(*(to_device(part, self.device) for part in parts))

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the model's arguments: word pieces, mask, and the sentence of every piece."""
        return batch.pieces, batch.mask, batch.sentences

    def loss(self, model: nn.Module, batch: Batch, carry: None) -> tuple[Tensor, None]:
        """Return the mean cross entropy."""
        logits = model(*self.inputs(batch)).logits
        return nn.functional.cross_entropy(logits, batch.labels), None

    def evaluate(self, model: nn.Module) -> dict[str, Metrics]:
        """Return accuracy (share of pairs, 0..1) and mean cross entropy of both splits.

        "test" is the first test language; each of the other languages adds its accuracy as "accuracy_es".
        """
        (_, first), *other_languages = self.data.test.items()
        accuracies = {}
        for language, pairs in other_languages:
            accuracies[f"accuracy_{language}"] = self._measure(model, pairs)["accuracy"]
        return {
            "valid": self._measure(model, self.data.valid),
            "test": {**self._measure(model, first), **accuracies},
        }

    def _measure(self, model: nn.Module, split: TensorDataset) -> Metrics:
        def logits_and_labels() -> Iterator[tuple[Tensor, Tensor]]:
            for rows in torch.arange(len(split)).split(EVALUATION_PAIRS):
                batch = self._batch(split, rows)
                yield model(*self.inputs(batch)).logits, batch.labels

        return accuracy_and_loss(logits_and_labels(), len(split))

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LearningRate]:
        """Return AdamW and the learning rate: a line from ``lr`` to ``final_lr`` times that."""
        r = self.recipe
        adamw = make_optimizer(torch.optim.AdamW, model.parameters(), r)
        return adamw, linear(r.lr, r.final_lr, r.steps)


def checkpoint_folder(name: str) -> Path:
    """Return the folder of a pretrained BERT, by its name in the data folder or by a path.

    Raises:
        DataNotFoundError: when it is not there; nothing is downloaded.
        ValueError: when the folder holds no model, or a model other than BERT.
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
    """Context without log messages and progress bars of ``transformers``."""

    def __enter__(self) -> None:
        self.logging = import_optional("transformers", "text").utils.logging
        self.level = self.logging.get_verbosity()
        self.had_progress_bars = self.logging.is_progress_bar_enabled()
        self.logging.set_verbosity_error()
        self.logging.disable_progress_bar()

    def __exit__(self, *exception: object) -> None:
        self.logging.set_verbosity(self.level)
        if self.had_progress_bars:
            self.logging.enable_progress_bar()


def _tokenizer(recipe: EntailmentRecipe, data: EntailmentData) -> Any:
    """Return the checkpoint's tokenizer, or one with word pieces learned from the training text alone."""
    if recipe.checkpoint:
        folder = checkpoint_folder(recipe.checkpoint)
        auto = import_optional("transformers", "text").AutoTokenizer
        return auto.from_pretrained(folder, local_files_only=True).backend_tokenizer
    return _train_tokenizer(
        [*data.train["premise"], *data.train["hypothesis"]], recipe.vocabulary
    )


def _train_tokenizer(sentences: list[str], vocabulary_size: int) -> Any:
    """Return a WordPiece tokenizer that is trained on sentences."""
    tokenizers = import_optional("tokenizers", "text")
    normalizer = tokenizers.normalizers.BertNormalizer()
    word_splitter = tokenizers.pre_tokenizers.BertPreTokenizer()

    def make_tokenizer(vocabulary: dict[str, int]) -> Any:
        model = tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, word_splitter
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        return tokenizer

    # The trainer numbers the letters inside words in the order of a table that every process orders anew, and breaks
    # ties by these numbers. As special tokens they have fixed numbers, and one text gives the same pieces everywhere.
    letters_inside_words = set()
    for letter in set().union(*sentences):
        words = word_splitter.pre_tokenize_str(normalizer.normalize_str("a" + letter))
        letters_inside_words.update(words[0][0][1:])
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[
            *SPECIAL_TOKENS,
            *(f"##{x}" for x in sorted(letters_inside_words)),
        ],
        show_progress=False,
    )
    trained = make_tokenizer({})
    trained.train_from_iterator(sentences, trainer)

    # A new tokenizer with this vocabulary, in which "##a" in a text is no special token.
    tokenizer = make_tokenizer(trained.get_vocab())
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = tokenizers.processors.BertProcessing(*ends)
    return tokenizer


def _encode(
    tokenizer: Any, pairs: pd.DataFrame, length: int, name: str, report: DataReport
) -> TensorDataset:
    """Encode the sentence pairs of a split as ``length`` word pieces each.

    The report counts the pairs that are truncated, and the words that became [UNK].
    """
    tokenizer.enable_truncation(length, strategy="longest_first")
    tokenizer.enable_padding(length=length, pad_id=tokenizer.token_to_id("[PAD]") or 0)
    texts = list(zip(pairs["premise"], pairs["hypothesis"], strict=True))
    pieces = torch.empty(len(texts), length, dtype=torch.int32)
    sentences = torch.empty(len(texts), length, dtype=torch.uint8)
    lengths = torch.empty(len(texts), dtype=torch.int64)
    num_truncated = 0
    for start in range(0, len(texts), ENCODING_BATCH):
        rows = slice(start, start + ENCODING_BATCH)
        encodings = tokenizer.encode_batch(texts[rows])
        pieces[rows] = torch.tensor([e.ids for e in encodings])
        sentences[rows] = torch.tensor([e.type_ids for e in encodings])
        lengths[rows] = torch.tensor([e.attention_mask for e in encodings]).sum(1)
        num_truncated += sum(bool(e.overflowing) for e in encodings)

    if num_truncated:
        log.info(
            "%s: %d of %d pairs are longer than %d word pieces and were cut",
            name,
            num_truncated,
            len(texts),
            length,
        )
        report.add(
            "left out",
            f"{name}: word pieces of {num_truncated:,} of {len(texts):,} pairs behind the first {length}",
        )
    num_unknown = int((pieces == tokenizer.token_to_id("[UNK]")).sum())
    if num_unknown:
        report.add(
            "changed",
            f"{name}: {pluralize(num_unknown, 'word')} without word pieces became [UNK]",
        )
    labels = torch.tensor(pairs["label"].tolist())
    return TensorDataset(pieces, sentences, lengths, labels)


def load_encoded(recipe: EntailmentRecipe) -> _EncodedData:
    """Load the sentence pairs of a recipe and encode them as word pieces."""
    data = load_entailment(recipe)
    tokenizer = _tokenizer(recipe, data)

    def encode(name: str, pairs: pd.DataFrame) -> TensorDataset:
        return _encode(tokenizer, pairs, recipe.length, name, data.report)

    train = encode("train", data.train)
    valid = encode("valid", data.valid)
    test = {
        language: encode(f"test {language}", pairs)
        for language, pairs in data.test.items()
    }
    return _EncodedData(
        train=train,
        valid=valid,
        test=test,
        vocabulary=tokenizer.get_vocab_size(),
        title=data.title,
        checksum=data.checksum,
        report=data.report,
    )


def _random_data(recipe: EntailmentRecipe) -> _EncodedData:
    """Return random word pieces in the shapes of a recipe, to measure times and count operations without data."""
    multilingual_bert = 119_547  # word pieces
    vocabulary = multilingual_bert if recipe.checkpoint else recipe.vocabulary
    n, random, length = 2 * recipe.batch, seeded_generator(0), recipe.length
    pieces = torch.randint(
        len(SPECIAL_TOKENS), vocabulary, (n, length), generator=random
    ).int()
    is_second = torch.arange(length) >= length // 2
    sentences = is_second.expand(n, -1).to(torch.uint8)
    lengths = torch.randint(length // 2, length + 1, (n,), generator=random)
    labels = torch.randint(0, len(PAIR_LABELS), (n,), generator=random)
    split = TensorDataset(pieces, sentences, lengths, labels)
    return _EncodedData(
        train=split,
        valid=split,
        test=dict.fromkeys(recipe.test_languages, split),
        vocabulary=vocabulary,
        title=f"random word pieces for {recipe.dataset}",
        checksum="",
    )
