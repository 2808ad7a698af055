"""Pictures with boxes: scenes of embedded digits, Pascal VOC, and your own in VOC's layout.

Your own pictures, as ``dataset``, a folder (or one with ``VOCdevkit/VOC2007/`` or the like inside) that holds

- ``JPEGImages/<id>.jpg``; greyscale ones are read as colour;
- ``Annotations/<id>.xml``: ``size`` and one ``object`` per box, with ``name`` and ``bndbox``; an object's own ``part``
  elements play no part;
- ``ImageSets/Main/train.txt`` and ``test.txt``, or ``val.txt`` where there is no ``test.txt``: an id per line.

Rules: the classes are the names in the training annotations. Pixels are counted from 1 and both corners belong to the
box, as in VOC. A box that sticks out of its image, a box without area and an unknown class are errors. Objects marked
``difficult`` are not trained on and count neither for nor against a detection. An image without objects is kept: it is
all background.

Shapes: n boxes of an image.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
import torchvision
from PIL import Image, UnidentifiedImageError
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from cpt_core.data.common import DataNotFoundError, Stream, epoch_order, generator_of, own_path
from cpt_core.data.images import IMAGENET_MEAN, IMAGENET_STD
from cpt_core.experiments.detection import EXPERIMENT, DetectionRecipe
from cpt_core.experiments.recipe import is_own
from cpt_core.paths import data_dir

VOC_CLASSES = tuple(
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep "
    "sofa train tvmonitor".split()
)
# name -> year and the splits to train and to test on
VOC = {"voc2012": ("2012", "train", "val"), "voc2007": ("2007", "trainval", "test")}
MULTIPLE = 32  # sides of a padded batch
END_OF_JPEG = b"\xff\xd9"


@dataclass(frozen=True)
class Annotated:
    """A picture, by its file or in memory, and its objects.

    Objects are arrays, not tensors: processes that read files get thousands of them, and torch would send each tensor
    through a file descriptor of its own.

    Attributes:
        picture: a file, or uint8 (3, H, W).
        size: height and width in pixels.
        boxes: float32 (n, 4), x1, y1, x2, y2 in pixels from the upper left corner.
        labels: int64 (n,).
        difficult: bool (n,).
    """

    picture: Path | Tensor
    size: tuple[int, int]
    boxes: np.ndarray
    labels: np.ndarray
    difficult: np.ndarray

    def read(self) -> Tensor:
        """Return the picture, uint8 (3, H, W); ValueError names a file that is damaged."""
        if isinstance(self.picture, Tensor):
            return self.picture
        try:
            with Image.open(self.picture) as image:
                return v2.functional.pil_to_tensor(image.convert("RGB"))
        except (OSError, SyntaxError) as error:
            raise ValueError(f"{self.picture} is damaged: {error}") from error


@dataclass(frozen=True)
class DetectionData:
    """Annotated pictures, split three ways.

    Attributes:
        title: what the numbers are measured on, as figures must call it.
        classes: their names.
        train, valid, test: the splits; ``valid`` is empty when nothing is held out.
        checksum: of annotations and pixels, or of annotations and the sizes of the files.
    """

    title: str
    classes: tuple[str, ...]
    train: tuple[Annotated, ...]
    valid: tuple[Annotated, ...]
    test: tuple[Annotated, ...]
    checksum: str


@dataclass(frozen=True)
class Batch:
    """Pictures made ready for a model, and their objects.

    Attributes:
        images: float32 (N, 3, H, W), normalised, padded with zeros to multiples of 32.
        targets: of every image, boxes float32 (n, 4) in pixels of ``images`` and labels int64 (n,).
        sizes: height and width of every image without its padding.
        originals: the pictures they were made from.
    """

    images: Tensor
    targets: list[dict[str, Tensor]]
    sizes: list[tuple[int, int]]
    originals: list[Annotated]


def load_detection(recipe: DetectionRecipe) -> DetectionData:
    """Load the annotations of a recipe's data and hold out its validation pictures.

    The held-out pictures and the subsets depend on the data set alone, never on the seed of a run.

    Raises:
        DataNotFoundError: when the files are not there; nothing is downloaded.
        ValueError: when files do not have the documented layout, a picture is damaged, or there are too few.
    """
    r = recipe
    if r.dataset == "digit-scenes":
        train = scenes("train", r.train_images or SCENES, r.size)
        valid = scenes("valid", r.valid_images, r.size)
        test = scenes("test", r.test_images or SCENES, r.size)
        title = f"synthetic scenes of scikit-learn digits, {r.size} x {r.size}"
        return DetectionData(title, DIGITS, train, valid, test, _checksum(train + valid + test))
    files, classes, title = _voc(r.dataset)
    order = np.random.default_rng(0).permutation(len(files[0]))
    if r.valid_images + (r.train_images or 1) > len(order):
        wanted = f"{r.valid_images} to hold out and {r.train_images or 'some'} to train on"
        raise ValueError(f"{r.dataset}: {len(order)} training pictures are there, wanted are {wanted}")
    held, rest = order[: r.valid_images], order[r.valid_images :][: r.train_images]
    chosen = ([files[0][i] for i in sorted(rest)], [files[0][i] for i in sorted(held)], files[1][: r.test_images])
    train, valid, test = (tuple(annotated(image, xml, classes) for image, xml in part) for part in chosen)
    for name, part in (("training", train), ("validation", valid), ("test", test)):
        if part and all(a.difficult.all() for a in part):
            raise ValueError(f"{r.dataset}: there is no object that counts on any of {len(part)} {name} pictures")
    return DetectionData(title, classes, train, valid, test, _checksum(train + valid + test))


def _voc(dataset: str) -> tuple[list[list[tuple[Path, Path]]], tuple[str, ...], str]:
    """Return pictures and annotations to train and to test on, the classes, and a title."""
    EXPERIMENT.check_dataset(dataset)
    if dataset in VOC:
        year, first, second = VOC[dataset]
        try:
            found = [torchvision.datasets.VOCDetection(data_dir(), year, part) for part in (first, second)]
        except (RuntimeError, FileNotFoundError) as error:
            raise DataNotFoundError(
                f"{dataset} is not in {data_dir()}; get it with: python -m cpt_core download {dataset}"
            ) from error
        files = [list(zip(map(Path, f.images), map(Path, f.annotations), strict=True)) for f in found]
        return files, VOC_CLASSES, EXPERIMENT.named[dataset].title
    folder = voc_folder(own_path(dataset))
    files = [_listed(folder, "train"), _listed(folder, "test" if _list(folder, "test").is_file() else "val")]
    objects = (obj for _, xml in files[0] for obj in _root(xml).findall("object"))
    classes = tuple(sorted({obj.findtext("name", "").strip() for obj in objects}))
    if not classes:
        raise ValueError(f"{folder}: there is no object in any training annotation")
    title = f"own pictures ({own_path(dataset).name})"
    if both := len(set(files[0]) & set(files[1])):
        own = "its own training pictures"
        title += f", tested on {own}" if both == len(files[1]) else f", tested on {both} of {own} and others"
    return files, classes, title


def random_detection(recipe: DetectionRecipe) -> DetectionData:
    """Return random pixels in the shapes of a data set, to measure times and count operations without the data.

    One batch of every split; pictures of one's own are loaded instead.
    """
    if is_own(recipe.dataset):
        return load_detection(recipe)
    sizes = EXPERIMENT.named[recipe.dataset].sizes
    h, w = sizes.get("height", recipe.size), sizes.get("width", recipe.size)
    random = generator_of(0)
    pictures = torch.randint(0, 256, (recipe.batch, 3, h, w), generator=random, dtype=torch.uint8)
    part = tuple(_annotated(p, (h, w), [[w / 4, h / 4, w / 2, h / 2]], [0], [False]) for p in pictures)
    names = tuple(map(str, range(sizes["classes"])))
    return DetectionData(f"random pictures for {recipe.dataset}", names, part, part, part, "")


def _annotated(picture: Path | Tensor, size: tuple[int, int], boxes: Any, labels: Any, difficult: Any) -> Annotated:
    return Annotated(
        picture,
        size,
        np.array(boxes, dtype=np.float32).reshape(-1, 4),
        np.array(labels, dtype=np.int64),
        np.array(difficult, dtype=bool),
    )


def _checksum(pictures: Sequence[Annotated]) -> str:
    digest = hashlib.sha256()
    for a in pictures:
        if isinstance(a.picture, Tensor):
            digest.update(a.picture.numpy().tobytes())
        else:
            digest.update(f"{a.picture.name} {a.picture.stat().st_size}".encode())
        digest.update(a.boxes.tobytes() + a.labels.tobytes() + np.flatnonzero(a.difficult).tobytes())
    return digest.hexdigest()[:16]


# --- scenes of digits -----------------------------------------------------------------------------

DIGITS = tuple(str(digit) for digit in range(10))
SCENES = 400  # pictures of a split whose number is left open
SIDES = (14, 36)  # smallest and largest side of a digit in a scene of 96 pixels
TRIES = 20  # to find a free place


def scenes(part: str, count: int, size: int) -> tuple[Annotated, ...]:
    """Return made-up scenes: one to four handwritten digits of different sizes on black, none touching another.

    Digits of "train", "valid" and "test" come from different pictures of scikit-learn's set. A scene depends on its
    split, number and size alone. Boxes are exact: the smallest that holds all ink of a digit.
    """
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    first, last = {"train": (0, 1097), "valid": (1097, 1397), "test": (1397, 1797)}[part]
    chosen = order[first:last]
    return tuple(_scene(digits, chosen, generator_of(first, i), size) for i in range(count))


def _scene(digits: Any, chosen: np.ndarray, random: torch.Generator, size: int) -> Annotated:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=random))

    canvas = torch.zeros(size, size)
    boxes: list[list[int]] = []
    labels = []
    for _ in range(draw(1, 4)):
        index = chosen[draw(0, len(chosen) - 1)]
        side = draw(*(round(s * size / 96) for s in SIDES))
        ink = _enlarged(torch.from_numpy(digits.images[index]).float(), side)
        h, w = ink.shape
        for _ in range(TRIES):
            x, y = draw(0, size - w), draw(0, size - h)
            if all(x + w < a or c < x or y + h < b or d < y for a, b, c, d in boxes):
                canvas[y : y + h, x : x + w] = ink
                boxes.append([x, y, x + w, y + h])
                labels.append(int(digits.target[index]))
                break
    picture = canvas.clamp(0, 255).to(torch.uint8).expand(3, -1, -1).contiguous()
    return _annotated(picture, (size, size), boxes, labels, [False] * len(boxes))


def _enlarged(digit: Tensor, side: int) -> Tensor:
    """Return the ink of an 8 x 8 digit (0..16) enlarged to ``side`` pixels (0..255), cut to where there is any."""
    large = v2.functional.resize(digit[None] * (255 / 16), [side, side], antialias=True)[0]
    rows, columns = ((large >= 1).any(dim).nonzero() for dim in (1, 0))
    return large[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


# --- Pascal VOC -----------------------------------------------------------------------------------


def voc_folder(folder: Path) -> Path:
    """Return the folder that holds ``Annotations``: ``folder`` itself, or one in it such as ``VOCdevkit/VOC2007``."""
    if not folder.is_dir():
        raise DataNotFoundError(f"there is no folder {folder}; give one in the layout of Pascal VOC")
    found = [f.parent for pattern in ("", "VOC*/", "VOCdevkit/VOC*/") for f in folder.glob(f"{pattern}Annotations")]
    if len(found) != 1:
        names = ", ".join(str(f) for f in found) or "none"
        raise ValueError(f"{folder} must hold one data set in VOC's layout (JPEGImages, Annotations); found: {names}")
    return found[0]


def _list(folder: Path, part: str) -> Path:
    return folder / "ImageSets" / "Main" / f"{part}.txt"


def _listed(folder: Path, part: str) -> list[tuple[Path, Path]]:
    """Return picture and annotation of every id in a list; the id is the first word of a line."""
    path = _list(folder, part)
    if not path.is_file():
        raise DataNotFoundError(f"there is no {path}: a list of picture ids, one per line")
    ids = [line.split()[0] for line in path.read_text().splitlines() if line.strip()]
    if not ids:
        raise ValueError(f"{path} is empty")
    name, count = Counter(ids).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{path} names {name!r} twice")
    return [(folder / "JPEGImages" / f"{i}.jpg", folder / "Annotations" / f"{i}.xml") for i in ids]


def _root(xml: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(xml).getroot()
    except FileNotFoundError as error:
        raise DataNotFoundError(f"there is no annotation {xml}") from error
    except ElementTree.ParseError as error:
        raise ValueError(f"{xml} is no XML: {error}") from error


def annotated(image: Path, xml: Path, classes: Sequence[str]) -> Annotated:
    """Read and check one annotation, and that its picture is there, whole and of the size it says.

    Raises:
        DataNotFoundError: when a file is missing.
        ValueError: naming the file and what is wrong with it.
    """
    height, width = _check_picture(image)
    root = _root(xml)
    said = tuple(_number(root, f"size/{side}", xml) for side in ("height", "width"))
    if said != (height, width):
        raise ValueError(f"{xml} says {said[1]:g} x {said[0]:g} pixels, {image.name} has {width} x {height}")
    boxes, labels, difficult = [], [], []
    for number, obj in enumerate(root.findall("object"), start=1):
        what = f"{xml}, object {number}"
        name = obj.findtext("name", "").strip()
        if name not in classes:
            raise ValueError(f"{what}: unknown class {name!r}; the classes are {', '.join(classes)}")
        x1, y1, x2, y2 = (_number(obj, f"bndbox/{corner}", what) for corner in ("xmin", "ymin", "xmax", "ymax"))
        shown = f"({x1:g}, {y1:g}) to ({x2:g}, {y2:g})"
        if not (x1 - 1 < x2 and y1 - 1 < y2):  # a box of one pixel has x1 = x2
            raise ValueError(f"{what} ({name}): the box {shown} has no area")
        if not (x1 >= 1 and y1 >= 1 and x2 <= width and y2 <= height):
            raise ValueError(f"{what} ({name}): the box {shown} is not inside the {width} x {height} picture")
        boxes.append([x1 - 1, y1 - 1, x2, y2])
        labels.append(classes.index(name))
        difficult.append(obj.findtext("difficult", "0").strip() == "1")
    return _annotated(image, (height, width), boxes, labels, difficult)


def _number(element: ElementTree.Element, path: str, what: object) -> float:
    text = element.findtext(path)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{what}: {path} must be a number, got {text!r}")
    return value


def _check_picture(path: Path) -> tuple[int, int]:
    """Return height and width; a file that breaks off is found here, before any training."""
    if not path.is_file():
        raise DataNotFoundError(f"there is no picture {path}")
    try:
        with Image.open(path) as image:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 64))
                if image.format != "JPEG" or END_OF_JPEG not in file.read():  # an unusual end: look at all of it
                    image.load()
            return image.height, image.width
    except (OSError, SyntaxError, UnidentifiedImageError) as error:
        raise ValueError(f"{path} is no whole picture: {error}") from error


# --- a pretrained backbone ------------------------------------------------------------------------

WEIGHTS = "resnet18-f37072fd.pth"  # torchvision's ResNet18_Weights.IMAGENET1K_V1


def backbone_weights() -> Path:
    """Return the file of the backbone's ImageNet weights; DataNotFoundError says how to get it or do without."""
    file = data_dir() / WEIGHTS
    if not file.is_file():
        raise DataNotFoundError(
            f"there are no ImageNet weights {file}; get them with: python -m cpt_core download resnet18, or train from "
            "scratch with pretrained=False"
        )
    return file


def download(name: str, language: str = "") -> Path:
    """Get "voc2007", "voc2012", or the weights of "resnet18"; they have no language."""
    if name == "resnet18":
        weights = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
        torch.hub.load_state_dict_from_url(weights.url, str(data_dir()), check_hash=True, map_location="cpu")
        return data_dir() / WEIGHTS
    year, *parts = VOC[name]
    for part in parts:
        torchvision.datasets.VOCDetection(data_dir(), year, part, download=True)
    return data_dir()


# --- batches --------------------------------------------------------------------------------------


class _Ready(Dataset):
    """Groups of pictures made ready: resized, perhaps mirrored, normalised, padded. Keys: (epoch, group)."""

    def __init__(
        self, pictures: Sequence[Annotated], groups: Sequence[Sequence[int]], recipe: DetectionRecipe, seed: int | None
    ) -> None:
        self.pictures, self.groups, self.recipe, self.seed = pictures, groups, recipe, seed

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        epoch, group = key
        images, targets = zip(*(self._item(index, epoch) for index in self.groups[group]), strict=True)
        sizes = [(i.shape[-2], i.shape[-1]) for i in images]
        height, width = (MULTIPLE * math.ceil(max(s) / MULTIPLE) for s in zip(*sizes, strict=True))
        padded = torch.zeros(len(images), 3, height, width)
        for place, image in zip(padded, images, strict=True):
            place[:, : image.shape[-2], : image.shape[-1]] = image
        return Batch(padded, list(targets), sizes, [self.pictures[i] for i in self.groups[group]])

    def _item(self, index: int, epoch: int) -> tuple[Tensor, dict[str, Tensor]]:
        picture = self.pictures[index]
        keep = ~picture.difficult
        image = tv_tensors.Image(picture.read())
        found = torch.from_numpy(picture.boxes[keep])
        boxes = tv_tensors.BoundingBoxes(found, format="XYXY", canvas_size=picture.size)
        sized = v2.Resize(self.recipe.size, max_size=self.recipe.max_size, antialias=True)
        if self.seed is not None and self.recipe.flip and _coin(self.seed, epoch, index):
            image, boxes = v2.functional.horizontal_flip(image), v2.functional.horizontal_flip(boxes)
        image, boxes = sized(image, boxes)
        ready = v2.functional.normalize(image.float() / 255, list(IMAGENET_MEAN), list(IMAGENET_STD))
        return ready.as_subclass(Tensor), {
            "boxes": boxes.as_subclass(Tensor),
            "labels": torch.from_numpy(picture.labels[keep]),
        }


def _coin(*numbers: int) -> bool:
    return bool(torch.rand((), generator=generator_of(*numbers, Stream.IMAGE)) < 0.5)


def aspect_groups(pictures: Sequence[Annotated], batch: int) -> list[list[int]]:
    """Return groups of pictures of like shape, so that little padding is needed; the last may be smaller."""
    order = sorted(range(len(pictures)), key=lambda i: pictures[i].size[1] / pictures[i].size[0])
    return [order[i : i + batch] for i in range(0, len(order), batch)]


def batches(
    pictures: Sequence[Annotated], recipe: DetectionRecipe, seed: int, start: int, workers: int
) -> Iterator[Batch]:
    """Yield training batches from step ``start`` on, without end: a pure function of (seed, step).

    The groups are the same in every epoch, their order is not. Files are read by worker processes.
    """
    data = _Ready(pictures, aspect_groups(pictures, recipe.batch), recipe, seed)

    def keys() -> Iterator[tuple[int, int]]:
        first, position = divmod(start, len(data))
        for epoch in itertools.count(first):
            order = epoch_order(len(data), seed, epoch).tolist()
            yield from ((epoch, group) for group in order[position:])
            position = 0

    return _loaded(data, keys(), workers)


def evaluation_batches(pictures: Sequence[Annotated], recipe: DetectionRecipe, workers: int) -> Iterator[Batch]:
    """Yield a split once, without mirroring."""
    data = _Ready(pictures, aspect_groups(pictures, recipe.batch), recipe, None)
    return _loaded(data, ((0, group) for group in range(len(data))), workers)


def _loaded(data: _Ready, keys: Iterator[tuple[int, int]], workers: int) -> Iterator[Batch]:
    in_memory = isinstance(data.pictures[0].picture, Tensor)
    # a generator of its own: the loader draws a number at every start, and torch's stream belongs to the model
    return iter(
        DataLoader(
            data, sampler=keys, batch_size=None, num_workers=0 if in_memory else workers, generator=generator_of(0)
        )
    )
