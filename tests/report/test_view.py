"""The viewer shows the numbers of the run, in a browser, and nothing else."""

import base64
import dataclasses
import html as html_of
import io
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from browsers import FLAGS, browser_page, chromium
from conftest import load, run_of, soft_set
from huggingface_hub import metadata_load

from lapa2_interp.attention.hooked import augmented
from lapa2_interp.bias.augmentation import Augmentation
from lapa2_interp.cli.app import main
from lapa2_interp.errors import RunError, TraceError
from lapa2_interp.methods import load_task
from lapa2_interp.report import view
from lapa2_interp.report.encoding import (
    FLOOR,
    encode_arrays,
    quantisation_error,
    quantise,
)
from lapa2_interp.report.viewed_text import _mean_interval, load_head_values
from lapa2_interp.report.viewer import MODULE

HOSTILE = (
    "=1</script><script>document.title='x'</script><img src=x onerror=alert(1)>&amp; '\"\u2028"
)
STUDY = "figures/circuits/planted"
WAIT = "new Promise(done => { const at = () => el.dataset.ready ? done(true) : setTimeout(at, 20); const el = document.getElementById('view'); at(); })"
VIEW = "document.getElementById('view')"


@cache
def planted_run():
    arms = (None, Augmentation(alpha=0.5))
    return run_of(
        load("planted"), "prefix", "sentiment", ["positive", "negative"], ["The lake", "The book"], arms,
        length=14, samples=2, seed=3, trace="full", parameters={"prefixes": "hard"},
    )  # fmt: skip


@pytest.fixture
def run():
    return planted_run()


@pytest.fixture(scope="module")
def study(request):
    return request.config.rootpath / STUDY


@pytest.fixture(scope="module")
def shown(study):
    return view(planted_run(), circuits=study, model=load("planted"))


@pytest.fixture(scope="module")
def page_file(shown, tmp_path_factory):
    return shown.save(tmp_path_factory.mktemp("view") / "view.html")


@pytest.fixture(scope="module")
def browser():
    with browser_page() as page:
        yield page


def opened(browser, page_file, state=None, **settings):
    """The page when it is ready, in a state: nothing but itself was asked for, and nothing complained."""
    browser.goto(page_file.as_uri(), **settings)
    assert browser.ask(WAIT)
    if state:
        browser.ask(f"{VIEW}.viewer.set({json.dumps(state)})")
    return browser


def quiet(browser, page_file):
    others = [url for url in browser.requests if not url.startswith((page_file.as_uri(), "about:"))]
    assert (others, browser.errors) == ([], [])


def state_of(browser):
    return browser.ask(f"({{...{VIEW}.dataset}})")


def middle(browser, canvas, row, column, rows, columns):
    """Where a cell of a figure is in the window, once the figure is in view."""
    script = f"(() => {{ const c = document.querySelectorAll('canvas')[{canvas}]; c.scrollIntoView({{block: 'center'}}); const r = c.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; }})()"
    x, y, w, h = browser.ask(script)
    return (
        x + 30 + (column + 0.5) * (w - 34) / columns,
        y + 8 + (row + 0.5) * (h - 26) / rows,
    )


# --- numbers


def dequantise(codes, bits):
    """The attention that codes stand for, as `unpack` of view.js reads them."""
    top = 2**bits - 1
    return np.where(codes == 0, 0.0, FLOOR ** (1 - (codes.astype(np.float64) - 1) / (top - 1)))


@pytest.mark.parametrize("bits", [8, 16])
def test_stored_attention_is_as_precise_as_the_page_says(bits):
    rng = np.random.default_rng(0)
    values = np.concatenate([FLOOR ** rng.random(5000), [1.0, FLOOR, 0.5]])
    back = dequantise(quantise(values, bits), bits)
    assert np.abs(back / values - 1).max() <= quantisation_error(bits) * (1 + 1e-9)
    small = dequantise(quantise(np.array([0.0, FLOOR / 2]), bits), bits)
    assert small.tolist() == [0, 0]
    assert dequantise(quantise(np.array([1.0 + 1e-7]), bits), bits) == 1
    assert quantisation_error(16) < 1.3e-4 < quantisation_error(8) < 0.034


def test_a_static_space_is_the_page_and_its_front_matter(shown, page_file, tmp_path):
    folder = shown.save_space(tmp_path / "space")
    assert {file.name for file in folder.iterdir()} == {"README.md", "index.html"}
    assert (folder / "index.html").read_bytes() == page_file.read_bytes()
    facts = metadata_load(folder / "README.md")
    assert (facts["sdk"], facts["app_file"]) == ("static", "index.html")
    assert facts["title"] == shown.data["title"][:80]
    with pytest.raises(RunError):
        shown.save_space(folder)


def test_equal_numbers_give_equal_pages(shown, run, study):
    again = view(run, circuits=study, model=load("planted"))
    assert again.html == shown.html
    assert encode_arrays({"a": np.arange(300, dtype=np.uint16)}) == encode_arrays(
        {"a": np.arange(300, dtype=np.uint16)}
    )


@pytest.mark.parametrize("arm", [0, 1])
def test_attention_is_that_of_one_pass_over_the_text(shown, arm):
    """The cell's own augmentation around a plain pass of the model; in float32, sums of keys in
    another order."""
    import torch

    model, text = load("planted"), shown.text
    arm, layout = text.arms[arm], text.layout
    tokens = torch.tensor([[*layout.ids, *arm.tokens[:-1]]])
    patterns = {}

    def keep(pattern, hook):
        patterns[int(hook.name.split(".")[1])] = pattern[0].detach().numpy().copy()

    hooks = [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in range(model.cfg.n_layers)]
    with (
        torch.no_grad(),
        augmented(model, arm.augmentation, layout),
        model.hooks(fwd_hooks=hooks),
    ):
        model(tokens)
    for step, pattern in enumerate(arm.patterns):
        query = layout.n_live - 1 + step
        for layer, total in patterns.items():
            assert np.abs(total[:, query, : query + 1] - pattern[layer]).max() < 1e-5


def test_masses_are_those_the_run_recorded(shown, run):
    for arm, cell in zip(shown.text.arms, shown.text.selected.cells.values(), strict=True):
        assert arm.off < 1e-5
        trace = run.trace(cell.key)
        recorded = trace["prefix"].sel(branch=shown.text.branch).to_numpy()[0]
        assert np.allclose(arm.masses[0], recorded[: len(arm.tokens)], atol=1e-5)
        keys = slice(shown.text.layout.prefix.start, shown.text.layout.prefix.stop)
        own = [pattern[..., keys].sum(-1) for pattern in arm.patterns]
        assert np.allclose(own, recorded[: len(own)], atol=1e-5)


def with_batches(run, change, keys=None):
    """A run whose batches have other samples or traces."""
    batches = {
        key: [dataclasses.replace(batch, **change(batch)) for batch in made]
        if key in (keys or run.batches)
        else made
        for key, made in run.batches.items()
    }
    return dataclasses.replace(run, batches=batches)


def test_attention_over_all_texts_is_over_steps_that_all_have(run):
    """It falls with the step, so a text that ended early would look more controlled."""
    model = load("planted")
    text = view(run, model=model).text
    length = len(text.arms[0].tokens)
    assert text.steps == length

    def cut(made, row, to):
        tokens = [text[:to] if i == row else text for i, text in enumerate(made.texts["tokens"])]
        parts = {name: made.trace[name].copy() for name in ("prefix", "bos", "prompt", "generated")}
        for part in parts.values():
            part[:, row, to:] = np.nan
        return {"texts": made.texts.assign(tokens=tokens), "trace": made.trace.assign(parts)}

    keys = [text.selected.cells["alpha 0.5 paper"].key]
    shortened = with_batches(run, lambda made: cut(made, 3, 4), keys)
    short = view(with_batches(shortened, lambda made: cut(made, 1, 0), keys), model=model).text
    assert short.steps == 4
    for arm, cell, there in zip(
        short.arms, short.selected.cells.values(), (range(4), (0, 2, 3)), strict=True
    ):
        trace = run.trace(cell.key)["prefix"].sel(branch=short.branch).to_numpy()
        prompts = run.texts(cell.key)["prompt"].to_numpy()
        means = [
            np.mean([trace[i, :4].mean(0) for i in there if prompts[i] == prompt], axis=0)
            for prompt in dict.fromkeys(prompts)
        ]
        assert np.allclose(arm.of_run["mean"], np.mean(means, axis=0), atol=1e-6)


def test_an_interval_of_attention_stays_within_0_and_1():
    """Of two prompts alone it would be wider."""
    by_prompt = {"a": np.array([[0.1]]), "b": np.array([[0.6]])}
    share, change = (_mean_interval(by_prompt, least) for least in (0.0, -1.0))
    assert [float(share[name][0, 0]) for name in ("mean", "low", "high")] == [0.35, 0, 1]
    assert [float(change[name][0, 0]) for name in ("low", "high")] == [-1, 1]


def test_of_two_seeds_one_may_be_chosen(run):
    reseeded = run_of(
        load("planted"), "prefix", "sentiment", ["positive"], ["The lake", "The book"],
        length=14, samples=2, seed=4, trace="full", parameters={"prefixes": "hard"},
    )  # fmt: skip
    both = dataclasses.replace(
        run, by_key=run.by_key | reseeded.by_key, batches=run.batches | reseeded.batches
    )
    assert (
        view(both, model=load("planted"), only={"seed": 4})
        .data["facts"]["prompt"]
        .endswith("seed 4)")
    )


def test_a_study_of_many_attributes_says_which_one_it_is_about(shown, study, tmp_path):
    shutil.copytree(study, tmp_path / "study")
    chosen = SimpleNamespace(
        task=SimpleNamespace(name="sentiment", attributes=dict.fromkeys("abc"))
    )
    text = SimpleNamespace(card=shown.text.card, arms=shown.text.arms, selected=chosen)
    about = [values.about for values in load_head_values(tmp_path / "study", text).values()]
    assert about
    assert all(line.endswith(", a against the others") for line in about)
    assert not any("against" in values.about for values in shown.heads.values())


def test_numbers_that_are_not_finite_stay_out_of_the_page(shown):
    text = shown.text
    first = dataclasses.replace(text.arms[0], control={"js": [np.inf] * len(text.arms[0].tokens)})
    data = dataclasses.replace(shown, text=dataclasses.replace(text, arms=(first,))).data
    assert set(data["arms"][0]["control"]["js"]) == {None}


def test_one_text_in_both_arms_differs_by_the_augmentation_alone(run):
    text = view(run, same_text=True, model=load("planted"), sample=1, prompt="The b").text
    assert text.selected.prompt == "The book"
    assert text.arms[0].tokens == text.arms[1].tokens
    # In layer 0 nothing else differs: log-odds of the prefix rise by alpha ln(l/n), Eq. 9.
    plain, raised = (np.log(arm.masses[0] / arm.masses[1:].sum(0)) for arm in text.arms)
    l = text.layout.n_live - text.layout.n_bos + np.arange(len(plain))
    bias = 0.5 * np.log(l / text.layout.l_pre)
    assert np.allclose((raised - plain)[:, 0], bias[:, None], atol=1e-4)


def test_a_large_page_has_8_bits(shown, monkeypatch):
    assert shown.data["bits"] == 16
    monkeypatch.setattr("lapa2_interp.report.viewer.PAGE_BYTES", 1000)
    small = dataclasses.replace(shown)
    assert small.data["bits"] == 8
    assert small.data["arrays"]["pattern0"]["type"] == "uint8"


@pytest.mark.slow
def test_64_steps_of_all_heads_of_a_real_model_take_5_mb(study):
    """Two arms of one text, with 16 bits a number."""
    model = load("smollm2-135m")
    made = run_of(
        model,
        "prefix",
        "sentiment",
        ["positive"],
        ["The president of the country"],
        (None, Augmentation(alpha=0.5)),
        length=69,
        samples=1,
        trace="full",
        parameters={"prefixes": "hard"},
    )
    shown = view(made, model=model, circuits=study.parent / "sentiment")
    assert [len(arm.tokens) for arm in shown.text.arms] == [64, 64]
    assert shown.data["bits"] == 16
    assert len(shown.html.encode()) < 5_000_000


def test_a_run_without_trace_and_arm_is_shown_without_comparison():
    model = load("planted")
    alone = run_of(
        model, "none", "sentiment", ["positive"], ["The lake"], length=8, samples=1, trace="none"
    )
    text = view(alone, model=model).text
    assert len(text.arms) == 1
    assert text.arms[0].off is None
    assert text.no_control == "the branch has no prefix"
    assert not text.arms[0].of_run


def test_soft_slots_are_keys_of_their_own(tmp_path):
    model, task = load("tiny-llama"), load_task("sentiment")
    parameters = {"prefixes": soft_set(tmp_path, model, task)}
    made = run_of(
        model,
        "prefix",
        task,
        ["positive"],
        ["The lake"],
        length=14,
        samples=1,
        trace="full",
        parameters=parameters,
    )
    shown = view(made, model=model)
    assert shown.data["parts"][:6] == ["prefix"] * 5 + ["bos"]
    assert shown.data["arms"][0]["keys"][:2] == ["soft 1", "soft 2"]
    assert shown.text.no_control == "the branch has a soft prefix"
    arm = shown.text.arms[0]
    assert arm.off < 1e-5
    assert np.allclose(arm.patterns[2][..., :5].sum(-1), arm.masses[0, 2], atol=1e-5)


def test_the_command_writes_the_page(run, study, tmp_path, capsys):
    folder = run.save(tmp_path / "run").folder
    assert main(["view", str(folder), "--circuits", str(study), "--steps", "5"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"^baseline: 5 tokens read again, \S+ from the recorded attention$", said, re.M
    )
    assert f"{folder / 'view.html'} (" in said
    assert main(["view", str(folder), "--arm", "x"]) == 2


# --- the page


def test_the_module_asks_for_nothing_and_writes_no_html():
    text = MODULE.read_text("utf-8")
    for word in (
        "</script",
        "innerHTML",
        "insertAdjacent",
        "fetch(",
        "import ",
        "localStorage",
        "eval(",
    ):
        assert word not in text
    assert "export async function render({ model, el" in text
    assert "export default { render }" in text


def framed(shown, monkeypatch):
    """What a notebook without anywidget shows."""
    monkeypatch.setitem(sys.modules, "anywidget", None)
    return shown._repr_mimebundle_()["text/html"]


def test_in_a_notebook_without_anywidget_the_page_stands_in_a_frame(shown, monkeypatch):
    frame = framed(shown, monkeypatch)
    assert 'sandbox="allow-scripts allow-downloads"' in frame
    assert html_of.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1]) == shown.html


def test_in_a_notebook_the_chosen_head_and_token_go_both_ways(shown):
    again = dataclasses.replace(shown)
    again.head, again.token = (1, 2), 4
    bundle = again._repr_mimebundle_()
    bundle = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in bundle
    widget = again._widget()
    assert widget.get_state(["data", "head", "token"]) == {
        "data": again.data,
        "head": (1, 2),
        "token": 4,
    }
    widget.set_state({"head": [0, 3], "token": 6})  # as a message from the front end
    assert (again.head, again.token) == ((0, 3), 6)
    again.head = np.unravel_index(6, shown.text.arms[0].masses.shape[2:])
    assert widget.get_state(["head"]) == {"head": (1, 2)}
    assert [type(number) for number in again.head] == [int, int]
    again.head = None
    assert widget.head is None
    assert (shown.head, shown.token) == (None, 0)


def test_a_choice_that_is_not_there_is_refused(shown):
    again = dataclasses.replace(shown)
    layers, heads = shown.text.arms[0].masses.shape[2:]
    with pytest.raises(TraceError, match=rf"head must be None or \(layer, head\) below .*{heads}"):
        again.head = (layers, 0)
    steps = len(shown.text.arms[0].tokens)
    with pytest.raises(TraceError, match=f"token must be from 0 to {steps - 1}, found {steps}"):
        again.token = steps
    assert (again.head, again.token) == (None, 0)


def test_a_model_gets_what_is_chosen_and_is_followed(browser, shown, tmp_path):
    """The module with a model as a notebook's front end has one."""
    page = re.sub(
        r"const model = .*",
        """const model = window.model = { written: [], listeners: {},
          get: name => values[name], set: (name, value) => { values[name] = value; model.written.push([name, value]); },
          save_changes: () => model.written.push(["saved"]),
          on: (name, f) => (model.listeners[name] ??= new Set()).add(f), off: (name, f) => model.listeners[name].delete(f),
          change: (name, value) => { values[name] = value; model.listeners[`change:${name}`].forEach(f => f()); } };
        """,
        shown.html,
    ).replace("\nrender({ model,", "\nwindow.stop = await render({ model,")
    page_file = tmp_path / "widget.html"
    page_file.write_text(page, encoding="utf-8")
    opened(browser, page_file)
    layers, heads = shown.text.arms[0].masses.shape[2:]
    browser.click(*middle(browser, 3, 1, 2, layers, heads))
    assert browser.ask("model.written") == [["head", [1, 2]], ["token", 0], ["saved"]]
    browser.ask("model.change('head', [0, 1]); model.change('token', 5)")
    assert (state_of(browser)["head"], state_of(browser)["step"]) == ("0.1", "5")
    assert browser.ask("document.querySelector('.map h3').textContent") == "Head 0.1"
    assert len(browser.ask("model.written")) == 3, "what came from outside is not written back"
    browser.ask("model.change('head', null)")
    assert state_of(browser)["head"] == "mean"
    browser.ask("stop()")
    assert browser.ask("Object.values(model.listeners).every(each => each.size === 0)")
    quiet(browser, page_file)


def test_the_page_reads_the_numbers_of_the_trace(browser, page_file, shown):
    """Every step and head, as the page gives them to its panels."""
    opened(browser, page_file)
    script = f"""(() => {{ const {{ numbers }} = {VIEW}.viewer, found = [];
      for (const arm of [0, 1]) for (let step = 0; step < STEPS[arm]; step++) for (let head = 0; head < numbers.n; head++)
        found.push([arm, step, head, Array.from(numbers.row(arm, step, head)), numbers.mass(arm, "prefix", step, head), numbers.odds(arm, step, head)]);
      return found; }})()"""
    arms = shown.text.arms
    counts = json.dumps([len(arm.tokens) for arm in arms])
    rows = browser.ask(script.replace("STEPS", counts))
    heads = arms[0].masses.shape[3]
    assert len(rows) == sum(len(arm.tokens) for arm in arms) * arms[0].masses[0, 0].size
    for arm, step, head, row, mass, odds in rows:
        layer, at = divmod(head, heads)
        there = arms[arm].patterns[step][layer, at]
        assert np.allclose(row, there, rtol=quantisation_error(16) * 1.001, atol=FLOOR)
        masses = arms[arm].masses[:, step, layer, at].astype(float)
        assert mass == masses[0]
        assert np.isclose(odds, np.log(masses[0] / masses[1:].sum()), rtol=1e-6)
    quiet(browser, page_file)


def test_a_saved_page_opens_at_its_head_and_token(shown, study, tmp_path):
    """Without a driver: what Chromium prints of a page that was saved at a step and a head."""
    again, arms = dataclasses.replace(shown), shown.text.arms
    again.head, again.token = (1, 2), 7
    saved = again.save(tmp_path / "view.html")
    args = ["--virtual-time-budget=5000", "--dump-dom", f"--user-data-dir={tmp_path / 'dump'}"]
    done = subprocess.run(
        [chromium(), *FLAGS, *args, saved.as_uri()], capture_output=True, timeout=120, check=True
    )
    tag = re.search(r'<main id="view"[^>]*>', done.stdout.decode())[0]
    data = dict(re.findall(r'data-([\w-]+)="([^"]*)"', tag))
    assert (data["step"], data["head"], data["key"]) == ("7", "1.2", "0")
    for arm in (0, 1):
        there = arms[arm].patterns[7][1, 2, 0]
        assert np.isclose(float(data[f"value{arm}"]), there, rtol=quantisation_error(16) * 1.001)
    table = pd.read_csv(study / "head.csv")
    row = table[(table["layer"] == 1) & (table["head"] == 2)].iloc[0]
    assert np.allclose(
        [float(data[f"effect{end}"]) for end in ("", "-low", "-high")],
        row[["effect", "low", "high"]].astype(float),
        rtol=1e-6,
    )


def test_hover_slider_and_keys(browser, page_file, shown):
    opened(browser, page_file)
    first, second = shown.text.arms
    steps, live = len(first.tokens), shown.text.layout.n_live
    keys = live + steps - 1
    assert state_of(browser)["head"] == "mean"
    mean = first.patterns[0].mean((0, 1))[0]
    assert np.isclose(float(state_of(browser)["value0"]), mean, rtol=quantisation_error(16) * 1.001)

    browser.hover(*middle(browser, 0, 6, 3, steps, keys))
    now = state_of(browser)
    assert (now["step"], now["key"], now["head"]) == ("6", "3", "mean")
    assert np.isclose(float(now["value1"]), second.patterns[6].mean((0, 1))[3], rtol=2e-4)
    assert browser.ask(f"{VIEW}.viewer.state.step") == 0  # hovering chooses nothing
    x, y = middle(browser, 0, 5, 2, steps, keys)
    browser.hover(x, y)
    browser.click(x, y)
    assert (state_of(browser)["step"], state_of(browser)["key"]) == ("5", "2")

    browser.press("ArrowRight")
    browser.press("ArrowDown")
    assert (state_of(browser)["step"], state_of(browser)["key"]) == ("6", "3")
    browser.press("End")
    assert state_of(browser)["key"] == str(live + 5)
    browser.press("Home")

    browser.ask("document.querySelector('input[name=step]').focus()")
    browser.press("ArrowRight")
    assert state_of(browser)["step"] == "7"
    assert (
        browser.ask("document.querySelector('.stepper output').textContent") == f"7 of {steps - 1}"
    )

    grid = 3  # after the maps of two arms and their difference
    layers, heads = first.masses.shape[2:]
    x, y = middle(browser, grid, 1, 2, layers, heads)
    browser.hover(x, y)
    assert state_of(browser)["head"] == "1.2"
    known = browser.ask("document.querySelector('.readout').textContent")
    assert known.startswith(
        "Head 1.2: js lost without the head 0.4674 [0.4637, 0.4723] nats a step"
    )
    browser.click(x, y)
    browser.press("ArrowUp")
    assert state_of(browser)["head"] == "0.2"
    assert float(state_of(browser)["value0"]) == pytest.approx(first.patterns[7][0, 2, 0], rel=2e-4)

    browser.ask("document.querySelector('.token[aria-current]').focus()")
    browser.press("ArrowLeft")
    assert state_of(browser)["step"] == "6"
    assert browser.ask("document.activeElement.getAttribute('aria-current')") == "step"
    quiet(browser, page_file)


def test_scales_and_masks(browser, page_file, shown):
    most = "[...document.querySelectorAll('.map .most')].map(each => each.textContent)"
    opened(browser, page_file, {"head": "1.2"})
    shared = browser.ask(most)
    assert shared[0] == shared[1]
    opened(browser, page_file, {"head": "1.2", "scale": "own", "bos": 1})
    text = shown.text
    n_bos = text.layout.n_bos
    for i, arm in enumerate(text.arms):
        top = max(pattern[1, 2, n_bos:].max() for pattern in arm.patterns)
        assert float(browser.ask(most)[i]) == pytest.approx(top, rel=1e-3)
    quiet(browser, page_file)


def test_the_mean_over_heads_begins_without_bos(browser, page_file, shown):
    """BOS would take the whole scale of colours. A single head begins with it."""
    most = "document.querySelector('.map .most').textContent"
    is_hidden = "document.querySelector('input[name=bos]').checked"
    n_bos, arms = shown.text.layout.n_bos, shown.text.arms

    def top(read):
        return max(read(pattern).max() for arm in arms for pattern in arm.patterns)

    opened(browser, page_file)
    assert browser.ask(is_hidden)
    without = top(lambda pattern: pattern.mean((0, 1))[n_bos:])
    assert float(browser.ask(most)) == pytest.approx(without, rel=1e-3)
    browser.ask("document.querySelector('input[name=bos]').click()")
    everything = top(lambda pattern: pattern.mean((0, 1)))
    assert float(browser.ask(most)) == pytest.approx(everything, rel=1e-3)
    opened(browser, page_file, {"head": "1.2"})
    assert not browser.ask(is_hidden)
    assert float(browser.ask(most)) == pytest.approx(top(lambda pattern: pattern[1, 2]), rel=1e-3)
    quiet(browser, page_file)


def test_a_note_over_the_difference_says_that_the_texts_differ(browser, shown, tmp_path):
    first, second = shown.text.arms
    for name, last, differ in (("same", first.tokens[-1], 0), ("other", first.tokens[-1] + 1, 1)):
        changed = dataclasses.replace(second, tokens=(*first.tokens[:-1], last))
        text = dataclasses.replace(shown.text, arms=(first, changed))
        page_file = dataclasses.replace(shown, text=text).save(tmp_path / f"{name}.html")
        opened(browser, page_file)
        over = "[...document.querySelectorAll('.{} figcaption')].map(each => each.textContent)"
        for panel in ("map", "grid"):
            has_note = [
                caption.startswith("The two texts differ.")
                for caption in browser.ask(over.format(panel))
            ]
            assert has_note == [False, False, bool(differ)], (name, panel)
        quiet(browser, page_file)


def test_panels_are_saved_as_they_are(browser, page_file, shown):
    opened(browser, page_file, {"step": 4, "head": "1.2"})
    read = f"(async () => {{ const blob = await {VIEW}.viewer.file(PANEL, KIND); const bytes = new Uint8Array(await blob.arrayBuffer()); let text = ''; for (const byte of bytes) text += String.fromCharCode(byte); return btoa(text); }})()"

    def file(panel, kind):
        return base64.b64decode(
            browser.ask(read.replace("PANEL", f"'{panel}'").replace("KIND", f"'{kind}'"))
        )

    for panel in ("text", "map", "grid"):
        drawing = ElementTree.fromstring(file(panel, "SVG"))
        assert {element.tag.split("}")[1] for element in drawing.iter()} == {"svg", "rect", "text"}
    table = pd.read_csv(io.BytesIO(file("map", "CSV")), keep_default_na=False, encoding="utf-8-sig")
    rows = table[(table["arm"] == "baseline") & (table["step"] == 4) & (table["layer"] == 1)]
    there = shown.text.arms[0].patterns[4][1, 2]
    assert np.allclose(rows["attention"].astype(float), there, rtol=2e-4, atol=FLOOR)
    heads = pd.read_csv(io.BytesIO(file("grid", "CSV")), encoding="utf-8-sig")
    assert len(heads) == shown.text.arms[0].masses[0, 0].size
    quiet(browser, page_file)


@pytest.mark.parametrize(("width", "dark"), [(400, False), (1600, True)])
def test_the_page_fits_and_every_control_has_a_name(browser, page_file, width, dark):
    opened(browser, page_file, {"head": "1.2"}, width=width, dark=dark)
    browser.ask("for (const each of document.querySelectorAll('details')) each.open = true; 0")
    assert (
        browser.ask(
            "new Promise(done => setTimeout(() => done(document.documentElement.scrollWidth), 100))"
        )
        <= width
    )
    nameless = """[...document.querySelectorAll('button, select, input, canvas, [role=region]')].filter(each =>
      !(each.getAttribute('aria-label') || each.textContent.trim() || each.closest('label')?.textContent.trim())).length"""
    assert browser.ask(nameless) == 0
    assert browser.ask(
        "[...document.querySelectorAll('canvas')].every(each => each.tabIndex === 0)"
    )
    assert browser.ask("document.querySelector('.readout').getAttribute('aria-live')") == "polite"
    colour = browser.ask("getComputedStyle(document.querySelector('.lapa2-view')).backgroundColor")
    assert colour == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    quiet(browser, page_file)


def test_arms_of_unequal_lengths(browser, shown, tmp_path):
    first, second = shown.text.arms
    short = dataclasses.replace(
        second,
        tokens=second.tokens[:5],
        patterns=second.patterns[:5],
        masses=second.masses[:, :5],
        control={name: values[:5] for name, values in second.control.items()},
    )
    text = dataclasses.replace(shown.text, arms=(first, short))
    page_file = dataclasses.replace(shown, text=text).save(tmp_path / "view.html")
    opened(
        browser,
        page_file,
        {"step": len(first.tokens) - 1, "head": "1.2", "grid": "odds", "colour": "js"},
    )
    now = state_of(browser)
    assert float(now["value0"]) == pytest.approx(first.patterns[-1][1, 2, 0], rel=2e-4)
    assert (now["value1"], now["difference"], now["odds1"]) == ("NaN", "NaN", "NaN")
    assert "alpha 0.5 paper none" in browser.ask("document.querySelector('.readout').textContent")
    browser.ask("for (const each of document.querySelectorAll('details')) each.open = true; 0")
    browser.ask("new Promise(done => setTimeout(() => done(0), 100))")
    for panel in ("text", "map", "grid"):
        assert browser.ask(f"{VIEW}.viewer.file('{panel}', 'SVG').size") > 1000

    def table(panel):
        text = browser.ask(f"{VIEW}.viewer.file('{panel}', 'CSV').text()")
        return pd.read_csv(
            io.StringIO(text.removeprefix("\ufeff")), keep_default_na=False, na_values=[""]
        )

    # The arm that has ended shows no other step's numbers, and means are over steps of both.
    browser.ask(f"{VIEW}.viewer.set({{ colour: 'read' }})")
    words = table("text")
    assert (
        words.loc[words["arm"] == "alpha 0.5 paper", "attention of the step's query"].isna().all()
    )
    means = table("grid")["mean over steps, difference"].to_numpy()
    masses = [arm.masses[0, :5].mean(0).ravel() for arm in (first, second)]
    assert np.allclose(means, masses[1] - masses[0], atol=1e-6)
    quiet(browser, page_file)


def test_a_difference_below_the_rounding_is_drawn_as_none(browser, shown, tmp_path):
    first, second = shown.text.arms
    patterns = tuple(pattern * np.float32(1.001) for pattern in first.patterns)
    same = dataclasses.replace(second, patterns=patterns, tokens=first.tokens)
    text = dataclasses.replace(shown.text, arms=(first, same))
    for bits, least in ((8, 0.0), (16, 1e-5)):
        page_file = dataclasses.replace(shown, text=text, bits=bits).save(tmp_path / f"{bits}.html")
        opened(browser, page_file, {"head": "1.2", "step": 3})
        most = browser.ask(
            "[...document.querySelectorAll('.map .most')].map(each => each.textContent)"
        )
        assert (float(most[2]) > least) == (bits == 16)
        assert "(±" in browser.ask("document.querySelector('.readout').textContent")
        quiet(browser, page_file)


def test_a_mark_that_turns_text_around_does_not_turn_the_numbers(browser, shown, tmp_path):
    data = dataclasses.replace(shown).data
    data["arms"][0]["keys"][3] = data["arms"][1]["keys"][3] = "\u202eabc"
    hostile = dataclasses.replace(shown)
    hostile.__dict__["data"] = data
    opened(browser, hostile.save(tmp_path / "view.html"), {"key": 3, "step": 4})
    told_here = browser.ask("document.querySelector('.readout').textContent")
    assert "“\u2068\\u202eabc\u2069”" in told_here
    assert "\u202e" not in told_here


def test_a_pixel_shows_the_largest_of_its_cells(browser, shown, tmp_path):
    """More keys than pixels: one key of strong attention is not lost."""
    first = shown.text.arms[0]
    size, live, steps = first.masses.shape[2:], shown.text.layout.n_live, 400
    patterns = []
    for step in range(steps):
        pattern = np.full((*size, live + step), 1e-4, np.float32)
        pattern[..., 0] = 0.5  # a strong key in the first column, and one between pixels
        pattern[..., min(203, live + step - 1)] = 0.9
        patterns.append(pattern)
    masses = np.full((4, steps, *size), 0.25, np.float32)
    long = dataclasses.replace(
        first, tokens=(70,) * steps, patterns=tuple(patterns), masses=masses, control={}
    )
    text = dataclasses.replace(shown.text, arms=(long,))
    page_file = dataclasses.replace(shown, text=text, heads={}).save(tmp_path / "view.html")
    opened(browser, page_file, {"head": "1.2"})
    drawn = ElementTree.fromstring(browser.ask(f"{VIEW}.viewer.file('map', 'SVG').text()"))
    rects = [rect.attrib for rect in drawn.iter() if rect.tag.endswith("rect")]
    assert len(rects) < 130_000
    assert not [rect for rect in rects if float(rect["width"]) <= 0 or float(rect["height"]) <= 0]
    strong = [float(rect["x"]) for rect in rects if rect["fill"] == "rgb(8,48,107)"]
    assert len(strong) > 100
    assert max(strong) - min(strong) > 50, "a band along the last key, then one column"


@pytest.mark.parametrize("grid", ["text", "run"])
def test_the_grid_tells_the_number_that_is_drawn(browser, page_file, shown, grid):
    """And not that of the current step: the mean over the text, or of all texts with its ends."""
    opened(browser, page_file, {"grid": grid, "step": 3})
    first, second = shown.text.arms
    layers, heads = first.masses.shape[2:]
    browser.hover(*middle(browser, 3, 1, 2, layers, heads))
    known = browser.ask("document.querySelector('.readout').textContent")
    number = r" (\+?-?[\d.e-]+)" + (r" \[([\d.e-]+), ([\d.e-]+)\]" if grid == "run" else "")
    said = re.match(rf"Head 1\.2: attention on the prefix.*?, baseline{number}; ", known)
    if grid == "run":
        ends = [float(first.of_run[name][1, 2]) for name in ("mean", "low", "high")]
        difference = shown.text.differences["mean"][1, 2]
    else:
        means = [arm.masses[0, :, 1, 2].mean() for arm in (first, second)]
        ends, difference = means[:1], means[1] - means[0]
    assert [float(number) for number in said.groups()] == pytest.approx(ends, rel=1e-3)
    difference_text = re.search(r", difference (\+?-?[\d.e-]+)", known)
    assert float(difference_text[1]) == pytest.approx(difference, rel=1e-3)
    quiet(browser, page_file)


def test_what_a_pointer_and_a_key_do_not_do(browser, page_file, shown):
    opened(browser, page_file, {"head": "1.2", "step": 2})
    steps, live = len(shown.text.arms[0].tokens), shown.text.layout.n_live
    keys = live + steps - 1
    before = state_of(browser)
    browser.hover(*middle(browser, 0, 0, keys - 1, steps, keys))  # no such key at this step
    assert state_of(browser) == before
    stopped = """(() => { const pressed = new KeyboardEvent('keydown', { key: 'End', ctrlKey: true, cancelable: true, bubbles: true });
      document.querySelector('canvas').dispatchEvent(pressed); return pressed.defaultPrevented; })()"""
    assert browser.ask(stopped) is False
    assert state_of(browser) == before
    quiet(browser, page_file)


def test_the_focus_stays_where_a_head_is_chosen(browser, page_file, study):
    """In the table of heads, which has every head in order."""
    opened(browser, page_file)
    browser.ask("document.querySelector('.grid details').open = true; 0")
    browser.ask("new Promise(done => setTimeout(() => done(0), 100))")
    names = browser.ask(
        "[...document.querySelectorAll('.grid tbody th')].map(cell => cell.textContent)"
    )
    table = pd.read_csv(study / "head.csv")
    assert names == [
        f"{layer}.{head}" for layer, head in sorted(zip(table["layer"], table["head"], strict=True))
    ]
    active = "document.activeElement.textContent"
    browser.ask("document.querySelectorAll('.grid tbody button')[5].focus()")
    head = browser.ask(active)
    browser.press("Enter")
    assert (browser.ask(active), state_of(browser)["head"]) == (head, head)


def test_hostile_text_does_not_act(browser, tmp_path):
    model = load("tiny-gpt2")
    made = run_of(
        model,
        "prefix",
        "sentiment",
        ["positive"],
        [HOSTILE],
        length=90,
        samples=1,
        parameters={"prefixes": "hard"},
    )
    shown = view(made, model=model, steps=3)
    assert shown.html.count("</script>") == 2
    page_file = shown.save(tmp_path / "view.html")
    opened(browser, page_file)
    browser.ask("for (const each of document.querySelectorAll('details')) each.open = true; 0")
    browser.ask("new Promise(done => setTimeout(() => done(0), 150))")
    assert browser.ask("document.title") == shown.data["title"]
    assert HOSTILE in browser.ask("document.title")
    assert browser.ask("document.querySelectorAll('img, [onerror]').length") == 0
    assert browser.ask("document.scripts.length") == 2
    assert (
        browser.ask("document.querySelector('.line').textContent").replace("·", "").find(HOSTILE)
        > 0
    )
    svg = browser.ask(f"{VIEW}.viewer.file('text', 'SVG').text()")
    assert {element.tag.split("}")[1] for element in ElementTree.fromstring(svg).iter()} == {
        "svg",
        "rect",
        "text",
    }
    table = browser.ask(f"{VIEW}.viewer.file('text', 'CSV').text()")
    assert not re.search(r"(^|,)\"?[=+@]", table, re.M)
    quiet(browser, page_file)


@pytest.mark.long
def test_a_frame_of_a_notebook_shows_it(browser, shown, tmp_path, monkeypatch):
    page_file = tmp_path / "notebook.html"
    listen = (
        "<script>addEventListener('message', event => { document.title = event.data; });</script>"
    )
    frame = framed(shown, monkeypatch).replace(
        "&lt;/body&gt;",
        html_of.escape(
            "<script type='module'>const el = document.getElementById('view'); const at = () => el.dataset.ready ? parent.postMessage(el.dataset.value0, '*') : setTimeout(at, 20); at();</script></body>"
        ),
    )
    page_file.write_text(f"<!doctype html><meta charset=utf-8>{listen}{frame}", encoding="utf-8")
    browser.goto(page_file.as_uri())
    value = browser.ask(
        "new Promise(done => { const at = () => document.title ? done(document.title) : setTimeout(at, 20); at(); })"
    )
    assert float(value) == pytest.approx(shown.text.arms[0].patterns[0].mean((0, 1))[0], rel=2e-4)
    quiet(browser, page_file)
