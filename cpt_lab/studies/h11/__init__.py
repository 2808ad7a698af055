"""H11: whether the order of bits matters once the learning rate decays."""
