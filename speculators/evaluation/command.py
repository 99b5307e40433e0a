"""``speculators evaluate`` without the command line: from a checkpoint and prompt files to results."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from rich.console import Console

from speculators.config import SpeculatorModelConfig
from speculators.data.prompts import read_prompts
from speculators.data.rendering import render_prompt
from speculators.decoding.decoder import Decoder
from speculators.errors import ConfigError, DataError, VerifierError
from speculators.evaluation.benchmark import BenchmarkSettings, PromptSet, Way, count_decodes, run_benchmark
from speculators.evaluation.bound import measure_bound
from speculators.evaluation.machine import describe_machine, engine_name
from speculators.evaluation.results import CostBound, DraftDescription, EvaluationResults, averages, write_results
from speculators.files import writing
from speculators.models import SpeculatorModel
from speculators.progress import bar
from speculators.sampling import SamplingParams
from speculators.verifiers.loading import load_verifier
from speculators.verifiers.packed_linear import pack_linears
from speculators.verifiers.session import TransformersSession

if TYPE_CHECKING:
    from speculators.models.drafter import Drafter
    from speculators.verifiers.loading import Verifier

__all__ = ["DraftUnderTest", "EvaluationRequest", "draft_ways", "evaluate_checkpoint", "evaluate_drafts", "parse_dtype"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class EvaluationRequest:
    """What the command line asked for, checked as far as nothing need be loaded for it; see ``speculators evaluate --help``."""

    checkpoint: Path
    verifier: str | None
    data: list[Path]
    num_speculative_tokens: list[int]
    max_new_tokens: int
    sampling: SamplingParams
    seed: int
    limit: int | None
    repeats: int
    draft_full_block: bool
    without_markov: bool
    dtype: str
    device: str | None
    trust_remote_code: bool

    @classmethod
    def checked(cls, *, temperature: float, top_k: int, top_p: float, **values: Any) -> EvaluationRequest:
        """Build one from flags.

        :raises ConfigError: for a value out of range or a checkpoint folder that is none.
        """
        try:
            sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        except ValidationError as error:
            fault = error.errors()[0]
            flag = "--" + str(fault["loc"][0]).replace("_", "-")
            raise ConfigError(f"{flag} {fault['input']} is out of range: {fault['msg'].lower()}") from None
        request = cls(sampling=sampling, **values)
        parse_dtype(request.dtype)
        if not (request.checkpoint / "config.json").is_file():
            raise ConfigError(
                f"{request.checkpoint} is no checkpoint folder (it has no config.json); give the folder that training saved "
                "a draft to"
            )
        return request


@dataclass(frozen=True)
class DraftUnderTest:
    """A draft and the numbers of tokens to draft with it; ``once``: without repeated timings."""

    description: DraftDescription
    drafter: Drafter
    counts: Sequence[int]
    once: bool = False


def check_writable(folder: Path) -> None:
    """Create ``folder`` if need be and see that a file can be written in it, before any work that it is to keep.

    :raises DataError: when it cannot.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def parse_dtype(name: str) -> torch.dtype | None:
    """A torch dtype; None for "auto", which leaves the choice to the verifier's loader.

    :raises ConfigError: for any other name.
    """
    if name != "auto" and name not in _DTYPES:
        raise ConfigError(f"--dtype {name} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES.get(name)


def evaluate_checkpoint(
    request: EvaluationRequest, *, output: Path | None = None, progress_console: Console | None = None
) -> EvaluationResults:
    """Run the evaluation and write it to ``output`` if given; that it can be written there is seen to first.

    All that can be refused is refused before the first decode.

    :raises ConfigError: when a draft cannot draft that many tokens, or the checkpoint names no verifier.
    :raises DataError: for prompts that cannot be read, or do not fit the verifier's context.
    :raises VerifierError: when the verifier is missing or does not fit the draft.
    """
    if output is not None:
        check_writable(output)
    config = SpeculatorModelConfig.from_pretrained(str(request.checkpoint))
    _check_counts(config, request)
    path = request.verifier or _named_verifier(config, request.checkpoint)
    prompts = [(file.stem, read_prompts(file)[: request.limit]) for file in request.data]
    dtype = parse_dtype(request.dtype)
    verifier = load_verifier(path, dtype=dtype, device=request.device, trust_remote_code=request.trust_remote_code)
    _check_fit(config, verifier, path)
    if verifier.tokenizer is None:
        raise VerifierError(f"the verifier {path} has no tokenizer files, which prompts need; add them to the folder")
    sets = [
        PromptSet(name, [render_prompt(verifier.tokenizer, prompt.messages, prompt.tools) for prompt in file])
        for name, file in zip(_distinct([name for name, _ in prompts]), (file for _, file in prompts))
    ]
    for prompt_set in sets:
        check_lengths(prompt_set, request.max_new_tokens, verifier.context_length)
    model = SpeculatorModel.from_pretrained(request.checkpoint, dtype=verifier.dtype, device=verifier.device, verifier=path)
    drafts = drafts_of(model, str(request.checkpoint), request.num_speculative_tokens, request.without_markov)
    exact = verifier.dtype in (torch.float32, torch.float64)
    settings = BenchmarkSettings(request.max_new_tokens, request.sampling, request.repeats, verifier.eos_ids, exact)
    results = evaluate_drafts(
        verifier,
        str(path),
        sets,
        drafts,
        settings,
        seed=request.seed,
        full_block=request.draft_full_block,
        progress_console=progress_console,
    )
    results.settings |= {"data": [str(file) for file in request.data], "limit": request.limit}
    if output is not None:
        write_results(results, output)
    return results


def drafts_of(model: Any, path: str, counts: Sequence[int], without_markov: bool = False) -> list[DraftUnderTest]:
    """The draft of a checkpoint, and on request the same once more with its Markov head switched off.

    The draft's linear layers are packed as the verifier's are (:func:`speculators.verifiers.packed_linear.pack_linears`); it is
    not to be trained afterwards.

    :param counts: numbers of draft tokens for the draft itself; without the Markov head only the largest is run, once.
    """
    pack_linears(model)
    family, layout = model.config.speculators_model_type, model.config.layout.name
    has_markov = getattr(model, "markov_head", None) is not None

    def described(name: str, markov: bool | None) -> DraftDescription:
        return DraftDescription(name=name, path=path, family=family, layout=layout, markov=markov)

    drafts = [DraftUnderTest(described(family, True if has_markov else None), model.drafter(), counts)]
    if without_markov:
        if not has_markov:
            raise ConfigError(f"the draft in {path} has no Markov head to switch off; leave --no-markov out")
        name = f"{family} without Markov"
        drafts.append(DraftUnderTest(described(name, False), model.drafter(markov=False), [max(counts)], once=True))
    return drafts


def draft_ways(
    verifier: Verifier, drafts: Sequence[DraftUnderTest], sampling: SamplingParams, seed: int, full_block: bool
) -> tuple[Way, list[Way]]:
    """Plain decoding, whose session captures no layers, and every draft at every n."""

    def sessions(layer_ids: tuple[int, ...]) -> Callable[[], TransformersSession]:
        return lambda: TransformersSession(verifier, layer_ids)

    common: dict[str, Any] = {"sampling": sampling, "context_length": verifier.context_length, "seed": seed}
    plain = Way(Decoder(sessions(()), **common))
    drafted = []
    for draft in drafts:
        factory = sessions(tuple(draft.drafter.layer_ids))
        for n in draft.counts:
            decoder = Decoder(factory, draft.drafter, n, full_block=full_block, **common)
            drafted.append(Way(decoder, draft.description, draft.once))
    return plain, drafted


def evaluate_drafts(
    verifier: Verifier,
    verifier_name: str,
    sets: Sequence[PromptSet],
    drafts: Sequence[DraftUnderTest],
    settings: BenchmarkSettings,
    *,
    seed: int = 0,
    full_block: bool = False,
    progress_console: Console | None = None,
) -> EvaluationResults:
    """Measure loaded drafts on prompt sets; the part that quickstart shares with ``speculators evaluate``."""
    plain, drafted = draft_ways(verifier, drafts, settings.sampling, seed, full_block)
    benchmarks = []
    total = count_decodes(sets, [plain, *drafted], settings)
    with bar("decode", total, shown=progress_console is not None, console=progress_console) as decodes:
        for prompts in sets:
            benchmarks.append(run_benchmark(prompts, plain, drafted, settings, decodes.advance))
    longest = max((prompt for prompts in sets for prompt in prompts.prompts), key=len)
    if verifier.context_length is not None:  # the timed passes need room behind the prompt
        most = max(n for draft in drafts for n in draft.counts)
        longest = longest[: max(1, verifier.context_length - most - 1)]
    bound: list[CostBound] = []
    for draft in drafts:
        session = TransformersSession(verifier, tuple(draft.drafter.layer_ids))
        bound.extend(
            measure_bound(
                draft.description.name,
                session,
                draft.drafter,
                longest,
                draft.counts,
                sampling=settings.sampling,
                full_block=full_block,
            )
        )
    return EvaluationResults(
        verifier=verifier_name,
        engine=engine_name(),
        machine=describe_machine(verifier.device),
        drafts=[draft.description for draft in drafts],
        benchmarks=benchmarks,
        average=averages(benchmarks),
        bound=bound,
        settings={
            "max_new_tokens": settings.max_new_tokens,
            **settings.sampling.model_dump(),
            "seed": seed,
            "repeats": settings.repeats,
            "draft_full_block": full_block,
            "dtype": str(verifier.dtype).removeprefix("torch."),
            "batch": 1,
        },
    )


def check_lengths(prompts: PromptSet, max_new_tokens: int, context_length: int | None) -> None:
    """Refuse prompts that leave no room for an answer.

    :raises DataError: naming the first.
    """
    for index, prompt in enumerate(prompts.prompts):
        if context_length is not None and len(prompt) + max_new_tokens > context_length:
            raise DataError(
                f"prompt {index} of {prompts.name} has {len(prompt)} tokens, which with {max_new_tokens} new ones exceeds the "
                f"verifier's context of {context_length}; shorten it, take it out or lower --max-new-tokens"
            )


def _check_counts(config: Any, request: EvaluationRequest) -> None:
    largest, most = max(request.num_speculative_tokens), config.layout.most_draft_tokens
    if largest > most:
        raise ConfigError(
            f"--num-speculative-tokens {largest} is more than the draft in {request.checkpoint} can draft "
            f"({config.layout.name} layout of {config.layout.block_size} slots); use at most {most}"
        )


def _named_verifier(config: Any, checkpoint: Path) -> str:
    named = config.speculators_config.verifier.name_or_path if config.speculators_config is not None else None
    if not named:
        raise ConfigError(f"the checkpoint {checkpoint} names no verifier; give its folder with --verifier")
    return str(named)


def _check_fit(config: Any, verifier: Verifier, path: str | Path) -> None:
    """A draft reads its verifier's states and writes its token ids, so both sizes must agree."""
    decoder = config.transformer_layer_config
    if (decoder.hidden_size, decoder.vocab_size) != (verifier.hidden_size, verifier.vocab_size):
        raise VerifierError(
            f"the verifier {path} (hidden size {verifier.hidden_size}, {verifier.vocab_size} tokens) is not the draft's own "
            f"(hidden size {decoder.hidden_size}, {decoder.vocab_size} tokens); give the right one with --verifier"
        )
    config.check_layers(verifier.num_layers)


def _distinct(names: Sequence[str]) -> list[str]:
    """Names with a number behind those that came before: two files may be called the same in different folders."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return result
