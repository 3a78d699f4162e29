"""Augmentation of attention scores, decode caches, and recording of attention."""
