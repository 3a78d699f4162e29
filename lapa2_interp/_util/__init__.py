"""Modules that every room uses: errors, files, progress, plots, pages, the version."""
