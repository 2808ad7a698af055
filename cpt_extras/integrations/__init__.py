"""Ways in from other libraries and out to them; import the one you need, nothing here imports them by itself."""
