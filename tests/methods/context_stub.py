"""A method context for tests without a model."""


class ContextStub:
    """A method context with given drafts and scores, and no model."""

    end_ids, n_layers, gated = (0,), 4, False

    def __init__(self, drafts, shares):
        self.texts, self.q, self.asked = drafts, shares, []

    def cached(self, name, make):
        return make()

    def embedding(self):
        raise AssertionError("not asked for")

    def promoting_neurons(self, tokens, k, upper=False):
        raise AssertionError("not asked for")

    def mean_residual(self, prefix, texts):
        raise AssertionError("not asked for")

    def ids(self, text):
        return [ord(character) for character in text]

    def text(self, ids):
        return "".join(map(chr, ids))

    def drafts(self, method, prompt, n, new_tokens, seed):
        self.asked.append((method.name, prompt, n, new_tokens, seed))
        return self.texts

    def attribute_probabilities(self, scorer, task, attribute, prompt, texts):
        return self.q
