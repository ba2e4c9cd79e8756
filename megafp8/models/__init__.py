"""The network: one GPT whose choices cover Llama, GPT-2 and Qwen, built one pipeline stage at a time."""
