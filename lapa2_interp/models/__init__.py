"""Models: loaded, described, held to their promises."""
