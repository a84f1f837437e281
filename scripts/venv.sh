#!/bin/sh
# Create the virtual environment $1 with the interpreter $PYTHON (default python3).
#
# Says in one line what is wrong when the interpreter is missing or too old. Debian splits venv from its
# python3 package: when it is missing it is installed, as root or through sudo, or the package is named.
set -eu

venv=${1:?"usage: venv.sh DIRECTORY"}
python=${PYTHON:-python3}

fail() {
    echo "setup: $*" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 || fail "$python not found: install Python 3.11 or newer, or run make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed, and $python is $("$python" -c 'import platform; print(platform.python_version())'): run make PYTHON=/path/to/python3"

# ensurepip is the half that Debian leaves out; `import venv` alone succeeds there.
if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if ! command -v apt-get >/dev/null 2>&1; then
        fail "$python has no venv module: install it with your package manager ($package on Debian)"
    elif [ "$(id -u)" = 0 ]; then
        sudo=
    elif command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1; then
        sudo="sudo -n"
    else
        fail "$python has no venv module: run 'apt-get install $package' as root"
    fi
    echo "setup: installing $package, which $python lacks"
    # shellcheck disable=SC2086  # $sudo is empty or two words
    { $sudo apt-get update -qq && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package"; } >&2 ||
        fail "could not install $package: install it by hand"
fi

# An environment that is there already is kept: a change of pyproject.toml installs only the difference. It is made
# anew when its interpreter is gone (an upgrade of Python) or its stamp names another tree (it was copied or moved).
here=$(pwd -P)
if [ "$(cat "$venv/.stamp" 2>/dev/null || echo "$here")" = "$here" ] && "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    exit 0
fi
echo "setup: creating $venv with $("$python" --version)"
"$python" -m venv --clear "$venv"
