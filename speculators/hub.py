"""Uploading a written folder to a hub repository: what ``push_to_hub`` of models and configs does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from speculators.errors import ConfigError, SpeculatorsError

__all__ = ["PushOptions", "check_push_options", "push_folder"]

#: The base error of the HTTP client behind huggingface_hub, which is not the same package in every release.
_TRANSPORT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]


class PushOptions(TypedDict, total=False):
    """Where and how to upload; the names and defaults are those of transformers' ``push_to_hub``."""

    repo_id: str
    commit_message: str | None
    commit_description: str | None
    private: bool | None
    token: str | bool | None
    revision: str | None
    create_pr: bool
    tags: Sequence[str] | None


def check_push_options(options: PushOptions, push: bool) -> None:
    """Refuse options of ``save_pretrained`` that are no upload options, or that come without ``push_to_hub=True``.

    :raises ConfigError: with one sentence.
    """
    unknown = sorted(set(options) - set(PushOptions.__annotations__))
    if unknown:
        raise ConfigError(f"save_pretrained has no option {unknown[0]!r}; it takes {', '.join(PushOptions.__annotations__)}")
    if options and not push:
        raise ConfigError(f"save_pretrained uses {sorted(options)[0]!r} for uploads only; add push_to_hub=True or drop it")


def push_folder(
    write: Callable[[Path], object], default_message: str, base_model: str | None, **options: Unpack[PushOptions]
) -> str:
    """Create the repository if need be and upload in one commit what ``write`` puts into an empty folder.

    A repository without a model card gets a short one.

    :param write: fills the folder it is given.
    :param base_model: hub id of the verifier, for the card; None leaves it out.
    :returns: the commit's address, as the hub gives it.
    :raises SpeculatorsError: the hub cannot be reached or refuses.
    """
    repo_id, token, revision = options["repo_id"], options.get("token"), options.get("revision")
    create_pr = options.get("create_pr", False)
    api = HfApi()
    try:
        repo_id = api.create_repo(repo_id, private=options.get("private"), token=token, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            _create_branch(api, repo_id, revision, token, create_pr)
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            _card(repo_id, token, options.get("tags"), base_model).save(Path(folder) / "README.md")
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=options.get("commit_message") or default_message,
                commit_description=options.get("commit_description"),
                token=token,
                revision=revision,
                create_pr=create_pr,
            )
        return str(commit)
    except (HfHubHTTPError, HFValidationError, _TRANSPORT_ERROR, ConnectionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SpeculatorsError(
            f"could not push to {repo_id!r} ({reason}); check the name, the network and your token (`hf auth login`)"
        ) from error


def _create_branch(api: HfApi, repo_id: str, revision: str, token: str | bool | None, create_pr: bool) -> None:
    try:
        api.create_branch(repo_id=repo_id, branch=revision, token=token, exist_ok=True)
    except HfHubHTTPError as error:
        # A pull request against somebody else's repository must not make a branch there, and needs none.
        if not create_pr or error.response.status_code != 403:
            raise


def _card(repo_id: str, token: str | bool | None, tags: Sequence[str] | None, base_model: str | None) -> ModelCard:
    """The repository's card with ``tags`` added; a new one when it has none."""
    try:
        card = ModelCard.load(repo_id, token=token if isinstance(token, str) else None)
    except (EntryNotFoundError, RepositoryNotFoundError):
        data = ModelCardData(tags=["speculative-decoding", "speculators"], library_name="speculators", base_model=base_model)
        verifier = f" for {base_model}" if base_model else ""
        card = ModelCard(
            f"---\n{data.to_yaml()}\n---\n\n# {repo_id.split('/')[-1]}\n\n"
            f"A draft{verifier} in the speculators format, for speculative decoding.\n"
        )
    known = list(card.data.tags or [])
    card.data.tags = known + [tag for tag in tags or () if tag not in known]
    return card
