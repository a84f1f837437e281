"""Where users, rules and tokens are in the metadata, and the table of all of them.

access/version             the version of the table, as decimal text
access/default             Quota of those without one of their own
access/decoys              see `AccessTable`
access/users/<name>        UserRecord
access/rules/<id>          AccessRule, 16 hexadecimal digits
access/tokens/<id>         TokenRecord
"""

from __future__ import annotations

from urllib.parse import quote

from kera.coordinator.store.ledger import Ledger
from kera.v1 import access_pb2 as messages

VERSION = "access/version"
LAST_RULE_ID = "last/rule_id"
DEFAULT_QUOTA = "access/default"
DECOYS = "access/decoys"
USERS = "access/users/"
RULES = "access/rules/"
TOKENS = "access/tokens/"


def user_key(name: str) -> str:
    """Key of a user's record."""
    return USERS + quote(name, safe="")


def rule_key(rule_id: int) -> str:
    """Key of a rule."""
    return f"{RULES}{rule_id:016x}"


def token_key(token_id: str) -> str:
    """Key of a token's record."""
    return TOKENS + quote(token_id, safe="")


class AccessRecords:
    """Users, rules and tokens as the ledger has them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def version(self) -> int:
        """Version of the table; 0: nothing was ever changed."""
        return self._ledger.last_number(VERSION)

    def user(self, name: str) -> messages.UserRecord | None:
        """None: there is none."""
        value = self._ledger.get(user_key(name))
        return None if value is None else messages.UserRecord.FromString(value)

    def users(self) -> list[messages.UserRecord]:
        """All, by name."""
        return [messages.UserRecord.FromString(value) for value in self._below(USERS)]

    @property
    def user_count(self) -> int:
        """How many users there are."""
        return len(self._ledger.children(USERS.rstrip("/")))

    def rules(self) -> list[messages.AccessRule]:
        """All, in the order in which they were made."""
        return [messages.AccessRule.FromString(value) for value in self._below(RULES)]

    def token(self, token_id: str) -> messages.TokenRecord | None:
        """None: there is none."""
        value = self._ledger.get(token_key(token_id))
        return None if value is None else messages.TokenRecord.FromString(value)

    def tokens(self) -> list[messages.TokenRecord]:
        """All, also those that have expired and were not removed yet."""
        return [messages.TokenRecord.FromString(value) for value in self._below(TOKENS)]

    def default_quota(self) -> messages.Quota:
        """The quota of users without one of their own."""
        return messages.Quota.FromString(self._ledger.get(DEFAULT_QUOTA) or b"")

    def decoys(self) -> bytes:
        """See `AccessTable`; empty: nothing was changed since there are some."""
        return self._ledger.get(DECOYS) or b""

    def table(self, now_us: int) -> messages.AccessTable:
        """The table that daemons apply, as of now."""
        tokens = []
        for token in self.tokens():
            if token.expires_us > now_us:
                token.expires_in_ms = max(1, (token.expires_us - now_us) // 1000)
                tokens.append(token)
        return messages.AccessTable(
            version=self.version,
            users=self.users(),
            rules=self.rules(),
            tokens=tokens,
            default_quota=self.default_quota(),
            decoys=self.decoys(),
        )

    def _below(self, path: str) -> list[bytes]:
        """Values by the order of their keys; what else is in the ledger costs nothing."""
        return [self._ledger.get(key) or b"" for key in self._ledger.children(path.rstrip("/"))]
