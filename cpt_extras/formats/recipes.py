"""Recipes of the field for training in few bits, by name: formats, rounding and rotation of every operand.

A recipe's level 4 is its four-bit format, 8 is MXFP8 and 16 is bfloat16, both rounded to nearest. Levels between have
the format of the next lower one, so that every schedule from 4 to 16 bits works on it. Linear layers round operands for
every matmul (``matmul_rounding``), and everything else runs in float32. All of it is simulated in float32: this
measures quality, not speed.

>>> recipe = recipes["nvfp4"]
>>> str(recipe.ladders.weight[4]), str(recipe.ladders.weight_gradient.quantizer(4))
('nvfp4:rows=16', 'nvfp4:rounding=stochastic:hadamard=16')
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpt_core.schedules.schedule import RoleLevels
from cpt_core.validation import check_choice
from cpt_extras.formats.ladder import FormatLadder, MatmulLadders

if TYPE_CHECKING:
    from torch import nn

LOW_LEVEL, HIGH_LEVEL, WIDE_LEVEL = 4, 8, 16
HIGH_FORMAT, WIDE_FORMAT = "mxfp8_e4m3:rounding=nearest", "bf16:rounding=nearest"
WIDE_LADDER = FormatLadder({LOW_LEVEL: WIDE_FORMAT, WIDE_LEVEL: WIDE_FORMAT}).filled()
MIN_LINEAR_SHARE = (
    0.5  # of the weights in linear layers, below which there is a warning
)


@dataclass(frozen=True)
class Recipe:
    """A recipe for training in few bits.

    Attributes:
        name: key in ``recipes``.
        source: the publication.
        about: the recipe in words, and what differs from the publication.
        ladders: ladder of every role, with levels from 4 to 16.
        wide_share: share of the linear layers, the last ones, that stay in bfloat16.
    """

    name: str
    source: str
    about: str
    ladders: MatmulLadders
    wide_share: float = 0.0

    def wide_layers(self, model: nn.Module) -> list[str]:
        """Return the names of the linear layers that stay in bfloat16, the last in the order of the model's modules."""
        names = _linear_layers(model)
        count = min(math.ceil(self.wide_share * len(names)), len(names) - 1)
        return names[len(names) - count :]

    def quantize_(
        self, model: nn.Module, wide: Sequence[str] | None = None, seed: int = 0
    ) -> nn.Module:
        """Convert the linear layers of a model in place, and return it; see ``cpt.quantize_``.

        Args:
            model: the model.
            wide: names of the linear layers that stay in bfloat16; None takes ``wide_layers``.
            seed: of the noise of stochastic rounding.

        Raises:
            ValueError: for a model without linear layers, and for a name that is no linear layer of it.

        Warns:
            QuantizationWarning: when linear layers hold less than half of the weights.
        """
        from cpt_core import QuantizationWarning
        from cpt_core.quantization.convert import (
            QuantConfig,
            layer_precisions,
            quantize_,
        )
        from cpt_extras.formats.matmul_rounding import MatmulGrids

        names = _linear_layers(model)
        if not names:
            raise ValueError(f"model: {type(model).__name__} has no linear layer")
        if wide is None:
            wide = self.wide_layers(model)
        elif not isinstance(wide, (list, tuple)):
            raise ValueError(f"wide: expected a list of names of layers, got {wide!r}")
        for name in wide:
            check_choice("wide", name, names)
        share = _linear_share(model)
        if share < MIN_LINEAR_SHARE:
            warnings.warn(
                f"linear layers, which a recipe quantises, hold {share:.0%} of the weights of "
                f"{type(model).__name__}; the others run in float32",
                QuantizationWarning,
                stacklevel=2,
            )

        config = QuantConfig(ladder=self.ladders, seed=seed)
        quantize_(model, config, filter_fn=lambda module, name: name in names)
        wide_ladders = RoleLevels(*[WIDE_LADDER] * 4)
        precisions = layer_precisions(model)
        for name in wide:
            module = model.get_submodule(name)
            precisions[name].grids = MatmulGrids.for_module(
                wide_ladders, module, "linear"
            )
        return model


def _linear_share(model: nn.Module) -> float:
    """Return the share of linear layers in the weights of a model, without its embeddings."""
    from torch import nn  # late: recipes are read without torch

    linear = total = 0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        count = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
        total += count
        linear += count if isinstance(module, nn.Linear) else 0
    return linear / total if total else 1.0


def _linear_layers(model: nn.Module) -> list[str]:
    from torch import nn  # late: recipes are read without torch

    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]


def _ladders(
    forward: str, weight: str, error: str, weight_gradient: str
) -> MatmulLadders:
    """Return the ladders of a recipe from the formats of its level of four bits."""
    return MatmulLadders(
        *(
            FormatLadder(
                {LOW_LEVEL: low, HIGH_LEVEL: HIGH_FORMAT, WIDE_LEVEL: WIDE_FORMAT}
            ).filled()
            for low in (forward, weight, error, weight_gradient)
        )
    )


_NOISY = "rounding=stochastic"
recipes: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "nvfp4",
            "NVIDIA, Pretraining large language models with NVFP4, arXiv 2509.25149",
            "Blocks of 16, of 16 x 16 for weights; gradients rounded stochastically; both operands of the weight "
            "gradient rotated by Hadamard's matrix with random signs, 16 x 16; the last 15 % of the linear layers in "
            "bfloat16.",
            _ladders(
                "nvfp4",
                "nvfp4:rows=16",
                f"nvfp4:{_NOISY}",
                f"nvfp4:{_NOISY}:hadamard=16",
            ),
            wide_share=0.15,
        ),
        Recipe(
            "fp4-all-the-way",
            "Chmiel et al., FP4 all the way, arXiv 2505.19115",
            "NVFP4 in blocks of 16; weights and activations rounded to nearest in the forward pass, gradients "
            "stochastically. Differs: activations of the weight gradient are rounded to nearest, and training does not "
            "end in higher precision by itself.",
            _ladders("nvfp4", "nvfp4", f"nvfp4:{_NOISY}", f"nvfp4:{_NOISY}"),
        ),
        Recipe(
            "mxfp4",
            "Tseng et al., Training LLMs with MXFP4, arXiv 2502.20586",
            "MXFP4, gradients rounded stochastically, both operands of both backward matmuls rotated in blocks of 64. "
            "Differs: the forward pass is in MXFP4, too, at level 4; give a schedule of level 8 or 16 for the paper's; "
            "and nothing is scaled by 3/4 before it is rounded.",
            _ladders(
                "mxfp4",
                "mxfp4",
                f"mxfp4:{_NOISY}:hadamard=64",
                f"mxfp4:{_NOISY}:hadamard=64",
            ),
        ),
        Recipe(
            "mxfp8",
            "NVIDIA, Recipes for pre-training LLMs with MXFP8, arXiv 2506.08027",
            "MXFP8 in e4m3 for all operands. Differs: scales are OCP's, rounded down, where the paper rounds them up.",
            _ladders(*[HIGH_FORMAT] * 4),
        ),
        Recipe(
            "int4",
            "ours: the integer counterpart of nvfp4",
            "Whole numbers from -7 to 7 in blocks of 32 with a power of two as scale, in 32 x 32 blocks for weights; "
            "gradients rounded stochastically; both operands of the weight gradient rotated.",
            _ladders(
                "mx(symmetric4,32)",
                "mx(symmetric4,32):rows=32",
                f"mx(symmetric4,32):{_NOISY}",
                f"mx(symmetric4,32):{_NOISY}:hadamard=32",
            ),
        ),
    )
}
