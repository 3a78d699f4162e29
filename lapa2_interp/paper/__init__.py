"""What concerns only the LaPA2 paper: its numbers, claims, tables and the study of its
propositions."""
