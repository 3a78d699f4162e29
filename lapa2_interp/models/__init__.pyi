from .card import identify as identify
from .facts import TransformersModel as TransformersModel
from .facts import facts_of as facts_of
from .liveness import probe as probe
from .load import load_model as load_model
from .load import load_tokenizer as load_tokenizer
from .planted import answer_key as answer_key
