"""In place of litellm, of which the pinned scripts import one name for their rewards."""


async def acompletion(*_: object, **__: object) -> None:
    """Nothing of SFT and DPO calls it."""
    raise NotImplementedError
