"""`--vary key=a,b` and `--variant NAME:key=a,other=b` of the command line -> the settings to compare."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.errors import UsageError, brief, usage

AS_WRITTEN = "as written"
CHECKOUT = "open_instruct"
"""The key whose values are checkouts, or commits of the one that would be used."""
MOST = 64

_KEY = re.compile(r"[A-Za-z_][\w.\[\]-]*\Z")
_NAME = re.compile(r"[\w.+-]+\Z")
_OPEN, _CLOSED = "[{", "]}"


@dataclass(frozen=True, slots=True)
class Asked:
    """One combination as it was asked for: its name and its overrides, checkouts among them."""

    name: str
    overrides: tuple[str, ...] = ()

    def split(self) -> tuple[tuple[str, ...], str | None]:
        """The overrides of the stage file, and the checkout or commit that was named, if one was."""
        mark = f"{CHECKOUT}="
        named = [text.removeprefix(mark) for text in self.overrides if text.startswith(mark)]
        rest = tuple(text for text in self.overrides if not text.startswith(mark))
        return rest, named[-1] if named else None


def pieces(text: str) -> list[str]:
    """The parts between commas; what stands in brackets or quotes is one part.

    A quote counts where a value begins. Raises ValueError for a bracket or quote that stays open.
    """
    found, depth, quote, begun = [""], 0, "", True
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and begun:
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSED and depth:
            depth -= 1
        elif letter == "," and not depth:
            found.append("")
            begun = True
            continue
        begun = letter in "=,[{: " or (begun and letter == " ")
        found[-1] += letter
    if quote or depth:
        raise ValueError("a quote stays open" if quote else "a bracket stays open")
    return found


def combinations(vary: Sequence[str], variants: Sequence[str]) -> list[Asked]:
    """Every combination: the `--variant`s are one axis, each `--vary` is another; the last turns first.

    One combination alone is put beside the file as it is written; with none at all, that is all there
    is. Raises UsageError with everything that is wrong.
    """
    axes: list[list[Asked]] = []
    faults: list[UsageError] = []
    reads: list[Callable[[], list[Asked]]] = []
    reads += [functools.partial(_variants, variants)] if variants else []
    reads += [functools.partial(_vary, text) for text in vary]
    for read in reads:
        try:
            axes.append(read())
        except UsageError as error:
            faults.append(error)
    faults += _twice(axes)
    if faults:
        raise UsageError([finding for fault in faults for finding in fault.findings])
    if (count := math.prod(map(len, axes))) > MOST:
        help = "vary less at once: each of them is run several times"
        raise usage("bad-vary", f"that is {count} variants", help)
    found = [_joined(parts) for parts in itertools.product(*axes)] if axes else []
    if not found or (len(found) == 1 and found[0].overrides):
        found = [Asked(AS_WRITTEN), *found]
    return found


def _joined(parts: Sequence[Asked]) -> Asked:
    overrides = tuple(text for part in parts for text in part.overrides)
    return Asked(", ".join(part.name for part in parts), overrides)


def _vary(text: str) -> list[Asked]:
    key, equals, rest = text.partition("=")
    if not equals or not _KEY.match(key):
        raise usage(
            "bad-vary",
            f"--vary {brief(text)}: not of the form key=a,b",
            "--vary packing=false,true",
        )
    values = _pieces(f"--vary {text}", rest)
    names = [brief(f"{key.removeprefix('args.')}={value}", 60) for value in values]
    again = [value for nth, value in enumerate(values) if value in values[:nth]]
    if again or "" in values:
        what = f"`{again[0]}` stands twice" if again else "a value is empty"
        help = "an empty text is ''" if not again else "to measure the noise, take two --variant"
        raise usage("bad-vary", f"--vary {brief(text)}: {what}", help)
    apart = [f"{name} ({nth})" if names.count(name) > 1 else name for nth, name in enumerate(names)]
    return [Asked(n, (f"{key}={v}",)) for n, v in zip(apart, values, strict=True)]


def _variants(texts: Sequence[str]) -> list[Asked]:
    found: list[Asked] = []
    for text in texts:
        name, _, rest = text.partition(":")
        if not _NAME.match(name):
            raise usage(
                "bad-variant", f"--variant {brief(text)}: it needs a name, then a colon",
                "--variant packed:packing=true,batch.per_device=2; NAME: alone is the file as it is",
            )  # fmt: skip
        if any(name == one.name for one in found):
            raise usage("bad-variant", f"two variants are called `{name}`")
        settings = tuple(_pieces(f"--variant {text}", rest)) if rest else ()
        odd = [one for one in settings if not _KEY.match(one.partition("=")[0]) or "=" not in one]
        if odd:
            help = "key=value,key=value; a value with a comma in it stands in brackets or quotes"
            raise usage("bad-variant", f"--variant {brief(text)}: `{brief(odd[0])}`", help)
        found.append(Asked(name, settings))
    return found


def _pieces(said: str, text: str) -> list[str]:
    try:
        return [piece.strip() for piece in pieces(text)]
    except ValueError as error:
        raise usage("bad-vary", f"{brief(said)}: {error}") from None


def bare(text: str) -> str:
    """The key of an override without the levels that may be left out, so that spellings compare."""
    return text.partition("=")[0].removeprefix("open_instruct.").removeprefix("args.")


def _twice(axes: Sequence[Sequence[Asked]]) -> list[UsageError]:
    """Keys that stand in several axes: the later one would win unseen."""
    keys = [{bare(text) for one in axis for text in one.overrides} for axis in axes]
    twice = {
        key for nth, axis in enumerate(keys) for key in axis if any(key in k for k in keys[:nth])
    }
    return [usage("bad-vary", f"`{key}` is varied twice") for key in sorted(twice)]
