"""Files of data: where they are, whether they can be what they should be, and one way to read them.  Needs no torch."""

import hashlib
import os
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from cpt_lab.experiments.registry import EXPERIMENTS, task_of_dataset
from cpt_lab.experiments.schema import Recipe, is_own
from cpt_lab.paths import command, data_dir, work_dir


class DataNotFoundError(FileNotFoundError):
    """A data set is not on this machine; the message names the command that gets it."""


def missing_data_error(name: str, note: str = "") -> DataNotFoundError:
    """Return the error of a named data set that is not in the data folder."""
    return DataNotFoundError(
        f"{name} is not in {data_dir()}{note}; get it with: {command(f'download {name}')}"
    )


def own_path(path: str) -> Path:
    """Resolve a path of the user's: relative ones are looked up in the data folder, here, then in ``work_dir()``."""
    given = Path(path.strip()).expanduser()
    places = [place / given for place in (data_dir(), Path.cwd(), work_dir())]
    return next((place for place in places if place.exists()), places[1])


@contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Turn whatever a library raises over a file into one ValueError that names the file and the reason.

    A damaged or hostile file makes libraries raise nearly anything, also what the command line must not see: EOFError
    is Ctrl-D to click. Errors that name the file already pass, and so do missing files and libraries.
    """
    try:
        yield
    except (DataNotFoundError, ImportError):
        raise
    except FileNotFoundError as error:
        raise DataNotFoundError(f"there is no file {path}") from error
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        plain = isinstance(
            error, (OSError, ValueError, zipfile.BadZipFile)
        )  # whose words are for people
        kind = (
            "it lacks "
            if type(error) is KeyError
            else ""
            if plain
            else f"{type(error).__name__}: "
        )
        reason = kind + (
            next(iter(str(error).splitlines()), "") or "no reason is given"
        ).replace(f" {str(path)!r}", "")
        if path.is_file() and not path.stat().st_size:
            reason = "it is empty"
        if isinstance(error, UnicodeDecodeError):
            reason += "; save it as UTF-8"
        raise ValueError(f"{path} cannot be read: {reason}") from error


def data_paths(recipe: Recipe) -> list[Path]:
    """Return the files and folders that a recipe's data set is read from; none for embedded data."""
    if is_own(recipe.dataset):
        parts = (
            recipe.dataset.split(",") if ".npz," in recipe.dataset else [recipe.dataset]
        )
        return [own_path(part) for part in parts]
    named = EXPERIMENTS[recipe.task].named[recipe.dataset]
    return [data_dir() / name for name in named.folders if (data_dir() / name).exists()]


def fingerprint(recipe: Recipe) -> str:
    """Return a fingerprint of the files that a recipe's data set is read from: their names, sizes and times of change.

    Equal fingerprints mean that no file was replaced, added or removed since; nothing is opened. Copies of the same
    data differ, as their times do: what was trained on is told by the ``data_checksum`` of a row. Pretrained weights
    are not part of it. Embedded data, and data that is not there, have the fingerprint "".
    """
    return fingerprint_paths(data_paths(recipe))


def fingerprint_paths(paths: Iterable[Path]) -> str:
    """Return the fingerprint of files and of all that is in folders."""
    digest = hashlib.sha256()
    found = False
    for source in paths:
        below = (
            Path(folder, name)
            for folder, _, names in os.walk(source, followlinks=True)
            for name in names
        )
        for path in (
            [source] if source.is_file() else sorted(p for p in below if p.is_file())
        ):
            found, stat = True, path.stat()
            digest.update(
                os.fsencode(
                    f"{path.relative_to(source.parent)}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
                )
            )
    return digest.hexdigest()[:16] if found else ""


def check_data(recipe: Recipe) -> None:
    """Check that the data of a recipe is there and laid out as its task needs it, at a glance: no content is read.

    Raises:
        DataNotFoundError: when it is not there: names the path, and the command that gets a named data set.
        ValueError: when it cannot be of this task: names the path and the layouts.
    """
    experiment = EXPERIMENTS[recipe.task]
    experiment.check_dataset(recipe.dataset)
    if not is_own(recipe.dataset):
        if experiment.named[recipe.dataset].folders and not data_paths(recipe):
            raise missing_data_error(recipe.dataset)
        return
    for path in data_paths(recipe):
        if not path.exists():
            raise DataNotFoundError(f"there is no file or folder {path}")
        if not _has_layout(path, recipe.task):
            raise ValueError(
                f"{path} is no data for this task ({recipe.task}); it needs {experiment.needs} "
                f"(see data/cards/{experiment.card}); {_describe_contents(path)}"
            )


def task_for_data(dataset: str) -> str:
    """Return the task that a data set is for: a named one has its own; data of yours, the first that can read it."""
    if not is_own(dataset):
        if task_of_dataset(dataset) is None and own_path(dataset).is_dir():
            raise ValueError(
                f"no data set is called {dataset!r}; the folder here is {dataset}/, with a slash"
            )
        return task_of_dataset(dataset) or "image"  # which says what there is
    path = own_path(dataset.partition(",")[0])
    if not path.exists():
        raise DataNotFoundError(f"there is no file or folder {path}")
    found = next((task for task in EXPERIMENTS if _has_layout(path, task)), None)
    if found is None:
        needs = "; ".join(f"{task}: {e.needs}" for task, e in EXPERIMENTS.items())
        said = (
            _describe_contents(path)
            if _suggest_layout(path)
            else f"{_describe_contents(path)}. {needs} (see data/cards)"
        )
        raise ValueError(f"{path} is not laid out as any task needs it; {said}")
    return found


VOC_LAYOUT_HINT = "boxes need Pascal VOC's layout: Annotations/<id>.xml, JPEGImages/<id>.jpg, ImageSets/Main/train.txt"
CLASS_FOLDER_HINT = "give the pictures of every class a folder of their own"
UNREAD_IMAGE_HINT = (
    "images of this kind are not read; save them as .jpg or .png, those of every class "
    "in a folder of their own"
)
SAVE_GRAPH_CALL = "numpy.savez('my-graph.npz', x=..., y=..., edge_index=...)"
LAYOUT_HINTS = {  # what else people have, and what to do with it
    "*.xml|*/*.xml": VOC_LAYOUT_HINT,
    "*.[jJ][pP]*[gG]|*.[pP][nN][gG]": CLASS_FOLDER_HINT,
    "labels/*.txt|*/labels/*.txt|labels/*/*.txt": VOC_LAYOUT_HINT,
    "*.arrow|*/*.arrow": "save pictures of Hugging Face's datasets in a folder for every class, pairs with to_parquet",
    "*.json|*/*.json": VOC_LAYOUT_HINT,
    "T[rR][aA][iI][nN]/*/*|[tT][rR][aA][iI][nN][iI][nN][gG]/*/*": (
        "call the folders train/ and test/, in small letters"
    ),
    "*.jsonl|*.tsv|*.parquet": "call the files of sentence pairs train, validation and test, such as train.jsonl",
    "*.tokens|*.raw": "call the files of a text train, valid and test, such as wiki.train.tokens",
    "*.graphml|*.gml|*.edgelist|*.edges|*.mat": f"save a graph with {SAVE_GRAPH_CALL}",
    "*.pt|*/*.pt": f"save a graph of PyTorch Geometric with {SAVE_GRAPH_CALL}",
    "*.[hHaA][eEvV][iI][cCfF]|*.[gG][iI][fF]|*/*.[hHaA][eEvV][iI][cCfF]|*/*.[gG][iI][fF]": UNREAD_IMAGE_HINT,
    "*-ubyte*|*/*-ubyte*|*/*/*-ubyte*": "save MNIST's files as train.npz and test.npz, with data and labels",
    "*/*/*.[jJ][pP]*[gG]|*/*/*.[pP][nN][gG]|*/train/*/*": (
        "give the folder in which the folders of the classes, or train/, lie"
    ),
}


def _describe_contents(path: Path) -> str:
    """Say what is there instead, and a way out where it is known."""
    names = (
        sorted(p.name + "/" * p.is_dir() for p in path.iterdir())
        if path.is_dir()
        else [path.name]
    )
    if path.suffix == ".npz":
        with explain_read_errors(path), zipfile.ZipFile(path) as archive:
            names = [
                f"the array {name.removesuffix('.npy')}" for name in archive.namelist()
            ]
    found = (
        f"found {', '.join(names[:4]) or 'nothing'}{', ...' if len(names) > 4 else ''}"
    )
    return "; ".join(filter(None, (found, _suggest_layout(path))))


def _suggest_layout(path: Path) -> str:
    return next((way for word, way in LAYOUT_HINTS.items() if _matches(path, word)), "")


def _has_layout(path: Path, task: str) -> bool:
    return any(
        all(_matches(path, word) for word in layout.split())
        for layout in EXPERIMENTS[task].layouts
    )


def _matches(path: Path, word: str) -> bool:
    """Whether a folder, an archive or the name of a file has what fits one of the patterns of a word; "!" turns it."""
    if word.startswith("!"):
        return path.is_file() or not _matches(path, word[1:])
    if path.is_dir():
        return any(next(path.glob(pattern), None) for pattern in word.split("|"))
    if path.suffix != ".npz":
        return any(fnmatchcase(path.name, pattern) for pattern in word.split("|"))
    with explain_read_errors(path), zipfile.ZipFile(path) as archive:
        return any(
            fnmatchcase(name, pattern)
            for name in archive.namelist()
            for pattern in word.split("|")
        )
