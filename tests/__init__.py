"""The tests of trainkit."""
