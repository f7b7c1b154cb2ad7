"""Sandboxes for programs that nobody has read. `sandboxes.py` makes them and runs programs in them."""
