"""The MoE backends of the installed vLLM, each called the way its own layer calls it."""
