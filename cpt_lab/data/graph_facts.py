"""Facts about a graph for its data report: edges, features, labels, splits, and arrays that play no part.

Shapes: N nodes, E edges, F features.
"""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

import numpy as np

from cpt_lab.data.report import DataReport, list_counts, list_first, pluralize
from cpt_lab.data.splits import SPLITS

# names of arrays that other tools write -> why they play no part
UNUSED_ARRAYS = {
    "*edge_weight*|*weights|adj_data|edge_data": "edges have no weights here, every edge counts alike",
    "*edge_attr*|*edge_feat*|efeat*": "edges have no features here",
    "*edge_type*|*edge_rel*|etype*|*relation*": "edges are of one type here",
    "*node_type*|ntype*": "nodes are of one type here",
    "*edge_index*|*edges*": "one array of edges is read; a graph of several types of nodes or edges is not",
    "pos|*coord*|*position*": "positions are no features here",
    "*name*": "names are for people",
    "*year*|*time*": "times of nodes or edges play no part",
}
MAX_NODES_COMPARED = 1_000_000  # above, features of the splits are not compared
EXACT_INTEGER = 2**24  # float32 holds all whole numbers up to here


def describe_array(name: str, array: np.ndarray) -> str:
    """Return name, shape and type of an array.

    >>> describe_array("y", np.zeros(3))
    'y (3,) float64'
    """
    return f"{name} {array.shape} {array.dtype}"


def report_arrays(
    report: DataReport,
    arrays: Mapping[str, np.ndarray],
    used: Collection[str],
    instead: Mapping[str, str],
) -> None:
    """Add the arrays that are read, and a fact for each that is not.

    Args:
        report: gets the facts.
        arrays: all arrays of an archive.
        used: names of those that are read.
        instead: name of an array -> that of the one which is read in its place.
    """
    report.add(
        "read",
        f"arrays {', '.join(describe_array(name, arrays[name]) for name in sorted(used))}",
    )
    for name in sorted(set(arrays) - set(used)):
        reason = (
            f"{instead[name]} is read in its place"
            if name in instead
            else _unused_reason(name)
        )
        report.add(
            "left out", f"the array {describe_array(name, arrays[name])}: {reason}"
        )


def _unused_reason(name: str) -> str:
    for patterns, reason in UNUSED_ARRAYS.items():
        if any(fnmatchcase(name.lower(), pattern) for pattern in patterns.split("|")):
            return reason
    return "nothing reads an array of this name"


def report_edges(
    report: DataReport,
    source: np.ndarray,
    destination: np.ndarray,
    *,
    apart: int,
    merged: int,
    both: int,
) -> None:
    """Add what became of the edges of a file.

    Args:
        report: gets the facts.
        source: (E,) nodes, as the file has them; ``destination`` the other ends.
        destination: see ``source``.
        apart: edges that are no self-loops.
        merged: different ones of those.
        both: edges of the graph, in both directions, without self-loops.
    """
    edges = len(source)
    report.add("read", f"{pluralize(edges, 'edge')}, taken in both directions")
    if loops := edges - apart:
        report.add("changed", f"{pluralize(loops, 'self-loop')} of the file dropped")
    if doubled := apart - merged:
        report.add(
            "changed", f"{pluralize(doubled, 'edge')} given more than once merged"
        )
    if one_way := both - merged:
        report.add(
            "changed",
            f"{one_way:,} of {pluralize(merged, 'edge')} taken in the other direction, too",
        )
    if apart and one_way == merged and not np.intersect1d(source, destination).size:
        report.add(
            "changed",
            "every edge leads from one group of nodes to another (a bipartite graph): both are nodes of one type here",
        )


def report_features(
    report: DataReport, given: np.ndarray, features: np.ndarray
) -> None:
    """Add types and range of features; ``given`` (N, F) as the file has them, ``features`` in float32."""
    if given.dtype != features.dtype:
        lossy = (
            given.dtype.kind in "iu"
            and given.size
            and max(abs(int(given.min())), int(given.max())) > EXACT_INTEGER
        )
        note = f"; whole numbers above {EXACT_INTEGER:,} lose digits" if lossy else ""
        report.add("changed", f"features converted from {given.dtype} to float32{note}")
    if not features.size:
        report.add("values", "there are no features")
        return
    low, high = features.min(0), features.max(0)
    report.add(
        "values",
        f"{pluralize(len(low), 'feature')} from {low.min():.6g} to {high.max():.6g}",
    )
    zero, constant = int(((low == 0) & (high == 0)).sum()), int((low == high).sum())
    if constant:
        report.add(
            "values",
            f"{pluralize(constant, 'feature')} equal in all nodes, {zero:,} of them 0",
        )


def report_same_features(
    report: DataReport, features: np.ndarray, split: Mapping[str, np.ndarray]
) -> None:
    """Add how many evaluated nodes have exactly the features of a training node; not for millions of nodes."""
    if len(features) > MAX_NODES_COMPARED or not features.shape[1]:
        return
    trained = {row.tobytes() for row in features[split["train"]]}
    for part in SPLITS[1:]:
        same = sum(row.tobytes() in trained for row in features[split[part]])
        if same:
            nodes = pluralize(len(split[part]), f"{part} node")
            report.add(
                "overlap",
                f"{same:,} of {nodes} have the same features as a training node",
            )


def report_labels(
    report: DataReport,
    labels: np.ndarray,
    split: Mapping[str, np.ndarray],
    classes: int,
) -> None:
    """Add nodes per class, classes that no node has, and nodes without a label; ``labels`` (N,) int64, -1 for none."""
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    present = np.flatnonzero(counts)
    report.add(
        "classes",
        list_counts({f"class {number}:": int(counts[number]) for number in present}),
    )
    if without := int((labels < 0).sum()):
        report.add("classes", f"{pluralize(without, 'node')} without a label")
    missing = np.flatnonzero(counts == 0)
    if len(missing):
        named = f"{'class' if len(missing) == 1 else 'classes'} {list_first([str(n) for n in missing], 8)}"
        report.add(
            "classes",
            f"no node has the {named}: the model has outputs for {classes:,} classes",
        )
        last = int(present[-1])
        if len(present) > 1 and last > present[-2] + 1:
            hint = f"if {last} stands for nodes without a label, write -1"
            report.add(
                "markers",
                f"{pluralize(int(counts[last]), 'node')} of class {last}, after a gap; {hint}",
            )
    untrained = np.setdiff1d(present, labels[split["train"]])
    if len(untrained):
        report.add(
            "classes",
            f"no training node has the label {list_first([str(n) for n in untrained], 8)}",
        )


def report_split(
    report: DataReport, labels: np.ndarray, split: Mapping[str, np.ndarray]
) -> None:
    """Add the sizes of the splits, and labelled nodes that are in none."""
    sizes = ", ".join(f"{len(split[part]):,} {part}" for part in SPLITS)
    report.add("split", f"nodes: {sizes}")
    unused = int((labels >= 0).sum()) - sum(len(split[part]) for part in SPLITS)
    if unused:
        report.add(
            "split",
            f"{pluralize(unused, 'node')} with a label in none of them, used as neighbours alone",
        )


def report_repeated_entries(
    report: DataReport, names: Iterable[str], repeated: int, summed: bool
) -> None:
    """Add how many entries of a sparse matrix were given more than once."""
    noun = "entry" if repeated == 1 else "entries"
    what = "added up" if summed else "counted once"
    report.add(
        "changed",
        f"{repeated:,} {noun} given more than once in {' and '.join(names)}, {what}",
    )
