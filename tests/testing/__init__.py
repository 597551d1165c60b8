"""Tests of trainkit.testing: trainkit's own parts pass, and broken ones are found."""
