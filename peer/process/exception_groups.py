"""Exception groups: what went wrong inside nested nurseries."""


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions inside nested groups, in order; an exception that is none is its own leaf."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]
