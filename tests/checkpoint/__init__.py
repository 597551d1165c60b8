"""Tests of trainkit.checkpoint."""
