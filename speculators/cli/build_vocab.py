"""``speculators build-vocab``: the pruned vocabulary of a draft, from data or from another draft."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from speculators.data.vocabulary_building import BuiltVocabulary

__all__ = ["build_vocab"]


def build_vocab(
    *,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of prepared rows; repeatable.", show_default=False),
    ] = None,
    token_freq_path: Annotated[
        list[Path] | None,
        typer.Option(help="Counts made before (token_freq.pt); repeatable.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "--target-model-path", help="Folder or hub id of the verifier.", show_default=False),
    ] = None,
    target_vocab_size: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 24, help="The verifier's vocabulary, where there is no --model.", show_default=False),
    ] = None,
    draft_vocab_size: Annotated[int | None, typer.Option(min=1, help="Ids to keep.", show_default=False)] = None,
    coverage: Annotated[
        float | None,
        typer.Option(help="Keep as few ids as cover this share of the tokens.", show_default=False),
    ] = None,
    multiple_of: Annotated[int, typer.Option(min=1, help="Round what --coverage gives up to.")] = 1,
    keep_ids: Annotated[
        list[str] | None,
        typer.Option(help="Ids to keep anyway, as in 5,17; repeatable.", show_default=False),
    ] = None,
    all_special: Annotated[bool, typer.Option("--all-special", help="Keep special tokens that never occur, too.")] = False,
    from_checkpoint: Annotated[
        str | None,
        typer.Option(help="Draft, or folder of .npy tables, to take over.", show_default=False),
    ] = None,
    d2t_path: Annotated[Path | None, typer.Option(help="Table to take over (.npy).", show_default=False)] = None,
    t2d_path: Annotated[Path | None, typer.Option(help="Table to take over (.npy).", show_default=False)] = None,
    output: Annotated[Path, typer.Option("--output", "--output-path", help="Folder for the tables.")] = Path("output"),
    save_counts: Annotated[
        Path | None, typer.Option(help="Also write what was counted, merged, as this token_freq.pt.", show_default=False)
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that count.", show_default="by the amount of data")
    ] = None,
    most: Annotated[int, typer.Option(min=0, help="How many excluded tokens to list.")] = 20,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the verifier's folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Choose the ids that a draft can say, and write the tables d2t and t2d for `speculators train`.

    The size is given by --draft-vocab-size or by the share of the supervised tokens that it covers; or the mapping of
    another draft is taken over as it is, with a report of what the data loses by it.
    """
    import json

    from speculators.data.tokenizers import load_tokenizer
    from speculators.data.vocabulary_building import VocabularySettings, build_vocabulary
    from speculators.errors import ConfigError
    from speculators.models.verifier_weights import read_verifier_config, text_config

    settings = VocabularySettings(
        output=output,
        data=tuple(data or ()),
        token_freq_paths=tuple(token_freq_path or ()),
        draft_vocab_size=draft_vocab_size,
        coverage=coverage,
        multiple_of=multiple_of,
        keep_ids=_ids(keep_ids or []),
        all_special=all_special,
        from_checkpoint=from_checkpoint,
        d2t_path=d2t_path,
        t2d_path=t2d_path,
        save_counts=save_counts,
        workers=workers,
    )
    if (model is None) == (target_vocab_size is None):
        raise ConfigError("say which verifier the vocabulary is of: either --model or, without its files, --target-vocab-size")
    if model is None:
        if all_special:
            raise ConfigError("--all-special needs the verifier's tokenizer; give --model instead of --target-vocab-size")
        assert target_vocab_size is not None
        tokenizer, vocab_size = None, target_vocab_size
    else:
        tokenizer = load_tokenizer(model, trust_remote_code)
        vocab_size = int(text_config(read_verifier_config(model, trust_remote_code)).vocab_size)
    built = build_vocabulary(settings, vocab_size, tokenizer, most_excluded=most, shown=not as_json)
    if as_json:
        typer.echo(json.dumps(built.to_json(), indent=2))
    else:
        _print(built)


def _ids(texts: list[str]) -> tuple[int, ...]:
    from speculators.errors import ConfigError

    parts = [part.strip() for text in texts for part in text.split(",")]
    wrong = next((part for part in parts if not part.isdecimal()), None)
    if wrong is not None:
        raise ConfigError(f"--keep-ids takes token ids such as 5,17, not {wrong!r}")
    return tuple(sorted({int(part) for part in parts}))


def _print(built: BuiltVocabulary) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    record, size = built.record, built.mapping.draft_vocab_size
    curve = Table("ids", "supervised tokens covered", "share", "", title="What the best vocabulary of each size covers")
    for column in curve.columns[:3]:
        column.justify = "right"
    for point in built.curve:
        chosen = "<- chosen" if point.size == size and record.reused_from is None else ""
        style = "bold" if point.size == size else ""
        curve.add_row(f"{point.size:,}", f"{point.covered:,}", f"{point.share:.4%}", chosen, style=style)
    console.print(curve)
    share = f"{record.covered:,} of {record.tokens:,} supervised tokens ({record.covered / record.tokens:.4%})"
    console.print(f"{size:,} of {record.verifier_vocab_size:,} ids cover {share}", highlight=False)
    mandatory = built.mandatory
    if record.reused_from is None:
        console.print(
            f"kept whatever their count: {len(mandatory.end_of_turn)} end-of-turn ids, {len(mandatory.special)} other special "
            f"tokens, {len(mandatory.kept)} named ids",
            highlight=False,
        )
    else:
        fewer = built.best_covered - record.covered
        loss = f"{fewer:,} tokens ({fewer / record.tokens:.4%}) less than the best of this size"
        console.print(f"reused from {escape(record.reused_from)}: {loss}", highlight=False)
        for token in built.special_excluded:
            console.print(f"special token lost: {token.id} {escape(repr(token.text))}, {token.count:,} times", highlight=False)
    if len(built.sources) > 1:
        sources = Table("source", "tokens", "cannot be said", "share", title="By source")
        for source in built.sources:
            lost = source.tokens - source.covered
            sources.add_row(escape(source.name), f"{source.tokens:,}", f"{lost:,}", f"{lost / max(source.tokens, 1):.4%}")
        console.print(sources)
    if built.excluded:
        table = Table("id", "count", "text", title=f"Most frequent of {built.excluded_ids:,} ids that occur and cannot be said")
        for token in built.excluded:
            table.add_row(str(token.id), f"{token.count:,}", escape(repr(token.text)) if token.text is not None else "")
        console.print(table)
    for note in built.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    console.print(f"train with --d2t-path {built.d2t_path} --t2d-path {built.t2d_path}", highlight=False, soft_wrap=True)
