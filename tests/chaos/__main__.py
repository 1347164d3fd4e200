"""`python -m tests.chaos`: a cluster under kill -9, freezes and cut links, and what it came to."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.chaos.run import CLIENTS, run
from tests.kit.etcd import running_etcd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20 * 60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--transport", choices=("auto", "h2", "h3"), default="auto")
    parser.add_argument("--etcd", action="store_true", help="logs and records in a real etcd")
    parser.add_argument("--keep", type=Path, help="a new directory for configuration and logs")
    parser.add_argument("--report", type=Path, help="a file for the report as JSON")
    options = parser.parse_args()
    with ExitStack() as stack:
        keep = options.keep
        if keep is None:
            keep = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        else:
            keep.mkdir(parents=True)
        etcd = stack.enter_context(running_etcd(keep / "etcd")).endpoints if options.etcd else ()
        report = asyncio.run(
            run(
                keep,
                seed=options.seed,
                seconds=options.seconds,
                clients=options.clients,
                etcd=etcd,
                transport=options.transport,
                say=lambda text: print(text, flush=True),
            )
        )
    print("\n".join(report.lines))
    if options.report is not None:
        options.report.write_text(report.as_json + "\n")
    raise SystemExit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
