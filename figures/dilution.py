"""Figure dilution: attention on the prefix against step, and C/(t + D)."""

from house import render

from lapa2_interp import plots

render("dilution", plots.dilution_curves, "fits")
