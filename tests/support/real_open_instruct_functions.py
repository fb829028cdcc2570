"""Functions of an open-instruct checkout on given values, as a process.

usage: PYTHONPATH=CHECKOUT python real_open_instruct_functions.py CHECKOUT < requests > answers

One JSON request a line, and one answer a line. A request names its `kind`, one of HANDLERS. What is
part of a long `main` is taken out of its source and run alone. Exit code 3, with the reason on
stderr, where the packages are not there.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

CHECKOUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


def function_node(file, name):
    tree = ast.parse((CHECKOUT / "open_instruct" / file).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


def run(statements, names):
    """Run statements of upstream's with these names."""
    module = ast.Module([*statements], [])
    ast.fix_missing_locations(module)
    exec(compile(module, "upstream", "exec"), names)
    return names


def refused(error):
    return {"refused": f"{type(error).__name__}: {error}"}


def splits(request):
    """The split of each set, and its amount, as `load_dataset_configs` makes them."""
    from open_instruct import dataset_transformation as module

    sets = []

    class Recorder(SimpleNamespace):
        def __init__(self, **values):
            super().__init__(**values)
            self.dataset = range(10_000)
            self.original_dataset_size = 10_000
            sets.append([self.dataset_name, self.dataset_split, self.frac_or_num_samples])

        def update_range(self, *_):
            pass

    before = module.DatasetConfig
    module.DatasetConfig = Recorder
    try:
        module.load_dataset_configs(request["sets"], request["splits"], ["f"], [{}])
    except (AssertionError, ValueError) as error:
        return refused(error)
    finally:
        module.DatasetConfig = before
    return {"sets": sets}


def schedule(request):
    """The class of the schedule that dpo.py builds."""
    from olmo_core import optim
    from open_instruct import olmo_core_utils

    own = function_node("dpo.py", "_setup_scheduler")
    try:
        if own is None:
            built = olmo_core_utils.build_scheduler(request["name"], 0.1, 100)
        else:
            own.args.args[0].annotation = None
            names = run([own], {"olmo_optim": optim})
            built = names["_setup_scheduler"](
                SimpleNamespace(lr_scheduler_type=request["name"], warmup_ratio=0.1), 100
            )
    except ValueError as error:
        return refused(error)
    return {"class": type(built).__name__}


def clipping(request):
    """By which number a step's gradient of norm 5 is multiplied, with a limit of the norm as it is
    given.
    """
    import torch

    weight = torch.nn.Linear(1, 1, bias=False)
    weight.weight.grad = torch.full_like(weight.weight, 5.0)
    apply = {"sft": _clip_accelerate, "dpo": _clip_accelerate, "dpo_olmo_core": _clip_olmo_core}
    apply[request["script"]](request, weight)
    return {"factor": weight.weight.grad.item() / 5.0}


def _clip_accelerate(request, model):
    import accelerate

    file = {"sft": "finetune.py", "dpo": "dpo_tune_cache.py"}[request["script"]]
    key = {"sft": "clip_grad_norm", "dpo": "max_grad_norm"}[request["script"]]
    for node in ast.walk(function_node(file, "main")):
        if isinstance(node, ast.If) and "accelerator.sync_gradients and" in ast.unparse(node.test):
            args = SimpleNamespace(**{key: request["limit"]})
            run(
                [node],
                {"accelerator": accelerate.Accelerator(cpu=True), "args": args, "model": model},
            )
            return
    raise LookupError("nothing clips")


def _clip_olmo_core(request, model):
    from olmo_core.train.train_module.transformer.train_module import TransformerTrainModule

    main = function_node("dpo.py", "main")
    names = {"args": SimpleNamespace(max_grad_norm=request["limit"])}
    for node in ast.walk(main):
        match node:
            case ast.Assign(targets=[ast.Name(id="max_grad_norm")]):
                run([node], names)
    handed_over = ast.Name("handed_over", ast.Store())
    for node in ast.walk(main):
        if isinstance(node, ast.keyword) and node.arg == "max_grad_norm":
            run([ast.Assign([handed_over], node.value)], names)
    # TransformerTrainModule.optim_step of olmo_core/train/train_module/transformer/train_module.py
    # clips where this is not None.
    if names["handed_over"] is not None:
        TransformerTrainModule._clip_grad_norm(SimpleNamespace(model=model), names["handed_over"])


def tokenizer(request):
    """The chat template that the script's tokenizer has."""
    from open_instruct.dataset_transformation import CHAT_TEMPLATES, TokenizerConfig

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            made = TokenizerConfig(**request["values"]).tokenizer
    except (AssertionError, KeyError, ValueError, OSError) as error:
        return refused(error)
    names = [name for name, text in CHAT_TEMPLATES.items() if text in (made.chat_template or "")]
    return {"template": names, "fast": bool(made.is_fast)}


def checkpoint(request):
    """The name of the checkpoint that a run in a folder continues from."""
    from open_instruct import utils

    args = SimpleNamespace(output_dir=request["folder"], resume_from_checkpoint=None)
    path = utils.get_last_checkpoint_path(args)
    return {"name": None if path is None else Path(path).name}


def intervals(request):
    """Whether OLMo-core takes the intervals and the number of checkpoints, as dpo.py hands them
    over.
    """
    import inspect

    from olmo_core.exceptions import OLMoConfigurationError
    from open_instruct import olmo_core_utils

    build = olmo_core_utils.build_checkpointer_callback
    limited = (
        {"max_checkpoints": request["keep"]}
        if "max_checkpoints" in inspect.signature(build).parameters
        else {}
    )
    try:
        built = build(request["steps"], request["ephemeral"], save_async=False, **limited)
    except OLMoConfigurationError as error:
        return refused(error)
    return {"keeps": built.max_checkpoints, "ephemeral": built.ephemeral_save_interval}


def recomputing(request):
    import inspect

    from open_instruct import olmo_core_utils

    build = olmo_core_utils.build_ac_config
    words = [request["budget"], request["compile"]]
    if "mode" in inspect.signature(build).parameters:
        words += [request["mode"], ["blocks.*.attention"]]
    return {"recomputes": build(*words) is not None}


def masked(request):
    """Whether the mean log-probability of an answer without a trained token is a number."""
    import torch
    from open_instruct import dpo_utils

    logps = torch.zeros(1, 4)
    labels = torch.full((1, 4), -100)
    try:
        mean = dpo_utils._get_batch_logps(logps, labels, average_log_prob=True)
    except (AssertionError, ValueError):
        # of the logits themselves
        mean = dpo_utils._get_batch_logps(torch.zeros(1, 4, 7), labels, average_log_prob=True)
    return {"number": not bool(torch.isnan(mean).any())}


def packed(request):
    """What OLMo-core's model is told of a packed row of two samples."""
    import torch
    from open_instruct import dpo_utils

    told = []

    def model(ids, **names):
        told.extend(sorted(names))
        return SimpleNamespace(loss=torch.zeros(ids.shape[0], ids.shape[1]))

    ends = torch.tensor([0, 2, 4], dtype=torch.int32)
    columns = {
        "input_ids": torch.tensor([[1, 2, 3, 4]]),
        "labels": torch.tensor([[1, 2, 3, 4]]),
        "cu_seq_lens_k": ends,
        "cu_seq_lens_q": ends,
        "max_length_k": 2,
        "max_length_q": 2,
        "position_ids": torch.tensor([[0, 1, 0, 1]]),
        "seq_idx": torch.tensor([[0, 0, 1, 1]]),
    }
    batch = {"index": torch.tensor([0, 1])}
    for name, values in columns.items():
        batch[f"chosen_{name}"] = values
        batch[f"rejected_{name}"] = values
    with contextlib.suppress(Exception):
        # only what the model is given matters
        dpo_utils.concatenated_forward_olmo(model, batch, packing=True)
    return {"told": told}


def groups(request):
    """Whether a group of the optimizer has only parameters that LoRA has frozen.

    DeepSpeed itself leaves out those without any parameter.
    """
    import torch
    from open_instruct import utils

    model = torch.nn.Module()
    model.lora_A = torch.nn.Linear(2, 2, bias=False)
    model.q_proj = torch.nn.Linear(2, 2, bias=request["biases"])
    model.q_proj.requires_grad_(False)
    file = {"sft": "finetune.py", "dpo": "dpo_tune_cache.py"}[request["script"]]
    wanted = ("no_decay", "optimizer_grouped_parameters")
    statements = []
    for node in ast.walk(function_node(file, "main")):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in wanted:
            statements.append(node)
    names = {"model": model, "args": SimpleNamespace(weight_decay=0.1)}
    names["get_optimizer_grouped_parameters"] = utils.get_optimizer_grouped_parameters
    has_empty = False
    for group in run(statements, names)["optimizer_grouped_parameters"]:
        parameters = group["params"]
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            has_empty = True
    return {"empty": has_empty}


def cache_key(request):
    """The key of a data set for each of two chat templates of one tokenizer."""
    from open_instruct import dataset_transformation as module

    keys = []
    for template in request["templates"]:
        config = module.TokenizerConfig(tokenizer_name_or_path="x")
        # a cached property is kept here
        config.__dict__["tokenizer"] = SimpleNamespace(chat_template=template)
        keys.append(module.compute_config_hash([], config))
    return {"keys": keys}


def tools(request):
    """Whether the chat template is given the tools of an SFT row."""
    from open_instruct import dataset_transformation as module
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(request["model"])
    loaded.chat_template = (
        "{{ tools }}{% for m in messages %}{{ m['role'] }}{{ m['content'] }}{% endfor %}"
    )
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    row["tools"] = request["tools"]
    try:
        done = module.TRANSFORM_FNS["sft_tulu_tokenize_and_truncate_v1"][0](row, loaded, 512)
    except (TypeError, ValueError) as error:
        return refused(error)
    return {"shown": "lookup" in loaded.decode(done["input_ids"])}


def export(request):
    """Whether a model of OLMo-core's shape can be written as transformers reads it, whose config is
    in a folder.
    """
    import transformers
    from olmo_core.nn.hf.config import get_hf_config
    from open_instruct import olmo_core_utils

    config = transformers.AutoConfig.from_pretrained(request["folder"])
    built = olmo_core_utils.get_transformer_config(request["shape"], config.vocab_size, "torch")
    try:
        if hasattr(olmo_core_utils, "verify_can_save_as_hf"):
            olmo_core_utils.verify_can_save_as_hf(built, request["folder"])
        else:
            get_hf_config(built.build(init_device="meta"))
    except (NotImplementedError, RuntimeError) as error:
        return refused(error)
    return {}


HANDLERS = {
    "splits": splits,
    "schedule": schedule,
    "clipping": clipping,
    "tokenizer": tokenizer,
    "checkpoint": checkpoint,
    "intervals": intervals,
    "recomputing": recomputing,
    "masked": masked,
    "packed": packed,
    "groups": groups,
    "cache_key": cache_key,
    "tools": tools,
    "export": export,
}


def main():
    answers = sys.stdout
    # what the packages print goes elsewhere
    sys.stdout = sys.stderr
    try:
        from open_instruct import dpo_utils, olmo_core_utils  # noqa: F401
    except ImportError as error:
        print(f"cannot be imported: {error}", file=sys.stderr)
        return 3
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(HANDLERS[request["kind"]](request)), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
