"""What using a captured row k times is worth: predicted acceptance length per verifier token, for several k.

The packaged SmolLM2 answers the prompts of ``examples/prompts`` (greedy; kept in the output folder). Then one draft is trained
for every k on the same rows in one epoch, so that all of them cost the verifier the same tokens, and each is measured by
the exact replay of the held-out rows. Smaller shares of the rows show how the gain goes with the number of verifier tokens.

    python benchmarks/replay.py --rows 1000 --shares 0.25 0.5 1 --replay 1 2 4 --seeds 0 1

Results go to ``benchmarks/results/replay.json`` one by one, so that the command goes on where it was stopped; the default of
``--replay`` follows from them.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from speculators.data.prompts import find_prompt_files, load_human_eval, read_prompts
from speculators.data.rendering import render_prompt
from speculators.data.rows import AnswerRecord, DataManifest, RowDataset
from speculators.data.tokenizers import template_hash, tokenizer_hash
from speculators.decoding.prediction import predict_acceptance
from speculators.files import write_text_atomically
from speculators.models import SpeculatorModel
from speculators.models.draft_config import default_layer_ids
from speculators.models.verifier_weights import VerifierHead
from speculators.pipelines.answers import RenderedPrompt, collect_answers, rows_of
from speculators.pipelines.prompt_split import interleave, split_prompts
from speculators.sampling import SamplingParams
from speculators.train import TrainConfig, train
from speculators.verifiers.generation import generate_answers
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.packaged import packaged_verifier
from speculators.verifiers.source import CachedSource
from speculators.verifiers.transformers_source import TransformersSource

RESULTS = Path(__file__).parent / "results" / "replay.json"
#: Rows that are measured, the last of the data set.
HELD_OUT = 64
#: Tokens of the longest prompt that is answered.
LONGEST_PROMPT = 256


def answered_rows(verifier: Verifier, options: argparse.Namespace) -> RowDataset:
    """The verifier's own answers as rows; made once."""
    folder = options.output / "rows"
    if folder.exists():
        return RowDataset.load(folder)
    domains = {path.stem: read_prompts(path) for path in find_prompt_files(None)}
    domains["humaneval"] = load_human_eval()
    split = split_prompts(domains, held_out_share=0.0, seed=0)
    rendered = ((domain, render_prompt(verifier.tokenizer, messages)) for domain, messages in interleave(split.train))
    prompts = [RenderedPrompt(i, domain, ids) for i, (domain, ids) in enumerate(rendered) if len(ids) <= LONGEST_PROMPT]
    options.output.mkdir(parents=True, exist_ok=True)
    records = collect_answers(
        options.output / "answers.jsonl",
        prompts[: options.rows + options.held_out],
        lambda batch, tick: generate_answers(verifier, batch, options.answer_tokens, batch_size=32, stop=tick),
        batch=32,
        seconds=24 * 3600,
    )
    manifest = DataManifest(
        verifier=verifier.name,
        tokenizer_hash=tokenizer_hash(verifier.tokenizer),
        template_hash=template_hash(verifier.tokenizer),
        answers=AnswerRecord(on_policy=True, temperature=0.0, max_new_tokens=options.answer_tokens),
    )
    RowDataset.save(folder, rows_of(records), manifest)
    return RowDataset.load(folder)


def config_of(verifier: Verifier, options: argparse.Namespace, folder: Path, replay: int, seed: int) -> TrainConfig:
    """The quickstart's draft and optimiser, without its limit on time."""
    tokenizer: Any = verifier.tokenizer
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, *verifier.eos_ids}
    special = [token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special and token not in named]
    return TrainConfig.from_flat(
        speculator_type="dspark",
        seed=seed,
        verifier_name_or_path=verifier.name,
        num_layers=1,
        target_layer_ids=default_layer_ids(verifier.num_layers),
        draft_init="verifier",
        draft_vocab_size=8192,
        mask_token_id=max(special),
        block_size=8,
        markov_rank=64,
        total_seq_len=options.seq_len,
        max_anchors=128,
        hidden_states_dtype="float32",
        loss_fn={"kl_div": 1.0},
        optimizer="adamw",
        lr=options.lr,
        weight_decay=0.01,
        scheduler_type="cosine",
        epochs=1,
        replay=replay,
        replay_window=options.window,
        checkpoint_dtype="float32",
        save_path=str(folder),
    )


def acceptance(verifier: Verifier, checkpoint: Path, rows: RowDataset, ids: np.ndarray, source: CachedSource) -> float | None:
    """Predicted tokens a round at the most draft tokens, on the held-out rows."""
    draft: Any = SpeculatorModel.from_pretrained(str(checkpoint), dtype=torch.float32, verifier=verifier.name)
    teacher: Any = VerifierHead.from_folder(verifier.name, draft.t2d, config=verifier.config, with_norm=False)
    prediction = predict_acceptance(
        draft.eval(),
        teacher,
        (rows.row(int(row)) for row in ids),
        source,
        answers=rows.manifest.answers,
        num_draft_tokens=draft.layout.max_draft_tokens,
        sampling=SamplingParams(temperature=0.0),
        eos_ids=verifier.eos_ids,
    )
    return prediction.predicted_acceptance_length


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    verifier = load_verifier(str(options.verifier or packaged_verifier()))
    rows = answered_rows(verifier, options)
    captured = TransformersSource(verifier, default_layer_ids(verifier.num_layers), token_budget=4096)
    # One capture for all runs: what a run costs the verifier is counted, not paid again.
    source = CachedSource(captured, rows, max_bytes=int(options.cache_gib * 2**30))
    held_out = np.arange(len(rows) - options.held_out, len(rows))
    found = done_before(options)
    for seed in options.seeds:
        for share in options.shares:
            train_ids = np.arange(int(share * (len(rows) - options.held_out)))
            tokens = int(np.minimum(rows.lengths[train_ids], options.seq_len).sum())
            for replay in options.replay:
                if any((one["seed"], one["rows"], one["replay"]) == (seed, len(train_ids), replay) for one in found):
                    continue
                folder = options.output / f"run-{seed}-{share:g}-{replay}"
                shutil.rmtree(folder, ignore_errors=True)
                begun = time.monotonic()
                result = train(
                    config_of(verifier, options, folder, replay, seed),
                    dataset=rows,
                    train_ids=train_ids,
                    val_ids=held_out[:1],
                    verifier=verifier,
                    source=source,
                )
                seconds = time.monotonic() - begun
                assert result.checkpoint is not None
                length = acceptance(verifier, result.checkpoint, rows, held_out, source)
                found.append(
                    {
                        "seed": seed,
                        "rows": len(train_ids),
                        "verifier_tokens": tokens,
                        "replay": replay,
                        "steps": result.global_step,
                        "train_seconds": round(seconds, 1),
                        "predicted_acceptance_length": length,
                        "accepted_per_million_verifier_tokens": None if length is None else 1e6 * (length - 1) / tokens,
                    }
                )
                shutil.rmtree(folder, ignore_errors=True)
                save(options, found)
    return found


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on, but for the lists of cells."""
    names = ("held_out", "window", "answer_tokens", "seq_len", "lr")
    return {name: getattr(options, name) for name in names}


def done_before(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Cells of an earlier run with the same settings, which is gone on with."""
    if not options.results.exists():
        return []
    saved = json.loads(options.results.read_text(encoding="utf-8"))
    return list(saved["runs"]) if saved["settings"] == settings_of(options) else []


def save(options: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    machine = {"machine": platform.machine(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    content = {"settings": settings_of(options), "machine": machine, "runs": found}
    write_text_atomically(options.results, json.dumps(content, indent=1) + "\n")


def table(found: list[dict[str, Any]]) -> Table:
    """One line per budget and k, means over the seeds."""
    shown = Table("verifier tokens", "k", "steps", "predicted acceptance length", "accepted drafts per million verifier tokens")
    for tokens, replay in sorted({(entry["verifier_tokens"], entry["replay"]) for entry in found}):
        same = [entry for entry in found if (entry["verifier_tokens"], entry["replay"]) == (tokens, replay)]
        length = np.mean([entry["predicted_acceptance_length"] or np.nan for entry in same])
        cells = (tokens, replay, same[0]["steps"], f"{length:.3f}", f"{1e6 * (length - 1) / tokens:.3f}")
        shown.add_row(*map(str, cells))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verifier", type=Path, help="a folder; the packaged SmolLM2 if not given")
    parser.add_argument("--output", type=Path, default=Path("runs/replay"), help="rows and runs; rows are used again")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rows", type=int, default=1000, help="most rows to train on")
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="of the rows")
    parser.add_argument("--replay", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--answer-tokens", type=int, default=160)
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of an optimiser step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--cache-gib", type=float, default=8.0)
    options = parser.parse_args()
    found = measure(options)
    Console().print(table(found))


if __name__ == "__main__":
    main()
