"""A script with arguments that it never reads, or reads only where others are set."""

FINETUNE = """\
from dataclasses import dataclass
from open_instruct.helper import setup


@dataclass
class FlatArguments:
    model_name_or_path: str | None = None
    dataset_mixer_list: list[str] | None = None
    output_dir: str = "output"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: int = 2
    max_train_steps: int | None = None
    max_seq_length: int | None = None
    logging_steps: int | None = None
    do_not_randomize_output_dir: bool = False
    cache_dataset_only: bool = False
    use_lora: bool = False
    use_qlora: bool = False
    lora_rank: int = 64
    bits: int = 8
    forgotten: int = 3
    forgotten_list: list[str] | None = None
    forgotten_flag: bool = False
    verbose: bool = False
    often: int = 5
    shadowed: str | None = None
    first: str = "x"
    folder: str = "y"
    spare: int = 0

    def __post_init__(self):
        if self.use_qlora and not self.use_lora:
            raise ValueError("qlora needs lora")


def main(args):
    setup(args)
    if args.cache_dataset_only:
        return
    train(args)


def train(args):
    work(args.model_name_or_path, args.dataset_mixer_list, args.num_train_epochs)
    work(args.max_train_steps, args.max_seq_length, args.per_device_train_batch_size)
    if args.use_lora:
        work(args.lora_rank)
        if args.use_qlora:
            work(args.bits)
    if args.logging_steps:
        work(args.verbose)
    if args.gradient_accumulation_steps > 1:
        work(args.often)
    if not args.do_not_randomize_output_dir:
        work(args.folder, args.output_dir)
    if args.spare > 100:
        raise ValueError(f"too much: {args.spare}")


if __name__ == "__main__":
    parser = ArgumentParserPlus((FlatArguments,))
    args = parser.parse()
    main(args)
"""
HELPER = """\
def setup(args):
    if args.first is None:
        raise ValueError("first")
    if args.shadowed is not None and args.first is None:
        args.first = args.shadowed
    work(args.first)
"""
