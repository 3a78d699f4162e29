"""From texts to numbers."""
