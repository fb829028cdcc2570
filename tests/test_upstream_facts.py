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
    "accelerate/accelerator.py:2219": 'f"DeepSpeed config has {deepspeed_gradient_accumulation_step',
    "accelerate/accelerator.py:2224": '"gradient_clipping": 1.0,',
    "accelerate/accelerator.py:2230": 'config_kwargs["train_batch_size"] = (',
    "accelerate/accelerator.py:2253": '"You cannot specify an optimizer in the config file and in t',
    "accelerate/accelerator.py:2268": '"You cannot specify a scheduler in the config file and in th',
    "accelerate/accelerator.py:3023": "elif self.distributed_type == DistributedType.DEEPSPEED:",
    "accelerate/accelerator.py:4087": '"Cannot get 16bit model weights because `stage3_gather_16bit',
    "accelerate/checkpointing.py:115": "Model weights saved in",
    "accelerate/commands/launch.py:999": "raise subprocess.CalledProcessError",
    "accelerate/commands/launch.py:1070": "raise subprocess.CalledProcessError",
    "accelerate/parallelism_config.py:221": "return None",
    "accelerate/parallelism_config.py:310": "if self.dp_replicate_size < 1:",
    "accelerate/utils/dataclasses.py:690": "class DynamoBackend(str, BaseEnum):",
    "accelerate/utils/dataclasses.py:1276": 'if "zero_optimization" not in self.hf_ds_config.config:',
    "accelerate/utils/dataclasses.py:1277": 'raise ValueError("Please specify the ZeRO optimization confi',
    "accelerate/utils/dataclasses.py:1369": 'f"`{ds_key_long}` not found in kwargs. "',
    "accelerate/utils/dataclasses.py:1440": 'f"`--mixed_precision` arg cannot be set to `{mixed_precision',
    "accelerate/utils/deepspeed.py:155": 'f"Expected a string path to an existing deepspeed config,',
    "accelerate/utils/deepspeed.py:188": "config = config.get(node)",
    "deepspeed/runtime/engine.py:3642": 'raise ZeRORuntimeException("The checkpoint being loaded used',
    "deepspeed/runtime/sequence_parallel/ulysses_sp.py:141": 'raise ValueError(f"Attention head count {attn_head_count} is',
    "deepspeed/runtime/sequence_parallel/ulysses_sp.py:144": 'f"KV attention head count {self.global_kv_head_count} is not',
    "deepspeed/runtime/sequence_parallel/ulysses_sp.py:586": "if seqlen != batch[k].shape[1]:",
    "deepspeed/runtime/zero/stage_1_and_2.py:375": "param_dtype = self.bit16_groups[i][0].dtype",
    "liger_kernel/ops/rms_norm.py:442": "_rms_norm_forward_kernel[(n_rows,)](",
    "liger_kernel/transformers/auto_model.py:36": "apply_fn = MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]",
    "liger_kernel/transformers/monkey_patch.py:2879": "MODEL_TYPE_TO_APPLY_LIGER_FN = {",
    "liger_kernel/transformers/monkey_patch.py:2953": "Applying Liger kernels",
    "liger_kernel/transformers/monkey_patch.py:2974": 'logger.info(f"There are currently no Liger kernels supported',
    "olmo_core/train/callbacks/console_logger.py:84": "[step=",
    "open_instruct/dataset_transformation.py:115": "APPLY_CHAT_TEMPLATE_EXAMPLE_PER_SECOND_PER_CPU = 400",
    "open_instruct/dataset_transformation.py:159": "CHAT_TEMPLATES = {",
    "open_instruct/dataset_transformation.py:775": 'raise ValueError(f"Could not find chat template for {tc.chat',
    "open_instruct/dataset_transformation.py:797": 'assert not tc.add_bos, "For newer OLMo chat templates, you m',
    "open_instruct/dataset_transformation.py:799": 'assert tc.add_bos, "For OLMo, you must run with `--add_bos`.',
    "open_instruct/dataset_transformation.py:800": 'assert tc.use_fast, "For OLMo, you must use fast tokenizer."',
    "open_instruct/dataset_transformation.py:846": "if tc.chat_template_name in CHAT_TEMPLATES:",
    "open_instruct/dataset_transformation.py:869": "GET_TOKENIZER_FN = {",
    "open_instruct/dataset_transformation.py:920": "return GET_TOKENIZER_FN[self.get_tokenizer_fn](self)",
    "open_instruct/dataset_transformation.py:1195": "max_length=max_seq_length,",
    "open_instruct/dataset_transformation.py:1236": "return any(x != MASKED_TOKEN_VALUE for x in row[LABELS_KEY])",
    "open_instruct/dataset_transformation.py:1541": "TRANSFORM_FNS = {",
    "open_instruct/dataset_transformation.py:1618": 'endswith(".jsonl")',
    "open_instruct/dataset_transformation.py:1619": 'assert self.dataset_split == "train", "Only train split is s',
    "open_instruct/dataset_transformation.py:1624": 'assert self.dataset_split == "train", "Only train split is s',
    "open_instruct/dataset_transformation.py:1685": "assert len(dc.transform_fn) == len(dc.transform_fn_args), (",
    "open_instruct/dataset_transformation.py:1716": "fn, fn_type = TRANSFORM_FNS[fn_name]",
    "open_instruct/dataset_transformation.py:1807": "dataset_skip_cache is True",
    "open_instruct/dataset_transformation.py:1877": "return final_dataset",
    "open_instruct/dataset_transformation.py:1913": "Found cached dataset at",
    "open_instruct/dataset_transformation.py:1927": "Cache not found or invalid, transforming",
    "open_instruct/dataset_transformation.py:1966": "token_count_dataset = dataset.map(count_tokens, batched=Fals",
    "open_instruct/dataset_transformation.py:1977": "combined_dataset = concatenate_datasets(transformed_datasets",
    "open_instruct/dataset_transformation.py:1995": "Saved transformed dataset to",
    "open_instruct/dataset_transformation.py:2041": "len(dataset_mixer_list_splits) != len(",
    "open_instruct/dataset_transformation.py:2051": 'if "." in frac_or_num_samples else int(',
    "open_instruct/dataset_transformation.py:2120": "dcs = []",
    "open_instruct/dataset_transformation.py:2128": "dataset, statistics = cache.load_or_transform_dataset(dcs, t",
    "open_instruct/dpo.py:217": "Using packing/padding-free collation",
    "open_instruct/dpo.py:332": "Caching reference logprobs...",
    "open_instruct/dpo.py:360": "trainer.fit()",
    "open_instruct/dpo_tune_cache.py:103": '"zero_hpz_partition_size": zero_hpz_partition_size,',
    "open_instruct/dpo_tune_cache.py:123": 'accelerator_log_kwargs["log_with"] = "wandb"',
    "open_instruct/dpo_tune_cache.py:129": "if args.zero_stage is not None:",
    "open_instruct/dpo_tune_cache.py:136": "deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_co",
    "open_instruct/dpo_tune_cache.py:167": "using the output directory: ",
    "open_instruct/dpo_tune_cache.py:177": "args.hf_entity = maybe_use_ai2_hf_entity()",
    "open_instruct/dpo_tune_cache.py:180": '"{args.hf_entity}/{args.hf_repo_id}"',
    "open_instruct/dpo_tune_cache.py:195": "args.wandb_entity = maybe_use_ai2_wandb_entity()",
    "open_instruct/dpo_tune_cache.py:219": "pprint([args, tc])",
    "open_instruct/dpo_tune_cache.py:228": "logger.info(accelerator.state",
    "open_instruct/dpo_tune_cache.py:238": "set_seed(args.seed)",
    "open_instruct/dpo_tune_cache.py:241": "os.makedirs(args.output_dir, exist_ok=True)",
    "open_instruct/dpo_tune_cache.py:247": "with accelerator.main_process_first():",
    "open_instruct/dpo_tune_cache.py:248": 'transform_fn_args = [{"max_seq_length": args.max_seq_length}',
    "open_instruct/dpo_tune_cache.py:267": "if args.cache_dataset_only:",
    "open_instruct/dpo_tune_cache.py:279": "config = AutoConfig.from_pretrained(",
    "open_instruct/dpo_tune_cache.py:283": "**args.additional_model_arguments,",
    "open_instruct/dpo_tune_cache.py:287": "from scratch. This is not supported",
    "open_instruct/dpo_tune_cache.py:300": 'device_map = {"": device_index}  # force data-parallel train',
    "open_instruct/dpo_tune_cache.py:315": "Attempting to apply liger-kernel.",
    "open_instruct/dpo_tune_cache.py:337": "dtype=torch.bfloat16,",
    "open_instruct/dpo_tune_cache.py:338": "attn_implementation=model_utils.olmo_core_attn_to_hf(args.at",
    "open_instruct/dpo_tune_cache.py:359": "if args.use_lora:",
    "open_instruct/dpo_tune_cache.py:369": "r=args.lora_rank,",
    "open_instruct/dpo_tune_cache.py:371": "lora_dropout=args.lora_dropout,",
    "open_instruct/dpo_tune_cache.py:393": "original_dataset_size = len(train_dataset)",
    "open_instruct/dpo_tune_cache.py:400": "for index in random.sample(range(len(train_dataset)), 3):",
    "open_instruct/dpo_tune_cache.py:405": "Using packing/padding-free collation",
    "open_instruct/dpo_tune_cache.py:417": 'no_decay = ["bias", "layer_norm.weight"]',
    "open_instruct/dpo_tune_cache.py:435": "optimizer = torch.optim.AdamW(optimizer_grouped_parameters, ",
    "open_instruct/dpo_tune_cache.py:442": "args.max_train_steps = args.num_epochs * num_update_steps_pe",
    "open_instruct/dpo_tune_cache.py:464": "num_warmup_steps=int(num_training_steps_for_scheduler * args",
    "open_instruct/dpo_tune_cache.py:494": "  Total optimization steps = ",
    "open_instruct/dpo_tune_cache.py:502": "Resumed from checkpoint: ",
    "open_instruct/dpo_tune_cache.py:514": 'resume_step = int(training_difference.replace("step_", "")) ',
    "open_instruct/dpo_tune_cache.py:562": "if last_checkpoint_path and resume_step is not None:",
    "open_instruct/dpo_tune_cache.py:623": "if args.logging_steps and completed_steps % args.logging_ste",
    "open_instruct/dpo_tune_cache.py:626": "global_metrics_tensor /= args.gradient_accumulation_steps * ",
    "open_instruct/dpo_tune_cache.py:668": "  Step: {completed_steps}, LR: ",
    "open_instruct/dpo_tune_cache.py:696": "completed_steps % checkpointing_steps == 0",
    "open_instruct/dpo_tune_cache.py:702": "with open(os.path.join(get_last_checkpoint_path(args, incomp",
    "open_instruct/dpo_tune_cache.py:705": "clean_last_n_checkpoints(args.output_dir, args.keep_last_n_c",
    "open_instruct/dpo_tune_cache.py:708": "if completed_steps >= args.max_train_steps:",
    "open_instruct/dpo_tune_cache.py:752": "model_utils.push_folder_to_hub(args.output_dir, args.hf_repo",
    "open_instruct/dpo_utils.py:88": "(DPOLossType.dpo, DPOLossType.dpo_norm, DPOLossType.wpo)",
    "open_instruct/dpo_utils.py:159": "push_to_hub: bool = True",
    "open_instruct/dpo_utils.py:269": 'metadata={"help": "Use qLoRA training - initializes model in',
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
    "open_instruct/dpo_utils.py:601": "policy_chosen_logps_average = (policy_chosen_logps * chosen_",
    "open_instruct/dpo_utils.py:863": "aux_loss = outputs.aux_loss",
    "open_instruct/dpo_utils.py:955": "aux_loss = torch.cat([chosen_aux_loss, rejected_aux_loss], d",
    "open_instruct/finetune.py:22": "import deepspeed",
    "open_instruct/finetune.py:126": '["allenai/tulu-3-sft-personas-algebra", "1.0"]',
    "open_instruct/finetune.py:183": "Log the training loss and learning rate every",
    "open_instruct/finetune.py:209": 'metadata={"help": "Use qLoRA training - initializes model in',
    "open_instruct/finetune.py:283": "push_to_hub: bool = True",
    "open_instruct/finetune.py:322": '"help": "Degree of Ulysses sequence parallelism. 1 means dis',
    "open_instruct/finetune.py:330": "self.dataset_name is not None and (self.dataset_mixer",
    "open_instruct/finetune.py:335": "try_launch_beaker_eval_jobs and not self.push_to_hub",
    "open_instruct/finetune.py:338": 'self.lr_scheduler_type != "linear"',
    "open_instruct/finetune.py:340": "1.0 >= self.final_lr_ratio >= 0.0",
    "open_instruct/finetune.py:348": 'passed_value.startswith("{")',
    "open_instruct/finetune.py:356": "num_warmup_steps = int(num_training_steps * args.warmup_rati",
    "open_instruct/finetune.py:358": "/ (1 - args.final_lr_ratio)",
    "open_instruct/finetune.py:374": '"log_with"] = args.report_to',
    "open_instruct/finetune.py:377": "timeout_kwargs = InitProcessGroupKwargs(timeout=timedelta(se",
    "open_instruct/finetune.py:385": 'f"WORLD_SIZE ({world_size}) must be divisible by sequence_pa',
    "open_instruct/finetune.py:393": "sp_seq_length_is_variable=True, sp_attn_implementation=model",
    "open_instruct/finetune.py:425": "if not args.do_not_randomize_output_dir",
    "open_instruct/finetune.py:427": "using the output directory: ",
    "open_instruct/finetune.py:435": "args.hf_entity = maybe_use_ai2_hf_entity()",
    "open_instruct/finetune.py:438": '"{args.hf_entity}/{args.hf_repo_id}"',
    "open_instruct/finetune.py:454": "args.wandb_entity = maybe_use_ai2_wandb_entity()",
    "open_instruct/finetune.py:470": 'accelerator.get_tracker("wandb")',
    "open_instruct/finetune.py:477": "pprint([args, tc])",
    "open_instruct/finetune.py:481": "logger.info(accelerator.state",
    "open_instruct/finetune.py:491": "set_seed(args.seed)",
    "open_instruct/finetune.py:494": "os.makedirs(args.output_dir, exist_ok=True)",
    "open_instruct/finetune.py:500": "with accelerator.main_process_first():",
    "open_instruct/finetune.py:501": 'transform_fn_args = [{"max_seq_length": args.max_seq_length}',
    "open_instruct/finetune.py:520": "if args.cache_dataset_only:",
    "open_instruct/finetune.py:528": "snapshot_download(model_path",
    "open_instruct/finetune.py:541": "args.model_name_or_path,",
    "open_instruct/finetune.py:544": "**args.additional_model_arguments,",
    "open_instruct/finetune.py:548": "from scratch. This is not supported",
    "open_instruct/finetune.py:560": 'device_map = {"": device_index}  # force data-parallel train',
    "open_instruct/finetune.py:575": "Attempting to apply liger-kernel.",
    "open_instruct/finetune.py:597": "dtype=torch.bfloat16,",
    "open_instruct/finetune.py:598": "attn_implementation=model_utils.detect_hf_attn_implementatio",
    "open_instruct/finetune.py:619": "if args.use_lora:",
    "open_instruct/finetune.py:630": "r=args.lora_rank,",
    "open_instruct/finetune.py:632": "lora_dropout=args.lora_dropout,",
    "open_instruct/finetune.py:642": "collate_fn = TensorDataCollatorWithFlattening()",
    "open_instruct/finetune.py:670": 'no_decay = ["bias", "layer_norm.weight"]',
    "open_instruct/finetune.py:688": "optimizer = torch.optim.AdamW(optimizer_grouped_parameters, ",
    "open_instruct/finetune.py:692": "math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)",
    "open_instruct/finetune.py:694": "args.max_train_steps = args.num_train_epochs * num_update_st",
    "open_instruct/finetune.py:734": "int(checkpointing_steps)",
    "open_instruct/finetune.py:737": "dp_world_size = accelerator.num_processes // args.sequence_p",
    "open_instruct/finetune.py:745": "  Total optimization steps = ",
    "open_instruct/finetune.py:754": "Resumed from checkpoint: ",
    "open_instruct/finetune.py:766": 'resume_batch_idx = int(training_difference.replace("step_", ',
    "open_instruct/finetune.py:803": '"`shift_labels` not found in batch with sequence parallelism',
    "open_instruct/finetune.py:828": "total_aux_loss += outputs.aux_loss.detach().float()",
    "open_instruct/finetune.py:836": 'sp_group = accelerator.torch_device_mesh["sp"].get_group()',
    "open_instruct/finetune.py:865": "if args.logging_steps and completed_steps % args.logging_ste",
    "open_instruct/finetune.py:911": "torch.cuda.max_memory_reserved(",
    "open_instruct/finetune.py:932": "total_fwd_passes = (",
    "open_instruct/finetune.py:951": "logger.info(",
    "open_instruct/finetune.py:956": "logger.info(",
    "open_instruct/finetune.py:974": "completed_steps % checkpointing_steps == 0",
    "open_instruct/finetune.py:979": "with open(os.path.join(get_last_checkpoint_path(args, incomp",
    "open_instruct/finetune.py:982": "clean_last_n_checkpoints(args.output_dir, args.keep_last_n_c",
    "open_instruct/finetune.py:985": "if completed_steps >= args.max_train_steps:",
    "open_instruct/finetune.py:988": 'checkpointing_steps == "epoch"',
    "open_instruct/finetune.py:1006": "if args.clean_checkpoints_at_end and accelerator.is_local_ma",
    "open_instruct/finetune.py:1027": "push_folder_to_hub(args.output_dir, args.hf_repo_id, args.hf",
    "open_instruct/model_utils.py:50": "_OLMO_CORE_TO_HF_ATTN: dict[",
    "open_instruct/model_utils.py:51": 'AttentionBackendName.flash_4: "flash_attention_4",',
    "open_instruct/model_utils.py:55": 'AttentionBackendName.te: "sdpa",',
    "open_instruct/model_utils.py:69": 'find_spec("flash_attn.cute")',
    "open_instruct/model_utils.py:93": "Auto-detected attention implementation: ",
    "open_instruct/model_utils.py:555": "state_dict = accelerator.get_state_dict(model)",
    "open_instruct/olmo_core_utils.py:57": "self.attn_implementation = model_utils.detect_attn_implement",
    "open_instruct/padding_free_collator.py:102": 'ret["cu_seq_lens_q"] = ret["cu_seq_lens_k"] = torch.tensor(',
    "open_instruct/utils.py:793": "if len(checkpoint_steps) > 0 and len(checkpoint_epochs) > 0:",
    "open_instruct/utils.py:813": "if args.output_dir and os.path.isdir(args.output_dir):",
    "open_instruct/utils.py:816": 'logger.warning("Output directory exists but no checkpoint fo',
    "open_instruct/utils.py:831": "if keep_last_n_checkpoints >= 0 and len(checkpoints) > keep_",
    "open_instruct/utils.py:835": "Remaining files:",
    "open_instruct/utils.py:1303": "api = wandb.Api()",
    "open_instruct/utils.py:1872": "GPU_SPECS[self.device_name]",
    "torch/distributed/elastic/multiprocessing/api.py:86": "got signal: ",
    "torch/distributed/elastic/multiprocessing/api.py:1003": "failed (exitcode: %s)",
    "torch/distributed/elastic/multiprocessing/errors/__init__.py:143": " received by PID ",
    "torch/distributed/elastic/multiprocessing/errors/__init__.py:188": "exitcode  : ",
    "torch/distributed/elastic/multiprocessing/subprocess_handler/subprocess_handler.py:66": "start_new_session",
    "transformers/hf_argparser.py:223": "if field.default_factory is not dataclasses.MISSING",
    "transformers/hf_argparser.py:354": "are not used by the HfArgumentParser",
    "transformers/hf_argparser.py:383": "are not used by the HfArgumentParser",
    "transformers/integrations/accelerate.py:135": 'raise ValueError("DeepSpeed Zero-3 is not compatible with pa',
    "transformers/integrations/integration_utils.py:2643": "INTEGRATION_TO_CALLBACK = {",
    "transformers/integrations/integration_utils.py:2674": "if integration not in INTEGRATION_TO_CALLBACK:",
    "transformers/modeling_utils.py:3556": "Model weights saved in",
    "transformers/modeling_utils.py:3565": "checkpoint shards",
    "transformers/optimization.py:373": 'raise ValueError("Only one of min_lr or min_lr_rate should',
    "transformers/optimization.py:377": 'raise ValueError("One of min_lr or min_lr_rate should be',
    "transformers/optimization.py:511": "num_decay_steps: int,",
    "transformers/optimization.py:1015": "return schedule_func(optimizer)",
    "transformers/trainer.py:461": '"Using --fsdp xxx together with --deepspeed is not',
    "transformers/trainer.py:589": "os.makedirs(self.args.output_dir, exist_ok=True)",
    "transformers/trainer.py:661": "if args.metric_for_best_model is None:",
    "transformers/trainer.py:702": "if self.train_dataset is not None and not",
    "transformers/trainer.py:768": "backend=self.args.torch_compile_backend,",
    "transformers/trainer.py:995": '"num_workers": self.args.dataloader_num_workers,',
    "transformers/trainer.py:1498": "if isinstance(resume_from_checkpoint, bool) and",
    "transformers/trainer.py:1597": "if args.eval_on_start:",
    "transformers/trainer.py:2199": "if self.args.save_strategy == SaveStrategy.BEST:",
    "transformers/trainer.py:3517": "raise ValueError(f\"Can't find a valid checkpoint at",
    "transformers/trainer_optimizer.py:71": 'key, value = mapping.split("=")',
    "transformers/trainer_optimizer.py:122": 'raise ValueError(f"You need to define',
    "transformers/trainer_optimizer.py:166": 'raise ValueError(f"Layerwise {optimizer_name} does not',
    "transformers/trainer_pt_utils.py:1440": "class AcceleratorConfig:",
    "transformers/trainer_utils.py:133": '"You cannot perform fine-tuning on purely quantized models.',
    "transformers/trainer_utils.py:191": "np.random.seed(seed)",
    "transformers/training_args.py:64": "trainer_log_levels = dict(",
    "transformers/training_args.py:161": "def _convert_str_dict",
    "transformers/training_args.py:1296": "parallelism_config: ParallelismConfig | None = field(",
    "transformers/training_args.py:1510": 'passed_value.startswith("{")',
    "transformers/training_args.py:1549": 'f"evaluation strategy {self.eval_strategy} requires either',
    "transformers/training_args.py:1558": 'self.metric_for_best_model = "loss"',
    "transformers/training_args.py:1612": "self.accelerator_config =",
    "transformers/training_args.py:1620": "self.accelerator_config =",
    "transformers/training_args.py:1650": 'raise ValueError("--tf32 requires Ampere or a newer GPU',
    "transformers/training_args.py:1694": "if not (isinstance(self.torch_empty_cache_steps, int) and",
    "transformers/training_args.py:1701": "requires non-zero --logging_steps",
    "transformers/training_args.py:1704": "if self.logging_steps != int(self.logging_steps):",
    "transformers/training_args.py:1708": "if self.eval_steps != int(self.eval_steps):",
    "transformers/training_args.py:1712": "if self.save_steps != int(self.save_steps):",
    "transformers/training_args.py:1718": "if self.eval_strategy != self.save_strategy:",
    "transformers/training_args.py:1723": "if self.eval_strategy == IntervalStrategy.STEPS and",
    "transformers/training_args.py:1725": "if not (self.eval_steps < 1 and self.save_steps < 1):",
    "transformers/training_args.py:1747": "error_message = \"Your setup doesn't support bf16/gpu. You",
    "transformers/training_args.py:1753": "At most one of fp16 and bf16",
    "transformers/training_args.py:1756": 'raise ValueError("At most one of fp16 and bf16 can be True',
    "transformers/training_args.py:1760": 'raise ValueError("lr_scheduler_type reduce_lr_on_plateau',
    "transformers/training_args.py:1766": 'raise ValueError("lr_scheduler_type greedy requires an eval',
    "transformers/training_args.py:1768": "if self.warmup_steps < 0:",
    "transformers/training_args.py:1771": "if self.dataloader_num_workers == 0 and",
    "transformers/training_args.py:1827": "if PartialState._shared_state == {}:",
    "transformers/training_args.py:1859": 'accelerator_state_kwargs["timeout"] =',
    "transformers/training_args.py:2734": "def _process_fsdp_args(self):",
    "transformers/training_args.py:2735": "if not self.fsdp:",
    "transformers/training_args.py:2740": "elif isinstance(self.fsdp_config, str):",
    "transformers/training_args.py:2772": "self.xla_fsdp_config =",
    "transformers/training_args.py:2793": 'raise ValueError(f"`auto_wrap_policy` must be one of',
    "transformers/training_args.py:2886": 'f"`fsdp={item}` is only available with FSDP1. Set',
    "transformers/training_args.py:2896": 'raise ValueError(f"Unknown `fsdp` option: {item}")',
    "transformers/utils/logging.py:44": "log_levels = {",
    "trl/scripts/_hf_argparser.py:254": "_accept_none(field.type) if accepts_none",
    "trl/scripts/dpo.py:81": "model_init_kwargs.update(training_args.model_init_kwargs)",
    "trl/scripts/dpo.py:98": "Either `datasets` or `dataset_name`",
    "trl/scripts/dpo.py:105": "eval_dataset=dataset[script_args.dataset_test_split] if",
    "trl/scripts/dpo.py:122": "Training completed.",
    "trl/scripts/dpo.py:126": "Model saved to ",
    "trl/scripts/sft.py:83": "model_init_kwargs.update(training_args.model_init_kwargs)",
    "trl/scripts/sft.py:100": "Either `datasets` or `dataset_name`",
    "trl/scripts/sft.py:104": "model=model_args.model_name_or_path",
    "trl/scripts/sft.py:107": "eval_dataset=dataset[script_args.dataset_test_split] if",
    "trl/scripts/sft.py:116": "Training completed.",
    "trl/scripts/sft.py:120": "Model saved to ",
    "trl/scripts/utils.py:121": "datasets: list[DatasetConfig]",
    "trl/scripts/utils.py:488": 'return datasets.DatasetDict({"train": combined_dataset})',
    "trl/trainer/dpo_config.py:360": "len(self.loss_weights) != len(self.loss_type)",
    "trl/trainer/dpo_config.py:382": 'self.pad_to_multiple_of != "auto"',
    "trl/trainer/dpo_trainer.py:565": '"You set `quantization_config` both as a trainer argument',
    "trl/trainer/dpo_trainer.py:735": '"`padding_free=True` is temporarily unavailable after a',
    "trl/trainer/dpo_trainer.py:810": 'f_divergence_loss_types = {"sigmoid", "sigmoid_norm",',
    "trl/trainer/dpo_trainer.py:811": 'if self.f_divergence_type != "reverse_kl" and not',
    "trl/trainer/dpo_trainer.py:819": 'if self.use_weighting and any(loss_type in {"aot",',
    "trl/trainer/dpo_trainer.py:824": 'if "robust" in self.loss_types and not (0.0 <=',
    "trl/trainer/dpo_trainer.py:829": 'if "exo_pair" in self.loss_types and self.label_smoothing',
    "trl/trainer/dpo_trainer.py:839": '"Applying a PEFT adapter to `lm_head` is not supported: the',
    "trl/trainer/dpo_trainer.py:995": '"You passed `sync_ref_model=True` while using a PEFT model,',
    "trl/trainer/dpo_trainer.py:1004": '"You cannot use `sync_ref_model=True` together with',
    "trl/trainer/dpo_trainer.py:1171": '"`precompute_ref_log_probs=True` is not supported with',
    "trl/trainer/dpo_trainer.py:1209": "Computing reference log probs for ",
    "trl/trainer/dpo_trainer.py:1237": "Caching reference log probs for ",
    "trl/trainer/dpo_trainer.py:1381": 'raise ValueError(f"Unknown f_divergence_type:',
    "trl/trainer/dpo_trainer.py:1404": "per_sequence_loss = (ipo_delta - 1 / (2 * self.beta)) ** 2",
    "trl/trainer/dpo_trainer.py:1431": "per_sequence_loss = (clean_loss_term - flipped_loss_term) /",
    "trl/trainer/dpo_trainer.py:1443": "winner_margin_error = (chosen_logratios - 0.5 / self.beta)",
    "trl/trainer/dpo_trainer.py:1513": 'f"Unknown loss type: {loss_type}. Should be one of',
    "trl/trainer/model_config.py:174": "self.load_in_8bit and self.load_in_4bit",
    "trl/trainer/sft_config.py:202": "max_length: int | None = field(",
    "trl/trainer/sft_config.py:307": 'self.pad_to_multiple_of != "auto"',
    "trl/trainer/sft_trainer.py:687": '"You set `quantization_config` both as a trainer argument',
    "trl/trainer/sft_trainer.py:1001": '"When `padding_free=True` without packing, `max_length` is',
    "trl/trainer/sft_trainer.py:1070": '"Applying a PEFT adapter to `lm_head` is not supported: the',
    "trl/trainer/sft_trainer.py:1088": "\"`gradient_checkpointing_kwargs={'selective': True}`",
    "trl/trainer/sft_trainer.py:1092": "\"`gradient_checkpointing_kwargs={'selective': True}`",
    "trl/trainer/sft_trainer.py:1468": 'raise ValueError("When packing is enabled, `max_length`',
    "trl/trainer/utils.py:297": "r=model_args.lora_r,",
    "open_instruct/utils.py:527": "if any(frac_or_samples > 1 for frac_or_samples",
    "open_instruct/finetune.py:498": "if args.dataset_mixer is not None:",
    "open_instruct/finetune.py:411": "args.model_name_or_path if tc.tokenizer_name_or_path is None",
    "open_instruct/dpo_tune_cache.py:152": "args.model_name_or_path if tc.tokenizer_name_or_path is None",
    "open_instruct/dpo_tune_cache.py:376": "elif args.activation_memory_budget < 1:",
}

# The releases whose lines are cited, by the package's folder: (distribution, version).
RELEASES = {
    "accelerate": ("accelerate", "1.15.0"),
    "deepspeed": ("deepspeed", "0.18.9"),
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
