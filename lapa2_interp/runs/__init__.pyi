from .generate import make_cells as make_cells
from .grid import load_grid as load_grid
from .logits_processor import MethodProcessor as MethodProcessor
from .run import Run as Run
from .run import load_run as load_run
