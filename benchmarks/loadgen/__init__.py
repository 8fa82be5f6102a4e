"""Load on a server that speaks OpenAI's API: what to ask, how fast to ask it, what came back."""
