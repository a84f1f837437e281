"""The console's limits, all in one place."""

REQUESTS_MAX = 32
"""Maximum number of pages that are made at the same time; further requests get a 503."""
CONNECTIONS_MAX = 256
REQUEST_BYTES_MAX = 16 * 1024
"""Maximum size of a request without its body: a line and headers."""
REQUEST_TIMEOUT_S = 10.0
"""Time limit for a request to arrive, including its body."""
IDLE_CONNECTION_S = 15
PAGE_TIMEOUT_S = 20.0
"""Time limit for making a page."""
ANSWER_TIMEOUT_S = 120.0
"""Time limit for a whole answer, from the request until the browser has taken it."""
STOP_TIMEOUT_S = 5
ANSWER_PIECE_BYTES = 64 << 10
"""An answer goes to the network in pieces of this size, each one after the browser has taken the last."""

FORM_BYTES_MAX = 1 << 20
FORM_FIELDS_MAX = 192
FORM_COLUMNS_MAX = 32
"""Maximum number of a stream's columns in a form."""
PARAMETERS_MAX = 32
TEXT_MAX = 256
"""Maximum number of characters of a parameter that is not a record."""

SESSIONS_MAX = 64
SESSIONS_PER_USER_MAX = 8
"""Beyond this number, the user's session that was idle for longest ends."""
SESSION_IDLE_S = 30 * 60.0
SIGN_INS_MAX = 4
"""Maximum number of sign-ins at the same time, because the cluster counts each, even with a wrong password."""

ROWS_PER_PAGE = 50
ROWS_MAX = 500
"""Maximum number of rows in a table without pages; the page shows how many are left out."""

SIZES_MAX = 20_000
"""Maximum number of streams whose sizes are remembered, and used to sort a list."""
SIZES_ASKED_AT_ONCE = 16
SIZES_FRESH_S = 2.0
"""How long a size is shown without asking again; longer with many streams."""
SIZES_PATIENCE_S = 0.1
"""How long a list waits for the sizes of its rows."""
SORT_PATIENCE_S = 0.2
"""How long a list that is sorted by size waits for sizes."""

BROWSINGS_MAX = 4
"""Maximum number of pages of records that are read at the same time."""
BROWSE_TIMEOUT_S = 4.0
"""Time limit for finding the records of a page."""
BOUNDS_TIMEOUT_S = 3.0
"""Time limit for brokers to report where a stream begins and ends."""
BROWSE_BYTES_MAX = 16 << 20
"""Maximum size of the chunks that are read for a page."""
BROWSE_RECORDS_MAX = 100_000
"""Maximum number of records to examine for a page."""
BROWSE_ENTRIES_MAX = 64
"""Maximum number of entries that a page takes records from; in a stream with more, the user chooses a streamlet."""
RECORDS_PER_PAGE = 50
RECORDS_PER_PAGE_MAX = 200
DOWNLOADS_MAX = 8
"""Maximum number of downloads at the same time: each value is in memory until the browser has taken it."""
VALUE_SHOWN_MAX = 2048
"""Maximum number of characters of a value in a table of records."""
RECORD_SHOWN_MAX = 256 << 10
"""Maximum number of characters of a value on the page of its record."""
HEADERS_SHOWN_MAX = 32
COLUMNS_SHOWN_MAX = 40
PRODUCED_HEADERS_MAX = 24
"""Maximum number of headers of a record that a page stores."""
PRODUCE_TIMEOUT_S = 10.0
"""Time limit for storing a record."""
SUBJECTS_OFFERED_MAX = 200
"""Maximum number of subjects that the page for storing a record offers."""

CACHE_S = 2.0
"""How long an answer of the cluster is shown without asking again."""
STREAMS_CACHE_S = 5.0
HEALTH_CACHE_S = 10.0
BALANCE_CACHE_S = 15.0
"""How long answers that take more work are shown without asking again."""
REFUSAL_S = 60.0
"""How long the console does not ask again for an answer that the user may not see."""
STALE_S = 60.0
"""How long an older answer is shown while a new one is being fetched."""
PATIENCE_S = 0.2
"""How long a page waits for an answer that is only a part of it."""
WARM_UP_S = 5.0
"""Time limit for the first answers before the console reports that it is ready."""
SIGN_IN_WARM_UP_S = 2.0
"""Time limit for the first answers of a new session."""
SAMPLE_INTERVAL_S = 10.0
SAMPLES_MAX = 360
"""Maximum number of points in a history, an hour; beyond it the oldest point is dropped."""
WATCHED_GROUPS_MAX = 32
WATCHED_GROUPS_PER_SESSION_MAX = 8
"""Maximum number of consumer groups with a history of their lag; beyond it, the least recently viewed is dropped."""
