"""`--vary KEY=A,B` and `--variant NAME:KEY=A,KEY=B` -> the settings to compare."""

import itertools
import math
import re
from collections.abc import Sequence

from launcher.errors import shorten, usage
from launcher.lazy_dataclass import dataclass

AS_WRITTEN = "as written"
MOST = 64

_KEY = re.compile(r"[A-Za-z_][\w.\[\]-]*\Z")
_NAME = re.compile(r"[\w.+-]+\Z")
_BEFORE_A_VALUE = "=,[{: "


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the settings to compare: the stage file with these overrides on top."""

    name: str
    overrides: tuple[str, ...] = ()

    @property
    def keys(self) -> set[str]:
        return {_strip_key(override) for override in self.overrides}


def _strip_key(override: str) -> str:
    """The key of an override without the levels that may be left out, so that spellings compare."""
    return override.partition("=")[0].removeprefix("open_instruct.").removeprefix("args.")


def combine_variants(vary: Sequence[str], variants: Sequence[str]) -> list[Variant]:
    """Every combination: all `--variant` are one axis, each `--vary` is one; the last turns first.

    A single one is put beside the file as it is written; without any, there is only that file.
    Raises UsageError.
    """
    axes = [_parse_vary(text) for text in vary]
    if variants:
        axes.insert(0, _parse_variants(variants))
    _refuse_common_keys(axes)
    count = math.prod(map(len, axes))
    if count > MOST:
        help = "vary less at once: each of them is run several times"
        raise usage("bad-vary", f"that is {count} variants", help)
    if not axes:
        return [Variant(AS_WRITTEN)]
    combined = []
    for parts in itertools.product(*axes):
        name = ", ".join(part.name for part in parts)
        overrides = [override for part in parts for override in part.overrides]
        combined.append(Variant(name, tuple(overrides)))
    if count == 1 and combined[0].overrides:
        combined.insert(0, Variant(AS_WRITTEN))
    return combined


def _refuse_common_keys(axes: Sequence[Sequence[Variant]]) -> None:
    """Raise UsageError for a key in two axes: one value would silently replace the other."""
    varied: set[str] = set()
    for axis in axes:
        keys = set().union(*(variant.keys for variant in axis))
        for key in keys & varied:
            raise usage("bad-vary", f"`{key}` is varied twice")
        varied |= keys


def _parse_vary(text: str) -> list[Variant]:
    key, equals, rest = text.partition("=")
    option = f"--vary {text}"
    if not equals or not _KEY.match(key):
        message = f"{shorten(option)}: not of the form key=a,b"
        raise usage("bad-vary", message, "--vary packing=false,true")
    values = _split_values(option, rest)
    if "" in values:
        raise usage("bad-vary", f"{shorten(option)}: a value is empty", "an empty text is ''")
    for value in values:
        if values.count(value) > 1:
            help = "to measure the noise, take two --variant"
            raise usage("bad-vary", f"{shorten(option)}: `{value}` is given twice", help)
    names = [shorten(f"{key.removeprefix('args.')}={value}", 60) for value in values]
    axis = []
    for number, name in enumerate(names):
        if names.count(name) > 1:
            # long values may be cut to the same name
            name = f"{name} ({number})"
        axis.append(Variant(name, (f"{key}={values[number]}",)))
    return axis


def _parse_variants(texts: Sequence[str]) -> list[Variant]:
    named: dict[str, Variant] = {}
    for text in texts:
        option = f"--variant {text}"
        name, _, rest = text.partition(":")
        if not _NAME.match(name):
            raise usage(
                "bad-variant",
                f"{shorten(option)}: it needs a name, then a colon",
                "--variant packed:packing=true,batch.per_device=2; "
                "NAME: alone is the file as it is",
            )
        if name in named:
            raise usage("bad-variant", f"two variants are called `{name}`")
        overrides = _split_values(option, rest) if rest else []
        for override in overrides:
            key, equals, _ = override.partition("=")
            if not equals or not _KEY.match(key):
                help = "key=value,key=value; put a value with a comma in brackets or quotes"
                raise usage("bad-variant", f"{shorten(option)}: `{shorten(override)}`", help)
        named[name] = Variant(name, tuple(overrides))
    return list(named.values())


def _split_values(option: str, text: str) -> list[str]:
    """The parts between commas outside brackets and quotes; a quote starts where a value begins.

    Raises UsageError for a bracket or quote that stays open.
    """
    parts = [""]
    depth = 0
    quote = ""
    previous = ","
    for letter in text:
        is_end = letter == "," and not depth and not quote
        if quote:
            if letter == quote:
                quote = ""
        elif letter in "\"'" and previous in _BEFORE_A_VALUE:
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}" and depth:
            depth -= 1
        if is_end:
            parts.append("")
        else:
            parts[-1] += letter
        previous = letter
    if quote or depth:
        kind = "quote" if quote else "bracket"
        raise usage("bad-vary", f"{shorten(option)}: a {kind} stays open")
    return [part.strip() for part in parts]
