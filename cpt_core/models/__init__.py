"""Networks of the paper by name, as ordinary float32 modules.

The problem: the experiments of the paper need its networks with the authors' initialisation, some of which differ from
those in torchvision.

The design: the networks contain no code for quantisation; ``cpt_core.quantize_`` converts an instance. ``MODELS`` maps
the names of the image classifiers to builders.

- resnet.py: ResNets for CIFAR, and torchvision's ImageNet ResNets with the paper's initialisation.
- mobilenet.py: MobileNetV2 for CIFAR.
- gnn.py: GCN and GraphSAGE. lstm_lm.py: the LSTM language model. mlp.py: small MLPs for quick experiments.

The trade-offs: only networks that the paper trains are here. BERT comes from transformers, and RetinaNet is composed of
torchvision's parts in ``cpt_lab.tasks.retinanet``.
"""

from collections.abc import Callable

from torch import nn

from cpt_core.models.mlp import MLP
from cpt_core.models.mobilenet import CifarMobileNetV2
from cpt_core.models.resnet import CifarResNet, imagenet_resnet

# (channels, pixels of a side, classes) -> model
Builder = Callable[[int, int, int], nn.Module]


def _mlp(hidden: int, width: int) -> Builder:
    def build(channels: int, size: int, classes: int) -> nn.Module:
        return MLP(channels * size * size, classes, hidden=hidden, width=width)

    return build


def _cifar_resnet(blocks: int, width: int = 16) -> Builder:
    def build(channels: int, size: int, classes: int) -> nn.Module:
        return CifarResNet(blocks, classes, width=width, channels=channels)

    return build


def _imagenet_resnet(depth: int) -> Builder:
    def build(channels: int, size: int, classes: int) -> nn.Module:
        return imagenet_resnet(depth, classes)

    return build


def _mobilenet(channels: int, size: int, classes: int) -> nn.Module:
    return CifarMobileNetV2(classes, channels)


MODELS: dict[str, Builder] = {
    "mlp4": _mlp(hidden=4, width=64),
    "mlp6": _mlp(hidden=6, width=32),
    "resnet8_w8": _cifar_resnet(1, width=8),
    "resnet8": _cifar_resnet(1),
    "resnet20": _cifar_resnet(3),
    "resnet74": _cifar_resnet(12),
    "resnet152": _cifar_resnet(25),
    "mobilenetv2": _mobilenet,
    "resnet18": _imagenet_resnet(18),
    "resnet34": _imagenet_resnet(34),
}
