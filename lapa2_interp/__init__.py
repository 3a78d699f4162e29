"""The LaPA2 length-aware attention bias on TransformerLens models: applied, recorded and tested.

The names in the stub beside this file are those that one needs first. Each is imported when it is
first used, so that `import lapa2_interp` loads neither torch nor transformers. Import all other
names from their subpackages: `models` (load_tokenizer, facts_of, identify, TransformersModel,
probe), `attention` (soft_inputs, Recorder, tables of a trace), `prefixes` (find_prefix,
SoftPrefix), `runs` (make_cells, sweep) and `report` (view).
"""

import os

import lazy_loader

from lapa2_interp._util.version import __version__ as __version__

if "OMP_WAIT_POLICY" not in os.environ:
    # Threads of PyTorch that wait for each other keep their core busy for a while. Beside another
    # process that needs the cores, this makes both many times slower (docs/your-model.md, "Speed on
    # a CPU"). So they wait for a shorter while. It is read when torch is first imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
