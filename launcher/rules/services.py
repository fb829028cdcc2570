"""Rules about what this environment needs: keys for services, a compiler, trusted remote code."""

import netrc
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from launcher.artifacts import model_config
from launcher.errors import Finding, shorten
from launcher.paths import is_file
from launcher.rules.context import Context, StageRule
from launcher.rules.rule import cites, say
from launcher.rules.trl.resolved import inline

WITHOUT_WANDB = {"offline", "disabled", "dryrun"}
"""Values of WANDB_MODE with which wandb asks no server."""


@cites(
    "finetune.py::main[maybe_use_ai2_wandb_entity]",
    "dpo_tune_cache.py::main[maybe_use_ai2_wandb_entity]",
    "utils.py::maybe_use_ai2_wandb_entity[api = wandb.Api]",
    reviewed=("e6c3044aa620",),
)
def wandb_key(context: Context) -> Iterator[Finding]:
    """Without `wandb_entity` upstream asks wandb's server who is logged in, even offline."""
    values = context.values
    environ = context.environ
    if not values["with_tracking"] or has_wandb_key(environ):
        return
    always_uses_wandb = "report_to" in context.entry.instead
    trackers = set(values["report_to"] or ())
    if not always_uses_wandb and trackers.isdisjoint({"wandb", "all"}):
        # the script crashes for another reason: see the rule of `report_to`
        return
    mode = environ.get("WANDB_MODE", "online")
    if mode not in WITHOUT_WANDB:
        fault = "no wandb key: neither WANDB_API_KEY nor an entry in ~/.netrc"
        help = "`wandb login`, or set WANDB_API_KEY, or `with_tracking: false`"
    elif values["wandb_entity"] is None:
        request = "without `wandb_entity` upstream asks wandb who is logged in"
        fault = f"WANDB_MODE is {mode}, but {request}"
        help = "set `wandb_entity`, or WANDB_API_KEY, or `with_tracking: false`"
    else:
        return
    yield say(context.at_start, "no-wandb-key", "with_tracking", f"`with_tracking`: {fault}", help)


def has_wandb_key(environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    home = model_config.find_home(environ)
    named = environ.get("NETRC")
    for path in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        with suppress(OSError, ValueError, netrc.NetrcParseError):
            if is_file(path) and netrc.netrc(path).authenticators(host) is not None:
                return True
    return False


@cites(
    "finetune.py::main[args.hf_entity = maybe_use_ai2_hf_entity]",
    "dpo_tune_cache.py::main[args.hf_entity = maybe_use_ai2_hf_entity]",
    "finetune.py::main[push_folder_to_hub]",
    "dpo_tune_cache.py::main[model_utils.push_folder_to_hub]",
    "transformers/trainer.py::Trainer.init_hf_repo[repo_url = hf_api]",
    reviewed=("e6c3044aa620",),
)
def hub_token(context: Context) -> Iterator[Finding]:
    """`finetune.py` and `dpo_tune_cache.py` ask the hub who is logged in before anything is
    trained; with `hf_entity` given it is asked after training. TRL makes the repository first.
    """
    values = context.values
    environ = context.environ
    # the default has a rule of its own, until it comes to a run
    if not values["push_to_hub"] or (context.machine is None and not values.given("push_to_hub")):
        return
    if model_config.is_offline(environ):
        cause = "HF_HUB_OFFLINE is set"
        help = "unset it, or write `push_to_hub: false`"
    elif not values.get("hub_token") and not has_hub_token(environ):
        cause = "nobody is logged in"
        help = "`hf auth login`, or set HF_TOKEN, or `push_to_hub: false`"
    else:
        return
    moment = (
        "once the model is trained" if values.get("hf_entity") else "before anything is trained"
    )
    message = f"`push_to_hub` crashes {moment}: {cause}"
    yield say(context.at_start, "no-hub-token", "push_to_hub", message, help)


def has_hub_token(environ: Mapping[str, str]) -> bool:
    if any(map(environ.get, ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"))):
        return True
    path = environ.get("HF_TOKEN_PATH") or model_config.find_hub_home(environ) / "token"
    return is_file(Path(path))


def no_compiler(context: Context, key: str, *, cpp: bool = False) -> Iterator[Finding]:
    """torch.compile builds its kernels with a compiler of C, or of C++ for a CPU."""
    variable = "CC"
    names = ["gcc", "cc", "clang"]
    if cpp:
        variable = "CXX"
        names = ["g++", "c++", "clang++"]
    chosen = context.environ.get(variable)
    if chosen:
        names = [chosen]
    if not any(shutil.which(name, path=context.environ.get("PATH")) for name in names):
        missing = shorten(" or ".join(names))
        message = f"torch.compile builds its kernels with a compiler, and {missing} is not here"
        help = f"apt-get install g++, or write `{key}: false`"
        yield say("error", "no-compiler", key, message, help)


@cites("transformers/dynamic_module_utils.py::get_class_from_dynamic_module")
def remote_code(context: Context) -> Iterator[Finding]:
    """`dynamic_module_utils.py` imports modules that a repository holds."""
    values = context.values
    inner = inline(values.get("model_init_kwargs")) or {}
    for key in ("trust_remote_code", "allow_all_kernels"):
        place = key
        if values.get(key) is not True:
            place = "model_init_kwargs"
            if inner.get(key) is not True:
                continue
        message = f"`{key}` runs Python code out of the repository that is loaded, as you"
        help = "pin what you have read with `model_revision`, or leave it out"
        yield say("note", "remote-code", place, message, help)


RULES: tuple[StageRule, ...] = (wandb_key, hub_token, remote_code)
