"""Work with a trained model under the trainer's Python: chat with it, merge it, compare its
answers.

`run.py` loads it as the package `launch_models`. `channel` has its messages, `loading` its models.
"""

from .channel import Channel
from .chat import chat
from .merging import merge
from .sampling import sample

TASKS = {"chat": chat, "merge": merge, "samples": sample}


def main(task: str) -> None:
    """Do one task. An error is its last event, `failed`."""
    channel = Channel()
    try:
        TASKS[task](channel, channel.receive())
    except BrokenPipeError:
        # the reader has gone
        return
    except Exception as error:
        channel.send_failure(error)
