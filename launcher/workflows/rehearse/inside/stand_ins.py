"""A tokenizer and rows to rehearse with where the run's own are not on this machine."""

from __future__ import annotations

from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|begin_of_text|>", "<|eot_id|>")
ROWS = 64


def write_tokenizer(out: str, model_type: str) -> int:
    """Write a tokenizer of single bytes with a ChatML template into a folder; how many tokens it has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate((*SPECIAL, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    first = {"bos_token": "<|begin_of_text|>"} if model_type == "llama" else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", **first)
    fast.chat_template = CHATML
    fast.save_pretrained(out)
    return len(vocabulary)


def rows(*, pairs: bool) -> list[dict[str, Any]]:
    """Conversations as the hub's sets hold them: messages for SFT, pairs for DPO."""
    made = []
    for number in range(ROWS):
        question = {"role": "user", "content": f"What is {number} plus {number % 7}?"}
        answer = {"role": "assistant", "content": f"It is {number + number % 7}. " * (1 + number % 3)}
        wrong = {"role": "assistant", "content": f"I do not know, perhaps {number}."}
        pair = {"chosen": [question, answer], "rejected": [question, wrong]}
        made.append(pair if pairs else {"messages": [question, answer]})
    return made
