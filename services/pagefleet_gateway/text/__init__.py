"""Text and tokens: the tokenizer, a chat's prompt, and what tokens say as they arrive."""
