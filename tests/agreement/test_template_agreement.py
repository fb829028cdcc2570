"""The chat templates that TRL replaces for training, as launch knows them, against TRL's own function."""

import json
import subprocess
import sys

import pytest
from conftest import NO_PACKAGES

from launcher.artifacts import chat_template
from launcher.pin import snapshot
from launcher.upstream.source.packages import find_package

# A tokenizer that renders nothing, so that TRL takes it for one without tools and looks at the text alone.
ASK_TRL = """
import json, sys
from jinja2.exceptions import TemplateError
from trl.chat_template_utils import get_training_chat_template

class Tokenizer:
    def __init__(self, template):
        self.chat_template = template

    def apply_chat_template(self, *_, **__):
        raise TemplateError("renders nothing")

answers = {}
for name, template in json.load(sys.stdin).items():
    try:
        get_training_chat_template(Tokenizer(template))
        answers[name] = True
    except ValueError:
        answers[name] = False
print(json.dumps(answers))
"""


def test_a_template_marks_answers_where_trl_says_so() -> None:
    """Each template that TRL ships, as it is and with one more character."""
    package = find_package("trl")
    if package is None:
        pytest.skip(NO_PACKAGES)
    templates = {}
    for path in sorted((package / "chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
        templates[f"{path.stem}, changed"] = templates[path.stem] + " "
    asked = subprocess.run(
        [sys.executable, "-c", ASK_TRL], input=json.dumps(templates), capture_output=True, text=True
    )
    if asked.returncode:
        pytest.skip(f"{NO_PACKAGES}: {asked.stderr.strip().splitlines()[-1]}")
    trl = json.loads(asked.stdout.splitlines()[-1])
    assert sum(trl.values()) > 60
    marked = {
        name: chat_template.has_marker(text) or chat_template.is_replaced(text)
        for name, text in templates.items()
    }
    assert marked == trl


def test_the_table_of_templates_is_that_of_the_package() -> None:
    package = find_package("trl")
    if package is None:
        pytest.skip(NO_PACKAGES)
    committed = json.loads((snapshot.FOLDER / "trl_templates.json").read_text(encoding="utf-8"))
    assert snapshot.templates_of(package) == committed
