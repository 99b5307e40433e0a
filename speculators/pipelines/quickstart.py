"""``speculators quickstart``: from a packaged model to measured acceptance, on one machine, in a given time.

Steps: load the verifier, split the prompts, let the verifier answer, prune the vocabulary, train, decode held-out prompts. Each
leaves its product in the run folder, and a rerun goes on at the step that was cut: behind the last finished answer, behind
the last checkpoint. What the folder holds at the end::

    run.yaml, train_command.txt, metrics.jsonl, 0/, 1/, ...   as `speculators train` leaves them
    data/           the training rows, their token counts and the vocabulary tables
    answers.jsonl   the answers with their token ids, prompts.json the split, steps/ the record of every finished step
    results.json    as `speculators evaluate` writes it, results.md the same table
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from speculators.data.prompts import find_prompt_files, load_human_eval, read_prompts
from speculators.data.rendering import render_prompt
from speculators.data.rows import AnswerRecord, DataManifest, RowDataset, SourceRecord
from speculators.data.token_counts import count_dataset, save_counts
from speculators.data.tokenizers import template_hash, tokenizer_hash
from speculators.data.vocabulary_files import mapping_for
from speculators.errors import DataError, SpeculatorsError, StoppedError, VerifierError
from speculators.evaluation.benchmark import BenchmarkSettings, PromptSet
from speculators.evaluation.bound import seconds_per_step
from speculators.evaluation.command import check_lengths, drafts_of, evaluate_drafts
from speculators.evaluation.machine import peak_memory_gib
from speculators.evaluation.results import EvaluationResults, read_results, write_json_atomically, write_results
from speculators.evaluation.tables import markdown_table, rich_tables
from speculators.files import write_text_atomically
from speculators.models import SpeculatorModel
from speculators.models.draft_config import default_layer_ids
from speculators.pipelines.answers import RenderedPrompt, collect_answers, rows_of
from speculators.pipelines.meaning import what_it_means
from speculators.pipelines.prompt_split import SplitPrompts, interleave, split_prompts
from speculators.pipelines.run_folder import RunFolder
from speculators.pipelines.settings import QuickstartSettings
from speculators.progress import bar
from speculators.sampling import SamplingParams
from speculators.train import TrainConfig, train
from speculators.verifiers.generation import generate_answers
from speculators.verifiers.loading import Verifier, load_verifier
from speculators.verifiers.packaged import packaged_verifier
from speculators.verifiers.session import TransformersSession

__all__ = ["QuickstartSettings", "run_quickstart"]

logger = logging.getLogger("speculators.quickstart")


def run_quickstart(
    settings: QuickstartSettings, output: Path, *, console: Console | None = None, quiet: bool = False
) -> EvaluationResults:
    """Run every step that is not done yet and print the table.

    :param console: where the table is printed; standard output by default.
    :param quiet: no progress bars and no notes on the steps.
    :raises SpeculatorsError: with one sentence for what the user can mend; nothing already written is lost.
    """
    with RunFolder(output, "quickstart").opened(settings.record()) as folder:
        results = _Quickstart(settings, folder, quiet).run()
    console = console or Console()
    console.print(rich_tables(results))
    console.print(what_it_means(results))
    console.print(f"run folder: {output}")
    return results


class _Quickstart:
    """One process's way through the steps."""

    def __init__(self, settings: QuickstartSettings, folder: RunFolder, quiet: bool) -> None:
        self.settings = settings
        self.folder = folder
        self.path = folder.path
        self.notes = None if quiet else Console(stderr=True)
        self.began = time.monotonic()

    def run(self) -> EvaluationResults:
        if self.folder.product("decode") is not None:
            return read_results(self.path)
        verifier, verifier_path = self._load()
        split = self._split()
        self._say_if_too_short(verifier)
        records = self._generate(verifier, split)
        dataset = self._rows(verifier, verifier_path, split, records)
        self._prune(verifier, dataset)
        checkpoint = self._train(verifier, verifier_path, dataset)
        return self._decode(verifier, verifier_path, split, checkpoint)

    # -- steps --------------------------------------------------------------------------------------------------------------

    def _load(self) -> tuple[Verifier, Path]:
        """The verifier, and its folder; the packaged one is written to the cache the first time."""
        began = time.monotonic()
        before = self.folder.product("load")
        path = self.settings.verifier or packaged_verifier()
        verifier = load_verifier(str(path))
        if verifier.tokenizer is None:
            raise VerifierError(f"the verifier {path} has no tokenizer files, which prompts need; add them to the folder")
        if before is not None and before["hash"] != verifier.hash:
            raise SpeculatorsError(
                f"the verifier in {path} is not the one that {self.path} was begun with; choose another --output"
            )
        self.folder.finish("load", {"verifier": str(path), "hash": verifier.hash})
        self._note(f"verifier {path}", began)
        return verifier, path

    def _split(self) -> SplitPrompts:
        """Prompts to train on and prompts to hold out, before anything is done with either."""
        file = self.path / "prompts.json"
        if self.folder.product("split") is None:
            domains = {path.stem: read_prompts(path) for path in find_prompt_files(self.settings.prompts)}
            if self.settings.human_eval:
                domains["humaneval"] = load_human_eval()
            split = split_prompts(domains, held_out_share=self.settings.held_out_share, seed=self.settings.seed)
            write_json_atomically(file, {"train": split.train, "held_out": split.held_out})
            self.folder.finish("split", {"train": _count(split.train), "held_out": _count(split.held_out)})
            self._note(f"prompts: {_count(split.train)} to train on, {_count(split.held_out)} held out")
        stored = json.loads(file.read_text(encoding="utf-8"))
        return SplitPrompts(stored["train"], stored["held_out"])

    def _generate(self, verifier: Verifier, split: SplitPrompts) -> list[dict[str, Any]]:
        """The verifier's own answers to the training prompts: greedy, because the draft is measured on greedy decoding."""
        settings = self.settings
        longest = settings.answer_tokens
        prompts = [
            RenderedPrompt(index, domain, ids)
            for index, (domain, messages) in enumerate(interleave(split.train))
            if len(ids := render_prompt(verifier.tokenizer, messages)) <= settings.max_prompt_tokens
        ]
        if verifier.context_length is not None:
            prompts = [prompt for prompt in prompts if len(prompt.ids) + longest <= verifier.context_length]
        finished = self.folder.product("generate") is not None

        def answer(batch: Sequence[list[int]], tick: Callable[[], bool]) -> Iterable[tuple[int, Sequence[int]]]:
            return generate_answers(verifier, batch, longest, batch_size=settings.generate_batch, stop=tick)

        began = time.monotonic()
        with bar("answer prompts", 1.0, share=True, shown=not finished and self.notes is not None, console=self.notes) as share:
            records = collect_answers(
                self.path / "answers.jsonl",
                [] if finished else prompts,
                answer,
                batch=settings.generate_batch,
                seconds=settings.generate_share * settings.seconds,
                advance=share.update,
            )
        if not records:
            raise DataError("the verifier answered no prompt; give other prompts with --prompts")
        if not finished:
            tokens = sum(len(record["answer_ids"]) for record in records)
            used = max(record["seconds"] for record in records)
            self.folder.finish("generate", {"answers": len(records), "tokens": tokens, "seconds": used})
            self._note(f"answers: {len(records)} prompts, {tokens} tokens", began)
        return records

    def _rows(self, verifier: Verifier, verifier_path: Path, split: SplitPrompts, records: list[dict[str, Any]]) -> RowDataset:
        """The answers as a data set that ``speculators train`` reads, too."""
        data = self.path / "data"
        if self.folder.product("rows") is None:
            manifest = DataManifest(
                verifier=str(verifier_path),
                tokenizer_hash=tokenizer_hash(verifier.tokenizer),
                template_hash=template_hash(verifier.tokenizer),
                answers=AnswerRecord(on_policy=True, temperature=0.0, max_new_tokens=self.settings.answer_tokens),
                sources=[SourceRecord(name=domain) for domain in sorted(split.train)],
                seed=self.settings.seed,
                counts={"kept": len(records)},
            )
            rows = rows_of(records)  # one of every prompt
            RowDataset.save(data, rows, manifest, overwrite=True, conversations=range(len(rows)))
            self.folder.finish("rows", {"rows": len(records)})
        return RowDataset.load(data)

    def _prune(self, verifier: Verifier, dataset: RowDataset) -> None:
        """The draft's vocabulary: the ids that occur in the answers, most frequent first."""
        if self.folder.product("vocabulary") is not None:
            return
        counted = count_dataset(dataset, verifier.vocab_size)
        size = min(self.settings.draft_vocab_size, verifier.vocab_size)
        save_counts(self.path / "data" / "token_freq.pt", counted)
        mapping = mapping_for(self.path / "data", counted, size, verifier.vocab_size, verifier.eos_ids)
        covered, all_tokens = mapping.coverage(counted.counts)
        self.folder.finish("vocabulary", {"size": size, "covered": covered, "tokens": all_tokens})
        self._note(f"draft vocabulary: {size} of {verifier.vocab_size} ids, {covered / all_tokens:.1%} of the answers' tokens")

    def _train(self, verifier: Verifier, verifier_path: Path, dataset: RowDataset) -> Path:
        """``speculators train`` on these rows, in this process."""
        done = self.folder.product("train")
        if done is not None:
            return self.path / done["checkpoint"]
        began = time.monotonic()
        config = self._train_config(verifier, verifier_path, dataset, self._train_minutes(verifier))
        self._note(f"train, as this command would: {config.command_line()}")
        result = train(config, dataset=dataset, verifier=verifier, progress=self.notes is not None)
        if result.signal is not None:
            raise StoppedError(result.signal)
        if result.checkpoint is None:
            raise SpeculatorsError(f"training left no checkpoint in {self.path}; raise --minutes")
        checkpoint = result.checkpoint.resolve().relative_to(self.path.resolve())
        self.folder.finish(
            "train", {"checkpoint": str(checkpoint), "steps": result.global_step, "validation": result.validation}
        )
        self._note(f"trained {result.global_step} steps, checkpoint {result.checkpoint}", began)
        return self.path / checkpoint

    def _train_minutes(self, verifier: Verifier) -> float:
        """What is left for training once the decoding that follows has its time; the same in every continuation of a run."""
        plan = self.folder.product("plan")
        if plan is None:
            generated = self.folder.product("generate") or {}
            used = max(time.monotonic() - self.began, generated.get("seconds", 0.0))
            per_step = self._seconds_per_step(verifier)
            seconds = self.settings.train_seconds(used, per_step)
            plan = self.folder.finish("plan", {"seconds_per_step": per_step, "train_minutes": round(seconds / 60, 2)})
        return float(plan["train_minutes"])

    def _say_if_too_short(self, verifier: Verifier) -> None:
        """Say before the first long step when decoding and the least training do not fit into the time that was asked for."""
        if self.notes is None or self.folder.product("generate") is not None:
            return
        seconds = self.settings.least_seconds(time.monotonic() - self.began, self._seconds_per_step(verifier))
        if seconds > 1.2 * self.settings.seconds:
            self._note(
                f"--minutes {self.settings.minutes:g} is less than the steps of fixed length take at the speed just measured: "
                f"expect about {seconds / 60:.1f} minutes"
            )

    def _seconds_per_step(self, verifier: Verifier) -> float:
        return seconds_per_step(TransformersSession(verifier), self.settings.max_prompt_tokens)

    def _train_config(self, verifier: Verifier, verifier_path: Path, dataset: RowDataset, minutes: float) -> TrainConfig:
        settings = self.settings
        return TrainConfig.from_flat(
            speculator_type="dspark",
            seed=settings.seed,
            verifier_name_or_path=str(verifier_path),
            num_layers=settings.num_layers,
            target_layer_ids=default_layer_ids(verifier.num_layers),
            draft_init="verifier",
            draft_vocab_size=min(settings.draft_vocab_size, verifier.vocab_size),
            mask_token_id=_unused_token(verifier, dataset),
            block_size=settings.block_size,
            markov_rank=settings.markov_rank,
            data_path=str(self.path / "data"),
            train_data_ratio=0.95,
            total_seq_len=settings.total_seq_len,
            max_anchors=settings.max_anchors,
            short_block_size=settings.short_block_size if settings.short_block_size < settings.block_size else None,
            short_block_share=settings.short_block_share,
            hidden_states_dtype="float32",
            states_cache_gib=settings.states_cache_gib,
            # On this little data the whole of p teaches more than its argmax and its overlap with q.
            loss_fn={"kl_div": 1.0},
            optimizer="adamw",
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            scheduler_type="cosine",
            epochs=1000,
            time_limit_minutes=minutes,
            checkpoint_freq=1000,
            checkpoint_steps=300,
            val_freq=3,
            checkpoint_dtype="float32",
            save_best=True,
            save_path=str(self.path),
        )

    def _decode(self, verifier: Verifier, verifier_path: Path, split: SplitPrompts, checkpoint: Path) -> EvaluationResults:
        """Held-out prompts decoded plainly and with the draft, in turn."""
        settings = self.settings
        began = time.monotonic()
        sets = self._held_out_sets(verifier, split)
        for prompts in sets:
            check_lengths(prompts, settings.decode_tokens, verifier.context_length)
        model = SpeculatorModel.from_pretrained(
            str(checkpoint), dtype=verifier.dtype, device=verifier.device, verifier=str(verifier_path)
        )
        drafts = drafts_of(model, str(checkpoint), settings.decode_counts, without_markov=True)
        results = evaluate_drafts(
            verifier,
            str(verifier_path),
            sets,
            drafts,
            BenchmarkSettings(settings.decode_tokens, SamplingParams(), settings.decode_repeats, verifier.eos_ids),
            seed=settings.seed,
            progress_console=self.notes,
        )
        results.settings |= {"quickstart": settings.record(), "peak_memory_gib": peak_memory_gib()}
        write_text_atomically(self.path / "results.md", markdown_table(results))
        write_results(results, self.path)
        self.folder.finish("decode", {"results": "results.json"})
        self._note(f"decoded held-out prompts; peak memory {results.settings['peak_memory_gib']} GiB", began)
        return results

    def _held_out_sets(self, verifier: Verifier, split: SplitPrompts) -> list[PromptSet]:
        """Held-out prompts, one domain after the other until there are enough, as one benchmark per domain."""
        chosen: dict[str, list[list[int]]] = {}
        place = 0
        while sum(map(len, chosen.values())) < self.settings.decode_prompts and place < max(map(len, split.held_out.values())):
            for domain, prompts in split.held_out.items():
                if place < len(prompts) and sum(map(len, chosen.values())) < self.settings.decode_prompts:
                    chosen.setdefault(domain, []).append(render_prompt(verifier.tokenizer, prompts[place]))
            place += 1
        return [PromptSet(domain, prompts) for domain, prompts in chosen.items()]

    # -- saying what goes on --------------------------------------------------------------------------------------------------

    def _note(self, text: str, began: float | None = None) -> None:
        if self.notes is not None:
            took = f" ({time.monotonic() - began:.0f} s)" if began is not None else ""
            self.notes.print(text + took, highlight=False, soft_wrap=True)


def _count(domains: dict[str, list[Any]]) -> int:
    return sum(map(len, domains.values()))


def _unused_token(verifier: Verifier, dataset: RowDataset) -> int | None:
    """A special token of the verifier that is not used, to be the mask token; None leaves the choice to training.

    The packaged verifier has reserved tokens but no mask token, and its padding token, the next choice, also ends texts.
    """
    tokenizer: Any = verifier.tokenizer
    if getattr(tokenizer, "mask_token_id", None) is not None:
        return None
    used = {token for batch in dataset.batches() for token in np.unique(batch.input_ids).tolist()}
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, *verifier.eos_ids}
    reserved = sorted(token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special)
    return next((token for token in reversed(reserved) if token not in used | named and token < verifier.vocab_size), None)
