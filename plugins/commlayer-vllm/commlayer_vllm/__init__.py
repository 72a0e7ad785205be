"""commlayer inside vLLM: pipeline-parallel communication of an unmodified engine.

vLLM calls `commlayer_vllm.plugin.register` in each of its processes.  Nothing
changes until ``additional_config={"commlayer": {...}}`` or ``COMMLAYER_VLLM=1``
asks for it.  The modules, from the outside in:

==============  ==============================================================
plugin          the entry point: when to install
install         what is done then
settings        what the user configured, and the backend of the platform
seams           which calls of the engine are replaced, and whether they are known
pipeline_group  the replaced calls of the group, with the engine's habits
wire            how they travel: over a commlayer communicator
wire_vllm       how they travel: in the engine's own format
line            what completes native works for `wire_vllm`
broadcasts      the broadcasts of sampled and draft tokens
log             the engine's log, and the library's in it
==============  ==============================================================
"""
