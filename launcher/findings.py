"""Every finding code, its layer and what it means.

`launch explain CODE` prints a row of this table, and `make docs` writes docs/findings.md from it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass


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


def _row(codes: str, layer: str, text: str) -> Meaning:
    return Meaning(codes=tuple(codes.split()), layer=layer, text=text)


_THE_FILE = CodeSection(
    title="The file",
    intro="",
    rows=(
        _row("missing-file", "launch", "there is no such file"),
        _row("not-a-file", "launch", "a directory, a socket, a device"),
        _row("unreadable-file", "launch", "no permission, or an error while reading"),
        _row("huge-file", "launch", "more than 4 MiB"),
        _row("binary-file", "launch", "holds NUL bytes"),
        _row("not-utf8", "launch", "not UTF-8 text"),
        _row("empty-file", "launch", "no YAML in it"),
        _row("broken-yaml", "launch", "YAML's own parser refuses it"),
        _row("bad-character", "launch", "a character that YAML, or a command line, cannot hold"),
        _row("several-documents", "launch", "more than one YAML document"),
        _row("not-a-mapping", "launch", "a list or a single value instead of keys and values"),
        _row(
            "too-deep too-large", "launch", "nested deeper than 64 levels; more than 100,000 values, aliases counted"
        ),
        _row("unknown-tag", "launch", "a YAML tag other than the plain types"),
        _row("duplicate-key", "launch", "the same key twice"),
        _row("bad-key", "launch", "a key that is no plain name"),
        _row("bad-args", "launch", "`args` is no mapping"),
        _row("exposed-secret", "launch", "a secret on a command line, which every user of the machine can read"),
        _row(
            "bad-extends missing-parent extends-cycle",
            "launch",
            "`extends` names no file, a missing one, or is circular",
        ),
        _row("interpolation", "launch", "a `${...}` that cannot be resolved"),
        _row("bad-override", "launch", "an override that is not `key=value`, or whose value is no YAML"),
    ),
)

_LAUNCH_OWN_OPTIONS = CodeSection(
    title="launch's own options",
    intro="",
    rows=(
        _row("unknown-option", "launch", "no option of a stage file"),
        _row("bad-stage bad-script", "launch", "`stage` or the script names nothing that launch starts"),
        _row("is-pipeline", "launch", "a pipeline where a stage file is wanted"),
        _row("foreign-file", "launch", "a script, or a file of another tool: `launch init --from` converts it"),
        _row("wrong-stage", "launch", "a DPO file given to `launch sft`, or the other way round"),
        _row(
            "bad-backend bad-deepspeed bad-mixed-precision bad-name bad-num-gpus",
            "launch",
            "a value that the option does not take",
        ),
        _row(
            "bad-on-violation bad-on-hang bad-probe bad-rehearse bad-samples",
            "launch",
            "how the probe watches: `stop` or `warn`; `report` or `stop`; `off` or its "
            "settings; whether to rehearse, a switch; how many samples, a whole number",
        ),
        _row("bad-batch", "launch", "`batch` is `{global: N, per_device: N}` with whole numbers above 0"),
        _row("bad-expect", "launch", "a point that no verdict has, or a state that cannot be expected of it"),
        _row("batch-twice", "launch", "the batch is set both by `batch:` and by an argument"),
        _row(
            "impossible-batch",
            "launch",
            "the global batch cannot be split, by the rows of a micro-batch on any number of "
            "GPUs, or on the GPUs of the plan; names the nearest that can",
        ),
        _row("derived", "launch", "a note: launch set an argument, and why"),
    ),
)

_ARGUMENTS = CodeSection(
    title="Arguments",
    intro="",
    rows=(
        _row("unknown-key", "parser", "the entry script has no such argument, or an entry of `datasets` no such key"),
        _row(
            "removed-key renamed-key",
            "parser or launch",
            "it had, or the other stage or backend has; of a key that changed what was "
            "trained: what it did, and what holds now",
        ),
        _row(
            "lost-meaning",
            "launch",
            "such a key, which `--fix` has made a comment, `# lost: reduce_loss: sum`: a "
            "warning until the comment is deleted",
        ),
        _row("abbreviated-key", "launch", "argparse would take it for a longer name without a word"),
        _row("negated-key", "parser or launch", "`no_x: ...` instead of `x: false`"),
        _row("missing-argument", "parser", "a field without a default that neither the file nor launch gives"),
        _row("bad-value", "parser or launch", "a value of the wrong type, number of words, or choice"),
        _row("bool-as-text", "run", "YAML reads a bool where upstream takes text"),
        _row(
            "two-data-sources",
            "parser or run",
            "`dataset_name` or `dataset_mixer` beside the mixer list; for TRL `dataset_name` beside `datasets`",
        ),
        _row("beaker-without-push", "parser", "`push_to_hub: false` without `try_launch_beaker_eval_jobs: false`"),
        _row(
            "final-lr-scheduler final-lr-range",
            "parser",
            "`final_lr_ratio` with another schedule than linear, or outside 0..1",
        ),
        _row("bad-json", "parser", "a text that begins with a brace and is no JSON"),
        _row(
            "zero-stage offload-without-zero3", "parser", "`zero_stage` outside 0..3; `offload_param` without stage 3"
        ),
        _row(
            "two-precisions loss-weights logging-steps pad-multiple",
            "parser",
            "TRL: `fp16` with `bf16`; weights that do not match; `logging_steps: 0`; a "
            "padding multiple that is no number",
        ),
        _row("no-model", "run", "no model named"),
        _row("no-data", "launch or run", "no data named: open-instruct's SFT would train on a small default set"),
        _row("one-sample", "run", "the mixer amount `1` is one sample, `1.0` is all of it"),
        _row("odd-mixer-list mixer-amount json-data", "run", "a mixer list that crashes when it is read"),
        _row(
            "mixer-splits",
            "run",
            "open-instruct: `dataset_mixer_list_splits` (`mixer_list_splits`) has neither "
            "one entry nor as many as the mixer list has, names and amounts counted: it "
            "crashes. The split of a set stands at the place of its name; a warning where "
            "one at the place of an amount differs, which is not read. A local file has the "
            "split `train` alone",
        ),
        _row(
            "missing-data", "run", "a local data file or folder that is not there; an error when the run is to start"
        ),
        _row(
            "bad-dataset",
            "parser or run",
            "TRL: an entry of `datasets` without `path`, of a wrong type or without rows; a list in quotes for a name",
        ),
        _row("bad-fraction", "run", "TRL: a `fraction` for some sets and not for others, below 0, or of a stream"),
        _row(
            "bad-test-split",
            "run",
            "TRL: `test_split_size` is neither a number of rows nor a share between 0 and 1, "
            "leaves nothing to train on, or is asked of a stream",
        ),
        _row(
            "unseeded-split",
            "run",
            "TRL: `test_split_size` draws other rows in every process and at every start: a "
            "warning on several GPUs, a note on one",
        ),
        _row("entity-twice", "run", "`hf_repo_id` holds an entity: it would be pushed to `entity/entity/name`"),
        _row("push-by-default", "run", "`push_to_hub` is not set, and defaults to true"),
        _row("tracking-needs-wandb", "run", "`with_tracking` with a `report_to` without wandb crashes"),
        _row("no-checkpoints", "run", "a run that may be long, without checkpoints"),
        _row("checkpoint-steps", "run", "neither `epoch` nor a number"),
        _row("max-train-samples", "run", "DPO: crashes in the reference cache"),
        _row("liger-with-lora", "run", "TRL: measured at half the speed"),
        _row(
            "out-of-range",
            "run",
            "a number that the optimizer, peft, numpy or torch's loader refuses, or with "
            "which nothing is trained, printed or kept, or the wrong answers are preferred "
            "(`beta`, `label_smoothing`)",
        ),
        _row(
            "lora-targets",
            "run",
            "TRL: a single word in `lora_target_modules`, which is a pattern, or several "
            "names in one; `lm_head`, on which it refuses an adapter",
        ),
        _row(
            "lora-on-tied",
            "run",
            "TRL: LoRA, or a copy by `lora_modules_to_save`, on the embedding or the output "
            "layer of a model that has one matrix for both: a merged adapter acts on both, a "
            "copy unties them",
        ),
        _row("unknown-template", "run", "no chat template of that name: upstream silently uses the tokenizer's own"),
        _row("unknown-function", "run", "no tokenizer function or transform of that name"),
        _row(
            "model-arguments-unread",
            "run",
            "`additional_model_arguments` holds what upstream gives itself: it is not read",
        ),
        _row("cache-key", "run", "a cache key of one's own: the data are not read, and the set must be in the cache"),
        _row("resume-unread", "run", "`resume_from_checkpoint` is never read"),
        _row("qlora-without-lora", "run", "no adapter: the quantised weights are frozen"),
        _row(
            "scheduler-type",
            "run",
            "DPO: no schedule of that name, or one that needs more than numbers of steps: it "
            "crashes once the model is loaded",
        ),
        _row("warmup-unread", "run", "`lr_scheduler_type: constant` has no warm-up"),
        _row(
            "endless-warmup",
            "run",
            "the warm-up takes at least as many steps as are planned: the learning rate never gets to its value",
        ),
        _row(
            "checkpoint-sign",
            "run",
            "a negative `checkpointing_steps` saves as often as a positive one: `-1` every step",
        ),
        _row("unexpanded-path", "run", "a folder named with `~` or `$NAME`, which upstream does not expand"),
        _row("two-zero-stages", "run", "DPO: `zero_stage` replaces the DeepSpeed file"),
        _row(
            "clipping-unread",
            "run",
            "with DeepSpeed its file says where gradients are clipped, and whether they are: `auto` is 1.0",
        ),
        _row("tokenising-outlasts", "run", "tokenising takes longer than `timeout`: the other processes give up"),
        _row("remote-code", "run", "`trust_remote_code` or a relative of it: code of the repository runs as you"),
        _row(
            "no-wandb-key no-hub-token",
            "run",
            "`with_tracking`, `push_to_hub` without anyone logged in; errors when the run is to start",
        ),
        _row(
            "eval-steps whole-steps best-model-strategy best-model-steps scheduler-needs-eval",
            "parser",
            "TRL: evaluating by steps without a number; steps above 1 that are not whole; "
            "`load_best_model_at_end` against what is saved and evaluated; a schedule that "
            "needs evaluation",
        ),
        _row(
            "negative-warmup prefetch-workers empty-cache-steps parallelism-config",
            "parser",
            "TRL: values that `__post_init__` refuses",
        ),
        _row("eval-without-data", "run", "TRL: `eval_on_start` with `eval_strategy: no`, which hands over no set"),
        _row(
            "best-without-eval warmup-unread padding-free-off", "run", "TRL: values that do nothing, or nothing good"
        ),
        _row(
            "resume-word stream-without-steps no-such-split quantised-whole two-engines fsdp-alone",
            "run",
            "TRL: what the trainer refuses later, from arguments and what lies here",
        ),
        _row("packing-without-length padding-free-length", "run", "TRL's SFT: the same"),
        _row(
            "zero-beta",
            "run",
            "DPO: `beta: 0`: TRL divides by it in some losses; the others, and "
            "open-instruct, learn no preference (a warning)",
        ),
        _row(
            "reversed-gradient",
            "run",
            "DPO since #1591: `max_grad_norm` below 0 reverses the gradient (with DeepSpeed it is not read), and 0 "
            "makes it nothing in dpo.py",
        ),
        _row(
            "packing-refused", "run", "OLMo-core's packed rows without flash-attn's attention (of dpo.py since #1670)"
        ),
        _row(
            "olmo-tokenizer",
            "run",
            "a tokenizer of OLMo's, by its config or (since #1622) its name, with `add_bos` or `use_fast` as its "
            "template does not allow",
        ),
        _row("not-with-olmo-core", "run", "`script: dpo_olmo_core`: LoRA, 8-bit and paged optimizers, QLoRA"),
        _row(
            "unsupported-model other-shape",
            "run",
            "dpo.py: no model that OLMo-core can build; a model whose weights do not fit the "
            "shape that `config_name`, or its own name, stands for: another family, other "
            "sizes, fewer layers, each with what differs (a warning: OLMo-2 as OLMo-3, or "
            "the other way round)",
        ),
        _row(
            "offline-hub-model",
            "run",
            "dpo.py: a hub name where HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set: "
            "OLMo-core asks the hub after tokenising and crashes, whatever the cache holds; "
            "a warning until a run is to start",
        ),
        _row("no-length", "run", "dpo.py crashes without `max_seq_length`"),
        _row(
            "scheduler-replaced",
            "run",
            "dpo.py: a schedule that becomes a constant rate (notes: `cosine` ends at a "
            "tenth, `constant` warms up); a loss that adds nothing",
        ),
        _row("budget-without-compile", "run", "dpo.py: `activation_memory_budget` acts under `compile_model` alone"),
        _row(
            "rope-scaling",
            "run",
            "dpo.py since #1620: `rope_scaling_factor` is not in the saved config.json; "
            "of a hybrid model it is refused",
        ),
        _row(
            "accumulation-packed",
            "run",
            "dpo.py: packed, a step is one row: accumulation only raises how many pairs may stand in it",
        ),
        _row(
            "too-few-rows",
            "run",
            "dpo.py: fewer rows than one step of all GPUs, or than half of the reference pass's batch",
        ),
        _row(
            "resume-unjudged",
            "run",
            "OLMo-core will continue from a checkpoint in the output folder, which launch does not judge",
        ),
        _row(
            "no-hf-export",
            "run",
            "dpo.py: of Qwen3 and Llama shapes it saves a state dict under OLMo-core's "
            "names, which from_pretrained does not read",
        ),
        _row(
            "context-parallel",
            "run",
            "`cp_degree`: several rows a micro-batch, GPUs that it does not divide, or a package that is not there",
        ),
        _row("shard-degree", "run", "dpo.py: FSDP or tensor degrees that do not divide the processes"),
        _row("deepspeed-with-torchrun", "launch", "`deepspeed` with a script that shards with FSDP"),
        _row("no-compiler", "run", "`compile_model` where there is no C compiler"),
        _row(
            "unread-key", "run", "nothing on the script's path reads it; a note where it is the empty default anyway"
        ),
        _row("conditional-key", "run", "it is read only under a condition that this config makes false"),
        _row("shadowed-key", "run", "it is read only where another argument has already decided"),
        _row(
            "refused-by-source",
            "parser or run",
            "the source raises for these values; found by reading it, not by a rule",
        ),
        _row("bf16-on-cpu cpu-beside-gpus", "run", "TRL: refused without a GPU; `use_cpu` with GPUs asked for"),
        _row(
            "own-deepspeed", "launch", "TRL's own `deepspeed`: launch's option beside `args:` is the one that is read"
        ),
        _row("fsdp-unsaved", "run", "TRL: FSDP that saves no final model"),
        _row("deepspeed-mismatch", "run", "TRL: DeepSpeed values that are not the arguments'"),
        _row(
            "fp16-weights",
            "run",
            "TRL: `fp16` trains weights of float16 or bfloat16 (`dtype`, the model's own "
            "with `auto`, `lora_modules_to_save`, adapters of quantised models): the "
            "gradient scaler refuses the first step. Not with DeepSpeed or FSDP, which keep "
            "copies in float32",
        ),
        _row(
            "steps-rounded",
            "run",
            "bfloat16 weights without copies in float32, and a learning rate whose steps "
            "round away on most of them; from which size on, and which share can change",
        ),
        _row(
            "mixed-precision-unread",
            "run",
            "TRL: `bf16` / `fp16` win over `mixed_precision:`; dpo.py: FSDP computes in bfloat16",
        ),
        _row("unknown-attention flash-in-float32", "run", "TRL: no such attention; flash attention without 16 bits"),
        _row(
            "packing-leaks",
            "run",
            "TRL, and DPO of open-instruct (dpo.py; the other script on a CPU): examples in "
            "a row attend to each other",
        ),
        _row("attention-fallback", "run", "TRL: a note: which of `attention:` cannot be had here, and why"),
        _row("attention-twice", "launch", "TRL: `attention:` and an argument both name the attention"),
        _row(
            "impossible-expectation",
            "launch",
            "`expect:` wants Liger or packing proved, and the arguments do not ask for it, "
            "or leave nothing to pack; a warning under `on_violation: warn`, and where a "
            "trend is wanted of fewer steps than can show one",
        ),
        _row(
            "optim-unread optim-replaced",
            "run",
            "TRL: the DeepSpeed config has its own optimizer, or offloads it and makes an Adam of it",
        ),
        _row("no-compiler", "run", "torch.compile without a C or C++ compiler"),
        _row("compile-lengths", "run", "TRL: `torch_compile` with rows of any length compiles again and again"),
        _row("reference-price", "run", "TRL: a note: what reference log-probs computed beforehand cost"),
        _row(
            "reference-rounded",
            "run",
            "TRL: under DeepSpeed in bf16 or fp16 precomputed reference log-probs are "
            "rounded to it: the loss is wrong from the first step on",
        ),
        _row(
            "optim-missing quantiser-missing report-missing",
            "run",
            "the package of an optimizer, of quantised weights or of a tracker is not "
            "installed; known once the trainer's Python is (a start, a rehearsal). A warning "
            "where open-instruct leaves the tracker out",
        ),
        _row("optim-targets", "run", "TRL: a GaLore or APOLLO optimizer without `optim_target_modules`"),
        _row("report-unknown", "run", "a name that is no tracker; `none` or `all` beside others"),
        _row("no-output", "run", "an empty `output_dir`"),
        _row("sequence-split", "run", "open-instruct: `sequence_parallel_size` does not divide the processes"),
        _row(
            "data-file",
            "run",
            "TRL: `dataset_name` is a file, or the name of a reader of `datasets` such as `json`; name the folder",
        ),
        _row(
            "inline-template",
            "run",
            "a template's text where the trainer takes the name or path of one, or under a "
            "key that no script has (layer `parser` or `launch`): write it to a file",
        ),
        _row(
            "impossible-name",
            "run",
            "a model, tokenizer or data set whose name no folder and nothing on the hub can "
            "have: too long, with a line end, a template's text",
        ),
        _row(
            "missing-template",
            "run",
            "TRL: no file, folder or hub name, or conversations for a tokenizer that has none",
        ),
        _row(
            "resume-missing resume-finished not-resumed",
            "run",
            "TRL: no checkpoint; nothing left to train; an output folder with whole "
            "checkpoints, and no record that tells whose they are",
        ),
        _row("no-process-group", "run", "open-instruct's DPO on one GPU without DeepSpeed has no process group"),
        _row("deepspeed-left-out", "launch", "`deepspeed` is set and the run is on the CPU"),
    ),
)

_MODEL_DEEPSPEED_OUTPUT_FOLDER = CodeSection(
    title="Model, DeepSpeed, output folder",
    intro="",
    rows=(
        _row(
            "deepspeed-no-zero deepspeed-no-batch deepspeed-optimizer deepspeed-precision",
            "run",
            "what accelerate refuses in a DeepSpeed file",
        ),
        _row("deepspeed-batch", "run", "its `train_batch_size` is not rows x passes x devices"),
        _row(
            "deepspeed-accumulation",
            "run",
            "its accumulation wins over upstream's, which goes on counting with its own",
        ),
        _row("zero3-unsaved", "run", "ZeRO-3 that cannot gather the weights crashes when the model is saved"),
        _row(
            "fp16-over-bf16",
            "run",
            "upstream loads the model in bfloat16: an error without DeepSpeed and LoRA, "
            "where the gradient scaler refuses it",
        ),
        _row("qlora-deepspeed", "run", "a quantised model with DeepSpeed (ZeRO-3 crashes), or without a GPU"),
        _row("lora-biases", "run", "LoRA on a model with biases crashes with ZeRO-1 and 2"),
        _row(
            "empty-group",
            "run",
            "finetune.py and dpo_tune_cache.py of older commits: under DeepSpeed a model without "
            "biases fails in its first step with a ValueError",
        ),
        _row(
            "lora-zero3-checkpointing",
            "run",
            "finetune.py: LoRA's frozen weights are gone when ZeRO-3 computes a layer again",
        ),
        _row(
            "liger-unknown-model liger-on-cpu",
            "run",
            "Liger has no kernels for this model, not the fused loss that SFT asks for "
            "(Granite), or no GPU to run them",
        ),
        _row("beyond-positions", "run", "longer than the model was made for (its config lies here)"),
        _row("packing-without-flash", "run", "measured slower than padding"),
        _row(
            "overlap-corrupts",
            "run",
            "ZeRO 1 or 2 with `overlap_comm` and a DeepSpeed that corrupts gradients with "
            "it; `--allow-corrupting-overlap` starts it ([gradients](gradients.md))",
        ),
        _row(
            "accumulation-lost",
            "run",
            "ZeRO-2 under DeepSpeed 0.17.6 to 0.18.2, which keeps only the last micro-batch of a step",
        ),
        _row(
            "corrupt-baseline",
            "run",
            "`bench`, `tune`: the first variant trained on corrupt gradients, nothing is compared with it",
        ),
        _row(
            "packing-of-one",
            "run",
            "SFT: packing joins the rows of a micro-batch, which is one row: it does nothing (TRL: `padding_free`)",
        ),
        _row("attention-missing", "run", "DPO: an attention implementation that is not installed"),
        _row(
            "missing-model", "run", "a file, or neither a folder here nor a hub name (said when the run is to start)"
        ),
        _row(
            "incomplete-model incomplete-tokenizer",
            "run",
            "a local folder (or, offline, what the hub's cache holds) that cannot be loaded: "
            "no config, no weights, files that are missing, cut off or git-lfs pointers, "
            "weights that are not the config's, a tokenizer without words; a warning before "
            "something is to start, and then nothing of a folder that holds a config alone",
        ),
        _row(
            "adapter-alone",
            "run",
            "an adapter's folder (adapter_config.json without a model) as the model: the "
            "command that merges it; an error when the run is to start",
        ),
        _row(
            "tokens-beyond-embedding",
            "run",
            "TRL, dpo.py: the tokenizer has more tokens than the embedding rows, with both "
            "sizes: an error where the pad or end token has no row and is in the first "
            "batches; `pad_token_id` and others in config.json beyond the rows",
        ),
        _row(
            "embedding-resized",
            "run",
            "open-instruct adds the rows that its tokenizer needs: a note; a warning with "
            "LoRA, which does not train them",
        ),
        _row(
            "foreign-checkpoints",
            "run",
            "the output folder holds checkpoints of another run, from which upstream would resume",
        ),
        _row("finished-output", "run", "the output folder holds a trained model already"),
        _row(
            "unintended-output",
            "launch",
            "`output_dir` holds a `~` or `$NAME` that no trainer expands, or is a folder "
            "that nobody means: `/`, the working or home folder or one above, the data's or "
            "the model's own folder, the checkout, launch's own folder or caches, the folder "
            "of the runs, a folder of the system",
        ),
        _row(
            "nested-output",
            "launch",
            "at a start and in its dry run: the output is, holds or lies in a run folder, or "
            "lies inside or above the output of another run, live or finished",
        ),
        _row(
            "foreign-files",
            "launch",
            "at a start and in its dry run: the output folder holds files that no run of launch made; three are named",
        ),
    ),
)

_THE_ROWS_OF_THE_DATA = CodeSection(
    title="The rows of the data",
    intro=(
        "All rows are looked at, of local files and of data sets in the hub's cache; each "
        "finding names the first row that it is about ([the page on "
        "data](data.md#what-launch-looks-at))."
    ),
    rows=(
        _row(
            "bad-data",
            "run",
            "rows or files that `datasets` refuses: not JSON, not UTF-8, cut off, no rows, "
            "what git-lfs has not fetched, a folder of `Dataset.save_to_disk`. `init`: data "
            "that need `launch data convert` first, or a file in a folder that holds more "
            "than data. `data convert`: a row that has not the form of the others",
        ),
        _row("unseen-data", "run", "a note: rows that were not looked at, and why"),
        _row(
            "pair-lengths",
            "run",
            "TRL: DPO is to draw pairs by their lengths, and the rows have no column with them, or TRL drops it",
        ),
        _row(
            "unlike-micro-batches",
            "run",
            "TRL: DPO weighs micro-batches alike, whatever their number of pairs, so that long pairs count more",
        ),
        _row(
            "data-columns",
            "run",
            "the rows lack the columns that the trainer reads, the columns do not go "
            "together, or one of them is taken for something else; the help names the "
            "conversion of a known form",
        ),
        _row(
            "data-types",
            "run",
            "a column holds another type in some rows, nothing, or an empty list. A warning "
            "where nothing reads the column",
        ),
        _row(
            "no-answers",
            "run",
            "chats or pairs without a message of `assistant`: open-instruct drops the row, "
            "TRL trains on the question. Tokenised rows whose `labels` are all -100",
        ),
        _row("empty-answers", "run", "an answer without text: only the end of the turn is trained on"),
        _row(
            "no-prompt",
            "run",
            "DPO: pairs that would train without their prompt, because no column that is "
            "read holds it. A question without text",
        ),
        _row("prompt-twice", "run", "the prompt stands in `prompt` and again at the start of the answer"),
        _row(
            "equal-pairs",
            "run",
            "DPO: `chosen` equals `rejected` in all that a template writes; such a pair has no gradient",
        ),
        _row(
            "repeated-rows",
            "run",
            "rows that repeat an earlier row word for word: a note, a warning where they are more than half",
        ),
        _row(
            "odd-messages",
            "run",
            "a message without `role` or text content; most templates end there. A message "
            "of `weight: 0`, which is trained on all the same",
        ),
        _row(
            "odd-roles",
            "run",
            "roles that chat templates do not know, such as ShareGPT's `human` and `gpt`; a "
            "turn of the user in what DPO compares",
        ),
        _row(
            "no-chat-format",
            "run",
            "TRL: prompts and answers as text, to which the model's chat template is not applied",
        ),
        _row(
            "template-drops-tools",
            "run",
            "the rows have tool calls or `tools`, and the chat template does not write them",
        ),
        _row(
            "doubled-bos", "run", "TRL: the texts begin with the token that the tokenizer adds in front of every text"
        ),
    ),
)

_SOURCE_AND_MACHINE = CodeSection(
    title="Source and machine",
    intro="",
    rows=(
        _row("no-checkout", "launch", "a path that holds no open-instruct checkout, or none found"),
        _row("unpinned-checkout", "launch", "the checkout is at no known commit, or edited: names the commits"),
        _row("other-version", "launch", "a note: TRL or transformers differ from the pair that was tested"),
        _row("unreadable-source", "launch", "another commit's layout lacks the dataclasses"),
        _row("no-python old-python", "launch", "the trainer's Python does not run (exit code 5), or is too old"),
        _row(
            "no-trainer",
            "launch",
            "the Python that `--python` or `LAUNCH_PYTHON` names lacks TRL or transformers, "
            "so that there is nothing to judge by: exit code 5; a warning where only a plan "
            "is made, by the tested pair",
        ),
        _row("missing-packages", "launch", "what the entry script needs and the trainer's Python lacks"),
        _row("no-gpus too-few-gpus", "launch", "`--gpus` is missing; more asked for than are here"),
        _row(
            "import-error",
            "launch",
            "a package is there and fails to import: the exception, and the line that raised it; `launch doctor` only",
        ),
        _row("empty-submodule", "launch", "a note: the submodule is empty while another checkout is used"),
        _row(
            "gpus-taken busy-gpu",
            "launch",
            "too few free GPUs, or one that another run holds; a named one that something else uses",
        ),
        _row("no-such-gpu bad-devices", "launch", "`--devices` names what is not here, or contradicts `--gpus`"),
        _row(
            "no-driver cpu-torch old-driver cuda-unusable",
            "launch",
            "nvidia-smi complains, or does not answer; torch is built for the CPU, for a "
            "newer driver, or does not see the GPUs",
        ),
        _row(
            "tool-hangs",
            "launch",
            "nvidia-smi, git, squeue or tmux did not answer within `LAUNCH_TOOL_TIMEOUT` (5 "
            "s); the command went on without it",
        ),
        _row("small-shm", "launch", "little shared memory"),
        _row(
            "too-little-space little-space",
            "launch",
            "the disk does not hold what will certainly be written, or hardly",
        ),
        _row("several-nodes", "launch", "a note: the same command runs on each machine"),
        _row(
            "no-node-rank no-main-address",
            "launch",
            "several machines, and not said which one this is, or where the first one is",
        ),
        _row("bad-node-rank bad-main-address", "launch", "no such machine; no `HOST[:PORT]`"),
        _row("wrong-step", "launch", "Slurm started another number of processes than the run takes"),
        _row("port-taken", "launch", "the first machine's port is in use"),
        _row(
            "bad-slurm reserved-slurm-option bad-slurm-option",
            "launch",
            "`slurm:`: no mapping, an option that the run decides on, a name or value that cannot be one of sbatch's",
        ),
        _row("slurm-one-cpu", "launch", "the job asks for one core of each machine"),
        _row("slurm-failed", "launch", "sbatch or scancel is missing, does not answer, or refused"),
        _row(
            "no-progress",
            "launch",
            "the job's time was up before it reached another checkpoint: queued again it would never end",
        ),
        _row(
            "bad-gates unknown-gate bad-gate",
            "launch",
            "`gates:` is no mapping, names no gate, or a limit that is none",
        ),
        _row("uncut-data", "launch", "a note: TRL tokenises all rows for a short run, because it takes a split whole"),
        _row(
            "short-schedule", "launch", "a note: the learning rate goes through warm-up and decay within the short run"
        ),
        _row(
            "deepspeed-off deepspeed-kept",
            "launch",
            "notes: a ladder's rung on one GPU goes without DeepSpeed, or with it, and why",
        ),
        _row("batch-not-constant", "launch", "the rungs of a ladder train with different global batches"),
        _row(
            "reference-gone", "run", "resuming DPO without its reference: the half-trained model would become its own"
        ),
        _row(
            "model-not-here",
            "run",
            "a note: a hub model that is not in the hub's cache: the reference is keyed by its name",
        ),
        _row("cache-not-writable", "launch", "the cache folder cannot be written"),
        _row("bad-age", "launch", "`cache clear`: no age"),
        _row(
            "not-confirmed output-kept not-removed",
            "launch",
            "`rm`, `cache clear`: deletes only with `--yes` or `--all` where nobody can be "
            "asked; the output folder is another user's, or lies in the run folder, or "
            "another run's output is, holds or lies in it; a folder cannot be removed "
            "([security](security.md))",
        ),
        _row(
            "probe-needed no-probe",
            "run or launch",
            "without the probe: the pinned scripts cannot run on a CPU; nothing is counted or enforced",
        ),
        _row("bad-command-line", "launch", "with `--format json`: the command line cannot be parsed (exit 2)"),
        _row(
            "disk-full",
            "launch",
            "a disk or a quota is full, and the answer, or a file of launch's, could not be written",
        ),
        _row(
            "resource-limit",
            "launch",
            "a limit on memory, open files, processes or the size of files stopped the "
            "command; `ulimit -a` shows those of the shell (exit 5)",
        ),
        _row("no-cwd", "launch", "the folder that the shell is in has been removed"),
        _row("runs-not-writable", "launch", "the run folder cannot be written"),
        _row(
            "run-is-live",
            "launch",
            "a run into this output folder is still going on, or may be: it has the folder's lease",
        ),
        _row(
            "bad-lease",
            "launch",
            "a link, a file or a folder lies where the lease of an output folder, or the folder of it, must be",
        ),
        _row("not-started", "launch", "the command could not be started"),
        _row("resumes", "launch", "a note: from which checkpoint the run goes on, and how many steps are left"),
        _row(
            "already-finished",
            "launch",
            "a note: the run is finished; the exit code is that of its verdict, by what is "
            "expected now. An error where its run folder is gone",
        ),
        _row("finished-changed", "run", "it is finished, and what was asked for has changed since: `--fresh`"),
        _row(
            "earlier-run",
            "launch",
            "`--dry-run` into the output of a run here, which the printed command may overwrite",
        ),
        _row("nothing-to-resume", "launch", "no complete checkpoint: it starts over"),
        _row(
            "resume-changed",
            "run or launch",
            "something is not as it was when the checkpoint was saved, and what that does",
        ),
        _row(
            "resume-inexact",
            "run or launch",
            "the place in the data would be wrong; beforehand, which step counts are exact",
        ),
        _row("resume-earlier", "launch", "it goes back to a checkpoint whose place is exact"),
        _row(
            "damaged-checkpoint",
            "launch",
            "a checkpoint whose bytes are not those that were saved is left out for an older one",
        ),
        _row("set-aside not-set-aside", "launch", "newer checkpoints are moved out of upstream's way, or cannot be"),
        _row(
            "checkpoint-name broken-checkpoint",
            "run",
            "a name on which upstream's look-up crashes; an incomplete checkpoint that it would take",
        ),
        _row(
            "no-checkpoints", "launch", "nothing will be there to resume from, or too late, or without the optimizer"
        ),
        _row("unknown-change", "launch", "`--allow-changed-resume` names nothing that can change"),
        _row(
            "unknown-shape unknown-lengths unknown-memory unknown-device",
            "launch",
            "`plan`: no config of the model, no row lengths (a note: memory without "
            "activations is planned), a set-up whose memory is not described (of the CPU a "
            "note), a GPU whose speed is not known",
        ),
        _row(
            "half-wasted",
            "launch",
            "`plan`: more than half of what a packed step computes is empty; which batch would fill it",
        ),
        _row(
            "out-of-memory half-empty",
            "launch",
            "`plan`: it does not fit, by how much, because of what, and which settings would; a larger batch would",
        ),
        _row("nothing-fits", "launch", "`plan --fit`: a note: no split of the batch fits"),
        _row(
            "no-steps caches-only",
            "run or launch",
            "`plan`: not one step is trained; the run ends after tokenising, or after "
            "dpo.py's reference pass, and has nothing to plan",
        ),
        _row(
            "row-tokens bad-attention bad-gpus bad-gpu-memory bad-tokens-per-second "
            "bad-price price-without-gpus speed-of-several fit-without-memory",
            "launch",
            "`plan`, `tune`: a value that cannot be, or that says nothing without another",
        ),
        _row("unknown-cost", "launch", "`plan`: a price, and no time to pay for"),
        _row(
            "cut-samples",
            "launch",
            "olmo_core_finetune.py: OLMo-core ends a document at every end-of-text token, and splits samples there",
        ),
        _row(
            "would-miss",
            "launch",
            "`prepare`: the run would not find what was, or could be, tokenised beforehand; exit 1",
        ),
        _row(
            "not-fetched incomplete-model",
            "launch",
            "`prepare`: a model or tokenizer is neither here nor to be had from the hub; its folder cannot be loaded",
        ),
        _row("tokenising-failed", "run", "`prepare`: upstream's script failed before the data were ready; exit 4"),
        _row("not-a-training-log", "launch", "`check` or `report` of a text in which nothing is a trainer's"),
        _row("no-such-run ambiguous-run", "launch", "no run of that name, or several"),
        _row("no-such-log", "launch", "a run without a log of that attempt"),
        _row("not-prepared", "launch", "a run folder in which no attempt waits to be started"),
        _row(
            "no-keeper", "launch", "the supervisor ended before training began; the help is the last line of its log"
        ),
        _row(
            "not-your-run",
            "launch",
            "`exec`: another user could have written what the run folder would start: folder "
            "or `start.json` is not this user's own, is writable by others, or is a link",
        ),
        _row(
            "start-changed",
            "launch",
            "`start.json` was changed between its writing and the start of training, by another user or another start",
        ),
        _row(
            "not-your-process",
            "launch",
            "`stop`: a record names a process or a job that is not known to be the run's: "
            "its environment does not name the run, or others may write the record",
        ),
        _row(
            "run-is-a-copy",
            "launch",
            "`stop`, `attach`: the folder is a copy of a run, whose processes are not its own",
        ),
        _row(
            "damaged-record",
            "launch",
            "`check`: a record holds something of another type than launch wrote; it is left out",
        ),
        _row("bad-lease", "launch", "a lease in the output folder has a number that cannot be followed: delete it"),
        _row(
            "not-running run-is-elsewhere",
            "launch",
            "a run to be stopped that is over; one of another machine or container, without "
            "a heartbeat: its state is unknown here",
        ),
        _row(
            "bad-grace",
            "launch",
            "`LAUNCH_GRACE` is not up to three numbers of seconds, or `LAUNCH_SAVE_GRACE` not one",
        ),
        _row(
            "bad-on-finish",
            "launch",
            "`--on-finish` has no command, a quote is left open, or its program cannot be started here",
        ),
        _row("useless-option", "launch", "an option that does nothing with, or without, another one"),
        _row("not-begun", "launch", "`attach` to, or `check` of, a run that waits to be started"),
        _row(
            "unwritable-file file-changed",
            "launch",
            "`--fix`, `report`, `tune -o`: the file cannot be written, or was changed in the meantime",
        ),
        _row(
            "unknown-commit no-repository",
            "launch",
            "`pin diff`, `pin move`: a name that the repository does not know; no git repository to read",
        ),
        _row(
            "no-clone no-pin",
            "launch",
            "`pin move`: this launch is not run from a clone of its repository, or the clone names no pin",
        ),
        _row(
            "move-interrupted no-golden",
            "launch",
            "`pin move`: a file was changed after an earlier move was interrupted, or git cannot record the commit; "
            "the tests that write golden files do not run",
        ),
        _row(
            "stale-citation",
            "launch",
            "`pin move`: a line that launch cites is not in the new commit, or no longer told apart from others",
        ),
        _row(
            "unconfirmed-rule",
            "launch",
            "`pin move`: what a rule cites changed; the rule is a note at this commit until somebody confirms it",
        ),
        _row("golden-differs", "launch", "`pin move`: a test of the golden files fails at the new commit"),
        _row("not-writable", "launch", "a folder that the run writes to: its output, a cache"),
        _row("no-such-config", "launch", "`configs copy`: no shipped stage file of that name"),
        _row("no-input", "launch", "`init`: the model or the data are not given"),
        _row("output-exists", "launch", "`init`, `configs copy`, `data convert`: a file that would be overwritten"),
        _row(
            "bad-output no-such-data",
            "launch",
            "`data convert`: the output is not named `.jsonl`; there is no such file or "
            "folder, or it has no such split",
        ),
        _row(
            "unknown-form",
            "launch",
            "`data convert`: the rows have no form that launch can convert, or need no conversion",
        ),
        _row(
            "unreadable-data",
            "launch",
            "`data convert`: a file that cannot be read here, such as Parquet without pyarrow",
        ),
        _row("unknown-format", "launch", "`init --from`: a file that no tool which launch knows trains with"),
        _row(
            "no-training",
            "launch",
            "`init --from`: a script that starts no SFT or DPO training, none without arguments, or SFT on OLMo-core",
        ),
        _row(
            "no-counterpart converted",
            "launch",
            "`init --from`: flags and keys that the stage file cannot say; those that have to be checked by hand",
        ),
        _row(
            "missing-source",
            "launch",
            "`init --from`: a config or script that the source names and that is not here: what it says is missing",
        ),
        _row(
            "cut-command",
            "launch",
            "`init --from`: a comment between continued lines, or a blank behind a backslash, ends a command in bash",
        ),
        _row("no-such-key", "launch", "`explain`: nothing ever had that name"),
        _row(
            "bad-vary bad-variant",
            "launch",
            "`bench`: a `--vary` or `--variant` that cannot be read, a key that is varied "
            "twice, too many combinations, a commit of TRL",
        ),
        _row(
            "bad-time", "launch", "`bench`: `--timeout` cannot be read; `tune`: `--budget`, or no trial fits into it"
        ),
        _row("no-gpu-here", "launch", "`bench` or `tune` without a GPU and without `--cpu`"),
        _row("under-way", "launch", "the same `ladder`, `bench` or `tune` is under way in another process"),
        _row("would-overwrite", "launch", "`tune -o` names a file that `tune` did not write"),
    ),
)

_THE_REHEARSAL = CodeSection(
    title="The rehearsal",
    intro="",
    rows=(
        _row(
            "trainer-refuses",
            "trainer",
            "the training script raised this, in its words; gone without the argument that is named",
        ),
        _row(
            "rehearsal-hangs rehearsal-crash",
            "trainer",
            "the script came to no end in its time, or its process died; where it was",
        ),
        _row("rehearsal-imports", "launch", "the trainer's Python cannot import the script (exit 5)"),
        _row("rehearsal-no-room no-space", "launch", "no memory or no disk for a rehearsal, or no temporary folder"),
        _row(
            "rehearsal-failed",
            "launch",
            "a note: launch's own code failed, so that nothing is known of the stage; it "
            "refuses nothing. `launch rehearse` exits with 70, a start goes on",
        ),
        _row("not-rehearsed", "launch", "a note: what one process on a CPU cannot show"),
        _row(
            "stand-in",
            "launch",
            "a note: what stood in for a model, tokenizer, package or data set that is not on this machine",
        ),
        _row("empty-rows nothing-to-learn", "trainer", "rows without a token, or without one that counts in the loss"),
        _row(
            "rows-dropped",
            "trainer",
            "the trainer leaves rows out: how many of how many, by the sizes of its own data "
            "set, and why; in a plan a note where no rehearsal has counted them",
        ),
        _row("cut-rows", "trainer", "a tenth of the rows or more are cut off at the limit"),
        _row("no-end-token", "trainer", "the end token is in fewer rows than it should be"),
    ),
)

_THE_PREVIEW = CodeSection(
    title="The preview",
    intro=(
        "`launch preview` also says `trainer-refuses` (exit 3), `rehearsal-imports`, "
        "`rehearsal-hangs` and `rehearsal-crash` (exit 5)."
    ),
    rows=(
        _row(
            "absent-tokenizer absent-data",
            "launch",
            "the tokenizer or the data set is neither here nor in the hub's cache (exit 5)",
        ),
        _row(
            "no-such-row bad-row", "launch", "`--row` names a row that the data do not have, or no row at all (exit 2)"
        ),
        _row("no-preview", "launch", "launch does not know how this script prepares its rows (exit 3)"),
        _row("preview-failed", "launch", "launch's own code failed, so that nothing is known of the rows (exit 70)"),
    ),
)

_PIPELINES = CodeSection(
    title="Pipelines",
    intro="",
    rows=(
        _row(
            "bad-pipeline",
            "launch",
            "a key or a value that a pipeline file does not take; a stage file that is not there",
        ),
        _row(
            "no-such-stage",
            "launch",
            "`--from`, `--until` or an override names no stage of the pipeline, or none is left between them",
        ),
        _row(
            "pipeline-model",
            "launch",
            "a stage names another model or tokenizer than the stage before leaves; `from:` says which is meant",
        ),
        _row(
            "pipeline-output",
            "launch",
            "where a stage's model goes is not known beforehand, is another stage's place, or there will be none",
        ),
        _row("pipeline-adapter", "run", "the stage before saves an adapter, which neither backend loads as a model"),
        _row(
            "pipeline-probe",
            "run",
            "without the probe the pinned SFT script takes a local folder for a name on the hub",
        ),
        _row(
            "pipeline-template",
            "run or launch",
            "another chat template than the stage before; `add_bos` on a template that begins with the token",
        ),
        _row("pipeline-needs", "launch", "`--from`: the model that it begins from is not there, or is being trained"),
        _row("pipeline-running", "launch", "the same pipeline is running already"),
        _row("no-eval-program", "launch", "the program of an `eval` is not beside the trainer's Python or on PATH"),
        _row("eval-running", "launch", "another pipeline evaluates the same model"),
        _row("eval-failed", "launch", "the command of an `eval` failed, or took longer than its `timeout`"),
        _row("eval-metrics", "launch", "the metrics file of an `eval` was not written, or holds no numbers"),
        _row("eval-gate", "launch", "a metric is not as `expect` of its `eval` says, is missing or is not a number"),
        _row(
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
        _row("no-final-model", "launch", "a run that has not come to its end, a folder without a model"),
        _row("damaged-model", "launch", "files of the model are missing or cut off"),
        _row(
            "no-base-model", "launch", "no record and no adapter names the model that it began from, or that is gone"
        ),
        _row("no-prompt", "launch", "`chat` without a terminal and without a prompt"),
        _row("template-refuses", "launch", "the chat template raises an error for this conversation"),
        _row("too-long-prompt", "launch", "the conversation leaves no room for an answer"),
        _row("model-out-of-memory", "launch", "the model does not fit into the memory that is free"),
        _row("model-fails", "launch", "transformers or peft cannot load the model, or fail to generate"),
        _row("not-an-adapter", "launch", "`merge` of a whole model"),
        _row("not-mergeable", "launch", "an adapter without weights that could be added, such as prompt tuning"),
        _row("quantised-base", "launch", "`merge` into a base that is stored in 4 or 8 bits; `--base` names another"),
        _row("output-exists", "launch", "`merge` into a folder that is there already"),
        _row("merge-runs", "launch", "another `merge` writes the same folder"),
        _row("merge-differs", "launch", "the merged model's logits are not those of base and adapter"),
        _row("merged-unquantised", "launch", "a note: trained on a base in 4 or 8 bits, merged into the whole one"),
        _row("merge-loses-adapter", "launch", "part of what the adapter changes is lost in rounding"),
        _row("card-exists", "launch", "a README.md that launch did not write, or that was edited since"),
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


def rows_of(code: str) -> Iterator[tuple[CodeSection, Meaning]]:
    """Each row that lists a code; several commands may say it."""
    for section in SECTIONS:
        for row in section.rows:
            if code in row.codes:
                yield section, row


def all_codes() -> list[str]:
    return [code for section in SECTIONS for row in section.rows for code in row.codes]
