"""The account of the fade: every state recomputed without the package, Shapley's shares by all
orders, and planted causes that are found."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lapa2_interp import circuits
from lapa2_interp.bias.layer_types import FULL_ATTENTION, LayerType
from lapa2_interp.circuits.contrast_set import ContrastSet
from lapa2_interp.circuits.fade_account import (
    ATTENTION,
    FACTORS,
    FAR,
    STATES,
    account_for_fading,
    attention_measures,
    shares,
    state,
)
from lapa2_interp.circuits.far_passes import CachedForward, with_filler
from lapa2_interp.cli.app import main
from lapa2_interp.errors import CircuitError
from lapa2_interp.models.facts import facts_of
from lapa2_interp.models.lens_classes import make_bridge
from lapa2_interp.models.load import load_tokenizer
from lapa2_interp.models.planted import ASK, D_HEAD, FILLERS, NEGATIVE, POSITIVE, WIDTH
from tests.conftest import fresh, load

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ("The lake", "The road", "The book", "The city", "The horse", "The movie", "The pizza")
TOKENS, FILLER = 3, 40


def contrast(model, n=FILLER + TOKENS, prompts=PROMPTS):
    words = model.tokenizer.convert_tokens_to_ids([*FILLERS, *POSITIVE, *NEGATIVE])
    drawn = np.random.default_rng(0).choice(words, (len(prompts), n)).tolist()
    texts = {prompt: [text] for prompt, text in zip(prompts, drawn, strict=True)}
    return ContrastSet.of(model, "sentiment", prompts=list(prompts), texts=texts)


def with_causes(model_class="TransformersModel"):
    """The planted model with a score that falls with the distance, and with filler words that read
    the prefix and are read themselves."""
    model = fresh("planted", "float64", model_class=model_class)
    network = facts_of(model).network
    with torch.no_grad():
        network.model.rotary_emb.inv_freq[2] = 0.02
        ids = model.tokenizer.convert_tokens_to_ids(list(FILLERS[:6]))
        rows = network.model.embed_tokens.weight
        rows[ids, ASK] = 1
        rows[ids, 9:] *= ((WIDTH - 2) / rows[ids, 9:].square().sum(1)).sqrt()[:, None]
    return model


def by_hand(model, layout, text, factors):
    """Log-probabilities of the scored steps in a state, and the mean attention on the prefix."""
    network = facts_of(model).network
    body = network.model
    ids = torch.tensor([*layout.ids, *text[:-1]])
    n = len(layout.ids)
    first = len(ids) - TOKENS  # of the scored queries
    filler = torch.arange(len(ids))
    is_filler = (filler >= n) & (filler < first)
    is_prefix = torch.zeros(len(ids), dtype=torch.bool)
    is_prefix[layout.prefix.start : layout.prefix.stop] = True
    position = torch.arange(len(ids)).double()
    near = torch.where(filler < n, position + (first - n), position)

    def rotated(x, at):
        angle = at[:, None] * body.rotary_emb.inv_freq.double()
        cos, sin = (f(torch.cat([angle, angle], 1)) for f in (torch.cos, torch.sin))
        half = torch.cat([-x[..., D_HEAD // 2 :], x[..., : D_HEAD // 2]], -1)
        return x * cos + half * sin

    def normed(x):
        return x / x.square().mean(-1, keepdim=True).sqrt()

    x, shares = body.embed_tokens.weight[ids], []
    for layer in body.layers:
        h, own = normed(x), layer.self_attn
        q, k, v = (
            proj(h).unflatten(1, (-1, D_HEAD)).transpose(0, 1)
            for proj in (own.q_proj, own.k_proj, own.v_proj)
        )
        k, v = (part.repeat_interleave(2, 0) for part in (k, v))
        natural = rotated(q, position) @ rotated(k, position).mT
        moved = rotated(q, position) @ rotated(k, near).mT
        scores = natural.clone()
        if "distance" not in factors:
            scores[:, first:] = moved[:, first:]
        weight = (scores / D_HEAD**0.5).exp() * (filler[:, None] >= filler)
        if "relay" not in factors:
            weight[:, n:first, is_prefix] = 0
        pattern = weight / weight.sum(2, keepdim=True)
        # A first, then what is left for the others.
        late = weight[:, first:]
        p, f = (late[..., mask].sum(2) for mask in (is_prefix, is_filler))
        r = late.sum(2) - p - f
        a = p / (p + r + (f if "keys" in factors else 0))
        others = late.clone()
        others[..., is_prefix] = 0
        if "content" not in factors:
            others[..., is_filler] = 0
        pattern[:, first:] = (1 - a)[..., None] * others / others.sum(2, keepdim=True)
        pattern[:, first:, is_prefix] = (a / p)[..., None] * late[..., is_prefix]
        shares.append(pattern[:, first:, is_prefix].sum(2).mean())
        x = x + own.o_proj((pattern @ v).transpose(0, 1).flatten(1))
    return network.lm_head(normed(x[first:])).log_softmax(1), float(torch.stack(shares).mean())


@pytest.mark.parametrize("model_class", ["TransformersModel", "TransformerBridge"])
@torch.no_grad()
def test_every_state_is_that_of_passes_by_hand(model_class):
    model = with_causes()
    texts = contrast(model, prompts=PROMPTS[:2])
    read = model if model_class == "TransformersModel" else bridged(model)
    account = account_for_fading(read, texts, filler=(FILLER,), tokens=TOKENS)
    words = [torch.tensor(ids) for ids in texts.words]
    distinct = set()
    for i, example in enumerate(texts.examples):
        for name in STATES:
            branches = [
                by_hand(model, layout, example.text, name.split("+")) for layout in example.layouts
            ]
            lex = [
                log_probs[:, words[0]].logsumexp(1) - log_probs[:, words[1]].logsumexp(1)
                for log_probs, _ in branches
            ]
            wanted = float((lex[0] - lex[1]).mean())
            assert account.values[FILLER, "lex", name][i] == pytest.approx(wanted, abs=1e-5), name
            attention = np.mean([share for _, share in branches])
            assert account.values[FILLER, ATTENTION, name][i] == pytest.approx(attention, abs=1e-7)
            distinct.add(round(wanted, 4))
    assert len(distinct) > 20  # the states differ


def bridged(model):
    """A bridge around the network of a plain model."""
    return make_bridge(facts_of(model).network, model.tokenizer, "planted", torch.float64, "cpu")


@torch.no_grad()
def test_near_far_and_distance_alone_are_plain_passes():
    """No factor is near, all are far; distance alone is near with the scored queries further on."""
    model = with_causes()
    texts = contrast(model)
    account = account_for_fading(model, texts, filler=(FILLER,), tokens=TOKENS, metric="js")
    fading = circuits.measure_fading(model, texts, filler=(FILLER,), tokens=TOKENS, metric="js")
    values = {name: of for (_, measure, name), of in account.values.items() if measure == "js"}
    assert values["near"] == pytest.approx(fading.near, abs=1e-7)
    assert values[FAR] == pytest.approx(fading.far[FILLER], abs=1e-7)
    for extra, bias in (("hold", "hold"), ("number", "dilution"), ("equal", "keys")):
        wanted = fading.changed[FILLER, circuits.fading.ALL, bias]
        assert values[extra] == pytest.approx(wanted, abs=1e-7)
    near = [with_filler(example, 1, TOKENS) for example in texts.examples]
    shifted = CachedForward(model, near, TOKENS)
    shifted.cached_rows.shift = FILLER - 1
    text = torch.tensor([example.text[-TOKENS:] for example in near])
    js = circuits.METRICS["js"](circuits.Predictions(shifted.logits(), text))
    assert values["distance"] == pytest.approx(js.mean(1).numpy(), abs=1e-7)


def test_planted_causes_are_found_and_absent_ones_are_nothing():
    shares = {}
    for name, model in (("plain", load("planted", "float64")), ("causes", with_causes())):
        table = account_for_fading(model, contrast(model), filler=(FILLER,), tokens=TOKENS).frame()
        shares[name] = table[table["measure"] == "lex"].set_index("name")
    plain, causes = shares["plain"], shares["causes"]
    assert plain.loc[["distance", "relay"], "share"].abs().max() < 1e-6
    assert plain.loc[["keys", "content"], "low"].min() > 0.1
    assert causes.loc["distance", "low"] > 0.1
    assert causes.loc["relay", "high"] < -0.01  # the filler brings control back
    for table in shares.values():
        assert table.loc[list(FACTORS), "share"].sum() == pytest.approx(1)


def test_a_fade_without_the_prefix_is_content():
    """planted-gain: the reader loses sight of the prompt's last token, and nobody reads the prefix
    far from it."""
    model = load("planted-gain")
    table = account_for_fading(model, contrast(model), filler=(FILLER,), tokens=TOKENS).frame()
    share = table[table["measure"] == "lex"].set_index("name")["share"]
    assert share["content"] > 0.95
    assert -0.2 < share["keys"] < 0  # what the prefix does not get, the prompt's last token gets
    assert share[["distance", "relay"]].abs().max() < 1e-6


def test_shares_are_means_over_all_orders():
    rng = np.random.default_rng(1)
    by_state = {name: rng.normal(size=9) + 3 * (name == "near") for name in STATES}
    rows = {row["name"]: row for row in shares(by_state)}
    fade = (by_state["near"] - by_state[FAR]).sum()
    for factor in FACTORS:
        marginal = []
        for order in permutations(FACTORS):
            before = order[: order.index(factor)]
            lost = by_state[state(*before)] - by_state[state(*before, factor)]
            marginal.append(lost.sum() / fade)
        row = rows[factor]
        assert row["share"] == pytest.approx(np.mean(marginal))
        assert (row["least"], row["most"]) == pytest.approx((min(marginal), max(marginal)))
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)


@pytest.mark.long
def test_it_goes_on_from_its_file(tmp_path, monkeypatch):
    from lapa2_interp.circuits import fade_account as module

    model, made = load("planted"), []
    texts = contrast(model)
    settings = {"filler": (8, FILLER), "tokens": TOKENS, "batch_size": 3}
    uninterrupted = account_for_fading(model, texts, **settings)
    init = module._FarStates.__init__

    def stops(self, *args):
        made.append(1)
        if len(made) == 4:
            raise KeyboardInterrupt
        init(self, *args)

    monkeypatch.setattr(module._FarStates, "__init__", stops)
    with pytest.raises(KeyboardInterrupt):
        account_for_fading(model, texts, file=tmp_path / "lines", **settings)
    made.append(1)
    rest = account_for_fading(model, texts, file=tmp_path / "lines", **settings)
    for key, values in uninterrupted.values.items():
        assert rest.values[key] == pytest.approx(values, abs=1e-5)
    assert len(made) < 2 * 6 + 2
    lines = (tmp_path / "lines").read_text("utf-8").splitlines()
    stored = json.loads(lines[1])
    stored["values"][f"{FILLER}, lex, keys"][0] += 0.5
    (tmp_path / "lines").write_text("\n".join([lines[0], json.dumps(stored), *lines[2:]]), "utf-8")
    with pytest.raises(CircuitError, match="another model or metric"):
        account_for_fading(model, texts, file=tmp_path / "lines", **settings)


def test_tables_and_figure_have_all_lengths_and_measures(tmp_path):
    model = load("planted")
    account = account_for_fading(model, contrast(model), filler=(8, FILLER), tokens=TOKENS)
    fades = account.fades()
    assert fades[["filler", "measure"]].values.tolist() == [
        [filler, measure] for filler in (8, FILLER) for measure in ("lex", "js", ATTENTION)
    ]
    assert (fades["fade"] > 0).all()
    rows = account.by_prompt()
    assert len(rows) == len(PROMPTS) * 6 * (len(STATES) + 7)
    account.plot().savefig(tmp_path / "account.png")
    assert (tmp_path / "account.png").stat().st_size > 10_000


def test_attention_is_told_as_a_multiple_of_equal_scores(monkeypatch):
    """All scores equal: l_pre / (l + 1), BOS being a key, too, for l_pre / l."""
    script = import_module("analyses.fading.account")
    model = fresh("planted", model_class="TransformersModel")
    with torch.no_grad():
        for layer in facts_of(model).network.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    texts = contrast(model)
    account = account_for_fading(model, texts, filler=(8, FILLER), tokens=TOKENS)
    rows = list(script.of_equal_scores(account))
    assert [row["filler"] for row in rows] == [8, FILLER]
    for row in rows:
        for name, more in (("near", 1), ("far", row["filler"])):
            ratios = []
            for example in texts.examples:
                l = len(example.layouts[0].ids) - 1 + more + np.arange(TOKENS)
                ratios.append((1 / (l + 1)).mean() / (1 / l).mean())
            assert row[name] == pytest.approx(np.mean(ratios), rel=1e-4)
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]


def bloom():
    config = AutoConfig.for_model("bloom", vocab_size=512, hidden_size=32, n_layer=2, n_head=4)
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return make_bridge(network, load_tokenizer("tiny-gpt2"), "bloom", torch.float32, "cpu")


@pytest.mark.parametrize(
    ("name", "words"),
    [("tiny-gpt2", "counted from the start of a text"), ("bloom", "do not reach its keys")],
)
def test_positions_that_cannot_be_moved_are_refused(name, words):
    model = load(name) if name != "bloom" else bloom()
    texts = ContrastSet.of(model, "sentiment", prompts=["The lake", "The road"], tokens=12)
    with pytest.raises(CircuitError, match=words):
        account_for_fading(model, texts, filler=(6,), tokens=4, metric="js")


def test_the_command_line_divides_the_fade(tmp_path, capsys):
    line = f"fading planted --account --filler 12 --tokens 4 --device cpu --out {tmp_path / 'out'}"
    assert main(line.split()) == 0
    assert "shares of the fade" in capsys.readouterr().out
    rows = pd.read_csv(tmp_path / "out" / "fading.csv")
    assert set(FACTORS) < set(rows["name"])
    assert (tmp_path / "out" / "fading.png").stat().st_size > 10_000
    assert main([*line.split()[:-1], str(tmp_path / "no"), "--alpha", "1"]) == 2
    assert "--account changes all heads" in capsys.readouterr().err


def test_a_reference_that_fades_is_refused():
    model = load("planted")
    with pytest.raises(CircuitError, match="from_raw compares with the raw model"):
        account_for_fading(model, contrast(model), filler=(8,), tokens=3, metric=["js", "from_raw"])


def test_attention_is_also_that_of_the_layers_of_each_type():
    """Of the planted model with a window in its first layer, which is longer than any text."""
    model = fresh("planted", "float64", model_class="TransformersModel")
    plain = account_for_fading(model, contrast(model), filler=(FILLER,), tokens=TOKENS)
    assert attention_measures(model) == {ATTENTION: [0, 1]}
    types = (LayerType("sliding", 512), FULL_ATTENTION)
    facts_of(model).__dict__["layer_types"] = types  # a cached property
    assert attention_measures(model) == {
        ATTENTION: [0, 1], "attention (full)": [1], "attention (sliding 512)": [0]
    }  # fmt: skip
    account = account_for_fading(model, contrast(model), filler=(FILLER,), tokens=TOKENS)
    parts = [account.values[FILLER, f"attention ({kind})", FAR] for kind in ("full", "sliding 512")]
    np.testing.assert_allclose(np.mean(parts, axis=0), plain.values[FILLER, ATTENTION, FAR])
    assert set(account.fades()["measure"]) == {"lex", "js", *attention_measures(model)}
    assert np.abs(parts[0] - parts[1]).max() > 1e-3
