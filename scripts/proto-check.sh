#!/bin/sh
# Check that the generated messages in proto/kera/v1 are what scripts/proto.sh makes of the .proto files: shows the
# difference and exits with 1 when a file is stale, missing, or left over from a .proto that is gone.
set -eu

cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

sh scripts/proto.sh "$work"
mkdir "$work/committed"
find proto/kera/v1 -name '*_pb2*.py*' ! -name '*.pyc' -exec cp {} "$work/committed" \;
if ! diff -r -u "$work/committed" "$work/kera/v1"; then
    echo "proto-check: proto/kera/v1 is not what its .proto files generate: run make proto" >&2
    exit 1
fi
