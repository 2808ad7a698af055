"""Plain multi-layer perceptrons without normalisation: small networks on which low precision shows within seconds."""

import itertools

from torch import Tensor, nn


class MLP(nn.Module):
    """``hidden`` layers of ``width`` with ReLU, then a linear classifier ``fc``; He initialisation, zero biases.

    Inputs are the pixels of an image, of all channels.
    """

    def __init__(self, inputs: int, classes: int, hidden: int, width: int) -> None:
        super().__init__()
        sizes = [inputs] + [width] * hidden
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(sizes):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.fc = nn.Linear(sizes[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(N, ...) -> logits (N, classes)."""
        return self.fc(self.body(x.flatten(1)))
