"""Figure augmentation: attention on the prefix with and without LaPA2."""

from house import render

from lapa2_interp import plots

render("augmentation", plots.attention_with_and_without)
