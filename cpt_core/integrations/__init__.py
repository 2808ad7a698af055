"""Callbacks for trainers of other libraries; import the one you need, nothing here imports them by itself."""
