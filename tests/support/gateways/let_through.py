"""Whether the limits of a tenant let requests through."""

from saccade.errors import RateLimitExceeded
from saccade.gateway.tenants.account import Account


async def is_let_through(account: Account) -> bool:
    """Whether a request is, which then ends at once."""
    await account.prepare()
    try:
        with account.request():
            return True
    except RateLimitExceeded:
        return False
