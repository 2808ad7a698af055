"""Which bits, and when: range test, sensitivity, allocation, and schedules of exactly one cost."""
