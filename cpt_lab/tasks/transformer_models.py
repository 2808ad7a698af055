"""Small transformers of ``transformers``, untrained: a language model and an image classifier.  Beyond the paper.

Their matmuls with weights are ``nn.Linear``, which the recipes of ``cpt.recipes`` quantise.
"""

from typing import Any

from torch import Tensor, nn

HEAD_SIZE = 32  # of an attention head
PATCH_SIZE, IMAGE_HIDDEN_SIZE, IMAGE_LAYERS = 4, 64, 2  # of ``ImageTransformer``


class CausalLanguageModel(nn.Module):
    """Llama's architecture: rotary positions, RMSNorm, SwiGLU of three times the hidden size.

    Every call starts without context; there is no state.

    Args:
        vocab_size: number of words or characters.
        hidden_size: a multiple of ``HEAD_SIZE``.
        num_layers: number of decoder layers.
        context_length: largest number of tokens of a call.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, num_layers: int, context_length: int
    ) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        num_heads = _num_heads(hidden_size)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads,
            max_position_embeddings=context_length,
            tie_word_embeddings=False,
            use_cache=False,
        )
        self.decoder = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, None]:
        """Return logits (T, B, words) of the word after each of ``tokens`` (T, B), and no state."""
        logits = self.decoder(input_ids=tokens.t()).logits
        return logits.transpose(0, 1), None


class ImageTransformer(nn.Module):
    """A vision transformer of two layers, 64 wide, on patches of 4 x 4 pixels.

    Args:
        channels: number of colours of an image.
        size: side of an image in pixels, a multiple of ``PATCH_SIZE``.
        classes: number of classes.
    """

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        if size % PATCH_SIZE:
            raise ValueError(
                f"size: model 'vit' needs images whose side is a multiple of {PATCH_SIZE} pixels, got {size}"
            )
        config = ViTConfig(
            hidden_size=IMAGE_HIDDEN_SIZE,
            num_hidden_layers=IMAGE_LAYERS,
            num_attention_heads=_num_heads(IMAGE_HIDDEN_SIZE),
            intermediate_size=4 * IMAGE_HIDDEN_SIZE,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            image_size=size,
            patch_size=PATCH_SIZE,
            num_channels=channels,
        )
        config.num_labels = classes
        self.classifier = ViTForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, classes) of images (B, channels, size, size)."""
        return self.classifier(pixel_values=images).logits


def _num_heads(hidden_size: int) -> int:
    if hidden_size % HEAD_SIZE:
        raise ValueError(
            f"hidden: expected a multiple of {HEAD_SIZE}, got {hidden_size}"
        )
    return hidden_size // HEAD_SIZE
