"""open-instruct's scripts (`finetune.py`, `dpo_tune_cache.py`, `dpo.py`) on the CPU, with few rows."""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from . import rows, steps
from .calls import NoRehearsal, Refused, call_trainer
from .trl_stage import shrink_model

_NEEDED = {"open_instruct", "torch", "transformers", "datasets", "accelerate", "olmo_core"}
SCRIPT: dict[str, Any] = {}
"""What launch says of the entry script that this server rehearses (`script_as_json` of `ask.py`)."""
ADAPTERS: dict[str, Callable[[Any], None]] = {}
"""Functions that make the model of a script small, by their names."""


class Dummies(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports packages that are not installed as modules in which every name is an empty class."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = attribute  # type: ignore[method-assign]


DUMMIES = Dummies()


def import_with_dummies(name: str) -> None:
    """dpo.py imports packages for other scripts' sake, vllm and docker among them (data_loader.py::[import vllm])."""
    sys.meta_path.append(DUMMIES)
    while True:
        try:
            importlib.import_module(name)
            return
        except ModuleNotFoundError as error:
            top = (error.name or "").partition(".")[0]
            if not top or top in DUMMIES.packages or top in _NEEDED:
                raise
            DUMMIES.packages.add(top)
            for module in [one for one in sys.modules if one.startswith("open_instruct")]:
                del sys.modules[module]


def load(setup: dict[str, Any]) -> None:
    import torch
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    SCRIPT.update(setup["script"])
    if SCRIPT:
        if SCRIPT["imports_others"]:
            import_with_dummies(SCRIPT["module"])
        importlib.import_module(SCRIPT["module"])
    torch.set_num_threads(1)
    rows.prepare_in_process()


def answer(request: dict[str, Any], report: dict[str, Any]) -> None:
    """One request: `shrink` makes the small model, `run` rehearses.

    Raises what the script raises.
    """
    if request["kind"] == "shrink":
        shrink_model(request, report)
    else:
        report["notes"] += [["package", package] for package in sorted(DUMMIES.packages)]
        run(request, report)


def run(request: dict[str, Any], report: dict[str, Any]) -> None:
    """Parse; then the script's own `main` on the small model and few rows."""
    script, arguments, tokenizer = parse(request)
    if request["level"] == "parse":
        return
    supply_for_cpu()
    small_data(arguments, request, report)
    name = arguments.model_name_or_path
    if tokenizer.tokenizer_name_or_path in (None, name):
        tokenizer.tokenizer_name_or_path = request["model"]
    arguments.model_name_or_path = request["model"]
    if SCRIPT["adapts"]:
        # which model OLMo-core builds goes by this name (olmo_core_utils.py::setup_model[config_name or])
        arguments.config_name = arguments.config_name or name
        adapt(script)
    elif getattr(arguments, "config_name", None) not in (None, name):
        arguments.config_name = request["model"]
    if hasattr(script, "snapshot_download"):
        script.snapshot_download = lambda name, **_: name
    report["phase"] = "construct"
    with steps.losses(report) as losses:
        call_trainer(script.main, arguments, tokenizer)
    report["losses"] = losses
    if any(getattr(arguments, switch, False) for switch in SCRIPT["ends_after"]):
        return
    report["phase"] = "train"
    steps.require_finite(losses)
    report["phase"] = "save"
    out = os.path.join(arguments.output_dir, SCRIPT["final_model"])
    report["raw"] = not steps.require_trained(out, request["model"])
    report["phase"] = "load"
    if not report["raw"]:
        steps.load_again(out)


def parse(request: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The script of a request, its arguments, and what it is told of the tokenizer."""
    if not SCRIPT:
        raise NoRehearsal(f"how the script `{request['entry']}` trains is not known")
    script: Any = importlib.import_module(SCRIPT["module"])
    from open_instruct.utils import ArgumentParserPlus

    kinds = [getattr(importlib.import_module(module), name) for module, name in SCRIPT["classes"]]
    # as a command line is read, from sys.argv: ArgumentParserPlus looks there for a YAML file
    sys.argv = [script.__file__, *request["words"]]
    parser = ArgumentParserPlus(tuple(kinds))
    arguments, tokenizer = call_trainer(getattr(parser, SCRIPT["parses"]))
    return script, arguments, tokenizer


def small_data(arguments: Any, request: dict[str, Any], report: dict[str, Any]) -> None:
    """Few rows of each set, described once they are tokenised, and short when they are trained on."""
    import datasets
    import open_instruct.dataset_transformation as transformation

    real = datasets.load_dataset
    rows.replace_everywhere("open_instruct", "load_dataset", real, rows.limit(real, request, report))
    transformation.get_commit_hash = lambda *_, **__: "0" * 40
    update = transformation.DatasetConfig.update_range

    def at_most(self: Any, dataset_range: int) -> Any:
        # the rows that were read are more than that where some of other kinds were added
        most = max(request["rows"], len(self.dataset))
        return call_trainer(update, self, min(dataset_range, most))

    transformation.DatasetConfig.update_range = at_most
    prepare = transformation.get_cached_dataset_tulu

    def prepared(*args: Any, **kwargs: Any) -> Any:
        made = call_trainer(prepare, *args, **kwargs)
        report["data"] = rows.describe(made, arguments.max_seq_length, request["special"])
        report["dropped"] = rows.dropped()
        if not report["data"].get("rows"):
            raise Refused("no row is left after the trainer has prepared the data")
        report["phase"] = "construct"
        # packing fills rows of this length, and OLMo-core first tries a batch of it
        if arguments.max_seq_length is not None:
            arguments.max_seq_length = min(arguments.max_seq_length, rows.TOKENS)
        return rows.shorten(made)

    rows.replace_everywhere("open_instruct", "get_cached_dataset_tulu", prepare, prepared)


def supply_for_cpu() -> None:
    """What a CPU lacks and the scripts take for granted, as the probe supplies it (watching/supplies.py)."""
    import open_instruct.utils as utils
    import torch
    import torch.distributed as dist

    for name in ("max_memory_allocated", "max_memory_reserved", "current_device", "set_device"):
        # one function a name: torch.compile's own table refuses one object under two of its names
        setattr(torch.cuda, name, constant(0))
    properties = type("Properties", (), {"name": "cpu", "total_memory": 1})
    torch.cuda.get_device_properties = constant(properties)
    utils.ModelDims.calculate_mfu = constant(0.0)
    utils.ModelDims.approximate_learner_utilization = constant({"mfu": 0.0})
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def adapt(script: Any) -> None:
    """Have a script run as one process on a CPU, with a small model where it builds one by a name."""
    if SCRIPT["adapts"]:
        ADAPTERS[SCRIPT["adapts"]](script)


def shrink_olmo_core(script: Any) -> None:
    """dpo.py builds its model by a name of OLMo-core's: the same with two thin layers, on one process."""
    from olmo_core.train.callbacks import gpu_memory_monitor

    real = script.olmo_core_utils.get_transformer_config

    def small(*args: Any, **kwargs: Any) -> Any:
        config = call_trainer(real, *args, **kwargs)
        config.n_layers, config.d_model = 2, 64
        blocks = config.block.values() if isinstance(config.block, dict) else [config.block]
        for block in blocks:
            heads = block.sequence_mixer
            shared = heads.n_kv_heads not in (None, heads.n_heads)
            heads.n_heads, heads.n_kv_heads = 4, 2 if shared else heads.n_kv_heads and 4
            heads.head_dim = heads.head_dim and 16
            if block.feed_forward is not None:
                block.feed_forward.hidden_size = 128
        return config

    script.olmo_core_utils.get_transformer_config = small
    # it would ask for NCCL beside gloo; the process group of one process is there
    prepare_environment = script.train.prepare_training_environment
    for package in ("open_instruct", "olmo_core"):
        rows.replace_everywhere(package, "prepare_training_environment", prepare_environment, constant(None))
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NUM_NODES="1")
    for name in ("pre_train", "pre_step", "post_step"):
        setattr(gpu_memory_monitor.GPUMemoryMonitorCallback, name, constant(None))


ADAPTERS["shrink_olmo_core"] = shrink_olmo_core
