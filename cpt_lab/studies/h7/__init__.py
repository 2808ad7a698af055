"""Where the next bit operation should go: gradients that pay for the forward pass, and time after that: H7 and H8."""
