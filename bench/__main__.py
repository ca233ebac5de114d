"""Every comparison, each in a process of its own: `python -m bench`, with quiet cores."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

from bench.report import COMPARISONS
from bench.results import ROOT
from bench.terminal import WORK


def main() -> None:
    """Runs the comparisons named on the command line, all by default.

    Ends with status 1 when one failed or found results that are not the oracle's; a ratio below what is
    wanted is told on the page and fails nothing.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comparisons", nargs="*", help=f"of {', '.join(COMPARISONS)}; all by default")
    chosen = parser.parse_args().comparisons or COMPARISONS
    shutil.rmtree(ROOT / WORK, ignore_errors=True)  # what earlier code generated or ingested
    failed = [name for name in chosen if subprocess.run([sys.executable, "-m", f"bench.{name}"], cwd=ROOT).returncode]  # noqa: S603, PLW1510
    if failed:
        sys.exit(f"failed, or not equal to the oracle: {', '.join(failed)}")


if __name__ == "__main__":
    main()
