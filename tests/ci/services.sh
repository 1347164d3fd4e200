#!/usr/bin/env bash
# Install the servers that tests run against and pip cannot bring.  Without them those tests are
# skipped, which tests/allowed_skips.txt decides about.
set -euo pipefail
command -v etcd >/dev/null && exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "etcd is not installed; on Debian: apt-get install etcd-server" >&2
    exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends etcd-server >/dev/null
