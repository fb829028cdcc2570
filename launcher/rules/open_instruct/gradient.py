"""What becomes of the gradient where the limit of its norm is not above 0."""

from collections.abc import Iterator, Mapping

from launcher.errors import Finding
from launcher.rules.context import Context, StageRule, caches_only
from launcher.rules.premises import unless
from launcher.rules.rule import cites, say
from launcher.upstream import behaviour

_KEY = "max_grad_norm"
_INSTEAD = f"delete the line, which clips nothing, or write `{_KEY}: 1.0`"


@unless(behaviour.GUARDS_NEGATIVE_CLIPPING)
@cites("dpo_tune_cache.py::main[if accelerator.sync_gradients and]", reviewed=("e6c3044aa620",))
def reversed_by_limit(context: Context) -> Iterator[Finding]:
    """Since #1591 dpo_tune_cache.py clips at whatever is not 0, and torch scales by limit / norm.

    With DeepSpeed accelerate leaves clipping to it, and the argument is not read
    (`deepspeed.clipping`).
    """
    limit = _read_limit(context)
    if limit is not None and limit < 0 and not context.distributed:
        yield _report_reversed(limit)


@unless(behaviour.GUARDS_NEGATIVE_CLIPPING)
@cites("dpo.py::main[max_grad_norm = args.max_grad_norm]", reviewed=("e6c3044aa620",))
def scaled_by_limit(context: Context) -> Iterator[Finding]:
    """Since #1591 dpo.py hands OLMo-core the limit as it is: 0 scales every gradient to nothing."""
    limit = _read_limit(context)
    if limit is None or context.values["cache_logprobs_only"]:
        return
    if limit < 0:
        yield _report_reversed(limit)
    elif limit == 0:
        message = f"`{_KEY}: 0` scales every gradient to 0: nothing is learnt"
        yield say("error", "reversed-gradient", _KEY, message, _INSTEAD)


def _read_limit(context: Context) -> float | None:
    values = context.values
    limit = values[_KEY]
    if not isinstance(limit, int | float) or not values.given(_KEY) or caches_only(context):
        return None
    return limit


def _report_reversed(limit: float) -> Finding:
    message = (
        f"`{_KEY}: {limit:g}` reverses every gradient at this commit: training climbs the loss"
    )
    return say("error", "reversed-gradient", _KEY, message, _INSTEAD)


RULES: Mapping[str, tuple[StageRule, ...]] = {"sft": (), "dpo": (reversed_by_limit,)}
