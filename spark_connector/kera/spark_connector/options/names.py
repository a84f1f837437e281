"""The names of the options, as Spark's Kafka source has them where it has such an option."""

BOOTSTRAP = "kera.bootstrap.servers"
TLS_CA = "tls.ca"
TLS_CERT = "tls.cert"
TLS_KEY = "tls.key"
USER = "user"
PASSWORD_FILE = "password.file"  # noqa: S105 - it is a name
TOKEN_FILE = "token.file"  # noqa: S105 - likewise
TOKEN_LIFETIME = "token.lifetime"  # noqa: S105 - likewise
SUBSCRIBE = "subscribe"
PATTERN = "subscribePattern"
ASSIGN = "assign"
PATH = "path"
STARTING = "startingOffsets"
STARTING_BY_TIME = "startingOffsetsByTimestamp"
STARTING_TIME = "startingTimestamp"
STRATEGY = "startingOffsetsByTimestampStrategy"
ENDING = "endingOffsets"
ENDING_BY_TIME = "endingOffsetsByTimestamp"
ENDING_TIME = "endingTimestamp"
RECORDS_MAX = "maxOffsetsPerTrigger"
BYTES_MAX = "maxBytesPerTrigger"
RECORDS_MIN = "minOffsetsPerTrigger"
DELAY_MAX = "maxTriggerDelay"
EPOCH = "epoch"
EPOCHS_MAX = "maxEpochsPerTrigger"
EPOCHS_EXACTLY = "epochsPerTrigger"
EPOCH_COLUMN = "includeEpoch"
LATENCY_TARGET = "latencyTarget"
PARTITIONS_MIN = "minPartitions"
PARTITION_RECORDS_MAX = "maxRecordsPerPartition"
FAIL_ON_DATA_LOSS = "failOnDataLoss"
HEADERS = "includeHeaders"
GROUP = "kera.group.id"
GROUP_PREFIX = "groupIdPrefix"
SHARED_MEMORY = "sharedMemory"
METADATA = "metadata"
ENGINE = "engine"
ON_MISMATCH = "onSchemaMismatch"

CONNECTING = (BOOTSTRAP, TLS_CA, TLS_CERT, TLS_KEY, USER, PASSWORD_FILE, TOKEN_FILE, TOKEN_LIFETIME)
"""All options that say how a cluster is reached, and as whom."""

READING = (
    *CONNECTING,
    SUBSCRIBE,
    PATTERN,
    ASSIGN,
    PATH,
    STARTING,
    STARTING_BY_TIME,
    STARTING_TIME,
    STRATEGY,
    ENDING,
    ENDING_BY_TIME,
    ENDING_TIME,
    RECORDS_MAX,
    BYTES_MAX,
    RECORDS_MIN,
    DELAY_MAX,
    EPOCH,
    EPOCHS_MAX,
    EPOCHS_EXACTLY,
    EPOCH_COLUMN,
    LATENCY_TARGET,
    PARTITIONS_MIN,
    PARTITION_RECORDS_MAX,
    FAIL_ON_DATA_LOSS,
    HEADERS,
    GROUP,
    GROUP_PREFIX,
    SHARED_MEMORY,
    METADATA,
    ENGINE,
    ON_MISMATCH,
)
"""All options for reading, in their canonical case."""

STREAM = "stream"
APP_ID = "txnAppId"
VERSION = "txnVersion"

WRITING = (*CONNECTING, PATH, STREAM, APP_ID, VERSION, LATENCY_TARGET, ENGINE)
"""All options for writing, in their canonical case."""

MEANT = {
    "maxrecordspertrigger": RECORDS_MAX,
    "maxrowspertrigger": RECORDS_MAX,
    "minrecordspertrigger": RECORDS_MIN,
    "minrowspertrigger": RECORDS_MIN,
    "lingerms": LATENCY_TARGET,
    "linger.ms": LATENCY_TARGET,
    "linger_ms": LATENCY_TARGET,
    "latency_target_ms": LATENCY_TARGET,
}
"""By a wrong name (in lower case), the option that a user probably means, where similarity would suggest another."""

_IN_A_FILE = "options are shown, by plans and by Spark's UI. Put it into a file that only you can read, and name that"
_A_PASSWORD = f"{_IN_A_FILE} with {PASSWORD_FILE}"
SECRETS = {
    "password": _A_PASSWORD,
    "passwd": _A_PASSWORD,
    "pwd": _A_PASSWORD,
    "jaas": _A_PASSWORD,
    "secret": f"{_IN_A_FILE} with {PASSWORD_FILE} or {TOKEN_FILE}",
    "token": f"{_IN_A_FILE} with {TOKEN_FILE}",
}
"""Why an option is refused, by the last word of its name. (Kafka has passwords in ``sasl.jaas.config``.)"""
