"""Figure eval: ratings of humans and of a judge model, where there are any."""

from house import render

from lapa2_interp import plots

render("eval", plots.ratings)
