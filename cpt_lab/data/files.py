"""Files of data sets: their paths, a check that their layout fits a task, and errors that name the file.

``check_data`` and ``task_for_data`` look at names of files only, by the ``layouts`` of the experiments;
``explain_read_errors`` wraps the reading of a file. Needs no torch.
"""

import hashlib
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from cpt_lab.experiments.registry import EXPERIMENTS, task_of_dataset
from cpt_lab.experiments.schema import Recipe, is_own
from cpt_lab.paths import command, data_dir, work_dir


class DataNotFoundError(FileNotFoundError):
    """Error of a data set that is not on this machine; its message names the command that gets it."""


def missing_data_error(name: str, note: str = "") -> DataNotFoundError:
    """Return the error for a named data set that is not in the data folder."""
    return DataNotFoundError(
        f"{name} is not in {data_dir()}{note}; get it with: {command(f'download {name}')}"
    )


def own_path(path: str) -> Path:
    """Resolve a path of the user: relative ones in the data folder, the current folder, then ``work_dir()``."""
    user_path = Path(path.strip()).expanduser()
    candidates = [folder / user_path for folder in (data_dir(), Path.cwd(), work_dir())]
    return next(
        (candidate for candidate in candidates if candidate.exists()), candidates[1]
    )


def own_paths(dataset: str) -> list[Path]:
    """Return the path of the user's data set, or those of its archives, "train.npz,test.npz".

    Any other comma is part of the name of a file or folder.
    """
    return [own_path(part) for part in re.split(r"(?<=\.npz),", dataset)]


@contextmanager
def explain_read_errors(path: Path, part: str = "") -> Iterator[None]:
    """Turn any error of a library that reads a file into a ValueError that names the file and the reason.

    Args:
        path: the file.
        part: part of the file that is read, for the error; "" for all of it.

    A damaged or hostile file makes libraries raise nearly anything, also what the command line must not see: EOFError
    is Ctrl-D to click. Errors that name the file already are passed on, as are missing files and libraries.
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
        where = f"{part} of {path}" if part else str(path)
        raise ValueError(
            f"{where} cannot be read: {_read_error_reason(path, error)}"
        ) from error


def _read_error_reason(path: Path, error: Exception) -> str:
    """Return the reason of an error that a library raised over a file, in one line."""
    if path.is_file() and not path.stat().st_size:
        reason = "it is empty"
    else:
        first_line = next(iter(str(error).splitlines()), "") or "no reason is given"
        first_line = first_line.replace(f" {str(path)!r}", "")
        if type(error) is KeyError:
            reason = f"it lacks {first_line}"
        elif isinstance(error, (OSError, ValueError, zipfile.BadZipFile)):
            reason = first_line  # messages of these errors are written for users
        else:
            reason = f"{type(error).__name__}: {first_line}"
    if isinstance(error, UnicodeDecodeError):
        reason += "; save it as UTF-8"
    return reason


def data_paths(recipe: Recipe) -> list[Path]:
    """Return the files and folders of a recipe's data set; none for embedded data."""
    if is_own(recipe.dataset):
        return own_paths(recipe.dataset)
    dataset = EXPERIMENTS[recipe.task].named_datasets[recipe.dataset]
    paths = [data_dir() / name for name in dataset.folders]
    return [path for path in paths if path.exists()]


def fingerprint(recipe: Recipe) -> str:
    """Return a fingerprint of a recipe's data files: their names, sizes and modification times.

    Equal fingerprints mean that no file was replaced, added or removed since; no file is opened. Copies of the same
    data differ, as their times do: the ``data_checksum`` of a row tells what was trained on. Pretrained weights are not
    part of it. Embedded data, and data that is not there, have the fingerprint "".
    """
    return fingerprint_paths(data_paths(recipe))


def fingerprint_paths(paths: Iterable[Path]) -> str:
    """Return the fingerprint of files and of all files in folders, "" without any file."""
    digest = hashlib.sha256()
    has_files = False
    for source in paths:
        for path in [source] if source.is_file() else _files_below(source):
            has_files, stat = True, path.stat()
            entry = f"{path.relative_to(source.parent)}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
            digest.update(os.fsencode(entry))
    return digest.hexdigest()[:16] if has_files else ""


def _files_below(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted; links are followed."""
    files = []
    for parent, _, names in os.walk(folder, followlinks=True):
        for name in names:
            path = Path(parent, name)
            if path.is_file():
                files.append(path)
    return sorted(files)


def check_data(recipe: Recipe) -> None:
    """Check that the data of a recipe exists in a layout of its task, by names of files alone.

    Raises:
        DataNotFoundError: when it is not there: names the path, and the command that gets a named data set.
        ValueError: when it cannot be of this task: names the path and the layouts.
    """
    experiment = EXPERIMENTS[recipe.task]
    experiment.check_dataset(recipe.dataset)
    if not is_own(recipe.dataset):
        if experiment.named_datasets[recipe.dataset].folders and not data_paths(recipe):
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
    """Return the task of a named data set, or the first task that can read the user's data.

    Raises:
        DataNotFoundError: if there is no such file or folder.
        ValueError: if no task can read it: describes what is there, and the layouts or a way out.
    """
    if not is_own(dataset):
        if task_of_dataset(dataset) is None and own_path(dataset).is_dir():
            raise ValueError(
                f"no data set is called {dataset!r}; the folder here is {dataset}/, with a slash"
            )
        return (
            task_of_dataset(dataset) or "image"
        )  # the image task lists all data sets in its error

    path = own_paths(dataset)[0]
    if not path.exists():
        raise DataNotFoundError(f"there is no file or folder {path}")
    for task in EXPERIMENTS:
        if _has_layout(path, task):
            return task
    description = _describe_contents(path)
    if not _suggest_layout(path):
        needs = "; ".join(f"{task}: {e.needs}" for task, e in EXPERIMENTS.items())
        description += f". {needs} (see data/cards)"
    raise ValueError(f"{path} is not laid out as any task needs it; {description}")


VOC_LAYOUT_HINT = "boxes need Pascal VOC's layout: Annotations/<id>.xml, JPEGImages/<id>.jpg, ImageSets/Main/train.txt"
CLASS_FOLDER_HINT = "give the images of every class a folder of their own"
UNREAD_IMAGE_HINT = (
    "images of this kind are not read; save them as .jpg or .png, those of every class "
    "in a folder of their own"
)
SAVE_GRAPH_CALL = "numpy.savez('my-graph.npz', x=..., y=..., edge_index=...)"
# Patterns of other layouts that users have -> how to change them.
LAYOUT_HINTS = {
    "*.xml|*/*.xml": VOC_LAYOUT_HINT,
    "*.[jJ][pP]*[gG]|*.[pP][nN][gG]": CLASS_FOLDER_HINT,
    "labels/*.txt|*/labels/*.txt|labels/*/*.txt": VOC_LAYOUT_HINT,
    "*.arrow|*/*.arrow": "save images of Hugging Face's datasets in a folder for every class, pairs with to_parquet",
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
    """Return what a file or folder contains, and how to change its layout where that is known."""
    if path.suffix == ".npz":
        with explain_read_errors(path), zipfile.ZipFile(path) as archive:
            names = [
                f"the array {name.removesuffix('.npy')}" for name in archive.namelist()
            ]
    elif path.is_dir():
        names = sorted(f"{p.name}/" if p.is_dir() else p.name for p in path.iterdir())
    else:
        names = [path.name]
    contents = (
        f"found {', '.join(names[:4]) or 'nothing'}{', ...' if len(names) > 4 else ''}"
    )
    return "; ".join(filter(None, (contents, _suggest_layout(path))))


def _suggest_layout(path: Path) -> str:
    """Return how to change the layout of a file or folder, "" where that is not known."""
    return next(
        (hint for word, hint in LAYOUT_HINTS.items() if _matches(path, word)), ""
    )


def _has_layout(path: Path, task: str) -> bool:
    """Return whether a file or folder has one of the layouts of a task, judged by names alone."""
    for layout in EXPERIMENTS[task].layouts:
        if all(_matches(path, word) for word in layout.split()):
            return True
    return False


def _matches(path: Path, word: str) -> bool:
    """Return whether a file's name, or a name in a folder or archive, matches a pattern of ``word``.

    Args:
        path: file, folder or archive.
        word: patterns with "|" between them; with "!" before them nothing in a folder or archive may match.
    """
    if word.startswith("!"):
        return path.is_file() or not _matches(path, word[1:])
    patterns = word.split("|")
    if path.is_dir():
        return any(next(path.glob(pattern), None) for pattern in patterns)
    if path.suffix != ".npz":
        return any(fnmatchcase(path.name, pattern) for pattern in patterns)
    with explain_read_errors(path), zipfile.ZipFile(path) as archive:
        return any(
            fnmatchcase(name, pattern)
            for name in archive.namelist()
            for pattern in patterns
        )
