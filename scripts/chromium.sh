#!/bin/sh
# See that a Chromium is installed, with which the tests of the console look at its pages.
#
# Says where it is. When there is none, installs Debian's package `chromium`, as root or through a sudo that asks no
# password. Otherwise says in one line on stderr what to install, and exits with 1.
set -eu

fail() {
    echo "chromium: there is none: $*" >&2
    exit 1
}

found() {
    command -v chromium 2>/dev/null || command -v chromium-browser 2>/dev/null || command -v google-chrome 2>/dev/null
}

found && exit

command -v apt-get >/dev/null 2>&1 || fail "only Debian's package is supported"
if [ "$(id -u)" = 0 ]; then
    sudo=
elif command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1; then
    sudo="sudo -n"
else
    fail "run 'apt-get install chromium' as root"
fi

# A failed update is not a reason to stop: the lists that are there may do.
$sudo apt-get update -qq >&2 || true
echo "chromium: installing chromium, which tests need" >&2
# shellcheck disable=SC2086  # $sudo is empty or two words
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >&2 ||
    fail "could not install the package chromium, install it by hand"
found || fail "installing the package chromium did not help"
