"""Runs set beside each other: read with suspicion, and as tidy tables."""
