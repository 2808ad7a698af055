"""MobileNet-V2 for CIFAR: strides adapted to 32 x 32 pixels.  Paper: section 4.2."""

from torch import Tensor, nn

# (expansion, channels, blocks, stride of the first block)
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class InvertedResidual(nn.Module):
    """1x1 expand, 3x3 depthwise, 1x1 project; every block of stride 1 has a shortcut."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = expansion * inputs
        self.stride = stride
        self.conv1 = nn.Conv2d(inputs, hidden, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.conv2 = nn.Conv2d(
            hidden, hidden, 3, stride, padding=1, groups=hidden, bias=False
        )
        self.bn2 = nn.BatchNorm2d(hidden)
        self.conv3 = nn.Conv2d(hidden, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride == 1 and inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return y + self.shortcut(x) if self.stride == 1 else y


class CifarMobileNetV2(nn.Module):
    """MobileNet-V2 with ReLU and torch's default initialisation, as the authors ran it."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        blocks, inputs = [], 32
        for expansion, outputs, count, stride in STAGES:
            for i in range(count):
                blocks.append(
                    InvertedResidual(
                        inputs, outputs, expansion, stride if i == 0 else 1
                    )
                )
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.conv2 = nn.Conv2d(inputs, 1280, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(1280)
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> logits (N, classes)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(self.blocks(x))))
        return self.fc(self.avgpool(x).flatten(1))
