"""Tests of `trainkit.callbacks`."""
