"""The settings of each service: one frozen dataclass per service, whose fields are its flags.

`command_line` reads them. A setting that operators also know by another name has that name as
`also`. `pagefleet serve` inherits the settings of all services and passes them on.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pagefleet.cell_key import CellKey
from pagefleet.lora_modules import parse_lora_modules
from pagefleet.params import MAX_CHOICES, MAX_LOGPROBS
from pagefleet.setting import (
    parse_names,
    parse_origins,
    parse_root_path,
    parse_secret,
    parse_size,
    parse_threads,
    setting,
)

DEFAULT_MODEL = "smollm2-135m-instruct"
AUTO = "auto"
"""The model's own."""


def runtime_folder() -> Path:
    """Where the sockets of this user's cell are by default."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base:
        return Path(base) / "pagefleet"
    return Path(tempfile.gettempdir()) / f"pagefleet-{os.getuid()}"


@dataclass(frozen=True, kw_only=True)
class CellSettings:
    """A cell of several machines."""

    cell_key: str | None = setting(
        None,
        "file with the key under which machines of a cell talk, the same on each; TCP between them "
        "needs it, and `pagefleet keygen` makes it",
    )

    def load_cell_key(self) -> CellKey | None:
        """The key in that file, if there is one.

        Raises:
            CellKeyError: the file is not usable.
        """
        return None if self.cell_key is None else CellKey.load(self.cell_key)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What gateways and workers must agree on."""

    model: str = setting(
        DEFAULT_MODEL,
        f"{DEFAULT_MODEL}, a hub id, a folder with safetensors, a .gguf file or a prepared folder",
    )
    tokenizer: str = setting(
        AUTO, "a folder with a tokenizer, or a tokenizer.json, in place of the model's own (auto)"
    )
    generation_config: str = setting(
        AUTO,
        "how to sample where a request does not say: as the model's authors recommend (auto), in a "
        "neutral way (none, or vllm), or as the generation_config.json of a folder says",
    )
    lora_modules: str | None = setting(
        None,
        "LoRA adapters to serve beside the model, as folders in PEFT's format under names of their "
        "own: sql=/adapters/sql,poet=/adapters/poet",
        convert=parse_lora_modules,
    )
    max_model_len: int | None = setting(
        None, "tokens a sequence may have; as many as the model knows by default", least=1
    )


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(CellSettings, ModelSettings):
    """The HTTP gateway."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on", least=0, most=65535)
    fd: int | None = setting(
        None,
        "a listening socket that was inherited, in place of host, port",
        least=0,
        most=(1 << 31) - 1,
    )
    served_model_name: str | None = setting(
        None, "the model's name in the API, or several: a,b", convert=parse_names
    )
    chat_template: str | None = setting(
        None, "a file with a jinja template for chats, in place of the model's own"
    )
    tool_call_parser: str | None = setting(
        None,
        "how the model writes tool calls",
        choices=(
            "hermes",
            "qwen",
            "granite4",
            "qwen3_coder",
            "qwen3_xml",
            "llama3_json",
            "mistral",
            "pythonic",
            "granite",
            "phi4_mini_json",
            "olmo3",
            "deepseek_v3",
            "glm45",
            "glm47",
            "openai",
        ),
    )
    reasoning_parser: str | None = setting(
        None,
        "how the model writes what it thinks",
        choices=(
            "qwen3",
            "glm45",
            "deepseek_v3",
            "deepseek_r1",
            "olmo3",
            "mistral",
            "granite",
            "openai_gptoss",
        ),
    )
    gateway_endpoint: str = setting(
        lambda: f"ipc://{runtime_folder()}/gateways.sock", "where the scheduler meets gateways"
    )
    api_key: str | None = setting(
        None, "key that clients must send; best set by its variable", convert=parse_secret
    )
    api_key_file: str | None = setting(
        None, "TOML or JSON file of hashed keys with limits (`pagefleet_gateway.tenants`)"
    )
    allowed_origins: str | None = setting(
        None, "origins whose pages may ask: https://a.org,https://b.org or *", convert=parse_origins
    )
    root_path: str = setting(
        "", "what a proxy leaves in front of paths, for example /llm", convert=parse_root_path
    )
    ssl_certfile: str | None = setting(None, "certificate chain in PEM; serves HTTPS")
    ssl_keyfile: str | None = setting(None, "its private key in PEM, if not in the same file")
    max_connections: int = setting(10_000, "connections that clients may have open", least=1)
    max_choices: int = setting(
        MAX_CHOICES, "choices (n, best_of, beams) that a prompt may have", least=1, most=MAX_CHOICES
    )
    max_logprobs: int = setting(
        MAX_LOGPROBS,
        "alternatives that a client may ask for at a position",
        least=0,
        most=MAX_LOGPROBS,
    )
    strict_openai: bool = setting(
        False, "report only finish reasons that the OpenAI API knows: length for a deadline"
    )
    metrics_folder: str | None = setting(
        None, "folder where gateways that share a port find each other's metrics, to add them up"
    )
    otlp_traces_endpoint: str | None = setting(
        None, "URL of an OpenTelemetry collector, for example http://localhost:4318/v1/traces"
    )
    log_prompts: bool = setting(False, "log prompts and answers too")
    seed: int | None = setting(
        None,
        "draw the seeds of requests that name none from this one: the same in the same order after "
        "every start; without it they cannot be foreseen",
        least=0,
    )
    max_body_bytes: int = setting(
        2 * 2**20, "largest request body, for example 2MiB", least=1024, convert=parse_size
    )
    resume_secret: str | None = setting(
        None,
        "gateways with the same one resume each other's streams; best set by its variable",
        convert=parse_secret,
    )
    shutdown_timeout: float = setting(30.0, "seconds that open streams have to end", least=0)


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(CellSettings):
    """The scheduler."""

    gateway_endpoint: str = setting(
        lambda: f"ipc://{runtime_folder()}/gateways.sock", "where the scheduler meets gateways"
    )
    worker_endpoint: str = setting(
        lambda: f"ipc://{runtime_folder()}/workers.sock", "where the scheduler meets workers"
    )
    listen_gateways: str | None = setting(
        None,
        "where it meets gateways on other machines too, for example tcp://0.0.0.0:5556; needs "
        "--cell-key",
    )
    listen_workers: str | None = setting(
        None, "likewise workers on other machines, for example tcp://0.0.0.0:5557"
    )
    scheduling_policy: str = setting(
        "priority",
        "which of a tenant's requests goes first: the one with the lowest priority, of which 30 s "
        "of waiting are worth a level, or the one that came first, whatever its priority (fcfs)",
        choices=("priority", "fcfs"),
    )
    enable_prefix_caching: bool = setting(True, "share the blocks of equal prefixes")
    lookahead: bool = setting(True, "order the next step before the last one's result is back")
    speculative_ngram: int | None = setting(
        None,
        "tokens at most to feed on trial where a sequence repeats itself and that pays; 0 is off; "
        "by default 15 if the worker computes a token to the same bits either way",
        least=0,
        most=64,
    )
    check: bool = setting(False, "check every invariant at every step, and send whole tables")
    max_num_queued_reqs: int = setting(10_000, "requests that may wait; more are refused", least=1)
    max_num_queued_tokens: int = setting(
        1 << 24, "tokens of prompts that may wait; more are refused", least=1
    )
    tap_endpoint: str | None = setting(
        None, "where `pagefleet tap` reads all messages, for example ipc:///tmp/pagefleet-tap"
    )
    worker_wait: float = setting(30.0, "seconds that requests wait for a worker", least=0)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(CellSettings, ModelSettings):
    """A worker."""

    worker_endpoint: str = setting(
        lambda: f"ipc://{runtime_folder()}/workers.sock", "where the scheduler meets workers"
    )
    engine: str = setting(
        "torch",
        "what computes; for tests there are two without weights: echo answers with a hash of what "
        "it reads, sim only takes the time of a model",
        choices=("torch", "echo", "sim"),
    )
    device: str = setting(
        "auto",
        "auto (a GPU where there is one), cpu, cuda or cuda:1; several, cuda:0,cuda:1, for "
        "--tensor-parallel-size, and pagefleet serve takes them for its workers in turn",
    )
    dtype: str = setting(
        "auto", "of weights and activations", choices=("auto", "float32", "bfloat16", "float16")
    )
    quantization: str = setting(
        "auto",
        "of matrices: auto takes a quantized checkpoint's 4 or 8 bits as they are, none widens "
        "them, int8 keeps all in 8 bits, gguf takes a .gguf file's own",
        choices=("auto", "none", "int8", "gguf"),
    )
    tensor_parallel_size: int = setting(
        1,
        "devices that share a model's tensors and compute as one worker",
        least=1,
        most=64,
    )
    threads: int | None = setting(
        None, "cores to compute with, at most; all by default", least=1, convert=parse_threads
    )
    block_size: int = setting(
        16, "tokens a block holds, on a CPU a multiple of 16", least=1, most=256
    )
    kv_cache_memory: int | None = setting(
        None, "size of the KV pool, for example 2GiB; 0.5GiB on a CPU", convert=parse_size
    )
    gpu_memory_utilization: float = setting(
        0.9, "share of a GPU's memory to use", least=0.05, most=1.0
    )
    num_blocks: int | None = setting(
        None, "blocks of the KV pool, whatever memory they take", least=1
    )
    swap_space: int | None = setting(
        None,
        "host memory for blocks that leave the pool, for example 1GiB; none by default",
        convert=parse_size,
    )
    max_num_seqs: int = setting(256, "sequences that run at once", least=1)
    kv_cache_dtype: str = setting(
        "auto",
        "type of keys and values: the weights', or fp8 (e4m3, 8 bits)",
        choices=("auto", "fp8"),
    )
    batch_invariant: bool = setting(
        False, "on a GPU too, compute a row to the same bits in every batch; a CPU always does"
    )
    enforce_eager: bool = setting(
        False, "launch every kernel of a decode step on a GPU by itself, not as one CUDA graph"
    )
    max_num_batched_tokens: int | None = setting(
        None, "tokens that one step may hold; 2048 on a GPU, 1024 elsewhere", least=1
    )
    step_seconds: float = setting(0.0, "seconds that a step of --engine echo takes", least=0)


@dataclass(frozen=True, kw_only=True)
class ServeSettings(GatewaySettings, SchedulerSettings, WorkerSettings):
    """All services at once, on one machine."""

    workers: int = setting(
        1,
        "worker processes; they share the cores",
        least=1,
        most=64,
        also="data_parallel_size",
    )
    gateways: int = setting(1, "gateway processes; they share the port", least=1, most=64)
    hang_timeout: float = setting(
        5.0, "seconds without a sign of life after which a process is replaced; 0 is never", least=0
    )
