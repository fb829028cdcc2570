"""Generated argument sets: what people write into `args:`, valid and wrong in every way we know.

The same seed gives the same sets. Left out, because what upstream does with them depends on what
comes after on the command line: the words `--` and whole flags of upstream's as values.
"""

import random
from collections.abc import Iterator
from typing import Any

from launcher.upstream.schema import Field, Schema

Arguments = dict[str, Any]

ODD: tuple[Any, ...] = (
    0, 1, 3, -1, -12, 4.0, 0.5, -0.5, 1e-5, -1e-5, 1e300, True, False,
    "8", " 8 ", "8.0", "-3", "-.5", "-1e-5", "1e-5", "1_000", "٣", "²", "0x10", "007", "0o17",
    "1:30", "2024-01-01", "nan", "-inf", "inf", ".nan", "", " ", "none", "None", "null",
    "yes", "NO", "on", "off", "t", "F", "Y", "maybe", "a b",
    "-x", "-x y", "-h", "-hm", "-h m", "-", "--=", "--zz", "--zz y", "a=b", "x\ny", "-5\n", "é",
    "{", "{}", '{"a": 1}', '{"a": "²"}', '{"a": ', "[1]",
    None, [], [""], ["a"], ["a", "b"], [1, 2.5], ["-1"], ["-x"],
    ["a", "-1e-5"], [["a"]], [None], [{"a": 1}], {}, {"a": 1}, {"a": {"b": "x"}},
)  # fmt: skip

VALID: dict[str, tuple[Any, ...]] = {
    "int": (1, 2, 128, 0, -1, "8", " 5 ", "1_000"),
    "float": (0.1, 5e-6, 1, -1, -0.5, "1e-5", "nan", "inf"),
    "bool": (True, False, "yes", "0", "T", "False"),
    "str": ("x", "allenai/model", "a b", "", 5, 0.25, True, "-", "-1"),
}

# Together with the defaults these reach every branch of both __post_init__s.
CONFLICTS: dict[str, tuple[Any, ...]] = {
    "dataset_name": (None, None, "x", ""),
    "dataset_mixer": (None, None, None, "", {"a": 1.0}),
    "push_to_hub": (True, False, "no", None),
    "try_launch_beaker_eval_jobs": (True, False, "0", None),
    "final_lr_ratio": (None, 0.0, 1.0, 0.3, 1.2, -0.1, "nan"),
    "lr_scheduler_type": ("linear", "cosine", "constant", "quadratic"),
    "zero_stage": (None, 0, 1, 2, 3, 4, -1),
    "offload_param": (True, False, None),
    "additional_model_arguments": (None, {}, {"a": 1}, "{", "{]", "path.json", '{"a": "²"}'),
    "optimizer_kwargs": (None, "", {}, "{}", "x"),
    "loss_type": ("dpo", "dpo_norm", "simpo", "wpo", "orpo", None),
    "attn_implementation": (None, "torch", "flash_2", "te", "sdpa"),
}

ELSEWHERE = (
    "use_flash_attn", "chat_template", "mixer_list", "dataset_mixer_list", "num_epochs",
    "max_steps", "num_train_epochs", "beta", "help", "h", "no", "model", "dataset", "lr",
    "_private", "args", "x.y",
)  # fmt: skip


def generate(schema: Schema, count: int, seed: int) -> Iterator[Arguments]:
    """`count` argument sets for one stage; about half of them without a fault."""
    chance = random.Random(f"{schema.stage} {seed}")
    for _ in range(count):
        yield _argument_set(schema, chance)


def _argument_set(schema: Schema, chance: random.Random) -> Arguments:
    arguments: Arguments = {}
    for name in ("try_launch_beaker_eval_jobs", "push_to_hub"):
        if name in schema.fields:
            arguments[name] = False
    for field in schema.fields.values():
        # what the parser itself demands is seldom forgotten
        if field.required and chance.random() < 0.9:
            arguments[field.name] = _valid(field, chance)
    usual_fields = [field for field in schema.fields.values() if _is_usual(field)]
    for field in chance.sample(usual_fields, chance.randrange(6)):
        arguments[field.name] = _valid(field, chance)
    _make_faults(schema, chance, arguments)
    if chance.random() < 0.5:
        names = chance.sample(sorted(arguments), len(arguments))
        arguments = {name: arguments[name] for name in names}
    return arguments


def _is_usual(field: Field) -> bool:
    """Whether a generated value is mostly valid: a dict hardly ever is, and neither is
    `dataset_name`, which stops open-instruct.
    """
    return field.kind not in {"dict", "opaque"} and field.name != "dataset_name"


def _valid(field: Field, chance: random.Random) -> Any:
    pool = field.choices or VALID[field.kind]
    if not field.many:
        return chance.choice(pool)
    count = chance.randint(1, 4)
    return [chance.choice(pool) for _ in range(count)]


def _make_faults(schema: Schema, chance: random.Random, arguments: Arguments) -> None:
    count = chance.choice((0, 0, 1, 1, 2))
    for make_fault in chance.choices((_odd_value, _odd_key, _conflict), k=count):
        make_fault(schema, chance, arguments)


def _odd_value(schema: Schema, chance: random.Random, arguments: Arguments) -> None:
    value = chance.choice(ODD)
    name = chance.choice(_judgeable(schema))
    arguments[name] = value


def _judgeable(schema: Schema) -> list[str]:
    """What a class of upstream's does with a word cannot be read from its annotation."""
    return sorted(name for name, field in schema.fields.items() if field.kind != "opaque")


def _odd_key(schema: Schema, chance: random.Random, arguments: Arguments) -> None:
    name = chance.choice(_judgeable(schema))
    field = schema.fields[name]
    usual_value = "x" if field.kind == "dict" else _valid(field, chance)
    value = chance.choice((*ODD, usual_value))
    key = chance.choice(_misspellings(name, chance))
    arguments[key] = value


def _misspellings(name: str, chance: random.Random) -> tuple[str, ...]:
    place = chance.randrange(1, len(name))
    start = name[:place]
    rest = name[place:]
    dashed = name.replace("_", "-")
    return (
        start,
        name[:-1],
        start + rest[1:],
        start + chance.choice("abc_") + rest,
        dashed,
        dashed[:place],
        f"no_{name}",
        f"no-{name}",
        name.upper(),
        chance.choice(ELSEWHERE),
    )


def _conflict(schema: Schema, chance: random.Random, arguments: Arguments) -> None:
    names = [name for name in CONFLICTS if name in schema.fields]
    count = min(len(names), chance.randint(1, 3))
    for name in chance.sample(names, count):
        arguments[name] = chance.choice(CONFLICTS[name])
