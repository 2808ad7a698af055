"""Small transformers of ``transformers``, untrained: a language model and an image classifier.  Beyond the paper.

Their matmuls with weights are ``nn.Linear``, which the recipes of ``cpt.recipes`` quantise.
"""

from typing import Any

from torch import Tensor, nn

HEAD_WIDTH = 32  # of an attention head


class CausalLanguageModel(nn.Module):
    """Llama's architecture, for text in columns: rotary positions, RMSNorm, SwiGLU of three times the width.

    Every call starts without context; there is no state.
    """

    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        """Build a model of ``layers`` layers for at most ``length`` words."""
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = _num_heads(width)
        config = LlamaConfig(
            vocab_size=words,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=length,
            tie_word_embeddings=False,
            use_cache=False,
        )
        self.decoder = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, None]:
        """Return logits (T, B, words) of the word after each of ``tokens`` (T, B), and no state."""
        logits = self.decoder(input_ids=tokens.t()).logits
        return logits.transpose(0, 1), None


class ImageTransformer(nn.Module):
    """A vision transformer of four layers, 128 wide, on patches of 4 x 4 pixels."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        """Build a classifier of square images of ``size`` pixels, a multiple of 4."""
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        if size % 4:
            raise ValueError(
                f"size: model 'vit' needs images whose side is a multiple of 4 pixels, got {size}"
            )
        config = ViTConfig(
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=_num_heads(128),
            intermediate_size=512,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            image_size=size,
            patch_size=4,
            num_channels=channels,
        )
        config.num_labels = classes
        self.classifier = ViTForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, classes) of images (B, channels, size, size)."""
        return self.classifier(pixel_values=images).logits


def _num_heads(width: int) -> int:
    if width % HEAD_WIDTH:
        raise ValueError(
            f"hidden: a transformer's width is a multiple of {HEAD_WIDTH}, got {width}"
        )
    return width // HEAD_WIDTH
