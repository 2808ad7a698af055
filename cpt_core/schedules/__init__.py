"""How many bits at which optimizer step, what it costs, a schedule for a budget.  Paper: sections 3-5. No torch."""
