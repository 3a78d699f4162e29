"""Soft prefixes: training them, measuring them on held-out text, importing those that other code
trained."""
