"""The LaPA2 paper: its numbers, claims and tables, and the study of its propositions."""
