"""The figures of the drills as a table: `python tests/drills.py results/drills.xml`.

The file is what `pytest --junitxml` wrote of tests/test_drills.py; a property is a column.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree


def rows(file):
    """(drill, outcome, properties) of every test, in order."""
    for case in ElementTree.parse(file).iter("testcase"):
        name = case.get("name", "").partition("[")[0].removeprefix("test_").replace("_", " ")
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped")
        outcome = "failed" if failed else "passed"
        if skipped is not None:
            outcome = f"skipped: {skipped.get('message', '')}"
        found = {each.get("name"): each.get("value") for each in case.iter("property")}
        yield name, outcome, found


def table(file):
    """Markdown: a heading per drill, a row per case."""
    lines, before = [], None
    for name, outcome, found in rows(file):
        columns = [*found, "outcome"]
        if (name, columns) != before:
            lines += [
                "",
                f"**{name}**",
                "",
                f"| {' | '.join(columns)} |",
                "|---" * len(columns) + "|",
            ]
            before = (name, columns)
        lines.append(f"| {' | '.join([*found.values(), outcome])} |")
    return "\n".join(lines).strip()


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
