"""Where an augmentation meets a network."""
