"""Pages of runs: the grid of a small one, a text that would act if it were not escaped, and what a
browser would see of a page."""

import json
from html.parser import HTMLParser

from lapa2_interp.runs.engines import InProcess
from lapa2_interp.runs.fill import fill_run
from lapa2_interp.runs.grid import load_grid

GRID = """model = "tiny-gpt2"
dtype = "float32"
task = "sentiment"
attribute = "positive"
prompts = 2
length = 30
samples = 2
trace = "{trace}"

[[block]]
method = ["prefix", "air-decoding"]
augmentation = ["none", "paper"]

[[block]]
method = "none"
"""
HOSTILE = "</script><script>document.title='x'</script><img src=x onerror=alert(1)>&amp; '\"\u2028"


class Parts(HTMLParser):
    """What a browser would see: elements with their attributes, text outside scripts, and scripts
    by id."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.scripts, self.inside = [], "", {}, None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside = dict(attrs).get("id") or tag

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.inside = None

    def handle_data(self, data):
        if self.inside is None:
            self.text += data
        else:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data

    @property
    def data(self):
        """The embedded texts."""
        return json.loads(self.scripts["data"])


def fill_small_run(folder):
    """Make the run of `GRID`, with traces, in a new folder, its grid beside it."""
    grid = folder.parent / "pooled.toml"
    grid.write_text(GRID.format(trace="pooled"))
    fill_run(folder, [load_grid(str(grid))], InProcess("cpu"))
