"""Tests of `trainkit.distributed`."""
