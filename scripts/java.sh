#!/bin/sh
# Print the home of a Java 17 or newer, which Spark needs: JAVA_HOME="$(sh scripts/java.sh)".
# With --compiler: of one that has javac too, which `make jar` needs.
#
# Looks at JAVA_HOME, then at the java of PATH, then in /usr/lib/jvm (the oldest that is new enough, since that is
# the one Spark is tested with). When there is none, installs Debian's headless JRE (with --compiler: JDK), as root or
# through a sudo that asks no password. Otherwise says in one line on stderr what to install, and exits with 1.
set -eu

JAVA_VERSION_MIN=17
jvm_dir=/usr/lib/jvm

case "$*" in
"") kind=jre what="Java" who="Spark" ;;
--compiler) kind=jdk what="Java compiler" who="make jar" ;;
*) echo "usage: java.sh [--compiler]" >&2 && exit 2 ;;
esac

# Print "VERSION HOME" of the java command $1 ("17 /usr/lib/jvm/…"); nothing when it does not run, or has no compiler
# beside it and one is wanted. Java is asked for its home, because the java of PATH may be a shim or a chain of links.
describe() {
    ask "$1" | while read -r version home; do
        if [ $kind = jre ] || [ -x "$home/bin/javac" ]; then echo "$version $home"; fi
    done
}

# The same, with or without a compiler.
ask() {
    "$1" -XshowSettings:properties -version 2>&1 </dev/null | awk -F ' = ' '
        $1 ~ /^ *java\.specification\.version$/ { version = $2; sub(/^1\./, "", version) }
        $1 ~ /^ *java\.home$/ { home = $2 }
        END { if (version != "" && home != "") print version, home }' || true
}

# Print the home of the java command $1 and succeed, if its version is high enough.
home_if_usable() {
    described=$(describe "$1")
    [ -n "$described" ] && [ "${described%% *}" -ge "$JAVA_VERSION_MIN" ] && echo "${described#* }"
}

find_java() {
    if [ -n "${JAVA_HOME:-}" ]; then
        home_if_usable "$JAVA_HOME/bin/java" && return
        echo "java: JAVA_HOME=$JAVA_HOME has no $what $JAVA_VERSION_MIN or newer, looking elsewhere" >&2
    fi
    if command -v java >/dev/null 2>&1; then
        home_if_usable java && return
    fi
    oldest=$(for java in "$jvm_dir"/*/bin/java; do describe "$java"; done |
        awk -v min="$JAVA_VERSION_MIN" '$1 + 0 >= min' | sort -n | head -n 1)
    [ -n "$oldest" ] && echo "${oldest#* }"
}

# The Debian package to install: OpenJDK 17, or the distribution's default where that is another one, new enough
# (its version looks like 2:1.21-75). A compiler comes to the Java that is there, so that there is one. Prints nothing
# when there is no such package.
package() {
    there=$(ask java)
    there=${there%% *}
    if [ "${there:-0}" -ge "$JAVA_VERSION_MIN" ] && candidate "openjdk-$there-$kind-headless" >/dev/null; then
        echo "openjdk-$there-$kind-headless"
    elif candidate "openjdk-17-$kind-headless" >/dev/null; then
        echo "openjdk-17-$kind-headless"
    elif version=$(candidate "default-$kind-headless"); then
        version=$(echo "$version" | sed 's/^[0-9]*://; s/^1\.//; s/[^0-9].*//')
        [ "${version:-0}" -lt "$JAVA_VERSION_MIN" ] || echo "default-$kind-headless"
    fi
}

# Print the version of the package $1 that apt would install; fail when there is none.
candidate() {
    LC_ALL=C apt-cache policy "$1" 2>/dev/null | awk '$1 == "Candidate:" && $2 != "(none)" { print $2; found = 1 } END { exit !found }'
}

fail() {
    echo "java: no $what $JAVA_VERSION_MIN or newer found: $*" >&2
    exit 1
}

find_java && exit

command -v apt-get >/dev/null 2>&1 || fail "install one, or set JAVA_HOME"
if [ "$(id -u)" = 0 ]; then
    sudo=
elif command -v sudo >/dev/null 2>&1 && sudo -n true >/dev/null 2>&1; then
    sudo="sudo -n"
else
    fail "run 'apt-get install openjdk-17-$kind-headless' (or default-$kind-headless) as root, or set JAVA_HOME"
fi

# Standard output is the answer alone, so what apt says goes to stderr. A failed update is not a reason to stop: the
# lists that are there may do.
$sudo apt-get update -qq >&2 || true
package=$(package)
[ -n "$package" ] || fail "this distribution has no package for it: install one by hand, or set JAVA_HOME"
echo "java: installing $package, which $who needs" >&2
# shellcheck disable=SC2086  # $sudo is empty or two words
$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >&2 ||
    fail "could not install $package, install it by hand or set JAVA_HOME"
find_java || fail "installing $package did not help, set JAVA_HOME"
