"""Runs in upstream's environment: its converter and its stitching on given checkpoints.

    python upstream_convert.py JOB_FILE

The file holds ``converted``, each with ``model``, ``verifier``, ``algorithm``, ``output`` and ``options``, and ``stitched``,
each with ``draft``, ``verifier`` and ``output``. Prints, as JSON, the version and the errors by output.
"""

from __future__ import annotations

import json
import sys
import traceback
from importlib.metadata import version
from pathlib import Path

from speculators.cli.stitch import stitch

from speculators.convert import convert_model


def main(job: Path) -> None:
    work = json.loads(job.read_text(encoding="utf-8"))
    errors = {}
    for one in work["converted"]:
        try:
            convert_model(one["model"], one["verifier"], one["algorithm"], one["output"], **one["options"])
        except Exception as error:
            traceback.print_exc()
            errors[one["output"]] = f"{type(error).__name__}: {error}"
    for one in work["stitched"]:
        try:
            stitch(Path(one["draft"]), Path(one["verifier"]), Path(one["output"]))
        except Exception as error:
            errors[one["output"]] = f"{type(error).__name__}: {error}"
    print(json.dumps({"version": version("speculators"), "errors": errors}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
