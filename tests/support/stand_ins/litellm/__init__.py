"""In litellm's place where the pinned scripts are started: they import one name of it for their rewards."""


async def acompletion(*_: object, **__: object) -> None:
    """Nothing of SFT and DPO calls it."""
    raise NotImplementedError
