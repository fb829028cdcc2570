"""open-instruct's `finetune.py`, `dpo_tune_cache.py` and `dpo.py` on the CPU, with few rows."""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from . import rows, steps
from .calls import call_trainer
from .loading import FirstRows, replace_everywhere
from .records import ScriptFacts, ServerRequest, ServerResponse

_NEEDED = {"open_instruct", "torch", "transformers", "datasets", "accelerate", "olmo_core"}
# what dpo.py saves before #1671 of a model that OLMo-core cannot export: a rule says so
_RAW = "model_state_dict.pt"


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
    """Import a script whose modules import packages for other scripts' sake, vllm and docker among
    them (data_loader.py::[import vllm]).
    """
    sys.meta_path.append(DUMMIES)
    while True:
        try:
            importlib.import_module(name)
            return
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if not package or package in DUMMIES.packages or package in _NEEDED:
                raise
            DUMMIES.packages.add(package)
            for module in list(sys.modules):
                if module.startswith("open_instruct"):
                    del sys.modules[module]


def load(script: ScriptFacts) -> None:
    import torch
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    if script.imports_others:
        import_with_dummies(script.module)
    importlib.import_module(script.module)
    torch.set_num_threads(1)
    rows.prepare_in_process()


def run(request: ServerRequest, response: ServerResponse) -> None:
    """Parse; then the script's own `main` on the small model and few rows.

    Raises what the script raises.
    """
    for package in sorted(DUMMIES.packages):
        response.notes.append(("package", package))
    script, arguments, tokenizer = parse(request)
    if request.only_parses:
        return
    supply_for_cpu()
    limit_sets(request.rows)
    FirstRows(request, response, None).install("open_instruct")
    look_at_prepared_rows(arguments, request, response)
    use_small_model(arguments, tokenizer, request)
    adapt(script, request)
    response.phase = "construct"
    with steps.record_losses(response) as losses:
        call_trainer(script.main, arguments, tokenizer)
    response.losses = losses
    if any(getattr(arguments, switch, False) for switch in request.script.ends_after):
        return
    response.phase = "train"
    steps.require_finite(losses)
    response.phase = "save"
    folder = os.path.join(arguments.output_dir, request.script.final_model)
    if os.path.exists(os.path.join(folder, _RAW)):
        return
    steps.require_trained(folder, str(request.model))
    response.phase = "load"
    steps.load_again(folder)


def parse(request: ServerRequest) -> tuple[Any, Any, Any]:
    """The script of a request, its arguments, and what it is told of the tokenizer."""
    script: Any = importlib.import_module(request.script.module)
    from open_instruct.utils import ArgumentParserPlus

    kinds = []
    for module, name in request.script.classes:
        kinds.append(getattr(importlib.import_module(module), name))
    # as a command line is read, from sys.argv: ArgumentParserPlus looks there for a YAML file
    sys.argv = [script.__file__, *request.words]
    parser = ArgumentParserPlus(tuple(kinds))
    arguments, tokenizer = call_trainer(getattr(parser, request.script.parses))
    return script, arguments, tokenizer


def use_small_model(arguments: Any, tokenizer: Any, request: ServerRequest) -> None:
    name = arguments.model_name_or_path
    if tokenizer.tokenizer_name_or_path in (None, name):
        tokenizer.tokenizer_name_or_path = request.model
    arguments.model_name_or_path = request.model
    if request.script.adapts:
        # OLMo-core builds its model by this name (olmo_core_utils.py::setup_model[config_name or])
        arguments.config_name = arguments.config_name or name
    elif getattr(arguments, "config_name", None) not in (None, name):
        arguments.config_name = request.model


def limit_sets(most: int) -> None:
    """Take at most so many rows of a set, or all that were loaded of it; no network."""
    import open_instruct.dataset_transformation as transformation

    transformation.get_commit_hash = return_constant("0" * 40)
    update = transformation.DatasetConfig.update_range

    def update_range(config: Any, dataset_range: int) -> Any:
        # rows are repeated where the set has too few
        limit = max(most, len(config.dataset))
        return call_trainer(update, config, min(dataset_range, limit))

    transformation.DatasetConfig.update_range = update_range


def look_at_prepared_rows(arguments: Any, request: ServerRequest, response: ServerResponse) -> None:
    """Rows are described once they are tokenised, and short when they are trained on."""
    import open_instruct.dataset_transformation as transformation

    prepare = transformation.get_cached_dataset_tulu

    def prepare_and_shorten(*args: Any, **kwargs: Any) -> Any:
        prepared = call_trainer(prepare, *args, **kwargs)
        limit = arguments.max_seq_length
        response.rows.dropped = rows.DROPPING
        rows.describe(prepared, limit, request.special, response.rows)
        response.phase = "construct"
        # packing fills rows of this length, and OLMo-core first tries a batch of it
        if limit is not None:
            arguments.max_seq_length = min(limit, rows.TOKENS)
        return rows.shorten_rows(prepared)

    replace_everywhere("open_instruct", "get_cached_dataset_tulu", prepare, prepare_and_shorten)


def supply_for_cpu() -> None:
    """Supply what the scripts expect of a GPU, as the probe does (watching/supplies.py)."""
    import open_instruct.utils as utils
    import torch
    import torch.distributed as dist

    for name in ("max_memory_allocated", "max_memory_reserved", "current_device", "set_device"):
        # one function a name: torch.compile's own table refuses one object under two of its names
        setattr(torch.cuda, name, return_constant(0))
    properties = type("Properties", (), {"name": "cpu", "total_memory": 1})
    torch.cuda.get_device_properties = return_constant(properties)
    utils.ModelDims.calculate_mfu = return_constant(0.0)
    utils.ModelDims.approximate_learner_utilization = return_constant({"mfu": 0.0})
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def return_constant(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def adapt(script: Any, request: ServerRequest) -> None:
    """Make small the model that a script builds by a name, and keep it off the network."""
    if request.script.adapts:
        ADAPTERS[request.script.adapts](script)
    if hasattr(script, "snapshot_download"):
        script.snapshot_download = lambda name, **_: name


def shrink_olmo_core(script: Any) -> None:
    """Have dpo.py build its OLMo-core model with two thin layers, on one process."""
    from olmo_core.train.callbacks import gpu_memory_monitor

    build_config = script.olmo_core_utils.get_transformer_config

    def build_small_config(*args: Any, **kwargs: Any) -> Any:
        config = call_trainer(build_config, *args, **kwargs)
        config.n_layers = 2
        config.d_model = 64
        blocks = config.block.values() if isinstance(config.block, dict) else [config.block]
        for block in blocks:
            shrink_block(block)
        return config

    script.olmo_core_utils.get_transformer_config = build_small_config
    # it would ask for NCCL beside gloo; the process group of one process is there
    prepare = script.train.prepare_training_environment
    for package in ("open_instruct", "olmo_core"):
        replace_everywhere(package, "prepare_training_environment", prepare, return_constant(None))
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NUM_NODES="1")
    for name in ("pre_train", "pre_step", "post_step"):
        setattr(gpu_memory_monitor.GPUMemoryMonitorCallback, name, return_constant(None))


def shrink_block(block: Any) -> None:
    heads = block.sequence_mixer
    if heads.n_kv_heads not in (None, heads.n_heads):
        heads.n_kv_heads = 2
    elif heads.n_kv_heads:
        heads.n_kv_heads = 4
    heads.n_heads = 4
    if heads.head_dim:
        heads.head_dim = 16
    if block.feed_forward is not None:
        block.feed_forward.hidden_size = 128


# functions that make the model of a script small, by their names
ADAPTERS: dict[str, Callable[[Any], None]] = {"shrink_olmo_core": shrink_olmo_core}
