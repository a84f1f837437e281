#!/bin/sh
# Resolve the newest versions that pyproject.toml, those of distributions/ and bench/pyproject.toml allow, and write them to constraints.txt.
#
# `make setup` installs exactly these, so a clone made a year from now is as green as one made today.
# Resolved in a throw-away environment: what a developer has added to .venv does not leak into the pins.
set -eu

python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

PYTHON="$python" sh scripts/venv.sh "$work/venv"
py="$work/venv/bin/python"
"$py" -m pip install --quiet --upgrade pip
"$py" -m pip install --quiet -e '.[dev]' -e distributions/server -e distributions/cli -e distributions/spark ./bench
{
    echo "# Written by 'make constraints' with $("$py" --version): the versions that 'make setup' installs."
    "$py" -m pip freeze --all --exclude-editable --exclude kera-bench
} >"$work/constraints.txt"
cp "$work/constraints.txt" constraints.txt
echo "constraints: $(grep -c == constraints.txt) versions written; run make check before committing them"
