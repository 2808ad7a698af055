"""Tests of transformers' own ``ModelTesterMixin`` on converted models; pytest runs this file, see ``suites``.

CPT_SUITE_BITS names the precision: "float", a number of bits, or "plain" for models that are not converted.
"""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import transformers

import cpt_core as cpt
from cpt_core.quantization.convert import all_precisions, is_converted

BITS = os.environ.get("CPT_SUITE_BITS", "float")

# The source distribution lacks these two of the mixin's own bases.
for name, mixin in (
    ("exporters.test_export", "ExportTesterMixin"),
    ("generation.test_utils", "GenerationTesterMixin"),
):
    package, _, _ = name.partition(".")
    sys.modules.setdefault(f"tests.{package}", ModuleType(f"tests.{package}"))
    module = sys.modules.setdefault(f"tests.{name}", ModuleType(f"tests.{name}"))
    setattr(module, mixin, type(mixin, (), {}))

from tests.test_modeling_common import ModelTesterMixin, ids_tensor  # type: ignore[import-not-found]  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
GPT = {
    "vocab_size": 64,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    **SPECIAL_TOKENS,
}
MODELS: dict[
    str, tuple[str, tuple[str, ...], dict[str, Any]]
] = {  # title -> configuration, classes, values
    "Bert": (
        "BertConfig",
        ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
        SMALL,
    ),
    "GPT2": ("GPT2Config", ("GPT2Model", "GPT2LMHeadModel"), GPT),
    "Llama": ("LlamaConfig", ("LlamaModel", "LlamaForCausalLM"), SMALL),
    "Mixtral": (
        "MixtralConfig",
        ("MixtralModel", "MixtralForCausalLM"),
        {**SMALL, "num_local_experts": 2},
    ),
    "Electra": (
        "ElectraConfig",
        ("ElectraModel", "ElectraForMaskedLM"),
        {**SMALL, "embedding_size": 16},
    ),
}


def convert(model: Any) -> None:
    """Convert a model and give it the precision of this run."""
    if not is_converted(model):
        cpt.quantize_(model, cpt.QuantConfig().with_gradient_rounding("nearest"))
    bits = None if BITS == "float" else int(BITS)
    for precision in all_precisions(model).values():
        precision.set_bits(bits, bits)


class Construction:
    """Counts constructions that are under way: the outermost model is converted."""

    depth = 0

    @classmethod
    @contextmanager
    def inside(cls) -> Iterator[None]:
        cls.depth += 1
        try:
            yield
        finally:
            cls.depth -= 1


def converting(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that converts the model that it has made."""

    @wraps(init)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        with Construction.inside():
            init(self, *args, **kwargs)
        if Construction.depth == 0:
            convert(self)

    return constructor


def converting_loader(loader: Any) -> Any:
    """Return a ``from_pretrained`` that converts the model that it has loaded."""

    @classmethod  # type: ignore[misc]
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with Construction.inside():
            loaded = loader.__func__(cls, *args, **kwargs)
        if Construction.depth == 0:
            convert(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    return from_pretrained


def describe_inputs(config: str, values: dict[str, Any]) -> Any:
    """Return what the mixin asks for configurations and inputs."""

    class Tester:
        is_training = True
        batch_size, seq_length, hidden_size, num_hidden_layers, num_attention_heads = (
            3,
            7,
            16,
            2,
            2,
        )
        vocab_size = 64

        def get_config(self) -> Any:
            return getattr(transformers, config)(**values)

        def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
            tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
            return self.get_config(), {
                "input_ids": tokens,
                "attention_mask": torch.ones_like(tokens),
            }

    return Tester()


def suite(title: str) -> type:
    """Return the test case of one architecture."""
    config, classes, values = MODELS[title]

    def set_up(self: Any) -> None:
        self.model_tester = describe_inputs(config, values)

    attributes = {
        "setUp": set_up,
        "all_model_classes": tuple(getattr(transformers, name) for name in classes),
        "test_resize_embeddings": True,
    }
    return type(f"Test{title}", (ModelTesterMixin, unittest.TestCase), attributes)


if BITS != "plain":
    patched = {
        getattr(transformers, name) for _, names, _ in MODELS.values() for name in names
    }
    for model_class in patched:
        model_class.__init__ = converting(model_class.__init__)
    transformers.PreTrainedModel.from_pretrained = converting_loader(
        vars(transformers.PreTrainedModel)["from_pretrained"]
    )

for architecture in MODELS:
    globals()[f"Test{architecture}"] = suite(architecture)
del architecture
