"""Settings of prepare-data, and the renderer that they ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from speculators.data.encoding import runs_own_code
from speculators.data.rendered import Renderer
from speculators.data.tokenizer_checks import special_ids
from speculators.data.tokenizers import LoadedTokenizer

__all__ = ["OUTSIDE", "PrepareConfig", "renderer_maker"]


class PrepareConfig(BaseModel):
    """Settings of ``prepare-data``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: list[str]  #: files, folders of them, or data sets of a hub
    output: Path = Path("output")
    seq_length: int = Field(default=8192, ge=2)  #: longest row, in tokens
    max_samples: int | None = Field(default=None, ge=1, le=2**63 - 1)  #: most rows
    seed: int = Field(default=0, ge=0)  #: of the order of conversations
    minimum_valid_tokens: int = Field(default=1, ge=1)  #: fewest supervised tokens of a row
    rows: Literal["auto", "conversation", "turn"] = "auto"  #: what a row is of
    last_turn_only: bool = False
    generation_tags: Literal["check", "ignore"] = "check"
    role_order: Literal["template", "merge", "strict"] = "template"  #: who judges the order of roles
    keep_duplicates: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    render_endpoint: str | None = None  #: base URL of a server that renders in place of the tokenizer
    verifier: str = ""  #: recorded in the manifest

    # What the rows do not depend on.
    num_preprocessing_workers: int | None = Field(default=None, ge=0, le=128)
    token_freq_path: Path | None = None  #: of the counts of supervised tokens; in ``output`` by default
    skip_token_freq: bool = False
    overwrite: bool = False
    allow_empty_output: bool = False


#: Settings that change nothing in the rows; the data are known by their hashes.
OUTSIDE = {
    *("data", "output", "verifier", "num_preprocessing_workers", "token_freq_path", "skip_token_freq"),
    *("overwrite", "allow_empty_output"),
}


def renderer_maker(config: PrepareConfig, loaded: LoadedTokenizer, pieces: bool) -> Callable[[], Renderer]:
    """What makes the renderer in any process: picklable.

    A worker gets a tokenizer of the library as it is, which takes a fifth of the time of loading it (and no torch). One that
    runs code of its own need not survive that, and is loaded anew.

    :param pieces: whether texts may be encoded in pieces.
    """
    make = partial(_renderer, config, loaded, pieces)
    return make if not config.render_endpoint and runs_own_code(loaded.tokenizer) else partial(_itself, make())


def _itself(renderer: Renderer) -> Renderer:
    return renderer


def _renderer(config: PrepareConfig, loaded: LoadedTokenizer, pieces: bool) -> Renderer:
    options = config.chat_template_kwargs or None
    if config.render_endpoint:
        from speculators.data.render_endpoint import EndpointRenderer

        return EndpointRenderer(
            config.render_endpoint,
            eos_ids=loaded.eos_ids,
            special_ids=special_ids(loaded.tokenizer),
            history=config.rows,
            last_turn_only=config.last_turn_only,
            options=options,
        )
    from speculators.data.rendering import TemplateRenderer

    return TemplateRenderer(
        loaded.tokenizer,
        eos_ids=loaded.eos_ids,
        history=config.rows,
        last_turn_only=config.last_turn_only,
        tags=config.generation_tags,
        options=options,
        pieces=pieces,
    )
