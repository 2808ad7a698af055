"""H5: bits allocated by measured sensitivities against static precision of equal cost."""
