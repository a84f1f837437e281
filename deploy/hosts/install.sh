#!/bin/sh
# Installs daemons of KerA on this host, for systemd: program, user, settings, units. Run it on each host; again after
# an upgrade. What is there of settings stays.
#
#   sudo ./install.sh --wheel kera-*.whl --certificates certificates \
#       --address 10.0.0.1 --coordinator 10.0.0.1:7400 coordinator broker backup
#   sudo ./install.sh --wheel kera-*.whl --certificates certificates \
#       --address 10.0.0.2 --coordinator 10.0.0.1:7400 broker backup
#
#   --certificates DIR   with ca.pem, ADDRESS.pem and ADDRESS-key.pem, as `kera tls init DIR ADDRESS...` makes them: then
#                        connections are encrypted, and whoever connects has to show a certificate of ca.pem; again with
#                        new ones, which are taken up without a restart
#   --cluster-secret FILE  with --certificates: everybody has to authenticate, and may do what rules allow; daemons know
#                        each other by what FILE has, the same on all hosts: openssl rand -base64 32 makes it
#   --insecure           in place of that: whoever reaches this host may do everything
#   --wheel FILE         what is installed, by the name with which it was built (make dist, or the release's page), with
#                        the wheels that were built with it, such as kera_server-*.whl, in the same directory; or an
#                        exact version from the package index that pip uses ("kera==0.1.0"). Its dependencies get the
#                        exact versions of constraints.txt, which the wheel brings along
#   --extras LIST        extras of the package, separated by commas: server,cli by default; kafka and postgres for
#                        copies (kera-connect@.service), console for the web console
#   --address ADDRESS    at which other hosts reach this one
#   --coordinator LIST   host:port of the coordinator; of each, separated by commas, if there are several: the one at
#                        --address is this host's
#   --zookeeper LIST     of a ZooKeeper ensemble, if there are to be several coordinators
#   --no-start           enable the daemons, and start none of them yet
#   --root DIR           install below this directory, as for an image or a trial: no user is made, nothing is started
#   --program FILE       use this `kera` in place of installing one (with --root)
set -eu

here="$(cd "$(dirname "$0")" && pwd)"
units="$here/../systemd"
wheel= address= coordinator= zookeeper= certificates= cluster_secret= insecure= root= program= daemons= start=yes
extras=server,cli work=
trap '[ -z "$work" ] || rm -rf "$work"' EXIT

fail() {
    echo "install: error: $*" >&2
    exit 2
}

say() {
    echo "install: $*"
}

# Installs $wheel with $extras and exactly the dependencies of the constraints.txt in the wheel. Fails, with nothing
# installed, where there are none, or where a dependency is not pinned or not to be had at that version. The extras'
# own distributions are the wheels beside $wheel, and those of the index only where $wheel is of the index.
install_pinned() {
    pip="$1 -I -m pip --quiet --disable-pip-version-check"
    work="$(mktemp -d)"
    case "$wheel" in
    *.whl) file="$wheel" beside=yes ;;
    *)
        $pip download --no-deps --only-binary :all: --dest "$work" "$wheel" || fail "pip cannot get $wheel: give the file"
        file="$(echo "$work"/kera-*.whl)" beside=
        ;;
    esac
    # One that is missing is named all the same: else pip would look for it in the index.
    "$1" -I - "$file" $beside >"$work/constraints.txt" <<'END' || fail "$wheel has no constraints.txt: build it with make dist"
import pathlib, re, sys, zipfile

def texts(wheel, end):
    return [wheel.read(name).decode() for name in wheel.namelist() if name.endswith(end)]

file = pathlib.Path(sys.argv[1]).absolute()
with zipfile.ZipFile(file) as wheel:
    constraints = texts(wheel, ".data/data/share/kera/constraints.txt")
    (metadata,) = texts(wheel, ".dist-info/METADATA")
if len(constraints) != 1:
    sys.exit(1)
sys.stdout.write(constraints[0])
for name in sorted(set(re.findall(r"^Requires-Dist: (kera-[a-z-]+)", metadata, re.MULTILINE))) if sys.argv[2:] else ():
    stem = f"{name.replace('-', '_')}-{file.name.split('-')[1]}"
    there = [*file.parent.glob(f"{stem}-*.whl"), file.with_name(f"{stem}-py3-none-any.whl")]
    print(name, "@", there[0].as_uri())
END
    $pip install --dry-run --ignore-installed --report "$work/report.json" \
        --constraint "$work/constraints.txt" "$file[$extras]" ||
        fail "the pinned dependencies of $wheel, or wheels that belong beside it, are not to be had; nothing was installed"
    unpinned="$("$1" -I - "$work/constraints.txt" "$work/report.json" <<'END'
import json, re, sys

pins = dict(re.findall(r"^([\w.-]+)==([^\s;#]+)", open(sys.argv[1], encoding="utf-8").read(), re.MULTILINE))
pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
for each in json.load(open(sys.argv[2], encoding="utf-8"))["install"]:
    name, version = re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower(), each["metadata"]["version"]
    if name.partition("-")[0] != "kera" and pins.get(name) != version:
        print(f"{name}=={version}", end=" ")
END
    )" || fail "pip does not say what it would install: version 23 or newer is needed"
    [ -z "$unpinned" ] || fail "constraints.txt of $wheel does not pin $unpinned; nothing was installed"
    $pip install --constraint "$work/constraints.txt" "$file[$extras]" || fail "pip cannot install $wheel"
    # pip keeps an installed package of the same version, which may be of another commit. kera is first: an earlier one
    # may have files that the others have now, and takes them along when it goes.
    "$1" -I - "$work/report.json" >"$work/others.txt" <<'END'
import json, re, sys

for each in json.load(open(sys.argv[1], encoding="utf-8"))["install"]:
    if re.match("kera[-_.]", each["metadata"]["name"]):
        print(each["metadata"]["name"], "@", each["download_info"]["url"])
END
    $pip install --no-deps --force-reinstall "$file" || fail "pip cannot install $wheel"
    $pip install --no-deps --force-reinstall --requirement "$work/others.txt" || fail "pip cannot install $wheel"
}

while [ $# -gt 0 ]; do
    case "$1" in
    --wheel | --extras | --address | --coordinator | --zookeeper | --certificates | --cluster-secret | --root | --program)
        [ $# -ge 2 ] || fail "$1 needs a value"
        case "$2" in *'"'* | *'|'* | *'&'* | *'\'*) fail "$1: no quotes, and none of | & \\ in $2" ;; esac
        name="$(echo "${1#--}" | tr - _)"
        eval "$name=\$2"
        shift 2
        ;;
    --no-start)
        start=
        shift
        ;;
    --insecure)
        insecure=yes
        shift
        ;;
    coordinator | broker | backup)
        daemons="$daemons $1"
        shift
        ;;
    -h | --help)
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
        exit 0
        ;;
    *) fail "unknown: $1 (see --help)" ;;
    esac
done
[ -n "$daemons" ] || fail "which daemons? coordinator, broker, backup, or several of them"
[ -n "$address" ] || fail "--address is missing: where other hosts reach this one"
[ -n "$coordinator" ] || fail "--coordinator is missing: host:port, the same on all hosts"
case "$address" in
0.0.0.0 | '::' | *:*) fail "--address is the address of this host, without a port: $address" ;;
*[!A-Za-z0-9._-]*) fail "--address is one name or IP address: $address" ;;
esac

# The port of this host's coordinator: that at its address; else the one that all have, as they may be given by name.
port='' here_too='' ports=''
set -f
for each in $(echo "$coordinator" | tr ',' ' '); do
    host="${each%:*}" number="${each##*:}"
    case "$each" in *:*) ;; *) fail "--coordinator needs a port: $each:7400?" ;; esac
    case "$host" in
    '['*[!A-Fa-f0-9:.]*']' | '') fail "--coordinator needs a host before the port: $each" ;;
    '['*']') ;;
    *[!A-Za-z0-9._-]*) fail "--coordinator has host:port, separated by commas: $each" ;;
    esac
    case "$number" in
    '' | 0* | *[!0-9]* | ??????*) fail "--coordinator: no port: '$number' in $each; 7400, say" ;;
    esac
    [ "$number" -le 65535 ] || fail "--coordinator: ports end at 65535: $each"
    case " $ports " in *" $number "*) ;; *) ports="$ports $number" ;; esac
    [ "$host" = "$address" ] || continue
    [ -z "$here_too" ] || fail "--coordinator has this host twice: $here_too and $each"
    here_too="$each" port="$number"
done
set +f
[ -n "$ports" ] || fail "--coordinator has no address: '$coordinator'"
case "$ports" in
' '*' '*) ;;
*) [ -n "$port" ] || port="${ports# }" ;;
esac
case "$daemons " in
*' coordinator '*)
    [ -n "$port" ] || fail "--coordinator has other hosts only, at several ports: add $address:PORT, this host's"
    here_too="${here_too:-$address:$port}"
    ;;
esac
if [ -n "$here_too" ] && sed '/^\[coordinator\]/,/^port/{/^port/d;}' "$units/kera.toml" | grep -q "port = $port\b"; then
    fail "--coordinator: port $port is one of those that a host's daemons have besides: 7400, say, in place of $here_too"
fi

[ -n "$wheel" ] || [ -n "$program" ] || fail "--wheel is missing: the file, or a version such as kera==0.1.0"
case "${wheel##*/}" in
*.whl)
    [ -n "$program" ] || [ -f "$wheel" ] || fail "--wheel: there is no file $wheel"
    case "${wheel##*/}" in
    kera-[0-9]*-*-*-*.whl) ;;
    *) fail "--wheel: pip takes a wheel only by the name with which it was built, as kera-0.1.0-py3-none-any.whl: $wheel" ;;
    esac
    ;;
'' | kera==[0-9]*) ;;
*) fail "--wheel is a file, or an exact version such as kera==0.1.0: $wheel" ;;
esac
case "$extras" in
'' | *[!a-z,]* | ,* | *, | *,,*) fail "--extras has names separated by commas, such as server,cli,kafka: '$extras'" ;;
esac
case ",$extras," in
*,server,*) ;;
*) fail "--extras: daemons need server: --extras server,$extras" ;;
esac
[ -z "$program" ] || [ -n "$root" ] || fail "--program is for --root"
[ -n "$root" ] || [ "$(id -u)" = 0 ] || fail "only root may install below /: use sudo, or --root DIR"

if [ -n "$cluster_secret" ]; then
    [ -n "$certificates" ] || fail "--cluster-secret needs --certificates: without, who reads the network takes up what others show"
    [ -f "$cluster_secret" ] || fail "--cluster-secret: there is no file $cluster_secret (openssl rand -base64 32 >$cluster_secret)"
    [ -s "$cluster_secret" ] && awk 'NF && length($0) < 16 { exit 1 }' "$cluster_secret" ||
        fail "--cluster-secret: a secret has 16 characters at least (openssl rand -base64 32 >$cluster_secret)"
fi

settings="$root/etc/kera/kera.toml"
if [ -n "$certificates" ]; then
    [ -z "$insecure" ] || fail "--certificates or --insecure: one of the two"
    for each in ca.pem "$address.pem" "$address-key.pem"; do
        [ -f "$certificates/$each" ] || fail "--certificates: there is no $certificates/$each (kera tls init $certificates $address)"
    done
elif [ -z "$insecure" ] && [ ! -e "$settings" ]; then
    fail "who may connect? --certificates DIR: who shows one (kera tls init makes them); --insecure: whoever reaches this host"
fi

if [ -z "$program" ]; then
    python="$(command -v python3)" || fail "there is no python3: apt-get install python3 python3-venv"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "Python 3.11 or newer is needed: $("$python" -V)"
    say "installing $wheel to $root/opt/kera"
    mkdir -p "$root/opt"
    "$python" -m venv "$root/opt/kera" || fail "no environment could be made: apt-get install python3-venv"
    install_pinned "$root/opt/kera/bin/python"
    program="$root/opt/kera/bin/kera"
fi
this="$("$program" --version)" || fail "$program does not run"
say "this is $this"
link="$root/usr/local/bin/kera"
if [ "$program" = "$root/opt/kera/bin/kera" ]; then target=../../../opt/kera/bin/kera; else target="$(realpath "$program")"; fi
if [ -L "$link" ] && [ "$(readlink "$link")" = "$target" ]; then
    :
elif [ -e "$link" ] || [ -L "$link" ]; then
    say "$link is something else, and stays; the program is $program"
else
    mkdir -p "${link%/*}"
    ln -s "$target" "$link"
fi

if [ -z "$root" ]; then
    install -D -m 644 "$units/kera.sysusers" /usr/lib/sysusers.d/kera.conf
    systemd-sysusers kera.conf
fi

if [ -n "$root" ]; then owner="$(id -g)"; else owner=kera; fi
if [ -n "$certificates" ]; then
    mkdir -p "$root/etc/kera"
    install -m 644 "$certificates/ca.pem" "$root/etc/kera/ca.pem"
    # The key last: daemons take neither until both are there.
    install -m 644 "$certificates/$address.pem" "$root/etc/kera/host.pem"
    install -m 640 -g "$owner" "$certificates/$address-key.pem" "$root/etc/kera/host-key.pem"
fi
if [ -n "$cluster_secret" ]; then
    install -m 640 -g "$owner" "$cluster_secret" "$root/etc/kera/cluster-secret"
fi
if [ -e "$settings" ]; then
    say "settings stay as they are: $settings"
    if [ -n "$cluster_secret" ] && ! grep -q '^security = true' "$settings"; then
        say "security is off there; in [coordinator], [broker] and [backup], on all hosts, set security = true and" \
            "cluster_secret_file = \"/etc/kera/cluster-secret\""
    fi
else
    mkdir -p "$root/etc/kera"
    sed -e "s|^host = .*|host = \"$address\"|" \
        -e "s|^coordinator = \"[^\"]*\"|coordinator = \"$coordinator\"|" \
        -e "s|^port = 7400|port = ${port:-7400}|" \
        "$units/kera.toml" >"$settings.new"
    if [ -n "$insecure" ]; then
        sed -i -e "/^tls_\(ca\|cert\|key\) = /d" -e "s|^tls_client_auth = .*|insecure = true|" "$settings.new"
    fi
    if [ -n "$cluster_secret" ]; then
        sed -i "s|^tls_client_auth = .*|tls_client_auth = \"optional\"\nsecurity = true\ncluster_secret_file = \"/etc/kera/cluster-secret\"|" \
            "$settings.new"
    fi
    if [ -n "$zookeeper" ]; then
        sed -i "s|^\[coordinator\]|[coordinator]\nzookeeper = \"$zookeeper\"|" "$settings.new"
    fi
    mv "$settings.new" "$settings"
    say "settings are in $settings"
fi

install -d -m 750 -g "$owner" "$root/etc/kera/connect"
install -D -m 644 "$units/kera-connect@.service" "$root/etc/systemd/system/kera-connect@.service"
for daemon in $daemons; do
    install -D -m 644 "$units/kera-$daemon.service" "$root/etc/systemd/system/kera-$daemon.service"
    mkdir -p "$root/var/lib/kera/$daemon"
    if [ -n "$root" ]; then
        upper="$(echo "$daemon" | tr a-z A-Z)"
        secured=
        if [ -n "$certificates" ]; then
            for each in TLS_CA=ca.pem TLS_CERT=host.pem TLS_KEY=host-key.pem; do
                secured="$secured KERA_${upper}_${each%=*}=$root/etc/kera/${each#*=}"
            done
        fi
        if [ -n "$cluster_secret" ]; then
            secured="$secured KERA_${upper}_CLUSTER_SECRET_FILE=$root/etc/kera/cluster-secret"
        fi
        say "to start it: KERA_${upper}_DATA_DIR=$root/var/lib/kera/$daemon$secured $program $daemon --config $settings"
    fi
done

if [ -z "$root" ]; then
    chown -R kera:kera /var/lib/kera
    systemctl daemon-reload
    for daemon in $daemons; do
        systemctl enable "kera-$daemon.service"
        [ -z "$start" ] || systemctl restart "kera-$daemon.service"
    done
    [ -n "$start" ] || say "to start them: systemctl start$(printf ' kera-%s' $daemons)"
    say "how it is: systemctl status 'kera-*'; kera cluster health --bootstrap $coordinator"
    if [ -n "$cluster_secret" ]; then
        say "who may do what: docs/security.md; the first user: kera user create NAME --cluster-secret-file" \
            "/etc/kera/cluster-secret --bootstrap $coordinator, with KERA_CLIENT_TLS_CA=/etc/kera/ca.pem"
    fi
fi
