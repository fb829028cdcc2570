"""What each stage of a pipeline gets from the one before, and everything that is wrong with that.

All of it is asked before the first stage starts, when the models in between do not exist yet. So a stage
is judged twice: with the model that the whole chain begins from, whose shape every later one has, and
with the folder that it will really be given.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import redaction
from launcher.artifacts import checkpoints
from launcher.config import pipeline
from launcher.config.load import Config, spelt
from launcher.config.pipeline import Chain, Link
from launcher.errors import Finding, InvalidConfig, NotReady, brief, errors, launch_finding, not_ready, usage
from launcher.paths import canonical
from launcher.plan import plan
from launcher.plan.plan import Plan
from launcher.planning import check, collect, prepare
from launcher.planning.collect import Facts, Scope, StageFile
from launcher.planning.doctor import checks
from launcher.planning.prepare import Prepared
from launcher.planning.request import Request
from launcher.planning.resume import changes
from launcher.redaction import Redactor
from launcher.runs import runner
from launcher.stage import stage
from launcher.upstream.citations import rendered
from launcher.upstream.schema import Values
from launcher.upstream.trainers import BACKENDS
from launcher.workflows.pipeline import evaluation
from launcher.workflows.pipeline.evaluation import PlannedEvaluation

# every script calls the first two so; TRL's have no third
MODEL, OUTPUT, TOKENIZER = "model_name_or_path", "output_dir", "tokenizer_name_or_path"
_ADAPTERS = ("use_lora", "use_qlora", "use_peft")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """What was asked of a pipeline: from which stage to which (None: from the start, to the end).

    `common` is what its command line says for every stage.
    """

    chain: Chain
    common: Request
    first: str | None = None
    last: str | None = None
    allow_unproven: bool = False

    @property
    def links(self) -> tuple[Link, ...]:
        """The stages that are to run. Raises UsageError where a name is none."""
        return self.chain.between(self.first, self.last)

    def request(self, link: Link) -> Request:
        """The command line of one stage."""
        gpus = link.gpus if self.common.gpus is None else self.common.gpus
        own: dict[str, Any] = {"stage": link.stage, "config": link.config, "overrides": link.texts()}
        return replace(self.common, gpus=gpus, fresh=False, allowed=(), borrowed=self.chain.borrowed, **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage as it is known beforehand.

    `file` is its own, `root` the model that its chain begins from, with which it was `resolved` and `judged` where
    it is to run; `prepared` is the dry run, with what the stage before hands over.
    """

    link: Link
    file: StageFile
    resolved: Facts
    prepared: Prepared
    root: str | None
    judged: Plan | None = None

    @property
    def plan(self) -> Plan:
        return self.prepared.plan

    @property
    def output(self) -> Path:
        assert self.prepared.output is not None
        return self.prepared.output

    @property
    def model(self) -> Path:
        """The folder that a later stage begins from."""
        return plan.model_in(self.plan, self.output)

    def as_json(self) -> dict[str, object]:
        """For the answer of a dry run."""
        evaluated = {} if self.evaluation is None else {"eval": self.evaluation.as_json()}
        return {"name": self.link.name, **self.prepared.as_json(), **evaluated}

    @property
    def evaluation(self) -> PlannedEvaluation | None:
        return evaluation.planned(self.link, self.prepared, self.model)

    @property
    def live(self) -> bool:
        """Whether it is being trained, or judged, right now."""
        folder = self.prepared.folder
        return runner.is_alive(folder.path) or runner.has_live_supervisor(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """All stages that matter, by name, in order, and what is worth saying of those that are to run.

    `live` are those of the latter that are being trained already: whoever started them did not live to.
    """

    steps: Mapping[str, PlannedStage]
    links: tuple[Link, ...]
    findings: tuple[Finding, ...]
    live: tuple[PlannedStage, ...] = ()

    @property
    def redactor(self) -> Redactor:
        """What must not be shown of any stage."""
        return redaction.together(step.prepared.redactor for step in self.steps.values())

    def resolved(self) -> dict[str, Facts]:
        """Each stage that is to run, with the model that its chain begins from."""
        steps = {link.name: self.steps[link.name] for link in self.links}
        return {name: step.resolved for name, step in steps.items() if step.root is not None}


def plan_stages(order: PipelineRequest, scope: Scope) -> PipelinePlan:
    """Judge every stage that is to run, and what they hand to each other; nothing is started.

    Raises InvalidConfig with everything that is wrong with any of them, NotReady with everything that
    this machine lacks for any of them, UsageError for stages or names that there are not.
    """
    planner = _Planner(order, scope)
    links = order.links
    # those before the first one are needed for where their model lies
    needed = {*(one.name for one in links), *(one.source for one in links)}
    for link in order.chain.links:
        if link.name in needed:
            planner.visit(link)
    live = tuple(step for step in planner.steps.values() if step.link in links and step.live)
    planner.ask_machine(live=bool(live))
    known = known_changes(name for step in planner.steps.values() for name in step.plan.stage.schema.fields)
    wrong = [name for name in order.common.allowed if name not in known]
    if wrong and not planner.refused:
        raise usage(
            "unknown-change", f"--allow-changed-resume: no argument or group is named {', '.join(map(repr, wrong))}"
        )
    found = tuple(dict.fromkeys(planner.findings))
    if planner.refused or errors(found, strict=order.common.strict):
        raise InvalidConfig(found)
    if planner.lacking:
        raise NotReady(tuple(dict.fromkeys(planner.lacking)))
    return PipelinePlan(steps=planner.steps, links=links, findings=found, live=live)


def known_changes(fields: Iterable[str]) -> frozenset[str]:
    return frozenset((*changes.NAMES, *fields))


def handed(backend: str, source: Path | str) -> list[str]:
    """The overrides that make `source` the model and the tokenizer of a stage."""
    return [f"{name}={spelt(str(source))}" for name in BACKENDS[backend].MODEL_ARGUMENTS]


def _with_model(resolved: Facts, model: Path) -> Facts:
    """The stage with a model that need not exist yet, of which nothing is asked."""
    stage = resolved.stage
    handed = dict.fromkeys(BACKENDS[stage.options.backend].MODEL_ARGUMENTS, str(model))
    args = {**stage.args, **handed}
    return replace(resolved, stage=replace(stage, args=args, values=Values(stage.schema, args)))


def _require_model(link: Link, source: PlannedStage) -> None:
    """Raise NotReady where a stage that is not to run has not left the model that the next one begins from."""
    fault = "it is being trained" if source.live else checkpoints.model_fault(source.model)
    if fault is not None:
        message = f"{link.name} begins from {source.model}, the model of {source.link.name}: {fault}"
        help = f"`--from {source.link.name}` trains it first"
        raise not_ready("pipeline-needs", message, help, file=str(source.model))


def _dry_run(facts: Facts, resolved: Facts) -> Prepared:
    """The dry run of a stage. Raises InvalidConfig, where it can with what this machine lacks besides."""
    try:
        return prepare.complete(facts.of_any_machine())
    except InvalidConfig:
        if resolved.machine is not None:
            check.require(resolved)
        raise


def _judge_like(resolved: Facts, dry: Prepared) -> Plan:
    """The plan of a stage with the model that its chain begins from, into the folder of its dry run."""
    target = dry.start.target
    return check.settle(resolved, decided=target.output.derived, attempts=target.attempts_so_far)


class _Planner:
    """Goes through the stages in order; collects what is wrong."""

    def __init__(self, order: PipelineRequest, scope: Scope) -> None:
        self.order = order
        self.scope = scope
        self.refused = False
        self.steps: dict[str, PlannedStage] = {}
        self.findings: list[Finding] = []
        self.lacking: list[Finding] = []
        self.roots: dict[str, str | None] = {}
        self.starts: list[tuple[Link, Facts, Plan]] = []
        self.configs: dict[str, Config] = {}
        files = [canonical(link.config) for link in order.chain.links]
        self.twice = {file for file in files if files.count(file) > 1}

    def visit(self, link: Link) -> None:
        """Judge one stage; one that is not to run only as far as it is needed."""
        try:
            self._visit(link, within=link in self.order.links)
        except InvalidConfig as error:
            self._say(link, error.findings)
            self.refused = True
        except NotReady as error:
            self.lacking += [self._named(link, one) for one in error.findings]

    def _visit(self, link: Link, *, within: bool) -> None:
        order, source = self.order, self.steps.get(link.source or "")
        file = collect.open(order.request(link))
        loaded = self.configs[link.name] = file.config
        root, more = _text(loaded.args.get(MODEL)), list[str]()
        if link.source is not None:
            root = self.roots.get(link.source)
            if source is not None:
                self._check_models(link, loaded, source)
                if within and source.link not in order.links:
                    root = str(source.model)
            if within and root is None and source is None:
                # of a model that nobody knows nothing can be said
                return
            model = root or f"the model of {link.source}"
            if source is not None and not within:
                model = str(source.model)
            more = handed(stage.backend_of(loaded), model)
        self.roots[link.name] = root
        named = loaded.args.get(OUTPUT) is not None
        if not named:
            message = f"`{OUTPUT}` is missing: where a stage's model goes must be known beforehand"
            help = f"give it an `{OUTPUT}`, in its file or under `with:`"
            self._add(link, "pipeline-output", message, help, "args")
        chained = file.with_overrides(*more, fresh=order.common.fresh and within)
        # a stage that is not to run needs nothing of this machine
        scope = self.scope if within else Scope.PLAN
        resolved = collect.of_read(chained, chained.read(), scope)
        if resolved.machine is not None and source is not None and source.link not in order.links:
            _require_model(link, source)
        facts = resolved if source is None else _with_model(resolved, source.model)
        dry = _dry_run(facts, resolved)
        judged: Plan | None = None
        if within:
            if facts is not resolved or resolved.machine is not None:
                judged = _judge_like(resolved, dry)
            self._examine(link, resolved, dry, judged or dry.plan)
        step = PlannedStage(link=link, file=file, resolved=resolved, prepared=dry, root=root, judged=judged)
        if named and self._has_own_output(step):
            if source is not None and within:
                self._check_between(source, step)
            self.steps[link.name] = step
            if within and resolved.machine is not None and resolved.look is not None:
                self._check_program(step)

    def _examine(self, link: Link, resolved: Facts, dry: Prepared, made: Plan) -> None:
        """With the model that the chain begins from: by the rules, and for a run by this machine."""
        # a model of nobody's is not written over
        self._say(link, (finding for finding in made.all_findings if finding.code != "finished-output"))
        self._say(link, (one for one in dry.findings if one.severity != "note"))
        if resolved.machine is not None:
            self.starts.append((link, resolved, made))

    def ask_machine(self, *, live: bool) -> None:
        """What this machine lacks for any stage; not of its GPUs while one is training on them."""
        for link, resolved, made in self.starts:
            try:
                chosen = None if live else resolved.choose_devices()
                self._say(link, checks.require_ready(made, resolved.trainer, chosen))
            except NotReady as error:
                self.lacking += [self._named(link, one) for one in error.findings]

    def _check_program(self, step: PlannedStage) -> None:
        measured = step.evaluation
        fault = None if measured is None else evaluation.missing_program(measured)
        if fault is not None:
            self.lacking.append(self._named(step.link, fault))

    def _check_models(self, link: Link, loaded: Config, source: PlannedStage) -> None:
        """A stage that names another model, or tokenizer, than the stage before leaves."""
        places = {canonical(one) for one in (source.model, source.prepared.requested_output) if one is not None}
        for key in (MODEL, TOKENIZER):
            own, origin = _text(loaded.args.get(key)), loaded.origin(f"args.{key}")
            if own is None or canonical(Path(own)) in places:
                continue
            if link.explicit and origin.override is None:
                continue
            help = f"delete the line, or say which with `from: {link.source}` or `from: none`"
            if link.explicit:
                help = f"delete it, or write `from: none` instead of `from: {link.source}`"
            message = f"`{key}` is {brief(own)} here, and the pipeline hands over {source.model}, "
            message += f"the model of {link.source}"
            self._add(link, "pipeline-model", message, help, f"args.{key}")

    def _has_own_output(self, step: PlannedStage) -> bool:
        own = step.prepared.requested_output or step.output
        place = canonical(own)
        for other in self.steps.values():
            output = other.prepared.requested_output or other.output
            name = other.link.name
            if canonical(output) == place:
                message = f"{step.link.name} and {name} both write into {own}"
            elif place.is_relative_to(canonical(output)):
                message = f"{step.link.name} writes into {own}, which lies in {output}, the output of {name}"
            elif canonical(output).is_relative_to(place):
                message = f"{step.link.name} writes into {own}, which holds {output}, the output of {name}"
            else:
                continue
            help = f"give one of them another `{OUTPUT}`"
            self._add(step.link, "pipeline-output", message, help, f"args.{OUTPUT}")
            return False
        return True

    def _check_between(self, source: PlannedStage, step: PlannedStage) -> None:
        given, values, link = source.plan.values, step.plan.values, step.link
        before = source.link.name
        for name in sorted(source.plan.stage.entry.partial):
            if given.get(name) is True:
                message = f"`{name}` ends {before} before there is a model to continue from"
                self._add(source.link, "pipeline-output", message, f"write `{name}: false`", f"args.{name}")
        if any(given.get(name) for name in _ADAPTERS):
            # finetune.py::main[config = AutoConfig.from_pretrained #2],
            # dpo_tune_cache.py::main[config = AutoConfig.from_pretrained #2],
            # trl/trainer/utils.py::create_model_from_path[config = AutoConfig.from_pretrained] read the model's config
            message = f"{before} saves an adapter without its model: {link.name} cannot load it"
            help = "merge it into its model (`merge_and_unload` of peft), and begin from that"
            self._add(link, "pipeline-adapter", message, help, "from", layer="run")
        own = step.plan.stage
        if own.entry.whole_model and own.options.probe is None:
            asks = rendered("finetune.py::main[snapshot_download]")
            message = f"{asks} asks the hub for {source.model}: without the probe, which answers it, a local "
            message += "model cannot be trained"
            self._add(link, "pipeline-probe", message, "leave the probe on", "probe", layer="run")
        # one tokenizer for all of them: its chat template, and the token that it begins with
        name = "chat_template_name"
        was, now = given.get(name), values.get(name)
        if now is not None and now != was:
            shown, change = "the tokenizer's own template", "delete the line"
            if was:
                shown, change = f"`{was}`", f"write `{name}: {was}`"
            message, help = f"`{name}: {now}`: {before} trains with {shown}", f"one template for both: {change}"
            self._add(link, "pipeline-template", message, help, f"args.{name}", severity="warning")
        elif now is None and given.get("add_bos") is True and values.get("add_bos") is True:
            # dataset_transformation.py::get_tokenizer_tulu_v2_2[You specified add_bos]
            message = f"`add_bos` crashes: {before} saves a template that begins with the token already"
            help = "write `add_bos: false`"
            self._add(link, "pipeline-template", message, help, "args.add_bos", layer="run")

    def _add(self, link: Link, code: str, message: str, help: str, key: str, **other: Any) -> None:
        """An error about how stages fit, at its key; `other` fields than those of launch's errors."""
        place = (link if key == "from" else self.configs[link.name]).origin(key).place
        self._say(link, [replace(launch_finding("error", code, message, help, key=key, **place), **other)])

    def _say(self, link: Link, found: Iterable[Finding]) -> None:
        self.findings += [self._named(link, one) for one in found]

    def _named(self, link: Link, finding: Finding) -> Finding:
        finding = pipeline.placed(link, finding)
        if canonical(link.config) not in self.twice or finding.message.startswith(f"{link.name}: "):
            return finding
        return replace(finding, message=f"{link.name}: {finding.message}")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
