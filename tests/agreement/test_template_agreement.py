"""The chat templates that TRL replaces for training, as launch knows them and as TRL does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import NO_PACKAGES

from launcher.artifacts import chat_template
from launcher.pin import snapshot
from launcher.upstream.source.packages import find_package

# The tokenizer renders nothing: TRL takes it for one without tools and looks at the text alone.
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


@pytest.fixture
def trl() -> Path:
    """TRL's package; skips where it is not installed."""
    package = find_package("trl")
    if package is None:
        pytest.skip(NO_PACKAGES)
    return package


def test_a_template_marks_answers_where_trl_says_so(trl: Path) -> None:
    """Each template that TRL ships, as it is and with one more character."""
    templates = {}
    for path in sorted((trl / "chat_templates").glob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        templates[path.stem] = text
        templates[f"{path.stem}, changed"] = f"{text} "

    done = subprocess.run(
        [sys.executable, "-c", ASK_TRL], input=json.dumps(templates), capture_output=True, text=True
    )

    if done.returncode:
        pytest.skip(f"{NO_PACKAGES}: {done.stderr.strip().splitlines()[-1]}")
    by_trl = json.loads(done.stdout.splitlines()[-1])
    assert sum(by_trl.values()) > 60
    for name, text in templates.items():
        marks = chat_template.has_marker(text) or chat_template.is_replaced(text)
        assert marks == by_trl[name], name


def test_the_committed_table_of_templates_is_that_of_the_package(trl: Path) -> None:
    committed = json.loads((snapshot.FOLDER / "trl_templates.json").read_text(encoding="utf-8"))
    assert snapshot.list_templates(trl) == committed
