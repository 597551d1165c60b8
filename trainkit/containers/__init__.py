"""Nestings of values: walk through them, split them by samples, send them."""
