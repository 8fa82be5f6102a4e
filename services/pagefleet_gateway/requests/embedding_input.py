"""`POST /v1/embeddings` as a generation of no tokens: its prompts are computed, and that is all.

So whatever holds for completions holds here: queues, tenants, deadlines, failover. The embedding of
a text is what the model makes of its last token, so a tokenizer that ends texts with a token of its
own for this, as those of embedding models do, has to be let (`add_special_tokens`).
"""

from uuid import uuid4

from pagefleet.params import SamplingParams
from pagefleet_gateway.bodies.embedding_body import EmbeddingBody
from pagefleet_gateway.bodies.embedding_form import EmbeddingForm
from pagefleet_gateway.bodies.parsing import parse
from pagefleet_gateway.bodies.schema import CompletionBody, RequestBody, shared
from pagefleet_gateway.errors import bad_request
from pagefleet_gateway.model import ServedModel
from pagefleet_gateway.requests.decisions import answer_id, check_shared, submits_of, too_long
from pagefleet_gateway.requests.generation import Generation, Limits
from pagefleet_gateway.requests.prompts import completion_prompts, truncated


def understand_embedding(content: bytes, model: ServedModel, limits: Limits) -> Generation:
    """Decide what a body of `/v1/embeddings` asks for.

    Raises:
        ApiError: 400 that names the field, or 404 for another model.
    """
    parsed = parse(content, EmbeddingBody)
    asked, body = parsed.body, _as_completion(parsed.body)
    model = model.named(body.model)
    check_shared(body, limits)
    if not model.manifest.embeds:
        text = "This model's embeddings are more than the states of last tokens, all that is here."
        raise bad_request(text, "model", "unsupported")
    prompts = _prompts(body, model, limits)
    params = SamplingParams(
        max_tokens=0, seed=0, embedding=asked.dimensions or 0, adapter=model.adapter
    )
    run = uuid4().hex
    return Generation(
        kind="embedding",
        id=answer_id("embedding", body, limits),
        run=run,
        model=model.name,
        body=body,
        prompts=prompts,
        submits=submits_of(run, body, model, prompts, params, 1, limits),
        n=1,
        best_of=1,
        logprobs=None,
        echo=None,
        ignored=parsed.ignored,
        strict=limits.strict,
        created=limits.created,
        embedding=EmbeddingForm(asked.encoding_format == "base64", asked.dimensions),
    )


def _prompts(body: CompletionBody, model: ServedModel, limits: Limits) -> list[list[int]]:
    """The texts as ids, cut as the body asks; what they are read at stays."""
    whole, most = completion_prompts(body, model, "input"), limits.max_model_len
    prompts = truncated(body, whole, limits, 0)
    if (ending := model.tokenizer.ending) and body.truncation_side == "right":
        prompts = [
            cut[: -len(ending)] + ending if cut and text[-len(ending) :] == ending else cut
            for cut, text in zip(prompts, whole, strict=True)
        ]
    if not all(prompts):
        raise bad_request("input has no tokens.", "input")
    if (longest := max(map(len, prompts))) > most:
        raise too_long(limits, f"input has {longest}; truncate_prompt_tokens cuts it", "input")
    return prompts


def _as_completion(asked: EmbeddingBody) -> CompletionBody:
    return CompletionBody(
        **shared(asked, RequestBody),
        prompt=asked.input,
        max_tokens=0,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        truncation_side=asked.truncation_side,
        add_special_tokens=asked.add_special_tokens,
    )
