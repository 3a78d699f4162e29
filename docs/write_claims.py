"""Makes the table of the paper's claims: `python docs/write_claims.py` writes
figures/paper/claims.csv from `claims.toml`, which says for each claim what the paper says and which
rows decide.

A claim has cases, such as methods on tasks; each is a row of a committed table with a verdict. A
case that was run again on new prompts has the later verdict. In tables without verdicts a filter of
claims.toml decides. The status of a claim counts its cases, and names the model:

- for: the case is as in the paper; against: the opposite of what the paper says is shown.
- without a difference: the difference is shown to be smaller than a margin; open: it takes more
  prompts to decide.
- without a basis: a claim on what LaPA2 adds to a method, where the method by itself does not do in
  this model what it is for (`basis` in claims.toml).
- k of n agree, without a test: there are only numbers, such as means. not tested: there is no data.
"""

from __future__ import annotations

import csv
import io
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from write_tables import ROOT, NumberError, Numbers, Row, fits, rounded, table_of

VERDICTS = "figures/paper/quick/tables/verdicts.csv"
LATER = {
    "figures/undecided/claims.csv": "new prompts",
    "figures/undecided/detox.claims.csv": "the paper's prompts",
}
"""Later verdicts on the same claims, and on which prompts."""
STATUS = {
    "as in the paper": "for",
    "against the paper": "against",
    "no difference": "without a difference",
    "inconclusive": "open",
    "no basis": "without a basis",
}
"""Verdicts of cases, and how a status counts them."""
MULTIPLES = "figures/paper/perplexity.csv"
"""Perplexities of whole texts as multiples of that of no bias; verdicts are on differences."""
COLUMNS = [
    "about", "claim", "paper", "reported", "found", "model", "setting", "here", "status", "scorer",
    "cases", *STATUS, "lowest", "highest", "level",
]  # fmt: skip
NAMED = 3
"""A claim of at most this many cases names each with its number; one of more has their span."""
Claim = dict[str, Any]


def status_of(verdicts: list[str], model: str, tested: bool = True) -> str:
    """The status of a claim out of the verdicts of its cases."""
    if not verdicts:
        return "not tested"
    counts = [f"{verdicts.count(name)} {word}" for name, word in STATUS.items() if name in verdicts]
    first, *others = counts if tested else [f"{verdicts.count('as in the paper')} agree"]
    number, _, word = first.partition(" ")
    first = f"{number} of {len(verdicts)} {word}{'' if tested else ', without a test'}"
    return f"{', '.join([first, *others])}, in {model}"


def without_basis(claim: Claim, cases: list[Row], root: Path) -> list[Row]:
    """The cases; of methods that do not control by themselves the verdict is "no basis"."""
    if "basis" not in claim:
        return cases
    basis = claim["basis"]
    rows = [
        row
        for row in table_of(root / basis["file"])
        if all(fits(row[n], w) for n, w in basis["where"].items())
    ]
    controls = {row["method"] for row in rows if fits(row[basis["value"]], basis["controls"])}
    if missing := {case["method"] for case in cases} - {row["method"] for row in rows}:
        raise NumberError(f"{basis['file']} says nothing of {', '.join(sorted(missing))}")
    return [
        case if case["method"] in controls else case | {"verdict": "no basis"} for case in cases
    ]


def rows_of(group: Claim, root: Path) -> list[Row]:
    """The rows of a group of cases; of verdicts the later ones, where a claim was judged again."""
    file, where = group.get("file", VERDICTS), group.get("where", {})
    rows = [r for r in table_of(root / file) if all(fits(r[name], where[name]) for name in where)]
    if not rows:
        raise NumberError(f"no row of {file} fits {where}")
    if file != VERDICTS:
        return rows
    again = {
        (row["item"], row["claim"]): row | {"later": prompts}
        for later, prompts in LATER.items()
        for row in table_of(root / later)
    }
    return [again.get((row["item"], row["claim"]), row) for row in rows]


def summed(group: Claim, rows: list[Row]) -> list[Row]:
    """A row for each value of the columns `by`: means with signs, added up, such as a change of a
    gain."""
    sums = []
    for values in dict.fromkeys(tuple(row[name] for name in group["by"]) for row in rows):
        keys, total = dict(zip(group["by"], values, strict=True)), 0.0
        for sign, where in group["sum"]:
            terms = [row for row in rows if all(fits(row[n], w) for n, w in (where | keys).items())]
            if len(terms) != 1:
                raise NumberError(f"{len(terms)} rows fit {where | keys}, not one")
            total += sign * float(terms[0][group.get("term", "mean")])
        scorer = terms[0].get("scorer", "")
        sums.append(keys | {"here": str(round(total, 9)), "scorer": scorer})
    return sums


def multiple(row: Row, root: Path) -> Row:
    """The row with its perplexity, and the ends of its interval, as a multiple of no bias."""
    where = {name: row[name] for name in ("task", "method")}
    where |= {"study": row["item"], "of": "whole text"}
    ratios = [r for r in table_of(root / MULTIPLES) if all(r[n] == where[n] for n in where)]
    if len(ratios) != 1:
        raise NumberError(f"{len(ratios)} rows of {MULTIPLES} fit {where}, not one")
    return row | {"here": ratios[0]["ratio"], "low": ratios[0]["low"], "high": ratios[0]["high"]}


def cases_of(claim: Claim, root: Path) -> list[Row]:
    """The cases of a claim: rows with verdict, here, low, high, paper, length, scorer, later."""
    cases = []
    for group in claim.get("cases", []):
        rows = rows_of(group, root)
        if claim.get("multiple"):
            rows = [multiple(row, root) for row in rows]
        for row in summed(group, rows) if "sum" in group else rows:
            value = row[group.get("value", "here")]
            if "within" in group:
                decided = ["against the paper", "as in the paper"][
                    abs(float(value)) <= group["within"]
                ]
            else:
                filters = {name: group[name] for name in STATUS if name in group}
                decided = next((n for n in filters if fits(value, filters[n])), "inconclusive")
            length = str(group.get("length", claim.get("length", "")))
            name = group.get("name", "")
            cases.append(
                {"verdict": decided} | row | {"name": name, "here": value, "length": length}
            )
    return without_basis(claim, cases, root)


def number(values: list[str], claim: Claim) -> str:
    """A number with its unit, or the lowest and highest of several."""
    numbers = sorted(float(value) for value in values if value)
    digits, sign = claim.get("digits", 1), claim.get("sign", True)
    ends = dict.fromkeys(rounded(value, digits, sign) for value in [*numbers[:1], *numbers[-1:]])
    return f"{' to '.join(ends)} {claim.get('unit', '')}".strip() if numbers else ""


def summary(cases: list[Row], claim: Claim, words: Numbers) -> str:
    """What was found: each case with its number, or the span of the numbers of all cases."""
    if len(cases) > NAMED:
        return number([case["here"] for case in cases], claim)
    differing = [
        column for column in ("method", "task") if len({case.get(column) for case in cases}) > 1
    ]
    parts = []
    for case in cases:
        names = [words.word(column, case.get(column, "")) for column in differing or ["method"]]
        name = case["name"] or ", ".join(filter(None, names))
        ends = [case.get("low", ""), case.get("high", "")]
        interval = [rounded(float(end), claim.get("digits", 1)) for end in ends if end]
        parts.append(
            (f"{name}: " if name else "")
            + number([case["here"]], claim)
            + (f" [{', '.join(interval)}]" if interval else "")
        )
    return "; ".join(parts)


def setting(cases: list[Row], claim: Claim, asked: Claim, words: Numbers) -> str:
    """Model, if another than that of most claims, tasks, tokens of the texts, the kind of prefix
    if there is only one, and what else differs from the paper."""
    lengths = dict.fromkeys(case["length"] for case in cases if case["length"])
    tasks = dict.fromkeys(words.word("task", case.get("task", "")) for case in cases)
    names = {f"{case.get('method')}, {case.get('task')}" for case in cases}
    kinds = sorted({asked["prefixes"][name] for name in names if name in asked["prefixes"]})
    later = [case["later"] for case in cases if case.get("later")]
    share = "" if len(later) == len(cases) else f"{len(later)} of {len(cases)} "
    parts = [
        claim.get("model", ""),
        ", ".join(filter(None, tasks)),
        f"{' or '.join(lengths)} tokens" if lengths else "",
        f"{kinds[0]} prefixes" if len(kinds) == 1 else "",
        claim.get("note", ""),
        f"{share}on {' and '.join(dict.fromkeys(later))}" if later else "",
    ]
    return "; ".join(filter(None, parts)) if cases else ""


def claims(text: str, words: Numbers, root: Path = ROOT) -> list[dict[str, Any]]:
    """The table out of what claims.toml says: a row for each claim, with `COLUMNS`.

    Raises:
        NumberError: A group of cases has no row, or a sum not one for each term.
    """
    asked, table = tomllib.loads(text), []
    for claim in asked["claim"]:
        cases = cases_of(claim, root)
        verdicts = [case["verdict"] for case in cases]
        model = claim.get("model", asked["model"])
        status = status_of(verdicts, model, claim.get("tested", True))
        result = summary(cases, claim, words) if cases else "no data"
        context = setting(cases, claim, asked, words)
        circumstances = "; ".join(filter(None, [context, claim.get("further", "")]))
        values = [float(case["here"]) for case in cases]
        scorers = dict.fromkeys(re.findall(r"(?:accuracy|toxicity) \((\w+)", str(cases)))
        printed = claim | {"unit": "in perplexity", "digits": 1, "sign": True}
        printed = printed if claim.get("multiple") else claim
        paper = number([case.get("paper", "") for case in cases], printed)
        name, source = claim["claim"], ": ".join(filter(None, [claim["source"], paper]))
        row = {
            "about": claim.get("about", "the paper"),
            "claim": name,
            "paper": f"{name[:-1]}; {source})" if name.endswith(")") else f"{name} ({source})",
            "reported": f"{paper} ({claim['source']})" if paper else claim["source"],
            "found": result,
            "model": model if cases else "",
            "setting": context,
            "here": f"{result} ({circumstances})" if circumstances else result,
            "status": status,
            "scorer": ", ".join(scorers),
            "cases": len(cases),
            "lowest": min(values, default=""),
            "highest": max(values, default=""),
            "level": claim.get("level", 3),
        }
        table.append(row | {name: verdicts.count(name) for name in STATUS})
    return table


def written(root: Path = ROOT) -> str:
    """What figures/paper/claims.csv should be."""
    words = Numbers.read(root)
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(claims((root / "docs" / "claims.toml").read_text("utf-8"), words, root))
    return file.getvalue()


if __name__ == "__main__":
    (ROOT / "figures" / "paper" / "claims.csv").write_text(written(), "utf-8")
