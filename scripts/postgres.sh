#!/bin/sh
# See that Debian's PostgreSQL is installed, which the tests of kera connect start for themselves.
#
# Its programs are all that is used: no service is set up or started. When they are missing, installs the package
# `postgresql`, as root or through a sudo that asks no password. Otherwise says in one line on stderr what to install,
# and exits with 1; tests that need PostgreSQL are skipped then.
set -eu

fail() {
    echo "postgres: initdb is missing below /usr/lib/postgresql: $*" >&2
    exit 1
}

there() {
    ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1
}

there && exit
command -v apt-get >/dev/null 2>&1 || fail "only Debian's package is supported"
if [ "$(id -u)" = 0 ]; then
    sudo=
elif command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1; then
    sudo="sudo -n"
else
    fail "run 'apt-get install postgresql' as root"
fi

# A failed update is not a reason to stop: the lists that are there may do.
$sudo apt-get update -qq >&2 || true
echo "postgres: installing postgresql, which tests need" >&2
# shellcheck disable=SC2086  # $sudo is empty or two words
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >&2 ||
    fail "could not install the package postgresql, install it by hand"
there || fail "installing the package postgresql did not help"
