"""Contents as they are in the database: as clients sent them, or encrypted."""

import secrets
from importlib.util import find_spec
from typing import Final, Protocol

from saccade.errors import InternalError, NotInstalled
from saccade.gateway.state.keys import StateKeys

NONCE_BYTES: Final = 12
"""A tenant's key encrypts 2**32 contents with random nonces before two of them are likely to be equal."""


class Contents(Protocol):
    """Turns contents into what the database has, and back. *place* is the row and column that has the content."""

    is_encrypted: bool

    def seal(self, tenant: bytes, place: bytes, content: bytes) -> bytes:
        """Return *content* of *tenant* as the database has it at *place*."""

    def open(self, tenant: bytes, place: bytes, sealed: bytes) -> bytes:
        """Return the content that was sealed for the same *tenant* and *place*. Raises InternalError for others."""


class PlainContents(Contents):
    """Keeps contents as they are."""

    is_encrypted = False

    def seal(self, tenant: bytes, place: bytes, content: bytes) -> bytes:
        return content

    def open(self, tenant: bytes, place: bytes, sealed: bytes) -> bytes:
        return sealed


class EncryptedContents(Contents):
    """Encrypts contents with AES-256-GCM, with a key for each tenant.

    A content that was changed, or moved to another tenant or place, does not open. Raises NotInstalled.
    """

    is_encrypted = True

    def __init__(self, keys: StateKeys) -> None:
        if find_spec("cryptography") is None:
            raise NotInstalled("--state-encrypt needs an extra: pip install 'saccade-vlm[encryption]'.")
        self._keys = keys

    def seal(self, tenant: bytes, place: bytes, content: bytes) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + AESGCM(self._keys.content_key(tenant)).encrypt(nonce, content, place)

    def open(self, tenant: bytes, place: bytes, sealed: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        view = memoryview(sealed)
        try:
            return AESGCM(self._keys.content_key(tenant)).decrypt(view[:NONCE_BYTES], view[NONCE_BYTES:], place)
        except InvalidTag as error:
            raise InternalError(
                "What the server has stored under this id is damaged.",
                reason="a content in the state database was changed or moved, so it cannot be decrypted",
            ) from error
