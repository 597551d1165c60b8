"""One training: the loop, what it is made of, and what it saves."""
