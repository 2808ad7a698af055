"""Experiments as plain data: recipes of every task, designs of experiments, and named grids. Without torch.

``schema`` defines what a task consists of: recipe (data set, model, hyperparameters), metric, deficits. The modules
named after a task hold its recipes, which ``registry`` finds by scale, data set and model. ``designs`` turns a recipe
into the runs of one kind of experiment, such as schedules of equal cost; ``grids`` names these lists of runs after the
figures of the paper. ``spec.RunSpec`` describes one run completely, and its hash is the key of the run: a field that is
added later is left out of the hash while it has its default, so that stored rows keep their keys.
"""
