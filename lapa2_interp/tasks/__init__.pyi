from .exact_messages import messages_of as messages_of
from .prompts import as_prompts as as_prompts
from .prompts import read_prompts as read_prompts
from .task import Prompts as Prompts
from .task import Task as Task
from .task import extra_prompts as extra_prompts
from .task import read_task as read_task
