"""The gateway: the OpenAI API over HTTP in front, tokens to and from the scheduler behind."""
