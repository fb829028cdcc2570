"""Every finding code, its layer and what it means.

`launch explain CODE` prints a row of this table, and `make docs` writes docs/findings.md from it.
"""

import re
from collections.abc import Iterator

from launcher.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Meaning:
    """What codes mean that share a row: `layer` as in `errors.Layer`, `text` in Markdown."""

    codes: tuple[str, ...]
    layer: str
    text: str

    def plain_text(self) -> str:
        """The text without the targets of its links."""
        return re.sub(r"\[([^]]+)\]\([^)]+\)", r"", self.text)


@dataclass(frozen=True, slots=True)
class CodeSection:
    """A part of the page: its title, the Markdown above its table, and its rows."""

    title: str
    intro: str
    rows: tuple[Meaning, ...]


def _make_row(codes: str, layer: str, text: str) -> Meaning:
    return Meaning(codes=tuple(codes.split()), layer=layer, text=text)


_THE_FILE = CodeSection(
    title="The file",
    intro="",
    rows=(
        _make_row("missing-file", "launch", "there is no such file"),
        _make_row("not-a-file", "launch", "a directory, a socket, a device"),
        _make_row("unreadable-file", "launch", "no permission, or an error while reading"),
        _make_row("huge-file", "launch", "more than 4 MiB"),
        _make_row("binary-file", "launch", "holds NUL bytes"),
        _make_row("not-utf8", "launch", "not UTF-8 text"),
        _make_row("empty-file", "launch", "no YAML in it"),
        _make_row("broken-yaml", "launch", "YAML's own parser refuses it"),
        _make_row(
            "bad-character", "launch", "a character that YAML, or a command line, cannot hold"
        ),
        _make_row("several-documents", "launch", "the file has more than one YAML document"),
        _make_row(
            "not-a-mapping",
            "launch",
            "the file is a list or a single value instead of keys and values",
        ),
        _make_row(
            "too-deep too-large",
            "launch",
            "nested deeper than 64 levels; more than 100,000 values, aliases counted",
        ),
        _make_row("unknown-tag", "launch", "a YAML tag other than the plain types"),
        _make_row("duplicate-key", "launch", "the same key twice"),
        _make_row("bad-key", "launch", "a key that is not a plain name"),
        _make_row("bad-args", "launch", "`args` is not a mapping"),
        _make_row(
            "exposed-secret",
            "launch",
            "a secret on a command line, which every user of the machine can read",
        ),
        _make_row(
            "bad-extends missing-parent extends-cycle",
            "launch",
            "`extends` names no file, a missing one, or is circular",
        ),
        _make_row("interpolation", "launch", "a `${...}` that cannot be resolved"),
        _make_row(
            "bad-override",
            "launch",
            "an override that is not `key=value`, or whose value is not valid YAML",
        ),
    ),
)

_LAUNCH_OWN_OPTIONS = CodeSection(
    title="launch's own options",
    intro="",
    rows=(
        _make_row("unknown-option", "launch", "no option of a stage file"),
        _make_row(
            "bad-stage bad-script",
            "launch",
            "`stage` or the script names nothing that launch can start",
        ),
        _make_row("is-pipeline", "launch", "a pipeline file where launch needs a stage file"),
        _make_row(
            "foreign-file",
            "launch",
            "a script, or a file of another tool: `launch init --from` converts it",
        ),
        _make_row(
            "wrong-stage",
            "launch",
            "a DPO file given to `launch sft`, or an SFT file to `launch dpo`",
        ),
        _make_row(
            "bad-backend bad-deepspeed bad-mixed-precision bad-name bad-num-gpus",
            "launch",
            "a value that the option does not accept",
        ),
        _make_row(
            "bad-on-violation bad-on-hang bad-probe bad-rehearse bad-samples",
            "launch",
            "a setting of the probe, of rehearsals or of samples has a wrong value: "
            "`on_violation` is `stop` or `warn`, `on_hang` is `report` or `stop`, `probe` is "
            "`off` or its settings, `rehearse` is a switch, `samples` is a whole number",
        ),
        _make_row(
            "bad-batch",
            "launch",
            "`batch` is `{global: N, per_device: N}` with whole numbers above 0",
        ),
        _make_row(
            "bad-expect",
            "launch",
            "`expect` names a point that verdicts do not have, or a state that cannot be "
            "expected of it",
        ),
        _make_row("batch-twice", "launch", "the batch is set both by `batch:` and by an argument"),
        _make_row(
            "impossible-batch",
            "launch",
            "the global batch cannot be split into micro-batches of this many rows, on any "
            "number of GPUs or on those of the plan; the message names the nearest batch that can",
        ),
        _make_row("derived", "launch", "a note: launch set an argument, and why"),
    ),
)

_ARGUMENTS = CodeSection(
    title="Arguments",
    intro="",
    rows=(
        _make_row(
            "unknown-key",
            "parser",
            "the entry script has no such argument, or an entry of `datasets` has no such key",
        ),
        _make_row(
            "removed-key renamed-key",
            "parser or launch",
            "upstream removed or renamed the argument, or it belongs to the other stage or "
            "backend. If it changed what was trained, the message says what it did and what "
            "happens now",
        ),
        _make_row(
            "lost-meaning",
            "launch",
            "`--fix` has turned such a key into a comment, `# lost: reduce_loss: sum`; the "
            "warning stays until you delete the comment",
        ),
        _make_row("abbreviated-key", "launch", "argparse would silently take it for a longer name"),
        _make_row("negated-key", "parser or launch", "`no_x: ...` instead of `x: false`"),
        _make_row(
            "missing-argument", "parser", "a required field that neither the file nor launch sets"
        ),
        _make_row(
            "bad-value", "parser or launch", "a value of the wrong type, number of words, or choice"
        ),
        _make_row("bool-as-text", "run", "YAML reads a bool where upstream takes text"),
        _make_row(
            "two-data-sources",
            "parser or run",
            "`dataset_name` or `dataset_mixer` beside the mixer list; for TRL `dataset_name` "
            "beside `datasets`",
        ),
        _make_row(
            "beaker-without-push",
            "parser",
            "`push_to_hub: false` without `try_launch_beaker_eval_jobs: false`",
        ),
        _make_row(
            "final-lr-scheduler final-lr-range",
            "parser",
            "`final_lr_ratio` with another schedule than linear, or outside 0..1",
        ),
        _make_row("bad-json", "parser", "a text that begins with a brace and is not JSON"),
        _make_row(
            "zero-stage offload-without-zero3",
            "parser",
            "`zero_stage` outside 0..3; `offload_param` without stage 3",
        ),
        _make_row(
            "two-precisions loss-weights logging-steps pad-multiple",
            "parser",
            "TRL: `fp16` together with `bf16`; weights that do not match; `logging_steps: 0`; a "
            "padding multiple that is not a number",
        ),
        _make_row("no-model", "run", "no model named"),
        _make_row(
            "no-data",
            "launch or run",
            "no data named: open-instruct's SFT would train on a small default set",
        ),
        _make_row("one-sample", "run", "the mixer amount `1` is one sample, `1.0` is all of it"),
        _make_row(
            "odd-mixer-list mixer-amount json-data",
            "run",
            "a mixer list that crashes when it is read",
        ),
        _make_row(
            "mixer-splits",
            "run",
            "open-instruct: `dataset_mixer_list_splits` (`mixer_list_splits`) needs one entry, "
            "or as many as the mixer list has, names and amounts counted; else it crashes. The "
            "split of a set is the entry at the place of its name. Entries at the place of an "
            "amount are not read; a warning if one differs. A local file has only the split "
            "`train`",
        ),
        _make_row(
            "missing-data",
            "run",
            "a local data file or folder that is not there; an error when the run is to start",
        ),
        _make_row(
            "bad-dataset",
            "parser or run",
            "TRL: an entry of `datasets` without `path`, of a wrong type or without rows; a "
            "quoted list instead of a name",
        ),
        _make_row(
            "bad-fraction",
            "run",
            "TRL: a `fraction` for some sets and not for others, below 0, or of a stream",
        ),
        _make_row(
            "bad-test-split",
            "run",
            "TRL: `test_split_size` is neither a number of rows nor a share between 0 and 1, "
            "leaves nothing to train on, or is set for a stream",
        ),
        _make_row(
            "unseeded-split",
            "run",
            "TRL: `test_split_size` draws other rows in every process and at every start: a "
            "warning on several GPUs, a note on one",
        ),
        _make_row(
            "entity-twice",
            "run",
            "`hf_repo_id` already contains an entity, so the model would be pushed to "
            "`entity/entity/name`",
        ),
        _make_row("push-by-default", "run", "`push_to_hub` is not set, and defaults to true"),
        _make_row(
            "tracking-needs-wandb",
            "run",
            "`with_tracking` with a `report_to` without wandb crashes",
        ),
        _make_row("no-checkpoints", "run", "a run that may be long, without checkpoints"),
        _make_row("checkpoint-steps", "run", "neither `epoch` nor a number"),
        _make_row("max-train-samples", "run", "DPO: crashes in the reference cache"),
        _make_row("liger-with-lora", "run", "TRL: measured at half the speed"),
        _make_row(
            "out-of-range",
            "run",
            "a number that the optimizer, peft, numpy or torch's loader refuses; or with which "
            "nothing is trained, printed or kept; or with which the wrong answers are preferred "
            "(`beta`, `label_smoothing`)",
        ),
        _make_row(
            "lora-targets",
            "run",
            "TRL: `lora_target_modules` is a single word, which TRL reads as a pattern, or one "
            "text with several names; or it names `lm_head`, on which TRL refuses an adapter",
        ),
        _make_row(
            "lora-on-tied",
            "run",
            "TRL: the embedding and the output layer share one matrix, and LoRA or "
            "`lora_modules_to_save` changes one of them: a merged adapter changes both, a saved "
            "copy unties them",
        ),
        _make_row(
            "unknown-template",
            "run",
            "there is no chat template of that name: upstream silently uses the tokenizer's own",
        ),
        _make_row(
            "unknown-function", "run", "there is no tokenizer function or transform of that name"
        ),
        _make_row(
            "model-arguments-unread",
            "run",
            "`additional_model_arguments` contains arguments that upstream sets itself; they are "
            "not read",
        ),
        _make_row(
            "cache-key",
            "run",
            "you set a cache key: upstream does not read the data, and the set must be in the "
            "cache",
        ),
        _make_row("resume-unread", "run", "`resume_from_checkpoint` is never read"),
        _make_row(
            "qlora-without-lora",
            "run",
            "the quantised weights are frozen and there is no adapter, so nothing is trained",
        ),
        _make_row(
            "scheduler-type",
            "run",
            "DPO: there is no schedule of that name, or it needs more than numbers of steps: it "
            "crashes once the model is loaded",
        ),
        _make_row("warmup-unread", "run", "`lr_scheduler_type: constant` has no warm-up"),
        _make_row(
            "endless-warmup",
            "run",
            "the warm-up takes at least as many steps as are planned, so the learning rate "
            "never reaches its value",
        ),
        _make_row(
            "checkpoint-sign",
            "run",
            "a negative `checkpointing_steps` saves as often as the positive number: `-1` saves "
            "every step",
        ),
        _make_row(
            "unexpanded-path",
            "run",
            "a folder named with `~` or `$NAME`, which upstream does not expand",
        ),
        _make_row("two-zero-stages", "run", "DPO: `zero_stage` replaces the DeepSpeed file"),
        _make_row(
            "clipping-unread",
            "run",
            "with DeepSpeed, its file decides whether gradients are clipped and at which norm: "
            "`auto` is 1.0",
        ),
        _make_row(
            "tokenising-outlasts",
            "run",
            "tokenising takes longer than `timeout`: the other processes give up",
        ),
        _make_row(
            "remote-code",
            "run",
            "`trust_remote_code` or a similar argument: code of the model's repository runs with "
            "your rights",
        ),
        _make_row(
            "no-wandb-key no-hub-token",
            "run",
            "`with_tracking` or `push_to_hub` is set and nobody is logged in; an error when the "
            "run is to start",
        ),
        _make_row(
            "eval-steps whole-steps best-model-strategy best-model-steps scheduler-needs-eval",
            "parser",
            "TRL: evaluating by steps without a number; steps above 1 that are not whole; "
            "`load_best_model_at_end` against what is saved and evaluated; a schedule that needs "
            "evaluation",
        ),
        _make_row(
            "negative-warmup prefetch-workers empty-cache-steps parallelism-config",
            "parser",
            "TRL: values that `__post_init__` refuses",
        ),
        _make_row(
            "eval-without-data",
            "run",
            "TRL: `eval_on_start` with `eval_strategy: no`, which passes no data set to evaluate "
            "on",
        ),
        _make_row(
            "best-without-eval warmup-unread padding-free-off",
            "run",
            "TRL: settings without an effect, or with a harmful one",
        ),
        _make_row(
            "resume-word stream-without-steps no-such-split quantised-whole two-engines fsdp-alone",
            "run",
            "TRL: arguments, or files on this machine, that the trainer refuses later",
        ),
        _make_row(
            "packing-without-length padding-free-length",
            "run",
            "TRL's SFT: arguments that the trainer refuses later",
        ),
        _make_row(
            "zero-beta",
            "run",
            "DPO with `beta: 0`: in some losses TRL divides by it; in the others, and in "
            "open-instruct, no preference is learned (a warning)",
        ),
        _make_row(
            "reversed-gradient",
            "run",
            "DPO since #1591: `max_grad_norm` below 0 reverses the gradient (with DeepSpeed it "
            "is not read); 0 makes it zero in dpo.py",
        ),
        _make_row(
            "packing-refused",
            "run",
            "OLMo-core's scripts refuse packed rows without flash-attn's attention (dpo.py since "
            "#1670)",
        ),
        _make_row(
            "olmo-tokenizer",
            "run",
            "an OLMo tokenizer, by its config or (since #1622) its name, whose template does not "
            "allow this `add_bos` or `use_fast`",
        ),
        _make_row(
            "not-with-olmo-core",
            "run",
            "`script: dpo_olmo_core`: LoRA, 8-bit and paged optimizers, QLoRA",
        ),
        _make_row(
            "unsupported-model other-shape",
            "run",
            "dpo.py: OLMo-core cannot build the model; or the weights do not fit the shape of "
            "`config_name` or of the model's own name: another family, other sizes, fewer "
            "layers, each with what differs (a warning if OLMo-2 and OLMo-3 are swapped)",
        ),
        _make_row(
            "offline-hub-model",
            "run",
            "dpo.py: a hub name where HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set: "
            "OLMo-core asks the hub after tokenising and crashes, whatever the cache holds; "
            "a warning until a run is to start",
        ),
        _make_row("no-length", "run", "dpo.py crashes without `max_seq_length`"),
        _make_row(
            "scheduler-replaced",
            "run",
            "dpo.py: a schedule that becomes a constant rate (notes: `cosine` ends at a tenth, "
            "`constant` warms up); a loss that adds nothing",
        ),
        _make_row(
            "budget-without-compile",
            "run",
            "dpo.py: `activation_memory_budget` has an effect only with `compile_model`",
        ),
        _make_row(
            "rope-scaling",
            "run",
            "dpo.py since #1620: `rope_scaling_factor` is not in the saved config.json; "
            "of a hybrid model it is refused",
        ),
        _make_row(
            "accumulation-packed",
            "run",
            "dpo.py with packing: a step is one row, so accumulation only raises the number of "
            "pairs that may share it",
        ),
        _make_row(
            "too-few-rows",
            "run",
            "dpo.py: fewer rows than one step on all GPUs, or than half of the reference pass's "
            "batch",
        ),
        _make_row(
            "resume-unjudged",
            "run",
            "OLMo-core will continue from a checkpoint in the output folder that launch does not "
            "check",
        ),
        _make_row(
            "no-hf-export",
            "run",
            "dpo.py: it saves Qwen3 and Llama shapes as a state dict with OLMo-core's names, which "
            "from_pretrained cannot read",
        ),
        _make_row(
            "context-parallel",
            "run",
            "`cp_degree`: several rows a micro-batch, a number that does not divide the GPUs, "
            "or a missing package",
        ),
        _make_row(
            "shard-degree", "run", "dpo.py: FSDP or tensor degrees that do not divide the processes"
        ),
        _make_row(
            "deepspeed-with-torchrun", "launch", "`deepspeed` with a script that shards with FSDP"
        ),
        _make_row("no-compiler", "run", "`compile_model` on a machine without a C compiler"),
        _make_row(
            "unread-key",
            "run",
            "nothing on the script's path reads this argument; a note if its value is the empty "
            "default",
        ),
        _make_row(
            "conditional-key",
            "run",
            "the argument is read only under a condition that is false with this file",
        ),
        _make_row(
            "shadowed-key",
            "run",
            "the argument is read only where another argument has already decided",
        ),
        _make_row(
            "refused-by-source",
            "parser or run",
            "the source raises an error for these values; launch found this by reading the "
            "source, not by a rule",
        ),
        _make_row(
            "bf16-on-cpu cpu-beside-gpus",
            "run",
            "TRL: refused without a GPU; `use_cpu` with GPUs asked for",
        ),
        _make_row(
            "own-deepspeed",
            "launch",
            "TRL's own `deepspeed` argument is set; launch reads its own option of that name, "
            "beside `args:`",
        ),
        _make_row("fsdp-unsaved", "run", "TRL: FSDP that saves no final model"),
        _make_row(
            "deepspeed-mismatch",
            "run",
            "TRL: values in the DeepSpeed file differ from the arguments",
        ),
        _make_row(
            "fp16-weights",
            "run",
            "TRL: `fp16` with weights in float16 or bfloat16 (by `dtype`, the model's own with "
            "`auto`, `lora_modules_to_save`, adapters of quantised models): the gradient scaler "
            "refuses the first step. Not with DeepSpeed or FSDP, which keep float32 copies",
        ),
        _make_row(
            "steps-rounded",
            "run",
            "bfloat16 weights without float32 copies, and a learning rate so low that most "
            "updates round to nothing; the message says from which size on, and which share of "
            "the weights can change",
        ),
        _make_row(
            "mixed-precision-unread",
            "run",
            "TRL: `bf16` and `fp16` take precedence over `mixed_precision:`; dpo.py: FSDP "
            "computes in bfloat16",
        ),
        _make_row(
            "unknown-attention flash-in-float32",
            "run",
            "TRL: there is no such attention; or flash attention with float32",
        ),
        _make_row(
            "packing-leaks",
            "run",
            "TRL, and open-instruct's DPO (dpo.py; dpo_tune_cache.py on a CPU): samples in a "
            "row attend to each other",
        ),
        _make_row(
            "attention-fallback",
            "run",
            "TRL: a note: which entry of `attention:` is not available here, and why",
        ),
        _make_row(
            "attention-twice", "launch", "TRL: `attention:` and an argument both name the attention"
        ),
        _make_row(
            "impossible-expectation",
            "launch",
            "`expect:` wants Liger or packing proved, but the arguments do not ask for it or "
            "leave nothing to pack. A warning with `on_violation: warn`, and if a trend is "
            "expected of too few steps to show one",
        ),
        _make_row(
            "optim-unread optim-replaced",
            "run",
            "TRL: the DeepSpeed file has its own optimizer, or offloads the optimizer, which "
            "turns it into an Adam",
        ),
        _make_row("no-compiler", "run", "torch.compile without a C or C++ compiler"),
        _make_row(
            "compile-lengths",
            "run",
            "TRL: `torch_compile` with rows of varying length compiles again and again",
        ),
        _make_row(
            "reference-price",
            "run",
            "TRL: a note: what reference log-probs computed beforehand cost",
        ),
        _make_row(
            "reference-rounded",
            "run",
            "TRL: under DeepSpeed in bf16 or fp16 precomputed reference log-probs are "
            "rounded to it: the loss is wrong from the first step on",
        ),
        _make_row(
            "optim-missing quantiser-missing report-missing",
            "run",
            "the package of an optimizer, of quantised weights or of a tracker is not installed; "
            "launch knows once it knows the trainer's Python (a start, a rehearsal). A warning "
            "if open-instruct then leaves the tracker out",
        ),
        _make_row(
            "optim-targets",
            "run",
            "TRL: a GaLore or APOLLO optimizer without `optim_target_modules`",
        ),
        _make_row(
            "report-unknown",
            "run",
            "`report_to` names no tracker; or `none` or `all` together with others",
        ),
        _make_row("no-output", "run", "an empty `output_dir`"),
        _make_row(
            "sequence-split",
            "run",
            "open-instruct: `sequence_parallel_size` does not divide the processes",
        ),
        _make_row(
            "data-file",
            "run",
            "TRL: `dataset_name` is a file, or a reader of `datasets` such as `json`; name the "
            "folder",
        ),
        _make_row(
            "inline-template",
            "run",
            "the text of a template instead of its name or path, or under a key that no script "
            "has (layer `parser` or `launch`): write it to a file",
        ),
        _make_row(
            "impossible-name",
            "run",
            "a model, tokenizer or data set with a name that no folder and nothing on the hub "
            "can have: too long, with a line end, the text of a template",
        ),
        _make_row(
            "missing-template",
            "run",
            "TRL: there is no such file, folder or hub name; or the rows are conversations and "
            "the tokenizer has no template",
        ),
        _make_row(
            "resume-missing resume-finished not-resumed",
            "run",
            "TRL: there is no checkpoint; nothing is left to train; or the output folder has "
            "complete checkpoints and no record says whose they are",
        ),
        _make_row(
            "no-process-group",
            "run",
            "open-instruct's DPO on one GPU without DeepSpeed has no process group",
        ),
        _make_row(
            "deepspeed-left-out",
            "launch",
            "`deepspeed` is set and the run is on the CPU: it is left out",
        ),
    ),
)

_MODEL_DEEPSPEED_OUTPUT_FOLDER = CodeSection(
    title="Model, DeepSpeed, output folder",
    intro="",
    rows=(
        _make_row(
            "deepspeed-no-zero deepspeed-no-batch deepspeed-optimizer deepspeed-precision",
            "run",
            "what accelerate refuses in a DeepSpeed file",
        ),
        _make_row(
            "deepspeed-batch", "run", "its `train_batch_size` is not rows x passes x devices"
        ),
        _make_row(
            "deepspeed-accumulation",
            "run",
            "the DeepSpeed file's accumulation takes precedence, while upstream counts steps "
            "with its own",
        ),
        _make_row(
            "zero3-unsaved",
            "run",
            "ZeRO-3 without gathering the weights crashes when the model is saved",
        ),
        _make_row(
            "fp16-over-bf16",
            "run",
            "upstream loads the model in bfloat16: an error without DeepSpeed and LoRA, "
            "where the gradient scaler refuses it",
        ),
        _make_row(
            "qlora-deepspeed",
            "run",
            "a quantised model with DeepSpeed (ZeRO-3 crashes), or without a GPU",
        ),
        _make_row("lora-biases", "run", "LoRA on a model with biases crashes with ZeRO-1 and 2"),
        _make_row(
            "empty-group",
            "run",
            "finetune.py and dpo_tune_cache.py of older commits: under DeepSpeed a model without "
            "biases fails in its first step with a ValueError",
        ),
        _make_row(
            "lora-zero3-checkpointing",
            "run",
            "finetune.py: with LoRA, ZeRO-3 and checkpointing, the frozen weights are gone when "
            "a layer is computed again",
        ),
        _make_row(
            "liger-unknown-model liger-on-cpu",
            "run",
            "Liger has no kernels for this model, lacks the fused loss that SFT asks for "
            "(Granite), or has no GPU to run on",
        ),
        _make_row(
            "beyond-positions",
            "run",
            "rows are longer than the model's number of positions (by its config, which is on "
            "this machine)",
        ),
        _make_row(
            "packing-without-flash",
            "run",
            "packing without flash-attn was slower than padding when measured",
        ),
        _make_row(
            "overlap-corrupts",
            "run",
            "ZeRO 1 or 2 with `overlap_comm` and a DeepSpeed that corrupts gradients with "
            "it; `--allow-corrupting-overlap` starts it ([gradients](gradients.md))",
        ),
        _make_row(
            "accumulation-lost",
            "run",
            "ZeRO-2 under DeepSpeed 0.17.6 to 0.18.2, which keeps only the last micro-batch of a "
            "step",
        ),
        _make_row(
            "corrupt-baseline",
            "run",
            "`bench`, `tune`: the baseline trained on corrupt gradients, so nothing is compared "
            "with it",
        ),
        _make_row(
            "packing-of-one",
            "run",
            "SFT: packing joins the rows of a micro-batch, and a micro-batch has one row, so it "
            "does nothing (TRL: `padding_free`)",
        ),
        _make_row(
            "attention-missing", "run", "DPO: an attention implementation that is not installed"
        ),
        _make_row(
            "missing-model",
            "run",
            "the model is a file, or neither a folder here nor a hub name (reported when the run "
            "is to start)",
        ),
        _make_row(
            "incomplete-model incomplete-tokenizer",
            "run",
            "a local folder (or, offline, what the hub's cache has) that cannot be loaded: no "
            "config, no weights, missing, cut off or git-lfs pointer files, weights that do not "
            "fit the config, a tokenizer without a vocabulary. A warning until something is to "
            "start; until then a folder with only a config is accepted",
        ),
        _make_row(
            "adapter-alone",
            "run",
            "the model is the folder of an adapter (adapter_config.json without a model); the "
            "help is the command that merges it. An error when the run is to start",
        ),
        _make_row(
            "tokens-beyond-embedding",
            "run",
            "TRL, dpo.py: the tokenizer has more tokens than the embedding has rows (both sizes "
            "are given). An error if the pad or end token has no row and is in the first "
            "batches; also `pad_token_id` and others in config.json beyond the rows",
        ),
        _make_row(
            "embedding-resized",
            "run",
            "open-instruct adds the rows that its tokenizer needs: a note, or a warning with "
            "LoRA, which does not train them",
        ),
        _make_row(
            "foreign-checkpoints",
            "run",
            "the output folder has checkpoints of another run, from which upstream would resume",
        ),
        _make_row("finished-output", "run", "the output folder already has a trained model"),
        _make_row(
            "unintended-output",
            "launch",
            "`output_dir` contains a `~` or `$NAME` that no trainer expands, or is a folder that "
            "is not meant for output: `/`, the working or home folder or one above, the data's "
            "or the model's own folder, the checkout, launch's own folder or caches, the folder "
            "of the runs, a folder of the system",
        ),
        _make_row(
            "nested-output",
            "launch",
            "at a start and in its dry run: the output is, contains or is in a run folder, or is "
            "inside or above the output of another run, live or finished",
        ),
        _make_row(
            "foreign-files",
            "launch",
            "at a start and in its dry run: the output folder has files that no run of launch "
            "made; three are named",
        ),
    ),
)

_THE_ROWS_OF_THE_DATA = CodeSection(
    title="The rows of the data",
    intro=(
        "All rows are looked at, of local files and of data sets in the hub's cache; each finding "
        "names the first row that it is about ([the page on data](data.md#what-launch-looks-at))."
    ),
    rows=(
        _make_row(
            "bad-data",
            "run",
            "rows or files that `datasets` refuses: not JSON, not UTF-8, cut off, no rows, "
            "git-lfs pointers, a folder of `Dataset.save_to_disk`. `init`: data that need "
            "`launch data convert` first, or a file in a folder with other files than data. "
            "`data convert`: a row with another form than the rest",
        ),
        _make_row("unseen-data", "run", "a note: rows that launch did not look at, and why"),
        _make_row(
            "pair-lengths",
            "run",
            "TRL: DPO is to sort pairs by length, but the rows have no column with lengths, or "
            "TRL drops it",
        ),
        _make_row(
            "unlike-micro-batches",
            "run",
            "TRL: DPO gives every micro-batch the same weight, whatever its number of pairs, so "
            "long pairs count more",
        ),
        _make_row(
            "data-columns",
            "run",
            "the rows lack columns that the trainer reads, their columns do not go together, or "
            "TRL mistakes a column for something else; the help names the conversion of a known "
            "form",
        ),
        _make_row(
            "data-types",
            "run",
            "a column has another type in some rows, no value, or an empty list. A warning if "
            "nothing reads the column",
        ),
        _make_row(
            "no-answers",
            "run",
            "chats or pairs without a message of `assistant`: open-instruct drops the row, "
            "TRL trains on the question. Tokenised rows whose `labels` are all -100",
        ),
        _make_row(
            "empty-answers",
            "run",
            "an answer without text: only the token that ends the turn is trained on",
        ),
        _make_row(
            "no-prompt",
            "run",
            "DPO: pairs that would train without their prompt, because it is in no column that "
            "is read; or a prompt without text",
        ),
        _make_row(
            "prompt-twice", "run", "the prompt is in `prompt` and again at the start of the answer"
        ),
        _make_row(
            "equal-pairs",
            "run",
            "DPO: `chosen` equals `rejected` in everything that a template writes; such a pair "
            "has no gradient",
        ),
        _make_row(
            "repeated-rows",
            "run",
            "rows that repeat an earlier row word for word: a note, or a warning if they are "
            "more than half",
        ),
        _make_row(
            "odd-messages",
            "run",
            "a message without `role` or text content, on which most templates fail; or a "
            "message with `weight: 0`, which is trained on nevertheless",
        ),
        _make_row(
            "odd-roles",
            "run",
            "roles that chat templates do not know, such as ShareGPT's `human` and `gpt`; or a "
            "user's turn in the part of a pair that DPO compares",
        ),
        _make_row(
            "no-chat-format",
            "run",
            "TRL: prompts and answers as text, to which the model's chat template is not applied",
        ),
        _make_row(
            "template-drops-tools",
            "run",
            "the rows have tool calls or `tools`, and the chat template does not write them",
        ),
        _make_row(
            "doubled-bos",
            "run",
            "TRL: the texts begin with the token that the tokenizer adds to every text",
        ),
    ),
)

_SOURCE_AND_MACHINE = CodeSection(
    title="Source and machine",
    intro="",
    rows=(
        _make_row(
            "no-checkout", "launch", "the path is not an open-instruct checkout, or none was found"
        ),
        _make_row(
            "unpinned-checkout",
            "launch",
            "the checkout is at an unknown commit, or edited; the message names the commits",
        ),
        _make_row(
            "other-version",
            "launch",
            "a note: TRL or transformers differ from the pair that was tested",
        ),
        _make_row(
            "unreadable-source", "launch", "the source at another commit lacks the dataclasses"
        ),
        _make_row(
            "no-python old-python",
            "launch",
            "the trainer's Python does not run (exit code 5), or is too old",
        ),
        _make_row(
            "no-trainer",
            "launch",
            "the Python that `--python` or `LAUNCH_PYTHON` names lacks TRL or transformers, so "
            "launch cannot check against it: exit code 5. A warning if only a plan is made; "
            "launch then uses the tested versions",
        ),
        _make_row(
            "missing-packages",
            "launch",
            "what the entry script needs and the trainer's Python lacks",
        ),
        _make_row(
            "no-gpus too-few-gpus",
            "launch",
            "`--gpus` is missing; or it asks for more GPUs than this machine has",
        ),
        _make_row(
            "import-error",
            "launch",
            "a package is installed and fails to import: the exception, and the line that raised "
            "it (`launch doctor` only)",
        ),
        _make_row(
            "empty-submodule",
            "launch",
            "a note: the submodule is empty while another checkout is used",
        ),
        _make_row(
            "gpus-taken busy-gpu",
            "launch",
            "too few GPUs are free; or a GPU is held by another run, or a named one is used by "
            "something else",
        ),
        _make_row(
            "no-such-gpu bad-devices",
            "launch",
            "`--devices` names a GPU that this machine does not have, or contradicts `--gpus`",
        ),
        _make_row(
            "no-driver cpu-torch old-driver cuda-unusable",
            "launch",
            "nvidia-smi fails or does not answer; torch is built for the CPU or for a newer "
            "driver, or does not see the GPUs",
        ),
        _make_row(
            "tool-hangs",
            "launch",
            "nvidia-smi, git, squeue or tmux did not answer within `LAUNCH_TOOL_TIMEOUT` (5 "
            "s); the command went on without it",
        ),
        _make_row("small-shm", "launch", "little shared memory"),
        _make_row(
            "too-little-space little-space",
            "launch",
            "the disk has no room for what will be written, or hardly any",
        ),
        _make_row("several-nodes", "launch", "a note: the same command runs on each machine"),
        _make_row(
            "no-node-rank no-main-address",
            "launch",
            "several machines, and the command does not say which one this is, or the address of "
            "the first one",
        ),
        _make_row(
            "bad-node-rank bad-main-address",
            "launch",
            "there is no such machine; the address is not `HOST[:PORT]`",
        ),
        _make_row(
            "wrong-step", "launch", "Slurm started another number of processes than the run needs"
        ),
        _make_row("port-taken", "launch", "the first machine's port is in use"),
        _make_row(
            "bad-slurm reserved-slurm-option bad-slurm-option",
            "launch",
            "`slurm:` is not a mapping, has an option that launch sets itself, or a name or "
            "value that sbatch cannot have",
        ),
        _make_row("slurm-one-cpu", "launch", "the job asks for one core of each machine"),
        _make_row(
            "slurm-failed", "launch", "sbatch or scancel is missing, does not answer, or refused"
        ),
        _make_row(
            "no-progress",
            "launch",
            "the job's time was up before it reached another checkpoint, so queueing it again "
            "would never end",
        ),
        _make_row(
            "bad-gates unknown-gate bad-gate",
            "launch",
            "`gates:` is not a mapping, names no gate, or has an invalid limit",
        ),
        _make_row(
            "uncut-data",
            "launch",
            "a note: TRL tokenises all rows for a short run, because it reads a whole split",
        ),
        _make_row(
            "short-schedule",
            "launch",
            "a note: the learning rate goes through warm-up and decay within the short run",
        ),
        _make_row(
            "deepspeed-off",
            "launch",
            "a note: a rung of a ladder on one GPU runs without DeepSpeed, because with it the "
            "memory of the card is too small",
        ),
        _make_row(
            "batch-not-constant",
            "launch",
            "the rungs of a ladder train with different global batches",
        ),
        _make_row(
            "reference-gone",
            "run",
            "resuming DPO without its reference: the half-trained model would become its own "
            "reference",
        ),
        _make_row(
            "model-not-here",
            "run",
            "a note: the model is not in the hub's cache, so the reference cache is named by the "
            "model's name",
        ),
        _make_row("cache-not-writable", "launch", "the cache folder cannot be written"),
        _make_row("bad-age", "launch", "`cache clear`: the age is not valid"),
        _make_row(
            "not-confirmed output-kept not-removed",
            "launch",
            "`rm`, `cache clear`: without a terminal they delete only with `--yes` or `--all`; "
            "the output folder is another user's, or is in the run folder, or the output of "
            "another run is the same, contains it or is inside it; a folder cannot be deleted "
            "([security](security.md))",
        ),
        _make_row(
            "probe-needed no-probe",
            "run or launch",
            "without the probe the pinned scripts cannot run on a CPU; or nothing is counted or "
            "enforced",
        ),
        _make_row(
            "bad-command-line",
            "launch",
            "with `--format json`: the command line cannot be parsed (exit 2)",
        ),
        _make_row(
            "bad-extension",
            "launch",
            "a module that `LAUNCH_EXTENSIONS` names cannot be imported (exit 5)",
        ),
        _make_row(
            "disk-full",
            "launch",
            "a disk or a quota is full, so the output, or a file of launch's, could not be written",
        ),
        _make_row(
            "resource-limit",
            "launch",
            "a limit on memory, open files, processes or the size of files stopped the "
            "command; `ulimit -a` shows those of the shell (exit 5)",
        ),
        _make_row("no-cwd", "launch", "the folder that the shell is in has been removed"),
        _make_row("runs-not-writable", "launch", "the run folder cannot be written"),
        _make_row(
            "run-is-live",
            "launch",
            "a run into this output folder is still running, or may be: it holds the folder's "
            "lease",
        ),
        _make_row(
            "bad-lease",
            "launch",
            "a link, a file or a folder is at the place of the output folder's lease, or of the "
            "lease's folder",
        ),
        _make_row("not-started", "launch", "the command could not be started"),
        _make_row(
            "resumes",
            "launch",
            "a note: the checkpoint from which the run continues, and how many steps are left",
        ),
        _make_row(
            "already-finished",
            "launch",
            "a note: the run is finished; the exit code is that of its verdict, by what is "
            "expected now. An error if its run folder is gone",
        ),
        _make_row(
            "finished-changed",
            "run",
            "the run is finished, and its settings have changed since: `--fresh` starts over",
        ),
        _make_row(
            "earlier-run",
            "launch",
            "`--dry-run` with the output folder of an existing run, which the printed command "
            "may overwrite",
        ),
        _make_row(
            "nothing-to-resume", "launch", "there is no complete checkpoint: the run starts over"
        ),
        _make_row(
            "resume-changed",
            "run or launch",
            "something has changed since the checkpoint was saved; the message says what that does",
        ),
        _make_row(
            "resume-inexact",
            "run or launch",
            "the data position would be wrong. At a first start: which step counts can be "
            "restored exactly",
        ),
        _make_row(
            "resume-earlier",
            "launch",
            "launch uses an earlier checkpoint, whose data position can be restored exactly",
        ),
        _make_row(
            "damaged-checkpoint",
            "launch",
            "the bytes of a checkpoint are not those that were saved; launch uses an older one",
        ),
        _make_row(
            "set-aside not-set-aside",
            "launch",
            "newer checkpoints are moved so that upstream does not find them, or cannot be moved",
        ),
        _make_row(
            "checkpoint-name broken-checkpoint",
            "run",
            "a name on which upstream's search for checkpoints crashes; or an incomplete "
            "checkpoint that upstream would use",
        ),
        _make_row(
            "no-checkpoints",
            "launch",
            "there will be no checkpoint to resume from, or it comes too late, or lacks the "
            "optimizer",
        ),
        _make_row("unknown-change", "launch", "`--allow-changed-resume` does not name a change"),
        _make_row(
            "unknown-shape unknown-lengths unknown-memory unknown-device",
            "launch",
            "`plan`: the model's config, the row lengths (a note: memory excludes activations), "
            "a description of the set-up's memory (on the CPU a note), or the GPU's speed is "
            "unknown",
        ),
        _make_row(
            "half-wasted",
            "launch",
            "`plan`: more than half of what a packed step computes is empty; which batch would "
            "fill it",
        ),
        _make_row(
            "out-of-memory half-empty",
            "launch",
            "`plan`: the run does not fit: by how much, why, and which settings would; or a "
            "larger batch would fit",
        ),
        _make_row("nothing-fits", "launch", "`plan --fit`: a note: no way to split the batch fits"),
        _make_row(
            "no-steps caches-only",
            "run or launch",
            "`plan`: there is no step to train; or the run ends after tokenising, or after "
            "dpo.py's reference pass, so there is nothing to plan",
        ),
        _make_row(
            "row-tokens bad-attention bad-gpus bad-gpu-memory bad-tokens-per-second "
            "bad-price price-without-gpus speed-of-several fit-without-memory",
            "launch",
            "`plan`, `tune`: an invalid value, or one that needs another option",
        ),
        _make_row("unknown-cost", "launch", "`plan`: a price is given, and the time is unknown"),
        _make_row(
            "cut-samples",
            "launch",
            "olmo_core_finetune.py: OLMo-core ends a document at every end-of-text token, and "
            "splits samples there",
        ),
        _make_row(
            "would-miss",
            "launch",
            "`prepare`: the run would not find the tokens that are, or could be, prepared; exit 1",
        ),
        _make_row(
            "not-fetched incomplete-model",
            "launch",
            "`prepare`: a model or tokenizer is neither here nor available from the hub; or its "
            "folder cannot be loaded",
        ),
        _make_row(
            "tokenising-failed",
            "run",
            "`prepare`: upstream's script failed before the data were ready; exit 4",
        ),
        _make_row(
            "not-a-training-log", "launch", "`check` or `report` of a text that no trainer wrote"
        ),
        _make_row(
            "no-such-run ambiguous-run", "launch", "there is no run of that name, or several"
        ),
        _make_row("no-such-log", "launch", "the run has no log of that attempt"),
        _make_row(
            "not-prepared", "launch", "the run folder has no attempt that waits to be started"
        ),
        _make_row(
            "no-keeper",
            "launch",
            "the supervisor ended before training began; the help is the last line of its log",
        ),
        _make_row(
            "not-your-run",
            "launch",
            "`exec`: another user could have changed what the run folder would start: the folder "
            "or `start.json` is not yours, is writable by others, or is a link",
        ),
        _make_row(
            "start-changed",
            "launch",
            "another user or another start changed `start.json` before training began",
        ),
        _make_row(
            "not-your-process",
            "launch",
            "`stop`: a record names a process or job that may not be the run's: its environment "
            "does not name the run, or others may write the record",
        ),
        _make_row(
            "run-is-a-copy",
            "launch",
            "`stop`, `attach`: the folder is a copy of a run, so the recorded processes are not "
            "its own",
        ),
        _make_row(
            "damaged-record",
            "launch",
            "`check`: a value in a record has another type than launch writes; it is left out",
        ),
        _make_row(
            "bad-lease",
            "launch",
            "a lease in the output folder has a number that cannot be increased: delete it",
        ),
        _make_row(
            "not-running run-is-elsewhere",
            "launch",
            "`stop`: the run has ended; or it is on another machine or in another container, "
            "without a heartbeat, so its state is unknown here",
        ),
        _make_row(
            "bad-grace",
            "launch",
            "`LAUNCH_GRACE` is not one to three numbers of seconds, or `LAUNCH_SAVE_GRACE` is "
            "not one",
        ),
        _make_row(
            "bad-on-finish",
            "launch",
            "`--on-finish` has no command, has an open quote, or names a program that cannot be "
            "started here",
        ),
        _make_row(
            "useless-option", "launch", "an option that has no effect with, or without, another one"
        ),
        _make_row("not-begun", "launch", "`attach` or `check` of a run that waits to be started"),
        _make_row(
            "unwritable-file file-changed",
            "launch",
            "`--fix`, `report`, `tune -o`: the file cannot be written, or was changed in the "
            "meantime",
        ),
        _make_row(
            "unknown-commit no-repository",
            "launch",
            "`pin diff`, `pin move`: the repository does not have this commit; or there is no "
            "git repository to read",
        ),
        _make_row(
            "no-clone no-pin",
            "launch",
            "`pin move`: this launch does not run from a clone of its repository, or the clone "
            "names no pin",
        ),
        _make_row(
            "move-interrupted no-golden",
            "launch",
            "`pin move`: a file was changed after an earlier move was interrupted, or git cannot "
            "record the commit; the tests that write golden files do not run",
        ),
        _make_row(
            "stale-citation",
            "launch",
            "`pin move`: a line that launch cites is not in the new commit, or several lines match",
        ),
        _make_row(
            "unconfirmed-rule",
            "launch",
            "`pin move`: what a rule cites changed; its findings are notes at this commit until "
            "somebody confirms it",
        ),
        _make_row(
            "golden-differs",
            "launch",
            "`pin move`: a test of the golden files fails at the new commit",
        ),
        _make_row("not-writable", "launch", "a folder that the run writes to: its output, a cache"),
        _make_row(
            "no-such-config",
            "launch",
            "`configs copy`: there is no shipped stage file of that name",
        ),
        _make_row("no-input", "launch", "`init`: no model or no data given"),
        _make_row(
            "output-exists",
            "launch",
            "`init`, `configs copy`, `data convert`: the file exists and would be overwritten",
        ),
        _make_row(
            "bad-output no-such-data",
            "launch",
            "`data convert`: the name of the output does not end in `.jsonl`; or there is no "
            "such file, folder or split",
        ),
        _make_row(
            "unknown-form",
            "launch",
            "`data convert`: launch cannot convert rows of this form, or they need no conversion",
        ),
        _make_row(
            "unreadable-data",
            "launch",
            "`data convert`: a file that cannot be read here, such as Parquet without pyarrow",
        ),
        _make_row(
            "unknown-format",
            "launch",
            "`init --from`: the file belongs to no tool that launch knows",
        ),
        _make_row(
            "no-training",
            "launch",
            "`init --from`: the script starts no SFT or DPO training, starts none without "
            "arguments, or trains SFT on OLMo-core",
        ),
        _make_row(
            "no-counterpart converted",
            "launch",
            "`init --from`: flags and keys that a stage file cannot express; or those that you "
            "have to check",
        ),
        _make_row(
            "missing-source",
            "launch",
            "`init --from`: a config or script that the source names is not here, so its "
            "settings are missing",
        ),
        _make_row(
            "cut-command",
            "launch",
            "`init --from`: a comment between continued lines, or a blank after a backslash, "
            "which ends the command in bash",
        ),
        _make_row("no-such-key", "launch", "`explain`: no argument ever had that name"),
        _make_row(
            "bad-vary bad-variant",
            "launch",
            "`bench`: a `--vary` or `--variant` that cannot be parsed, a key that is varied "
            "twice, too many combinations, a commit of TRL",
        ),
        _make_row(
            "bad-time",
            "launch",
            "`bench`: `--timeout` cannot be parsed; `tune`: `--budget` cannot be parsed, or no "
            "trial fits into it",
        ),
        _make_row("no-gpu-here", "launch", "`bench` or `tune` without a GPU and without `--cpu`"),
        _make_row(
            "under-way",
            "launch",
            "the same `ladder`, `bench` or `tune` is running in another process",
        ),
        _make_row("would-overwrite", "launch", "`tune -o` names a file that `tune` did not write"),
    ),
)

_THE_REHEARSAL = CodeSection(
    title="The rehearsal",
    intro="",
    rows=(
        _make_row(
            "trainer-refuses",
            "trainer",
            "the training script raised this error, in its words; it disappears without the "
            "argument that is named",
        ),
        _make_row(
            "rehearsal-hangs rehearsal-crash",
            "trainer",
            "the script did not end in time, or its process died; the message says where it was",
        ),
        _make_row(
            "rehearsal-imports", "launch", "the trainer's Python cannot import the script (exit 5)"
        ),
        _make_row(
            "rehearsal-no-room no-space",
            "launch",
            "a rehearsal has no memory, no disk space, or no temporary folder",
        ),
        _make_row(
            "rehearsal-failed",
            "launch",
            "a note: launch's own code failed, so the rehearsal says nothing about the stage and "
            "refuses nothing. `launch rehearse` exits with 70, a start continues",
        ),
        _make_row("not-rehearsed", "launch", "a note: what one process on a CPU cannot show"),
        _make_row(
            "stand-in",
            "launch",
            "a note: what replaced a model, tokenizer, package or data set that is not on this "
            "machine",
        ),
        _make_row(
            "empty-rows nothing-to-learn",
            "trainer",
            "rows without a token, or without one that counts in the loss",
        ),
        _make_row(
            "rows-dropped",
            "trainer",
            "the trainer drops rows: how many of how many, by the size of its own data set, and "
            "why. A note in a plan if no rehearsal has counted them",
        ),
        _make_row("cut-rows", "trainer", "a tenth of the rows or more are cut off at the limit"),
        _make_row("no-end-token", "trainer", "fewer rows contain the end token than should"),
    ),
)

_THE_PREVIEW = CodeSection(
    title="The preview",
    intro=(
        "`launch preview` also says `trainer-refuses` (exit 3), `rehearsal-imports`, "
        "`rehearsal-hangs` and `rehearsal-crash` (exit 5)."
    ),
    rows=(
        _make_row(
            "absent-tokenizer absent-data",
            "launch",
            "the tokenizer or the data set is neither here nor in the hub's cache (exit 5)",
        ),
        _make_row(
            "no-such-row bad-row",
            "launch",
            "`--row` names a row that the data do not have, or is not a row (exit 2)",
        ),
        _make_row(
            "no-preview",
            "launch",
            "launch does not know how this script prepares its rows (exit 3)",
        ),
        _make_row(
            "preview-failed",
            "launch",
            "launch's own code failed, so it says nothing about the rows (exit 70)",
        ),
    ),
)

_PIPELINES = CodeSection(
    title="Pipelines",
    intro="",
    rows=(
        _make_row(
            "bad-pipeline",
            "launch",
            "a key or a value that a pipeline file does not accept; or a missing stage file",
        ),
        _make_row(
            "no-such-stage",
            "launch",
            "`--from`, `--until` or an override names no stage of the pipeline, or no stage is "
            "left between them",
        ),
        _make_row(
            "pipeline-model",
            "launch",
            "a stage names another model or tokenizer than the stage before produces; `from:` "
            "says which one you mean",
        ),
        _make_row(
            "pipeline-output",
            "launch",
            "the place of a stage's model is unknown beforehand, is another stage's place, or "
            "the stage saves none",
        ),
        _make_row(
            "pipeline-adapter",
            "run",
            "the stage before saves an adapter, which neither backend can load as a model",
        ),
        _make_row(
            "pipeline-probe",
            "run",
            "without the probe the pinned SFT script treats a local folder as a name on the hub",
        ),
        _make_row(
            "pipeline-template",
            "run or launch",
            "another chat template than the stage before; or `add_bos` with a template that "
            "begins with the token",
        ),
        _make_row(
            "pipeline-needs",
            "launch",
            "`--from`: the model that the stage begins with does not exist, or is being trained",
        ),
        _make_row("pipeline-running", "launch", "the same pipeline is running already"),
        _make_row(
            "no-eval-program",
            "launch",
            "the program of an `eval` is not beside the trainer's Python or on PATH",
        ),
        _make_row("eval-running", "launch", "another pipeline evaluates the same model"),
        _make_row(
            "eval-failed",
            "launch",
            "the command of an `eval` failed, or took longer than its `timeout`",
        ),
        _make_row(
            "eval-metrics",
            "launch",
            "the metrics file of an `eval` was not written, or holds no numbers",
        ),
        _make_row(
            "eval-gate",
            "launch",
            "a metric fails the `expect` of its `eval`, is missing or is not a number",
        ),
        _make_row(
            "pipeline-restarts",
            "launch",
            "a note: something has changed, so a stage is trained again, beside its old result",
        ),
    ),
)

_THE_TRAINED_MODEL = CodeSection(
    title="The trained model",
    intro="",
    rows=(
        _make_row(
            "no-final-model", "launch", "the run has not finished, or the folder has no model"
        ),
        _make_row("damaged-model", "launch", "files of the model are missing or cut off"),
        _make_row(
            "no-base-model",
            "launch",
            "no record and no adapter names the base model, or that model is gone",
        ),
        _make_row("no-prompt", "launch", "`chat` without a terminal needs a prompt"),
        _make_row(
            "template-refuses", "launch", "the chat template raises an error for this conversation"
        ),
        _make_row(
            "too-long-prompt",
            "launch",
            "the conversation leaves no room for an answer within the model's length",
        ),
        _make_row(
            "model-out-of-memory", "launch", "the model does not fit into the memory that is free"
        ),
        _make_row(
            "model-fails",
            "launch",
            "transformers or peft cannot load the model, or cannot generate with it",
        ),
        _make_row("not-an-adapter", "launch", "`merge` of a model that is not an adapter"),
        _make_row(
            "not-mergeable",
            "launch",
            "an adapter whose weights cannot be added, such as prompt tuning",
        ),
        _make_row(
            "quantised-base",
            "launch",
            "`merge` into a base that is stored in 4 or 8 bits; `--base` names another",
        ),
        _make_row("output-exists", "launch", "`merge` into a folder that exists"),
        _make_row("merge-runs", "launch", "another `merge` writes the same folder"),
        _make_row(
            "merge-differs", "launch", "the merged model's logits are not those of base and adapter"
        ),
        _make_row(
            "merged-unquantised",
            "launch",
            "a note: the adapter was trained on a base in 4 or 8 bits and merged into the full one",
        ),
        _make_row(
            "merge-loses-adapter", "launch", "rounding loses part of what the adapter changes"
        ),
        _make_row(
            "card-exists",
            "launch",
            "a README.md that launch did not write, or that was edited since",
        ),
    ),
)

SECTIONS = (
    _THE_FILE,
    _LAUNCH_OWN_OPTIONS,
    _ARGUMENTS,
    _MODEL_DEEPSPEED_OUTPUT_FOLDER,
    _THE_ROWS_OF_THE_DATA,
    _SOURCE_AND_MACHINE,
    _THE_REHEARSAL,
    _THE_PREVIEW,
    _PIPELINES,
    _THE_TRAINED_MODEL,
)


def find_rows(code: str) -> Iterator[tuple[CodeSection, Meaning]]:
    """Each row that lists a code; several commands may say it."""
    for section in SECTIONS:
        for row in section.rows:
            if code in row.codes:
                yield section, row


def list_codes() -> list[str]:
    return [code for section in SECTIONS for row in section.rows for code in row.codes]
