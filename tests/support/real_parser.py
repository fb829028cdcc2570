"""Upstream's own parser as a process: words in, verdicts out. Run under the trainer's packages.

usage: python real_parser.py BACKEND < requests.jsonl > answers.jsonl

One line in: {"stage": "sft", "words": ["--seed", "1"]}; one line out: null where the parser and
`__post_init__` take the words, else why not. The request "describe" is answered with a description
of every argument, by stage. Exit code 3, with the reason on stderr, where the packages are not
there.
"""

import argparse
import contextlib
import io
import json
import sys


def open_instruct_parsers():
    from open_instruct.dataset_transformation import TokenizerConfig
    from open_instruct.dpo_utils import DPOExperimentConfig
    from open_instruct.finetune import FlatArguments
    from open_instruct.utils import ArgumentParserPlus

    return {
        "sft": ArgumentParserPlus((FlatArguments, TokenizerConfig)),
        "dpo": ArgumentParserPlus((DPOExperimentConfig, TokenizerConfig)),
    }


def trl_parsers():
    from trl.scripts import dpo, sft

    return {"sft": sft.make_parser(), "dpo": dpo.make_parser()}


PARSERS = {"open_instruct": open_instruct_parsers, "trl": trl_parsers}


def describe(parser):
    """Name, how many words, choices, default and flags of every argument, in the parser's order."""
    described = {}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        known = described.setdefault(action.dest, {"flags": []})
        known["flags"] += action.option_strings
        if isinstance(action, argparse._StoreFalseAction):
            continue
        known["nargs"] = action.nargs
        known["choices"] = [plain(choice) for choice in action.choices or ()]
        known["default"] = plain(action.default)
        known["type"] = getattr(action.type, "__name__", str(action.type))
    return described


def plain(value):
    """An enum's value, a tuple as a list: what JSON can hold."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return getattr(value, "value", value)


PARSE = {"open_instruct": "parse_args_into_dataclasses", "trl": "parse_args_and_config"}


def refusal(parse, words):
    quiet = io.StringIO()
    try:
        with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(io.StringIO()):
            parse(words)
    except SystemExit as stop:
        lines = quiet.getvalue().strip().splitlines()
        return lines[-1] if lines else f"exit {stop.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main():
    answers = sys.stdout
    # what the packages print while they are imported goes elsewhere
    sys.stdout = sys.stderr
    try:
        parsers = PARSERS[sys.argv[1]]()
    except ImportError as error:
        print(f"cannot be imported: {error}", file=sys.stderr)
        return 3
    for line in sys.stdin:
        request = json.loads(line)
        if request == "describe":
            answer = {stage: describe(parser) for stage, parser in parsers.items()}
        else:
            parse = getattr(parsers[request["stage"]], PARSE[sys.argv[1]])
            answer = refusal(parse, request["words"])
        print(json.dumps(answer, default=str), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
