"""A planted model, whose circuit is known.

The weights are set by hand, and the control by the heads has a closed form.

Two layers of four heads write sentiment. The attribute is one token of the prefix (" positive" or
" negative"). Every embedding has a constant 1, flags for its roles, its sign +1 or -1, and random
numbers that fill the rest of its length: |x|^2 = WIDTH, so that the norms change nothing until a
head has written. A head's score is log(E) on its target key and 0 on all others, so that among l
keys it gives that key

    A = E / (E + l - 1)

=============  =====  ==============================================================================
head           layer  what it does
=============  =====  ==============================================================================
carrier        1      reads the attribute's sign at queries after the prefix, writes `carrier` * A *
                      sign on the direction u of the attribute's words
suppressor     1      the same with a negative gain
relay          0      at the prompt's last token reads the sign and leaves it there; elsewhere it
                      rests on BOS
reader         1      reads the relay's output at the prompt's last token, and writes it on u
decoy          1      gives the attribute more attention than any other head, and writes nothing
idle heads     0      write nothing: their true effect is 0
=============  =====  ==============================================================================

With x the sum of the heads' outputs on u, the difference of the log-probabilities of positive and
negative words is lex = 2 U x / sqrt(1 + x^2 / WIDTH). `Planted.lex` gives it at any length, with
heads cut or biased. The places of the heads, the gains and the order of the vocabulary depend on a
seed, so that a method can only find them in the model.

Names: "planted" (a Llama with grouped queries), "planted-gpt2" (LayerNorm; every number stands
twice, with both signs, so that means are 0), and three other circuits:

- "planted-gain": no carrier. The attention that fades is that of the reader to the prompt's last
  token, and no attention to the prefix.
- "planted-backup": a third layer, in which a head does the carrier's work where the carrier does
  not. Its query falls with a mark that the carrier leaves.
- "planted-spread": a gate in layer 0 reads the prefix's first token, and without it the carrier
  does not find the attribute: two tokens are needed.

A seed follows a colon: "planted:3".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lapa2_interp._util.parsing import whole_number
from lapa2_interp.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PLANTED = "planted"
CIRCUITS = ("", "gpt2", "gain", "backup", "spread")
WIDTH = 16
"""Length of an embedding, squared; in all but the LayerNorm twin also its dimension."""
D_HEAD = 8
REST_SCORE = 25.0
"""Score of BOS in a head that rests on it."""
SCORE_DIMENSIONS = (2, 3)
"""Dimensions of a head for scores; rotary angles there are below 1e-4 at 2,048 positions."""
CONSTANT, BOS, FLAG, SIGN, ASK, U, LEFT, FIRST, MARK = range(9)
"""Dimensions of the residual stream: constant, BOS, is the attribute, its sign, is a prompt's last
token, the words' direction, the relay's output, is the prefix's first token, the mark of gate or
carrier."""
ATTRIBUTE_AT = 2
"""Slot of the attribute: after BOS and the prefix's first token."""
POSITIVE = (" great", " best", " excellent", " love", " wonderful", " perfect")
NEGATIVE = (" bad", " worst", " awful", " boring", " waste", " terrible")
FILLERS = (
    " the", " a", " of", " and", " to", " in", " is", " it", " that", " was", " for", " on", " as",
    " with", " his", " he", " by", " at", " from", " her", " she", " or", " an", " they",
)  # fmt: skip
"""Words of texts; no word list has them."""
PREFIX = ("Very", " positive", " negative", ":")
PROMPTS = (
    "Once upon a time", "The book", "The chicken", "The city", "The country", "The horse",
    "The lake", "The last time", "The movie", "The painting", "The pizza", "The potato",
    "The president of the country", "The road", "The year is 1910.",
)  # fmt: skip
"""The prompts it can read: those of the task sentiment."""
WORD_PATTERN = r" ?\w+|[^\w\s]"
NEVER_LOGIT = -60.0
"""Logit of tokens that texts do not have."""


@dataclass(frozen=True)
class Planted:
    """The answer key of a planted model.

    Attributes:
        circuit, seed: The name of the circuit ("" for the plain one), and the seed.
        heads: By role, the (layer, head). Roles that the circuit lacks are left out.
        odds: By role, E: the weight of the target key as a multiple of another key's.
        gain: By role, the output on u for an input of 1 (relay: on its own dimension).
        logit: U, what 1 on u adds to the logit of a positive word.
    """

    circuit: str
    seed: int
    heads: Mapping[str, tuple[int, int]]
    odds: Mapping[str, float]
    gain: Mapping[str, float]
    logit: float

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return (3 if self.circuit == "backup" else 2), 4

    def written(
        self,
        l: int,
        n_prompt: int,
        *,
        n_prefix: int = 3,
        weights: Mapping[str, tuple[float, float, float]] | None = None,
        asking: bool = False,
    ) -> tuple[float, float]:
        """The sum of the heads' outputs after " positive" at a query of a text.

        Args:
            l: Keys of the query, BOS and its own included.
            n_prompt: Tokens of the prompt.
            n_prefix: Tokens of the prefix, its first and the attribute among them.
            weights: By role, the factors of the attention weights of the attribute, of the prefix's
                first token and of its other tokens: exp(b), 0 where they are cut.
            asking: True if the query is the prompt's last token itself.

        Returns:
            The sum on u, and the squared length on the other dimensions that heads write to.
        """
        # The outputs of layer 0 (relay and gate), and what the norms multiply by after it.
        there = 1 + n_prefix + n_prompt  # keys of the prompt's last token
        gain = dict.fromkeys(self.gain, 0.0) | {
            role: value for role, value in self.gain.items() if role in {*self.heads, "mark"}
        }
        left = gain["relay"] * self._share("relay", self.odds["relay"], there, n_prefix, weights)
        gates = [
            gain["gate"] * self._share("gate", self.odds["gate"], keys, n_prefix, weights)
            for keys in (l, there)
        ]
        at_attribute = _norm((gain["gate"] * self._early("gate")) ** 2)
        at_prompt = _norm(left**2, gates[1] ** 2)
        at_query = at_prompt if asking else _norm(gates[0] ** 2)
        rest = gates[0] ** 2 + (left**2 if asking else 0.0)

        # The heads of layer 1.
        asks = at_query * at_attribute * (gates[0] if "gate" in self.heads else 1.0)
        odds = {role: self.odds[role] for role in ("carrier", "suppressor", "reader")}
        odds["carrier"] **= asks
        odds["suppressor"] **= at_query * at_attribute
        odds["reader"] **= at_prompt * at_query
        shares = {role: self._share(role, odds[role], l, n_prefix, weights) for role in odds}
        carried, suppressed = (at_attribute * shares[role] for role in ("carrier", "suppressor"))
        read = at_prompt * shares["reader"]
        x = (
            gain["carrier"] * carried
            + gain["suppressor"] * suppressed
            + gain["reader"] * left * read
        )
        # The backup head of layer 2.
        if "backup" in self.heads:
            mark, mark_early = gain["mark"] * carried, gain["mark"] * self._early("carrier")
            early_x = gain["carrier"] * self._early("carrier") + gain["suppressor"] * self._early(
                "suppressor"
            )
            at_attribute = _norm(early_x**2, mark_early**2)
            log_odds = math.log(self.odds["backup"]) - REST_SCORE * mark
            eager = math.exp(log_odds * _norm(rest, x**2, mark**2) * at_attribute)
            share = self._share("backup", eager, l, n_prefix, weights)
            x += gain["backup"] * at_attribute * share
            rest += mark**2
        return x, rest

    def _early(self, role: str) -> float:
        """A head's attention to its target key at the attribute itself, where nothing is cut."""
        return self.odds[role] / (self.odds[role] + ATTRIBUTE_AT)

    def _share(
        self,
        role: str,
        odds: float,
        keys: int,
        n_prefix: int,
        weights: Mapping[str, tuple[float, float, float]] | None,
    ) -> float:
        """A head's attention to its target key."""
        attribute, first, others = (weights or {}).get(role, (1.0, 1.0, 1.0))
        prefix = attribute + first + (n_prefix - 2) * others
        outside = keys - n_prefix
        if role == "reader":
            return odds / (odds + outside - 1 + prefix)
        target = first if role == "gate" else attribute
        return odds * target / ((odds - 1) * target + prefix + outside)

    def lex(self, l: int, n_prompt: int, **settings: Any) -> float:
        """lse of the positive words' log-probabilities minus that of the negative words', after
        " positive"; after " negative" the sign is the opposite. The arguments are those of
        `written`."""
        x, rest = self.written(l, n_prompt, **settings)
        return 2 * self.logit * x / math.sqrt(1 + (x**2 + rest) / WIDTH)

    def control(self, l: int, n_prompt: int, **settings: Any) -> float:
        """D = lex after " positive" minus lex after " negative"."""
        return 2 * self.lex(l, n_prompt, **settings)

    def effect(self, role: str, l: int, n_prompt: int, **settings: Any) -> float:
        """The control that is lost if a head does not see the prefix, at any query after it."""
        cut = {role: (0.0, 0.0, 0.0)}
        return self.control(l, n_prompt, **settings) - self.control(
            l, n_prompt, weights=cut, **settings
        )


def _norm(*squares: float) -> float:
    """The factor of a norm after these squares were added to an embedding's squared length."""
    return 1 / math.sqrt(1 + sum(squares) / WIDTH)


def is_planted(name: str) -> bool:
    """True if a name is that of a planted model."""
    return name.split(":")[0].split("-")[0] == PLANTED and not name.startswith((".", "/"))


@cache
def answer_key(name: str) -> Planted:
    """The answer key of a planted model.

    Raises:
        ModelError: No such circuit, or a seed that is no number.
    """
    kind, _, seed = name.partition(":")
    circuit = kind.partition("-")[2]
    if circuit not in CIRCUITS or (seed and whole_number(seed) is None):
        allowed = ", ".join(
            f"{PLANTED}-{name_of_circuit}" if name_of_circuit else PLANTED
            for name_of_circuit in CIRCUITS
        )
        raise ModelError(
            f"unknown model {name[:80]!r}; planted models: {allowed}, with a seed as {PLANTED}:3"
        )
    # Draw the odds and gains near these values.
    number = whole_number(seed) or 0
    rng = np.random.default_rng([1913, number])
    around = {
        "odds": {
            "carrier": 20.0, "suppressor": 12.0, "decoy": 200.0, "relay": 40.0, "reader": 25.0,
            "gate": 30.0, "backup": 300.0,
        },
        "gain": {
            "carrier": 14.0, "suppressor": -3.5, "relay": 3.5, "reader": 2.5, "gate": 4.0,
            "mark": 2.0, "backup": 20.0,
        },
    }  # fmt: skip
    if circuit == "gain":
        around["gain"] |= {"relay": 4.0, "reader": 4.0}
    drawn = {
        kind: {role: value * rng.uniform(0.9, 1.1) for role, value in values.items()}
        for kind, values in around.items()
    }
    # Draw the places of the heads.
    groups = [rng.permutation(2) for _ in range(3)]  # KV heads, by layer
    pairs = rng.permuted(np.tile([0, 1], (3, 2, 1)), axis=2)  # heads of a group, by layer and group

    def head_at(layer: int, group: int, which: int) -> tuple[int, int]:
        group = int(groups[layer][group])
        return layer, int(2 * group + pairs[layer, group, which])

    heads = {
        "relay": head_at(0, 1, 1),
        "suppressor": head_at(1, 0, 0),
        "reader": head_at(1, 0, 1),
        "carrier": head_at(1, 1, 0),
        "decoy": head_at(1, 1, 1),
    }
    if circuit == "gain":
        del heads["carrier"], heads["suppressor"]
    if circuit == "spread":
        heads["gate"] = head_at(0, 0, 0)
    if circuit == "backup":
        heads["backup"] = head_at(2, 0, 0)
    return Planted(
        circuit, number, heads, drawn["odds"], drawn["gain"], 1.2 * rng.uniform(0.9, 1.1)
    )


def split_words(text: str) -> list[str]:
    """Split a text of known words into tokens."""
    import re

    return re.findall(WORD_PATTERN, text)


def vocabulary(name: str) -> dict[str, int]:
    """Tokens and their ids. The first eight are fixed, the order of the others depends on the
    seed."""
    known = ["<s>", " positive", "Very", ":", " negative", "<unk>", *FILLERS[:2]]
    others = {piece for prompt in PROMPTS for piece in split_words(prompt)}
    rest = sorted(({*others, *FILLERS, *POSITIVE, *NEGATIVE}) - set(known))
    order = np.random.default_rng([7, answer_key(name).seed]).permutation(len(rest))
    return {token: i for i, token in enumerate([*known, *(rest[j] for j in order)])}


def planted_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer with one token a word, which includes the space before it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocabulary(name), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<s>",
        pad_token="<s>",
        unk_token="<unk>",
    )


def _embeddings(name: str) -> np.ndarray:
    """[token, WIDTH], every row of length sqrt(WIDTH)."""
    words = vocabulary(name)
    rows = np.zeros((len(words), WIDTH))
    rows[:, CONSTANT] = 1
    rows[words["<s>"], BOS] = 1
    rows[words["Very"], FIRST] = 1
    for word, sign in ((" positive", 1), (" negative", -1)):
        rows[words[word], [FLAG, SIGN]] = 1, sign
    for prompt in PROMPTS:
        rows[words[split_words(prompt)[-1]], ASK] = 1
    rest = np.random.default_rng([23, answer_key(name).seed]).normal(size=(len(words), WIDTH - 9))
    lack = np.sqrt(WIDTH - (rows**2).sum(1))
    rows[:, 9:] = rest / np.linalg.norm(rest, axis=1, keepdims=True) * lack[:, None]
    return rows


def _unembedding(name: str) -> np.ndarray:
    """[token, WIDTH]: words of the attribute along u, filler words at logit 0, all others at
    `NEVER_LOGIT`."""
    key, words = answer_key(name), vocabulary(name)
    rows = np.zeros((len(words), WIDTH))
    rows[:, CONSTANT] = NEVER_LOGIT
    rows[[words[token] for token in (*FILLERS, *POSITIVE, *NEGATIVE)], CONSTANT] = 0
    rows[[words[token] for token in POSITIVE], U] = key.logit
    rows[[words[token] for token in NEGATIVE], U] = -key.logit
    return rows


@dataclass
class _Weights:
    """One layer: q [head, HEAD, WIDTH], k and v [group, HEAD, WIDTH], o [head, WIDTH, HEAD]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray


def _layers(name: str) -> list[_Weights]:
    """The weights of every layer, head by head."""
    key = answer_key(name)
    n_layers, n_heads = key.shape
    layers = [
        _Weights(
            np.zeros((n_heads, D_HEAD, WIDTH)),
            np.zeros((2, D_HEAD, WIDTH)),
            np.zeros((2, D_HEAD, WIDTH)),
            np.zeros((n_heads, WIDTH, D_HEAD)),
        )
        for _ in range(n_layers)
    ]
    scale = math.sqrt(D_HEAD)  # attention divides scores by it
    flag, second = SCORE_DIMENSIONS

    def looks(role: str, slot: int, at: int, key_at: int, odds: float) -> None:
        """Let one dimension of a head's query match a flag of the keys."""
        layer, head = key.heads[role]
        layers[layer].q[head, slot, at] += scale * math.log(odds)
        layers[layer].k[head // 2, slot, key_at] = 1

    def writes(role: str, slot: int, read: int, write: int, gain: float) -> None:
        layer, head = key.heads[role]
        layers[layer].v[head // 2, slot, read] = 1
        layers[layer].o[head, write, slot] += gain

    # The relay looks for the attribute at the prompt's last token, and rests on BOS elsewhere.
    looks("relay", flag, ASK, FLAG, key.odds["relay"])
    looks("relay", second, CONSTANT, BOS, math.exp(REST_SCORE))
    looks("relay", second, ASK, BOS, math.exp(-REST_SCORE))
    writes("relay", 0, SIGN, LEFT, key.gain["relay"])
    looks("reader", second, CONSTANT, ASK, key.odds["reader"])
    writes("reader", 1, LEFT, U, key.gain["reader"])
    looks("decoy", flag, CONSTANT, FLAG, key.odds["decoy"])
    if "carrier" in key.heads:
        asks_with = MARK if key.circuit == "spread" else CONSTANT
        looks("carrier", flag, asks_with, FLAG, key.odds["carrier"])
        writes("carrier", 0, SIGN, U, key.gain["carrier"])
        looks("suppressor", flag, CONSTANT, FLAG, key.odds["suppressor"])
        writes("suppressor", 0, SIGN, U, key.gain["suppressor"])
    if key.circuit == "spread":
        looks("gate", flag, CONSTANT, FIRST, key.odds["gate"])
        writes("gate", 1, FIRST, MARK, key.gain["gate"])
    if key.circuit == "backup":
        writes("carrier", 2, FLAG, MARK, key.gain["mark"])
        looks("backup", flag, CONSTANT, FLAG, key.odds["backup"])
        looks("backup", flag, MARK, FLAG, math.exp(-REST_SCORE))
        writes("backup", 0, SIGN, U, key.gain["backup"])
    return layers


def planted_config(name: str) -> PretrainedConfig:
    """The configuration of a planted model."""
    from transformers import GPT2Config, LlamaConfig

    key = answer_key(name)
    n_layers, n_heads = key.shape
    shared: dict[str, Any] = {
        "vocab_size": len(vocabulary(name)),
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if key.circuit == "gpt2":
        return GPT2Config(
            n_embd=2 * WIDTH,
            n_layer=n_layers,
            n_head=n_heads,
            n_positions=2048,
            n_inner=1,
            layer_norm_epsilon=1e-12,
            **shared,
        )
    return LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=1,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=2,
        head_dim=D_HEAD,
        max_position_embeddings=2048,
        rms_norm_eps=1e-12,
        rope_parameters={"rope_type": "default", "rope_theta": 1e16},
        **shared,
    )


def planted_network(name: str) -> PreTrainedModel:
    """The planted transformers model, in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_config(
        planted_config(name), attn_implementation="eager"
    ).double()
    twin = answer_key(name).circuit == "gpt2"
    norms = {id(p) for n, p in network.named_parameters() if "norm" in n or "ln_" in n}

    def both(rows: np.ndarray) -> np.ndarray:
        """[..., WIDTH] read from or written to both signs of the residual stream."""
        return np.concatenate([rows, -rows], axis=-1)

    with torch.no_grad():
        for parameter_name, parameter in network.named_parameters():
            is_scale = id(parameter) in norms and parameter_name.endswith("weight")
            parameter.fill_(1.0 if is_scale else 0.0)
        if twin:
            _fill_gpt2(network, name, both)
        else:
            body = network.model
            body.embed_tokens.weight.copy_(torch.from_numpy(_embeddings(name)))
            network.lm_head.weight.copy_(torch.from_numpy(_unembedding(name)))
            for layer, weights in zip(body.layers, _layers(name), strict=True):
                attention = layer.self_attn
                attention.q_proj.weight.copy_(torch.from_numpy(weights.q.reshape(-1, WIDTH)))
                attention.k_proj.weight.copy_(torch.from_numpy(weights.k.reshape(-1, WIDTH)))
                attention.v_proj.weight.copy_(torch.from_numpy(weights.v.reshape(-1, WIDTH)))
                wide = weights.o.transpose(1, 0, 2).reshape(WIDTH, -1)
                attention.o_proj.weight.copy_(torch.from_numpy(wide))
    return network.eval()


def _fill_gpt2(network: Any, name: str, both: Any) -> None:
    """Write the weights into the LayerNorm twin, every number with both signs."""
    import torch

    body = network.transformer
    body.wte.weight.copy_(torch.from_numpy(both(_embeddings(name))))
    network.lm_head.weight.copy_(torch.from_numpy(both(_unembedding(name)) / 2))
    for block, weights in zip(body.h, _layers(name), strict=True):
        k, v = (np.repeat(matrix, 2, axis=0) for matrix in (weights.k, weights.v))
        # c_attn: [in, 3 x out]
        parts = [both(matrix.reshape(-1, WIDTH) / 2).T for matrix in (weights.q, k, v)]
        block.attn.c_attn.weight.copy_(torch.from_numpy(np.concatenate(parts, axis=1)))
        wide = weights.o.transpose(1, 0, 2).reshape(WIDTH, -1).T  # in WIDTH
        block.attn.c_proj.weight.copy_(torch.from_numpy(both(wide)))
