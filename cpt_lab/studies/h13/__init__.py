"""H13: which operations should switch late, in the formats that hardware has."""
