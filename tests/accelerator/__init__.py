"""Tests of `Accelerator` for loops of the user's own."""
