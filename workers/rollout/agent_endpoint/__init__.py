"""Episodes that an environment leads itself: it asks an endpoint of ours for every turn of the model.

======================  =====================================================================
`episode.py`            one completion
`endpoint.py`           an address for each episode, in OpenAI's protocol
`recorder.py`           what was sampled, kept where it is sampled
`openai_messages.py`    messages as programs send them, and as chat templates know them
======================  =====================================================================
"""
