#!/bin/sh
# See that Debian's ZooKeeper is installed, which the tests of several coordinators start for themselves.
#
# Its jars are all that is used: no service is set up or started. When they are missing, installs the package
# `zookeeper`, as root or through a sudo that asks no password. Otherwise says in one line on stderr what to install,
# and exits with 1.
set -eu

jar=/usr/share/java/zookeeper.jar

fail() {
    echo "zookeeper: $jar is missing: $*" >&2
    exit 1
}

[ -e "$jar" ] && exit

command -v apt-get >/dev/null 2>&1 || fail "only Debian's package is supported"
if [ "$(id -u)" = 0 ]; then
    sudo=
elif command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1; then
    sudo="sudo -n"
else
    fail "run 'apt-get install zookeeper' as root"
fi

# A failed update is not a reason to stop: the lists that are there may do.
$sudo apt-get update -qq >&2 || true
echo "zookeeper: installing zookeeper, which tests need" >&2
# shellcheck disable=SC2086  # $sudo is empty or two words
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends zookeeper >&2 ||
    fail "could not install the package zookeeper, install it by hand"
[ -e "$jar" ] || fail "installing the package zookeeper did not help"
