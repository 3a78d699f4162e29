"""Figure augmentation_large: as figure augmentation, of the large models."""

from augmentation import draw
from house import render

if __name__ == "__main__":
    render("augmentation_large", draw)
