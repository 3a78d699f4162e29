"""The bias on attention scores as values and closed forms; no network."""
