#!/bin/sh
# Installs sdcpd from this checkout on a Debian-like host with systemd; --help says how.
# Whatever is laid is written down in $MANIFEST before, so that --uninstall takes that and no more.
set -eu

ROOT= PREFIX=/opt/sdcpd EXTRAS=engine VENV=yes UNINSTALL=no
PYTHON=${PYTHON:-python3}
SOURCE=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
MANIFEST=/usr/share/sdcpd/installed
UNITS=/usr/lib/systemd/system
LINKS="sdcpd sdcpctl"

usage() {
    cat <<'END'
Usage: packaging/install.sh [--root DIR] [--prefix DIR] [--extras LIST] [--no-venv]
       packaging/install.sh --uninstall [--root DIR]

Installs the program, its units, pages for man and completion.  Can be run again.

  --root DIR     install below DIR, for an image; no user is made and systemd is not told
  --prefix DIR   where the program's virtual environment is; default /opt/sdcpd
  --extras LIST  what pip installs besides, such as engine,s3; default engine; "none" for a router
  --no-venv      lay the files only, for a program that is, or will be, at the prefix
  --uninstall    take away what was laid; configuration, certificates, keys and logs stay
  --help         this text

PYTHON names the interpreter (default python3, 3.11 or newer); PIP_ARGS go to pip install.
END
}

die() { echo "install.sh: $*" >&2 && exit 1; }
value() { [ $# -ge 2 ] || { echo "install.sh: $1 needs a value; see --help" >&2 && exit 2; }; }

absolute() {
    case $2 in
    /*) ;;
    *) die "$1 $2: give a path that begins with /" ;;
    esac
    case $2 in
    *[![:alnum:]/._+@,-]*) die "$1 $2: give a path of letters, digits and /._+@,-" ;;
    esac
}

# Before each thing that is laid: what it is (f file or link, d folder, v environment) and where.
record() { known "$1" || echo "$1" >>"$ROOT$MANIFEST"; }
known() { [ -f "$ROOT$MANIFEST" ] && grep -qxF -- "$1" "$ROOT$MANIFEST"; }
exists() { [ -e "$ROOT$1" ] || [ -L "$ROOT$1" ]; }

# A folder and those above it, the upper ones first.
folder() {
    [ -d "$ROOT$1" ] && return
    folder "$(dirname -- "$1")"
    mkdir -m 0755 "$ROOT$1"
    created="$created d:$1"
}

begin() {
    created=
    folder "$(dirname -- "$MANIFEST")"
    [ -f "$ROOT$MANIFEST" ] || : >"$ROOT$MANIFEST"
    record "f $MANIFEST"
    remember
}

remember() {
    for one in $created; do record "d ${one#d:}"; done
    created=
}

# What is to be laid: lines of destination and source; a source that begins with -> is a link's end.
plan() {
    for name in $LINKS; do echo "/usr/bin/$name ->$PREFIX/bin/$name"; done
    for name in sdcpd@.service sdcpd-gpu.service sdcpd.target sdcpd@router.service.d/10-nogpu.conf; do
        echo "$UNITS/$name $SOURCE/systemd/$name"
    done
    for kind in sysusers.d tmpfiles.d; do
        echo "/usr/lib/$kind/sdcpd.conf $SOURCE/systemd/$kind/sdcpd.conf"
    done
    echo "/usr/share/doc/sdcpd/examples/sdcpd.toml.example $SOURCE/sdcpd.toml.example"
    [ -f "$STAGE/sdcpctl" ] && echo "/usr/share/bash-completion/completions/sdcpctl $STAGE/sdcpctl"
    for page in "$STAGE"/man/*.1; do
        [ -f "$page" ] && echo "/usr/share/man/man1/$(basename -- "$page") $page"
    done
    return 0
}

check_strangers() {
    while read -r to from; do
        exists "$to" && ! known "f $to" &&
            die "$ROOT$to is there and not of an earlier run; move it away, and run this again"
    done <"$STAGE/plan"
    return 0
}

lay() {
    while read -r to from; do
        folder "$(dirname -- "$to")"
        remember
        record "f $to"
        rm -f "$ROOT$to"
        case $from in
        '->'*) ln -s "${from#->}" "$ROOT$to" ;;
        *) cp "$from" "$ROOT$to" && chmod 0644 "$ROOT$to" ;;
        esac
    done <"$STAGE/plan"
}

# What an earlier version laid and this one does not.
drop_stale() {
    { cut -d' ' -f1 "$STAGE/plan" && echo "$MANIFEST"; } | sed 's/^/f /' >"$STAGE/laid"
    grep '^f ' "$ROOT$MANIFEST" | grep -vxF -f "$STAGE/laid" >"$STAGE/stale" || return 0
    while read -r _ path; do rm -f "$ROOT$path"; done <"$STAGE/stale"
    grep -vxF -f "$STAGE/stale" "$ROOT$MANIFEST" >"$STAGE/kept" || :
    cp "$STAGE/kept" "$ROOT$MANIFEST"
}

make_venv() {
    at=$ROOT$PREFIX
    if [ -d "$at" ] && [ -n "$(ls -A "$at")" ] && ! known "v $PREFIX"; then
        die "$at is not empty and not of an earlier run; choose another --prefix, or --no-venv"
    fi
    "$PYTHON" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        die "$PYTHON is older than 3.11 or has no venv; on Debian: apt-get install python3-venv"
    # The units see no home, and an environment borrows its interpreter's library.
    case $("$PYTHON" -c 'import sys; print(sys.base_prefix)') in
    /root/* | /home/*) [ -n "$ROOT" ] || die "$PYTHON lies in a home, which the units cannot see; give another PYTHON" ;;
    esac
    folder "$(dirname -- "$PREFIX")"
    remember
    record "v $PREFIX"
    "$PYTHON" -m venv "$at"
    what=$SOURCE
    [ "$EXTRAS" = none ] || what="$SOURCE[$EXTRAS]"
    # shellcheck disable=SC2086  # PIP_ARGS are several words
    "$at/bin/python" -m pip install --quiet -c "$SOURCE/constraints.txt" ${PIP_ARGS:-} "$what"
    [ -z "$ROOT" ] || moved_to_prefix "$at"
}

# Scripts name their interpreter by its path, which will be without the root.
moved_to_prefix() {
    for script in "$1"/bin/* "$1/pyvenv.cfg"; do
        [ -f "$script" ] && [ ! -L "$script" ] && grep -Iq . "$script" || continue
        sed -i "s|$1|$PREFIX|g" "$script"
    done
}

# Pages for man and completion are written by the program itself.
write_pages() {
    if [ $VENV = yes ]; then program=$ROOT$PREFIX/bin/python; else program=$PYTHON; fi
    mkdir "$STAGE/man"
    if (cd "$SOURCE" && "$program" -m cli manpages "$STAGE/man" && "$program" -m cli completion bash) \
        >"$STAGE/out" 2>"$STAGE/error"; then
        sed '1d' "$STAGE/out" >"$STAGE/sdcpctl"
    else
        rm -rf "$STAGE/man"
        echo "Left out: pages for man and completion, which $program cannot write here." >&2
    fi
}

tell_systemd() {
    systemd-sysusers /usr/lib/sysusers.d/sdcpd.conf
    systemd-tmpfiles --create /usr/lib/tmpfiles.d/sdcpd.conf
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
}

next_steps() {
    cat <<END
Installed${ROOT:+ below $ROOT}.  Next:
  1. certificates, on one machine:  sdcpctl certs init --help
  2. copy ca.crt and this host's .crt and .key to /etc/sdcpd/certs; keys 0640, group sdcpd
  3. write /etc/sdcpd/sdcpd.toml; every key: /usr/share/doc/sdcpd/examples/sdcpd.toml.example
  4. sdcpctl doctor
  5. systemctl enable --now sdcpd.target sdcpd@ROLE     (router, verifier or drafter)
END
    [ $VENV = yes ] || echo "The program itself belongs at $PREFIX/bin/sdcpd and $PREFIX/bin/sdcpctl."
}

install_all() {
    [ -f "$SOURCE/pyproject.toml" ] || die "$SOURCE is no checkout of sdcpd"
    STAGE=$(mktemp -d)
    trap 'rm -rf "$STAGE"' EXIT
    plan >"$STAGE/plan"
    check_strangers
    umask 022
    begin
    [ $VENV = no ] || make_venv
    write_pages
    plan >"$STAGE/plan"
    check_strangers
    lay
    drop_stale
    [ -n "$ROOT" ] || tell_systemd
    next_steps
}

uninstall() {
    [ -f "$ROOT$MANIFEST" ] || { echo "sdcpd is not installed${ROOT:+ below $ROOT}." && return; }
    if [ -z "$ROOT" ] && [ -d /run/systemd/system ]; then
        running=$(systemctl list-units --no-legend --plain --state=active,activating 'sdcpd@*' | cut -d' ' -f1)
        # shellcheck disable=SC2086  # one line
        [ -z "$running" ] || die "still running; first: systemctl disable --now $(echo $running)"
    fi
    left=$(mktemp)
    cp "$ROOT$MANIFEST" "$left"
    sed -n 's/^f //p' "$left" | while read -r path; do rm -f "$ROOT$path"; done
    sed -n 's/^v //p' "$left" | while read -r path; do
        [ -z "$path" ] || rm -rf "$ROOT$path"
    done
    # The lower ones first; what holds something of others stays.
    sed -n 's/^d //p' "$left" | sort -r | while read -r path; do
        rmdir "$ROOT$path" 2>/dev/null || :
    done
    rm -f "$left"
    [ -n "$ROOT" ] || [ ! -d /run/systemd/system ] || systemctl daemon-reload
    echo "Taken away.  Kept: /etc/sdcpd, /var/lib/sdcpd, /var/cache/sdcpd and the user sdcpd."
}

while [ $# -gt 0 ]; do
    case $1 in
    --root)
        value "$@"
        [ -n "$2" ] || die "--root is empty; leave it out where this host is meant"
        ROOT=$2 && shift
        ;;
    --prefix) value "$@" && PREFIX=$2 && shift ;;
    --extras) value "$@" && EXTRAS=$2 && shift ;;
    --no-venv) VENV=no ;;
    --uninstall) UNINSTALL=yes ;;
    -h | --help) usage && exit 0 ;;
    *) echo "install.sh: $1 is not known; see --help" >&2 && exit 2 ;;
    esac
    shift
done
[ -z "$ROOT" ] || { absolute --root "$ROOT" && ROOT=${ROOT%/}; }
absolute --prefix "$PREFIX" && PREFIX=${PREFIX%/}
[ -n "$PREFIX" ] || die "--prefix /: give a folder of its own"
case $PREFIX/ in
/home/* | /root/* | /run/user/*) die "--prefix $PREFIX is in a home, which the units cannot see" ;;
/usr/ | /usr/local/) die "--prefix $PREFIX is not for one program alone: give a folder of its own" ;;
esac
[ -z "$ROOT" ] || [ -d "$ROOT" ] || die "--root $ROOT is not there; make it first: mkdir -p $ROOT"
[ -n "$ROOT" ] || [ "$(id -u)" = 0 ] || die "only root installs on this host; or give --root DIR"
[ -n "$ROOT" ] || command -v systemd-sysusers >/dev/null ||
    die "there is no systemd-sysusers here; the units need systemd 252 or newer"
if [ $UNINSTALL = yes ]; then uninstall; else install_all; fi
