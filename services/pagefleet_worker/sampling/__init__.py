"""From logits to tokens, and to logprobs."""
