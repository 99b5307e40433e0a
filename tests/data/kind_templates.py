"""Chat templates of the kinds of models that are out there: their facts (markers, what they drop and add), our words.

A line break right behind a block is written ``{{ '\\n' }}``, because templates are read with ``trim_blocks``.
"""

from __future__ import annotations

#: SmolLM2-like ChatML: a system turn of its own when there is none; a newline, that nobody generates, behind every turn.
CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: The same with generation tags, as templates that are made for training have them.
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_QWEN3_TURNS = (
    "{% set ns = namespace(query=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% set text = m['content'] if m['content'] is string else '' %}"
    "{% if m['role'] == 'assistant' %}"
    "{% set why = m['reasoning_content'] if m['reasoning_content'] is string else '' %}"
    "{% if not why and '</think>' in text %}"
    "{% set why = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.query and (loop.last or why) %}<think>\n{{ why.strip('\n') }}\n</think>\n\n{{ text.lstrip('\n') }}"
    "{% else %}{{ text }}{% endif %}"
    "{% for call in m['tool_calls'] or [] %}"
    "{% if not loop.first or text %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call[\'function\'][\'name\'] }}", "arguments": '
    "{% set given = call['function']['arguments'] %}{{ given if given is string else given | tojson }}}\n</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% elif m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ text }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ text }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
)

#: Qwen3-like: history loses its reasoning, the last turn gets a think block even if it is empty.
QWEN3 = _QWEN3_TURNS + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

#: Qwen3-Thinking-like: the think block is opened by the prompt.
QWEN3_THINKING = _QWEN3_TURNS + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"

#: Llama-3-like: headers, BOS written by the template, texts trimmed, tools' answers as "ipython".
LLAMA3 = (
    "{{ bos_token }}"
    "{% if tools %}<|start_header_id|>system<|end_header_id|>\n\nFunctions: {{ tools | tojson }}<|eot_id|>{% endif %}"
    "{% for m in messages %}"
    "{% set role = 'ipython' if m['role'] == 'tool' else m['role'] %}"
    "<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
    "{% if m['tool_calls'] %}{% if m['tool_calls'] | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}"
    "{% set call = m['tool_calls'][0]['function'] %}"
    '{"name": "{{ call[\'name\'] }}", "parameters": {{ call[\'arguments\'] | tojson }}}'
    "{% else %}{{ (m['content'] or '') | trim }}{% endif %}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

#: Gemma-like: no system turn, strict alternation, the assistant is "model", texts trimmed.
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

#: Mistral/Llama-2-like: no header for the assistant, whose text begins with a space and ends with the end of text.
INST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)

#: Kimi-K2-like: no newlines between turns, tools declared in a turn of their own, calls between markers.
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}<|im_system|>system<|im_middle|>Be kind.<|im_end|>{% endif %}"
    "{% if m['role'] == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m['tool_call_id'] }}\n"
    "{% else %}<|im_{{ m['role'] }}|>{{ m['role'] }}<|im_middle|>{% endif %}"
    "{{ m['content'] or '' }}"
    "{% if m['tool_calls'] %}<|tool_calls_section_begin|>{% for call in m['tool_calls'] %}"
    "{% set given = call['function']['arguments'] %}"
    "<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>{{ given if given is string else given | tojson }}"
    "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)

#: gpt-oss-like: channels; history loses its analysis and ends with another token than the last turn.
HARMONY = (
    "<|start|>system<|message|>Be kind.<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% set ns = namespace(query=-1, call='') %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}"
    "{% if m['thinking'] and loop.index0 > ns.query %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m['thinking'] }}<|end|>{% endif %}"
    "{% if m['tool_calls'] %}{% set call = m['tool_calls'][0]['function'] %}{% set ns.call = call['name'] %}"
    "<|start|>assistant to=functions.{{ call['name'] }}<|channel|>commentary json<|message|>"
    "{{ call['arguments'] | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m['content'] }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
    "{% elif m['role'] == 'tool' %}"
    "<|start|>functions.{{ ns.call }} to=assistant<|channel|>commentary<|message|>{{ m['content'] | tojson }}<|end|>"
    "{% else %}<|start|>{{ 'developer' if m['role'] == 'system' else m['role'] }}"
    "<|message|>{{ m['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

#: DeepSeek-like: full-width bars, no newlines, the answer's reasoning is cut off wherever the turn stands.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}<\uff5cUser\uff5c>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<\uff5cAssistant\uff5c>"
    "{% set text = m['content'].split('</think>')[-1] if '</think>' in m['content'] else m['content'] %}"
    "{{ text }}{{ eos_token }}"
    "{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<\uff5cAssistant\uff5c>{% endif %}"
)

#: No special token anywhere.
PLAIN = (
    "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

#: Role markers right before the texts, so that a tokenizer's prefix space stands in the answer.
PREFIXED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

#: The code that comes with Kimi's tokenizer, in little: tiktoken underneath, no offsets, special ids far behind the others.
KIMI_CODE = """
import base64

import tiktoken
from transformers import PreTrainedTokenizer


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        with open(vocab_file, encoding="ascii") as file:
            pairs = [line.split() for line in file if line.strip()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        special = {token.content: index for index, token in (added_tokens_decoder or {}).items()}
        pattern = SPLIT
        self.model = tiktoken.Encoding("kimi", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self.names = {rank: token.decode("latin-1") for token, rank in ranks.items()}
        self.names.update({index: token for token, index in special.items()})
        self.ids = {name: index for index, name in self.names.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **kwargs)

    @property
    def vocab_size(self):
        return 163840

    def get_vocab(self):
        return dict(self.ids)

    def _tokenize(self, text, **kwargs):
        return [self.names[index] for index in self.model.encode(text, disallowed_special=())]

    def _convert_token_to_id(self, token):
        return self.ids[token]

    def _convert_id_to_token(self, index):
        return self.names[index]

    def convert_tokens_to_string(self, tokens):
        return self.model.decode([self.ids[token] for token in tokens])

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()
"""
