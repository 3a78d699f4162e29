"""What is about the LaPA2 paper and only about it: its numbers, claims, tables and the study of its propositions."""
