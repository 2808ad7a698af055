"""Language modelling on Penn Treebank, characters or the user's own text.  Paper: section 4.4."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from cpt_core.models.lstm_lm import LanguageModel, State
from cpt_extras.optional_libraries import explain_missing_extra
from cpt_lab.data.loading import load_once, to_device
from cpt_lab.data.text import batchify, evaluation_columns, load_text, random_text
from cpt_lab.experiments.language_model import LanguageModelRecipe
from cpt_lab.experiments.schema import CYCLIC_RULES
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.tasks.base import (
    LearningRate,
    Metrics,
    constant,
    cosine,
    cyclic,
    make_optimizer,
    milestones,
    plateau,
    sum_batches,
    warmup_stable_decay,
)
from cpt_lab.tasks.transformer_models import CausalLanguageModel


class Batch(NamedTuple):
    """Words (T, B), the words after them (T, B), and whether an epoch begins."""

    words: Tensor
    targets: Tensor
    starts_epoch: bool


class LanguageModelTask:
    """Perplexity over all words of a text, trained with clipped gradients.

    The text runs in ``batch`` columns side by side, and the hidden state is carried from batch to batch of an epoch. A
    transformer has no state: it sees ``length`` words and those before them in the batch alone.

    Paper: section 4.4.
    Differs: the learning rate is cut by what evaluation at q_max bits says; the authors' rule sees the bits of the
        step, and cuts after a cycle has begun anew (``eval_bits="current"``). It is cut where the validation loss is
        not the best so far, as in the authors' script; the paper's words are that it does not improve between epochs.
    Differs: dropout also on the embeddings, as the authors' code and the settings it follows have it
        (``drop_embedding=False`` for the paper's text).
    Differs: perplexity counts every word of a text; the authors leave out the first word of every column.
    """

    cost_batches = 1
    fixed_shape = True

    def __init__(
        self, spec: RunSpec, device: torch.device, stand_in: bool = False
    ) -> None:
        self.recipe, self.device = cast(LanguageModelRecipe, spec.recipe), device
        limits = (
            "unit",
            "vocabulary",
            "train_tokens",
            "valid_tokens",
            "test_tokens",
            "batch",
        )
        self.data = (
            random_text(self.recipe)
            if stand_in
            else load_once(load_text, self.recipe, *limits)
        )
        self.columns = batchify(self.data.train, self.recipe.batch).to(device)
        name = "Llama" if self.recipe.model == "llama" else "LSTM"
        self.title = f"{name} ({self.recipe.hidden} wide) on {self.data.title}"

    def build_model(self) -> nn.Module:
        """Build the recipe's model."""
        r = self.recipe
        words = len(self.data.vocabulary)
        if r.model == "llama":
            with explain_missing_extra("text"):
                model = CausalLanguageModel(words, r.hidden, r.layers, r.length)
            return model.to(self.device)
        return LanguageModel(
            words, r.embedding, r.hidden, r.layers, r.dropout, r.drop_embedding
        ).to(self.device)

    def batches(self, start: int) -> Iterator[Batch]:
        """Yield training batches from step ``start`` on, without end; the last one of an epoch may be shorter."""
        length, last = self.recipe.length, len(self.columns) - 1
        batches_per_epoch = math.ceil(last / length)
        for step in itertools.count(start):
            begin = step % batches_per_epoch * length
            end = min(begin + length, last)
            words = self.columns[begin:end]
            targets = self.columns[begin + 1 : end + 1]
            yield Batch(words, targets, begin == 0)

    def loss(
        self, model: nn.Module, batch: Batch, carry: State | None
    ) -> tuple[Tensor, State | None]:
        """Return the mean cross entropy (nats per word) and the state for the next batch."""
        logits, state = model(batch.words, None if batch.starts_epoch else carry)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten()
        )
        return loss, state and (state[0].detach(), state[1].detach())

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the model's arguments: words and no state."""
        return batch.words, None

    def evaluate(self, model: nn.Module) -> dict[str, Metrics]:
        """Return perplexity and loss (nats per word) of both splits."""
        return {
            name: self._measure(model, getattr(self.data, name))
            for name in ("valid", "test")
        }

    @torch.no_grad()
    def _measure(self, model: nn.Module, tokens: Tensor) -> Metrics:
        r = self.recipe
        columns = evaluation_columns(tokens, self.data.start, r.evaluation_batch)
        words, targets = (to_device(x, self.device) for x in columns)

        def losses() -> Iterator[tuple[Tensor]]:
            state = None
            for x, y in zip(
                words.split(r.length), targets.split(r.length), strict=True
            ):
                logits, state = model(x, state)
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), y.flatten(), reduction="sum"
                )
                yield (loss,)

        (total,) = sum_batches(losses())
        loss = total / len(tokens)
        return {"perplexity": math.exp(min(loss, 700.0)), "loss": loss}

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, LearningRate]:
        """Return the optimizer and the learning rate by the recipe's rule."""
        r = self.recipe
        trained = (p for p in model.parameters() if p.requires_grad)
        optimizer = make_optimizer(torch.optim.SGD, trained, r)
        if r.lr_rule in CYCLIC_RULES:
            rising = r.lr_rule == "cyclic_rising"
            return optimizer, cyclic(r.lr, r.n_cycles, r.steps, rising)
        if r.lr_rule == "wsd":
            return optimizer, warmup_stable_decay(r.lr, r.steps)
        if r.lr_rule == "constant":
            return optimizer, constant(r.lr)
        if r.lr_rule == "step":
            return optimizer, milestones(r.lr, (0.8, 0.9), r.steps)
        if r.lr_rule == "cosine":
            return optimizer, cosine(r.lr, r.final_lr, r.steps)
        return optimizer, plateau(r.lr, r.lr_division)
