"""A draft that starts from the verifier's own layers: what is copied, what is not, and that it helps."""

import pytest
import torch
from safetensors.torch import load_file

from speculators.config import VerifierConfig
from speculators.data.rows import Row
from speculators.errors import VerifierError
from speculators.models import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.draft_config import build_draft_config
from speculators.models.verifier_weights import read_verifier_config
from speculators.models.warm_start import start_from_verifier
from speculators.verifiers.loading import load_verifier
from speculators.verifiers.query_keys import query_key_scales
from speculators.verifiers.transformers_source import TransformersSource
from tests.tiny import tiny_verifier


def draft_of(verifier: str, num_layers: int = 2) -> DSparkDraftModel:
    decoder = build_draft_config(read_verifier_config(verifier), num_layers=num_layers)
    config = DSparkSpeculatorConfig.build(
        decoder, VerifierConfig.from_pretrained(verifier), block_size=4, aux_hidden_state_layer_ids=[1, 3], mask_token_id=3
    )
    return DSparkDraftModel.from_verifier(config, verifier=verifier)


@pytest.fixture
def verifier(tmp_path) -> str:
    return str(tiny_verifier(tmp_path / "verifier", layers=4))


def test_takes_the_last_layers_and_the_final_norm(verifier):
    model = draft_of(verifier)
    taken = start_from_verifier(model, verifier)
    theirs = load_file(f"{verifier}/model.safetensors")
    ours = dict(model.named_parameters())
    for index, layer in ((0, 2), (1, 3)):
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
            assert torch.equal(ours[f"layers.{index}.{part}.weight"], theirs[f"model.layers.{layer}.{part}.weight"])
    assert torch.equal(ours["norm.weight"], theirs["model.norm.weight"])
    assert torch.equal(ours["hidden_norm.weight"], theirs["model.layers.2.input_layernorm.weight"])
    assert "layers.0.self_attn.q_norm.weight" not in taken  # a llama verifier has none


def test_norms_take_the_size_of_the_verifiers_queries_and_keys(verifier):
    loaded = load_verifier(verifier)
    tokens = torch.randint(0, loaded.vocab_size, (24,), generator=torch.Generator().manual_seed(0))
    model = draft_of(verifier)
    head_dim = model.layers[0].self_attn.head_dim
    scales = query_key_scales(loaded, tokens, [2, 3], head_dim)
    start_from_verifier(model, verifier, scales)
    states = (
        TransformersSource(loaded, (2, 3)).fetch([Row(0, tokens.numpy(), torch.ones(24, dtype=torch.bool).numpy())])[0].features
    )
    for index, layer in enumerate((2, 3)):
        decoder = loaded.parts.layers[layer]
        normed = decoder.input_layernorm(states[1:, index])
        for kind, place in (("q", 0), ("k", 1)):
            heads = getattr(decoder.self_attn, f"{kind}_proj")(normed).unflatten(-1, (-1, head_dim))
            expected = float(heads.square().mean(dim=-1).sqrt().mean())
            assert scales[index][place] == pytest.approx(expected, rel=1e-4)
            norm = getattr(model.layers[index].self_attn, f"{kind}_norm").weight
            torch.testing.assert_close(norm.detach(), torch.full_like(norm, expected), rtol=1e-4, atol=0)


def test_fc_passes_the_deepest_captured_layer(verifier):
    model = draft_of(verifier)
    before = model.fc.weight.detach().clone()
    start_from_verifier(model, verifier)
    size = model.fc.out_features
    after = model.fc.weight.detach()
    torch.testing.assert_close(after[:, :-size], 0.1 * before[:, :-size])
    torch.testing.assert_close(after[:, -size:], 0.1 * before[:, -size:] + torch.eye(size))


def test_refuses_more_layers_than_the_verifier_has(verifier):
    with pytest.raises(VerifierError, match="use fewer layers"):
        start_from_verifier(draft_of(verifier, num_layers=5), verifier)


def test_markov_start_is_near_zero_and_like_for_like_tokens(verifier):
    model = draft_of(verifier)
    start_from_verifier(model, verifier)
    w1, w2 = model.markov_head.markov_w1.weight.detach(), model.markov_head.markov_w2.weight.detach()
    assert float((w1 @ w2.T).std()) == pytest.approx(0.006, rel=0.25)
    embeddings = model.embed_tokens.weight
    near, far = torch.cdist(embeddings, embeddings).topk(2, largest=False).indices[:, 1], torch.roll(torch.arange(len(w1)), 7)
    assert (w1 - w1[near]).norm(dim=1).mean() < (w1 - w1[far]).norm(dim=1).mean()
