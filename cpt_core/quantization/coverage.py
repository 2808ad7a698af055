"""Stand-in for a module of release 0.3.0: models that were stored whole name it when they are loaded."""

raise ImportError(
    "this model was stored whole by release 0.3.0 of cpt_core; load its state_dict into a model converted by this one"
)
