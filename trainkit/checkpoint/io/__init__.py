"""The disk: what writes to it and what reads from it."""
