#!/usr/bin/env bash
# Install the programs that tests run against and pip cannot bring.  Without them those tests are
# skipped, which tests/allowed_skips.txt decides about.
set -euo pipefail
missing=()
command -v etcd >/dev/null || missing+=(etcd-server)
command -v chromium >/dev/null || missing+=(chromium fonts-dejavu-core)
# Its tools alone are used (systemd-analyze, systemd-sysusers, systemd-tmpfiles); nothing is started.
for tool in systemd-analyze systemd-sysusers systemd-tmpfiles; do
    command -v "$tool" >/dev/null || { missing+=(systemd) && break; }
done
[ ${#missing[@]} = 0 ] && exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "not installed; on Debian: apt-get install ${missing[*]}" >&2
    exit 0
fi
apt-get update -qq
# One at a time: where one is not to be had, the other is still there.
for package in "${missing[@]}"; do
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null ||
        failed=1
done
exit "${failed:-0}"
