from . import circuits as circuits
from . import methods as methods
from . import plots as plots
from . import scoring as scoring
from . import tasks as tasks
from .attention.hooked import augmented as augmented
from .bias import recipes as recipes
from .bias import theory as theory
from .bias.augmentation import Augmentation as Augmentation
from .bias.layout import Layout as Layout
from .bias.padded_rows import PaddedRows as PaddedRows
from .bias.recipes import recipe as recipe
from .circuits.selection import Selection as Selection
from .errors import Lapa2Error as Lapa2Error
from .generation.cell import Cell as Cell
from .generation.teacher_forcing import teacher_forced as teacher_forced
from .models.load import load_model as load_model
from .report.steer import steer as steer
from .runs.generate import generate as generate
from .runs.run import load_run as load_run

__version__: str
