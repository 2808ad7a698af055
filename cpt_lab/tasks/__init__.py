"""The tasks: what is trained, on what. ``cpt_lab.training.session.task_of`` imports the one that is asked for."""
