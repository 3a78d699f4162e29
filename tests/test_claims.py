"""The table of the paper's claims: figures/paper/claims.csv is what docs/write_claims.py makes, and its
statuses follow the rule, by tables made by hand."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("write_claims", ROOT / "docs" / "write_claims.py")
assert SPEC
assert SPEC.loader
table = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(table)

AS, AGAINST, SAME, OPEN, BASELESS = table.STATUS


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([AS, AS], "2 of 2 for, in M"),
        ([AS, AGAINST, OPEN], "1 of 3 for, 1 against, 1 open, in M"),
        ([SAME, AGAINST, OPEN, OPEN], "1 of 4 against, 1 without a difference, 2 open, in M"),
        ([AS, BASELESS], "1 of 2 for, 1 without a basis, in M"),
        ([], "not tested"),
    ],
)
def test_the_rule(verdicts, status):
    assert table.status_of(verdicts, "M") == status
    if verdicts:
        assert table.status_of([AS, *verdicts], "M", tested=False).endswith(
            f"of {len(verdicts) + 1} agree, without a test, in M"
        )


VERDICTS = """\
item,claim,metric,task,method,paper,here,low,high,verdict,scorer
gain,more: one,acc,t,one,8.67,4.17,-0.28,8.33,inconclusive,accuracy (adapter t 0123)
gain,more: two,acc,t,two,3.6,4.44,2.78,6.25,as in the paper,accuracy (adapter t 0123)
gain,more: three,acc,u,three,2.9,-0.83,-5.21,3.33,inconclusive,accuracy (adapter t 0123)
gain,more: four,acc,u,two,,-2.5,-3.1,-1.9,against the paper,accuracy (adapter t 0123)
cost,more: one,ppl,t,one,12.01,1.93,0.99,2.87,as in the paper,perplexity (M)
"""
RATIOS = """\
study,task,method,of,ratio,low,high
cost,t,one,whole text,1.114,1.057,1.165
cost,t,one,continuation,1.2,1.1,1.3
"""
LATER = """\
item,claim,metric,task,method,paper,here,low,high,verdict,scorer
gain,more: one,acc,t,one,8.67,2.82,1.21,4.51,as in the paper,accuracy (adapter t 0123)
cost,more: three,acc,u,three,2.9,9.0,8.0,10.0,as in the paper,perplexity (M)
"""
FITS = "method,task,R2\none,t,0.987\ntwo,t,0.627\nthree,u,0.8\n"
MEANS = """\
task,method,arm,length,mean
t,one,none,32,50
t,one,bias,32,52.5
t,one,none,256,40
t,one,bias,256,47
t,two,none,32,50
t,two,bias,32,55
t,two,none,256,60
t,two,bias,256,61.25
"""
CLAIMS = """
model = "M"
[prefixes]
"one, t" = "hard"
"two, t" = "soft"
"three, u" = "soft"
[[claim]]
claim = "It gains"
source = "Table 1"
unit = "points"
note = "a note"
level = 1
cases = [{where = {item = "gain"}, length = 64}]
[[claim]]
claim = "It costs (much)"
source = "Table 1"
length = "8"
cases = [{where = {metric = "ppl"}, name = "a case"}]
[[claim]]
claim = "It costs, as a multiple"
source = "Table 1"
multiple = true
unit = "times"
sign = false
digits = 2
cases = [{where = {metric = "ppl"}}]
[[claim]]
claim = "R2 is high"
source = "Figure 1"
sign = false
digits = 2
cases = [{file = "fits.csv", value = "R2", "as in the paper" = "> 0.9", "against the paper" = "< 0.7"}]
[[claim]]
claim = "Gains grow"
source = "Text"
tested = false
about = "own tables"
cases = [{file = "means.csv", by = ["method", "task"], "as in the paper" = "> 0", "against the paper" = "< 0", sum = [[1, {arm = "bias", length = 256}], [-1, {arm = "none", length = 256}], [-1, {arm = "bias", length = 32}], [1, {arm = "none", length = 32}]]}]
[[claim]]
claim = "Little changes"
source = "Text"
model = "other"
tested = false
cases = [{file = "means.csv", where = {length = 256}, by = ["method"], within = 5, sum = [[1, {arm = "bias"}], [-1, {arm = "none"}]]}]
[[claim]]
claim = "People see it"
source = "Figure 6"
"""
WORDS = """
[words.method]
one = "One"
[words.task]
t = "T"
"""
EXPECTED = [
    ("the paper", "It gains (Table 1: +2.9 to +8.7 points)", "-2.5 to +4.4 points (T, u; 64 tokens; a note; 1 of 4 on new prompts)", "M", "adapter", "2 of 4 for, 1 against, 1 open, in M", 4, (2, 1, 0, 1, 0), (-2.5, 4.44), 1),
    ("the paper", "It costs (much; Table 1: +12.0)", "a case: +1.9 [1.0, 2.9] (T; 8 tokens; hard prefixes)", "M", "", "1 of 1 for, in M", 1, (1, 0, 0, 0, 0), (1.93, 1.93), 3),
    ("the paper", "It costs, as a multiple (Table 1: +12.0 in perplexity)", "One: 1.11 times [1.06, 1.17] (T; hard prefixes)", "M", "", "1 of 1 for, in M", 1, (1, 0, 0, 0, 0), (1.114, 1.114), 3),
    ("the paper", "R2 is high (Figure 1)", "One, T: 0.99; two, T: 0.63; three, u: 0.80 (T, u)", "M", "", "1 of 3 for, 1 against, 1 open, in M", 3, (1, 1, 0, 1, 0), (0.627, 0.987), 3),
    ("own tables", "Gains grow (Text)", "One: +4.5; two: -3.8 (T)", "M", "", "1 of 2 agree, without a test, in M", 2, (1, 1, 0, 0, 0), (-3.75, 4.5), 3),
    ("the paper", "Little changes (Text)", "One: +7.0; two: +1.2 (other)", "other", "", "1 of 2 agree, without a test, in other", 2, (1, 1, 0, 0, 0), (1.25, 7.0), 3),
    ("the paper", "People see it (Figure 6)", "no data", "", "", "not tested", 0, (0, 0, 0, 0, 0), ("", ""), 3),
]  # fmt: skip


@pytest.fixture
def root(tmp_path):
    """A folder with tables made by hand."""
    for name, text in {
        table.VERDICTS: VERDICTS,
        "figures/undecided/claims.csv": LATER,
        "figures/undecided/detox.claims.csv": LATER.replace("gain,more: one", "loss,less: one"),
        table.MULTIPLES: RATIOS,
        "fits.csv": FITS,
        "means.csv": MEANS,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def test_a_table_made_by_hand(root):
    rows = table.claims(CLAIMS, table.Numbers(WORDS, root), root)
    columns = ("about", "paper", "here", "model", "scorer", "status", "cases")
    assert [
        (
            *(row[column] for column in columns),
            tuple(row[verdict] for verdict in table.STATUS),
            (row["lowest"], row["highest"]),
            row["level"],
        )
        for row in rows
    ] == EXPECTED
    assert all(set(row) == set(table.COLUMNS) for row in rows)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('{item = "gain"}', '{item = "loss"}', "no row of figures/paper/quick/tables/verdicts.csv fits {'item': 'loss'}"),
        ("where = {length = 256}, by", 'by', "2 rows fit {'arm': 'bias', 'method': 'one'}, not one"),
    ],
)  # fmt: skip
def test_a_claim_without_its_rows_is_an_error(root, before, after, message):
    assert before in CLAIMS
    with pytest.raises(table.NumberError, match=re.escape(message)):
        table.claims(CLAIMS.replace(before, after), table.Numbers(WORDS, root), root)


BASIS = """
basis = {file = "raw.csv", where = {arm = "none"}, value = "high", controls = "< 0"}
"""


def test_a_method_that_does_not_control_by_itself_is_without_a_basis(root):
    raw = "method,arm,high\none,none,-1\ntwo,none,0.5\nthree,none,-2\nthree,all,3\n"
    (root / "raw.csv").write_text(raw, "utf-8")
    text = CLAIMS.replace('note = "a note"\n', 'note = "a note"\n' + BASIS)
    gains = table.claims(text, table.Numbers(WORDS, root), root)[0]
    assert gains["status"] == "1 of 4 for, 1 open, 2 without a basis, in M"
    (root / "unsaid.csv").write_text("method,arm,high\none,none,-1\n", "utf-8")
    with pytest.raises(table.NumberError, match=r"unsaid\.csv says nothing of three, two"):
        table.claims(text.replace("raw.csv", "unsaid.csv"), table.Numbers(WORDS, root), root)


def test_the_committed_table_is_that_of_the_committed_verdicts():
    assert (ROOT / "figures" / "paper" / "claims.csv").read_text("utf-8") == table.written()


CLAIMED = tomllib.loads((ROOT / "docs" / "claims.toml").read_text("utf-8"))


def test_claims_have_one_scorer():
    """So that a page may say it once, and the model."""
    rows = table.table_of(ROOT / "figures" / "paper" / "claims.csv")
    assert {row["scorer"] for row in rows} == {"", "adapter"}
    assert all(
        "SmolLM2-135M" in (row["model"] or "SmolLM2-135M") or row["model"] == "synthetic logits"
        for row in rows
        if row["about"] == "the paper"
    )


def test_every_verdict_on_the_paper_stands_in_a_claim():
    """Or the same comparison under another item."""
    groups = [group for claim in CLAIMED["claim"] for group in claim.get("cases", [])]
    names = {
        (row.get("item"), row.get("claim"))
        for group in groups
        for row in table.rows_of(group, ROOT)
    }
    judged = [row for row in table.table_of(ROOT / table.VERDICTS) if row["whose"] == "paper"]
    compared = {row["compared"] for row in judged if (row["item"], row["claim"]) in names} - {""}
    left = [row for row in judged if row["compared"] not in compared]
    assert [row["claim"] for row in left if (row["item"], row["claim"]) not in names] == []


def test_every_method_of_the_papers_tables_is_in_a_claim():
    """A method on a task that is left out of claims.toml would be missed by nobody."""
    reported = table.table_of(ROOT / "analyses" / "lab" / "reported_results.csv")
    names = {"GPT-2+Prefix": "prefix", "Con-Prefix": "con-prefix", "Air-Decoding": "air-decoding"}
    pairs = {
        (row["task"], names.get(row["method"], row["method"].lower()))
        for row in reported
        if row["lapa2"] == "True" and row["table"] in ("sent_topic", "detox")
    }
    assert len(pairs) == 9
    metrics = {"sentiment": "acc", "topic": "acc", "detox": "tox"}
    for metric, of in (("control", metrics), ("perplexity", dict.fromkeys(metrics, "ppl"))):
        cases = {
            (row["task"], row["method"])
            for claim in CLAIMED["claim"]
            if claim.get("level") in (1, 2) and claim.get("about", "the paper") == "the paper"
            for group in claim.get("cases", [])
            for row in table.rows_of(group, ROOT)
            if row.get("item") in ("sent_topic", "detox") and row["metric"] == of[row["task"]]
        }
        assert cases >= pairs, metric


def test_kinds_of_prefix_are_those_of_the_runs():
    for row in table.table_of(ROOT / "figures/paper/quick/tables/prefix_types.csv"):
        name = f"{row['method']}, {row['task']}"
        if name in CLAIMED["prefixes"] and row["type"] != "none":
            assert CLAIMED["prefixes"][name] == row["type"], name


def test_lengths_are_those_of_the_runs():
    for claim in CLAIMED["claim"]:
        for group in claim.get("cases", []):
            lengths = set(
                re.findall(
                    r"\d+", str(group.get("length", claim.get("length", ""))).replace(",", "")
                )
            )
            for item in {row["item"] for row in table.rows_of(group, ROOT) if "item" in row}:
                rows = table.table_of(ROOT / f"figures/paper/quick/tables/{item}.csv")
                if "length" in rows[0] and item != "deep":
                    assert lengths <= {row["length"].partition(".")[0] for row in rows}, claim[
                        "claim"
                    ]
