"""TRL's own preparation of data sets as a process: folders in, what the model would get out.

usage: python real_rows.py MODEL < requests.jsonl > answers.jsonl

One line in: {"stage": "sft", "data": "folder", "args": {...}}; one line out: {"error": null or why
the trainer refuses, "rows": [[text, ...], ...]}, where a row of SFT is one text, and one of DPO
prompt, chosen, rejected.
Exit code 3 where the packages are not there.
"""

import contextlib
import json
import os
import sys
import tempfile
import warnings

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", CUDA_VISIBLE_DEVICES="")
warnings.filterwarnings("ignore")

COLUMNS = {"sft": ["input_ids"], "dpo": ["prompt_ids", "chosen_ids", "rejected_ids"]}


def prepare(model, stage, data, args):
    import datasets
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    rows = datasets.load_dataset(data, cache_dir=tempfile.mkdtemp(dir=os.getcwd()))["train"]
    config = SFTConfig if stage == "sft" else DPOConfig
    trainer = SFTTrainer if stage == "sft" else DPOTrainer
    fixed = {
        "output_dir": "output",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "max_length": 256,
    }
    built = trainer(model, args=config(**fixed, **args), train_dataset=rows)
    decode = built.processing_class.decode
    return [[decode(row[column]) for column in COLUMNS[stage]] for row in built.train_dataset]


def answer(model, request):
    try:
        return {
            "error": None,
            "rows": prepare(model, request["stage"], request["data"], request["args"]),
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}", "rows": []}


def main():
    try:
        import datasets
        import trl  # noqa: F401
    except ImportError as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    datasets.disable_progress_bars()
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            print(json.dumps(answer(sys.argv[1], json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
