"""What each stage of a pipeline gets from the one before, and everything that is wrong with that.

All of it is asked before the first stage starts, when the models in between do not exist yet. So a stage
is judged twice: with the model that the whole chain begins from, whose shape every later one has, and
with the folder that it will really be given.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import chain as chains
from launcher import checkpoints, config, doctor, preparation, resume, rundir, runner
from launcher import plan as plans
from launcher import stage as stages
from launcher.backends import BACKENDS
from launcher.backends.entry import Names
from launcher.builder import Origin
from launcher.chain import Chain, Link
from launcher.config import Config
from launcher.errors import (
    Finding,
    InvalidConfig,
    Layer,
    NotReady,
    Severity,
    brief,
    errors,
    not_ready,
    usage,
)
from launcher.overrides import spelt
from launcher.paths import canonical
from launcher.plan import Plan
from launcher.preparation import Asked, Prepared, Request
from launcher.redaction import redact
from launcher.stage import Judged
from launcher.upstream import Locator

TOKENIZER = "tokenizer_name_or_path"
# of a stage that cannot be told: every script calls these two the same
_UNKNOWN = Names(data="", max_steps="", max_length="")
_ADAPTERS = ("use_lora", "use_qlora", "use_peft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What was asked of a pipeline: from which stage to which (None: from the start, to the end), on what."""

    chain: Chain
    first: str | None = None
    last: str | None = None
    gpus: int | None = None
    python: Path | None = None
    checkout: Path | None = None
    allow_unpinned: bool = False
    allow_unproven: bool = False
    strict: bool = False
    probe: bool = True
    devices: str | None = None
    fresh: bool = False
    allowed: tuple[str, ...] = ()
    runs: Path | None = None

    @property
    def links(self) -> tuple[Link, ...]:
        """The stages that are to run. Raises UsageError where a name is none."""
        return self.chain.between(self.first, self.last)

    def request(self, link: Link, more: Iterable[str] = ()) -> Request:
        """The command line of one stage, with further overrides."""
        return Request(
            stage=link.stage, config=link.config, overrides=(*link.texts(), *more),
            gpus=link.gpus if self.gpus is None else self.gpus, python=self.python,
            checkout=self.checkout, allow_unpinned=self.allow_unpinned, strict=self.strict,
            probe=self.probe, devices=self.devices, runs=self.runs,
        )  # fmt: skip

    def unheeded(self, first: str | None = None) -> list[tuple[Link, str]]:
        """Overrides of stages that do not run from `first` on, but for where one's model lies."""
        links = self.chain.between(first or self.first, self.last)
        needed = {one.source for one in links}
        return [
            (link, text)
            for link in self.chain.links
            if link not in links
            for text in link.overrides
            if link.name not in needed
            or text.partition("=")[0].removeprefix("args.") != _UNKNOWN.output
        ]

    def again(self, *more: str, first: str | None = None) -> str:
        """The command line that asks for the same once more, from `first` on, with further words.

        Tokens are taken out, and overrides that do nothing.
        """
        unheeded = self.unheeded(first)
        given = {
            "--from": first or self.first, "--until": self.last, "--gpus": self.gpus,
            "--devices": self.devices, "--python": self.python, "--open-instruct": self.checkout,
        }  # fmt: skip
        flags = {
            "--allow-unpinned": self.allow_unpinned, "--allow-unproven": self.allow_unproven,
            "--strict": self.strict, "--no-probe": not self.probe,
        }  # fmt: skip
        words = ["launch", "pipeline", str(self.chain.path)]
        words += [
            f"{one.name}.{text}"
            for one in self.chain.links
            for text in one.overrides
            if (one, text) not in unheeded
        ]
        words += [word for k, v in given.items() if v is not None for word in (k, str(v))]
        words += [name for name, value in flags.items() if value]
        words += [word for name in self.allowed for word in ("--allow-changed-resume", name)]
        told: str = redact(shlex.join([*words, *more]))
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One stage as it is known beforehand.

    `root` is the model that its chain begins from, `output` where its model goes, or lies already, and
    `asked` where its own file says; `prepared` is the dry run, with what the stage before hands over.
    """

    link: Link
    prepared: Prepared
    root: str | None
    names_tokenizer: bool

    @property
    def plan(self) -> Plan:
        """How it would run."""
        return self.prepared.plan

    @property
    def output(self) -> Path:
        """Where its model goes, absolute."""
        assert self.prepared.output is not None
        return self.prepared.output

    @property
    def model(self) -> Path:
        """The folder that a later stage begins from."""
        return plans.model_in(self.plan, self.output)

    @property
    def live(self) -> bool:
        """Whether it is being trained, or judged, right now."""
        folder = self.prepared.folder
        return runner.alive(folder.path) or runner.keeper_lives(folder)

    def handed(self, source: Path | str) -> list[str]:
        """The overrides that make `source` its model and its tokenizer."""
        return _handed(self.plan.stage.entry.names.model, self.names_tokenizer, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All stages that matter, by name, in order, and what is worth saying of those that are to run.

    `live` are those of the latter that are being trained already: whoever started them did not live to.
    """

    steps: Mapping[str, Step]
    links: tuple[Link, ...]
    findings: tuple[Finding, ...]
    live: tuple[Step, ...] = ()


def survey(order: Order, *, running: bool) -> Survey:
    """Judge every stage that is to run, and what they hand to each other; nothing is started.

    Raises InvalidConfig with everything that is wrong with any of them, NotReady with everything that
    this machine lacks for any of them, UsageError for stages or names that there are not.
    """
    surveyor = _Surveyor(order, running)
    links = order.links
    for link in order.chain.links[: order.chain.links.index(links[-1]) + 1]:
        surveyor.visit(link, within=link in links)
    live = tuple(step for step in surveyor.steps.values() if step.link in links and step.live)
    surveyor.ask_machine(live=bool(live))
    surveyor.names_known()
    surveyor.overrides_heeded()
    found = tuple(dict.fromkeys(surveyor.findings))
    if surveyor.refused or errors(found, strict=order.strict):
        raise InvalidConfig(found)
    if running and surveyor.lacking:
        raise NotReady(tuple(dict.fromkeys(surveyor.lacking)))
    return Survey(steps=surveyor.steps, links=links, findings=found, live=live)


def _handed(model: str, tokenizer: bool, source: Path | str) -> list[str]:
    names = [model, TOKENIZER] if tokenizer else [model]
    return [f"{name}={spelt(str(source))}" for name in names]


_UNMADE = frozenset({"incomplete-model", "incomplete-tokenizer"})


class _Surveyor:
    """Goes through the stages in order; collects what is wrong."""

    def __init__(self, order: Order, running: bool) -> None:
        self.order = order
        self.running = running
        self.steps: dict[str, Step] = {}
        self.findings: list[Finding] = []
        self.lacking: list[Finding] = []
        self.refused = False
        self.fields: set[str] = set()
        self.given_up: set[str] = set()
        self.roots: dict[str, str | None] = {}
        self.places: dict[str, Path] = {}
        self.starts: list[tuple[Link, Asked, Plan]] = []
        files = [canonical(link.config) for link in order.chain.links]
        self.twice = {file for file in files if files.count(file) > 1}
        # the stages before the first one that are needed for where their model lies
        self.needed = {one.source for one in order.links} - {one.name for one in order.links}

    def visit(self, link: Link, *, within: bool) -> None:
        """Judge one stage; one that is not to run only as far as it is needed."""
        matters = within or link.name in self.needed
        kept = list(self.findings), list(self.lacking), self.refused
        try:
            self._visit(link, within=within)
        except InvalidConfig as error:
            # of a model that nobody knows nothing can be said
            blind = link.source in self.given_up and self.roots.get(link.source or "") is None
            told = [one for one in error.findings if not (blind and one.code == "missing-model")]
            self._say(link, told)
            self.refused = True
        except NotReady as error:
            self.lacking += [self._named(link, one) for one in error.findings]
        if link.name not in self.steps:
            self.given_up.add(link.name)
        if not matters:
            self.findings, self.lacking, self.refused = kept

    def _visit(self, link: Link, *, within: bool) -> None:
        order, source = self.order, self.steps.get(link.source or "")
        loaded = config.load(link.config, link.texts())
        judged = _judged(loaded, order, link)
        names = _UNKNOWN if judged.schema is None else stages.entry_of(judged.schema).names
        tokenizer = judged.schema is not None and TOKENIZER in judged.schema.fields
        self._named_models(link, loaded, names.model)
        root, more, facts = _text(loaded.args.get(names.model)), list[str](), list[str]()
        if link.source is not None:
            root = self.roots.get(link.source)
            if source is not None and source.link not in order.links:
                root = str(source.model)
                if within and self.running:
                    _require(source, link, order)
            # where the stage before cannot be judged, this one still is, as far as it goes
            missing = root or f"the model of {link.source}"
            given = source.model if source is not None else self.places.get(link.source)
            more = _handed(names.model, tokenizer, given or missing)
            facts = _handed(names.model, tokenizer, missing)
        self.roots[link.name] = root
        named = loaded.args.get(names.output) is not None or judged.schema is None
        if not named:
            self._no_output(link, names.output)
        elif judged.values is not None:
            place = BACKENDS[stages.backend_of(loaded)].output_folder(judged.values)
            self.places[link.name] = Path() if place is None else place.absolute()
        fresh = order.fresh and within
        if within:
            self._examine(link, replace(order.request(link, facts), fresh=fresh))
        dry = preparation.prepare(replace(order.request(link, more), fresh=fresh), running=False)
        # what a run of the chain makes anew may lie there half made
        passing = _UNMADE if source is not None and source.link in order.links else frozenset()
        told = [f for f in dry.findings if f.severity != "note" and f.code not in passing]
        self._say(link, told if within else ())
        step = Step(link=link, prepared=dry, root=root, names_tokenizer=tokenizer)
        self.fields |= set(dry.plan.stage.schema.fields)
        if named and self._alone(step):
            if source is not None and within:
                self._between(source, step)
            self.steps[link.name] = step

    def _examine(self, link: Link, request: Request) -> None:
        """With the model that the chain begins from: by the rules, and for a run by this machine."""
        asked = preparation.ask(request, running=self.running)
        made = plans.make(asked.stage, gpus=asked.gpus, output=Path("model"))
        self._say(link, (*asked.stage.findings, *made.findings))
        if not self.running:
            return
        dry = preparation.prepare(request, running=False)
        told = rundir.read_manifest(dry.folder) if dry.attempt > 1 else None
        around = doctor.situation(made, asked.trainer, dry.output, told)
        # of a run of ours the start itself knows more; a model of nobody's is not written over
        known = resume.SUPERSEDED if told is not None else {"finished-output"}
        self._say(link, [finding for finding in around if finding.code not in known])
        self.starts.append((link, asked, made))

    def ask_machine(self, *, live: bool) -> None:
        """What this machine lacks for any stage; not of its GPUs while one is training on them."""
        for link, asked, made in self.starts:
            try:
                chosen = None if live else asked.chosen()
                self._say(link, doctor.require_ready(made, asked.trainer, chosen, elsewhere=live))
            except NotReady as error:
                self.lacking += [self._named(link, one) for one in error.findings]

    # -- findings

    def _named_models(self, link: Link, loaded: Config, model: str) -> None:
        """A stage that names another model, or tokenizer, than the stage before leaves."""
        step, asked = self.steps.get(link.source or ""), self.places.get(link.source or "")
        output = asked if step is None else step.model
        if output is None:
            return
        places = {canonical(place) for place in (output, asked) if place is not None}
        for key in (model, TOKENIZER):
            own = _text(loaded.args.get(key))
            origin = loaded.origin(f"args.{key}")
            if own is None or canonical(Path(own)) in places:
                continue
            if link.explicit and origin.override is None:
                continue
            message = (
                f"`{key}` is {brief(own)} here, and the pipeline hands over {output}, "
                f"the model of {link.source}"
            )
            help = f"delete the line, or say which with `from: {link.source}` or `from: none`"
            if link.explicit:
                help = f"delete it, or write `from: none` instead of `from: {link.source}`"
            wrong = Finding(
                severity="error", layer="launch", code="pipeline-model", key=f"args.{key}",
                message=message, help=help, **origin.place,
            )  # fmt: skip
            self._say(link, [wrong])

    def _no_output(self, link: Link, name: str) -> None:
        message = f"`{name}` is missing: where a stage's model goes must be known beforehand"
        help = f"give it an `{name}`, in its file or under `with:`"
        self._add(link, "error", "launch", "pipeline-output", message, help, "args")

    def _alone(self, step: Step) -> bool:
        """Whether no other stage's model goes to the same place."""
        name = step.plan.stage.entry.names.output
        asked = step.prepared.asked or step.output
        for other in self.steps.values():
            if canonical(other.prepared.asked or other.output) == canonical(asked):
                message = f"{step.link.name} and {other.link.name} both write into {asked}"
                help = f"give one of them another `{name}`"
                self._add(
                    step.link, "error", "launch", "pipeline-output", message, help, f"args.{name}"
                )  # fmt: skip
                return False
        return True

    def _between(self, source: Step, step: Step) -> None:
        """What of the one stage's output the other cannot use."""
        given, values, link = source.plan.values, step.plan.values, step.link
        for name in sorted(source.plan.stage.entry.partial):
            if given.get(name) is True:
                message = f"`{name}` ends {source.link.name} before there is a model to go on from"
                self._add(
                    source.link, "error", "launch", "pipeline-output", message,
                    f"write `{name}: false`", f"args.{name}",
                )  # fmt: skip
        adapter = next((name for name in _ADAPTERS if given.get(name)), None)
        if adapter is not None or _is_adapter(source, self.order):
            # finetune.py:540, dpo_tune_cache.py:279, trl/trainer/utils.py:1354 read the model's config
            message = (
                f"{source.link.name} saves an adapter, without the model that it belongs to: "
                f"{link.name} cannot load it"
            )
            help = "merge it into its model (`merge_and_unload` of peft), and begin from that"
            self._add(link, "error", "run", "pipeline-adapter", message, help, "from")
        own = step.plan.stage.options
        if own.backend == "open_instruct" and own.stage == "sft" and own.probe is None:
            message = (
                f"finetune.py:528 asks the hub for {source.model}: without the probe, which answers "
                "it, a local model cannot be trained"
            )
            help = "leave the probe on"
            self._add(link, "error", "run", "pipeline-probe", message, help, "probe")
        self._templates(source, step, given, values)

    def _templates(self, source: Step, step: Step, given: Any, values: Any) -> None:
        """One tokenizer for all of them: its chat template, and the token that it begins with."""
        name, was, now = "chat_template_name", None, values.get("chat_template_name")
        if name in given:
            was = given[name]
        if now is not None and now != was:
            before = f"`{was}`" if was else "the tokenizer's own template"
            self._add(
                step.link, "warning", "launch", "pipeline-template",
                f"`{name}: {now}`: {source.link.name} trains with {before}",
                f"one template for both: {f'write `{name}: {was}`' if was else 'delete the line'}",
                f"args.{name}",
            )  # fmt: skip
        elif now is None and given.get("add_bos") is True and values.get("add_bos") is True:
            # dataset_transformation.py:861
            self._add(
                step.link, "error", "run", "pipeline-template",
                f"`add_bos` crashes: {source.link.name} saves a chat template that begins with the "
                "token already", "write `add_bos: false`", "args.add_bos",
            )  # fmt: skip

    def names_known(self) -> None:
        """`--allow-changed-resume` must name something in at least one stage."""
        wrong = [n for n in self.order.allowed if n not in known_changes(self.fields)]
        if wrong and not self.given_up:
            message = f"--allow-changed-resume: nothing is called {', '.join(map(repr, wrong))}"
            raise usage("unknown-change", message)

    def overrides_heeded(self) -> None:
        """What is laid over a stage that is left out changes nothing."""
        for link, text in self.order.unheeded():
            self.findings.append(
                Finding(
                    severity="warning", layer="launch", code="override-left-out",
                    file=str(self.order.chain.path), override=f"{link.name}.{text}",
                    message=f"`{link.name}.{brief(text)}` does nothing: {link.name} is not among the "
                    "stages that are to run",
                    help=f"leave it out, or say --from and --until so that {link.name} runs",
                )
            )  # fmt: skip

    # -- saying

    def _add(
        self, link: Link, severity: Severity, layer: Layer, code: str, message: str, help: str,
        key: str,
    ) -> None:  # fmt: skip
        """A finding about how stages fit: in the stage's file where the key stands there."""
        origin = link.origin("from") if key == "from" else _origin(link, key)
        found = Finding(
            severity=severity, layer=layer, code=code, key=key, message=message, help=help,
            **origin.place,
        )  # fmt: skip
        self._say(link, [found])

    def _say(self, link: Link, found: Iterable[Finding]) -> None:
        self.findings += [self._named(link, one) for one in found]

    def _named(self, link: Link, finding: Finding) -> Finding:
        finding = chains.placed(link, finding)
        if canonical(link.config) not in self.twice or finding.message.startswith(f"{link.name}: "):
            return finding
        return replace(finding, message=f"{link.name}: {finding.message}")


def known_changes(fields: Iterable[str]) -> frozenset[str]:
    """What `--allow-changed-resume` may name for stages with these arguments."""
    from launcher import changes

    return frozenset((*changes.NAMES, *fields))


def _judged(loaded: Config, order: Order, link: Link) -> Judged:
    locator = Locator(checkout=order.checkout, allow_unpinned=order.allow_unpinned)
    return stages.judge(loaded, stage=link.stage, locator=locator)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _origin(link: Link, key: str) -> Origin:
    """The place of a key in the stage's file, or the override that sets it."""
    return config.load(link.config, link.texts()).origin(key)


def _is_adapter(source: Step, order: Order) -> bool:
    """Of a stage that is not run again, what lies there says it."""
    if source.link in order.links:
        return False
    names = {path.name for path in source.model.glob("*config.json")}
    return "adapter_config.json" in names and "config.json" not in names


def _require(source: Step, link: Link, order: Order) -> None:
    """With `--from`, the model of a stage that is left out must lie there. Raises NotReady."""
    wrong = checkpoints.model_fault(source.model)
    if source.live:
        wrong = "it is being trained"
    if wrong is None:
        return
    raise not_ready(
        "pipeline-needs",
        f"{link.name} begins from {source.model}, the model of {source.link.name}: {wrong}",
        order.again(first=source.link.name), file=str(source.model),
    )  # fmt: skip
