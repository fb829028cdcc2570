"""TRL's own parser with a config file, as a process: what it makes of words and a file's text.

usage: python real_trl_config.py < requests.jsonl > answers.jsonl

One line in: {"stage": "sft", "words": ["--seed", "1"], "file": "datasets: ..."}; one line out:
{"refusal": null or why not, "values": what the arguments in question came to}. Exit code 3, with
the reason on stderr, where the packages are not there.
"""

import dataclasses
import json
import sys
import tempfile

from real_parser import refusal, trl_parsers


def values(parts):
    mixture = parts[3]
    datasets = []
    for entry in mixture.datasets:
        if not isinstance(entry, str):
            entry = dataclasses.asdict(entry)
        datasets.append(entry)
    return {
        "datasets": datasets,
        "streaming": mixture.streaming,
        "test_split_size": mixture.test_split_size,
        "report_to": parts[1].report_to,
    }


def answer(request):
    # a config file changes the defaults of its parser for good
    parser = trl_parsers()[request["stage"]]
    words = ["--use_cpu", "True", "--bf16", "False", *request["words"]]
    parsed = {}

    def parse(argv):
        parts = parser.parse_args_and_config(argv, fail_with_unknown_args=False)
        parsed.update(values(parts))

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(request["file"])
        file.flush()
        if request["file"]:
            words = ["--config", file.name, *words]
        refused = refusal(parse, words)
    return {"refusal": refused, "values": parsed}


def main():
    answers = sys.stdout
    # what the packages print while they are imported goes elsewhere
    sys.stdout = sys.stderr
    try:
        trl_parsers()
    except ImportError as error:
        print(f"cannot be imported: {error}", file=sys.stderr)
        return 3
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
