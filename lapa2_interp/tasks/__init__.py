"""Control tasks with their prefixes and prompts; word lists and corpora."""
