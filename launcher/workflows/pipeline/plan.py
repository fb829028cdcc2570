"""What each stage of a pipeline gets from the one before, and everything that is wrong with that.

All of it is asked before the first stage starts, when the models in between do not exist yet. So a
stage is judged twice: with the model that the whole chain begins from, whose shape every later one
has, and with the folder that it will really be given.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher import redaction
from launcher.artifacts import checkpoints
from launcher.config import pipeline
from launcher.config.load import Config, spell_override
from launcher.config.pipeline import Chain, Link
from launcher.errors import (
    Finding,
    InvalidConfig,
    NotReady,
    launch_finding,
    not_ready,
    select_errors,
    shorten,
    usage,
)
from launcher.lazy_dataclass import dataclass
from launcher.paths import resolve_path
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
from launcher.upstream.citations import render_citations
from launcher.upstream.schema import Values
from launcher.upstream.trainers import BACKENDS
from launcher.workflows.pipeline import evaluation
from launcher.workflows.pipeline.evaluation import PlannedEvaluation

# every script calls the first two so; TRL's have no third
MODEL = "model_name_or_path"
OUTPUT = "output_dir"
TOKENIZER = "tokenizer_name_or_path"
_ADAPTERS = ("use_lora", "use_qlora", "use_peft")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """A pipeline and its command line: from which stage to which (None: the first, the last).

    `common` is what the command line says for every stage.
    """

    chain: Chain
    common: Request
    first: str | None = None
    last: str | None = None
    allow_unproven: bool = False

    @property
    def links(self) -> tuple[Link, ...]:
        """The stages that are to run. Raises UsageError for a name that does not exist."""
        return self.chain.between(self.first, self.last)

    def request(self, link: Link) -> Request:
        """The command line of one stage."""
        return replace(
            self.common,
            stage=link.stage,
            config=link.config,
            overrides=link.texts(),
            gpus=link.gpus if self.common.gpus is None else self.common.gpus,
            fresh=False,
            allowed=(),
            borrowed=self.chain.borrowed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage as it is known beforehand.

    `file` is its own. `root` is the model that its chain begins from, with which it was `resolved`
    and, if it is to run, `judged`. `prepared` is the dry run with the model of the stage before.
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
    def requested_output(self) -> Path:
        return self.prepared.requested_output or self.output

    @property
    def model(self) -> Path:
        """The folder that a later stage begins from."""
        return plan.find_model_in(self.plan, self.output)

    def as_json(self) -> dict[str, object]:
        """For the answer of a dry run."""
        content = {"name": self.link.name, **self.prepared.as_json()}
        if self.evaluation is not None:
            content["eval"] = self.evaluation.as_json()
        return content

    @property
    def evaluation(self) -> PlannedEvaluation | None:
        return evaluation.plan_evaluation(self.link, self.prepared, self.model)

    @property
    def live(self) -> bool:
        """Whether it is being trained, or judged, right now."""
        folder = self.prepared.folder
        return runner.is_alive(folder.path) or runner.has_live_supervisor(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """All stages that matter, by name, in order; `links` are those that are to run.

    `live` are those of the latter that are being trained already, by a pipeline that was killed.
    """

    steps: Mapping[str, PlannedStage]
    links: tuple[Link, ...]
    findings: tuple[Finding, ...]
    live: tuple[PlannedStage, ...] = ()

    @property
    def redactor(self) -> Redactor:
        """What must not be shown of any stage."""
        return redaction.combine_redactors(step.prepared.redactor for step in self.steps.values())

    def resolved(self) -> dict[str, Facts]:
        """Each stage that is to run, with the model that its chain begins from."""
        facts = {}
        for link in self.links:
            step = self.steps[link.name]
            if step.root is not None:
                facts[link.name] = step.resolved
        return facts


def plan_stages(order: PipelineRequest, scope: Scope) -> PipelinePlan:
    """Judge every stage that is to run, and what they hand to each other; nothing is started.

    Raises InvalidConfig with everything that is wrong with any of them, NotReady with everything
    that this machine lacks for any of them, UsageError for stages or names that do not exist.
    """
    planner = _Planner(order, scope)
    links = order.links
    names = {link.name for link in links}
    # those before the first one are needed for where their model lies
    names.update(link.source for link in links if link.source is not None)
    for link in order.chain.links:
        if link.name in names:
            planner.visit(link)
    steps = planner.steps
    live = tuple(step for step in steps.values() if step.link in links and step.live)
    planner.ask_machine(live=bool(live))
    change_names = set(changes.NAMES)
    for step in steps.values():
        change_names |= list_known_changes(step.resolved)
    unknown = [repr(name) for name in order.common.allowed if name not in change_names]
    if unknown and not planner.refused:
        message = f"--allow-changed-resume: no argument or group is named {', '.join(unknown)}"
        raise usage("unknown-change", message)
    findings = tuple(dict.fromkeys(planner.findings))
    if planner.refused or select_errors(findings, strict=order.common.strict):
        raise InvalidConfig(findings)
    if planner.lacking:
        raise NotReady(dict.fromkeys(planner.lacking))
    return PipelinePlan(steps=steps, links=links, findings=findings, live=live)


def list_known_changes(facts: Facts) -> frozenset[str]:
    """What `--allow-changed-resume` takes for a stage."""
    return frozenset((*changes.NAMES, *facts.stage.schema.fields))


def override_model(backend: str, source: Path | str) -> list[str]:
    """The overrides that make `source` the model and the tokenizer of a stage."""
    return [f"{name}={spell_override(str(source))}" for name in BACKENDS[backend].MODEL_ARGUMENTS]


def _set_model(facts: Facts, model: Path) -> Facts:
    """Set the model of a stage. It need not exist yet: it is not read."""
    stage = facts.stage
    args = {**stage.args, **dict.fromkeys(stage.backend.MODEL_ARGUMENTS, str(model))}
    return replace(facts, stage=replace(stage, args=args, values=Values(stage.schema, args)))


def _require_model(link: Link, source: PlannedStage) -> None:
    """Raise NotReady if a stage that is not to run left no model for `link` to begin from."""
    fault = "it is being trained" if source.live else checkpoints.find_model_fault(source.model)
    if fault is not None:
        name = source.link.name
        message = f"{link.name} begins from {source.model}, the model of {name}: {fault}"
        help = f"`--from {name}` trains it first"
        raise not_ready("pipeline-needs", message, help, file=str(source.model))


def _run_dry(facts: Facts, resolved: Facts) -> Prepared:
    """Raises InvalidConfig, also with what this machine lacks."""
    try:
        return prepare.complete(facts.of_any_machine())
    except InvalidConfig:
        if resolved.machine is not None:
            check.require(resolved)
        raise


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
        self.files = [resolve_path(link.config) for link in order.chain.links]

    def visit(self, link: Link) -> None:
        """Judge one stage; one that is not to run only as far as it is needed."""
        try:
            self._visit_link(link, within=link in self.order.links)
        except InvalidConfig as error:
            self._say(link, error.findings)
            self.refused = True
        except NotReady as error:
            self._note_lacking(link, error.findings)

    def _find_root_model(
        self, link: Link, config: Config, source: PlannedStage | None, *, within: bool
    ) -> str | None:
        """The model that the chain of a stage begins from; None if unknown."""
        if link.source is None:
            return _read_text(config.args.get(MODEL))
        if source is not None and within and source.link not in self.order.links:
            return str(source.model)
        return self.roots.get(link.source)

    def _visit_link(self, link: Link, *, within: bool) -> None:
        source = self.steps.get(link.source or "")
        file = collect.open_stage_file(self.order.request(link))
        config = file.config
        self.configs[link.name] = config
        root = self._find_root_model(link, config, source, within=within)
        overrides: list[str] = []
        if link.source is not None:
            model = root or f"the model of {link.source}"
            if source is not None:
                self._check_models(link, config, source)
                if not within:
                    model = str(source.model)
            elif within and root is None:
                # nothing can be said of a model that nobody knows
                return
            overrides = override_model(stage.find_backend(config), model)
        self.roots[link.name] = root
        names_output = config.args.get(OUTPUT) is not None
        if not names_output:
            message = f"`{OUTPUT}` is missing: where a stage's model goes must be known beforehand"
            help = f"give it an `{OUTPUT}`, in its file or under `with:`"
            self._add(link, "pipeline-output", message, help, "args")
        step = self._plan_stage(link, file, overrides, within=within)
        if not names_output or not self._has_own_output(step):
            return
        if source is not None and within:
            self._check_between(source, step)
        self.steps[link.name] = step
        facts = step.resolved
        trains_here = within and facts.machine is not None and facts.look is not None
        if trains_here and step.evaluation is not None:
            self._note_lacking(link, evaluation.find_missing_program(step.evaluation))

    def _plan_stage(
        self, link: Link, file: StageFile, overrides: list[str], *, within: bool
    ) -> PlannedStage:
        """Plan a stage with the model of its chain (`overrides`), and with the one before it."""
        source = self.steps.get(link.source or "")
        fresh = self.order.common.fresh and within
        chained = file.with_overrides(*overrides, fresh=fresh)
        # a stage that is not to run needs nothing of this machine
        scope = self.scope if within else Scope.PLAN
        resolved = collect.collect_read(chained, chained.read(), scope)
        facts = resolved
        if source is not None:
            if resolved.machine is not None and source.link not in self.order.links:
                _require_model(link, source)
            facts = _set_model(resolved, source.model)
        dry = _run_dry(facts, resolved)
        judged: Plan | None = None
        if within and (source is not None or resolved.machine is not None):
            target = dry.start.target
            judged = check.plan_with_findings(
                resolved, decided=target.output.derived, attempts=target.attempts_so_far
            )
        if within:
            self._collect_findings(link, resolved, dry, judged or dry.plan)
        return PlannedStage(
            link=link,
            file=file,
            resolved=resolved,
            prepared=dry,
            root=self.roots[link.name],
            judged=judged,
        )

    def _collect_findings(self, link: Link, resolved: Facts, dry: Prepared, judged: Plan) -> None:
        """Collect what the rules say, with the model that the chain begins from."""
        for finding in judged.all_findings:
            # a model that no run here made is not written over
            if finding.code != "finished-output":
                self._say(link, [finding])
        self._say(link, [finding for finding in dry.findings if finding.severity != "note"])
        if resolved.machine is not None:
            self.starts.append((link, resolved, judged))

    def ask_machine(self, *, live: bool) -> None:
        """What this machine lacks for any stage; without GPUs while one is training on them."""
        for link, resolved, judged in self.starts:
            try:
                chosen = None if live else resolved.choose_devices()
                self._say(link, checks.require_ready(judged, resolved.trainer, chosen))
            except NotReady as error:
                self._note_lacking(link, error.findings)

    def _check_models(self, link: Link, config: Config, source: PlannedStage) -> None:
        """A stage must not name another model, or tokenizer, than the stage before leaves."""
        places = (resolve_path(source.model), resolve_path(source.requested_output))
        for key in (MODEL, TOKENIZER):
            value = _read_text(config.args.get(key))
            if value is None or resolve_path(Path(value)) in places:
                continue
            if link.explicit and config.origin(f"args.{key}").override is None:
                continue
            help = f"delete the line, or say which with `from: {link.source}` or `from: none`"
            if link.explicit:
                help = f"delete it, or write `from: none` instead of `from: {link.source}`"
            message = f"`{key}` is {shorten(value)} here, and the pipeline hands over "
            message += f"{source.model}, the model of {link.source}"
            self._add(link, "pipeline-model", message, help, f"args.{key}")

    def _has_own_output(self, step: PlannedStage) -> bool:
        """Whether no stage before writes into the same folder, inside or above it."""
        output = step.requested_output
        place = resolve_path(output)
        for other in self.steps.values():
            name = other.link.name
            other_output = other.requested_output
            other_place = resolve_path(other_output)
            message = f"{step.link.name} writes into {output}, which "
            if place == other_place:
                message = f"{step.link.name} and {name} both write into {output}"
            elif place.is_relative_to(other_place):
                message += f"lies in {other_output}, the output of {name}"
            elif other_place.is_relative_to(place):
                message += f"holds {other_output}, the output of {name}"
            else:
                continue
            help = f"give one of them another `{OUTPUT}`"
            self._add(step.link, "pipeline-output", message, help, f"args.{OUTPUT}")
            return False
        return True

    def _check_between(self, source: PlannedStage, step: PlannedStage) -> None:
        link = step.link
        before = source.link.name
        values = source.plan.values
        for name in sorted(source.plan.stage.entry.partial):
            if values.get(name) is True:
                message = f"`{name}` ends {before} before there is a model to continue from"
                help = f"write `{name}: false`"
                self._add(source.link, "pipeline-output", message, help, f"args.{name}")
        if any(values.get(name) for name in _ADAPTERS):
            # finetune.py::main[config = AutoConfig.from_pretrained #2],
            # dpo_tune_cache.py::main[config = AutoConfig.from_pretrained #2],
            # trl/trainer/utils.py::create_model_from_path[config = AutoConfig.from_pretrained] read
            # the model's config
            message = f"{before} saves an adapter without its model: {link.name} cannot load it"
            help = "merge it into its model (`merge_and_unload` of peft), and begin from that"
            self._add(link, "pipeline-adapter", message, help, "from", layer="run")
        own = step.plan.stage
        if own.entry.whole_model and own.options.probe is None:
            asks = render_citations("finetune.py::main[snapshot_download]")
            message = f"{asks} asks the hub for {source.model}: without the probe, which answers "
            message += "it, a local model cannot be trained"
            self._add(link, "pipeline-probe", message, "leave the probe on", "probe", layer="run")
        self._check_templates(link, before, values, step.plan.values)

    def _check_templates(self, link: Link, before: str, was: Values, now: Values) -> None:
        """All stages use one tokenizer: its chat template, and the token that it begins with."""
        name = "chat_template_name"
        template = now.get(name)
        template_before = was.get(name)
        if template is not None and template != template_before:
            other = "the tokenizer's own template"
            change = "delete the line"
            if template_before:
                other = f"`{template_before}`"
                change = f"write `{name}: {template_before}`"
            message = f"`{name}: {template}`: {before} trains with {other}"
            help = f"one template for both: {change}"
            key = f"args.{name}"
            self._add(link, "pipeline-template", message, help, key, severity="warning")
        elif template is None and was.get("add_bos") is True and now.get("add_bos") is True:
            # dataset_transformation.py::get_tokenizer_tulu_v2_2[You specified add_bos]
            message = f"`add_bos` crashes: {before} saves a template that begins with the token "
            message += "already"
            help = "write `add_bos: false`"
            key = "args.add_bos"
            self._add(link, "pipeline-template", message, help, key, layer="run")

    def _add(
        self, link: Link, code: str, message: str, help: str, key: str, **changes: Any
    ) -> None:
        """An error about how stages fit, at its key; `changes` are to launch's errors."""
        if key == "from":
            place = link.origin(key).place
        else:
            place = self.configs[link.name].origin(key).place
        finding = launch_finding("error", code, message, help, key=key, **place)
        self._say(link, [replace(finding, **changes)])

    def _say(self, link: Link, findings: Iterable[Finding]) -> None:
        self.findings += [self._name_stage(link, finding) for finding in findings]

    def _note_lacking(self, link: Link, findings: Iterable[Finding]) -> None:
        self.lacking += [self._name_stage(link, finding) for finding in findings]

    def _name_stage(self, link: Link, finding: Finding) -> Finding:
        """The finding at its place; with the stage's name if several stages have the same file."""
        finding = pipeline.place_finding(link, finding)
        is_shared = self.files.count(resolve_path(link.config)) > 1
        if not is_shared or finding.message.startswith(f"{link.name}: "):
            return finding
        return replace(finding, message=f"{link.name}: {finding.message}")


def _read_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
