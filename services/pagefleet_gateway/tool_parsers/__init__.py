"""Calls of tools in a model's text, in each family's notation, as the text arrives.

A notation is a script: a generator that is sent one character after another, so that what it makes
of a text does not depend on the pieces in which it came. What a script has read and not yet decided
on is held. It becomes content as soon as it can be no call: a text that only looks like one is
never lost. A call begins when its name is known and its arguments have begun; from then on they
come out as they are written, without being understood: whether they are JSON is for the client to
see. They end where their brackets close; what follows and is no part of the notation is content.

    hermes         <tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen)
    qwen3_coder    <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
    llama3_json    {"name": ..., "parameters": {...}}; {...} and nothing else (Llama 3)
    mistral        [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], since v11 name[ARGS]{...}
    pythonic       [name(key="value"), ...] and nothing else (Llama 4, ToolACE)
    granite        <|tool_call|>[{"name": ..., "arguments": {...}}, ...] (Granite 3)
    phi4_mini_json functools[{"name": ..., "arguments": {...}}, ...]
    olmo3          <function_calls>name(key="value"), one on each line</function_calls>
    deepseek_v3    names with JSON in fences, between special tokens (DeepSeek-V3, R1-0528)
    openai         <|channel|>commentary to=functions.name<|message|>{...}<|call|> (gpt-oss)
    glm45          <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>

Sources are the models' chat templates, and what vLLM's parsers of these names take. In
`qwen3_coder` and `glm45` values are bare text; the tool's schema says what they are
(`bare_arguments`).

White space beside a call is no content; nor is, where nothing but calls can be written, the
beginning of one whose answer was cut before its arguments.

`parser` follows a script, `reading` and `json_call` are what scripts are made of, `notations` names
them. What a grammar of ours makes is read by `guaranteed`.
"""
