from .fading_chat import chat_fade as chat_fade
from .run_page import write_report as write_report
from .viewer import view as view
