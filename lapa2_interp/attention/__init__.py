"""How an augmentation acts on the attention of a network."""
