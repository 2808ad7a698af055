"""What the notebooks need: checked parameters, exercises, demonstrations, papermill."""
