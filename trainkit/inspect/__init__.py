"""What looks at a run from outside: explained before, replayed and reported after it."""
