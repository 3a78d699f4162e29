"""The propositions of the LaPA2 paper, tested on synthetic logits and on a model."""
