"""open-instruct's own preparation of data as a process: files in, what the model would get out.

usage: python real_open_instruct_rows.py CHECKOUT MODEL < requests.jsonl > answers.jsonl

One line in: {"stage": "sft", "data": "rows.jsonl"}; one line out: {"error": null or why not,
"total": its rows, "rows": [[text, trained text], ...]}, where a row of DPO has both twice, chosen
and rejected.
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

STAGES = {
    "sft": ("sft_tulu_tokenize_and_truncate_v1", "sft_tulu_filter_v1", [("input_ids", "labels")]),
    "dpo": (
        "preference_tulu_tokenize_and_truncate_v1",
        "preference_tulu_filter_v1",
        [("chosen_input_ids", "chosen_labels"), ("rejected_input_ids", "rejected_labels")],
    ),
}


def prepare(upstream, tokenizer, stage, data):
    import datasets

    kind = {"jsonl": "json", "parquet": "parquet"}[data.rpartition(".")[2]]
    cache = tempfile.mkdtemp(dir=os.getcwd())
    rows = datasets.load_dataset(kind, data_files=data, split="train", cache_dir=cache)
    transform, keep, columns = STAGES[stage]
    arguments = {"tokenizer": tokenizer, "max_seq_length": 256}
    tokenised = rows.map(
        getattr(upstream, transform), fn_kwargs=arguments, remove_columns=rows.column_names
    )
    kept = tokenised.filter(getattr(upstream, keep), fn_kwargs={"tokenizer": tokenizer})
    texts = []
    for row in kept:
        words = []
        for tokens, labels in columns:
            words.append(tokenizer.decode(row[tokens]))
            words.append(tokenizer.decode([label for label in row[labels] if label >= 0]))
        texts.append(words)
    return len(rows), texts


def answer(upstream, tokenizer, request):
    try:
        total, rows = prepare(upstream, tokenizer, request["stage"], request["data"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}", "total": 0, "rows": []}
    return {"error": None, "total": total, "rows": rows}


def main():
    checkout, model = sys.argv[1:]
    sys.path.insert(0, checkout)
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            import datasets
            from open_instruct import dataset_transformation as upstream
        except ImportError as error:
            print(error, file=sys.stderr)
            sys.exit(3)
        datasets.disable_progress_bars()
        config = upstream.TokenizerConfig(tokenizer_name_or_path=model, chat_template_name="tulu")
        for line in sys.stdin:
            print(
                json.dumps(answer(upstream, config.tokenizer, json.loads(line))),
                file=answers,
                flush=True,
            )


if __name__ == "__main__":
    main()
