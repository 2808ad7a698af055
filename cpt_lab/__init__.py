"""The paper, rerun: experiments, data, tasks, one training run, sweeps, analysis, and the command line."""


def main() -> None:
    """Run a command of ``cpt``, or say which extra it needs."""
    import sys

    from cpt_extras.optional_libraries import extra_named

    try:
        with extra_named("lab"):
            from cpt_lab.commands import main as run
    except ImportError as missing:
        sys.exit(f"error: {missing}")
    run()
