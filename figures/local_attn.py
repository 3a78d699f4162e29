"""Figure local_attn: share of the nearest k keys in the attention outside the prefix."""

from house import render

from lapa2_interp import plots

render("local_attn", plots.local_shares)
