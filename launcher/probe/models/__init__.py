"""Work with a trained model under the trainer's Python: `chat` answers, `merging` merges, `sampling` compares.

Loaded by `run.py` as the package `launch_models`. `channel` is how it talks, `loading` how models are loaded.
"""

from .channel import Channel
from .chat import chat
from .merging import merge
from .sampling import sample

TASKS = {"chat": chat, "merge": merge, "samples": sample}


def main(task: str) -> None:
    """Do one task. Whatever goes wrong is its last event, `failed`."""
    channel = Channel()
    try:
        TASKS[task](channel, channel.receive())
    except BrokenPipeError:
        # the reader has gone
        return
    except Exception as error:
        channel.send_failure(error)
