"""Pictures with boxes: scenes of embedded digits, Pascal VOC, and your own, as ``data/cards/own-pictures.md`` has them.

Pixels are counted from 1 in VOC's form, and both corners belong to a box.

Shapes: n boxes of an image.
"""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
import torchvision
from torch import Tensor
from torchvision.transforms import v2

from cpt_lab.data.common import each, generator_of, some_of, split_sizes, titled
from cpt_lab.data.files import DataNotFoundError, not_here, own_path, reading
from cpt_lab.data.image_readers import open_rgb, picture_size
from cpt_lab.data.report import DataReport, empty_report
from cpt_lab.experiments.detection import EXPERIMENT, DetectionRecipe
from cpt_lab.experiments.recipe import is_own
from cpt_lab.paths import command, data_dir

VOC_CLASSES = tuple(
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep "
    "sofa train tvmonitor".split()
)
LONGEST = 200  # characters of an id: file systems take 255 for a name
# name -> year and the splits to train and to test on
VOC = {"voc2012": ("2012", "train", "val"), "voc2007": ("2007", "trainval", "test")}
DIGITS = tuple(str(digit) for digit in range(10))
SCENES = 400  # pictures of a split whose number is left open
SIDES = (14, 36)  # smallest and largest side of a digit in a scene of 96 pixels
TRIES = 20  # to find a free place


@dataclass(frozen=True)
class Annotated:
    """A picture, by its file or in memory, and its objects.

    Objects are arrays, not tensors: processes that read files get thousands of them, and torch would send each tensor
    through a file descriptor of its own.
    """

    picture: Path | Tensor  # a file, or uint8 (3, H, W)
    size: tuple[int, int]  # height and width in pixels
    boxes: np.ndarray  # float32 (n, 4), x1, y1, x2, y2 in pixels from the upper left corner
    labels: np.ndarray  # int64 (n,)
    difficult: np.ndarray  # bool (n,)

    def read(self) -> Tensor:
        """Return the picture, uint8 (3, H, W); ValueError names a file that is damaged."""
        if isinstance(self.picture, Tensor):
            return self.picture
        return v2.functional.pil_to_tensor(open_rgb(self.picture))


@dataclass(frozen=True)
class DetectionData:
    """Annotated pictures, split three ways."""

    title: str  # what the numbers are measured on, as figures must call it
    classes: tuple[str, ...]  # their names
    # train, valid, test: the splits; ``valid`` is empty when nothing is held out
    train: tuple[Annotated, ...]
    valid: tuple[Annotated, ...]
    test: tuple[Annotated, ...]
    checksum: str  # of annotations and pixels, or of annotations and the sizes of the files
    report: DataReport = field(default_factory=empty_report)  # what was read, left out and changed


def annotated_picture(
    picture: Path | Tensor, size: tuple[int, int], boxes: Any, labels: Any, difficult: Any
) -> Annotated:
    """Return a picture with its boxes and labels in the types that ``Annotated`` has."""
    places, numbers = np.array(boxes, dtype=np.float32).reshape(-1, 4), np.array(labels, dtype=np.int64)
    return Annotated(picture, size, places, numbers, np.array(difficult, dtype=bool))


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
    files, classes, title = _files(r.dataset)
    order = np.random.default_rng(0).permutation(len(files[0]))
    used, count = split_sizes(r, len(order))
    chosen = [[files[0][i] for i in sorted(part)] for part in (order[count:][:used], order[:count])]
    chosen.append([files[1][i] for i in some_of(len(files[1]), r.test_images)])
    read = iter(each(lambda file: annotated(file[0], file[1], classes), [file for part in chosen for file in part]))
    train, valid, test = (tuple(itertools.islice(read, len(part))) for part in chosen)
    for name, part in (("training", train), ("validation", valid), ("test", test)):
        if part and all(a.difficult.all() for a in part):
            raise ValueError(f"{r.dataset}: there is no object that counts on any of {len(part)} {name} pictures")
    return DetectionData(titled(title, r, train, valid), classes, train, valid, test, _checksum(train + valid + test))


File = tuple[Path, Path]  # a picture, and its annotation in VOC's form


def _files(dataset: str) -> tuple[list[list[File]], tuple[str, ...], str]:
    """Return pictures and annotations to train and to test on, the classes, and a title."""
    EXPERIMENT.check_dataset(dataset)
    files: list[list[File]]
    if dataset in VOC:
        year, first, second = VOC[dataset]
        try:
            found = [torchvision.datasets.VOCDetection(data_dir(), year, part) for part in (first, second)]
        except (RuntimeError, FileNotFoundError) as error:
            raise not_here(dataset) from error
        files = [list(zip(map(Path, f.images), map(Path, f.annotations), strict=True)) for f in found]
        return files, VOC_CLASSES, EXPERIMENT.named[dataset].title
    folder = voc_folder(own_path(dataset))
    files = [_listed(folder, "train"), _listed(folder, "test" if _list(folder, "test").is_file() else "val")]
    for part in files:
        image, count = Counter(image for image, _ in part).most_common(1)[0]
        if count > 1:
            raise ValueError(f"{folder}: {image.name} is listed {count} times; list every picture once")
    objects = (obj for _, xml in files[0] for obj in _root(xml).findall("object"))
    classes = tuple(sorted({obj.findtext("name", "").strip() for obj in objects} - {""}))
    if not classes:
        raise ValueError(f"{folder}: there is no object in any training annotation")
    title = f"own pictures ({own_path(dataset).name})"
    if both := len({image for image, _ in files[0]} & {image for image, _ in files[1]}):
        own = "its own training pictures"
        title += f", tested on {own}" if both == len(files[1]) else f", tested on {both} of {own} and others"
    return files, classes, title


def scenes(part: str, count: int, size: int) -> tuple[Annotated, ...]:
    """Return made-up scenes: one to four handwritten digits of different sizes on black, none touching another.

    Digits of "train", "valid" and "test" come from different pictures of scikit-learn's set. A scene depends on its
    split, number and size alone. Boxes are exact: the smallest that holds all ink of a digit.
    """
    from sklearn.datasets import load_digits  # here, as it takes a second

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
    return annotated_picture(picture, (size, size), boxes, labels, [False] * len(boxes))


def _enlarged(digit: Tensor, side: int) -> Tensor:
    """Return the ink of an 8 x 8 digit (0..16) enlarged to ``side`` pixels (0..255), cut to where there is any."""
    large = v2.functional.resize(digit[None] * (255 / 16), [side, side], antialias=True)[0]
    rows, columns = ((large >= 1).any(dim).nonzero() for dim in (1, 0))
    return large[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


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
    part = tuple(annotated_picture(p, (h, w), [[w / 4, h / 4, w / 2, h / 2]], [0], [False]) for p in pictures)
    names = tuple(map(str, range(sizes["classes"])))
    return DetectionData(f"random pictures for {recipe.dataset}", names, part, part, part, "")


def _checksum(pictures: Sequence[Annotated]) -> str:
    digest = hashlib.sha256()
    for a in pictures:
        if isinstance(a.picture, Tensor):
            digest.update(a.picture.numpy().tobytes())
        else:
            digest.update(f"{a.picture.name} {a.picture.stat().st_size}".encode())
        digest.update(a.boxes.tobytes() + a.labels.tobytes() + np.flatnonzero(a.difficult).tobytes())
    return digest.hexdigest()[:16]


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


def _listed(folder: Path, part: str) -> list[File]:
    """Return picture and annotation of every id in a list; the id is the first word of a line."""
    path = _list(folder, part)
    if not path.is_file():
        raise DataNotFoundError(f"there is no {path}: a list of picture ids, one per line")
    with reading(path):
        ids = [line.split()[0] for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if not ids:
        raise ValueError(f"{path} is empty")
    if wrong := [i for i in ids if not i.isprintable() or len(i) > LONGEST]:
        raise ValueError(f"{path}: {wrong[0][:40]!r} is no picture id")
    return [(folder / "JPEGImages" / f"{i}.jpg", folder / "Annotations" / f"{i}.xml") for i in ids]


def _root(xml: Path) -> ElementTree.Element:
    with reading(xml):
        return ElementTree.parse(xml).getroot()


def annotated(image: Path, xml: Path, classes: Sequence[str]) -> Annotated:
    """Read and check one annotation, and that its picture is there, whole and of the size it says.

    Raises:
        DataNotFoundError: when a file is missing.
        ValueError: naming the file and what is wrong with it.
    """
    height, width = picture_size(image)
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
    return annotated_picture(image, (height, width), boxes, labels, difficult)


def _number(element: ElementTree.Element, path: str, what: object) -> float:
    text = element.findtext(path)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{what}: {path} must be a number, got {text!r}")
    return value


WEIGHTS = "resnet18-f37072fd.pth"  # torchvision's ResNet18_Weights.IMAGENET1K_V1


def backbone_weights() -> Path:
    """Return the file of the backbone's ImageNet weights; DataNotFoundError says how to get it or do without."""
    file = data_dir() / WEIGHTS
    if not file.is_file():
        raise DataNotFoundError(
            f"there are no ImageNet weights {file}; get them with: {command('download resnet18')}, or train from "
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
