"""Models of other libraries for ``invariances``: decoders, encoders, recurrent networks, graph layers, images.

Every library builds its models from a small configuration, with random weights; nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bench.third_party.invariances import Case, Pairs, Run
from bench.zoo_models import MODELS as ZOO
from bench.zoo_models import Inputs, Make
from cpt_core.bitops.counting import tensors_in

VOCABULARY = 64
SAMPLES, TOKENS = 3, 10
PREFIX = 7  # tokens
PADS = 4

# Values of every configuration that has a field of that name.
SMALL = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim"), 16),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layers",
            "n_layer",
            "decoder_layers",
            "encoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "n_heads", "n_head"), 2
    ),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "hidden_dim",
        ),
        32,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "state_size": 8,
    "initializer_range": 0.3,  # attention is no mere mean then
}

# Decoders of transformers -> values of their configuration besides ``SMALL``.
USUAL_DECODERS = (
    "apertus arcee biogpt bitnet bloom cohere cohere2 ctrl cwm diffllama doge ernie4_5 ernie4_5_moe exaone4 falcon "
    "flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss granite "
    "granitemoe granitemoeshared helium hunyuan_v1_dense jais2 jetmoe llama mistral mixtral modernbert-decoder mpt "
    "nanochat nemotron olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen3 qwen3_moe seed_oss "
    "smollm3 stablelm starcoder2 vaultgemma xglm"
)
DECODERS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in USUAL_DECODERS.split()},
    "bert": {"is_decoder": True},
    "bert-generation": {"is_decoder": True},
    "electra": {"is_decoder": True},
    "roberta": {"is_decoder": True},
    "bart": {"is_decoder": True, "is_encoder_decoder": False},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
        "window_size": 4,
    },
    "codegen": {"hidden_size": 32, "num_attention_heads": 4, "rotary_dim": 4},
    # recurrences
    "mamba": {},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "falcon_mamba": {},
    "rwkv": {"attention_hidden_size": 16},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "lru_width": 16,
        "attention_window_size": 8,
        "conv1d_width": 4,
    },
    "lfm2": {},
    "olmo_hybrid": {},
    "minimax": {},
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
    },
}
ATTENTION = ("sdpa", "eager")


def configuration(kind: str, **values: Any) -> Any:
    """Return a small configuration of transformers."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind)
    aliases = type(default).attribute_map
    fields = set(default.to_dict()) | set(aliases)
    small = {
        aliases.get(name, name): value
        for name, value in SMALL.items()
        if name in fields
    }
    return type(default)(
        **{
            **small,
            **{aliases.get(name, name): value for name, value in values.items()},
        }
    )


def decoder(kind: str, attention: str, values: dict[str, Any]) -> nn.Module:
    """Return a small causal language model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        configuration(kind, **values), attn_implementation=attention
    )


def encoder(
    kind: str, attention: str, values: dict[str, Any], name: str = ""
) -> nn.Module:
    """Return a small encoder; ``name`` is its class, if ``AutoModel`` would choose another."""
    import transformers

    config = configuration(kind, **values)
    config._attn_implementation = attention
    return (
        getattr(transformers, name)(config)
        if name
        else transformers.AutoModel.from_config(config)
    )


def random_tokens(samples: int = SAMPLES, length: int = TOKENS) -> Tensor:
    """Return a batch of random tokens without padding."""
    return torch.randint(3, VOCABULARY, (samples, length))


def train_on_tokens(run: Run) -> Any:
    return first_output(run(random_tokens()))


def first_output(outputs: Any) -> Tensor:
    """Return the first tensor of what a model returned."""
    return next(iter(tensors_in(outputs)))


# --- questions to decoders --------------------------------------------------------------------------------------------


def later_tokens(run: Run) -> Pairs:
    """Change the last tokens: earlier outputs stay."""
    tokens = random_tokens()
    changed = tokens.clone()
    changed[:, PREFIX:] = random_tokens(length=TOKENS - PREFIX)
    yield run(tokens).logits[:, :PREFIX], run(changed).logits[:, :PREFIX]


def prefix(run: Run) -> Pairs:
    """Compare a prefix of the tokens with the full sequence: the prefix keeps its outputs."""
    tokens = random_tokens()
    yield run(tokens).logits[:, :PREFIX], run(tokens[:, :PREFIX]).logits


CACHES = ("past_key_values", "cache_params", "state")


def cached(run: Run) -> Pairs:
    """Decode token by token with a cache: the outputs of a full pass."""
    tokens = random_tokens()
    full, cache = run(tokens).logits, {}
    steps = []
    for place in range(TOKENS):
        outputs = run(tokens[:, place : place + 1], use_cache=True, **cache)
        cache = {
            name: value
            for name in CACHES
            if (value := getattr(outputs, name, None)) is not None
        }
        if not cache:
            return
        steps.append(outputs.logits)
    yield full, torch.cat(steps, 1)


def left_padding(run: Run) -> Pairs:
    """Put padding before the sequences, with a mask: the outputs of tokens stay."""
    tokens = random_tokens()
    mask = torch.ones(SAMPLES, PADS + TOKENS, dtype=torch.long)
    mask[:, :PADS] = 0
    padded = torch.cat([torch.zeros(SAMPLES, PADS, dtype=torch.long), tokens], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    positions_argument = (
        {"position_ids": positions} if takes(run, "position_ids") else {}
    )
    yield (
        run(tokens).logits,
        run(padded, attention_mask=mask, **positions_argument).logits[:, PADS:],
    )


def right_padding(run: Run) -> Pairs:
    """Put padding behind the sequences, with a mask: the outputs of tokens stay."""
    tokens, padded, mask = padded_tail()
    yield run(tokens).logits, run(padded, attention_mask=mask).logits[:, :TOKENS]


def padded_tail() -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens, tokens with padding behind them, mask of the padded tokens)."""
    tokens = random_tokens()
    mask = torch.ones(SAMPLES, TOKENS + PADS, dtype=torch.long)
    mask[:, TOKENS:] = 0
    return (
        tokens,
        torch.cat([tokens, torch.zeros(SAMPLES, PADS, dtype=torch.long)], 1),
        mask,
    )


def takes(run: Run, argument: str) -> bool:
    """Return whether the forward of the model that ``run`` runs has an argument."""
    model = inspect.getclosurevars(run).nonlocals["model"]
    return argument in inspect.signature(model.forward).parameters


def one_of_batch(run: Run) -> Pairs:
    """Take one sample alone: its outputs in the batch."""
    tokens = random_tokens()
    yield first_output(run(tokens))[1:2], first_output(run(tokens[1:2]))


DECODER_QUESTIONS = {
    "a later token": later_tokens,
    "prefix = full": prefix,
    "cached = full": cached,
    "left padding": left_padding,
    "right padding": right_padding,
    "one sample = in its batch": one_of_batch,
}


def decoder_cases() -> Iterator[Case]:
    """Return the decoders, with each kind of attention that they have."""
    if importlib.util.find_spec("transformers") is None:
        return
    for kind, values in DECODERS.items():
        for attention in ATTENTION:
            if attention == "eager" or supports_sdpa(kind):
                make = partial(decoder, kind, attention, values)
                yield Case(
                    "decoder",
                    f"{kind}, {attention}",
                    make,
                    train_on_tokens,
                    DECODER_QUESTIONS,
                )


def supports_sdpa(kind: str, name: str = "") -> bool:
    """Return whether a model of transformers has fused attention; ``name``: of its class."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    model_class = (
        getattr(transformers, name)
        if name
        else MODEL_MAPPING[type(transformers.AutoConfig.for_model(kind))]
    )
    return bool(model_class._supports_sdpa)


# --- encoders ---------------------------------------------------------------------------------------------------------

TEXT_ENCODERS: dict[
    str, tuple[dict[str, Any], str]
] = {  # kind -> values besides ``SMALL``, name of the class
    **dict.fromkeys(
        (
            "bert roberta albert electra mpnet camembert xlm-roberta ernie megatron-bert roformer data2vec-text "
            "rembert esm ibert nystromformer convbert layoutlm mobilebert squeezebert yoso"
        ).split(),
        ({}, ""),
    ),
    "distilbert": ({"n_heads": 2, "n_layers": 2}, ""),
    "deberta-v2": (
        {
            "relative_attention": True,
            "position_buckets": 4,
            "pos_att_type": ["p2c", "c2p"],
        },
        "",
    ),
    "deberta": ({"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, ""),
    "modernbert": ({"global_attn_every_n_layers": 1}, ""),
    "t5": ({"d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}, "T5EncoderModel"),
    "clip_text_model": ({}, "CLIPTextModel"),
    "fnet": ({}, ""),
}
IMAGE_ENCODERS: dict[str, dict[str, Any]] = {
    "vit": {"image_size": 32, "patch_size": 8},
    "deit": {"image_size": 32, "patch_size": 8},
    "beit": {"image_size": 32, "patch_size": 8},
    "dinov2": {"image_size": 32, "patch_size": 8},
    "swin": {
        "image_size": 32,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    },
    "swinv2": {
        "image_size": 32,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    },
    "clip_vision_model": {"image_size": 32, "patch_size": 8},
    "siglip_vision_model": {"image_size": 32, "patch_size": 8},
    "convnext": {
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_stages": 2,
        "image_size": 32,
    },
    "segformer": {
        "depths": [1, 1],
        "hidden_sizes": [8, 16],
        "num_attention_heads": [1, 2],
        "num_encoder_blocks": 2,
        "sr_ratios": [2, 1],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
    },
}


def padded_encoder_tail(run: Run) -> Pairs:
    """Put padding behind the sequences, with a mask: the outputs of tokens stay."""
    tokens, padded, mask = padded_tail()
    yield (
        first_output(run(tokens)),
        first_output(run(padded, attention_mask=mask))[:, :TOKENS],
    )


def longer_padding(run: Run) -> Pairs:
    """Compare a batch with more padding than its longest sequence needs: tokens keep their outputs."""
    tokens, mask = random_tokens(), torch.ones(SAMPLES, TOKENS, dtype=torch.long)
    mask[1, PREFIX:] = 0
    tokens = tokens * mask
    more = torch.zeros(SAMPLES, PADS, dtype=torch.long)
    longer, longer_mask = torch.cat([tokens, more], 1), torch.cat([mask, more], 1)
    short = first_output(run(tokens, attention_mask=mask))
    long = first_output(run(longer, attention_mask=longer_mask))[:, :TOKENS]
    yield short[mask.bool()], long[mask.bool()]


def masked_tokens(run: Run) -> Pairs:
    """Change masked tokens: unmasked tokens keep their outputs."""
    tokens, mask = random_tokens(), torch.ones(SAMPLES, TOKENS, dtype=torch.long)
    mask[1, PREFIX:] = 0
    changed = torch.where(mask.bool(), tokens, random_tokens())
    first, second = (
        first_output(run(x, attention_mask=mask)) for x in (tokens, changed)
    )
    yield first[mask.bool()], second[mask.bool()]


TEXT_QUESTIONS = {
    "one sample = in its batch": one_of_batch,
    "padded tail": padded_encoder_tail,
    "longer padding": longer_padding,
    "masked tokens": masked_tokens,
}


def images(samples: int = SAMPLES) -> Tensor:
    return torch.rand(samples, 3, 32, 32)


def one_image_of_batch(run: Run) -> Pairs:
    """Take one image alone: its outputs in the batch."""
    pixels = images()
    yield first_output(run(pixels))[1:2], first_output(run(pixels[1:2]))


def other_layout(run: Run) -> Pairs:
    """Compare images stored channels-first and channels-last: outputs are equal."""
    pixels = images()
    yield (
        first_output(run(pixels)),
        first_output(run(pixels.contiguous(memory_format=torch.channels_last))),
    )


IMAGE_QUESTIONS = {
    "one sample = in its batch": one_image_of_batch,
    "layout of the input": other_layout,
}


def encoder_cases() -> Iterator[Case]:
    """Return the encoders of text and of images, with each kind of attention that they have."""
    if importlib.util.find_spec("transformers") is None:
        return
    for kind, (values, name) in TEXT_ENCODERS.items():
        for attention in ATTENTION:
            if attention == "eager" or supports_sdpa(kind, name):
                make = partial(encoder, kind, attention, values, name)
                yield Case(
                    "encoder of text",
                    f"{kind}, {attention}",
                    make,
                    train_on_tokens,
                    TEXT_QUESTIONS,
                )
    for kind, values in IMAGE_ENCODERS.items():
        for attention in ATTENTION:
            if attention == "eager" or supports_sdpa(kind):
                make = partial(encoder, kind, attention, values)
                yield Case(
                    "encoder of images",
                    f"{kind}, {attention}",
                    make,
                    train_on_images,
                    IMAGE_QUESTIONS,
                )


def train_on_images(run: Run) -> Any:
    return first_output(run(images()))


# --- recurrent networks -----------------------------------------------------------------------------------------------

LENGTHS = (9, 6, 4)


class Packed(nn.Module):
    """A recurrent network on padded sequences (T, N, C), which it packs."""

    def __init__(self, network: nn.RNNBase) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the outputs of all steps, 0 behind the end of a sequence."""
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return pad_packed_sequence(self.network(packed)[0], total_length=len(x))[0]


def sequences() -> tuple[Tensor, Tensor]:
    """Return sequences (T, N, C) and their lengths."""
    return torch.randn(LENGTHS[0], len(LENGTHS), 8), torch.tensor(LENGTHS)


def sequence_padding(run: Run) -> Pairs:
    """Change what is behind the end of a sequence, and add more: the outputs stay."""
    x, lengths = sequences()
    changed = x.clone()
    for sample, length in enumerate(LENGTHS):
        changed[length:, sample] = 5.0
    longer = torch.cat([x, torch.full((3, *x.shape[1:]), 7.0)])
    yield run(x, lengths), run(changed, lengths)
    yield run(x, lengths), run(longer, lengths)[: LENGTHS[0]]


def permutation(run: Run) -> Pairs:
    """Permute the sequences: their outputs are permuted, too."""
    x, lengths = sequences()
    order = torch.tensor([2, 0, 1])
    yield run(x, lengths)[:, order], run(x[:, order], lengths[order])


def one_sequence(run: Run) -> Pairs:
    """Take one sequence alone: its outputs in the batch."""
    x, lengths = sequences()
    for sample, length in enumerate(LENGTHS):
        alone = run(x[:length, sample : sample + 1], lengths[sample : sample + 1])
        yield run(x, lengths)[:length, sample : sample + 1], alone


def later_steps(run: Run) -> Pairs:
    """Change the last steps: earlier outputs stay, in networks of one direction."""
    x, lengths = sequences()
    changed = x.clone()
    changed[3:] = torch.randn_like(changed[3:])
    yield run(x, lengths)[:3], run(changed, lengths)[:3]


SEQUENCE_QUESTIONS = {
    "padding": sequence_padding,
    "permutation": permutation,
    "one sample = in its batch": one_sequence,
    "a later step": later_steps,
}
NETWORKS = ("LSTM", "GRU", "RNN")
RECURRENT_OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "two directions": {"bidirectional": True},
    "no bias": {"bias": False},
    "projection": {"proj_size": 5},
    "two layers, two directions": {"num_layers": 2, "bidirectional": True},
}


def recurrent_cases() -> Iterator[Case]:
    """Return recurrent networks of torch on packed sequences."""
    for network in NETWORKS:
        for title, options in RECURRENT_OPTIONS.items():
            if "proj_size" in options and network != "LSTM":
                continue
            make = partial(packed_network, network, options)
            yield Case(
                "recurrent network",
                f"{network}, {title}",
                make,
                train_on_sequences,
                SEQUENCE_QUESTIONS,
            )


def packed_network(network: str, options: dict[str, Any]) -> nn.Module:
    return Packed(getattr(nn, network)(8, 12, **options))


def train_on_sequences(run: Run) -> Any:
    return run(*sequences())


# --- graphs -----------------------------------------------------------------------------------------------------------

NODES, FEATURES = 9, 8
Edges = tuple[tuple[int, ...], tuple[int, ...]]
RING: Edges = (tuple(range(NODES)), tuple((i + 1) % NODES for i in range(NODES)))
TWO_TRIANGLES: Edges = ((0, 1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 0, 4, 5, 3, 7, 8, 6))


class OnGraph(nn.Module):
    """A graph layer of DGL that is called with edges (source, destination)."""

    def __init__(self, layer: nn.Module, is_dense: bool = False) -> None:
        super().__init__()
        self.layer, self.is_dense = layer, is_dense

    def forward(self, features: Tensor, edges: Edges) -> Tensor:
        """Return the new features of all nodes; every node is its own neighbour, too."""
        import dgl

        adjacency = (dense_laplacian(edges, len(features)) != 0).to(features)
        if self.is_dense:
            return self.layer(adjacency, features)
        graph = dgl.graph(adjacency.nonzero(as_tuple=True), num_nodes=len(features))
        return self.layer(graph, features).flatten(1)


class Chebyshev(nn.Module):
    """A spectral layer as people write it: powers of a dense Laplacian times features."""

    def __init__(self, order: int = 2) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(order))

    def forward(self, features: Tensor, edges: Edges) -> Tensor:
        """Return the sum of the maps of T_k(L) features."""
        laplacian = dense_laplacian(edges, len(features)).to(features)
        total = torch.zeros_like(features)
        for layer in self.maps:
            total = total + layer(features)
            features = laplacian @ features
        return total


class DenseAttention(nn.Module):
    """Attention over neighbours with a dense mask."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(FEATURES, FEATURES) for _ in range(3)
        )

    def forward(self, features: Tensor, edges: Edges) -> Tensor:
        """Return the weighted means of the neighbours' values."""
        scores = self.query(features) @ self.key(features).T
        is_neighbour = dense_laplacian(edges, len(features)) != 0
        return scores.masked_fill(~is_neighbour, -torch.inf).softmax(-1) @ self.value(
            features
        )


def dense_laplacian(edges: Edges, nodes: int) -> Tensor:
    """Return D - A + 1 of the graph without directions."""
    adjacency = torch.zeros(nodes, nodes)
    sources, destinations = (list(ends) for ends in edges)
    adjacency[sources, destinations] = 1.0
    adjacency = ((adjacency + adjacency.T) > 0).float()
    return torch.diag(adjacency.sum(1) + 1) - adjacency


def no_neighbour(run: Run) -> Pairs:
    """Change a node: the outputs of nodes that are no neighbours of it stay."""
    features = torch.randn(NODES, FEATURES)
    changed = features.clone()
    changed[0] = 3 * torch.randn(FEATURES)
    far = slice(3, NODES - 2)  # in a ring, more than two steps away
    yield run(features, RING)[far], run(changed, RING)[far]


def graph_of_batch(run: Run) -> Pairs:
    """Take one graph of three alone: its outputs in the batch."""
    features = torch.randn(NODES, FEATURES)
    together = run(features, TWO_TRIANGLES)
    yield together[:3], run(features[:3], ((0, 1, 2), (1, 2, 0)))


def permuted_nodes(run: Run) -> Pairs:
    """Permute the nodes: their outputs are permuted, too."""
    features, order = torch.randn(NODES, FEATURES), torch.randperm(NODES)
    place = order.argsort().tolist()
    edges = tuple(tuple(place[node] for node in ends) for ends in RING)
    yield run(features, RING)[order], run(features[order], edges)


GRAPH_QUESTIONS = {
    "no neighbour": no_neighbour,
    "one graph = in its batch": graph_of_batch,
    "permuted nodes": permuted_nodes,
}
# layer of DGL -> arguments
SIZES = (FEATURES, FEATURES)
DGL_LAYERS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "GraphConv": ("GraphConv", SIZES, {}),
    "GraphConv, left": ("GraphConv", SIZES, {"norm": "left"}),
    "SAGEConv, mean": ("SAGEConv", (*SIZES, "mean"), {}),
    "SAGEConv, gcn": ("SAGEConv", (*SIZES, "gcn"), {}),
    "SAGEConv, pool": ("SAGEConv", (*SIZES, "pool"), {}),
    "GATConv": ("GATConv", (*SIZES, 2), {}),
    "GATv2Conv": ("GATv2Conv", (*SIZES, 2), {}),
    "DotGatConv": ("DotGatConv", (*SIZES, 2), {}),
    "TAGConv": ("TAGConv", SIZES, {"k": 2}),
    "SGConv": ("SGConv", SIZES, {"k": 2}),
    "ChebConv": ("ChebConv", (*SIZES, 2), {}),
    "GatedGraphConv": ("GatedGraphConv", (*SIZES, 1, 1), {}),
    "EdgeConv": ("EdgeConv", SIZES, {}),
    "DenseGraphConv": ("DenseGraphConv", SIZES, {}),
    "DenseSAGEConv": ("DenseSAGEConv", SIZES, {}),
}


def dgl_layer(title: str) -> nn.Module:
    """Return a layer of DGL."""
    layers = importlib.import_module("dgl.nn.pytorch")
    name, sizes, options = DGL_LAYERS[title]
    return OnGraph(
        getattr(layers, name)(*sizes, **options), is_dense=name.startswith("Dense")
    )


def graph_cases() -> Iterator[Case]:
    """Yield the cases of graph layers: of DGL, and two hand-written ones with dense matrices."""
    for title, layer in (
        ("dense Chebyshev", Chebyshev),
        ("dense attention", DenseAttention),
    ):
        yield Case("graph layer", title, layer, train_on_graph, GRAPH_QUESTIONS)
    if importlib.util.find_spec("dgl") is not None:
        for title in DGL_LAYERS:
            yield Case(
                "graph layer",
                f"dgl {title}",
                partial(dgl_layer, title),
                train_on_graph,
                GRAPH_QUESTIONS,
            )


def train_on_graph(run: Run) -> Any:
    return run(torch.randn(NODES, FEATURES), RING)


# --- the models of bench.zoo ------------------------------------------------------------------------------------------


def zoo_cases() -> Iterator[Case]:
    """Yield the models of ``bench.zoo`` whose library is installed and whose inputs have samples first."""
    for library, models in ZOO.items():
        if importlib.util.find_spec(library) is None:
            continue
        for name, make in models.items():
            if (
                not name.endswith(("rcnn_resnet50_fpn", "RNN", "Cell"))
                and "detection" not in name
            ):
                yield zoo_case(library, name, make)


def zoo_case(library: str, name: str, make: Make) -> Case:
    """Return a model of the zoo with its questions."""

    def inputs() -> Inputs:
        return make()[1]

    def train(run: Run) -> Any:
        return run(*inputs())

    questions = {
        "one sample = in its batch": partial(first_sample, inputs),
        "layout of the input": partial(layouts, inputs),
    }
    return Case(f"zoo, {library}", name, lambda: make()[0], train, questions)


def first_sample(inputs: Callable[[], Inputs], run: Run) -> Pairs:
    """Take the first sample alone: its outputs in the batch."""
    batch = inputs()
    sizes = {len(x) for x in batch if isinstance(x, Tensor)}
    if len(sizes) != 1 or not all(isinstance(x, Tensor) for x in batch):
        return
    together = list(tensors_in(run(*batch)))
    alone = list(tensors_in(run(*[x[:1] for x in batch])))
    for first, second in zip(together, alone, strict=True):
        if (
            first.dim()
            and len(first) == sizes.copy().pop()
            and first[:1].shape == second.shape
        ):
            yield first[:1], second


def layouts(inputs: Callable[[], Inputs], run: Run) -> Pairs:
    """Compare inputs that are stored with different strides: outputs are equal."""
    batch = inputs()
    if not any(
        isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 2 for x in batch
    ):
        return
    plain, strided = (
        list(tensors_in(run(*values)))
        for values in (batch, [restrided(x) for x in batch])
    )
    yield from zip(plain, strided, strict=True)


def restrided(x: Any) -> Any:
    """Return a tensor stored with its second dimension last."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 3:
        return x
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "decoders": decoder_cases,
    "encoders": encoder_cases,
    "recurrent": recurrent_cases,
    "graphs": graph_cases,
    "zoo": zoo_cases,
}
