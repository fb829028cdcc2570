"""What accelerate and transformers themselves do, as a process: DeepSpeed configs, packed rows.

usage: python real_trl_machine.py deepspeed < requests.jsonl > answers.jsonl
       python real_trl_machine.py packing < models.json > leaks.json

`deepspeed`: one line in is {"file": ..., "arguments": ..., "running": "bf16", "own": false}, one line
out whether it is refused. `packing`: in is {model type: its config}, out {model type: whether a
document in a row sees the one before it}. Exit code 1, with the reason on stderr, where the packages
are not there or other releases are.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

PINNED = {"transformers": "5.17.0", "accelerate": "1.15.0"}


def refused(file, arguments, running, own):
    """In the order in which they see it: launch's file first meets accelerate, TRL's own last."""
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    given = SimpleNamespace(**arguments)
    try:
        if own:
            filled = HfTrainerDeepSpeedConfig(file)
            filled.trainer_config_process(given)
            DeepSpeedPlugin(hf_ds_config=filled).set_mixed_precision(running)
        else:
            plugin = DeepSpeedPlugin(hf_ds_config=file)
            plugin.set_mixed_precision(running)
            filled = HfTrainerDeepSpeedConfig(plugin.hf_ds_config.config)
            filled.trainer_config_process(given)
    except ValueError:
        return True
    return bool(filled.mismatches)


def leaks(kind, config):
    """Whether a document's logits change with what lies before it in the row."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    built = AutoConfig.for_model(kind, **config)
    network = AutoModelForCausalLM.from_config(built, attn_implementation="eager").eval()
    for weights in network.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.2)
    last, marks = torch.randint(3, 60, (1, 6)), torch.tensor([0, 8, 14], dtype=torch.int32)

    def logits():
        # a row as TRL's collator makes it
        with torch.no_grad():
            answer = network(
                input_ids=torch.cat([torch.randint(3, 60, (1, 8)), last], dim=1),
                position_ids=torch.cat([torch.arange(8), torch.arange(6)])[None],
                cu_seq_lens_q=marks, cu_seq_lens_k=marks, max_length_q=8, max_length_k=8,
                seq_idx=torch.tensor([[0] * 8 + [1] * 6], dtype=torch.int32), use_cache=False,
            )  # fmt: skip
        return answer.logits[0, 8:]

    return bool((logits() - logits()).abs().max() > 1e-4)


def main():
    # DeepSpeed's own lines go to stdout
    answers, sys.stdout = sys.stdout, sys.stderr
    for name, wanted in PINNED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "not installed"
        if found != wanted:
            sys.exit(f"{name} is {found}, not {wanted}")
    try:
        import torch  # noqa: F401

        if sys.argv[1] == "deepspeed":
            import deepspeed  # noqa: F401
    except ImportError as error:
        sys.exit(str(error))
    if sys.argv[1] == "packing":
        asked = json.load(sys.stdin)
        print(json.dumps({kind: leaks(kind, it) for kind, it in asked.items()}), file=answers)
        return
    for line in sys.stdin:
        print(json.dumps(refused(**json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
