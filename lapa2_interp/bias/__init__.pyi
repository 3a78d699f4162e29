from . import recipes as recipes
from . import theory as theory
