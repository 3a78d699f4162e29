"""Figure alpha: control and perplexity against alpha."""

from house import render

from lapa2_interp import plots

render("alpha", plots.control_against_alpha)
