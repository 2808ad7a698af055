"""Facts about a graph for its data report: edges, features, labels, splits, and arrays that are not used.

Shapes: N nodes, E edges, F features.
"""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

import numpy as np

from cpt_lab.data.report import DataReport, list_counts, list_first, pluralize
from cpt_lab.data.splits import SPLITS

# Patterns for names of arrays that other tools write -> why they are not used.
UNUSED_ARRAYS = {
    "*edge_weight*|*weights|adj_data|edge_data": "edges have no weights here, every edge counts alike",
    "*edge_attr*|*edge_feat*|efeat*": "edges have no features here",
    "*edge_type*|*edge_rel*|etype*|*relation*": "edges are of one type here",
    "*node_type*|ntype*": "nodes are of one type here",
    "*edge_index*|*edges*": "one array of edges is read; a graph of several types of nodes or edges is not",
    "pos|*coord*|*position*": "positions are no features here",
    "*name*": "names are for people",
    "*year*|*time*": "times of nodes or edges are not used",
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
    num_without_loops: int,
    num_different: int,
    num_bidirected: int,
) -> None:
    """Add facts about the edges of a file, and how they were changed.

    Args:
        report: gets the facts.
        source: (E,) source nodes as the file has them.
        destination: (E,) destination nodes.
        num_without_loops: edges that are no self-loops.
        num_different: different edges among these.
        num_bidirected: edges of the graph in both directions, without self-loops.
    """
    num_edges = len(source)
    report.add("read", f"{pluralize(num_edges, 'edge')}, taken in both directions")
    num_loops = num_edges - num_without_loops
    if num_loops:
        report.add(
            "changed", f"{pluralize(num_loops, 'self-loop')} of the file dropped"
        )
    num_repeated = num_without_loops - num_different
    if num_repeated:
        report.add(
            "changed", f"{pluralize(num_repeated, 'edge')} given more than once merged"
        )
    num_one_way = num_bidirected - num_different
    if num_one_way:
        report.add(
            "changed",
            f"{num_one_way:,} of {pluralize(num_different, 'edge')} taken in the other direction, too",
        )
    all_one_way = num_without_loops and num_one_way == num_different
    if all_one_way and not np.intersect1d(source, destination).size:
        report.add(
            "changed",
            "every edge leads from one group of nodes to another (a bipartite graph): both are nodes of one type here",
        )


def report_features(
    report: DataReport, raw_features: np.ndarray, features: np.ndarray
) -> None:
    """Add facts about types and range of features.

    Args:
        report: gets the facts.
        raw_features: (N, F) as the file has them.
        features: (N, F) in float32.
    """
    if raw_features.dtype != features.dtype:
        text = f"features converted from {raw_features.dtype} to float32"
        if raw_features.dtype.kind in "iu" and raw_features.size:
            largest = max(abs(int(raw_features.min())), int(raw_features.max()))
            if largest > EXACT_INTEGER:
                text += f"; whole numbers above {EXACT_INTEGER:,} lose digits"
        report.add("changed", text)
    if not features.size:
        report.add("values", "there are no features")
        return

    low, high = features.min(0), features.max(0)
    report.add(
        "values",
        f"{pluralize(len(low), 'feature')} from {low.min():.6g} to {high.max():.6g}",
    )
    num_constant = int((low == high).sum())
    num_zero = int(((low == 0) & (high == 0)).sum())
    if num_constant:
        report.add(
            "values",
            f"{pluralize(num_constant, 'feature')} equal in all nodes, {num_zero:,} of them 0",
        )


def report_same_features(
    report: DataReport, features: np.ndarray, split: Mapping[str, np.ndarray]
) -> None:
    """Add facts about evaluated nodes with the features of a training node, unless there are millions of nodes."""
    if len(features) > MAX_NODES_COMPARED or not features.shape[1]:
        return
    training_rows = {row.tobytes() for row in features[split["train"]]}
    for part in SPLITS[1:]:
        num_shared = sum(
            row.tobytes() in training_rows for row in features[split[part]]
        )
        if num_shared:
            nodes = pluralize(len(split[part]), f"{part} node")
            report.add(
                "overlap",
                f"{num_shared:,} of {nodes} have the same features as a training node",
            )


def report_labels(
    report: DataReport,
    labels: np.ndarray,
    split: Mapping[str, np.ndarray],
    classes: int,
) -> None:
    """Add facts about nodes per class, classes without nodes, and nodes without a label.

    Args:
        report: gets the facts.
        labels: (N,) int64, -1 for nodes without a label.
        split: nodes of every split.
        classes: number of classes.
    """
    counts = np.bincount(labels[labels >= 0], minlength=classes)
    present = np.flatnonzero(counts)
    count_by_class = {f"class {number}:": int(counts[number]) for number in present}
    report.add("classes", list_counts(count_by_class))
    num_unlabelled = int((labels < 0).sum())
    if num_unlabelled:
        report.add("classes", f"{pluralize(num_unlabelled, 'node')} without a label")

    missing = np.flatnonzero(counts == 0)
    if len(missing):
        noun = "class" if len(missing) == 1 else "classes"
        report.add(
            "classes",
            f"no node has the {noun} {list_first(list(map(str, missing)), 8)}: the model has outputs for "
            f"{classes:,} classes",
        )
        last = int(present[-1])
        if len(present) > 1 and last > present[-2] + 1:
            report.add(
                "markers",
                f"{pluralize(int(counts[last]), 'node')} of class {last}, after a gap; if {last} stands for nodes "
                "without a label, write -1",
            )
    untrained = np.setdiff1d(present, labels[split["train"]])
    if len(untrained):
        report.add(
            "classes",
            f"no training node has the label {list_first(list(map(str, untrained)), 8)}",
        )


def report_split(
    report: DataReport, labels: np.ndarray, split: Mapping[str, np.ndarray]
) -> None:
    """Add facts about the sizes of the splits, and about labelled nodes in none of them."""
    sizes = ", ".join(f"{len(split[part]):,} {part}" for part in SPLITS)
    report.add("split", f"nodes: {sizes}")
    unused = int((labels >= 0).sum()) - sum(len(split[part]) for part in SPLITS)
    if unused:
        report.add(
            "split",
            f"{pluralize(unused, 'node')} with a label in none of them, used as neighbours alone",
        )


def report_repeated_entries(
    report: DataReport, names: Iterable[str], count: int, is_summed: bool
) -> None:
    """Add a fact about entries of a sparse matrix that are given more than once.

    Args:
        report: gets the fact.
        names: names of the arrays that hold the entries.
        count: number of repeated entries.
        is_summed: whether their values are added up.
    """
    noun = "entry" if count == 1 else "entries"
    treatment = "added up" if is_summed else "counted once"
    report.add(
        "changed",
        f"{count:,} {noun} given more than once in {' and '.join(names)}, {treatment}",
    )
