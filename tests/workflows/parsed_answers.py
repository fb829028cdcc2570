"""What commands answer as JSON, with attributes for keys."""

import json
from types import SimpleNamespace
from typing import Any


def parse_answer(output: str) -> Any:
    return json.loads(output, object_hook=lambda content: SimpleNamespace(**content))
