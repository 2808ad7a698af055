"""The tasks: what is trained, on what. ``cpt_lab.tasks.base.load_task_class`` imports the one that is asked for."""
