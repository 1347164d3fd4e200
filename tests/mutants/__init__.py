"""Planted faults, which show that the tests of a requirement can fail."""
