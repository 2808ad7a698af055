"""The language model of the Penn Treebank experiments: embedding, LSTM, decoder.  Paper: section 4.4."""

from torch import Tensor, nn

State = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """An LSTM over word embeddings that predicts the next word; dropout on the embeddings and on the LSTM's output.

    Args:
        words: size of the vocabulary.
        embedding: width of the embeddings, which stay in float32.
        hidden: width of the LSTM.
        layers: number of LSTM layers.
        dropout: share of values that dropout sets to 0.
        drop_embedding: whether dropout is applied to the embeddings, too.

    The LSTM has one bias per gate, as the authors' has: torch's second bias, ``bias_hh``, is 0 and frozen. Embedding
    and decoder start uniform in [-0.1, 0.1], the decoder's bias at 0, the LSTM as torch has it.
    """

    def __init__(
        self,
        words: int,
        embedding: int,
        hidden: int,
        layers: int = 1,
        dropout: float = 0.0,
        drop_embedding: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, embedding)
        self.lstm = nn.LSTM(
            embedding, hidden, layers, dropout=dropout if layers > 1 else 0.0
        )
        self.decoder = nn.Linear(hidden, words)
        self.dropout = nn.Dropout(dropout)
        self.drop_embedding = drop_embedding
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("bias_hh"):
                nn.init.zeros_(parameter).requires_grad_(False)

    def forward(
        self, tokens: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        """Tokens (T, B) and the state (layers, B, hidden) twice, or None -> logits (T, B, words), the new state."""
        x = self.embedding(tokens)
        y, state = self.lstm(self.dropout(x) if self.drop_embedding else x, state)
        return self.decoder(self.dropout(y)), state
