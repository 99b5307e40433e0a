"""Uploads, with the hub replaced by a stand-in that has the real client's signatures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled

from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.errors import ConfigError, SpeculatorsError
from tests.models.test_checkpoints import draft, files, same_state


class Hub:
    """What was uploaded, and with which arguments."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.cards: dict[str, ModelCard] = {}
        self.api: Any = create_autospec(HfApi, instance=True)
        self.api.create_repo.side_effect = lambda repo_id, **_: SimpleNamespace(repo_id=self.full(repo_id))
        self.api.upload_folder.side_effect = self.upload
        monkeypatch.setattr("speculators.hub.HfApi", lambda: self.api)
        monkeypatch.setattr(ModelCard, "load", self.card)

    @staticmethod
    def full(repo_id: str) -> str:
        return repo_id if "/" in repo_id else f"me/{repo_id}"

    def card(self, repo_id: str, token: str | None = None) -> ModelCard:
        if repo_id not in self.cards:
            raise EntryNotFoundError("no README.md")
        return self.cards[repo_id]

    def upload(self, *, repo_id: str, folder_path: str, **_: Any) -> str:
        target = self.folder / repo_id
        target.mkdir(parents=True, exist_ok=True)
        for path in Path(folder_path).iterdir():
            (target / path.name).write_bytes(path.read_bytes())
        return f"commit to {repo_id}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(tmp_path / "hub", monkeypatch)


def test_a_pushed_draft_loads_and_has_a_card(hub: Hub) -> None:
    model = draft(None)
    model.config.speculators_config.verifier.name_or_path = "org/verifier"
    where = model.push_to_hub(
        "my-draft", include_embeddings=True, max_shard_size=9000, private=True, token="secret", tags=["dspark"], revision="v2"
    )
    assert where == "commit to me/my-draft"
    hub.api.create_repo.assert_called_once_with("my-draft", private=True, token="secret", exist_ok=True)
    hub.api.create_branch.assert_called_once_with(repo_id="me/my-draft", branch="v2", token="secret", exist_ok=True)
    options = hub.api.upload_folder.call_args.kwargs
    assert options["commit_message"] == "Upload draft"
    assert (options["revision"], options["token"], options["create_pr"]) == ("v2", "secret", False)
    folder = hub.folder / "me" / "my-draft"
    assert "model.safetensors.index.json" in files(folder)
    assert same_state(SpeculatorModel.from_pretrained(folder), model)
    card = ModelCard((folder / "README.md").read_text())
    assert card.data.base_model == "org/verifier"
    assert card.data.tags == ["speculative-decoding", "speculators", "dspark"]


def test_a_card_that_is_there_stays(hub: Hub) -> None:
    hub.cards["org/draft"] = ModelCard("---\nlicense: mit\ntags: [mine]\n---\nMy own words.\n")
    draft(None).push_to_hub("org/draft", tags=["mine", "new"])
    card = ModelCard((hub.folder / "org" / "draft" / "README.md").read_text())
    assert "My own words." in card.text
    assert (card.data.license, card.data.tags) == ("mit", ["mine", "new"])


def test_saving_can_push_as_in_transformers(hub: Hub, tmp_path: Path) -> None:
    model = draft(None)
    model.save_pretrained(tmp_path / "first", push_to_hub=True, commit_message="trained", include_embeddings=True)
    assert files(tmp_path / "first") == ["config.json", "model.safetensors"]
    assert hub.api.upload_folder.call_args.kwargs["commit_message"] == "trained"
    for name in files(tmp_path / "first"):
        assert (hub.folder / "me" / "first" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    model.save_pretrained(tmp_path / "second", push_to_hub=True, repo_id="org/named")
    assert files(hub.folder / "org" / "named") == ["README.md", "config.json", "model.safetensors"]


def test_a_config_can_be_pushed_alone(hub: Hub, tmp_path: Path) -> None:
    config = draft(None).config
    config.save_pretrained(tmp_path / "shape", push_to_hub=True, create_pr=True)
    options = hub.api.upload_folder.call_args.kwargs
    assert (options["create_pr"], options["commit_message"]) == (True, "Upload draft config")
    assert SpeculatorModelConfig.from_pretrained(hub.folder / "me" / "shape") == config
    assert config.push_to_hub("org/shape") == "commit to org/shape"
    assert files(hub.folder / "org" / "shape") == ["README.md", "config.json"]


def test_other_processes_write_and_push_nothing(hub: Hub, tmp_path: Path) -> None:
    draft(None).save_pretrained(tmp_path / "draft", push_to_hub=True, is_main_process=False)
    assert not (tmp_path / "draft").exists()
    hub.api.create_repo.assert_not_called()


def test_what_goes_wrong_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    model = draft(None)
    for saved in (model, model.config):
        with pytest.raises(ConfigError, match="has no option 'safe_serialization'"):
            saved.save_pretrained(tmp_path / "draft", push_to_hub=True, safe_serialization=True)
        with pytest.raises(ConfigError, match="uses 'repo_id' for uploads only; add push_to_hub=True"):
            saved.save_pretrained(tmp_path / "draft", repo_id="me/draft")
        assert not (tmp_path / "draft").exists()
        hub.api.create_repo.side_effect = OfflineModeIsEnabled("offline\nmode")
        with pytest.raises(SpeculatorsError, match=r"could not push to 'me/draft' \(offline\); check the name") as caught:
            saved.push_to_hub("me/draft")
        assert "\n" not in str(caught.value)
