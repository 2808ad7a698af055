"""The networks of the paper, by name: ordinary modules that know nothing of quantisation.

ResNets and MobileNetV2 for CIFAR (resnet.py, mobilenet.py), GCN and GraphSAGE (gnn.py), the LSTM language model
(lstm_lm.py) and small MLPs (mlp.py). ImageNet's ResNets come from torchvision, BERT from transformers, and RetinaNet is
put together from torchvision's parts in ``tasks.retinanet`` of the laboratory.
"""

from collections.abc import Callable

from torch import nn

from cpt_core.models.mlp import MLP
from cpt_core.models.mobilenet import CifarMobileNetV2
from cpt_core.models.resnet import CifarResNet, imagenet_resnet

# name -> builder(channels, pixels of a side, classes)
MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "mlp4": lambda channels, size, classes: MLP(
        channels * size * size, classes, hidden=4, width=64
    ),
    "mlp6": lambda channels, size, classes: MLP(
        channels * size * size, classes, hidden=6, width=32
    ),
    "resnet8_w8": lambda channels, size, classes: CifarResNet(
        1, classes, width=8, channels=channels
    ),
    "resnet8": lambda channels, size, classes: CifarResNet(
        1, classes, channels=channels
    ),
    "resnet20": lambda channels, size, classes: CifarResNet(
        3, classes, channels=channels
    ),
    "resnet74": lambda channels, size, classes: CifarResNet(
        12, classes, channels=channels
    ),
    "resnet152": lambda channels, size, classes: CifarResNet(
        25, classes, channels=channels
    ),
    "mobilenetv2": lambda channels, size, classes: CifarMobileNetV2(classes, channels),
    "resnet18": lambda channels, size, classes: imagenet_resnet(18, classes),
    "resnet34": lambda channels, size, classes: imagenet_resnet(34, classes),
}
