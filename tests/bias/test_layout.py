"""Spans and lengths: every row of the table "which keys the official span covers", both profiles,
all phases."""

import copy
import json
from itertools import product

import numpy as np
import pytest
from conftest import TINY, continue_chat, load
from oracle import oracle_bias

from lapa2_interp import Augmentation, generate
from lapa2_interp.bias.layout import Layout, left_pad
from lapa2_interp.bias.layout_table import explain_layout
from lapa2_interp.bias.recipes import recipe
from lapa2_interp.bias.text_start import text_markers
from lapa2_interp.bias.tokens import token_texts
from lapa2_interp.cli.app import main
from lapa2_interp.errors import LayoutError, MethodError, TaskError
from lapa2_interp.methods.chat import chat_task
from lapa2_interp.methods.registry import load_task
from lapa2_interp.models.load import shared_tokenizer
from lapa2_interp.runs.run import load_run


@pytest.mark.parametrize(
    ("prefix", "count"),
    [
        ("Very positive:", 3),
        ("Very negative:", 3),
        ("Positive:", 3),
        ("A positive text:", 4),
        ("Very nontoxic:", 4),
        ("Very toxic:", 3),
        ("World-related:", 4),
        (
            (
                "The following text perpetuates negative stereotypes, is threatening or sexually"
                " explicit, or contains profane language."
            ),
            20,
        ),
    ],
)
def test_prefix_lengths_of_the_paper_under_gpt2(gpt2_tokenizer, prefix, count):
    layout = Layout.of(gpt2_tokenizer, prefix, " The lake")
    assert layout.l_pre == count == layout.counted


def test_gpt2_hard_prefix_rows(gpt2_tokenizer):
    layout = Layout.of(gpt2_tokenizer, "Very positive:", "The lake")
    assert layout.tokens == ("<|endoftext|>", "Very", " positive", ":", "The", " lake")
    assert (layout.bos, layout.prefix, layout.prompt) == ((0, 1), (1, 4), (4, 6))
    assert layout.spans("prefix") == ((1, 4),)
    assert layout.spans("released") == ((0, 3),), "BOS and all but the last prefix token"
    assert layout.spans("bos") == ((0, 1),)
    assert layout.spans("prefix+bos") == ((0, 1), (1, 4))
    assert layout.spans(((0, 2), (5, 6))) == ((0, 2), (5, 6))
    assert [
        layout.n(rule) for rule in ("prefix", "prefix+bos", "bos", "released", ((0, 2), (5, 6)))
    ] == [3, 3, 3, 3, 3]


def test_soft_prefix_row(gpt2_tokenizer):
    layout = Layout.of(gpt2_tokenizer, None, "The lake", soft=20)
    assert (layout.prefix, layout.bos, layout.prompt) == ((0, 20), (20, 21), (21, 23))
    assert layout.spans("prefix") == layout.spans("released") == ((0, 20),), (
        "exactly the prefix; BOS not boosted"
    )
    assert (layout.l_pre, layout.n("prefix"), layout.n("released"), layout.n("bos")) == (
        20,
        20,
        20,
        20,
    )
    assert layout.spans(((19, 22),)) == ((19, 20), (20, 22))
    query = np.array([len(layout) - 1])
    assert (layout.lengths(query, "paper"), layout.lengths(query, "kv")) == ([22], [23])
    soft, hard = left_pad(
        [layout, Layout.of(gpt2_tokenizer, "Very positive:", "Once upon a time in")]
    )
    assert (len(soft), len(hard)) == (29, 29)
    assert (soft.pad, hard.pad) == (6, 20), "rows without soft slots have them masked"
    soft = layout.padded(26)
    assert (soft.prefix, soft.bos, soft.prompt) == ((0, 20), (23, 24), (24, 26))
    assert soft.spans(((19, 22),)) == (
        (19, 20),
        (23, 25),
    ), "padding stands between the soft slots and BOS"
    assert soft.lengths(np.array([25]), "kv") == [23]


def test_base_branch_row(gpt2_tokenizer):
    layout = Layout.of(gpt2_tokenizer, None, "The year is 1910.")
    assert layout.l_pre == 0
    assert layout.spans("prefix") == ((1, 1 + layout.l_pro),), "Pro-Aug acts on the prompt"
    assert layout.spans("released") == ((0, layout.l_pro),), "BOS and all but the last prompt token"


def test_llama_rows_count_the_automatic_bos():
    tokenizer = shared_tokenizer("tiny-llama")
    single = Layout.of(tokenizer, "ab:", "cd")
    assert (single.n_bos, single.l_pre, single.counted) == (1, 3, 4)
    doubled = Layout.of(tokenizer, "ab:", "cd", doubled_bos=True)
    assert doubled.ids == (single.ids[0], *single.ids)
    assert doubled.prefix == (2, 5)
    assert doubled.spans("released") == ((0, 4),), "both BOS and all but the last prefix token"
    assert doubled.n("released") == 4


def test_special_tokens_inside_a_text_are_the_users_own():
    tokenizer = shared_tokenizer("tiny-llama")
    layout = Layout.of(tokenizer, "Very", " good</s><s>The lake")
    assert layout.ids.count(text_markers(tokenizer).start) == 2
    assert layout.n_bos == 1
    # A marker that the tokenizer does not know is text.
    assert Layout.of(tokenizer, None, "<|im_start|>user").l_pro > 1


def test_what_takes_a_tokenizer_takes_its_models_or_says_so():
    model = load("tiny-llama")
    asked = ("Very", " lake")
    assert Layout.of(model, *asked) == Layout.of(model.tokenizer, *asked)
    assert text_markers(model) == text_markers(model.tokenizer)
    assert token_texts(model, "a", [5]) == token_texts(model.tokenizer, "a", [5])
    for owner, message in (
        ("tiny-llama", r"found a str; give load_tokenizer\('tiny-llama'\)"),
        (model.original_model, "found a LlamaForCausalLM; give model.tokenizer"),
        (None, "found a NoneType"),
    ):
        for call in (
            lambda owner=owner: Layout.of(owner, *asked),
            lambda owner=owner: Layout.of_chat(owner, []),
            lambda owner=owner: text_markers(owner),
            lambda owner=owner: token_texts(owner, "", [1]),
        ):
            with pytest.raises(LayoutError, match=f"a tokenizer is needed here, {message}"):
                call()


def test_biases_of_the_worked_example(gpt2_tokenizer):
    """l_pre 3, l_pro 4, alpha 1/2: paper .4236 .4904 .5493 .6020, released 0 .5493 .6020 .6496."""
    layout = Layout.of(gpt2_tokenizer, "Very positive:", "The lake is blue")
    assert (layout.l_pre, layout.l_pro) == (3, 4)
    queries = np.arange(7, 11)
    paper = layout.bias(Augmentation(alpha=0.5), queries)
    released = layout.bias(Augmentation(alpha=0.5, profile="released"), queries)
    assert paper.round(4).tolist() == [0.4236, 0.4904, 0.5493, 0.6020]
    assert released.round(4).tolist() == [0.0, 0.5493, 0.6020, 0.6496]


def test_prompt_biases_of_the_worked_example(gpt2_tokenizer):
    """l_pro 4, alpha 1/2, second step: .1116 (paper), .2027 (released); the first step's is 0 in
    both."""
    layout = Layout.of(gpt2_tokenizer, None, "The lake is blue")
    queries = np.arange(4, 6)
    assert layout.bias(Augmentation(alpha=0.5), queries).round(4).tolist() == [0.0, 0.1116]
    assert layout.bias(Augmentation(alpha=0.5, profile="released"), queries).round(4).tolist() == [
        0.0,
        0.2027,
    ]


@pytest.mark.parametrize(
    "branch",
    [
        "gpt2 prefix",
        "gpt2 base",
        "gpt2 soft",
        "llama single",
        "llama doubled",
        "llama base",
        "llama soft",
    ],
)
@pytest.mark.parametrize("profile", ["paper", "released"])
def test_bias_equals_the_oracle(gpt2_tokenizer, branch, profile):
    llama = shared_tokenizer("tiny-llama")
    chosen = {
        "gpt2 prefix": lambda: Layout.of(gpt2_tokenizer, "Very positive:", "The lake"),
        "gpt2 base": lambda: Layout.of(gpt2_tokenizer, None, "Once upon a time"),
        "gpt2 soft": lambda: Layout.of(gpt2_tokenizer, None, "Once upon a time", soft=4),
        "llama soft": lambda: Layout.of(llama, None, "cdefg", soft=4),
        "llama single": lambda: Layout.of(llama, "ab:", "cde"),
        "llama doubled": lambda: Layout.of(llama, "ab:", "cde", doubled_bos=True),
        "llama base": lambda: Layout.of(llama, None, "cdefg"),
    }[branch]()
    total = len(chosen) + 6
    phases, laws = ("decode", "last_query", "after_span"), ("log", "linear", "sqrt", "constant")
    spans = ("prefix", "prefix+bos", "bos", "released", ((0, 1), (3, 5)))
    for phase, law, span, pad in product(phases, laws, spans, (0, 5)):
        case = (phase, law, span, pad)
        l0 = 128 if law == "constant" else None
        augmentation = Augmentation(
            alpha=0.7, profile=profile, phase=phase, law=law, l0=l0, span=span
        )
        expected = np.array(
            oracle_bias(
                n_bos=chosen.n_bos,
                l_pre=chosen.l_pre,
                l_pro=chosen.l_pro,
                counted=chosen.counted,
                total=total,
                alpha=0.7,
                law=law,
                l0=l0,
                span=span,
                length=augmentation.length_rule,
                phase=phase,
                released=profile == "released",
                soft=chosen.soft > 0,
            )
        )
        padded = chosen.padded(len(chosen) + pad)
        live = np.delete(np.arange(pad + total), slice(chosen.soft, chosen.soft + pad))
        bias = padded.bias(augmentation, live)
        keys = np.zeros(pad + total)
        for start, stop in padded.spans(augmentation.span):
            keys[start:stop] = 1
        assert keys.sum() == keys[live].sum(), f"{case}: no padding is boosted"
        assert np.abs(bias[:, None] * keys[live] - expected).max() < 1e-12, case
        assert expected.any(), case


def test_a_merge_across_the_seam_belongs_to_the_prefix_and_is_reported(gpt2_tokenizer):
    layout = Layout.of(gpt2_tokenizer, "Very positive:", '"Quoted" text')
    assert layout.merged == ':"'
    assert layout.tokens[layout.prefix.stop - 1] == ':"'
    assert Layout.of(gpt2_tokenizer, "Very positive:", "The lake").merged is None


@pytest.mark.parametrize(
    "prefix", ["Very positive:", "The following text contains profane language.\n\n", "x"]
)
@pytest.mark.parametrize(
    "prompt", ["The lake", " The lake", "“OMG u", "湖 is 🏞️ nice", "  two spaces"]
)
def test_spans_cover_the_text(gpt2_tokenizer, prefix, prompt):
    for tokenizer in (gpt2_tokenizer, shared_tokenizer("tiny-neox")):
        layout = Layout.of(tokenizer, prefix, prompt)
        assert layout.prompt.stop == len(layout) == layout.n_bos + layout.l_pre + layout.l_pro
        if layout.merged is None:
            assert tokenizer.decode(layout.ids[layout.prefix.start : layout.prefix.stop]) == prefix
            assert tokenizer.decode(layout.ids[layout.prompt.start : layout.prompt.stop]) == prompt


def test_trimmed_offsets_do_not_move_the_seam(gpt2_tokenizer):
    """Some tokenizers leave the leading space of a token out of its offsets; the space still opens
    the prompt."""
    import copy

    from tokenizers import processors

    trimming = copy.deepcopy(gpt2_tokenizer)
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=True
    )
    assert trimming(" a", return_offsets_mapping=True)["offset_mapping"] == [(1, 2)]
    assert Layout.of(trimming, "Be kind.", " The lake") == Layout.of(
        gpt2_tokenizer, "Be kind.", " The lake"
    )


def test_left_padding_moves_slots_not_lengths(gpt2_tokenizer):
    short = Layout.of(gpt2_tokenizer, "Very positive:", "The lake")
    long = Layout.of(gpt2_tokenizer, "A positive text:", "Once upon a time")
    padded, same = left_pad([short, long])
    assert same == long
    assert padded.pad == 3
    assert padded.prefix == (4, 7)
    queries = np.array([8, 9])
    assert (
        padded.lengths(queries, "kv").tolist()
        == short.lengths(queries - 3, "kv").tolist()
        == [6, 7]
    )


def test_plain_text_starts_are_decided_in_one_place(gpt2_tokenizer):
    assert (
        gpt2_tokenizer.convert_ids_to_tokens(text_markers(gpt2_tokenizer).start) == "<|endoftext|>"
    )
    llama = shared_tokenizer("tiny-llama")
    assert llama.convert_ids_to_tokens(text_markers(llama).start) == "<s>"
    assert llama.convert_ids_to_tokens(list(text_markers(llama).ends)) == ["</s>"]
    smol = shared_tokenizer("smollm2-135m")
    assert text_markers(smol).start == 0, "not the configured <|im_start|>, which opens a chat turn"
    assert text_markers(smol).ends == (0, 2)
    assert smol.bos_token == "<|endoftext|>"


def test_an_unknown_token_is_neither_start_nor_end():
    """Tokenizers answer <unk> for a token they do not have, such as <|endoftext|> in a Llama-2
    vocabulary."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = Tokenizer(
        models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, unk_token="<unk>")
    )
    names = {"unk_token": "<unk>", "eos_token": "</s>"}
    with_bos = PreTrainedTokenizerFast(tokenizer_object=vocabulary, bos_token="<s>", **names)
    assert text_markers(with_bos) == (1, (2,))
    assert text_markers(PreTrainedTokenizerFast(tokenizer_object=vocabulary, **names)) == (2, (2,))


def test_released_counts_do_not_depend_on_what_transformer_lens_did_to_the_tokenizer(
    gpt2_tokenizer,
):
    """TransformerLens switches BOS on in tokenizers that have it off; the released count of GPT-2
    has no BOS in it."""
    import copy

    from tokenizers import processors

    adding = copy.deepcopy(gpt2_tokenizer)
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 50256)]
    )
    assert adding("a").input_ids[0] == 50256
    assert Layout.of(adding, "Very positive:", "The lake") == Layout.of(
        gpt2_tokenizer, "Very positive:", "The lake"
    )


def test_a_tokenizer_of_gpt2s_class_counts_the_bos_that_it_adds(gpt2_tokenizer):
    """OPT's is one: its BOS is </s>, and its own files have it on."""
    import copy

    from tokenizers import processors

    adding = copy.deepcopy(gpt2_tokenizer)
    adding.add_special_tokens({"bos_token": "</s>"})
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", adding.bos_token_id)]
    )
    layout = Layout.of(adding, "Very positive:", "The lake")
    assert layout.counted == Layout.of(gpt2_tokenizer, "Very positive:", "The lake").counted + 1


@pytest.mark.parametrize("name", [*TINY, pytest.param("smollm2-135m", marks=pytest.mark.long)])
def test_transformer_lens_tokenises_text_as_the_layout_does(name):
    model = load(name)
    layout = Layout.of(model.tokenizer, "Very positive:", "The lake")
    assert model.to_tokens("Very positive:The lake")[0].tolist() == list(layout.ids)
    assert layout.counted == Layout.of(shared_tokenizer(name), "Very positive:", "The lake").counted


def test_seam_merges_of_the_papers_detox_prompts(gpt2_tokenizer, data):
    """The method description counts 11 of the 203 prompts whose first character merges with a ":"
    before it."""
    import json
    import lzma

    with lzma.open(data / "prompts" / "rtp_challenging_203.jsonl.xz", "rt") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(prompts) == 203
    merged = [
        Layout.of(gpt2_tokenizer, "Very nontoxic:", prompt).merged is not None for prompt in prompts
    ]
    assert sum(merged) == 11
    assert not any(
        Layout.of(gpt2_tokenizer, "Very nontoxic:", " " + prompt).merged for prompt in prompts
    )


def test_the_papers_own_prompts_never_merge(gpt2_tokenizer):
    from lapa2_interp.methods import load_task

    for name in ("sentiment", "topic"):
        task = load_task(name)
        for attribute in task.attributes:
            for prompt in task.prompts.texts:
                assert Layout.of(gpt2_tokenizer, task.prefix(attribute), prompt).merged is None


CHAT = [
    {"role": "system", "content": "Be very brief. Speak like a pirate."},
    {"role": "user", "content": "What is rain? Water?"},
    {"role": "assistant", "content": "Water, arr\u00e9."},
    {"role": "user", "content": "And snow? Tell me, please."},
]
TEMPLATES = {
    "trims": (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} {% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "folds": (
        "{% for m in messages %}{% if m['role'] == 'system' %}<<{{ m['content'] }}>>"
        "{% else %}({{ m['content'] }}){% endif %}{% endfor %}!"
    ),
}


def chat_tokenizer(template=None, name="smollm2-135m"):
    tokenizer = copy.copy(shared_tokenizer(name))
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [None, *TEMPLATES])
@pytest.mark.parametrize(
    ("span", "text"),
    [
        ("system", CHAT[0]["content"]),
        ("turn:1", CHAT[1]["content"]),
        ("turn:2", CHAT[2]["content"]),
        ("turn:3", CHAT[3]["content"]),
        ("phrase:like a pirate", "like a pirate"),
        ("phrase:arr\u00e9", "arr\u00e9"),
        ("phrase:Tell me", "Tell me"),
    ],
)
def test_the_span_of_a_chat_is_its_text_among_the_templates_own_tokens(template, span, text):
    tokenizer = chat_tokenizer(TEMPLATES.get(template))
    layout = Layout.of_chat(tokenizer, CHAT, span=span)
    chat_ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert list(layout.ids) == chat_ids
    covered = tokenizer.decode(layout.ids[slice(*layout.prefix)])
    if layout.merged is None:
        assert covered.strip() == text
    else:  # "?)" is one token
        assert (template, covered, layout.merged) == ("folds", f"{text})", covered)
    parts = (layout.bos, layout.before, layout.prefix, layout.prompt)
    assert [a.stop for a in parts[:-1]] == [b.start for b in parts[1:]]
    assert (parts[0].start, parts[-1].stop) == (0, len(layout))
    assert layout.lengths(np.array([len(layout) - 1]), "paper") == len(layout) - layout.n_bos
    padded = left_pad([layout, Layout.of(tokenizer, "a:", "b " * 99)])[0]
    assert padded.prefix.start == layout.prefix.start + padded.pad


def test_a_template_may_write_no_bos():
    bare = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert Layout.of_chat(chat_tokenizer(bare), CHAT).n_bos == 0


@pytest.fixture
def chatting(monkeypatch):
    """A tiny model with a chat template."""
    model = load("tiny-llama", "float64")
    monkeypatch.setattr(model.tokenizer, "chat_template", TEMPLATES["trims"])
    return model


def test_a_chat_is_explained_and_traced_whole(chatting):
    model, span = chatting, "phrase:arr\u00e9"
    layout, task = Layout.of_chat(model, CHAT, span=span), chat_task(CHAT, span)
    rule = Augmentation(alpha=0.5, phase="everywhere")
    facts = explain_layout(layout, rule, 3)
    assert sum(key["boosted"] for key in facts["tokens"]) == layout.l_pre
    assert [step["step"] for step in facts["steps"]][-3:] == [0, 1, 2]
    made = continue_chat(model, task, rule, length=5, samples=3, trace="full")
    sums = sum(made.trace[name] for name in ("prefix", "prompt", "generated"))
    for i, tokens in enumerate(made.texts["tokens"]):
        assert np.abs(sums[0, i, : len(tokens)] - 1).max() < 1e-5
    alone = continue_chat(model, task, rule, length=5)
    assert alone.texts["tokens"][0] == made.texts["tokens"][0]
    steady = continue_chat(model, task, recipe("set-point", tau=0.4), length=8, eos="block")
    assert np.abs(steady.trace["prefix"].values - 0.4).min() < 1e-6
    assert (steady.trace["prefix"].values > 0.4 - 1e-6).all()
    with pytest.raises(LayoutError, match="exceed the context"):
        continue_chat(model, task, length=9999)


def test_chats_are_continued_together_as_alone(chatting):
    """Also one whose text is written out, instead of a prompt: both draw from the same stream."""
    systems, rule = ["Be very brief. Speak like a pirate.", "Be brief."], Augmentation(alpha=0.5)
    form = [{"role": "system", "content": "{prompt}"}, *CHAT[1:2]]
    settings = {"length": 6, "samples": 2, "eos": "block"}
    together = continue_chat(chatting, chat_task(form, prompts=systems), rule, **settings)
    for i, system in enumerate(systems):
        task = chat_task([{"role": "system", "content": system}, *CHAT[1:2]])
        alone = continue_chat(chatting, task, rule, **settings)
        rows = slice(2 * i, 2 * i + 2)
        for column in ("tokens", "continuation"):
            assert together.texts[column][rows].tolist() == alone.texts[column].tolist()
        for name in ("prefix", "prompt", "generated"):
            np.testing.assert_allclose(together.trace[name][:, rows], alone.trace[name], atol=1e-6)


def test_a_chat_is_a_cell_with_the_attributes_prefix_in_a_message(chatting, tmp_path):
    """A task file says where prefix and prompt stand; texts differ by attribute, the span is the
    prefix, and the run is read again from its folder."""
    file = tmp_path / "moods.toml"
    file.write_text("""length_counts_prompt = false
[attributes.calm]
prefix = "Be calm."
[attributes.angry]
prefix = "Be angry."
[prompts]
texts = ["What is rain?", "And snow?"]
[chat]
messages = [{role = "system", content = "{prefix} Be brief."}, {role = "user", content = "{prompt}"}]
span = "phrase:{prefix}"
""")
    asked = {"method": "chat", "task": str(file), "length": 5, "trace": "pooled", "alpha": 0.5}
    run = generate(chatting, **asked)
    assert len(run.texts()) == 4
    cells = {cell.attribute: key for key, cell in run.by_key.items()}
    assert run.manifest(cells["calm"]).branches == {"chat": "Be calm."}
    assert run.trace(cells["calm"])["prefix_tokens"].sizes["prefix_token"] == len("Be calm.")
    stored = load_run(run.save(tmp_path / "run").folder)
    assert stored.texts()["text"].tolist() == run.texts()["text"].tolist()
    assert stored.by_key == run.by_key
    with pytest.raises(MethodError, match="task 'sentiment' has no chat to continue"):
        generate(chatting, method="chat")
    with pytest.raises(LayoutError, match="a chat's template writes its first token"):
        generate(chatting, **asked, doubled_bos=True)
    text = file.read_text()
    for old, new, problem in (
        ("length_counts_prompt = false", "length_counts_prompt = true", "length_counts_prompt = f"),
        ("{prompt}", "snow", r"no message of the chat has \{prompt\}, .* same for 2"),
        ("{prefix}", "Calm", r"no message of the chat has \{prefix\}, .* same for 2"),
        ("messages", "message", "chat"),
    ):
        file.write_text(text.replace(old, new))
        with pytest.raises(TaskError, match=problem):
            load_task(file)
    with pytest.raises(TaskError, match=r"which stand for the texts of a task; give prompts"):
        chat_task([{"role": "user", "content": "{prompt}"}])
    with pytest.raises(TaskError, match="a chat: messages"):
        chat_task([])


def test_a_chat_on_the_command_line(tmp_path, capsys, monkeypatch):
    model = load("smollm2-135m")
    monkeypatch.setattr("lapa2_interp.models.load.load_model", lambda *_, **__: model)
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(CHAT), "utf-8")
    asked = ["chat", str(file), "--length", "2", "--dtype", "float32"]
    assert main([*asked, "--span", "phrase:very brief", "--augmentation", "set-point:tau=0.3"]) == 0
    shown = capsys.readouterr().out
    assert "(' very', ' brief')" in shown
    assert "step     0" in shown
    assert main([*asked, "--alpha", "0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["augmentation"] == []
    assert len(facts["attention"]) <= 2
    file.write_text("[1]")
    for wrong, problem in (
        (asked, "should be a list of"),
        (["chat", str(tmp_path / "none.json")], "cannot read"),
    ):
        assert main(wrong) == 2
        assert problem in capsys.readouterr().err


def test_a_notebook_shows_the_keys_by_part():
    shown = Layout.of(load("tiny-gpt2"), "Very <b>:", "The lake")._repr_html_()
    assert "l_pre 9, l_pro 8, BOS 1" in shown
    assert shown.count("<span") == 18
    assert "&lt;" in shown
    assert "<b>" not in shown


def test_a_longer_layout_counts_more_prompt_and_has_no_padding():
    tokenizer = shared_tokenizer("tiny-gpt2")
    layout = Layout.of(tokenizer, "Very good:", "The lake")
    longer = layout.padded(40).followed_by(tokenizer, [40, 41])
    whole_ids = (*layout.ids, 40, 41)
    assert (longer.ids, longer.l_pro, longer.prefix) == (whole_ids, layout.l_pro + 2, layout.prefix)
    assert len(longer) == len(longer.tokens) == len(layout) + 2
