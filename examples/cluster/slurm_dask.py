"""A grid on workers that SLURM starts when there are runs: ``python examples/cluster/slurm_dask.py cifar10/resnet74``.

It needs dask-jobqueue, and runs where jobs are submitted, for as long as the grid takes. ``CPT_DATA_DIR`` and
``CPT_RUNS_DIR`` name folders that all machines share. For PBS take ``PBSCluster``, with
``resource_spec="select=1:ncpus=1:ngpus=1:mem=16gb"`` instead of ``job_extra_directives``.
"""

import os
import subprocess
import sys

from dask_jobqueue import SLURMCluster

if __name__ == "__main__":
    folders = " ".join(
        f"{name}={os.environ[name]}" for name in ("CPT_DATA_DIR", "CPT_RUNS_DIR")
    )
    cluster = SLURMCluster(
        cores=1,
        memory="16GB",
        walltime="24:00:00",
        worker_extra_args=["--resources", "GPU=1"],
        job_extra_directives=["--gres=gpu:1"],
        job_script_prologue=[f"export {folders}"],
    )
    cluster.adapt(
        minimum=0, maximum=16
    )  # jobs end when there are no runs left for them
    where = ["--executor", "dask", "--scheduler", cluster.scheduler_address]
    status = subprocess.run(
        [sys.executable, "-m", "cpt_lab", "run", *sys.argv[1:], *where]
    ).returncode
    cluster.close()
    sys.exit(status)
