"""Small open-instruct repositories over commits: two entry scripts and what they import."""

import os
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path

_CLEAN = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_AUTHOR_DATE": "2026-01-02T03:04:05Z",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_COMMITTER_DATE": "2026-01-02T03:04:05Z",
}

SCRIPT = """
import os
from dataclasses import dataclass, field
from open_instruct.dataset_transformation import TokenizerConfig, cached
from open_instruct.utils import ArgumentParserPlus
{imports}

{fields}

def main(args, tc):
    cached(args.{data}, tc)
{reads}
    for step in range(args.{epochs}):
        print(args.model_name_or_path, args.output_dir, args.max_seq_length, args.logging_steps)
        print(args.per_device_train_batch_size, args.gradient_accumulation_steps)
        use(args.model_name_or_path, args.output_dir, args.max_seq_length, args.logging_steps,
            args.per_device_train_batch_size, args.gradient_accumulation_steps,
            args.max_train_steps, args.{epochs}, args.do_not_randomize_output_dir, args.exp_name)
    logger.info("Total optimization steps = ...")


if __name__ == "__main__":
    parser = ArgumentParserPlus(({owner}, TokenizerConfig))
    args, tc = parser.parse_args_into_dataclasses()
    main(args, tc)
"""
CLASS = """
@dataclass
class {owner}:
    model_name_or_path: str | None = None
    {data}: list[str] = field(default_factory=list)
    output_dir: str = "output/"
    exp_name: str = "{exp_name}"
    do_not_randomize_output_dir: bool = False
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    {epochs}: int = 2
    max_train_steps: int | None = None
    max_seq_length: int | None = None
    logging_steps: int | None = None
    push_to_hub: bool = False
    try_launch_beaker_eval_jobs: bool = False
{more}
"""
TRANSFORMATION = """
from dataclasses import dataclass
{version}

@dataclass
class TokenizerConfig:
    use_fast: bool = True


def cached(listed, tc):
    logger.info(f"{found} {{listed}}")
    return listed, tc.use_fast
"""
UTILS = "class ArgumentParserPlus: ...\n"


def script(
    *,
    more: str = "",
    reads: str = "",
    owner: str = "FlatArguments",
    imports: str = "",
    data: str = "dataset_mixer_list",
    epochs: str = "num_train_epochs",
    exp_name: str = "finetune",
    here: bool = True,
) -> str:
    """An entry script with further fields and statements; without its class where not `here`."""
    fields = ""
    if here:
        fields = declared(more=more, owner=owner, data=data, epochs=epochs, exp_name=exp_name)
    return SCRIPT.format(
        imports=imports, fields=fields, data=data, reads=indented(reads), epochs=epochs, owner=owner
    )


def declared(
    *,
    more: str = "",
    owner: str = "FlatArguments",
    data: str = "dataset_mixer_list",
    epochs: str = "num_train_epochs",
    exp_name: str = "finetune",
) -> str:
    """The dataclass of an entry script."""
    more = indented(more)
    return CLASS.format(owner=owner, data=data, epochs=epochs, exp_name=exp_name, more=more)


def transformation(version: str | None = None, found: str = "Found cached dataset at") -> str:
    """The module that caches datasets."""
    line = "" if version is None else f"DATASET_CACHE_VERSION = {version!r}"
    return TRANSFORMATION.format(version=line, found=found)


def indented(text: str) -> str:
    return textwrap.indent(text.strip("\n") + "\n", "    ")


def git(folder: Path, *arguments: str) -> str:
    """The output of one git command."""
    environ = dict(_CLEAN)
    for name, value in os.environ.items():
        if not name.startswith("GIT_"):
            environ[name] = value
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(folder: Path, files: Mapping[str, str | None], subject: str) -> str:
    """Write the files of the package (None: taken away), commit everything, return the commit."""
    if not (folder / ".git").exists():
        folder.mkdir(parents=True, exist_ok=True)
        git(folder, "init", "-q", "-b", "main")
    for name, text in files.items():
        path = folder / "open_instruct" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", subject)
    return git(folder, "rev-parse", "HEAD")
