"""What open-instruct asks of a tokenizer before it loads it."""

from collections.abc import Iterator

from launcher.artifacts import model_config
from launcher.errors import Finding, shorten
from launcher.rules.context import Context, StageRule
from launcher.rules.premises import asks
from launcher.rules.rule import cites, say
from launcher.upstream import behaviour


@asks(behaviour.OLMO_BY_NAME)
@cites(
    "dataset_transformation.py::get_tokenizer_tulu_v2_2[config.model_type]",
    "dataset_transformation.py::get_tokenizer_tulu_v2_2[assert not tc.add_bos]",
    "dataset_transformation.py::get_tokenizer_tulu_v2_2[For OLMo, you must run]",
    "dataset_transformation.py::get_tokenizer_tulu_v2_2[assert tc.use_fast]",
    reviewed=("e6c3044aa620",),
)
def olmo_tokenizer(context: Context) -> Iterator[Finding]:
    """Of OLMo's tokenizers it asserts which templates go with `add_bos`.

    Until #1622 the config tells which ones these are, afterwards the name or path.
    """
    values = context.values
    name = values["tokenizer_name_or_path"] or values["model_name_or_path"]
    if values["get_tokenizer_fn"] != "get_tokenizer_tulu_v2_2" or not isinstance(name, str):
        return
    by_name = values.schema.does(behaviour.OLMO_BY_NAME)
    if by_name:
        is_olmo = "olmo" in name.lower()
        why = f"{shorten(name)} has `olmo` in its name"
    else:
        config = model_config.read_model_config(
            name, context.environ, values.get("tokenizer_revision")
        )
        kind = str(config.get("model_type", ""))
        is_olmo = "olmo" in kind
        why = f"{shorten(name)} is of the family {kind}"
    if not is_olmo:
        return
    template = values["chat_template_name"]
    if not values["use_fast"]:
        message = f"`use_fast: false` crashes: {why}, and its tokenizer has to be a fast one"
        yield say("error", "olmo-tokenizer", "use_fast", message, "delete the line")
    if template is None:
        return
    of_olmo = "olmo" in template
    if of_olmo and values["add_bos"]:
        message = (
            f"`add_bos` crashes: {why}, and `{template}` is a template of OLMo's that wants none"
        )
        yield say("error", "olmo-tokenizer", "add_bos", message, "delete the line")
    elif not of_olmo and not values["add_bos"]:
        message = (
            f"`chat_template_name: {template}` crashes: {why}, and this template needs "
            "`add_bos: true` there"
        )
        help = "add `add_bos: true`, or take a template of OLMo's"
        if by_name:
            help += "; a folder that only has such a name can be renamed"
        yield say("error", "olmo-tokenizer", "chat_template_name", message, help)


RULES: tuple[StageRule, ...] = (olmo_tokenizer,)
