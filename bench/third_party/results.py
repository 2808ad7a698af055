"""The stored results of ``bench.third_party``."""

FILE = "third_party.json"
OUTCOMES = ("holds", "holds in float64", "broken", "does not apply", "crashed")
