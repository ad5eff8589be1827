"""A chat template that shows images and videos, for the small vision models."""

from functools import cache
from typing import Any

from agentrl.rollout.templates import ChatTemplate
from tests.fakes.vision_models import make_processor, make_tokenizer

VISION_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\nTools:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' -}}
{{- show(message.content) -}}
{{- '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content -%}{{- show(message.content) -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@cache
def make_vision_template(family: str, source: str = VISION_TEMPLATE, **kwargs: Any) -> ChatTemplate:
    """The template, with the processor of a family."""
    processor = make_processor(family)
    return ChatTemplate(make_tokenizer(), custom_template=source, media=processor, **kwargs)
