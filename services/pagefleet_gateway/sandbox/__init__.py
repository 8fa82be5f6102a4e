"""What a client or a model may make dangerous, in child processes: templates and grammars."""
