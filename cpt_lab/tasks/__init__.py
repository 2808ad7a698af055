"""Tasks: a data set with a model, a loss and metrics. ``base.load_task_class`` imports only the task of a spec."""
