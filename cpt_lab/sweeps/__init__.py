"""Sweeps: train many runs in parallel, on one machine or several, and store one result row per run.

The problem. A figure of the paper needs hundreds of training runs that take from seconds to days. Machines are shared,
processes run out of memory, and batch systems end jobs early. No result may be lost, trained twice or changed later.

The design. Every run is described completely by a ``RunSpec``; the hash of the spec is the key of the run. A store is a
file of JSON lines (``stores``), to which finished runs append a ``ResultRow`` (``result_row``). There is neither a
server nor a queue: ``run_grid`` (``sweep``) reads the store, and trains the specs that have no row. Before a run
starts, its worker claims it with a lock of the operating system (``stores.claim``), which ends with the process that
holds it. So any number of sweeps can share a store, and another sweep takes over the runs of one that was killed.

Where a run is trained. ``worker`` trains the runs of a job: one run, or several of one seed in lockstep. ``process``
starts a process per job, watches its timeout, and stores a failed row when it dies. ``dask_cluster`` does so on the
workers of a cluster. Runs write checkpoints, and continue from them bit for bit; a row is written after everything
else, so that a process that dies loses only the time since its last checkpoint.

What protects the results. Rows are appended, never edited, and each contains a digest of itself (``row_format``): a
changed or incomplete line does not count and is named in a warning. If a run has several rows, ``newest`` decides which
one counts. ``verify`` trains stored specs again, and compares bit for bit on the same machine.

What it costs. Reading a store means scanning a file: ``row_index`` remembers the positions of rows, so that this stays
cheap for ten thousand runs, but the format is not made for millions. Locks must work on the file system of the store;
``cpt doctor`` checks them, and machines without a shared disk train shards of a grid into files of their own.

``options`` are the options of a sweep, ``progress`` is its progress bar and signal handling, ``forecast`` and
``step_timing`` estimate hours and disk space before a sweep, and ``trackers`` copies rows to experiment trackers.
"""
