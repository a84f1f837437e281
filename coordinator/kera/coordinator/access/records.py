"""The records of users, rules and tokens in the metadata, and the table of all of them.

access/version             the version of the table, as decimal text
access/default             Quota of users without their own
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
    """Return the key of a user's record."""
    return USERS + quote(name, safe="")


def rule_key(rule_id: int) -> str:
    """Return the key of a rule."""
    return f"{RULES}{rule_id:016x}"


def token_key(token_id: str) -> str:
    """Return the key of a token's record."""
    return TOKENS + quote(token_id, safe="")


class AccessRecords:
    """Reads users, rules and tokens from the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def version(self) -> int:
        """The version of the table; 0 before the first change."""
        return self._ledger.last_number(VERSION)

    def user(self, name: str) -> messages.UserRecord | None:
        """Return a user's record; None if there is no such user."""
        value = self._ledger.get(user_key(name))
        return None if value is None else messages.UserRecord.FromString(value)

    def users(self) -> list[messages.UserRecord]:
        """Return all users, by name."""
        return [messages.UserRecord.FromString(value) for value in self._below(USERS)]

    @property
    def user_count(self) -> int:
        """The number of users."""
        return len(self._ledger.children(USERS.rstrip("/")))

    def rules(self) -> list[messages.AccessRule]:
        """Return all rules, oldest first."""
        return [messages.AccessRule.FromString(value) for value in self._below(RULES)]

    def token(self, token_id: str) -> messages.TokenRecord | None:
        """Return a token's record; None if there is no such token."""
        value = self._ledger.get(token_key(token_id))
        return None if value is None else messages.TokenRecord.FromString(value)

    def tokens(self) -> list[messages.TokenRecord]:
        """Return all tokens, including expired ones that were not removed yet."""
        return [messages.TokenRecord.FromString(value) for value in self._below(TOKENS)]

    def default_quota(self) -> messages.Quota:
        """Return the quota of users without their own."""
        return messages.Quota.FromString(self._ledger.get(DEFAULT_QUOTA) or b"")

    def decoys(self) -> bytes:
        """Return the decoys, see `AccessTable`; empty until the first change writes them."""
        return self._ledger.get(DECOYS) or b""

    def table(self, now_us: int) -> messages.AccessTable:
        """Return the table that daemons apply, as of now."""
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
        """Return the values in the order of their keys. Other records in the ledger cost no time."""
        return [self._ledger.get(key) or b"" for key in self._ledger.children(path.rstrip("/"))]
