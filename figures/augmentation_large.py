"""Figure augmentation_large: attention on the prefix with and without LaPA2, on detoxification."""

from house import render

from lapa2_interp import plots

render("augmentation_large", plots.attention_with_and_without)
