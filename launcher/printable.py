"""Text that others wrote, made fit for a terminal and for the log of a CI job.

A value of a stage file, a line of a log, the name of a file may hold escape sequences that
recolour, retitle or overwrite a terminal, and lines that GitHub takes for workflow commands
(`::error::`).
"""

import re

# a sequence as a whole: of one that is cut off, its first character
_ESCAPES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\r\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
_BEGINS_ESCAPE = re.compile("[\x1b\x90\x98\x9b\x9d-\x9f]")  # far faster to look for
_CONTROLS = (
    "\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069"
)
# beside the control characters: those that reorder what is read, and bytes of 80 to 9f that are no
# UTF-8
_CONTROL = re.compile(f"[{_CONTROLS}\\udc80-\\udc9f]")
_COMMAND = re.compile(r"^(\s*)::|##\[", re.M)
_UNESCAPED = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def make_printable(text: str, *, commands: bool = False) -> str:
    """Text without control characters; a backslash stands before GitHub's `commands`."""
    if not text.isprintable():
        if _BEGINS_ESCAPE.search(text):
            text = _ESCAPES.sub("", text)
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        text = _CONTROL.sub("", text)
    may_hold_command = "::" in text or "##[" in text
    if commands or not may_hold_command:
        return text
    return _COMMAND.sub(_disarm_command, text)


def _disarm_command(match: re.Match[str]) -> str:
    indentation = match[1]
    if indentation is None:
        return "# #["
    return f"{indentation}\\::"


def indent_lines(text: str) -> str:
    """The text, printable, with its further lines indented: none looks like one of launch's."""
    return make_printable(text).replace("\n", "\n    ")


def make_printable_bytes(raw: bytes) -> bytes:
    """The same for what need not be UTF-8."""
    return make_printable(raw.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def escape_controls(json_text: str) -> str:
    """JSON with those control characters escaped that its own rules let stand."""
    return _UNESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", json_text)
