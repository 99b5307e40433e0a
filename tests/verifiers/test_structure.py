import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, LlavaConfig

from speculators.errors import VerifierError
from speculators.models.verifier_weights import text_config
from speculators.verifiers.attention import GROUPED_ATTENTION, use_grouped_attention
from speculators.verifiers.cache import fits_preallocated
from speculators.verifiers.structure import decoder_parts
from tests.verifiers.models import COMMON, FAMILIES, tiny_model

OWN_ATTENTION = {"gemma2", "gpt_oss", "deepseek_v3", "qwen3_5_text"}  # soft cap, sinks, latent keys, no registered function
OWN_CACHE = {"lfm2", "qwen3_5_text"}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_found_by_structure(family):
    model = tiny_model(family)
    parts = decoder_parts(model)
    assert len(parts.layers) == 3
    ids = torch.arange(7).view(1, 7)
    with torch.no_grad():
        output = model(input_ids=ids, output_hidden_states=True)
        states = parts.base(input_ids=ids).last_hidden_state
    assert torch.equal(states, output.hidden_states[-1])
    seen = []
    with torch.no_grad(), parts.norm.register_forward_hook(lambda module, args, result: seen.append(result)):
        model(input_ids=ids)
    assert torch.equal(seen[0], states)


def test_the_text_decoder_of_a_vision_language_model_is_found():
    text = {**COMMON, "model_type": "llama"}
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = LlavaConfig(text_config=text, vision_config={**vision, "num_attention_heads": 2, "image_size": 8, "patch_size": 4})
    model = AutoModelForImageTextToText.from_config(config)
    parts = decoder_parts(model)
    assert len(parts.layers) == 3
    assert text_config(config).hidden_size == 32


def test_a_model_without_a_stack_of_layers_is_refused():
    with pytest.raises(VerifierError, match="no stack of decoder layers"):
        decoder_parts(nn.Linear(2, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_use_our_attention_and_cache(family):
    model = tiny_model(family)
    assert use_grouped_attention(model) == (family not in OWN_ATTENTION)
    assert (model.config._attn_implementation == GROUPED_ATTENTION) == (family not in OWN_ATTENTION)
    assert fits_preallocated(model.config) == (family not in OWN_CACHE)
