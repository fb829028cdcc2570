"""Rules about finetune.py, dpo_tune_cache.py and dpo.py."""
