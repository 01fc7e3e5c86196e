"""Between vLLM's names of cached blocks and our keys: salts, picture identifiers and the hashes of its events."""

from blake3 import blake3

from saccade.identity.content import HASH_BYTES

TAG_DIGITS = 16


def cache_salt(salt: bytes) -> str | None:
    """Return `cache_salt` of a request for the tenant of *salt*; None for the empty salt, which vLLM does not take."""
    return salt.hex() or None


def salt_of(cache_salt: str) -> bytes | None:
    """Return the salt that *cache_salt* stands for, or None for a string that no gateway of ours has sent."""
    return _bytes_of(cache_salt) or None


def media_identifier(salt: bytes, content_hash: bytes) -> str:
    """Return what a picture is called in requests to vLLM: `mm_hashes` of tokens-in, `uuid` of a chat.

    vLLM uses the string as it is, both in the hashes of blocks and as the key of its processor cache, which knows no
    salt. So the string names the tenant too, and two tenants never share an entry.
    """
    return f"{content_hash.hex()}.{_tag(salt)}"


def content_hash_of(salt: bytes, identifier: str) -> bytes | None:
    """Return the content hash (32 bytes) in *identifier*, or None for one that this *salt* does not have."""
    digits, _, tag = identifier.partition(".")
    content_hash = _bytes_of(digits)
    return content_hash if tag == _tag(salt) and content_hash is not None and len(content_hash) == HASH_BYTES else None


def _tag(salt: bytes) -> str:
    return blake3(salt).hexdigest()[:TAG_DIGITS]


def _bytes_of(digits: str) -> bytes | None:
    """Return the bytes behind *digits*, or None where hex() would not write them so."""
    try:
        decoded = bytes.fromhex(digits)
    except ValueError:
        return None
    return decoded if decoded.hex() == digits else None
