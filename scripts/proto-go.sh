#!/bin/sh
# Generate the messages and services of clients/go/kera/v1 from the .proto files that a client needs.
# With --check: only compare, show the difference, and exit with 1 when a file is stale, missing or left over.
#
# protoc is that of grpcio-tools (PYTHON is the interpreter that has it); its plugins for Go are installed into
# build/go-tools, in the versions below, since another version writes other bytes. Where there is no Go, or the plugins
# cannot be fetched, it says so: nothing is generated, and --check passes.
set -eu

cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
protos="common latency broker coordinator"
tools=build/go-tools
messages=google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
services=google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1

case "$*" in
"") check= ;;
--check) check=yes ;;
*) echo "usage: proto-go.sh [--check]" >&2 && exit 2 ;;
esac

none() {
    echo "proto-go: clients/go/kera/v1 was not looked at: $*" >&2
    [ "$check" ] && exit
    exit 1
}

# Print the version that a plugin is installed in ("v1.36.12"); nothing when it is not there.
installed() {
    "$tools/$1" --version 2>/dev/null | sed 's/.* v\{0,1\}/v/'
}

for plugin in "$messages" "$services"; do
    name=${plugin##*/}
    [ "$(installed "${name%@*}")" = "${plugin#*@}" ] && continue
    go=$(sh scripts/go.sh --look) || none "there is no Go"
    GOBIN="$(pwd)/$tools" GOTOOLCHAIN=local "$go" install "$plugin" || none "$plugin cannot be installed"
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck disable=SC2046  # names without spaces
"$python" -m grpc_tools.protoc -I proto \
    "--plugin=protoc-gen-go=$tools/protoc-gen-go" "--plugin=protoc-gen-go-grpc=$tools/protoc-gen-go-grpc" \
    "--go_out=$work" "--go-grpc_out=$work" $(printf 'proto/kera/v1/%s.proto ' $protos)
if [ "$check" ]; then
    if ! diff -r -u clients/go/kera/v1 "$work/kera/v1"; then
        echo "proto-go: clients/go/kera/v1 is not what its .proto files generate: run make proto" >&2
        exit 1
    fi
else
    rm -rf clients/go/kera/v1
    cp -R "$work/kera/v1" clients/go/kera/v1
fi
