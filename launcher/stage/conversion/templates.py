"""A chat template that stands in a source -> a file beside the stage file."""

from __future__ import annotations

from launcher.artifacts import chat_template
from launcher.stage.conversion.ledger import ConversionLedger
from launcher.stage.conversion.settings import SourceSetting, is_off

BY_NAME = "TRL takes the template of the tokenizer; `chat_template_path` names another one"
"""Why the name of a template is left out."""
KEYS = ("chat_template", "chat_template_jinja", "custom_chat_template")


def settle(ledger: ConversionLedger) -> None:
    """Write the text of a template into a file; a name of a template has no counterpart in TRL."""
    for key in KEYS:
        setting = ledger.take(key)
        if setting is None:
            continue
        text = str(setting.value)
        if is_off(setting.value):
            ledger.leave(setting, "the tokenizer's template counts", matters=False)
        elif chat_template.is_template(text):
            _write_template(ledger, setting, text)
        else:
            _settle_name(ledger, setting, text)


def _write_template(ledger: ConversionLedger, setting: SourceSetting, text: str) -> None:
    path = ledger.draft.add_file("chat_template.jinja", text)
    if "chat_template_path" in ledger.schema.fields:
        ledger.carry(setting, "chat_template_path", path)
        return
    ledger.point(setting, path)
    advice = f"{path} holds it: copy it to chat_template.jinja in the model's folder"
    ledger.check(setting, advice)


def _settle_name(ledger: ConversionLedger, setting: SourceSetting, name: str) -> None:
    is_file = name.endswith((".jinja", ".jinja2", ".j2"))
    if name in ("tokenizer_default", "default"):
        ledger.leave(setting, "the tokenizer's template counts", matters=False)
    elif is_file and "chat_template_path" in ledger.schema.fields:
        ledger.carry(setting, "chat_template_path", name)
    else:
        ledger.leave(setting, BY_NAME)
