"""Number formats as values, ladders of them for schedules to climb, and what a product of two formats costs."""
