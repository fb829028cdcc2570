"""TRL's own scripts' parsers with every `__post_init__`, as a process: words in, verdicts out.

usage: python real_trl_parser.py < requests.jsonl > answers.jsonl

One line in: {"stage": "sft", "words": ["--seed", "1"]}; one line out: null where the parser and the
dataclasses take the words, else why not. Exit code 3, with the reason on stderr, where the packages
are not there. Run it without GPUs, in an empty folder and without variables of accelerate's.
"""

import contextlib
import json
import os
import sys

from real_parser import refusal, trl_parsers


def with_the_hardware():
    """Answer for a machine that has bfloat16 and TF32: then only the arguments decide."""
    from transformers import training_args

    training_args.is_torch_bf16_gpu_available = lambda: True
    training_args.is_torch_tf32_available = lambda: True
    training_args.enable_tf32 = lambda enabled: None


@contextlib.contextmanager
def a_process_of_its_own():
    """What one parse leaves behind, in the environment and in accelerate, the next does not see."""
    from accelerate.state import AcceleratorState

    before = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main():
    answers = sys.stdout
    # what the packages print while they are imported goes elsewhere
    sys.stdout = sys.stderr
    try:
        parsers = trl_parsers()
        with_the_hardware()
        # the first parse imports more
        refusal(parsers["sft"].parse_args_and_config, ["--use_cpu", "True"])
    except ImportError as error:
        print(f"cannot be imported: {error}", file=sys.stderr)
        return 3
    for line in sys.stdin:
        request = json.loads(line)
        with a_process_of_its_own():
            answer = refusal(parsers[request["stage"]].parse_args_and_config, request["words"])
        print(json.dumps(answer), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
