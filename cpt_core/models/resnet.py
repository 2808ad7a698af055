"""Residual networks: the CIFAR ResNet-(6m+2), and torchvision's ImageNet ResNets with the paper's initialisation.

Shapes: N batch, C channels, H x W pixels.  Paper: section 4.2 (image classification).
"""

import math
from collections.abc import Callable

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """conv3x3-BN-ReLU-conv3x3-BN, plus the shortcut, ReLU; the shortcut is 1x1 conv + BN where the shape changes."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.shortcut(x))


class CifarResNet(nn.Module):
    """ResNet-(6m+2) for small images: a 3x3 stem and three stages of m basic blocks with w, 2w, 4w channels.

    Args:
        blocks: m; 1, 3, 12, 25 give ResNet-8, -20, -74, -152.
        width: w; ``channels`` are those of the images.

    Differs: the authors' class also makes a third, unused BatchNorm in every block without a shortcut; left out.
    """

    def __init__(
        self, blocks: int, classes: int, width: int = 16, channels: int = 3
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = self._stage(width, width, blocks, stride=1)
        self.layer2 = self._stage(width, 2 * width, blocks, stride=2)
        self.layer3 = self._stage(2 * width, 4 * width, blocks, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, classes)
        initialize(self)

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
        first = BasicBlock(inputs, outputs, stride)
        return nn.Sequential(
            first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> logits (N, classes)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(self.avgpool(x).flatten(1))


def imagenet_resnet(depth: int, classes: int) -> nn.Module:
    """Return torchvision's ResNet-18 or -34, randomly initialised as in the paper's experiments."""
    from torchvision import models

    model = {18: models.resnet18, 34: models.resnet34}[depth](num_classes=classes)
    initialize(model)
    return model


def initialize(model: nn.Module) -> None:
    """Initialise in place: conv N(0, sqrt(2 / (k k out))), linear weights N(0, sqrt(2 / (in out))), zero biases."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(
                module.weight,
                0.0,
                math.sqrt(2.0 / (module.in_features * module.out_features)),
            )
            nn.init.zeros_(module.bias)
