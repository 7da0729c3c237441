"""The only place that loads vLLM or FlashInfer: adapters that hide what differs between releases."""
