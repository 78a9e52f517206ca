"""Messages as text and token ids, as one model's chat template writes them.

=========================  =================================================================
`chat_setup.py`            chat tokenizer and tool-call format of each environment
`chat_tokenizer.py`        conversations as token ids
`renderer.py`              conversations as text: prompts, continuations, whole conversations
`history_check.py`         whether the template rewrites earlier turns of sample conversations
`conversation_check.py`    whether it rewrites earlier turns of a real conversation
`content_parts.py`         content parts that the template can render
`format_detection.py`      which tool-call format a model writes, from its template
`template.py`              a model's chat template
`template_language.py`     Jinja in a sandbox, as models' templates expect it
=========================  =================================================================
"""
