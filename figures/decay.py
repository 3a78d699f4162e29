"""Figure decay: accuracy of the base methods against length."""

from house import render

from lapa2_interp import plots

render("decay", plots.control_against_length)
