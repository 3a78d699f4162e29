from .soft_prefix import SoftPrefix as SoftPrefix
from .soft_prefix import find_prefix as find_prefix
from .soft_prefix import load_prefix as load_prefix
from .soft_prefix import save_prefix as save_prefix
