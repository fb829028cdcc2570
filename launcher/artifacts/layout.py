"""Which names trainers give to what they leave in an output folder.

What has another name there is somebody's own: it is never taken for a run's, whenever it was
written.
"""

import re

PREVIOUS_CARD = "README.before.md"
"""What `launch card --replace` calls the card that lay there before."""
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".distcp", ".jinja", ".index.json")
_FILES = frozenset(
    """
    config.json generation_config.json adapter_config.json trainer_state.json training_args.bin
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
    chat_template.json
    vocab.json vocab.txt merges.txt tokenizer.model spiece.model sentencepiece.bpe.model tekken.json
    preprocessor_config.json processor_config.json video_preprocessor_config.json
    README.md .gitattributes all_results.json train_results.json
    COMPLETED latest latest_checkpointed_iteration.txt zero_to_fp32.py .metadata .metadata.json
    data_paths.txt
    """.split()
)
# events of TensorBoard; code that a model brings along
_FURTHER = re.compile(r"events\.out\.tfevents\.|(?:modeling|configuration|tokenization)_\w+\.py\Z")
# finetune.py::main[output_dir = f #1] and
# dpo_tune_cache.py::main[accelerator.save_state(output_dir #1],
# transformers/trainer.py::Trainer._save_checkpoint, OLMo-core
_CHECKPOINT = re.compile(r"(?:tmp-)?checkpoint-\d+\Z|(?:step|epoch)_\d+\Z|step\d+\Z", re.ASCII)
_FOLDERS = frozenset(
    {"hf_model", "runs"}
)  # dpo.py::_handle_post_training[hf_model_path = os.path.join]; TensorBoard


def is_file(name: str) -> bool:
    """Whether a trainer calls a file so, in an output folder or in a checkpoint."""
    return name in _FILES or name.endswith(_SUFFIXES) or _FURTHER.match(name) is not None


def is_checkpoint(name: str) -> bool:
    """Whether a trainer calls the folder of a training state so."""
    return _CHECKPOINT.match(name) is not None


def is_folder(name: str) -> bool:
    """Whether a trainer calls a folder so, directly below its output."""
    return name in _FOLDERS or is_checkpoint(name)
