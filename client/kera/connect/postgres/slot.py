"""Makes, checks, reads and advances a replication slot and its publication, all by SQL.

The slot makes PostgreSQL keep its log from the place of the copy on; the publication names the table whose changes are
wanted. Reading the slot (`messages`) returns the same messages each time, until the slot is advanced (`let_go`).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Iterator

from kera.connect.errors import RecordsGone, Refused
from kera.connect.pieces import Place
from kera.connect.postgres import sql
from kera.connect.postgres.connection import Database
from kera.connect.postgres.pgoutput import Message, decode, format_lsn, parse_lsn
from kera.connect.postgres.settling import PAUSE_S
from kera.core.errors import InvalidArgument, KeraError

BUSY_S = 30.0
"""How long the slot may be in use, by the session of a killed process that the server has not noticed yet."""
_IN_USE = "55006"
_CANCELED = "57014"
_NO_RIGHT = "42501"


def slot_name(copy_name: str, cluster_id: str) -> str:
    """Return the name of a copy's slot and publication, which no other copy of this or another cluster has."""
    digest = hashlib.blake2b(f"{cluster_id} {copy_name}".encode(), digest_size=4).hexdigest()
    return f"kera_{re.sub('[^a-z0-9]+', '_', copy_name.lower())[:48]}_{digest}"


class Look:
    """The counts of one look at a slot."""

    def __init__(self, messages_max: int) -> None:
        """`messages_max`: the look ends with the transaction in which this number is reached."""
        self.messages_max = messages_max
        self.count = 0
        """Number of messages so far."""
        self.bytes = 0
        """Size of the messages since this was set to 0."""

    @property
    def was_full(self) -> bool:
        """Whether the log may have more messages."""
        return self.count >= self.messages_max


class Slot:
    """The slot of one copy."""

    def __init__(self, database: Database, log: Database, name: str, shown: str) -> None:
        """`log`: a connection for `messages`, which is read while `database` is used. `shown`: for errors."""
        self.name = name
        self.was_made = False
        self._database = database
        self._log = log
        self._shown = shown
        self._confirmed_lsn = 0
        """The last known position of the slot."""
        self._kept_lsn = 0
        """The position before which the log is no longer needed."""
        self._publication = ""
        self._made_publication = False

    def publish(self, publication: str, table: tuple[str, str], *, make: bool, by_root: bool) -> None:
        """Check that a publication has `table`; with `make`, create the publication if it does not exist.

        It must be older than the slot. `by_root`: changes of partitions count as changes of the table. Raises
        `Refused`.
        """
        database = self._database
        self._publication = publication
        name, quoted = sql.quoted(publication), ".".join(map(sql.quoted, table))
        if make and not database.rows(sql.IS_PUBLICATION, [publication])[0][0]:
            root = " WITH (publish_via_partition_root = true)" if by_root else ""
            try:
                database.execute(f"CREATE PUBLICATION {name} FOR TABLE {quoted}{root}")
            except Refused as error:
                if error.attributes.get("sqlstate") != _NO_RIGHT:
                    raise
                raise Refused(
                    f"{error.message}: to make a publication, the role has to own the table and to have CREATE on"
                    f" the database; or have another role run CREATE PUBLICATION {name} FOR TABLE {quoted}{root},"
                    f" and give publication={publication}"
                ) from error
            self._made_publication = True
        if table not in database.rows(sql.PUBLISHED, [publication]):
            raise Refused(
                f"{self._shown}: there is no publication {publication!r} that has the table: CREATE PUBLICATION {name}"
                f" FOR TABLE {quoted}, or ALTER PUBLICATION {name} ADD TABLE {quoted}"
            )
        database.commit()

    def begin(self, settle_s: float, *, own: bool) -> int:
        """Return the position of the slot, and make the slot if it does not exist. Raises `Refused`, `RecordsGone`.

        PostgreSQL waits for the transactions that are under way, at most `settle_s`; 0: without a limit. `own`: no
        other copy uses a slot of this name, so an existing one is left over from an earlier start of this copy.
        """
        found = self._find()
        if found is not None and not own:
            self._unpublish()
            raise Refused(
                f"{self._shown}: replication slot {self.name} exists, and this copy has not begun with it: another copy"
                f" may use it. Give another name with slot=, or SELECT pg_drop_replication_slot('{self.name}') if"
                " nothing uses it"
            )
        if found is None:
            try:
                found = self._make(settle_s)
            except KeraError:
                self._unpublish()
                raise
            self.was_made = True
        self._confirmed_lsn = found
        return found

    def _unpublish(self) -> None:
        """Drop the publication if this start has made it, because no slot needs it."""
        if self._made_publication:
            with contextlib.suppress(KeraError):  # the original error is more useful
                self._database.rollback()
                self._database.execute(f"DROP PUBLICATION IF EXISTS {sql.quoted(self._publication)}")
                self._database.commit()
            self._made_publication = False

    def check(self, place: Place) -> None:
        """Check that the slot has all changes after `place`. Raises `RecordsGone`, `InvalidArgument`, `Refused`."""
        if place["slot"] != self.name:
            raise InvalidArgument(f"slot={self.name}: this copy has begun with slot {place['slot']}")
        found = self._find()
        if found is None:
            raise RecordsGone(
                f"{self._shown}: there is no replication slot {self.name} any more, so changes behind {place['lsn']}"
                " are gone. kera connect forget restarts the copy with all rows of the table"
            )
        if found > parse_lsn(place["lsn"]):
            raise RecordsGone(
                f"{self._shown}: replication slot {self.name} is at {format_lsn(found)}, and the copy only at"
                f" {place['lsn']}: something else has advanced it. {self.anew}"
            )
        self._confirmed_lsn = found

    @property
    def anew(self) -> str:
        """The advice in errors about lost changes."""
        return (
            f"SELECT pg_drop_replication_slot('{self.name}') and kera connect forget restart the copy with all rows of"
            " the table"
        )

    def _find(self) -> int | None:
        """Return the position of the slot; None: it does not exist. Raises `Refused`, `RecordsGone`."""
        found = self._database.rows(sql.SLOT, [self.name])
        ((own,),) = self._database.rows(sql.DATABASE)
        self._database.commit()
        if not found:
            return None
        ((plugin, database, confirmed, status),) = found
        if (plugin, database) != ("pgoutput", own):
            raise Refused(
                f"{self._shown}: replication slot {self.name} is one of plugin {plugin} in database {database}; give"
                " another one with slot="
            )
        if status == "lost" or confirmed is None:
            raise RecordsGone(
                f"{self._shown}: replication slot {self.name} has lost changes, as the log had grown larger than"
                f" max_slot_wal_keep_size. {self.anew}"
            )
        return parse_lsn(confirmed)

    def _make(self, settle_s: float) -> int:
        database = self._database
        try:
            database.execute(f"SET statement_timeout = {int(settle_s * 1000)}")
            database.commit()
            ((lsn,),) = database.rows(sql.MAKE_SLOT, [self.name])
            database.commit()
        except Refused as error:
            if error.attributes.get("sqlstate") != _CANCELED:
                raise
            raise Refused(
                f"{self._shown}: PostgreSQL has waited {settle_s:.0f} s for transactions that are under way, to make a"
                " replication slot; start the copy again when they have ended"
            ) from error
        else:
            database.execute("SET statement_timeout = 0")
            database.commit()
            return parse_lsn(lsn)

    def log_ends(self) -> tuple[int, int]:
        """Return where PostgreSQL's log ends, and up to where it is on disk."""
        ((inserted, flushed),) = self._database.rows(sql.LOG_ENDS)
        self._database.commit()
        return parse_lsn(inserted), parse_lsn(flushed)

    def messages(self, look: Look) -> Iterator[Message | None]:
        """Yield the slot's messages from its position on; yield None while the slot is in use.

        Raises `Refused` if another session uses it for longer than `BUSY_S`.
        """
        statement = sql.peek(self.name, self._publication, look.messages_max)
        until_s = time.monotonic() + BUSY_S
        while True:
            try:
                with self._log.batches(statement, 1 << 20) as reader:
                    for batch in reader:
                        for data in batch.column(0).to_pylist():
                            look.count += 1
                            look.bytes += len(data)
                            yield decode(data)
                self._log.commit()
            except Refused as error:
                if look.count or error.attributes.get("sqlstate") != _IN_USE or time.monotonic() > until_s:
                    raise
                self._log.rollback()
                time.sleep(PAUSE_S)
                yield None
            else:
                return

    def keep(self, lsn: int) -> None:
        """Note that the log before `lsn` is no longer needed."""
        self._kept_lsn = lsn

    def let_go(self) -> None:
        """Advance the slot to the position of `keep`; do nothing if the slot is in use now."""
        if self._kept_lsn <= self._confirmed_lsn:
            return
        try:
            self._database.rows(sql.LET_GO, [self.name, format_lsn(self._kept_lsn)])
            self._database.commit()
            self._confirmed_lsn = self._kept_lsn
        except Refused as error:
            self._database.rollback()
            if error.attributes.get("sqlstate") != _IN_USE:
                raise
