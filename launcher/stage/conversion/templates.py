"""A chat template that stands in a source -> a file beside the stage file."""

from __future__ import annotations

from launcher.artifacts import chat_template
from launcher.stage.conversion.ledger import ConversionLedger
from launcher.stage.conversion.settings import is_off

_BY_NAME = "TRL takes the template of the tokenizer; `chat_template_path` names another one"
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
        elif not chat_template.is_template(text):
            _settle_named(ledger, key)
        elif "chat_template_path" in ledger.schema.fields:
            ledger.carry(
                setting, "chat_template_path", ledger.draft.add_file("chat_template.jinja", text)
            )
        else:
            path = ledger.draft.add_file("chat_template.jinja", text)
            ledger.point(setting, path)
            ledger.check(
                setting, f"{path} holds it: copy it to chat_template.jinja in the model's folder"
            )


def _settle_named(ledger: ConversionLedger, key: str) -> None:
    setting = ledger.take(key)
    if setting is None:
        return
    if str(setting.value) in ("tokenizer_default", "default"):
        ledger.leave(setting, "the tokenizer's template counts", matters=False)
    elif (
        str(setting.value).endswith((".jinja", ".jinja2", ".j2"))
        and "chat_template_path" in ledger.schema.fields
    ):
        ledger.carry(setting, "chat_template_path", str(setting.value))
    else:
        ledger.leave(setting, _BY_NAME)
