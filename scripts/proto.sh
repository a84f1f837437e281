#!/bin/sh
# Generate the messages of proto/kera/v1/*.proto, with type stubs, below the directory $1.
#
# Only messages: services are registered generically, so there is no *_pb2_grpc.py. PYTHON is the interpreter that
# has grpcio-tools and mypy-protobuf (.venv/bin/python): their versions are pinned, since another version writes
# other bytes.
set -eu

out=${1:?"usage: proto.sh DIRECTORY"}
python=${PYTHON:-.venv/bin/python}

"$python" -c 'import grpc_tools, mypy_protobuf' 2>/dev/null || {
    echo "proto: $python has no grpcio-tools and mypy-protobuf: run make setup" >&2
    exit 1
}
plugin=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')/protoc-gen-mypy
"$python" -m grpc_tools.protoc -I proto "--plugin=protoc-gen-mypy=$plugin" \
    "--python_out=$out" "--mypy_out=quiet:$out" proto/kera/v1/*.proto
