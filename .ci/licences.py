"""The licences in a CycloneDX file, as their packages state them, with the packages under each:
`python .ci/licences.py results/sbom.json`."""

import json
import sys
from collections import defaultdict
from pathlib import Path

packages = defaultdict(list)
for component in json.loads(Path(sys.argv[1]).read_text())["components"]:
    stated = [
        entry.get("expression") or entry["license"] for entry in component.get("licenses", ())
    ]
    names = {
        entry if isinstance(entry, str) else entry.get("id") or entry["name"] for entry in stated
    }
    name = ", ".join(sorted(names)).replace("License :: OSI Approved :: ", "")
    packages[name or "stated in files alone"].append(f"{component['name']} {component['version']}")
for name, listed in sorted(packages.items(), key=lambda pair: (-len(pair[1]), pair[0])):
    print(f"{name} ({len(listed)}): {', '.join(listed)}")
