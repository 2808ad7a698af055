"""The paper's schedules on ladders of other number formats: H6."""
