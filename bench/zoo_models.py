"""Models of ``bench.zoo``: library -> name -> function that returns a model and its inputs.

Every library builds its models, with random weights, at a size that trains a step in a second. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Inputs = tuple[Any, ...]
ModelAndInputs = tuple[nn.Module, Inputs]
Make = Callable[[], ModelAndInputs]


class CallWith(nn.Module):
    """Wrapper that calls a model with fixed keyword arguments and returns one part of its output."""

    def __init__(self, model: nn.Module, part: str = "", **options: Any) -> None:
        super().__init__()
        self.model, self.part, self.options = model, part, options

    def forward(self, *inputs: Any) -> Any:
        """Call the model, and return the selected part of its output."""
        output = self.model(*inputs, **self.options)
        if self.part:
            return getattr(output, self.part)
        return output[0] if isinstance(output, tuple) else output


class LinearBefore(nn.Module):
    """A linear layer followed by another module."""

    def __init__(self, inner: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(width, width), inner

    def forward(self, x: Tensor) -> Any:
        """Run the linear layer, then the module."""
        output = self.inner(self.linear(x))
        return output[0] if isinstance(output, tuple) else output


class WeightMatmul(nn.Module):
    """A matmul or einsum with a parameter as its weight."""

    def __init__(self, equation: str = "") -> None:
        super().__init__()
        self.equation, self.weight = equation, nn.Parameter(torch.randn(16, 12) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., 16) by the weight."""
        return (
            torch.einsum(self.equation, x, self.weight)
            if self.equation
            else x @ self.weight
        )


class Cell(nn.Module):
    """A recurrent cell that runs over a sequence."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        """Return the last hidden state of x (T, N, C)."""
        state = None
        for step in x:
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]


class SelfAttention(nn.Module):
    """Self-attention by ``nn.MultiheadAttention``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over x (N, T, C)."""
        return self.attention(x, x, x, need_weights=False)[0]


class Tied(nn.Module):
    """An embedding whose weight the output layer shares."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.out = (
            nn.Embedding(64, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 64),
        )
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of tokens."""
        return self.out(self.hidden(self.embedding(x)))


def pictures(size: int = 64, n: int = 2) -> Inputs:
    """Return a batch of pictures."""
    return (torch.rand(n, 3, size, size),)


def tokens(length: int = 9, n: int = 2) -> Inputs:
    """Return a batch of tokens."""
    return (torch.randint(3, 60, (n, length)),)


def rows(*shape: int) -> Inputs:
    """Return a batch of normally distributed numbers."""
    return (torch.randn(shape),)


def library_object(module: str, name: str) -> Any:
    """Return an object of a module by name, importing the module."""
    return getattr(importlib.import_module(module), name)


def torch_(make: Callable[[], nn.Module], *shape: int) -> Make:
    return lambda: (make(), rows(*shape))


def torchvision_(name: str, size: int = 64, place: str = "", **options: Any) -> Make:
    def make() -> ModelAndInputs:
        model = library_object(f"torchvision.models{place}", name)(
            weights=None, **options
        )
        if place == ".detection":
            targets = [
                {
                    "boxes": torch.tensor([[4.0, 4.0, 30.0, 40.0]]),
                    "labels": torch.tensor([1]),
                }
                for _ in range(2)
            ]
            for target in targets:
                target["masks"] = torch.ones(1, size, size, dtype=torch.uint8)
            return model, (list(torch.rand(2, 3, size, size)), targets)
        return model, (
            torch.rand(2, 3, 4, size, size),
        ) if place == ".video" else pictures(size)

    return make


def timm_(name: str, size: int = 64, **options: Any) -> Make:
    return lambda: (
        library_object("timm", "create_model")(
            name, pretrained=False, num_classes=10, **options
        ),
        pictures(size),
    )


SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64}
VISION = {"image_size": 32, "patch_size": 8, "num_channels": 3}
SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
}
SHIFTED = {
    "image_size": 32,
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 4,
}
SPEECH = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}


def hf(
    name: str, inputs: Callable[[], Inputs] = tokens, options: Any = None, **sizes: Any
) -> Make:
    """Return a maker of a small transformers model."""

    def make() -> ModelAndInputs:
        kind = library_object("transformers", name)
        model = kind(kind.config_class(**{**SMALL, **sizes}))
        return (model if options is None else CallWith(model, **options())), inputs()

    return make


def decoder_tokens() -> dict[str, Any]:
    return {"decoder_input_ids": torch.randint(3, 60, (2, 7))}


def clip_(name: str) -> Make:
    part = {**SMALL, "projection_dim": 16}

    def make() -> ModelAndInputs:
        kind = library_object("transformers", name)
        config = kind.config_class(
            text_config=part, vision_config={**part, **VISION}, projection_dim=16
        )
        return CallWith(kind(config), pixel_values=pictures(32)[0]), tokens()

    return make


def lora(base: Make, method: str, **options: Any) -> Make:
    def make() -> ModelAndInputs:
        model, inputs = base()
        return library_object("peft", "get_peft_model")(
            model, library_object("peft", method)(**options)
        ), inputs

    return make


def graph_(name: str, *sizes: Any, **options: Any) -> Make:
    def make() -> ModelAndInputs:
        edges = torch.randint(0, 12, (2, 40))
        more = (torch.randint(0, 3, (40,)),) if name == "RGCNConv" else ()
        inner = (
            sizes[0]()
            if callable(sizes[0])
            else library_object("torch_geometric.nn", name)(*sizes, **options)
        )
        return inner, (torch.randn(12, 16), edges, *more)

    return make


def gin() -> Any:
    return library_object("torch_geometric.nn", "GINConv")(
        nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    )


def diffusion(
    name: str,
    options: Callable[[], dict[str, Any]],
    inputs: Callable[[], Inputs],
    **sizes: Any,
) -> Make:
    return lambda: (
        CallWith(library_object("diffusers", name)(**sizes), "sample", **options()),
        inputs(),
    )


def other(
    module: str, name: str, inputs: Callable[[], Inputs], *values: Any, **options: Any
) -> Make:
    return lambda: (library_object(module, name)(*values, **options), inputs())


BERT = hf("BertModel")
LLAMA = hf("LlamaModel", num_key_value_heads=2)
UNET = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 16,
}

MODELS: dict[str, dict[str, Make]] = {
    "torch": {
        "Conv2d, Linear": torch_(
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 9)),
            2,
            3,
            8,
            8,
        ),
        "Conv1d, padding modes": torch_(
            lambda: nn.Conv1d(8, 16, 3, padding=1, padding_mode="circular"), 2, 8, 9
        ),
        "Conv3d": torch_(lambda: nn.Conv3d(3, 8, 2), 2, 3, 5, 5, 5),
        "ConvTranspose2d": torch_(
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 2)),
            2,
            3,
            9,
            9,
        ),
        "LSTM": torch_(
            lambda: LinearBefore(nn.LSTM(16, 12, 2, bidirectional=True)), 7, 3, 16
        ),
        "LSTM, projection": torch_(
            lambda: LinearBefore(nn.LSTM(16, 12, proj_size=9)), 7, 3, 16
        ),
        "GRU": torch_(lambda: LinearBefore(nn.GRU(16, 12)), 7, 3, 16),
        "RNN": torch_(lambda: LinearBefore(nn.RNN(16, 12)), 7, 3, 16),
        "LSTMCell": torch_(lambda: Cell(nn.LSTMCell(16, 12)), 5, 3, 16),
        "GRUCell": torch_(lambda: Cell(nn.GRUCell(16, 12)), 5, 3, 16),
        "MultiheadAttention": torch_(SelfAttention, 3, 9, 16),
        "TransformerEncoder": torch_(
            lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3, 9, 16
        ),
        "Transformer": lambda: (
            nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
            (torch.randn(3, 9, 16),) * 2,
        ),
        "Bilinear": lambda: (
            nn.Bilinear(16, 12, 9),
            (torch.randn(8, 16), torch.randn(8, 12)),
        ),
        "einsum": torch_(lambda: WeightMatmul("bti,io->bto"), 3, 9, 16),
        "matmul of a weight": torch_(WeightMatmul, 9, 16),
        "weight_norm": torch_(
            lambda: LinearBefore(
                nn.utils.parametrizations.weight_norm(nn.Linear(16, 12))
            ),
            9,
            16,
        ),
        "spectral_norm": torch_(
            lambda: LinearBefore(
                nn.utils.parametrizations.spectral_norm(nn.Linear(16, 12))
            ),
            9,
            16,
        ),
        "orthogonal": torch_(
            lambda: LinearBefore(
                nn.utils.parametrizations.orthogonal(nn.Linear(16, 12))
            ),
            9,
            16,
        ),
        "tied embedding": lambda: (Tied(), tokens()),
        "double precision": lambda: (
            nn.Linear(16, 12).double(),
            (torch.randn(9, 16).double(),),
        ),
        "ScriptModule inside": torch_(
            lambda: nn.Sequential(nn.Linear(16, 12), torch.jit.script(nn.ReLU())), 9, 16
        ),
    },
    "torchvision": {
        **{
            n: torchvision_(n)
            for n in (
                "resnet18",
                "resnext50_32x4d",
                "googlenet",
                "densenet121",
                "squeezenet1_1",
                "shufflenet_v2_x0_5",
                "mnasnet0_5",
                "mobilenet_v2",
                "mobilenet_v3_small",
                "efficientnet_b0",
                "regnet_y_400mf",
                "convnext_tiny",
                "swin_t",
                "swin_v2_t",
            )
        },
        "vit_b_16": torchvision_("vit_b_16", 32, image_size=32),
        "maxvit_t": torchvision_("maxvit_t", 224),
        "lraspp_mobilenet_v3_large": torchvision_(
            "lraspp_mobilenet_v3_large", place=".segmentation", weights_backbone=None
        ),
        "deeplabv3_mobilenet_v3_large": torchvision_(
            "deeplabv3_mobilenet_v3_large", place=".segmentation", weights_backbone=None
        ),
        "fcos_resnet50_fpn": torchvision_(
            "fcos_resnet50_fpn", place=".detection", weights_backbone=None, min_size=64
        ),
        "fasterrcnn_mobilenet": torchvision_(
            "fasterrcnn_mobilenet_v3_large_320_fpn",
            place=".detection",
            weights_backbone=None,
            min_size=64,
        ),
        "maskrcnn_resnet50_fpn": torchvision_(
            "maskrcnn_resnet50_fpn",
            place=".detection",
            weights_backbone=None,
            min_size=64,
        ),
        "r3d_18": torchvision_("r3d_18", 32, ".video"),
    },
    "timm": {
        **{
            n: timm_(n)
            for n in (
                "convnext_atto",
                "efficientnet_b0",
                "fastvit_t8",
                "repvgg_a0",
                "regnetx_002",
                "poolformer_s12",
                "dla34",
                "mobilenetv4_conv_small",
                "mobilenetv4_hybrid_medium",
                "ghostnet_100",
                "edgenext_xx_small",
                "eca_nfnet_l0",
                "resnetv2_50x1_bit",
                "tinynet_e",
                "mnasnet_small",
                "hrnet_w18_small",
                "res2net50_26w_4s",
                "seresnet18",
                "pvt_v2_b0",
                "resnest14d",
                "hardcorenas_a",
                "mobileone_s0",
            )
        },
        **{
            n: timm_(n, 64, img_size=64, depth=2)
            for n in (
                "vit_tiny_patch16_224",
                "deit_tiny_patch16_224",
                "cait_xxs24_224",
                "eva02_tiny_patch14_224",
            )
        },
        **{n: timm_(n, 64, img_size=64) for n in ("mixer_s32_224", "gmlp_s16_224")},
        "beit_base_patch16_224": timm_(
            "beit_base_patch16_224", img_size=64, depth=2, embed_dim=192, num_heads=3
        ),
        "swin_tiny_patch4_window7_224": timm_(
            "swin_tiny_patch4_window7_224", img_size=64, depths=(1, 1), num_heads=(3, 6)
        ),
        "xcit_nano_12_p16_224": timm_("xcit_nano_12_p16_224"),
        "swinv2_tiny_window8_256": timm_(
            "swinv2_tiny_window8_256", img_size=64, depths=(1, 1), num_heads=(3, 6)
        ),
        "sequencer2d_s": timm_("sequencer2d_s", 64, img_size=64),
        "efficientformer_l1": timm_("efficientformer_l1", 224),
        "levit_128s": timm_("levit_128s", 224),
    },
    "transformers": {
        "BertModel": BERT,
        "BertLMHeadModel (decoder)": hf("BertLMHeadModel", is_decoder=True),
        "RobertaModel": hf("RobertaModel"),
        "DistilBertModel": hf(
            "DistilBertModel", dim=16, n_heads=2, n_layers=2, hidden_dim=32
        ),
        "AlbertModel": hf("AlbertModel", embedding_size=16),
        "ElectraModel": hf("ElectraModel", embedding_size=16),
        "MPNetModel": hf("MPNetModel"),
        "DebertaV2Model": hf(
            "DebertaV2Model",
            relative_attention=True,
            position_buckets=4,
            pos_att_type=["p2c", "c2p"],
        ),
        "ModernBertModel": hf("ModernBertModel"),
        "LongformerModel": hf(
            "LongformerModel", lambda: tokens(16), attention_window=4
        ),
        "XLNetModel": lambda: (
            library_object("transformers", "XLNetModel")(
                library_object("transformers", "XLNetConfig")(
                    vocab_size=64, d_model=16, n_layer=2, n_head=2, d_inner=32
                )
            ),
            tokens(),
        ),
        "GPT2Model": hf("GPT2Model", **GPT),
        "GPTNeoXModel": hf("GPTNeoXModel"),
        "OPTModel": hf("OPTModel", ffn_dim=32, word_embed_proj_dim=16),
        "BloomModel": hf("BloomModel", n_layer=2, n_head=2),
        "FalconModel": hf("FalconModel"),
        "PhiModel": hf("PhiModel"),
        "LlamaModel": LLAMA,
        "MistralModel": hf("MistralModel", num_key_value_heads=2),
        "Qwen2Model": hf("Qwen2Model", num_key_value_heads=2),
        "Qwen3MoeModel": hf(
            "Qwen3MoeModel",
            num_key_value_heads=2,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            head_dim=8,
        ),
        "GemmaModel": hf("GemmaModel", num_key_value_heads=2, head_dim=8),
        "MixtralModel": hf("MixtralModel", num_local_experts=2, num_key_value_heads=2),
        "MambaModel": hf("MambaModel", state_size=8, num_hidden_layers=1),
        "Mamba2Model": hf(
            "Mamba2Model",
            state_size=8,
            num_heads=4,
            head_dim=8,
            n_groups=1,
            num_hidden_layers=1,
            chunk_size=8,
        ),
        "RwkvModel": hf("RwkvModel", attention_hidden_size=16),
        "T5Model": hf("T5Model", options=decoder_tokens, **T5),
        "BartModel": hf("BartModel", **SEQ2SEQ),
        "WhisperModel": hf(
            "WhisperModel",
            lambda: rows(2, 8, 40),
            decoder_tokens,
            num_mel_bins=8,
            max_source_positions=20,
            **SEQ2SEQ,
        ),
        "Wav2Vec2Model": hf("Wav2Vec2Model", lambda: rows(2, 400), **SPEECH),
        "HubertModel": hf("HubertModel", lambda: rows(2, 400), **SPEECH),
        "ViTModel": hf("ViTModel", lambda: pictures(32), **VISION),
        "Dinov2Model": hf("Dinov2Model", lambda: pictures(32), **VISION),
        "BeitModel": hf("BeitModel", lambda: pictures(32), **VISION),
        "SwinModel": lambda: (
            library_object("transformers", "SwinModel")(
                library_object("transformers", "SwinConfig")(**SHIFTED)
            ),
            pictures(32),
        ),
        "Swinv2Model": lambda: (
            library_object("transformers", "Swinv2Model")(
                library_object("transformers", "Swinv2Config")(**SHIFTED)
            ),
            pictures(32),
        ),
        "CLIPModel": clip_("CLIPModel"),
        "SiglipModel": clip_("SiglipModel"),
    },
    "diffusers": {
        "UNet2DModel": diffusion(
            "UNet2DModel",
            lambda: {"timestep": torch.tensor(5)},
            lambda: rows(2, 3, 16, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            **UNET,
        ),
        "UNet2DConditionModel": diffusion(
            "UNet2DConditionModel",
            lambda: {
                "timestep": torch.tensor(5),
                "encoder_hidden_states": torch.randn(2, 7, 16),
            },
            lambda: rows(2, 4, 16, 16),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=8,
            **UNET,
        ),
        "AutoencoderKL": diffusion(
            "AutoencoderKL",
            dict,
            lambda: rows(2, 3, 16, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            **UNET,
        ),
        "DiTTransformer2DModel": diffusion(
            "DiTTransformer2DModel",
            lambda: {
                "timestep": torch.tensor([5, 6]),
                "class_labels": torch.tensor([1, 2]),
            },
            lambda: rows(2, 4, 8, 8),
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            num_layers=1,
            sample_size=8,
            norm_num_groups=8,
        ),
    },
    "peft": {
        "LoRA, BERT": lora(BERT, "LoraConfig", r=8, target_modules=["query", "value"]),
        "IA3, BERT": lora(
            BERT,
            "IA3Config",
            target_modules=["key", "value", "output.dense"],
            feedforward_modules=["output.dense"],
        ),
        "LoRA, Llama": lora(
            LLAMA, "LoraConfig", r=8, target_modules=["q_proj", "v_proj"]
        ),
        "LoHa, Llama": lora(
            LLAMA, "LoHaConfig", r=8, target_modules=["q_proj", "v_proj"]
        ),
        "LoRA, GPT-2": lora(
            hf("GPT2Model", **GPT),
            "LoraConfig",
            r=8,
            target_modules=["c_attn"],
            fan_in_fan_out=True,
        ),
    },
    "torch_geometric": {
        **{
            n: graph_(n, 16, 9)
            for n in (
                "GCNConv",
                "SAGEConv",
                "GATConv",
                "GATv2Conv",
                "TransformerConv",
                "GraphConv",
                "SGConv",
                "TAGConv",
                "ARMAConv",
            )
        },
        "ChebConv": graph_("ChebConv", 16, 9, K=3),
        "RGCNConv": graph_("RGCNConv", 16, 9, num_relations=3),
        "GINConv": graph_("GINConv", gin),
    },
    "segmentation_models_pytorch": {
        "Unet, resnet18": other(
            "segmentation_models_pytorch",
            "Unet",
            pictures,
            "resnet18",
            encoder_weights=None,
        ),
        "FPN, mobilenet_v2": other(
            "segmentation_models_pytorch",
            "FPN",
            pictures,
            "mobilenet_v2",
            encoder_weights=None,
        ),
        "Segformer, mit_b0": other(
            "segmentation_models_pytorch",
            "Segformer",
            pictures,
            "mit_b0",
            encoder_weights=None,
        ),
    },
    "monai": {
        "UNet": other(
            "monai.networks.nets",
            "UNet",
            lambda: rows(2, 1, 16, 16),
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            channels=(8, 16),
            strides=(2,),
        ),
        "ViT": lambda: (
            CallWith(
                library_object("monai.networks.nets", "ViT")(
                    1,
                    16,
                    8,
                    hidden_size=16,
                    mlp_dim=32,
                    num_layers=1,
                    num_heads=2,
                    spatial_dims=2,
                )
            ),
            rows(2, 1, 16, 16),
        ),
    },
    "open_clip": {
        "CLIP": lambda: (
            library_object("open_clip", "CLIP")(
                16,
                {
                    "image_size": 32,
                    "layers": 1,
                    "width": 32,
                    "patch_size": 8,
                    "head_width": 16,
                },
                {
                    "context_length": 9,
                    "vocab_size": 64,
                    "width": 16,
                    "heads": 2,
                    "layers": 1,
                },
            ),
            (*pictures(32), *tokens()),
        ),
    },
    "x_transformers": {
        "Decoder": lambda: (
            library_object("x_transformers", "TransformerWrapper")(
                num_tokens=64,
                max_seq_len=16,
                attn_layers=library_object("x_transformers", "Decoder")(
                    dim=16, depth=1, heads=2, attn_dim_head=8, rotary_pos_emb=True
                ),
            ),
            tokens(),
        ),
    },
    "mambapy": {
        "Mamba": lambda: (
            library_object("mambapy.mamba", "Mamba")(
                library_object("mambapy.mamba", "MambaConfig")(
                    d_model=16, n_layers=1, d_state=8
                )
            ),
            rows(2, 9, 16),
        ),
    },
}
