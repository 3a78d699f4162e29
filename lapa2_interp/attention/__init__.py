"""What acts on attention scores, and what records attention."""
