"""`--vary key=a,b` and `--variant NAME:key=a,other=b` of the command line -> the settings to compare."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.errors import brief, usage
from launcher.planning.request import Request

AS_WRITTEN = "as written"
MOST = 64

_KEY = re.compile(r"[A-Za-z_][\w.\[\]-]*\Z")
_NAME = re.compile(r"[\w.+-]+\Z")


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the settings that are compared: the stage file with these overrides on top."""

    name: str
    overrides: tuple[str, ...] = ()

    @property
    def keys(self) -> set[str]:
        return set(map(bare, self.overrides))

    def of(self, request: Request) -> Request:
        return replace(request, overrides=(*request.overrides, *self.overrides))


def pieces(option: str, text: str) -> list[str]:
    """The parts between commas; what stands in brackets, or in quotes where a value begins, is one part.

    Raises UsageError, which names the `option`, for a bracket or quote that stays open.
    """
    found, depth, quote, begins = [""], 0, "", True
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and begins:
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}" and depth:
            depth -= 1
        elif letter == "," and not depth:
            found.append("")
            begins = True
            continue
        begins = letter in "=,[{: " or (begins and letter == " ")
        found[-1] += letter
    if quote or depth:
        raise usage("bad-vary", f"{brief(option)}: a {'quote' if quote else 'bracket'} stays open")
    return [piece.strip() for piece in found]


def combinations(vary: Sequence[str], variants: Sequence[str]) -> list[Variant]:
    """Every combination: the `--variant`s are one axis, each `--vary` is another; the last turns first.

    One alone is put beside the file as it is written; with none, that is all there is. Raises UsageError.
    """
    axes = [_variants(variants)] if variants else []
    axes += [_vary(text) for text in vary]
    # of a key in several axes the later one would win unseen
    for one, other in itertools.combinations(axes, 2):
        for key in set().union(*(a.keys for a in one)) & set().union(*(a.keys for a in other)):
            raise usage("bad-vary", f"`{key}` is varied twice")
    if (count := math.prod(map(len, axes))) > MOST:
        raise usage("bad-vary", f"that is {count} variants", "vary less at once: each of them is run several times")
    found = [
        Variant(", ".join(part.name for part in parts), tuple(text for part in parts for text in part.overrides))
        for parts in itertools.product(*axes)
        if parts
    ]
    if not found or (len(found) == 1 and found[0].overrides):
        found = [Variant(AS_WRITTEN), *found]
    return found


def bare(text: str) -> str:
    """The key of an override without the levels that may be left out, so that spellings compare."""
    return text.partition("=")[0].removeprefix("open_instruct.").removeprefix("args.")


def _vary(text: str) -> list[Variant]:
    key, equals, rest = text.partition("=")
    if not equals or not _KEY.match(key):
        raise usage("bad-vary", f"--vary {brief(text)}: not of the form key=a,b", "--vary packing=false,true")
    values = pieces(f"--vary {text}", rest)
    if "" in values:
        raise usage("bad-vary", f"--vary {brief(text)}: a value is empty", "an empty text is ''")
    for value in values:
        if values.count(value) > 1:
            help = "to measure the noise, take two --variant"
            raise usage("bad-vary", f"--vary {brief(text)}: `{value}` is given twice", help)
    names = [brief(f"{key.removeprefix('args.')}={value}", 60) for value in values]
    apart = [f"{name} ({nth})" if names.count(name) > 1 else name for nth, name in enumerate(names)]
    return [Variant(name, (f"{key}={value}",)) for name, value in zip(apart, values, strict=True)]


def _variants(texts: Sequence[str]) -> list[Variant]:
    found = dict[str, Variant]()
    for text in texts:
        name, _, rest = text.partition(":")
        if not _NAME.match(name):
            raise usage(
                "bad-variant",
                f"--variant {brief(text)}: it needs a name, then a colon",
                "--variant packed:packing=true,batch.per_device=2; NAME: alone is the file as it is",
            )
        if name in found:
            raise usage("bad-variant", f"two variants are called `{name}`")
        settings = pieces(f"--variant {text}", rest) if rest else []
        for setting in settings:
            if "=" not in setting or not _KEY.match(setting.partition("=")[0]):
                help = "key=value,key=value; put a value with a comma in brackets or quotes"
                raise usage("bad-variant", f"--variant {brief(text)}: `{brief(setting)}`", help)
        found[name] = Variant(name, tuple(settings))
    return list(found.values())
