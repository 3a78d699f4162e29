"""Modules that every room uses and no one else: checks of values, settings, parsing, terminal."""
