"""What arguments of TRL's are called elsewhere, and the values that are spelt differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.stage.conversion.ledger import ConversionLedger
from launcher.stage.conversion.settings import SourceSetting, is_off, is_on, split_words


def parse_pairs(text: str) -> dict[str, str]:
    """`theirs=ours theirs=ours` as a mapping."""
    return dict(pair.split("=", 1) for pair in text.split())


AXOLOTL = parse_pairs(
    "base_model=model_name_or_path revision_of_model=model_revision sequence_len=max_length "
    "sample_packing=packing micro_batch_size=per_device_train_batch_size "
    "eval_sample_packing=eval_packing eval_batch_size=per_device_eval_batch_size "
    "num_epochs=num_train_epochs lr_scheduler=lr_scheduler_type optimizer=optim "
    "warmup_ratio=warmup_steps peft_use_dora=use_dora peft_use_rslora=use_rslora dpo_beta=beta "
    "rl_beta=beta dpo_label_smoothing=label_smoothing dataset_processes=dataset_num_proc "
    "dataset_num_proc=dataset_num_proc wandb_name=run_name torch_dtype=dtype "
    "hub_model_id=hub_model_id wandb_run_name=run_name "
    "auto_resume_from_checkpoints=resume_from_checkpoint logging_steps=logging_steps"
)
LLAMA_FACTORY = parse_pairs(
    "cutoff_len=max_length preprocessing_num_workers=dataset_num_proc warmup_ratio=warmup_steps "
    "pref_beta=beta pref_loss=loss_type dpo_label_smoothing=label_smoothing "
    "enable_liger_kernel=use_liger_kernel additional_target=lora_modules_to_save "
    "evaluation_strategy=eval_strategy lora_rank=lora_r torch_dtype=dtype "
    "model=model_name_or_path micro_batch_size=per_device_train_batch_size bf16=bf16 "
    "use_llama_pro=use_llama_pro"
)
TRL = parse_pairs(
    "max_seq_length=max_length warmup_ratio=warmup_steps torch_dtype=dtype "
    "evaluation_strategy=eval_strategy use_liger=use_liger_kernel "
    "preprocessing_num_workers=dataset_num_proc model_name=model_name_or_path lora_rank=lora_r "
    "use_lora=use_peft bnb_4bit_use_double_quant=use_bnb_nested_quant"
)
TORCHTUNE = parse_pairs(
    "batch_size=per_device_train_batch_size epochs=num_train_epochs "
    "gradient_accumulation_steps=gradient_accumulation_steps optimizer.lr=learning_rate "
    "optimizer.weight_decay=weight_decay lr_scheduler.num_warmup_steps=warmup_steps "
    "tokenizer.max_seq_len=max_length model.lora_rank=lora_r model.lora_alpha=lora_alpha "
    "model.lora_dropout=lora_dropout model.use_dora=use_dora dataset.packed=packing "
    "loss.beta=beta loss.label_smoothing=label_smoothing clip_grad_norm=max_grad_norm "
    "compile=torch_compile log_every_n_steps=logging_steps "
    "enable_activation_checkpointing=gradient_checkpointing "
    "enable_activation_offloading=activation_offloading dtype=dtype seed=seed "
    "output_dir=output_dir batch_size_val=per_device_eval_batch_size "
    "run_val_every_n_steps=eval_steps"
)
OPENRLHF = parse_pairs(
    "pretrain=model_name_or_path model_name_or_path=model_name_or_path max_len=max_length "
    "max_epochs=num_train_epochs lr=learning_rate learning_rate=learning_rate "
    "actor_learning_rate=learning_rate lr_scheduler=lr_scheduler_type lr_warmup_ratio=warmup_steps "
    "save_path=output_dir output_dir=output_dir beta=beta label_smoothing=label_smoothing "
    "l2=weight_decay weight_decay=weight_decay max_norm=max_grad_norm lora_rank=lora_r "
    "lora_alpha=lora_alpha lora_dropout=lora_dropout target_modules=lora_target_modules "
    "gradient_checkpointing=gradient_checkpointing "
    "gradient_checkpointing_enable=gradient_checkpointing logging_steps=logging_steps "
    "save_steps=save_steps max_ckpt_num=save_total_limit seed=seed wandb_run_name=run_name "
    "packing_samples=packing use_liger_kernel=use_liger_kernel "
    "attn_implementation=attn_implementation eval_steps=eval_steps"
)
SWIFT = parse_pairs(
    "model=model_name_or_path model_id_or_path=model_name_or_path model_revision=model_revision "
    "torch_dtype=dtype dtype=dtype lora_rank=lora_r target_modules=lora_target_modules "
    "lora_target_modules=lora_target_modules attn_impl=attn_implementation "
    "warmup_ratio=warmup_steps rpo_alpha=rpo_alpha dataset_num_proc=dataset_num_proc "
    "modules_to_save=lora_modules_to_save evaluation_strategy=eval_strategy "
    "batch_size=per_device_train_batch_size max_seq_length=max_length"
)
VERL = parse_pairs(
    "model.partial_pretrain=model_name_or_path model.path=model_name_or_path "
    "data.max_length=max_length optim.lr=learning_rate optim.weight_decay=weight_decay "
    "optim.clip_grad=max_grad_norm optim.lr_scheduler=lr_scheduler_type "
    "optim.lr_warmup_steps_ratio=warmup_steps optim.warmup_steps_ratio=warmup_steps "
    "trainer.default_local_dir=output_dir trainer.total_epochs=num_train_epochs "
    "trainer.total_training_steps=max_steps trainer.seed=seed trainer.save_freq=save_steps "
    "trainer.experiment_name=run_name model.lora_alpha=lora_alpha "
    "model.target_modules=lora_target_modules "
    "model.enable_gradient_checkpointing=gradient_checkpointing model.use_liger=use_liger_kernel "
    "trainer.logger=report_to model.trust_remote_code=trust_remote_code"
)
# scripts of one's own; what several of them mean by a name, or what the name says by itself
OWN = parse_pairs(
    "model=model_name_or_path model_name=model_name_or_path base_model=model_name_or_path "
    "model_path=model_name_or_path pretrain=model_name_or_path "
    "pretrained_model_name_or_path=model_name_or_path model_id=model_name_or_path "
    "base_model_name_or_path=model_name_or_path model_dir=model_name_or_path "
    "hf_model=model_name_or_path base_model_name=model_name_or_path "
    "policy_model=model_name_or_path revision=model_revision max_seq_length=max_length "
    "max_seq_len=max_length model_max_length=max_length cutoff_len=max_length "
    "block_size=max_length seq_length=max_length seq_len=max_length max_len=max_length "
    "sequence_len=max_length max_source_length=max_length max_sequence_length=max_length "
    "context_length=max_length max_token_length=max_length max_tokens=max_length "
    "lr=learning_rate learning_rate=learning_rate epochs=num_train_epochs "
    "num_epochs=num_train_epochs max_epochs=num_train_epochs n_epochs=num_train_epochs "
    "epoch=num_train_epochs micro_batch_size=per_device_train_batch_size "
    "per_device_batch_size=per_device_train_batch_size "
    "micro_train_batch_size=per_device_train_batch_size "
    "per_gpu_train_batch_size=per_device_train_batch_size "
    "train_batch_size=per_device_train_batch_size batch_size=per_device_train_batch_size "
    "bs=per_device_train_batch_size val_batch_size=per_device_eval_batch_size "
    "eval_batch_size=per_device_eval_batch_size grad_accum=gradient_accumulation_steps "
    "gradient_accumulation=gradient_accumulation_steps "
    "accumulation_steps=gradient_accumulation_steps grad_acc=gradient_accumulation_steps "
    "grad_acc_steps=gradient_accumulation_steps "
    "gradient_accumulate_steps=gradient_accumulation_steps "
    "grad_accum_steps=gradient_accumulation_steps "
    "accumulate_grad_batches=gradient_accumulation_steps save_path=output_dir "
    "save_dir=output_dir output_path=output_dir output=output_dir out_dir=output_dir "
    "checkpoint_dir=output_dir out=output_dir saving_path=output_dir "
    "lr_scheduler=lr_scheduler_type scheduler=lr_scheduler_type lr_schedule=lr_scheduler_type "
    "warmup_ratio=warmup_steps warmup=warmup_steps num_warmup_steps=warmup_steps "
    "lr_warmup_ratio=warmup_steps wd=weight_decay optimizer=optim optim_name=optim "
    "optimizer_type=optim torch_dtype=dtype lora_rank=lora_r r=lora_r lora_dim=lora_r "
    "peft_lora_r=lora_r peft_lora_alpha=lora_alpha target_modules=lora_target_modules "
    "lora_target=lora_target_modules lora_modules=lora_target_modules use_lora=use_peft "
    "use_peft_lora=use_peft lora=use_peft lora_enable=use_peft enable_lora=use_peft "
    "peft=use_peft use_4bit_quantization=load_in_4bit use_4bit=load_in_4bit "
    "use_8bit=load_in_8bit use_8bit_quantization=load_in_8bit "
    "use_nested_quant=use_bnb_nested_quant bnb_4bit_use_double_quant=use_bnb_nested_quant "
    "evaluation_strategy=eval_strategy evaluation_steps=eval_steps use_liger=use_liger_kernel "
    "use_gradient_checkpointing=gradient_checkpointing grad_checkpointing=gradient_checkpointing "
    "gradient_clipping=max_grad_norm max_norm=max_grad_norm grad_clip=max_grad_norm "
    "clip_grad=max_grad_norm clip_grad_norm=max_grad_norm wandb_run_name=run_name "
    "wandb_name=run_name experiment_name=run_name exp_name=run_name random_state=seed "
    "random_seed=seed preprocessing_num_workers=dataset_num_proc num_proc=dataset_num_proc "
    "num_workers=dataloader_num_workers hub_path=hub_model_id max_train_steps=max_steps "
    "total_steps=max_steps lora_modules=lora_target_modules double_quant=use_bnb_nested_quant "
    "quant_type=bnb_4bit_quant_type name_or_path=model_name_or_path "
    "neftune_alpha=neftune_noise_alpha checkpointing_steps=save_steps dpo_beta=beta "
    "resume=resume_from_checkpoint"
)
FOREIGN: Mapping[str, Mapping[str, str]] = {
    "axolotl": AXOLOTL,
    "llama_factory": LLAMA_FACTORY,
    "trl": TRL,
    "torchtune": TORCHTUNE,
    "openrlhf": OPENRLHF,
    "swift": SWIFT,
    "verl": VERL,
}

_OWN = "own"
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
    "float": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "torch.float32": "float32",
}
_ATTENTION = {
    "flash_attn": "flash_attention_2",
    "flash_attention": "flash_attention_2",
    "flash_attn_2": "flash_attention_2",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
    "disabled": "eager",
}
_OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw_hf": "adamw_torch",
    "adam": "adamw_torch",
    "PagedAdamW8bit": "paged_adamw_8bit",
}
_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "dtype": _DTYPES,
    "attn_implementation": _ATTENTION,
    "optim": _OPTIMIZERS,
}
_FLASH = frozenset(
    "flash_attention use_flash_attn use_flash_attention use_flash_attention_2 flash_attn "
    "use_flash_attn_2 use_fa2 enable_flash_attention flash_attn_2".split()
)


def spell_for_trl(target: str, value: Any) -> Any:
    """A value as TRL spells it."""
    if target in _SPELLINGS:
        return _SPELLINGS[target].get(str(value), value)
    if target in ("lora_target_modules", "lora_modules_to_save") and isinstance(value, str):
        return _spell_modules(value)
    if target == "num_train_epochs" and isinstance(value, float) and value.is_integer():
        return int(value)
    if target == "report_to" and is_off(value):
        return "none"
    if target in ("eval_strategy", "save_strategy") and value is False:
        return "no"
    return value


def _spell_modules(text: str) -> list[str]:
    if text in ("all", "all-linear", "all_linear"):
        return ["all-linear"]
    return split_words(text)


def carry_rest(
    ledger: ConversionLedger,
    names: Mapping[str, str],
    reasons: Mapping[str, str],
    unneeded: Mapping[str, str],
) -> None:
    """Carry every setting that no module has settled, by its name."""
    for setting in ledger.recipe.settings:
        if ledger.is_settled(setting):
            continue
        if setting.key in _FLASH and "attn_implementation" in ledger.schema.fields:
            _carry_flash(ledger, setting)
            continue
        target = names.get(setting.key, setting.key)
        spelt = replace(setting, value=spell_for_trl(target, setting.value))
        ledger.carry_by_name(spelt, names, reasons, unneeded)


def _carry_flash(ledger: ConversionLedger, setting: SourceSetting) -> None:
    if setting.missing:
        ledger.carry_by_name(setting, {}, {}, {})
    elif is_on(setting.value):
        ledger.carry(setting, "attn_implementation", "flash_attention_2")
    else:
        ledger.leave(setting, "off: the model's default attention", matters=False)


def carry_warmup(ledger: ConversionLedger) -> None:
    """Steps come before a ratio, and `warmup_steps` takes a share too.

    transformers/training_args.py::TrainingArguments[warmup_steps: float]
    """
    steps = ledger.take("warmup_steps")
    ratio = ledger.take("warmup_ratio", "lr_warmup_ratio")
    if ratio is None or "warmup_steps" not in ledger.schema.fields:
        return
    if steps is not None and not is_off(steps.value) and steps.value != 0:
        ledger.carry(steps, "warmup_steps", steps.value)
        ledger.leave(ratio, "`warmup_steps` comes before it", matters=False)
        return
    if isinstance(ratio.value, int | float):
        note = f"{ratio.key}: below 1 it is a share of all steps"
        ledger.carry(ratio, "warmup_steps", ratio.value, note=note)
        if steps is not None:
            ledger.point(steps, "warmup_steps")


def trains_lora(ledger: ConversionLedger, method: SourceSetting | None) -> bool:
    """Whether a tool trains LoRA, which is its default; leaves another method out."""
    if method is None:
        return True
    kind = str(method.value)
    if kind == "full":
        ledger.leave(method, "all weights are trained, as without LoRA here", matters=False)
    elif kind != "lora":
        ledger.leave(method, f"`{kind}`: TRL trains all weights, or LoRA")
    return kind == "lora"


_LORA_SWITCHES = (
    "use_lora",
    "use_peft",
    "use_peft_lora",
    "lora",
    "lora_enable",
    "enable_lora",
    "peft",
)


def carry_lora(ledger: ConversionLedger) -> None:
    """Switch LoRA on where a source names what it needs, and keep its quantization."""
    setting = ledger.take(*_LORA_SWITCHES)
    if setting is not None and not isinstance(setting.value, dict):
        if is_on(setting.value):
            ledger.carry(setting, "use_peft", value=True)
        elif is_off(setting.value) or setting.value == 0:
            ledger.leave(setting, "no LoRA", matters=False)
    rank = ledger.take("lora_r", "lora_rank", "lora_dim", "peft_lora_r")
    if (
        setting is None
        and rank is not None
        and ledger.recipe.tool == _OWN
        and isinstance(rank.value, int)
    ):
        if ledger.switch_on_lora(rank):
            ledger.check(rank, "taken as LoRA: the script names a rank")
        else:
            ledger.leave(rank, "no LoRA", matters=False)
    quantized = ledger.take("q_lora", "use_qlora", "qlora")
    if quantized is None:
        return
    if is_on(quantized.value):
        ledger.carry(quantized, "use_peft", value=True)
        ledger.carry(quantized, "load_in_4bit", value=True)
    else:
        ledger.leave(quantized, "no QLoRA", matters=False)


def carry_bits(ledger: ConversionLedger) -> None:
    """`--bits 4`, as artidoro/qlora and others have it."""
    setting = ledger.take("bits", "quantization_bit", "quant_bits", "load_in_bits")
    if setting is None:
        return
    if setting.value in (4, 8):
        ledger.carry(setting, f"load_in_{setting.value}bit", value=True)
        ledger.carry(setting, "use_peft", value=True)
    else:
        ledger.leave(setting, "nothing is quantized", matters=False)


def carry_reentrant(ledger: ConversionLedger) -> None:
    setting = ledger.take("use_reentrant")
    if setting is not None and "gradient_checkpointing_kwargs" in ledger.schema.fields:
        value = {"use_reentrant": is_on(setting.value)}
        ledger.carry(setting, "gradient_checkpointing_kwargs", value)
