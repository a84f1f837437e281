"""The console's limits, all in one place."""

REQUESTS_MAX = 32
"""Pages that are made at a time; who comes then is asked to come again (503)."""
CONNECTIONS_MAX = 256
REQUEST_BYTES_MAX = 16 * 1024
"""Maximum of a request without its body: a line and headers."""
REQUEST_TIMEOUT_S = 10.0
"""How long a request may take to arrive, its body included."""
IDLE_CONNECTION_S = 15
PAGE_TIMEOUT_S = 20.0
"""How long a page may take to be made."""
ANSWER_TIMEOUT_S = 120.0
"""How long an answer may take in all: to be made, and to be taken by who has asked."""
STOP_TIMEOUT_S = 5
ANSWER_PIECE_BYTES = 64 << 10
"""An answer is handed to the network in pieces of this size, the next one when the browser has taken the last."""

FORM_BYTES_MAX = 1 << 20
FORM_FIELDS_MAX = 192
FORM_COLUMNS_MAX = 32
"""Columns of a stream that a form can have."""
PARAMETERS_MAX = 32
TEXT_MAX = 256
"""Characters of a parameter that is not a record."""

SESSIONS_MAX = 64
SESSIONS_PER_USER_MAX = 8
"""With more, the one that was idle for longest ends."""
SESSION_IDLE_S = 30 * 60.0
SIGN_INS_MAX = 4
"""At a time: each has the cluster count, and so do those with a wrong password."""

ROWS_PER_PAGE = 50
ROWS_MAX = 500
"""Maximum of a table that has no pages; the page says how much is left out."""

SIZES_MAX = 20_000
"""Streams whose sizes are remembered, and by whose sizes a list is sorted."""
SIZES_ASKED_AT_ONCE = 16
SIZES_FRESH_S = 2.0
"""For how long a size is shown without asking again; with many streams, longer."""
SIZES_PATIENCE_S = 0.1
"""How long a list waits for the sizes of its rows."""
SORT_PATIENCE_S = 0.2
"""The same of a list that is sorted by size."""

BROWSINGS_MAX = 4
"""Pages of records that are read at a time."""
BROWSE_TIMEOUT_S = 4.0
"""How long records are looked for, for one page."""
BOUNDS_TIMEOUT_S = 3.0
"""How long brokers may take to say where a stream begins and ends."""
BROWSE_BYTES_MAX = 16 << 20
"""Maximum of chunks that are read for one page."""
BROWSE_RECORDS_MAX = 100_000
"""Records that are looked at for one page."""
BROWSE_ENTRIES_MAX = 64
"""Entries that a page takes records from; of a stream with more, a streamlet is chosen."""
RECORDS_PER_PAGE = 50
RECORDS_PER_PAGE_MAX = 200
DOWNLOADS_MAX = 8
"""Values that are downloaded at a time: each is in memory until the browser has taken it."""
VALUE_SHOWN_MAX = 2048
"""Characters of a value in a table of records."""
RECORD_SHOWN_MAX = 256 << 10
"""Characters of a value on the page of its record."""
HEADERS_SHOWN_MAX = 32
COLUMNS_SHOWN_MAX = 40
PRODUCED_HEADERS_MAX = 24
"""Headers of a record that a page stores."""
PRODUCE_TIMEOUT_S = 10.0
"""How long a record may take to be stored."""
SUBJECTS_OFFERED_MAX = 200
"""Subjects that the page for storing a record offers."""

CACHE_S = 2.0
"""For how long an answer of the cluster is shown again without asking."""
STREAMS_CACHE_S = 5.0
HEALTH_CACHE_S = 10.0
BALANCE_CACHE_S = 15.0
"""The same of what takes more to find out."""
REFUSAL_S = 60.0
"""For how long nobody asks again for what may not be seen."""
STALE_S = 60.0
"""For how long an older one is shown while a new one is on its way."""
PATIENCE_S = 0.2
"""How long a page waits for what is only a part of it."""
WARM_UP_S = 5.0
"""How long the console lets the first answers take before it says that it is there."""
SIGN_IN_WARM_UP_S = 2.0
"""The same of a session."""
SAMPLE_INTERVAL_S = 10.0
SAMPLES_MAX = 360
"""Maximum of a history, an hour: after that the oldest goes."""
WATCHED_GROUPS_MAX = 32
WATCHED_GROUPS_PER_SESSION_MAX = 8
"""Consumer groups whose lag is kept; with more, the one that nobody has looked at for longest goes."""
