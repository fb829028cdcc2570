"""Every `file:line` of upstream that our code cites still holds what is claimed of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import NO_PACKAGES, REPOSITORY

from launcher.sources import find_package

CITATION = re.compile(r"((?:\w+/)*\w+\.py):(\d+(?:[,-]\d+)*)")
CONSTANT = re.compile(r'^(_[A-Z]+) = "(.*)"$', re.MULTILINE)

# Cited by their bare name outside a list of files of one folder; all others are open-instruct's.
FOLDERS = {
    "hf_argparser.py": "transformers",
    "subprocess_handler.py": "torch/distributed/elastic/multiprocessing/subprocess_handler",
}


def cited(path: Path) -> Iterator[str]:
    """Each `folder/file.py:line` that one of our files names, in words or in code."""
    text = path.read_text(encoding="utf-8")
    for name, value in CONSTANT.findall(text):
        text = text.replace(f"{{{name}}}", value)
    for line in text.splitlines():
        folder = None
        for name, numbers in CITATION.findall(line):
            if "/" in name:
                folder = name.rpartition("/")[0]
            else:
                name = f"{folder or FOLDERS.get(name, 'open_instruct')}/{name}"
            # of a range, its first line is checked
            for number in re.split(",", numbers):
                yield f"{name}:{number.partition('-')[0]}"


def all_cited() -> set[str]:
    return {
        citation for path in (REPOSITORY / "launcher").rglob("*.py") for citation in cited(path)
    }


def line_of(root: Path, citation: str) -> str:
    name, _, number = citation.rpartition(":")
    lines = (root / name).read_text(encoding="utf-8").splitlines()
    return lines[int(number) - 1] if int(number) <= len(lines) else ""


# What each cited line holds; a line that is cited and not listed here fails the first test below.
FACTS = {
    "accelerate/checkpointing.py:115": "Model weights saved in",
    "accelerate/commands/launch.py:999": "raise subprocess.CalledProcessError",
    "accelerate/commands/launch.py:1070": "raise subprocess.CalledProcessError",
    "liger_kernel/transformers/monkey_patch.py:2953": "Applying Liger kernels",
    "olmo_core/train/callbacks/console_logger.py:84": "[step=",
    "open_instruct/dataset_transformation.py:1618": 'endswith(".jsonl")',
    "open_instruct/dataset_transformation.py:1807": "dataset_skip_cache is True",
    "open_instruct/dataset_transformation.py:1913": "Found cached dataset at",
    "open_instruct/dataset_transformation.py:1927": "Cache not found or invalid, transforming",
    "open_instruct/dataset_transformation.py:1995": "Saved transformed dataset to",
    "open_instruct/dataset_transformation.py:2041": "len(dataset_mixer_list_splits) != len(",
    "open_instruct/dataset_transformation.py:2051": 'if "." in frac_or_num_samples else int(',
    "open_instruct/dpo.py:217": "Using packing/padding-free collation",
    "open_instruct/dpo.py:332": "Caching reference logprobs...",
    "open_instruct/dpo.py:360": "trainer.fit()",
    "open_instruct/dpo_tune_cache.py:123": 'accelerator_log_kwargs["log_with"] = "wandb"',
    "open_instruct/dpo_tune_cache.py:167": "using the output directory: ",
    "open_instruct/dpo_tune_cache.py:180": '"{args.hf_entity}/{args.hf_repo_id}"',
    "open_instruct/dpo_tune_cache.py:219": "pprint([args, tc])",
    "open_instruct/dpo_tune_cache.py:228": "logger.info(accelerator.state",
    "open_instruct/dpo_tune_cache.py:287": "from scratch. This is not supported",
    "open_instruct/dpo_tune_cache.py:315": "Attempting to apply liger-kernel.",
    "open_instruct/dpo_tune_cache.py:393": "original_dataset_size = len(train_dataset)",
    "open_instruct/dpo_tune_cache.py:405": "Using packing/padding-free collation",
    "open_instruct/dpo_tune_cache.py:494": "  Total optimization steps = ",
    "open_instruct/dpo_tune_cache.py:502": "Resumed from checkpoint: ",
    "open_instruct/dpo_tune_cache.py:668": "  Step: {completed_steps}, LR: ",
    "open_instruct/dpo_tune_cache.py:696": "completed_steps % checkpointing_steps == 0",
    "open_instruct/dpo_utils.py:88": "(DPOLossType.dpo, DPOLossType.dpo_norm, DPOLossType.wpo)",
    "open_instruct/dpo_utils.py:159": "push_to_hub: bool = True",
    "open_instruct/dpo_utils.py:326": "separate forward not implemented for packing",
    "open_instruct/dpo_utils.py:342": "self.dataset_name is not None and (self.dataset_mixer",
    "open_instruct/dpo_utils.py:347": "try_launch_beaker_eval_jobs and not self.push_to_hub",
    "open_instruct/dpo_utils.py:353": "json.loads(passed_value)",
    "open_instruct/dpo_utils.py:358": "self.zero_stage not in [0, 1, 2, 3]",
    "open_instruct/dpo_utils.py:360": "self.offload_param and self.zero_stage != 3",
    "open_instruct/dpo_utils.py:377": '"model_name_or_path": args.model_name_or_path',
    "open_instruct/dpo_utils.py:439": "Loading reference logprobs cache from ",
    "open_instruct/dpo_utils.py:453": "dist.barrier()",
    "open_instruct/dpo_utils.py:463": "Caching reference logprobs",
    "open_instruct/dpo_utils.py:488": "torch.cuda.max_memory_allocated()",
    "open_instruct/dpo_utils.py:501": "indices during reference logprobs caching",
    "open_instruct/dpo_utils.py:512": "Reference logprobs cached, using ",
    "open_instruct/dpo_utils.py:514": "Reference logprobs cached, using ",
    "open_instruct/dpo_utils.py:517": "Saving reference logprobs cache to ",
    "open_instruct/finetune.py:22": "import deepspeed",
    "open_instruct/finetune.py:126": '["allenai/tulu-3-sft-personas-algebra", "1.0"]',
    "open_instruct/finetune.py:183": "Log the training loss and learning rate every",
    "open_instruct/finetune.py:283": "push_to_hub: bool = True",
    "open_instruct/finetune.py:330": "self.dataset_name is not None and (self.dataset_mixer",
    "open_instruct/finetune.py:335": "try_launch_beaker_eval_jobs and not self.push_to_hub",
    "open_instruct/finetune.py:338": 'self.lr_scheduler_type != "linear"',
    "open_instruct/finetune.py:340": "1.0 >= self.final_lr_ratio >= 0.0",
    "open_instruct/finetune.py:348": 'passed_value.startswith("{")',
    "open_instruct/finetune.py:358": "/ (1 - args.final_lr_ratio)",
    "open_instruct/finetune.py:374": '"log_with"] = args.report_to',
    "open_instruct/finetune.py:425": "if not args.do_not_randomize_output_dir",
    "open_instruct/finetune.py:427": "using the output directory: ",
    "open_instruct/finetune.py:438": '"{args.hf_entity}/{args.hf_repo_id}"',
    "open_instruct/finetune.py:470": 'accelerator.get_tracker("wandb")',
    "open_instruct/finetune.py:477": "pprint([args, tc])",
    "open_instruct/finetune.py:481": "logger.info(accelerator.state",
    "open_instruct/finetune.py:528": "snapshot_download(model_path",
    "open_instruct/finetune.py:548": "from scratch. This is not supported",
    "open_instruct/finetune.py:575": "Attempting to apply liger-kernel.",
    "open_instruct/finetune.py:692": "math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)",
    "open_instruct/finetune.py:734": "int(checkpointing_steps)",
    "open_instruct/finetune.py:745": "  Total optimization steps = ",
    "open_instruct/finetune.py:754": "Resumed from checkpoint: ",
    "open_instruct/finetune.py:911": "torch.cuda.max_memory_reserved(",
    "open_instruct/finetune.py:951": "logger.info(",
    "open_instruct/finetune.py:956": "logger.info(",
    "open_instruct/finetune.py:974": "completed_steps % checkpointing_steps == 0",
    "open_instruct/finetune.py:988": 'checkpointing_steps == "epoch"',
    "open_instruct/model_utils.py:50": "_OLMO_CORE_TO_HF_ATTN: dict[",
    "open_instruct/model_utils.py:69": 'find_spec("flash_attn.cute")',
    "open_instruct/model_utils.py:93": "Auto-detected attention implementation: ",
    "open_instruct/utils.py:835": "Remaining files:",
    "open_instruct/utils.py:1872": "GPU_SPECS[self.device_name]",
    "torch/distributed/elastic/multiprocessing/api.py:86": "got signal: ",
    "torch/distributed/elastic/multiprocessing/api.py:1003": "failed (exitcode: %s)",
    "torch/distributed/elastic/multiprocessing/errors/__init__.py:143": " received by PID ",
    "torch/distributed/elastic/multiprocessing/errors/__init__.py:188": "exitcode  : ",
    "torch/distributed/elastic/multiprocessing/subprocess_handler/subprocess_handler.py:66": (
        "start_new_session"
    ),
    "transformers/hf_argparser.py:223": "if field.default_factory is not dataclasses.MISSING",
    "transformers/hf_argparser.py:354": "are not used by the HfArgumentParser",
    "transformers/hf_argparser.py:383": "are not used by the HfArgumentParser",
    "transformers/modeling_utils.py:3556": "Model weights saved in",
    "transformers/modeling_utils.py:3565": "checkpoint shards",
    "transformers/training_args.py:64": "trainer_log_levels = dict(",
    "transformers/training_args.py:161": "def _convert_str_dict",
    "transformers/training_args.py:1510": 'passed_value.startswith("{")',
    "transformers/training_args.py:1701": "requires non-zero --logging_steps",
    "transformers/training_args.py:1753": "At most one of fp16 and bf16",
    "transformers/utils/logging.py:44": "log_levels = {",
    "trl/scripts/_hf_argparser.py:254": "_accept_none(field.type) if accepts_none",
    "trl/scripts/dpo.py:98": "Either `datasets` or `dataset_name`",
    "trl/scripts/dpo.py:122": "Training completed.",
    "trl/scripts/dpo.py:126": "Model saved to ",
    "trl/scripts/sft.py:100": "Either `datasets` or `dataset_name`",
    "trl/scripts/sft.py:104": "model=model_args.model_name_or_path",
    "trl/scripts/sft.py:116": "Training completed.",
    "trl/scripts/sft.py:120": "Model saved to ",
    "trl/scripts/utils.py:121": "datasets: list[DatasetConfig]",
    "trl/trainer/dpo_config.py:360": "len(self.loss_weights) != len(self.loss_type)",
    "trl/trainer/dpo_config.py:382": 'self.pad_to_multiple_of != "auto"',
    "trl/trainer/dpo_trainer.py:1209": "Computing reference log probs for ",
    "trl/trainer/dpo_trainer.py:1237": "Caching reference log probs for ",
    "trl/trainer/model_config.py:174": "self.load_in_8bit and self.load_in_4bit",
    "trl/trainer/sft_config.py:307": 'self.pad_to_multiple_of != "auto"',
}

# The releases whose lines are cited, by the package's folder: (distribution, version).
RELEASES = {
    "accelerate": ("accelerate", "1.15.0"),
    "liger_kernel": ("liger-kernel", "0.7.0"),
    "olmo_core": ("ai2-olmo-core", "2.6.0"),
    "torch": ("torch", "2.13.0"),
    "transformers": ("transformers", "5.17.0"),
    "trl": ("trl", "1.16.0"),
}


def about(package: str) -> dict[str, str]:
    return {
        citation: held for citation, held in FACTS.items() if citation.startswith(f"{package}/")
    }


def assert_facts(root: Path, package: str) -> None:
    wrong = [
        f"{citation} holds {line_of(root, citation).strip()!r}, not {held!r}"
        for citation, held in about(package).items()
        if held not in line_of(root, citation)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_cited_line_is_listed_with_what_it_holds() -> None:
    assert all_cited() - FACTS.keys() == set(), "cited in launcher/, not in FACTS"
    assert FACTS.keys() - all_cited() == set(), "in FACTS, no longer cited in launcher/"


def test_open_instruct_holds_what_we_say(checkout: Path) -> None:
    assert_facts(checkout, "open_instruct")


@pytest.mark.parametrize("package", RELEASES)
def test_packages_hold_what_we_say(package: str) -> None:
    distribution, release = RELEASES[package]
    folder = find_package(package)
    if folder is None or version(distribution).partition("+")[0] != release:
        pytest.skip(f"{NO_PACKAGES}: {distribution} {release} is not installed")
    assert_facts(folder.parent, package)
