"""Runs: how they are stored and read."""
