"""The tasks: what is trained, on what. ``cpt_lab.tasks.base.task_of`` imports the one that is asked for."""
