"""Signed links, by which a file of a checkpoint is fetched without a key until they expire."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path

from tlora_fx.errors import TokenRefused
from tlora_fx.host.durable import replace_shared_file

#: Clients renew links that have less than five minutes left.
LINK_SECONDS = 3600
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Links:
    """Signs links and checks them, by a key of this service alone that outlives it."""

    key: bytes

    @classmethod
    def of(cls, folder: Path) -> Links:
        """Links with the key of a folder, which is made where none is whole."""
        file = folder / "links.key"
        key = file.read_bytes() if file.exists() else b""
        # By a key that is cut, others could sign too.
        if len(key) != KEY_BYTES:
            key = secrets.token_bytes(KEY_BYTES)
            # What this writes, its owner alone can read.
            replace_shared_file(file, key)
        return cls(key)

    def sign(self, path: str, file: str, expires: int) -> str:
        """The signature of a link to a checkpoint's file, until seconds since the epoch."""
        text = "\0".join((path, file, str(expires)))
        return hmac.new(self.key, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def require(self, path: str, file: str, expires: int, signature: str, now: float) -> None:
        """Raise TokenRefused for a link that was not signed here, or has expired."""
        right = self.sign(path, file, expires).encode()
        same = hmac.compare_digest(right, signature.encode("utf-8", "replace"))
        if not same or expires <= now:
            what = "the link has expired" if same else "the link was not made by this service"
            raise TokenRefused(what, help="ask for a new one")
