#!/bin/sh
# Print the Go command that clients/go is built with: "$(sh scripts/go.sh)" test ./...
# With --look: install nothing.
#
# Looks in PATH, then where Go's own archive and Debian's packages put it, for a version that the module takes. When
# there is none, installs Debian's golang-go if that is new enough, as root or through a sudo that asks no password.
# Otherwise says in one line on stderr what is missing, and exits with 1. Nothing but the example needs Go.
set -eu

case "$*" in
"" | --look) mode=${1:-install} ;;
*) echo "usage: go.sh [--look]" >&2 && exit 2 ;;
esac
wanted=$(awk '$1 == "go" { print $2 }' "$(dirname "$0")/../clients/go/go.mod")

fail() {
    echo "go: clients/go needs Go $wanted or newer: $*" >&2
    exit 1
}

# Whether version $1 ("1.23.4") is what is wanted or newer.
new_enough() {
    printf '%s\n%s\n' "$wanted" "$1" | sort -C -V
}

# Print the Go command $1 and succeed, if it runs and is new enough. Its own version, not one that it would fetch.
usable() {
    version=$(GOTOOLCHAIN=local "$1" env GOVERSION 2>/dev/null) && new_enough "${version#go}" && command -v "$1"
}

look() {
    for go in go /usr/local/go/bin/go /usr/lib/go/bin/go /usr/lib/go-*/bin/go; do
        usable "$go" && return
    done
    return 1
}

look && exit
[ "$mode" = install ] || fail "there is none in PATH or /usr/local/go"
command -v apt-get >/dev/null 2>&1 || fail "install it from https://go.dev/dl/"
candidate=$(apt-cache policy golang-go 2>/dev/null | sed -n 's/^ *Candidate: \([0-9]*:\)\{0,1\}\([0-9.]*\).*/\2/p')
new_enough "${candidate:-0}" ||
    fail "the package golang-go has ${candidate:-none}, install it from https://go.dev/dl/"
if [ "$(id -u)" = 0 ]; then
    sudo=
elif command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1; then
    sudo="sudo -n"
else
    fail "run 'apt-get install golang-go' as root"
fi
echo "go: installing golang-go, which the example in Go needs" >&2
# shellcheck disable=SC2086  # $sudo is empty or two words
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends golang-go >&2 ||
    fail "could not install the package golang-go, install it by hand"
look || fail "installing the package golang-go did not help"
